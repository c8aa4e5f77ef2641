"""The engine's stages: two steps in flight, requests that wait for a dependency, the output stage, speculation."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus, GenerateRequestStatus
from allspark_client.config import GenerateConfig
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server.engine import output as output_module
from allspark_server.engine.engine import Engine
from allspark_server.engine.input_stage import Dependency
from allspark_server.engine.results import QueueSink
from support.fake_group import FakeGroup, expected_output
from support.scheduler_rig import repetitive
from support.waiting import wait_for

Status = GenerateRequestStatus


@pytest.fixture
def make_engine():
    engines = []

    def make(group=None, **fields):
        engine = Engine(group=FakeGroup(**(group or {})))
        engines.append(engine)
        engine.install_model(AsModelConfig(model_name="m", model_path="/nowhere", **fields))
        engine.start_model("m")
        return engine

    yield make
    for engine in engines:
        engine.close()


class Recorder:
    """A sink that records everything. It takes `seconds` for each token and refuses token `fails_at`."""

    def __init__(self, seconds: float = 0.0, fails_at: int = -1):
        self.seconds, self.fails_at = seconds, fails_at
        self.events: list = []
        self.error = None
        self.done = threading.Event()

    def on_token(self, handle, sample, token, logprob, top, text, cached, end):
        time.sleep(self.seconds)
        if len(self.tokens()) == self.fails_at:
            raise ValueError("no room")
        self.events.append(token)

    def on_begun(self, handle):
        pass

    def on_status(self, handle, status):
        self.events.append(status)

    def on_finish(self, handle, status, error, stat, reason):
        self.events.append(status)
        self.error = error
        self.done.set()

    def tokens(self) -> list[int]:
        return [event for event in self.events if not isinstance(event, Status)]


def spec(ids, **generate) -> RequestSpec:
    return RequestSpec("m", input_ids=ids, config=GenerateConfig(**{"eos_token_id": -1, **generate}))


def submit(engine, ids, dependency=None, **generate):
    results = ResultQueue()
    return engine.submit(spec(ids, **generate), QueueSink(results), dependency), results


def collect(results) -> list[int]:
    return [i for elements in results for i in elements.ids_from_generate]


def counters(engine):
    return engine._models["m"].scheduler.counters


def test_the_next_step_is_submitted_before_the_last_one_is_known(make_engine):
    engine = make_engine({"delay": 0.002})
    words = expected_output([1], 30)
    queues = [submit(engine, [1], max_new_tokens=30)[1], submit(engine, [1], eos_token_id=words[10])[1]]
    assert [collect(queue) for queue in queues] == [words, words[:11]]
    assert engine._group.deepest == 2
    wait_for(lambda: not engine._pipeline.busy, 5)
    assert counters(engine).discarded_rows == 1  # after the end of sequence; the length was foreseen
    assert counters(engine).generated_tokens == 41 and engine.get_as_engine_stat("m").used_span == 0


def test_models_take_turns(make_engine):
    engine = make_engine({"delay": 0.001})
    engine.install_model(AsModelConfig(model_name="n", model_path="/nowhere"))
    engine.start_model("n")
    order, step = [], engine._group._step
    engine._group._step = lambda name, plan: order.append(name) or step(name, plan)
    queues = [engine.start_request(name, {"input_ids": [1]}, {"max_new_tokens": 40, "eos_token_id": -1})[2]
              for name in ("m", "n")]
    assert [collect(queue) for queue in queues] == [expected_output([1], 40)] * 2
    both = order[order.index("n"):len(order) - order[::-1].index("m")]
    assert both.count("m") > 20 and all(a != b for a, b in itertools.pairwise(both))


def test_a_blocked_request_waits_without_cost_and_goes_on(make_engine):
    engine = make_engine({"delay": 0.001})
    gone = Future()
    _, blocked = submit(engine, [5], Dependency("a grammar", gone), max_new_tokens=8)
    _, other = submit(engine, [6], max_new_tokens=8)
    assert collect(other) == expected_output([6], 8)
    stat = engine.get_as_engine_stat("m")
    assert (stat.pendding_request, stat.running_request) == (1, 0) and blocked.GenerateStatus() is Status.Init
    clock = time.pthread_getcpuclockid(engine._thread.thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before < 0.001
    gone.set_result(None)
    assert collect(blocked) == expected_output([5], 8)


@pytest.mark.parametrize("error, match", [
    (ValueError("no such rule"), "ALLSPARK_RUNTIME_ERROR: a grammar: no such rule"),
    (AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "too deep"), "ALLSPARK_PARAM_ERROR: too deep"),
])
def test_a_blocked_request_fails_with_what_it_waited_for(make_engine, error, match):
    engine = make_engine()
    gone = Future()
    handle, blocked = submit(engine, [5], Dependency("a grammar", gone), n=2)
    threading.Timer(0.05, lambda: gone.set_exception(error)).start()
    engine.sync_request("m", handle)
    assert blocked.GenerateStatus() is Status.InternalError
    with pytest.raises(AllSparkError, match=match):
        blocked.Get()
    assert engine._models["m"].scheduler.waiting == 0


def test_a_blocked_request_can_be_cancelled(make_engine):
    engine = make_engine()
    gone = Future()
    handle, blocked = submit(engine, [5], Dependency("a grammar", gone))
    engine.stop_request("m", handle)
    assert blocked.GenerateStatus() is Status.GenerateInterrupted
    gone.set_result(None)
    assert collect(submit(engine, [6], max_new_tokens=3)[1]) == expected_output([6], 3)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_stopped_requests_last_event_is_its_end(make_engine, seconds):
    """Even if the output stage still holds events when the request is stopped."""
    engine = make_engine({"delay": 0.001})
    sink = Recorder(seconds)
    handle = engine.submit(spec([1]), sink)
    wait_for(lambda: len(sink.tokens()) > 3, 5)
    engine.stop_request("m", handle)
    assert sink.done.is_set() and sink.events[-1] is Status.GenerateInterrupted
    assert sink.events.count(Status.ContextFinished) == sink.events.count(Status.Generating) == 1
    count = len(sink.tokens())
    assert sink.tokens() == expected_output([1], count)
    time.sleep(0.02)
    assert len(sink.tokens()) == count


def test_the_engine_waits_for_a_slow_output_stage(make_engine, monkeypatch):
    monkeypatch.setattr(output_module, "MAX_WAITING", 2)
    engine = make_engine()
    sink = Recorder(0.005)
    engine.submit(spec([1], max_new_tokens=40), sink)
    wait_for(lambda: len(sink.tokens()) > 5, 5)
    assert engine._group.steps <= len(sink.tokens()) + 2 + 1 + 2 + 1  # queued, in its hands, in flight, being put
    assert sink.done.wait(5) and sink.tokens() == expected_output([1], 40)


def test_a_sink_that_fails_ends_its_request_alone(make_engine):
    engine = make_engine({"delay": 0.001})
    bad, good = Recorder(fails_at=3), Recorder()
    engine.submit(spec([1]), bad)
    engine.submit(spec([1], max_new_tokens=20), good)
    assert bad.done.wait(5) and good.done.wait(5)
    assert bad.events[-1] is Status.InternalError and "no room" in str(bad.error) and len(bad.tokens()) == 3
    assert good.tokens() == expected_output([1], 20)
    wait_for(lambda: engine.get_as_engine_stat("m").used_span == 0, 5)
    assert not engine._models["m"].live


def test_a_failed_flush_listener_harms_nobody(make_engine):
    engine = make_engine()
    engine.add_flush_listener(lambda: 1 / 0)
    assert collect(submit(engine, [1], max_new_tokens=5)[1]) == expected_output([1], 5)


@pytest.mark.parametrize("kind", ["prompt_lookup", "draft"])
def test_speculation_changes_no_output(make_engine, kind):
    given = {"speculation": kind, "draft_model": "/draft"} if kind == "draft" else {"speculation": kind}
    prompts = [[i % 5, 2, 1, 4, 0, 3] * 4 for i in range(12)]
    outputs = []
    for fields in ({}, given):
        engine = make_engine({"token": repetitive, "delay": 0.001}, cache_span_size=16, engine_max_batch=4, **fields)
        queues = [submit(engine, prompt, max_new_tokens=20 + i, stop_words_ids=[[1, 1, i % 5]])[1]
                  for i, prompt in enumerate(prompts)]
        outputs.append([collect(queue) for queue in queues])
    assert outputs[0] == outputs[1]
    found, executor = counters(engine), engine._group.executors["m"]
    assert found.accepted_tokens > 20 and executor.drafted > executor.accepted
