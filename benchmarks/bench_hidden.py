"""Measures how much of a step's Python time is not hidden behind the previous step: bench_hidden.py [RUNNING …] [--ms
5].

An Engine runs on a fake group. A step of this group starts when it was submitted and the previous step has ended, lasts
`--ms` milliseconds without using a CPU, and samples token 1 for every row. Over a few seconds, the script measures how
long the group is idle between two steps, and the CPU time of the process. It prints both per step. A core must be free.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from types import SimpleNamespace

import numpy as np

from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.request import RequestSpec
from allspark_client.types import ModelInfo
from allspark_server.engine.engine import Engine
from allspark_server.runtime.plan import SAMPLE, StepPlan


class Group:
    """`idle` is the sum of the seconds between the end of a step and the beginning of the next one."""

    size, depth = 1, 2

    def __init__(self, running: int, seconds: float):
        self._running, self._seconds = running, seconds
        self._submitted: deque[tuple[float, int]] = deque()  # (when it ends, rows that draw)
        self._ended = 0.0
        self.idle, self.steps = 0.0, 0

    def start_load(self, config: AsModelConfig) -> None:
        pass

    def poll_load(self) -> ModelInfo:
        return ModelInfo(name="m", vocab_size=1000, max_length=4096, num_spans=140 * self._running, span_size=32,
                         max_step_tokens=max(256, 2 * self._running), max_batch=self._running, ranks=1)

    def masks(self, name: str) -> None:
        return None

    def held_spans(self) -> dict[bytes, int]:
        return {}

    def submit(self, name: str, plan: bytes) -> None:
        now = time.perf_counter()
        began = max(now, self._ended)
        self.idle += began - self._ended
        self._ended = began + self._seconds
        self.steps += 1
        words = np.frombuffer(plan, "<i4")
        num_free, num_new, num_work = words[1:4].tolist()
        if num_new == 0:  # do not decode the plan, so that the benchmark adds little to what it measures
            flags = words[6 + num_free + 4 * num_work:6 + num_free + 5 * num_work]
            samples = int(np.count_nonzero(flags & SAMPLE))
        else:
            samples = sum(item.outputs for item in StepPlan.decode(plan).work)
        self._submitted.append((self._ended, samples))

    def collect(self) -> SimpleNamespace:
        end, samples = self._submitted.popleft()
        time.sleep(max(0.0, end - time.perf_counter()))
        ones, zeros = np.ones(samples, np.int32), np.zeros(samples, np.int32)
        return SimpleNamespace(counts=ones, tokens=ones, status=zeros, drafted=zeros)

    def unload(self, name: str) -> None:
        pass

    def fail(self, message: str) -> None:
        print(message)

    def close(self) -> None:
        pass


class NullSink:
    """A sink that drops everything."""

    def on_token(self, *_) -> None:
        pass

    on_status = on_finish = on_token


def measure(running: int, seconds: float, duration: float) -> None:
    group = Group(running, seconds)
    engine = Engine(group=group)
    engine.install_model(AsModelConfig("m", "/none", engine_max_batch=running, engine_max_length=4096,
                                       max_queue=1 << 20))
    engine.start_model("m")
    for i in range(running):
        prompt = [i % 1000] * (1 + i % 64)  # spans fill up at different steps
        engine.submit(RequestSpec("m", input_ids=prompt, config=GenerateConfig(eos_token_id=-1)), NullSink())
    while group.steps < 100:
        time.sleep(0.01)
    steps, idle, cpu = group.steps, group.idle, time.process_time()
    time.sleep(duration)
    steps, idle, cpu = group.steps - steps, group.idle - idle, time.process_time() - cpu
    print(f"{running:5d} running, steps of {1e3 * seconds:g} ms: {1e6 * idle / steps:.0f} us not hidden, "
          f"{1e6 * cpu / steps:.0f} us of processor time a step")
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("running", type=int, nargs="*", default=[1, 32, 256, 1024])
    parser.add_argument("--ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    for number in options.running:
        measure(number, options.ms / 1e3, options.seconds)
