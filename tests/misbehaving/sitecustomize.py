"""Read by the Python of a group's ranks when this folder is on PYTHONPATH: makes ModelRunner misbehave on demand."""

import os
import sys
import time

SLOW_SECONDS = 4.0  # that a model named "slow" takes to load


def misbehave() -> None:
    from allspark_server.runtime.runner import ModelRunner

    load, step = ModelRunner.load, ModelRunner.step

    def slow_load(self) -> int:
        if self.config.model_name == "slow":
            for part in range(100):
                time.sleep(SLOW_SECONDS / 100)
                self.progress(part, 100)
        return load(self)

    def failing_step(self, plan: bytes, want_logits: bool = False):
        """Fails with the error that the file $FAIL_STEP names, once."""
        path = os.environ.get("FAIL_STEP", "")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                name = file.read()
            os.unlink(path)
            raise {"RuntimeError": RuntimeError, "ValueError": ValueError}[name]("a defect")
        return step(self, plan, want_logits)

    ModelRunner.load, ModelRunner.step = slow_load, failing_step


if "allspark_server" in sys.orig_argv:
    misbehave()
