"""Groups: the processes that compute a step together, as the engine (on rank 0) sees them.

`LocalGroup` is this process alone. `WindowGroup` is rank 0 of several processes on one host: it publishes every call
in the shared window, does its own part, and gathers the others' answers. What every rank does with a call is
`Member`; the loop of ranks > 0 is in worker.py.
"""
from __future__ import annotations

import json
import logging
import struct
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Callable, Protocol

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

if TYPE_CHECKING:
    from .profile import Profile
    from .runner import ModelInfo, ModelRunner

logger = logging.getLogger(__name__)


class Group(Protocol):
    """Rank 0's view of a group. Every call comes from the engine's thread."""
    size: int

    def load(self, config: AsModelConfig) -> ModelInfo:
        """Load a model on every rank. Raises what a rank raised (naming the rank); the group goes on without it."""

    def step(self, name: str, plan: bytes):
        """Compute one step plan; returns rank 0's StepResult."""

    def unload(self, name: str) -> None:
        """Free a model on every rank."""

    def measure_ceilings(self, name: str) -> bool:
        """A few milliseconds of measuring what profile() compares with; whether it is all measured."""

    def profile(self, name: str) -> Profile:
        """What the ops cost on rank 0; see runtime/profile.py."""

    def close(self) -> None:
        """Free every model and let the other ranks go. Idempotent."""


class Command(IntEnum):
    """Kinds of messages that rank 0 publishes."""
    LOAD = 1        # JSON of the AsModelConfig; answered
    ALLOCATE = 2    # JSON {"name", "num_spans"}; answered
    STEP = 3        # uint16 length of the name, name, plan
    UNLOAD = 4      # name
    CLOSE = 5


def pack_step(name: str, plan: bytes) -> bytes:
    encoded = name.encode()
    return struct.pack("<H", len(encoded)) + encoded + plan


def unpack_step(payload: bytes) -> tuple[str, bytes]:
    (length,) = struct.unpack_from("<H", payload)
    return payload[2:2 + length].decode(), payload[2 + length:]


@dataclass
class Answer:
    """What one rank reports of a load or an allocation: a number, or the error that prevented it."""
    value: int = 0
    error: str = ""         # name of the exception's class that the engine's caller is to see
    status: int = 0
    message: str = ""

    @classmethod
    def of_exception(cls, error: Exception) -> Answer:
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


class Member:
    """One rank's models, and what it does with each command. progress(name, part): called while weights are loaded."""

    def __init__(self, rank: int = 0, world: int = 1, window=None, cpus: list[int] | None = None):
        self.rank, self.world, self.window, self.cpus = rank, world, window, cpus
        self.runners: dict[str, ModelRunner] = {}
        self.progress: Callable[[str, float], None] = lambda name, part: None
        self.step_began = 0.0       # on the monotonic clock; 0.0 between steps. The heartbeat reads it
        self.served = False         # a step was computed; on_served() is called after the first
        self.on_served: Callable[[], None] = lambda: None

    def load(self, config: AsModelConfig) -> int:
        """First phase: weights. Returns how many spans this rank could hold."""
        from .runner import ModelRunner     # imports the native module, which `allspark` itself does not need
        runner = ModelRunner(config, rank=self.rank, world=self.world, window=self.window, cpus=self.cpus)
        runner.progress = lambda done, total: self.progress(config.model_name, done / max(total, 1))
        try:
            spans = runner.load()
        except BaseException:
            runner.close()
            raise
        self.progress(config.model_name, 1.0)
        self.runners[config.model_name] = runner
        return spans

    def allocate(self, name: str, num_spans: int) -> ModelInfo:
        """Second phase: the KV cache, of the same size on every rank."""
        return self.runners[name].allocate_cache(num_spans)

    def step(self, name: str, plan: bytes):
        self.step_began = time.monotonic()
        try:
            result = self.runners[name].step(plan)
        finally:
            self.step_began = 0.0
        if not self.served:
            self.served = True
            self.on_served()
        return result

    def unload(self, name: str) -> None:
        """Free a model; nothing happens if this rank does not hold it (its load may have failed here)."""
        runner = self.runners.pop(name, None)
        if runner is not None:
            runner.close()

    def close(self) -> None:
        for name in list(self.runners):
            self.unload(name)


class LocalGroup:
    """The group of one process, with no MPI. cpus: CPUs to pin the compute threads to; None: not pinned."""
    size = 1

    def __init__(self, cpus: list[int] | None = None):
        self.member = Member(cpus=cpus)

    def load(self, config: AsModelConfig) -> ModelInfo:
        try:
            spans = self.member.load(config)
            return self.member.allocate(config.model_name, spans)
        except Exception as error:      # every kind becomes what the API documents
            self.member.unload(config.model_name)
            answer = Answer.of_exception(error)
            raise answer.exception(answer.message) from error

    def step(self, name: str, plan: bytes):
        return self.member.step(name, plan)

    def unload(self, name: str) -> None:
        self.member.unload(name)

    def measure_ceilings(self, name: str) -> bool:
        return self.member.runners[name].measure_ceilings()

    def profile(self, name: str) -> Profile:
        return self.member.runners[name].profile()

    def close(self) -> None:
        self.member.close()


class WindowGroup:
    """Rank 0 of a group whose ranks share a native.Window on one host.

    on_failure(message): called when a step failed on any rank. The ranks' caches no longer agree then, so the group
    cannot go on; the caller ends the process.
    """

    def __init__(self, window, size: int, cpus: list[int] | None, on_failure: Callable[[str], None]):
        self.size = size
        self._window = window
        self.member = Member(0, size, window, cpus)
        self._on_failure = on_failure
        self._closed = False

    def load(self, config: AsModelConfig) -> ModelInfo:
        name = config.model_name
        self._publish(Command.LOAD, json.dumps(config.to_dict()).encode())
        answers = self._gather(lambda: self.member.load(config))
        try:
            raise_failures(answers)
            spans = min(a.value for a in answers)
            self._publish(Command.ALLOCATE, json.dumps({"name": name, "num_spans": spans}).encode())
            infos = []
            raise_failures(self._gather(lambda: infos.append(self.member.allocate(name, spans)) or 0))
        except Exception:
            self.unload(name)           # on every rank, whether it had loaded or not
            raise
        return infos[0]

    def step(self, name: str, plan: bytes):
        try:
            self._window.publish(int(Command.STEP), pack_step(name, plan))
            return self.member.step(name, plan)
        except Exception as error:
            self._fail(f"rank 0: {error}")
            raise

    def unload(self, name: str) -> None:
        self._publish(Command.UNLOAD, name.encode())
        self.member.unload(name)

    def measure_ceilings(self, name: str) -> bool:
        return self.member.runners[name].measure_ceilings()

    def profile(self, name: str) -> Profile:
        return self.member.runners[name].profile()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._publish(Command.CLOSE, b"")
        self.member.close()

    def _publish(self, command: Command, payload: bytes) -> None:
        try:
            self._window.publish(int(command), payload)
        except RuntimeError as error:
            self._fail(f"rank 0: {command.name.lower()}: {error}")
            raise

    def _gather(self, work: Callable[[], int]) -> list[Answer]:
        """Do this rank's part and collect everybody's answers."""
        try:
            own = Answer(value=work())
        except Exception as error:      # it must be answered, whatever it is: the others wait in gather
            logger.debug("rank 0", exc_info=True)
            own = Answer.of_exception(error)
        try:
            return [Answer.decode(a) for a in self._window.gather(own.encode())]
        except RuntimeError as error:
            self._fail(f"rank 0: {error}")
            raise

    def _fail(self, message: str) -> None:
        message = self._window.aborted() or message
        self._window.abort(message)
        self._on_failure(message)
