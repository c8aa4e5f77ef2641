"""Models that are loaded when a request names them, in the engine and behind a server."""

from __future__ import annotations

import json
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from allspark_client import AllSparkError, AsModelConfig, AsStatus, ClientEngine
from allspark_launch.cli import main
from allspark_server.engine import on_demand
from allspark_server.engine.engine import Engine
from support.engine_helpers import collect, refused
from support.fake_engine import FakeEngine, expected, token_after
from support.fake_group import FakeGroup
from support.fake_service import serving, tokens, wait_until

PROMPT = [1, 2, 3]


class SmallGroup(FakeGroup):
    """A group with room for `room` models. `loads`: the names of those that were loaded, in order."""

    def __init__(self, room: int = 1, **options):
        super().__init__(token=token_after, **options)
        self.room, self.loads = room, []

    def start_load(self, config):
        if len(self.executors) >= self.room:
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR, f"no room for {config.model_name}")
        self.loads.append(config.model_name)
        super().start_load(config)


def config(name: str, **fields) -> AsModelConfig:
    return AsModelConfig(name, "/none", on_demand=True, **fields)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(on_demand, "STAY_SECONDS", 0.05)
    monkeypatch.setattr(on_demand, "_IDLE_LOOK_SECONDS", 0.02)


@pytest.fixture
def make():
    engines = []

    def make_engine(*names: str, state_file=None, fields=None, **group) -> Engine:
        engine = Engine(group=SmallGroup(**group), state_file=state_file)
        engines.append(engine)
        for name in names:
            engine.install_model(config(name, **(fields or {})))
            engine.start_model(name)
        return engine

    yield make_engine
    for engine in engines:
        engine._group.hurry()
        engine.close()


def start(engine, name: str, count: int = 5):
    return engine.start_request(name, {"input_ids": PROMPT}, {"max_new_tokens": count, "eos_token_id": -1})[2]


def loaded(engine) -> list[str]:
    return [state.name for state in engine.list_models() if state.running]


def test_a_request_loads_its_model_and_unloads_another(make):
    engine = make("a", "b", "c", room=2)
    assert not loaded(engine) and all(state.on_demand for state in engine.list_models())
    for name in ("a", "b", "a", "c"):
        assert collect(start(engine, name)) == expected(PROMPT, 5)
    assert engine._group.loads == ["a", "b", "c"] and loaded(engine) == ["a", "c"], "b was used before a"
    assert {state.name for state in engine.list_models() if state.on_demand} == {"b"}


def test_a_model_in_use_is_not_unloaded(make):
    engine = make("a", "b", delay=0.02)
    running = start(engine, "a", 20)
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.unload_model, "a", match="1 live requests")
    waiting = [threading.Thread(target=lambda name=name: results.append((name, collect(start(engine, name)))))
               for results in ([],) for name in ("b", "a", "b")]
    for thread in waiting:
        thread.start()
    assert collect(running) == expected(PROMPT, 20)
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()


def test_no_room(make, monkeypatch):
    monkeypatch.setattr(on_demand, "ROOM_SECONDS", 0.1)
    engine = make("a", "b", delay=0.02)
    engine._group.room = 0
    refused(AsStatus.ALLSPARK_MEMORY_ERROR, start, engine, "a", match="no room for a")
    engine._group.room = 1
    running = start(engine, "a", 50)
    refused(AsStatus.ALLSPARK_MEMORY_ERROR, start, engine, "b", match="no room for b")
    engine._group.hurry()
    assert collect(running) == expected(PROMPT, 50)
    assert collect(start(engine, "b")) == expected(PROMPT, 5), "a takes no place any more"


def test_pinned_models_stay(make):
    engine = make("a")
    engine.install_model(AsModelConfig("pinned", "/none"))
    refused(AsStatus.ALLSPARK_MEMORY_ERROR, start, engine, "a")
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.unload_model, "pinned", match="on_demand")
    refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.unload_model, "x", match="installed: 'a', 'pinned'")


def test_unloaded_after_its_idle_timeout(make):
    engine = make("a", fields={"idle_timeout": 0.2})
    collect(start(engine, "a"))
    assert loaded(engine) == ["a"]
    wait_until(lambda: not loaded(engine), 3)
    assert collect(start(engine, "a")) == expected(PROMPT, 5)
    with pytest.raises(ValueError, match="idle_timeout=3 is for models on demand"):
        AsModelConfig("a", "/none", idle_timeout=3).validate()


def test_stopped_and_released(make):
    engine = make("a", room=2)
    collect(start(engine, "a"))
    engine.unload_model("a")
    assert not loaded(engine)
    engine.load_model("a")
    assert loaded(engine) == ["a"]
    engine.stop_model("a")
    assert not loaded(engine)
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, start, engine, "a", match="call start_model first")
    engine.start_model("a")
    collect(start(engine, "a"))
    refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.install_model, config("a"), match="release it first")
    engine.release_model("a")
    refused(AsStatus.ALLSPARK_PARAM_ERROR, start, engine, "a", match="no model named 'a'")


def test_loads_that_wait_end_with_the_model_and_the_engine(make):
    for end in (lambda engine: engine.release_model("a"), lambda engine: engine.stop_model("a"),
                lambda engine: engine.close()):
        engine, failures = make("a", loaded=threading.Event()), []

        def load(engine=engine, failures=failures):
            try:
                engine.load_model("a")
            except AllSparkError as error:
                failures.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        wait_until(lambda engine=engine: engine._group.loads, 3)
        assert engine.loaded_part("a") == 0.5
        end(engine)
        thread.join(5)
        assert not thread.is_alive() and len(failures) == 1


def test_restarts(make, tmp_path):
    """A group that replaces a lost one loads what that had loaded; a first start loads nothing."""
    path = str(tmp_path / "state.json")
    engine = make("a", "b", state_file=path, room=2)
    engine._record.configured |= {"a", "b"}
    collect(start(engine, "a"))
    engine.close()
    assert [(entry["config"]["model_name"], entry["loaded"]) for entry in json.loads(open(path).read())] == \
        [("a", True), ("b", False)]
    again = make(state_file=path, room=2)
    again.restore([config("a"), config("b")], again=True)
    assert loaded(again) == ["a"] and len(again.list_models()) == 2
    again.close()
    first = make(state_file=path, room=2)
    first.restore([config("a"), config("b")])
    assert not loaded(first) and [state.on_demand for state in first.list_models()] == [True, True]


class SmallEngine(FakeEngine):
    """An engine with room for a model besides "m", and models "a" and "b" on demand."""

    def __init__(self):
        super().__init__(group=SmallGroup(room=2, samples_differ=True))
        for name in "ab":
            self.install_model(config(name, aliases=[f"alias-{name}"]))
            self.start_model(name)


def test_behind_a_server(tmp_path, capsys):
    with serving(f"unix:{tmp_path}/s", SmallEngine()) as (engine, address), ClientEngine(address) as client:
        assert {state.name: (state.running, state.on_demand, state.aliases) for state in client.list_models()} == \
            {"m": (True, False, []), "a": (False, True, ["alias-a"]), "b": (False, True, ["alias-b"])}
        assert main(["top", "--address", address, "--once"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [("not loaded" in line) for line in lines[1:]] == [False, True, True], lines
        with grpc.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert check(health_pb2.HealthCheckRequest(service="allspark.Allspark")).status == 1
        for name in ("a", "m", "b", "a"):
            assert tokens(start(client, name)) == expected(PROMPT, 5)
        assert engine._group.loads == ["m", "a", "b", "a"]
        client.unload_model("a")
        assert not next(state for state in client.list_models() if state.name == "a").running
        parts: list[float] = []
        engine._group.loaded = threading.Event()
        loading = threading.Thread(target=lambda: client.load_model("b", parts.append))
        loading.start()
        wait_until(lambda: parts, 3)
        assert parts[0] == 0.5
        engine._group.loaded.set()
        loading.join(5)
        assert loaded(engine) == ["m", "b"]
        refused(AsStatus.ALLSPARK_PARAM_ERROR, client.load_model, "x", match="no model named 'x'")


def test_a_pool_prefers_the_member_that_has_loaded_the_model(tmp_path):
    with serving(f"unix:{tmp_path}/1", SmallEngine()) as (one, first), \
            serving(f"unix:{tmp_path}/2", SmallEngine()) as (two, second), ClientEngine([first, second]) as client:
        two.load_model("a")
        time.sleep(0.6)     # the client's knowledge may be that old
        for _ in range(3):
            assert tokens(start(client, "a")) == expected(PROMPT, 5)
        client.load_for_requests("a")
        assert client.get_model_info("a").name == "a" and client.get_as_engine_stat("a").total_span > 0
        refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, client.get_model_info, "b", match="not loaded now")
        refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, client.get_as_engine_stat, "b", match="not loaded now")
        assert one._group.loads == ["m"] and two._group.loads == ["m", "a"]
        client.load_for_requests("b")
        assert sorted(one._group.loads + two._group.loads) == ["a", "b", "m", "m"]
