"""Limits and failures of an engine: handles, waiting prompts, failed models, the end of its thread."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from allspark_client import AllSparkError, AsStatus
from allspark_client.config import GenerateConfig
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server.engine import engine as engine_module
from allspark_server.engine.results import QueueSink
from allspark_server.runtime.worker import Heartbeat
from support.engine_helpers import Status, collect, config, refused, run
from support.fake_group import expected_output
from support.waiting import wait_for


def test_an_ended_request_keeps_nothing_but_its_handle(make_engine, monkeypatch):
    engine = make_engine()
    spec = RequestSpec("m", input_ids=list(range(900)), config=GenerateConfig(max_new_tokens=2, eos_token_id=-1))
    results = ResultQueue()
    handle = engine.submit(spec, QueueSink(results))
    kept = weakref.ref(spec), weakref.ref(results)
    engine.sync_request("m", handle)
    del spec, results
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    assert engine.stop_request("m", handle) is AsStatus.ALLSPARK_SUCCESS


def test_handles_that_nobody_releases_do_not_pile_up(make_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_ENDED", 16)
    engine = make_engine()
    started = []
    for i in range(100):
        started.append(engine.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 2, "eos_token_id": -1})[1:])
        engine.sync_request("m", started[-1][0])
        assert len(engine._requests) <= 17
    assert [collect(results) for _, results in started] == [expected_output([i], 2) for i in range(100)]
    engine.release_request("m", started[-1][0])
    refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, engine.release_request, "m", started[0][0])


def test_waiting_prompts_are_limited_in_bytes(make_engine, monkeypatch):
    engine = make_engine(config(engine_max_batch=1, cache_span_size=16), num_spans=60, delay=0.01)
    monkeypatch.setattr(engine._models["m"].queue, "max_bytes", 45_000)
    generate = {"eos_token_id": -1, "max_new_tokens": 20}
    first = engine.start_request("m", {"input_ids": [1]}, generate)[2]
    first.Get()
    queues = [engine.start_request("m", {"input_ids": [i] * 400}, generate)[2] for i in (2, 3)]
    one_more = ("m", {"input_ids": [4] * 400}, generate)
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, *one_more, match="max_queue_memory=45000")
    assert [collect(queue) for queue in queues] == [expected_output([i] * 400, 20) for i in (2, 3)]
    assert len(run(engine, [4] * 400, max_new_tokens=1)) == 1
    model = engine._models["m"]
    assert model.queue.incoming == model.queue.incoming_bytes == model.scheduler.waiting_bytes == 0


def test_a_failed_model_is_loaded_again_by_start_model(make_engine, tmp_path):
    engine = make_engine(state_file=str(tmp_path / "state"), fail_at=1)
    _, handle, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    engine.sync_request("m", handle)
    assert results.GenerateStatus() is Status.InternalError and engine.failures() == {"m": "rank 1 was lost"}
    refused(AsStatus.ALLSPARK_RUNTIME_ERROR, engine.start_request, "m", {"input_ids": [1]}, match="start_model")
    engine._group.fail_at = -1
    engine.start_model("m")
    assert engine.failures() == {} and run(engine, [1], max_new_tokens=3) == expected_output([1], 3)
    assert json.loads((tmp_path / "state").read_text())[0]["started"] is True


def test_the_end_of_the_engines_thread_is_reported(make_engine):
    engine = make_engine(delay=0.002)
    _, handle, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    results.Get()
    engine._thread._execute = lambda command: 1 / 0
    with engine._thread.lock:
        engine._thread.post(lambda: None)
    engine.sync_request("m", handle)
    assert results.GenerateStatus() is Status.InternalError
    engine._thread.thread.join(5)
    assert engine._group.failures == ["the engine's thread failed: division by zero"]  # a supervised process ends there
    assert engine.failures()[""] == "division by zero" and engine._group.closed
    assert not engine.list_models()[0].running
    refused(AsStatus.ALLSPARK_RUNTIME_ERROR, engine.stop_model, "m", match="the engine has failed: division by zero")


def test_a_caller_does_not_wait_for_a_thread_that_is_gone(make_engine):
    engine = make_engine()
    entered = threading.Event()

    def die() -> None:
        entered.set()
        time.sleep(0.1)
        raise SystemExit

    with engine._thread.lock:
        engine._thread.post(die)
    entered.wait(5)
    refused(AsStatus.ALLSPARK_RUNTIME_ERROR, engine.stop_model, "m", match="the engine has failed")


def test_what_the_thread_is_at_is_known_to_the_heartbeat(make_engine, tmp_path):
    engine = make_engine(delay=0.5)
    wait_for(lambda: engine.busy_since == 0.0, 5)
    heartbeats = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heartbeats.bind(str(tmp_path / "socket"))
    heartbeats.settimeout(5)
    heartbeat = Heartbeat(str(tmp_path / "socket"), 0)
    heartbeat.watch(SimpleNamespace(served=False, numbers={}), lambda: engine.busy_since)
    heartbeat.send()
    assert "step_seconds" not in json.loads(heartbeats.recv(4096))
    with engine._thread.lock:
        engine._thread.post(lambda: time.sleep(0.5))  # any cause that keeps it from ending
    time.sleep(0.2)
    heartbeat.send()
    assert 0.1 < json.loads(heartbeats.recv(4096))["step_seconds"] < 0.5
    heartbeats.close()


def test_a_load_holds_up_nobody_and_can_be_given_up(make_engine):
    loaded = threading.Event()
    loaded.set()
    engine = make_engine(delay=0.001, loaded=loaded)
    loaded.clear()
    errors = []

    def install(name) -> None:
        try:
            engine.install_model(config(name))
        except AllSparkError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=install, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    wait_for(lambda: engine._loader.loading is not None, 5)
    first = engine._loader.loading.model_name
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.start_model, first, match="is still being loaded")
    assert run(engine, [1], max_new_tokens=5) == expected_output([1], 5)
    engine.release_model(first)
    wait_for(lambda: errors, 5)
    assert "was released while it was loaded" in errors[0]
    wait_for(lambda: engine._loader.loading is not None and engine._loader.loading.model_name != first, 5)
    engine.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert "the engine is closed" in errors[1]


class CountingTokenizer:
    """A tokenizer with one id per character that counts its calls."""

    def __init__(self):
        self.encoded = 0

    @property
    def templates(self):
        return self

    def longest_text(self, tokens):
        return tokens

    def source(self, tools):
        return ""

    def render(self, messages, tools):
        return messages[0]["content"]

    def encode(self, text, add_special_tokens=True):
        self.encoded += 1
        return [ord(c) for c in text]


@pytest.mark.parametrize("inputs", [{"text": "abc"}, {"messages": [{"role": "user", "content": "abc"}]}])
def test_a_full_queue_refuses_before_the_prompt_is_read(make_engine, inputs):
    engine = make_engine(config(engine_max_batch=1, max_queue=1), delay=0.01)
    tokenizer = engine._models["m"].input.tokenizer = CountingTokenizer()
    spec = {"eos_token_id": -1, "max_length": 200}
    for _ in range(2):
        engine.start_request("m", {"input_ids": [1]}, spec)
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, "m", inputs, spec, match="max_queue=1")
    assert tokenizer.encoded == 0


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_a_text_that_cannot_fit_is_not_tokenized(make_engine, kind):
    engine = make_engine(config(engine_max_length=100, engine_max_batch=1, max_queue=0))
    tokenizer = engine._models["m"].input.tokenizer = CountingTokenizer()

    def inputs(length):
        return {"text": "a" * length} if kind == "text" else {"messages": [{"role": "user", "content": "a" * length}]}

    for _ in range(5):      # places in the queue are given back
        refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, "m", inputs(101),
                match="a text of 101 characters: more than the 100 .*engine_max_length of model 'm'")
    assert tokenizer.encoded == 0
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, "m", inputs(100),
            match="the prompt has 100 tokens")
    assert tokenizer.encoded == 1 and run(engine, [1], max_new_tokens=3) == expected_output([1], 3)


def test_what_may_not_be_opened_is_not_restored(make_engine, tmp_path):
    path = str(tmp_path / "state.json")
    make_engine(state_file=path).close()

    def check(config):
        raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED, f"{config.model_path} is outside")

    engine = make_engine(None, state_file=path)
    assert engine.restore(check=check) == [] and list(engine.failures()) == ["m"]
    again = make_engine(None, state_file=path)
    assert again.restore() == ["m"] and again.failures() == {}


def test_failures_of_models_are_reported(make_engine):
    engine = make_engine(fail_at=0)
    assert engine.failures() == {}
    _, handle, _ = engine.start_request("m", {"input_ids": [1]})
    engine.sync_request("m", handle)
    assert engine.failures() == {"m": "rank 1 was lost"}
