"""Groups: the processes that compute a step together, as the engine (on rank 0) sees them.

`LocalGroup` is this process alone. `SharedMemoryGroup` is rank 0 of several processes: it publishes every call
in shared memory, does its own part, and gathers the others' answers. What every rank does with a call is
`RankModels`; the loop of ranks > 0 is in worker.py.

Models are loaded and freed on a thread of each rank, in the order of the commands, while the ranks' main threads go on
with the steps of other models.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

from .host_cache import held_by_all, pack_held
from .steps import DEPTH, Steps

if TYPE_CHECKING:
    from .profile import Profile
    from .runner import ModelInfo, ModelRunner

logger = logging.getLogger(__name__)


class Group(Protocol):
    """Rank 0's view of a group. Every call comes from the engine's thread. `collect` waits for a step; the others wait
    at most for the steps that were submitted before.
    """

    size: int

    @property
    def depth(self) -> int:
        """Steps that are worth having submitted and not collected: 1 where the engine's thread and the output stage
        would take turns with the computing threads, as no processor is left for them.
        """

    def start_load(self, config: AsModelConfig) -> None:
        """Begin to load a model on every rank, beside the steps of others; one at a time."""

    def poll_load(self) -> ModelInfo | None:
        """How the load stands: None while it is under way. Raises what a rank raised (naming the rank); the caller then
        unloads the model, and the group goes on without it.
        """

    def masks(self, name: str) -> Any:
        """Rank 0's native Masks of a loaded model; None if it has none. Its rows are for `DEPTH` steps in turn."""

    def submit(self, name: str, plan: bytes) -> None:
        """Queue a step plan. At most `depth` steps, of all models, may be submitted and not collected."""

    def collect(self) -> Any:
        """Rank 0's StepResult of the oldest step that was submitted. Raises what the step raised; ValueError: every
        rank has refused the plan, and nothing was computed.
        """

    def held_spans(self) -> dict[bytes, int]:
        """What the host cache of the model that was loaded last holds from before: spans by their keys."""

    def unload(self, name: str) -> None:
        """Begin to free a model on every rank; its load, if that is under way, is given up."""

    def start_load_adapter(self, name: str, index: int, directory: str) -> None:
        """Begin to load a LoRA adapter of a model on every rank, beside steps; one load at a time, of whatever. No step
        may name the index before it is loaded.
        """

    def poll_load_adapter(self) -> str | None:
        """How that stands: None while it is under way, then its digest. Raises what a rank raised; the caller then
        unloads it.
        """

    def unload_adapter(self, name: str, index: int) -> None:
        """Free an adapter on every rank, after the steps that were submitted; nothing happens where there is none."""

    def start_move_memory(self, name: str, loaded: bool) -> None:
        """Begin to give the device memory of a model back on every rank, or to take it again; one load at a time, of
        whatever. No step of the model may be submitted before it is back.
        """

    def poll_move_memory(self) -> bool:
        """Whether that is done. Raises what a rank raised."""

    def measure_roofline(self, name: str) -> bool:
        """A few milliseconds of measuring what profile() compares with; whether it is all measured."""

    def profile(self, name: str) -> Profile:
        """What the ops cost on rank 0; see runtime/profile.py."""

    def fail(self, message: str) -> None:
        """The group cannot go on: tells whoever keeps it running, which ends the process. Returns where nobody does."""

    def close(self) -> None:
        """Free every model and let the other ranks go. Idempotent."""


class Command(IntEnum):
    """Kinds of messages that rank 0 publishes."""

    LOAD = 1        # JSON of the AsModelConfig
    ALLOCATE = 2    # JSON {"name", "num_spans", "host_spans", "digests", "addresses"}
    POLL = 3        # answered: how the last LOAD or ALLOCATE stands
    STEP = 4        # uint16 length of the name, name, plan
    UNLOAD = 5      # name
    CLOSE = 6
    LOAD_ADAPTER = 7    # JSON {"name", "index", "directory"}; POLL tells how it stands
    UNLOAD_ADAPTER = 8  # JSON {"name", "index"}
    MOVE_MEMORY = 9     # JSON {"name", "loaded"}; POLL tells how it stands


def pack_step(name: str, plan: bytes) -> bytes:
    encoded = name.encode()
    return struct.pack("<H", len(encoded)) + encoded + plan


def unpack_step(payload: bytes) -> tuple[str, bytes]:
    (length,) = struct.unpack_from("<H", payload)
    return payload[2:2 + length].decode(), payload[2 + length:]


@dataclass
class Answer:
    """What one rank reports of a load or an allocation: numbers of spans and (of a load) the digest of its weights or
    of an adapter, and its device's address for the others, (of an allocation) what its host cache holds, that it is
    under way, or what error prevented it.
    """

    value: int = 0
    host_spans: int = 0
    held: str = ""
    digest: str = ""
    address: str = ""
    results: str = ""       # what its kernels compute, where that may differ: on several hosts, or GPUs
    host: str = ""          # where there are several: this rank's
    files: dict[str, str] = field(default_factory=dict)     # and, from one rank of each, digests of the model's files
    pending: bool = False
    error: str = ""         # name of the exception's class that the engine's caller is to see
    status: int = 0
    message: str = ""

    @classmethod
    def of_exception(cls, error: BaseException) -> Answer:
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
        return cls(error="AllSparkError", status=int(status), message=str(error) or type(error).__name__)

    def exception(self, message: str) -> Exception:
        if self.error in ("ValueError", "TypeError"):
            return (ValueError if self.error == "ValueError" else TypeError)(message)
        return AllSparkError(AsStatus(self.status), message)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Answer:
        return cls(**json.loads(payload))


def raise_failures(answers: list[Answer]) -> None:
    """Raise one exception for what failed among the ranks' answers, naming the ranks unless all say the same."""
    failed = [(rank, a) for rank, a in enumerate(answers) if a.error]
    if not failed:
        return
    first = failed[0][1]
    if len(failed) == len(answers) and len({a.message for _, a in failed}) == 1:
        raise first.exception(first.message)
    raise first.exception("; ".join(f"rank {rank}: {a.message}" for rank, a in failed))


class LoadCancelled(RuntimeError):
    """Nobody wants the model any more that is being loaded."""


class RankModels:
    """One rank's models, and what it does with each command. progress(name, part): called while weights are loaded, on
    the loading thread. host: this rank's, where the group has several; leads: it is the first of its host.
    """

    def __init__(self, rank: int = 0, world: int = 1, shared_memory: Any = None, cpus: list[int] | None = None,
                 host: str = "", leads: bool = False):
        self._host, self._leads = host, leads
        self.rank, self.world, self.shared_memory, self.cpus = rank, world, shared_memory, cpus
        self.runners: dict[str, ModelRunner] = {}
        self.info: ModelInfo | None = None      # of the model that was loaded last
        self.progress: Callable[[str, float], None] = lambda name, part: None
        self.step_began = 0.0       # on the monotonic clock; 0.0 between steps. The heartbeat reads it
        self._affinity = os.sched_getaffinity(0)
        self._background: threading.Thread | None = None    # the last one
        self._loading = ""
        self._phase: Future[Answer] = Future()     # of the load under way
        self._cancelled = threading.Event()
        self.steps, self.step_seconds = 0, 0.0
        self.placement: dict = {}   # where this process's memory was found to be after the last load
        self.served = False         # a step was computed; on_served() is called after the first
        self.on_served: Callable[[], None] = lambda: None

    def start_load(self, config: AsModelConfig) -> None:
        """First phase: weights. It results in how many spans this rank could hold."""
        self._loading, self._cancelled = config.model_name, threading.Event()
        cancelled = self._cancelled
        self._phase = self._in_background(lambda: self._load(config, cancelled))

    def start_allocate(self, name: str, num_spans: int, host_spans: int, digests: list[str],
                       addresses: list[str]) -> None:
        """Second phase: the KV cache and its host cache, of the same sizes on every rank. digests: of every rank's
        weights; addresses: of their devices.
        """
        cancelled = self._cancelled
        self._phase = self._in_background(
            lambda: self._allocate(name, num_spans, host_spans, digests, addresses, cancelled))

    def start_load_adapter(self, name: str, index: int, directory: str) -> None:
        """A load of an adapter, in one phase. It results in the adapter's digest."""
        self._phase = self._in_background(lambda: self._load_adapter(name, index, directory))

    def unload_adapter(self, name: str, index: int) -> None:
        """Free an adapter; nothing happens if this rank does not hold it."""
        if (runner := self.runners.get(name)) is not None:
            runner.unload_adapter(index)

    def start_move_memory(self, name: str, loaded: bool) -> None:
        """Give the device memory of a model back, or take it again, in one phase."""
        self._phase = self._in_background(lambda: self._move_memory(name, loaded))

    def answer(self) -> Answer:
        """How the phase that was begun last stands."""
        if not self._phase.done():
            return Answer(pending=True)
        error = self._phase.exception()
        if error is None:
            return self._phase.result()
        logger.debug("rank %d", self.rank, exc_info=error)
        return Answer.of_exception(error)

    def step(self, name: str, plan: bytes) -> None:
        """Compute a step on a rank other than 0; rank 0's go through `Steps`."""
        self.step_began = began = time.monotonic()
        try:
            self.runners[name].step(plan)
        finally:
            self.step_began = 0.0
        self.note_step(time.monotonic() - began)

    @property
    def numbers(self) -> dict:
        """What the supervisor is told of this rank. Any thread."""
        found = {"steps": self.steps, "step_seconds": round(self.step_seconds, 6), **self.placement}
        if self.shared_memory is not None:
            found |= {"exchange_seconds": round(self.shared_memory.exchange_seconds, 6),
                      "wait_seconds": round(self.shared_memory.wait_seconds, 6)}
        gpus = [runner.gpu for runner in list(self.runners.values()) if runner.gpu is not None]
        if gpus:
            from .device import gpu_memory
            found["gpu"] = gpu_memory(gpus[0])
        return found

    def note_step(self, seconds: float) -> None:
        """A step was computed in so long: tells of the first."""
        self.steps, self.step_seconds = self.steps + 1, self.step_seconds + seconds
        if not self.served:
            self.served = True
            self.on_served()

    def unload(self, name: str) -> None:
        """Free a model; nothing happens if this rank does not hold it (its load may have failed here)."""
        if name == self._loading:
            self._cancelled.set()
        self._in_background(lambda: self._unload(name))

    def close(self) -> None:
        """Free everything, once the loading thread has let go of what it was doing."""
        self._cancelled.set()
        if self._background is not None:
            self._background.join()
        for name in list(self.runners):
            self._unload(name)

    def _in_background(self, work: Callable[[], Answer | None]) -> Future:
        """Do work on a thread of its own, after all that was given here before."""
        before = self._background
        result: Future[Any] = Future()

        def run() -> None:
            if before is not None:
                before.join()
            try:
                result.set_result(work())
            except BaseException as error:      # whatever it is, rank 0 reports it; this rank goes on
                result.set_exception(error)

        # A daemon: at the interpreter's end, it is the engine's close that waits for it.
        self._background = threading.Thread(target=run, name="allspark-loader", daemon=True)
        self._background.start()
        return result

    def _load(self, config: AsModelConfig, cancelled: threading.Event) -> Answer:
        # These import the native module, which `allspark` itself does not need.
        from allspark_server.weights.copies import file_digests

        from .digest import results_digest
        from .runner import ModelRunner
        name = config.model_name

        def progress(done: int, total: int) -> None:
            if cancelled.is_set():
                raise LoadCancelled(f"the load of model {name!r} was given up")
            self.progress(name, done / max(total, 1))

        os.sched_setaffinity(0, self._affinity)     # not the one CPU that steps have pinned the thread's parent to
        progress(0, 1)
        runner = ModelRunner(config, rank=self.rank, world=self.world, shared_memory=self.shared_memory,
                             cpus=self.cpus)
        runner.progress = progress
        try:
            spans = runner.load()
        except BaseException:
            runner.close()
            raise
        self.progress(name, 1.0)
        self.runners[name] = runner
        answer = Answer(value=spans, host_spans=runner.host_spans, digest=runner.digest, address=runner.address,
                        host=self._host)
        if self._host or (config.on_gpus and self.world > 1):
            answer.results = results_digest(runner.gpu)
        if self._host and self._leads:
            answer.files = file_digests(config)
        return answer

    def _allocate(self, name: str, num_spans: int, host_spans: int, digests: list[str], addresses: list[str],
                  cancelled: threading.Event) -> Answer:
        if cancelled.is_set():
            raise LoadCancelled(f"the load of model {name!r} was given up")
        runner = self.runners[name]
        self.info = runner.allocate_cache(num_spans, digests, host_spans, addresses)
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
        runner = self.runners.pop(name, None)
        if runner is not None:
            runner.close()


class LocalGroup:
    """The group of one process, with no MPI. cpus: CPUs to pin the compute threads to; None: not pinned.

    on_failure(message): called when a step failed, and the cache is no longer what the scheduler thinks it is: the
    caller ends the process, so that it is started again. Without it the engine goes on without the model.
    """

    size = 1

    def __init__(self, cpus: list[int] | None = None, on_failure: Callable[[str], None] | None = None):
        self.models = RankModels(cpus=cpus)
        self._on_failure = on_failure
        self._config = AsModelConfig()   # of the load under way
        self._allocating = False
        self._held: dict[bytes, int] = {}
        self._results: list[str] = []       # of every rank
        self._steps = Steps()
        # Of the steps that were not collected: their models, and when they were submitted.
        self._submitted: deque[tuple[str, float]] = deque()
        self._ended = 0.0       # when the step that was collected last had ended
        self._processors = len(os.sched_getaffinity(0))

    @property
    def depth(self) -> int:
        threads = max((runner.threads for runner in list(self.models.runners.values())), default=1)
        return DEPTH if threads < self._processors else 1

    def start_load(self, config: AsModelConfig) -> None:
        self._config, self._allocating = config, False
        self._tell(Command.LOAD, json.dumps(config.to_dict()).encode())
        self.models.start_load(config)

    def poll_load(self) -> ModelInfo | None:
        answers = self._poll_answers()
        if answers is None:
            return None
        if self._allocating:
            self._held = held_by_all(answer.held for answer in answers)
            info = self.models.info
            assert info is not None  # every rank has answered
            return self._with_results(info)
        self._compare_hosts(answers)
        name, spans = self._config.model_name, min(answer.value for answer in answers)
        host_spans, digests = min(answer.host_spans for answer in answers), [answer.digest for answer in answers]
        request: dict[str, Any] = {"name": name, "num_spans": spans, "host_spans": host_spans, "digests": digests,
                   "addresses": [answer.address for answer in answers]}
        self._tell(Command.ALLOCATE, json.dumps(request).encode())
        self.models.start_allocate(**request)
        self._allocating = True
        return None

    def _poll_answers(self) -> list[Answer] | None:
        """Every rank's, once all are done; None: not yet. Raises what failed."""
        own = self.models.answer()
        answers = [own] if own.pending else self._ask(own)
        if any(answer.pending for answer in answers):
            return None
        raise_failures(answers)
        return answers

    def _compare_hosts(self, answers: list[Answer]) -> None:
        """Raises AllSparkError if they have loaded different checkpoints."""
        hosts = {answer.host: answer.files for answer in answers if answer.files}
        if hosts:
            from allspark_server.weights.copies import check_copies
            check_copies(self._config.model_name, hosts)
        self._results = [answer.results for answer in answers]

    def _with_results(self, info: ModelInfo) -> ModelInfo:
        """Hosts, or GPUs, of which some compute other bits than this one: which ranks they have makes the model another
        one.
        """
        if len(set(self._results)) < 2:
            return info
        both = hashlib.blake2b(repr((info.model_hash, self._results)).encode(), digest_size=16)
        return replace(info, model_hash=both.hexdigest())

    def masks(self, name: str) -> Any:
        return self.models.runners[name].masks

    def held_spans(self) -> dict[bytes, int]:
        return self._held

    def submit(self, name: str, plan: bytes) -> None:
        self._steps.submit(self.models.runners[name], name, plan, beside=self.depth > 1)
        self._submitted.append((name, time.monotonic()))

    def collect(self) -> Any:
        name, submitted = self._submitted.popleft() if self._submitted else ("", 0.0)
        try:
            result = self._steps.collect()
        except ValueError:
            raise
        except Exception as error:
            self.fail(f"rank 0: a step of model {name!r}: {error}")
            raise
        began, self._ended = max(submitted, self._ended), time.monotonic()
        self.models.note_step(self._ended - began)
        return result

    def unload(self, name: str) -> None:
        self._tell(Command.UNLOAD, name.encode())
        self.models.unload(name)

    def start_load_adapter(self, name: str, index: int, directory: str) -> None:
        request: dict[str, Any] = {"name": name, "index": index, "directory": directory}
        self._tell(Command.LOAD_ADAPTER, json.dumps(request).encode())
        self.models.start_load_adapter(**request)

    def poll_load_adapter(self) -> str | None:
        answers = self._poll_answers()
        if answers is None:
            return None
        if len({answer.digest for answer in answers}) > 1:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "the ranks have read different adapters: the directory "
                                                               "must hold the same files on every host")
        return answers[0].digest

    def unload_adapter(self, name: str, index: int) -> None:
        self._tell(Command.UNLOAD_ADAPTER, json.dumps({"name": name, "index": index}).encode())
        self.models.unload_adapter(name, index)

    def start_move_memory(self, name: str, loaded: bool) -> None:
        request: dict[str, Any] = {"name": name, "loaded": loaded}
        self._tell(Command.MOVE_MEMORY, json.dumps(request).encode())
        self.models.start_move_memory(**request)

    def poll_move_memory(self) -> bool:
        return self._poll_answers() is not None

    def measure_roofline(self, name: str) -> bool:
        self._steps.drain()
        return self.models.runners[name].measure_roofline()

    def profile(self, name: str) -> Profile:
        self._steps.drain()
        return self.models.runners[name].profile()

    def fail(self, message: str) -> None:
        if self._on_failure is not None:
            self._on_failure(message)

    def close(self) -> None:
        self._steps.drain()
        self.models.close()

    def _tell(self, command: Command, payload: bytes) -> None:
        """Pass a command other than a step on to the other ranks, after the steps that were submitted."""
        self._steps.drain()

    def _ask(self, own: Answer) -> list[Answer]:
        """Every rank's answer, this one's first."""
        return [own]


class SharedMemoryGroup(LocalGroup):
    """Rank 0 of a group whose ranks share a native.SharedMemory, on one host or on several.

    on_failure(message): also called when any other rank failed. The group cannot go on then; the caller ends the
    process.
    """

    def __init__(self, shared_memory: Any, size: int, cpus: list[int] | None, on_failure: Callable[[str], None],
                 host: str = ""):
        """host: this one's name, where there are several."""
        super().__init__(cpus, on_failure)
        self.size = size
        self._shared_memory = shared_memory
        self.models = RankModels(0, size, shared_memory, cpus, host, leads=True)
        self._steps = Steps(shared_memory)
        self._closed = False

    def submit(self, name: str, plan: bytes) -> None:
        self._steps.submit(self.models.runners[name], name, plan, int(Command.STEP), pack_step(name, b""),
                           self.depth > 1)
        self._submitted.append((name, time.monotonic()))

    def fail(self, message: str) -> None:
        message = self._shared_memory.aborted() or message
        self._shared_memory.abort(message)
        super().fail(message)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._tell(Command.CLOSE, b"")
        super().close()

    def _tell(self, command: Command, payload: bytes) -> None:
        super()._tell(command, payload)
        try:
            self._shared_memory.publish(int(command), payload)
        except RuntimeError as error:
            self.fail(f"rank 0: {command.name.lower()}: {error}")
            raise

    def _ask(self, own: Answer) -> list[Answer]:
        self._tell(Command.POLL, b"")
        try:
            return [Answer.decode(a) for a in self._shared_memory.gather(own.encode())]
        except RuntimeError as error:
            self.fail(f"rank 0: {error}")
            raise
