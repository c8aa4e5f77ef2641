"""The steps that rank 0 has submitted and not collected yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .native import native_library

if TYPE_CHECKING:
    from .runner import ModelRunner

DEPTH = 2  # steps submitted and not collected: one that runs, and the next one


class Steps:
    """A queue of at most `DEPTH` steps, of any models. A native thread computes them one after the other: the next one
    begins without Python. What came of a step, a result or an error, waits until it is collected.

    Where no processor is left for whoever collects, that thread would only take turns with the computing ones: then a
    step is computed by `collect` itself.
    """

    def __init__(self, shared_memory: Any = None) -> None:
        """shared_memory: where each step is published for the other ranks first; None: there are none."""
        self._shared_memory = shared_memory
        self._stepper: Any = None
        self._collectors: deque[Callable] = deque()

    def submit(self, runner: ModelRunner, name: str, plan: bytes, kind: int = 0, prefix: bytes = b"",
               beside: bool = True) -> None:
        """Queue a step of `runner`, whose model is called `name`. kind, prefix: of the command that is published, in
        front of the plan. beside: compute it beside the caller. RuntimeError if `DEPTH` are queued already.
        """
        if len(self._collectors) >= DEPTH:
            raise RuntimeError(f"a step of model {name!r}: {DEPTH} steps are submitted and not collected already")
        if not beside and not self._collectors:
            self._collectors.append(partial(self._compute, runner, plan, kind, prefix))
            return
        if self._stepper is None:
            self._stepper = native_library().Stepper()
        runner.submit(self._stepper, plan, self._shared_memory, kind, prefix)
        self._collectors.append(self._stepper.collect)

    def collect(self) -> Any:
        """The oldest step's StepResult, once it is there. Raises what the step raised; RuntimeError if there is
        none.
        """
        if not self._collectors:
            raise RuntimeError("there is no step to collect: none was submitted")
        return self._collectors.popleft()()

    def drain(self) -> None:
        """Wait until all that was submitted has been computed or is no longer under way; it can still be collected."""
        if self._stepper is not None:
            self._stepper.drain()

    def _compute(self, runner: ModelRunner, plan: bytes, kind: int, prefix: bytes) -> Any:
        if self._shared_memory is not None:
            self._shared_memory.publish(kind, prefix + plan)
        return runner.step(plan)
