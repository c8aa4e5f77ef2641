"""The models of a group after a start and after a restart: configured ones, and those that clients installed."""

from __future__ import annotations

import json

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus
from allspark_server.__main__ import is_misconfiguration
from allspark_server.engine.engine import Engine
from support.fake_group import FakeGroup


class Group(FakeGroup):
    """Loading a model named in `refused` fails for the reason given there."""

    def __init__(self, refused: dict[str, Exception]):
        super().__init__()
        self.refused = refused

    def start_load(self, config):
        if config.model_name in self.refused:
            raise self.refused[config.model_name]
        super().start_load(config)


MEMORY = AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR, "too large")
PATH = AllSparkError(AsStatus.ALLSPARK_IO_ERROR, "model_path '/x' does not exist")


def config(name: str, **fields) -> AsModelConfig:
    return AsModelConfig(model_name=name, model_path="/nowhere", **fields)


@pytest.fixture
def start(tmp_path):
    """Starts an engine with configured models over the same state file, after the end of the last."""
    engines: list[Engine] = []

    def make(*configured: AsModelConfig, again: bool = False, refused: dict | None = None) -> Engine:
        if engines:
            engines[-1].close()
        engine = Engine(group=Group(refused or {}), state_file=str(tmp_path / "state.json"))
        engines.append(engine)
        engine.restore(list(configured), again=again)
        return engine

    yield make
    for engine in engines:
        engine.close()


def names(engine: Engine) -> dict[str, bool]:
    return {m.name: m.running for m in engine.list_models()}


def test_a_start_has_the_models_that_the_configuration_names(start):
    first = start(config("kept"), config("edited"), config("removed"))
    first.install_model(config("by-client"))
    first.start_model("by-client")
    first.release_model("kept")
    second = start(config("kept"), config("edited", cache_span_size=64), config("added"))
    assert names(second) == {"kept": True, "edited": True, "added": True, "by-client": True}
    assert second.get_model_info("edited").span_size == 64
    assert names(start()) == {"by-client": True}


def test_a_replaced_group_has_what_the_lost_one_had(start):
    """Until the next start, clients may stop and release configured models."""
    configured = config("released"), config("stopped"), config("m")
    first = start(*configured)
    first.release_model("released")
    first.stop_model("stopped")
    first.install_model(config("by-client", cache_span_size=64))
    second = start(*configured, again=True)
    assert names(second) == {"stopped": False, "m": True, "by-client": False}
    assert names(start(*configured)) == {"released": True, "stopped": True, "m": True, "by-client": False}


def test_a_group_lost_while_it_loads_still_knows_what_to_load(start, tmp_path):
    configured = config("a"), config("b")
    with pytest.raises(RuntimeError):
        start(*configured, refused={"b": MEMORY})
    assert names(start(*configured, again=True)) == {"a": True, "b": True}


def test_a_start_without_a_model_of_the_configuration_fails(start):
    with pytest.raises(ValueError, match="model 'm' of the configuration cannot be loaded: .*does not exist") as path:
        start(config("m"), refused={"m": PATH})
    assert is_misconfiguration(path.value)          # it would fail like this again
    with pytest.raises(RuntimeError, match="model 'm' of the configuration cannot be loaded: .*too large") as memory:
        start(config("m"), refused={"m": MEMORY})
    assert not is_misconfiguration(memory.value)
    with pytest.raises(ValueError, match="two models of the configuration have one name"):
        start(config("m"), config("m"))


def test_a_client_s_model_that_is_not_back_is_reported(start, tmp_path):
    start(config("m")).install_model(config("by-client"))
    lost = {"by-client": MEMORY}
    second = start(config("m"), refused=lost)
    assert names(second) == {"m": True}             # the rest is served
    assert second.unrestored == {"by-client": "ALLSPARK_MEMORY_ERROR: too large"}
    second.release_model("by-client")
    assert second.unrestored == {}
    assert [e["config"]["model_name"] for e in json.loads((tmp_path / "state.json").read_text())] == ["m"]
    second.install_model(config("by-client-too"))
    third = start(config("m"), refused={"by-client-too": MEMORY})
    third._group.refused.clear()
    third.install_model(config("by-client-too"))
    assert third.unrestored == {} and names(start(config("m"))) == {"m": True, "by-client-too": False}


def test_after_a_restart_a_configured_model_that_is_not_back_is_reported(start):
    start(config("m"), config("n"))
    second = start(config("m"), config("n"), again=True, refused={"n": MEMORY})
    assert names(second) == {"m": True} and list(second.unrestored) == ["n"]
