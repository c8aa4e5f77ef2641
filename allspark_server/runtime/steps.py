"""The queue of steps that a rank has submitted and not collected yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from .native import native_library

DEPTH = 2  # the most steps submitted and not collected: the running one and the next one


class Stepping(Protocol):
    """What runs steps on a rank: a model, or its vision tower. `gpu`: the index of its GPU; None: CPUs compute."""

    @property
    def gpu(self) -> int | None:
        """See the class."""

    def step(self, plan: bytes) -> Any:
        """Runs one step plan; returns the native StepResult."""

    def submit(self, stepper: Any, plan: bytes, shared_memory: Any, kind: int, prefix: bytes) -> None:
        """Has a native Stepper run a plan."""


class Steps:
    """A queue of at most `DEPTH` steps of any models.

    A native thread computes the steps in order, so the next one starts without Python. A step's result or error is kept
    until it is collected. If compute threads occupy all CPUs, this thread would take CPU time from them; then `collect`
    computes the step itself.
    """

    def __init__(self, shared_memory: Any = None) -> None:
        """shared_memory: where each step is first published for the other ranks; None: there is one rank."""
        self._shared_memory = shared_memory
        self._stepper: Any = None
        self._collectors: deque[Callable] = deque()

    def submit(self, runner: Stepping, name: str, plan: bytes, kind: int = 0, prefix: bytes = b"",
               in_background: bool = True) -> None:
        """Queue a step of `runner`, whose model is called `name`.

        kind, prefix: the published command and the bytes before the plan. in_background: compute the step on a native
        thread; otherwise `collect` computes it. Raises RuntimeError if `DEPTH` steps are queued already.
        """
        if len(self._collectors) >= DEPTH:
            raise RuntimeError(f"a step of model {name!r}: {DEPTH} steps are submitted and not collected already")
        if not in_background and not self._collectors:
            self._collectors.append(partial(self._compute, runner, plan, kind, prefix))
            return
        if self._stepper is None:
            self._stepper = native_library().Stepper()
        runner.submit(self._stepper, plan, self._shared_memory, kind, prefix)
        self._collectors.append(self._stepper.collect)

    def collect(self) -> Any:
        """Wait for the oldest step; returns its StepResult.

        Raises the step's exception, or RuntimeError if no step was submitted.
        """
        if not self._collectors:
            raise RuntimeError("there is no step to collect: none was submitted")
        return self._collectors.popleft()()

    def drain(self) -> None:
        """Wait until no submitted step is running. Their results can still be collected."""
        if self._stepper is not None:
            self._stepper.drain()

    def __len__(self) -> int:
        """The number of steps submitted and not collected."""
        return len(self._collectors)

    @property
    def idle(self) -> bool:
        """Whether `collect` would not wait for a step on the native thread."""
        return self._stepper is None or self._stepper.idle

    def _compute(self, runner: Stepping, plan: bytes, kind: int, prefix: bytes) -> Any:
        if self._shared_memory is not None:
            self._shared_memory.publish(kind, prefix + plan)
        return runner.step(plan)
