"""What a step costs the engine's thread in Python, without any computing: bench_step.py [RUNNING …].

For each number of running requests, all of one client's session (as the service files them): the medians over 200
steps of planning, encoding, completing and delivering, in ms; then what Session.take costs the event loop with the
requests of a step changed and 10,000 more waiting.
"""

from __future__ import annotations

import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np

from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.request import RequestSpec
from allspark_client.types import ModelInfo
from allspark_server.request import build_request
from allspark_server.runtime.plan import StepPlan
from allspark_server.served_model import ServedModel
from allspark_server.session import Session, _RequestSink

STEPS, WAITING = 200, 10_000


class Timed:
    """Adds up the time spent in a function."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments):
        begin = time.perf_counter()
        try:
            return self.function(*arguments)
        finally:
            self.seconds += time.perf_counter() - begin


class Group:
    """Draws token 1 for every row."""

    def step(self, name: str, plan: bytes) -> SimpleNamespace:
        return SimpleNamespace(tokens=self.tokens)


def measure(running: int) -> None:
    config = AsModelConfig("m", "/none", engine_max_batch=running, engine_max_length=2048, max_queue=1 << 20)
    info = ModelInfo(name="m", vocab_size=1000, max_length=2048, num_spans=64 * running, span_size=32,
                     max_step_tokens=max(256, 2 * running), max_batch=running)
    model = ServedModel(config, info, None, "")
    model.running = True
    session, group = Session(None, lambda session, now: None, 1 << 30), Group()
    session._release = lambda handle: None
    for i in range(running + WAITING):
        session._register(i)
        spec = RequestSpec("m", input_ids=[i % 1000], config=GenerateConfig(seed=1, eos_token_id=-1))
        request = build_request(i, spec, _RequestSink(session, i), info, None)
        model.reserve(1)
        model.enqueue(request)
        session._pending[i].answered = True
    while model.scheduler.running < running:
        group.tokens = np.ones(running, np.int32)
        model.step(group)
    session.take()
    parts = {"plan": (model.scheduler, "plan"), "encode": (StepPlan, "encode"),
             "complete": (model.scheduler, "complete"), "total": (model, "step")}
    plain, times, takes = StepPlan.encode, {name: [] for name in parts}, []
    for _ in range(STEPS):
        timed = {name: Timed(getattr(owner, part) if owner is not StepPlan else plain)
                 for name, (owner, part) in parts.items()}
        StepPlan.encode = lambda plan: timed["encode"](plan)
        model.scheduler.plan, model.scheduler.complete = timed["plan"], timed["complete"]
        timed["total"](group)
        del model.scheduler.plan, model.scheduler.complete
        for name, one in timed.items():
            times[name].append(1e3 * one.seconds)
        begin = time.perf_counter()
        events = session.take()
        takes.append(1e3 * (time.perf_counter() - begin))
        assert len(events) == running
    StepPlan.encode = plain
    medians = {name: statistics.median(values) for name, values in times.items()}
    deliver = medians["total"] - sum(medians[name] for name in ("plan", "encode", "complete"))
    print(f"{running:5d} running: step {medians['total']:.2f} ms = plan {medians['plan']:.2f} + encode "
          f"{medians['encode']:.2f} + complete {medians['complete']:.2f} + deliver {deliver:.2f}; "
          f"take {statistics.median(takes):.2f} ms with {WAITING} waiting")


if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or ["256", "1024"]):
        measure(number)
