"""The steps that rank 0 has submitted and not collected yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .native import native_library

if TYPE_CHECKING:
    from .runner import ModelRunner

DEPTH = 2  # steps submitted and not collected: one that runs, and the next one


class Steps:
    """A queue of at most `DEPTH` steps, of any models, which a native thread computes one after the other: the next one
    begins without Python. What came of a step, a result or an error, waits until it is collected."""

    def __init__(self, window=None) -> None:
        """window: where each step is published for the other ranks first; None: there are none."""
        self._window = window
        self._stepper = None
        self._count = 0

    def submit(self, runner: "ModelRunner", name: str, plan: bytes, kind: int = 0, prefix: bytes = b"") -> None:
        """Queue a step of `runner`, whose model is called `name`. kind, prefix: of the command that is published, in
        front of the plan. RuntimeError if `DEPTH` are queued already."""
        if self._count >= DEPTH:
            raise RuntimeError(f"a step of model {name!r}: {DEPTH} steps are submitted and not collected already")
        if self._stepper is None:
            self._stepper = native_library().Stepper()
        runner.submit(self._stepper, plan, self._window, kind, prefix)
        self._count += 1

    def collect(self):
        """The oldest step's StepResult, once it is there. Raises what the step raised; RuntimeError without one."""
        if not self._count:
            raise RuntimeError("there is no step to collect: none was submitted")
        self._count -= 1
        return self._stepper.collect()

    def drain(self) -> None:
        """Wait until all that was submitted has been computed; it can still be collected."""
        if self._stepper is not None:
            self._stepper.drain()
