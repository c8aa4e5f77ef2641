"""The models of one rank: the commands that rank 0 publishes, what executes them on each rank, and its answers.

Each rank loads and frees models on a background thread, in the order of the commands, while its main thread computes
steps of other models.
"""
from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

from .host_cache import pack_held
from .native import DeviceLost
from .steps import DEPTH, Stepping, Steps

if TYPE_CHECKING:
    from .runner import ModelInfo, ModelRunner
    from .tower import TowerRunner

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0     # that close() waits for a load; less than a supervisor waits for the process


class Command(IntEnum):
    """Kinds of messages that rank 0 publishes."""

    CALL = 1        # JSON [method of RankModels, its arguments by name]
    POLL = 2        # each rank replies with its Answer to the last call that loads or allocates
    STEP = 3        # uint16 length of the name, name, plan
    CLOSE = 4
    PROFILE = 5     # name of a model: each rank replies with what its experts' ops cost (RankModels.profile_of_experts)


def pack_step(name: str, plan: bytes) -> bytes:
    """The payload of a STEP command."""
    encoded = name.encode()
    return struct.pack("<H", len(encoded)) + encoded + plan


def unpack_step(payload: bytes) -> tuple[str, bytes]:
    """The model's name and the plan in the payload of a STEP command."""
    (length,) = struct.unpack_from("<H", payload)
    return payload[2:2 + length].decode(), payload[2 + length:]


@dataclass
class Answer:
    """One rank's report on the load or allocation that it started last.

    value, host_spans: numbers of spans; value after a warm-up: steps that are left of it. digest: of the loaded weights
    or adapter. address: of the rank's device, for other ranks. held: after an allocation, the spans in the rank's host
    cache. pending: it is not finished. lost: the rank's process can no longer use its device (DeviceLost).
    """

    value: int = 0
    host_spans: int = 0
    held: str = ""
    digest: str = ""
    address: str = ""
    results: str = ""       # digest of its kernels' results, where they may differ: on several hosts or GPUs
    host: str = ""          # this rank's host, if there are several
    files: dict[str, str] = field(default_factory=dict)     # from one rank of each host: digests of the model's files
    pending: bool = False
    error: str = ""         # class name of the exception that is raised in rank 0
    status: int = 0
    message: str = ""
    lost: bool = False

    @classmethod
    def of_exception(cls, error: BaseException) -> Answer:
        """The report of a load that failed with `error`."""
        if isinstance(error, AllSparkError):
            return cls(error="AllSparkError", status=int(error.status), message=error.message)
        if isinstance(error, (ValueError, TypeError)):
            return cls(error=type(error).__name__, message=str(error))
        if isinstance(error, MemoryError):
            status = AsStatus.ALLSPARK_MEMORY_ERROR
        elif isinstance(error, OSError):
            status = AsStatus.ALLSPARK_IO_ERROR
        else:
            status = AsStatus.ALLSPARK_RUNTIME_ERROR
        return cls(error="AllSparkError", status=int(status), message=str(error) or type(error).__name__,
                   lost=isinstance(error, DeviceLost))

    def exception(self, message: str) -> Exception:
        """An exception of the reported class and status, with this message."""
        if self.error in ("ValueError", "TypeError"):
            return (ValueError if self.error == "ValueError" else TypeError)(message)
        return AllSparkError(AsStatus(self.status), message)

    def encode(self) -> bytes:
        """The report as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Answer:
        """The report that `encode` wrote."""
        return cls(**json.loads(payload))


def raise_failures(answers: list[Answer]) -> None:
    """Raise one exception for all failed answers, naming their ranks unless every rank reports the same error."""
    failed = [(rank, a) for rank, a in enumerate(answers) if a.error]
    if not failed:
        return
    first = failed[0][1]
    if len(failed) == len(answers) and len({a.message for _, a in failed}) == 1:
        raise first.exception(first.message)
    raise first.exception("; ".join(f"rank {rank}: {a.message}" for rank, a in failed))


def tower_name(model: str) -> str:
    """The name under which ranks run the vision tower of a model. No model has it: their names have no NUL."""
    return f"{model}\0vision"


class LoadCancelled(RuntimeError):
    """The model was unloaded while it was loading."""


class StepError(Exception):
    """A step has failed; the text names its model, the cause says why."""


class RankModels:
    """One rank's models, with a method for each command.

    progress(name, part, what): called while weights load, on the loading thread, and while the model warms up; part:
    0…1; what: "loaded" or "warmed up". host: this rank's host, if the group has several; leads: this is its host's
    first rank.
    """

    def __init__(self, rank: int = 0, world: int = 1, shared_memory: Any = None, cpus: list[int] | None = None,
                 host: str = "", leads: bool = False):
        self._host, self._leads = host, leads
        self.rank, self.world, self.shared_memory, self.cpus = rank, world, shared_memory, cpus
        self.runners: dict[str, ModelRunner] = {}
        self._towers: dict[str, TowerRunner] = {}   # by tower_name()
        self.info: ModelInfo | None = None      # of the last loaded model
        self.progress: Callable[[str, float, str], None] = lambda name, part, what: None
        self.part = 0.0     # how much of the last load's weights is loaded, 0…1
        self.step_began = 0.0       # on the monotonic clock; 0.0 between steps; read by the heartbeat
        self._affinity = os.sched_getaffinity(0)
        self._background: threading.Thread | None = None    # the last background thread
        self._loading = ""
        self._phase: Future[Answer] = Future()     # of the current load
        self._cancelled = threading.Event()
        self._queue = Steps()       # on a rank other than 0
        self._queued: deque[tuple[str, float]] = deque()    # their models, and when they were queued
        self._ended = 0.0           # when the last one ended
        self.steps, self.step_seconds = 0, 0.0
        self._expert_counts = Counter[str]()    # of models that were unloaded
        self._counting = threading.Lock()       # a model's counts are in one of both: a counter never falls
        self.placement: dict = {}   # where this process's memory was after the last load
        self.served = False         # whether a step was computed; on_served() is called after the first
        self.on_served: Callable[[], None] = lambda: None

    def start_load(self, config: dict[str, Any]) -> None:
        """First phase of a load: weights. The answer has the number of spans that fit on this rank.

        config: the fields of an AsModelConfig.
        """
        model = AsModelConfig.from_dict(config)
        self._loading, self._cancelled = model.model_name, threading.Event()
        cancelled = self._cancelled
        self._phase = self._in_background(lambda: self._load(model, cancelled))

    def start_allocate(self, name: str, num_spans: int, host_spans: int, digests: list[str],
                       addresses: list[str]) -> None:
        """Second phase of a load: the KV cache and the host cache, of equal sizes on every rank.

        digests, addresses: of every rank's weights and device.
        """
        cancelled = self._cancelled
        self._phase = self._in_background(
            lambda: self._allocate(name, num_spans, host_spans, digests, addresses, cancelled))

    def warm_up(self, name: str, count: int) -> None:
        """Third phase of a load on GPUs, in several calls, each between steps, as it runs steps itself: kernels of
        several ranks wait for each other. The answer has the number of steps that are left.
        """
        self._phase = Future()
        self.step_began = time.monotonic()
        try:
            done, total = self.runners[name].warm_up(count)
            self.progress(name, done / max(total, 1), "warmed up")
            self._phase.set_result(Answer(value=total - done))
        except BaseException as error:      # as in the background: rank 0 reports it
            self._phase.set_exception(error)
        finally:
            self.step_began = 0.0

    def start_load_adapter(self, name: str, index: int, directory: str) -> None:
        """Load an adapter, in one phase. The answer has its digest."""
        self._phase = self._in_background(lambda: self._load_adapter(name, index, directory))

    def unload_adapter(self, name: str, index: int) -> None:
        """Free an adapter. Does nothing if this rank does not hold it."""
        if (runner := self.runners.get(name)) is not None:
            runner.unload_adapter(index)

    def start_move_memory(self, name: str, loaded: bool) -> None:
        """Release a model's device memory, or load it again, in one phase."""
        self._phase = self._in_background(lambda: self._move_memory(name, loaded))

    def answer(self) -> Answer:
        """The report on the phase that was started last."""
        if not self._phase.done():
            return Answer(pending=True)
        error = self._phase.exception()
        if error is None:
            return self._phase.result()
        logger.debug("rank %d", self.rank, exc_info=error)
        return Answer.of_exception(error)

    def stepping(self, name: str) -> Stepping:
        """What runs the steps of a model, or of its vision tower. KeyError if there is none of this name."""
        return self._towers[name] if name in self._towers else self.runners[name]

    def step(self, name: str, plan: bytes) -> None:
        """Compute a step on a rank other than 0. Rank 0 computes steps through `Group`.

        A GPU's step is queued behind the running one, so this returns once all earlier steps have ended. Raises
        StepError.
        """
        try:
            runner = self.stepping(name)
        except KeyError as error:
            raise StepError(f"step of {name!r}") from error
        self._queue.submit(runner, name, plan, in_background=runner.gpu is not None)
        self._queued.append((name, time.monotonic()))
        self.step_began = self.step_began or self._queued[0][1]
        while self._queued and (len(self._queued) >= DEPTH or runner.gpu is None):
            self._collect()

    @property
    def computes(self) -> bool:
        """Whether this rank has queued steps that were not found to have ended."""
        return bool(self._queued)

    def collect_steps(self, wait: bool) -> None:
        """Take note of queued steps that have ended. wait: wait for all of them. Raises StepError."""
        while self._queued and (wait or self._queue.idle):
            self._collect()

    def _collect(self) -> None:
        name, queued = self._queued.popleft()
        try:
            self._queue.collect()
        except Exception as error:
            raise StepError(f"step of {name!r}: {error}") from error
        finally:
            began, self._ended = max(queued, self._ended), time.monotonic()
            self.step_began = self._ended if self._queued else 0.0
        self.note_step(self._ended - began)

    @property
    def numbers(self) -> dict:
        """This rank's figures for the supervisor. Any thread may call it."""
        found = {"steps": self.steps, "step_seconds": round(self.step_seconds, 6), **self.placement}
        with self._counting:
            counts = Counter(self._expert_counts)
            for runner in list(self.runners.values()):
                counts.update(runner.expert_counts)
        waited = counts.pop("expert_wait_seconds", 0)   # a GPU's, which the shared memory does not know of
        if self.shared_memory is not None:
            found |= {"exchange_seconds": round(self.shared_memory.exchange_seconds + waited, 6),
                      "wait_seconds": round(self.shared_memory.wait_seconds + waited, 6)}
        if any(counts.values()):
            found |= counts
        gpus = [runner.gpu for runner in list(self.runners.values()) if runner.gpu is not None]
        if gpus:
            from .device import gpu_memory
            found["gpu"] = gpu_memory(gpus[0])
        return found

    def profile_of_experts(self, name: str) -> bytes:
        """What a model's ops cost on this rank of experts: a JSON array of the fields of OpProfile; "[]" on others."""
        runner = self.runners.get(name)
        return json.dumps([asdict(op) for op in runner.profile_of_experts()] if runner is not None else []).encode()

    def note_step(self, seconds: float) -> None:
        """Count a step of this duration, and report the first one."""
        self.steps, self.step_seconds = self.steps + 1, self.step_seconds + seconds
        if not self.served:
            self.served = True
            self.on_served()

    def unload(self, name: str) -> None:
        """Free a model. Does nothing if this rank does not hold it: its load may have failed here."""
        if name == self._loading:
            self._cancelled.set()
        self._in_background(lambda: self._unload(name))

    def close(self) -> None:
        """Free everything after the background thread has ended.

        If that takes too long, nothing is freed until the process ends: a read from a file system that does not answer
        cannot be cancelled.
        """
        self._cancelled.set()
        if self._background is not None:
            self._background.join(CLOSE_SECONDS)
            if self._background.is_alive():
                logger.error("rank %d: a load has not ended within %g s after it was cancelled: check that the file "
                             "system of the model answers", self.rank, CLOSE_SECONDS)
                return
        for name in list(self.runners):
            self._unload(name)

    def _in_background(self, work: Callable[[], Answer | None]) -> Future:
        """Run `work` on a new thread after all earlier calls' work."""
        before = self._background
        result: Future[Any] = Future()

        def run() -> None:
            if before is not None:
                before.join()
            try:
                result.set_result(work())
            except BaseException as error:      # rank 0 reports it; this rank continues
                result.set_exception(error)

        # A daemon thread: the engine's close waits for it, not the interpreter's exit.
        self._background = threading.Thread(target=run, name="allspark-loader", daemon=True)
        self._background.start()
        return result

    def _load(self, config: AsModelConfig, cancelled: threading.Event) -> Answer:
        # These modules import the native library, which the `allspark` command does not need.
        from allspark_server.weights.copies import file_digests

        from .digest import results_digest
        from .runner import ModelRunner
        name = config.model_name

        def progress(done: int, total: int) -> None:
            if cancelled.is_set():
                raise LoadCancelled(f"the load of model {name!r} was cancelled")
            self.part = done / max(total, 1)
            self.progress(name, self.part, "loaded")

        os.sched_setaffinity(0, self._affinity)     # steps have pinned the parent thread to one CPU
        progress(0, 1)
        runner = ModelRunner(config, rank=self.rank, world=self.world, shared_memory=self.shared_memory,
                             cpus=self.cpus)
        runner.progress = progress
        try:
            spans = runner.load()
        except BaseException:
            runner.close()
            raise
        self.progress(name, 1.0, "loaded")
        self.runners[name] = runner
        answer = Answer(value=spans, host_spans=runner.host_spans, digest=runner.digest, address=runner.address,
                        host=self._host)
        if self._host or runner.role.mixed or (config.on_gpus and self.world > 1):
            answer.results = results_digest(runner.gpu, runner.role.experts)
        if self._host and self._leads:
            answer.files = file_digests(config)
        return answer

    def _allocate(self, name: str, num_spans: int, host_spans: int, digests: list[str], addresses: list[str],
                  cancelled: threading.Event) -> Answer:
        runner = self.runners[name]
        runner.connect(addresses)   # also if the load was cancelled, as other ranks do
        if cancelled.is_set():
            raise LoadCancelled(f"the load of model {name!r} was cancelled")
        self.info = runner.allocate_cache(num_spans, digests, host_spans)
        if runner.tower is not None:
            self._towers[tower_name(name)] = runner.tower
        self.placement = runner.placement
        return Answer(value=num_spans, held=pack_held(runner.held))

    def _load_adapter(self, name: str, index: int, directory: str) -> Answer:
        os.sched_setaffinity(0, self._affinity)
        if (runner := self.runners.get(name)) is None:
            raise LoadCancelled(f"model {name!r} was released")
        return Answer(digest=runner.load_adapter(index, directory))

    def _move_memory(self, name: str, loaded: bool) -> Answer:
        os.sched_setaffinity(0, self._affinity)
        if (runner := self.runners.get(name)) is None:
            raise LoadCancelled(f"model {name!r} was released")
        runner.move_memory(loaded)
        return Answer()

    def _unload(self, name: str) -> None:
        self._towers.pop(tower_name(name), None)
        with self._counting:
            runner = self.runners.pop(name, None)
            if runner is not None:
                self._expert_counts.update(runner.expert_counts)
        if runner is not None:
            runner.close()
