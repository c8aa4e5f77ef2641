"""Groups: the processes that compute a step together, as the engine on rank 0 sees them.

`Group` is this process alone. `SharedMemoryGroup` is rank 0 of several processes: it publishes every call in
shared memory, does its own part, and gathers the other ranks' answers. `RankModels` in rank_models.py executes a call
on each rank; worker.py has the loop of the ranks other than 0.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

from .host_cache import held_by_all
from .rank_models import Answer, Command, RankModels, pack_step, raise_failures
from .steps import DEPTH, Steps

if TYPE_CHECKING:
    from .profile import Profile
    from .runner import ModelInfo
    from .tower import TowerRunner

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 4           # of one call, between which steps of other models run
WARM_UP_SECONDS = 60.0      # of a model's whole warm-up; what it leaves out is done when requests need it


class Group:
    """Rank 0's view of a group, here of one process without MPI. All calls come from the engine's thread.

    `collect` waits for a step. Other calls wait at most for the steps that were submitted before.

    cpus: CPUs to which compute threads are pinned; None: they are not pinned. on_failure(message): called when a step
    has failed, because the cache may then differ from the scheduler's view, or when a rank has lost its device
    (DeviceLost). It ends the process, which a supervisor restarts. Without it the engine continues without the model.
    """

    size = 1
    #: whether all ranks are on rank 0's host
    one_host = True

    def __init__(self, cpus: list[int] | None = None, on_failure: Callable[[str], None] | None = None):
        self.models = RankModels(cpus=cpus)
        self._on_failure = on_failure
        self._config = AsModelConfig()   # of the current load
        self._phase = "load"             # or "allocate", "warm up"
        self._phase_began = 0.0
        self._held: dict[bytes, int] = {}
        self._results: list[str] = []       # each rank's digest of results
        self._steps = Steps()
        # Model and time of submission of each step that is not collected.
        self._submitted: deque[tuple[str, float]] = deque()
        self._ended = 0.0       # when the last collected step ended
        self._processors = len(os.sched_getaffinity(0))

    @property
    def depth(self) -> int:
        """The most steps that should be submitted and not collected.

        It is 1 if the compute threads occupy all CPUs: the engine's thread and the output stage would then take CPU
        time from them.
        """
        threads = max((runner.threads for runner in list(self.models.runners.values())), default=1)
        return DEPTH if threads < self._processors else 1

    @property
    def loaded_part(self) -> float:
        """How much of the last load's weights rank 0 has loaded, 0…1."""
        return self.models.part

    def start_load(self, config: AsModelConfig) -> None:
        """Start to load a model on every rank while other models' steps run. One load at a time."""
        self._config, self._phase = config, "load"
        self._call("start_load", config=config.to_dict())

    def poll_load(self) -> ModelInfo | None:
        """The loaded model; None while loading.

        Raises a rank's exception (naming the rank). The caller then unloads the model, and the group continues without
        it.
        """
        answers = self._poll_answers()
        if answers is None:
            return None
        name = self._config.model_name
        if self._phase == "allocate":
            self._held = held_by_all(answer.held for answer in answers)
            if not self._config.on_gpus:
                return self._loaded()
            self._phase, self._phase_began = "warm up", time.monotonic()
            self._call("warm_up", name=name, count=WARM_UP_STEPS)
            return None
        if self._phase == "warm up":
            left, seconds = max(answer.value for answer in answers), time.monotonic() - self._phase_began
            if left and seconds < WARM_UP_SECONDS:
                self._call("warm_up", name=name, count=WARM_UP_STEPS)
                return None
            logger.info("model %r is warmed up in %.2f s%s", name, seconds,
                        f", except for {left} sizes of steps" if left else "")
            return self._loaded()
        self._compare_hosts(answers)
        spans = min(answer.value for answer in answers)
        host_spans, digests = min(answer.host_spans for answer in answers), [answer.digest for answer in answers]
        self._call("start_allocate", name=name, num_spans=spans, host_spans=host_spans, digests=digests,
                   addresses=[answer.address for answer in answers])
        self._phase = "allocate"
        return None

    def _loaded(self) -> ModelInfo:
        """The model that all ranks have loaded."""
        info = self.models.info
        assert info is not None  # every rank has answered
        return self._with_results(info)

    def _poll_answers(self) -> list[Answer] | None:
        """Every rank's answer; None if one is pending. Raises an exception for failed answers."""
        own = self.models.answer()
        answers = [own] if own.pending else self._gather(own)
        if any(answer.pending for answer in answers):
            return None
        lost = [f"rank {rank}: {answer.message}" for rank, answer in enumerate(answers) if answer.lost]
        if lost:    # every later step on these devices would fail, of other models, too
            self.fail("; ".join(lost))
        raise_failures(answers)
        return answers

    def _compare_hosts(self, answers: list[Answer]) -> None:
        """Raises AllSparkError if hosts have loaded different checkpoints."""
        hosts = {answer.host: answer.files for answer in answers if answer.files}
        if hosts:
            from allspark_server.weights.copies import check_copies
            check_copies(self._config.model_name, hosts)
        self._results = [answer.results for answer in answers]

    def _with_results(self, info: ModelInfo) -> ModelInfo:
        """`info`; if ranks compute different bits, with a model hash that covers each rank's digest of results."""
        if len(set(self._results)) < 2:
            return info
        both = hashlib.blake2b(repr((info.model_hash, self._results)).encode(), digest_size=16)
        return replace(info, model_hash=both.hexdigest())

    def masks(self, name: str) -> Any:
        """Rank 0's native Masks of a loaded model; None if it has none. `DEPTH` steps use its rows in turn."""
        return self.models.runners[name].masks

    def tower(self, name: str) -> TowerRunner | None:
        """Rank 0's vision tower of a loaded model; None if it takes no images."""
        return self.models.runners[name].tower

    def held_spans(self) -> dict[bytes, int]:
        """Spans by key that the host cache of the last loaded model kept from an earlier process."""
        return self._held

    def submit(self, name: str, plan: bytes) -> None:
        """Queue a step plan. At most `depth` steps, of all models, may be submitted and not collected."""
        self._steps.submit(self.models.stepping(name), name, plan, in_background=self.depth > 1)
        self._submitted.append((name, time.monotonic()))

    def collect(self) -> Any:
        """Rank 0's StepResult of the oldest submitted step.

        Raises the step's exception. ValueError means that every rank rejected the plan and computed nothing.
        """
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

    def synchronize(self) -> None:
        """Wait until every rank has ended the submitted steps. Other ranks may be behind rank 0 in a step that has only
        copies, since its ranks exchange nothing.
        """
        self._steps.drain()
        self._gather(self.models.answer())

    def unload(self, name: str) -> None:
        """Start to free a model on every rank. If it is still loading, the load is cancelled."""
        self._call("unload", name=name)

    def start_load_adapter(self, name: str, index: int, directory: str) -> None:
        """Start to load a model's LoRA adapter on every rank while steps run.

        Only one load, of a model or an adapter, runs at a time. No step may name the index before the adapter is
        loaded.
        """
        self._call("start_load_adapter", name=name, index=index, directory=directory)

    def poll_load_adapter(self) -> str | None:
        """The loaded adapter's digest; None while loading. Raises a rank's exception; the caller then unloads it."""
        answers = self._poll_answers()
        if answers is None:
            return None
        if len({answer.digest for answer in answers}) > 1:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "the ranks have read different adapters: the directory "
                                                               "must contain the same files on every host")
        return answers[0].digest

    def unload_adapter(self, name: str, index: int) -> None:
        """Free an adapter on every rank after the submitted steps. Does nothing if there is none of this index."""
        self._call("unload_adapter", name=name, index=index)

    def start_move_memory(self, name: str, loaded: bool) -> None:
        """Start to release a model's device memory on every rank (loaded=False), or to allocate and fill it again.

        It counts as a load, of which one runs at a time. No step of the model may be submitted before it is loaded.
        """
        self._call("start_move_memory", name=name, loaded=loaded)

    def poll_move_memory(self) -> bool:
        """Whether the move is finished. Raises a rank's exception."""
        return self._poll_answers() is not None

    def measure_roofline(self, name: str) -> bool:
        """Measure the roofline that profile() compares with, for a few milliseconds; returns whether it is complete."""
        self._steps.drain()
        return self.models.runners[name].measure_roofline()

    def profile(self, name: str) -> Profile:
        """The cost of each op on rank 0, and in a mixed group of ranks of experts; see runtime/profile.py."""
        self._steps.drain()
        return self.models.runners[name].profile()

    def fail(self, message: str) -> None:
        """Report that the group has failed. A supervisor then ends this process; without one, the call returns."""
        if self._on_failure is not None:
            self._on_failure(message)

    def close(self) -> None:
        """Free every model and end the other ranks. Idempotent."""
        self._steps.drain()
        self.models.close()

    def _call(self, method: str, **arguments: Any) -> None:
        """Calls a method of every rank's RankModels after the submitted steps."""
        self._publish(Command.CALL, json.dumps([method, arguments]).encode(), method)
        getattr(self.models, method)(**arguments)

    def _publish(self, command: Command, payload: bytes = b"", what: str = "") -> None:
        """Send a command other than STEP to the other ranks, after the submitted steps. `what`: its name in errors."""
        self._steps.drain()

    def _gather(self, own: Answer) -> list[Answer]:
        """Every rank's answer, by rank. own: this rank's."""
        return [own]


class SharedMemoryGroup(Group):
    """Rank 0 of a group whose ranks share a native.SharedMemory, on one host or on several.

    on_failure(message): also called when another rank has failed. It ends the process, as the group cannot continue.
    """

    def __init__(self, shared_memory: Any, size: int, cpus: list[int] | None, on_failure: Callable[[str], None],
                 host: str = ""):
        """host: the name of this host, if there are several."""
        super().__init__(cpus, on_failure)
        self.size, self.one_host = size, not host
        self._shared_memory = shared_memory
        self.models = RankModels(0, size, shared_memory, cpus, host, leads=True)
        self._steps = Steps(shared_memory)
        self._closed = False

    def submit(self, name: str, plan: bytes) -> None:
        """See `Group.submit`."""
        self._steps.submit(self.models.stepping(name), name, plan, int(Command.STEP), pack_step(name, b""),
                           self.depth > 1)
        self._submitted.append((name, time.monotonic()))

    def profile(self, name: str) -> Profile:
        """See `Group.profile`."""
        from .profile import OpProfile

        found = super().profile(name)
        if self.models.runners[name].role.mixed:
            self._publish(Command.PROFILE, name.encode())
            try:
                _, *others = self._shared_memory.gather(b"")
            except RuntimeError as error:
                self.fail(f"rank 0: {error}")
                raise
            found.experts = [[OpProfile(**op) for op in json.loads(payload)] for payload in others]
        return found

    def fail(self, message: str) -> None:
        """See `Group.fail`."""
        message = self._shared_memory.aborted() or message
        self._shared_memory.abort(message)
        super().fail(message)

    def close(self) -> None:
        """See `Group.close`."""
        if self._closed:
            return
        self._closed = True
        self._publish(Command.CLOSE)
        super().close()

    def _publish(self, command: Command, payload: bytes = b"", what: str = "") -> None:
        super()._publish(command, payload, what)
        try:
            self._shared_memory.publish(int(command), payload)
        except RuntimeError as error:
            self.fail(f"rank 0: {what or command.name.lower()}: {error}")
            raise

    def _gather(self, own: Answer) -> list[Answer]:
        self._publish(Command.POLL)
        try:
            return [Answer.decode(a) for a in self._shared_memory.gather(own.encode())]
        except RuntimeError as error:
            self.fail(f"rank 0: {error}")
            raise
