"""Measures the Python time of a step, without an executor.

    bench_step.py [RUNNING …] [--waiting N] [--drafts N]

All requests belong to one client's session, N more requests wait, and two steps are in flight. For each number of
running requests it prints median CPU times over 300 steps, in microseconds:
 - in the engine's thread: planning, encoding, and completing (with the handover to the output stage), their sum, and
   the mean sum relative to the allowance of 60 us + 1 us per running request;
 - in the output stage's thread, and in the event loop (ClientStream.take).
With `--drafts N` every sequence gets drafts, of which N are accepted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from types import SimpleNamespace

import numpy as np

from allspark_client._proto import allspark_pb2 as pb
from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.request import RequestSpec
from allspark_client.types import ModelInfo
from allspark_server.engine.output import OutputStage, StepOutput
from allspark_server.engine.request import Request
from allspark_server.engine.served_model import ServedModel
from allspark_server.rpc.client_stream import ClientStream, _RequestSink
from allspark_server.rpc.token_columns import TokenColumns
from allspark_server.runtime.plan import WorkTable

STEPS, WARM, DEPTH = 300, 50, 2


class Output(OutputStage):
    """An output stage without its thread. Collects the events that it receives, until the benchmark delivers them."""

    def __init__(self):
        super().__init__(lambda request: None, lambda sequence: None)
        self.close()
        self.events: list[StepOutput] = []

    def put(self, event) -> None:
        self.events.append(event)


def result_of(step, accepted: int) -> SimpleNamespace:
    """A result of token 1 for every row that samples, and for as many drafts."""
    counts = 1 + np.minimum(step.work.columns[WorkTable.DRAFTS, step.sampling], max(accepted, 0))
    tokens = np.ones(int(counts.sum()), np.int32)
    drafted = step.work.columns[WorkTable.DRAFTS, step.sampling]
    status = np.zeros(len(tokens), np.int32)
    return SimpleNamespace(counts=counts.astype(np.int32), drafted=drafted, tokens=tokens, status=status)


def measure(running: int, waiting: int, accepted: int) -> None:
    config = AsModelConfig("m", "/none", engine_max_batch=running, engine_max_length=4096, max_queue=1 << 20,
                           speculation="prompt_lookup" if accepted >= 0 else "off")
    info = ModelInfo(name="m", vocab_size=1000, max_length=4096, num_spans=140 * running, span_size=32,
                     max_step_tokens=max(256, 9 * running), max_batch=running)
    output = Output()
    model = ServedModel(config, info, None, "", output)
    model.running = True
    session = ClientStream(None, lambda session, now: None, 1 << 30)
    session._release = lambda handle: None
    columns = TokenColumns()
    for i in range(running + waiting):
        session.register(i)
        prompt = [i % 1000] * (1 + i % 64)  # spans fill up at different steps
        spec = RequestSpec("m", input_ids=prompt, config=GenerateConfig(seed=1, eos_token_id=-1))
        request = Request(i, _RequestSink(session, i), model.input.prepare(spec))
        model.queue.reserve("", 1, request.size)
        model.enqueue(request)
        session._pending[i].answered = True
    in_flight: deque = deque()
    times: dict[str, list[float]] = {name: [] for name in ("plan", "encode", "complete", "total", "output", "take")}

    def run_step() -> None:
        a = time.thread_time()
        step = model.plan()
        b = time.thread_time()
        step.encode()
        c = time.thread_time()
        in_flight.append((step, result_of(step, accepted)))
        if len(in_flight) < DEPTH:
            return
        oldest, result = in_flight.popleft()
        d = time.thread_time()
        model.complete(oldest, result, 0.01)
        e = time.thread_time()
        for event in output.events:
            output._deliver(event)
        output.events.clear()
        f = time.thread_time()
        session.take(columns)
        if columns:
            columns.move_to(pb.Tokens())
        g = time.thread_time()
        spent = {"plan": b - a, "encode": c - b, "complete": e - d, "total": c - a + e - d, "output": f - e,
                 "take": g - f}
        for name, seconds in spent.items():
            times[name].append(1e6 * seconds)

    while model.scheduler.running < running or len(times["plan"]) < WARM:
        run_step()
    for values in times.values():
        values.clear()
    for _ in range(STEPS):
        run_step()
    medians = {name: statistics.median(values) for name, values in times.items()}
    allowed, mean = 60 + running, statistics.mean(times["total"])
    print(f"{running:5d} running: {medians['total']:6.0f} us = plan {medians['plan']:.0f} + encode "
          f"{medians['encode']:.0f} + complete {medians['complete']:.0f}; mean {mean:.0f}, "
          f"{mean / allowed:.2f} of {allowed} us; output stage {medians['output']:.0f}, take {medians['take']:.0f}; "
          f"{model.scheduler.waiting} waiting")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("running", type=int, nargs="*", default=[1, 32, 256, 1024])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--drafts", type=int, default=-1)
    options = parser.parse_args()
    for number in options.running:
        measure(number, options.waiting, options.drafts)
