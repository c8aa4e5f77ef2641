"""The steps that rank 0 has submitted and not collected yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runner import ModelRunner

DEPTH = 2  # steps submitted and not collected: one that runs, and the next one


class Steps:
    """A queue of at most `DEPTH` steps, of any models. A step is computed as soon as it is submitted; what came of it,
    a result or an error, waits until it is collected."""

    def __init__(self) -> None:
        self._ended: deque[tuple[object, BaseException | None]] = deque()  # (StepResult or None, error or None)

    def submit(self, runner: "ModelRunner", name: str, plan: bytes) -> None:
        """Queue a step of `runner`, whose model is called `name`. RuntimeError if `DEPTH` are queued already."""
        if len(self._ended) >= DEPTH:
            raise RuntimeError(f"a step of model {name!r}: {DEPTH} steps are submitted and not collected already")
        try:
            self._ended.append((runner.step(plan), None))
        except Exception as error:  # whoever collects gets it
            self._ended.append((None, error))

    def collect(self):
        """The oldest step's StepResult, once it is there. Raises what the step raised; RuntimeError if there is none."""
        if not self._ended:
            raise RuntimeError("there is no step to collect: none was submitted")
        result, error = self._ended.popleft()
        if error is not None:
            raise error
        return result

    def drain(self) -> None:
        """Wait until all that was submitted has been computed; it can still be collected."""
