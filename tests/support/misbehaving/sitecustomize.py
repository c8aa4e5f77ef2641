"""Makes ModelRunner misbehave in a group's ranks when this folder is on PYTHONPATH."""

import os
import sys
import time

SLOW_SECONDS = 4.0  # seconds that loading a model named "slow" takes


def misbehave() -> None:
    from allspark_server.runtime.native import DeviceLost
    from allspark_server.runtime.runner import ModelRunner
    from allspark_server.runtime.steps import Steps

    load, step, collect = ModelRunner.load, ModelRunner.step, Steps.collect

    def slow_load(self) -> int:
        fail_once("FAIL_LOAD")
        if self.config.model_name == "slow":
            for part in range(100):
                time.sleep(SLOW_SECONDS / 100)
                self.progress(part, 100)
        return load(self)

    def fail_once(variable: str = "FAIL_STEP") -> None:
        """Raises the error that the file of the variable names, once."""
        path = os.environ.get(variable, "")
        taken = f"{path}.{os.getpid()}"
        try:
            os.rename(path, taken)  # only one rank takes it
        except FileNotFoundError:
            return
        with open(taken, encoding="utf-8") as file:
            name = file.read()
        raise {"RuntimeError": RuntimeError, "ValueError": ValueError, "DeviceLost": DeviceLost}[name]("a defect")

    def failing_step(self, plan: bytes, want_logits: bool = False):
        """Replaces the step of a rank other than 0."""
        fail_once()
        return step(self, plan, want_logits)

    def failing_collect(self):
        """Replaces the step of rank 0."""
        result = collect(self)
        fail_once()
        return result

    ModelRunner.load, ModelRunner.step, Steps.collect = slow_load, failing_step, failing_collect


if "allspark_server" in sys.orig_argv:
    misbehave()
