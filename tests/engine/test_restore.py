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


# A client's model in the state file of version 0.1.0
LAST_CONFIG = {"model_name": "by-client", "model_path": "/nowhere", "weights_path": "", "compute_unit": "CPU:0",
    "engine_max_length": 4096, "engine_max_batch": 32, "engine_max_prefill_length": 0, "num_threads": 0,
    "matmul_precision": "highest", "prefill_mode": "AsPrefillDefault", "cache_mode": "AsCacheDefault",
    "cache_span_size": 32, "enable_prefix_cache": True, "prefix_cache_ttl": 300, "eviction_strategy": "MaxLength",
    "scheduling_strategy": "ContextPriority", "swap_threshold": -1, "text_graph": False, "lora_max_rank": 64,
    "lora_max_num": 5, "lora_names": [], "weight_dtype": "auto", "weight_group_size": 0, "quantize_head": True,
    "cache_memory": 0, "host_cache_memory": 0, "host_cache_dir": "", "cache_dtype": "auto", "max_step_tokens": 0,
    "target_token_latency": 0.0, "max_queue": 10000, "max_queue_memory": 0, "speculation": "off", "draft_model": ""}


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


@pytest.mark.parametrize("damage", ["", "[{", '{"a": 1}', '[{"config": {}}]', "\x00" * 100, "[" * 100_000])
def test_a_damaged_state_file_is_kept_and_health_says_so(start, tmp_path, damage):
    """It was overwritten at once, and the group was healthy without the models of its clients."""
    file, aside = tmp_path / "state.json", tmp_path / "state.json.damaged"
    for again in (False, True):
        file.write_text(damage)
        engine = start(config("m"), again=again)
        assert names(engine) == {"m": True} and aside.read_text() == damage
        assert f"kept as {aside}" in engine.failures()["state file"]
        assert json.loads(file.read_text())[0]["config"]["model_name"] == "m"
    assert (tmp_path / "state.json.damaged-2").read_text() == damage, "none is overwritten"
    assert "state file" in start(config("m")).failures(), "also after the next start"
    aside.unlink()
    assert not engine.failures()


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


def test_a_state_file_of_the_last_version_is_read(start, tmp_path):
    """As version 0.1.0 wrote it."""
    entry = {"config": LAST_CONFIG, "started": True, "configured": False, "adapters": []}
    (tmp_path / "state.json").write_text(json.dumps([entry], indent=1))
    engine = start(config("m"))
    assert names(engine) == {"m": True, "by-client": True} and engine.unrestored == {}
    assert engine.get_model_info("by-client").max_length == 4096


@pytest.mark.parametrize("again", [False, True])
def test_a_state_file_of_a_newer_version_is_refused_and_left_as_it_was(start, tmp_path, again):
    file = tmp_path / "state.json"
    file.write_text('{"version": 2, "models": {"m": {}}}')
    with pytest.raises(ValueError, match=r"state_file: .*state.json has version 2, written by a newer allspark; this "
                                         "one reads version 1: start the newer one, or name another file") as error:
        start(config("m"), again=again)
    assert is_misconfiguration(error.value)
    assert file.read_text() == '{"version": 2, "models": {"m": {}}}'


def test_an_entry_of_a_newer_version_is_kept(start, tmp_path):
    """The file has a form that this version reads, a model in it has a field that this version lacks."""
    file = tmp_path / "state.json"
    entry = {"config": {**LAST_CONFIG, "from_the_future": 1}, "started": True, "configured": False, "adapters": []}
    file.write_text(json.dumps([entry]))
    engine = start(config("m"))
    assert names(engine) == {"m": True} and "from_the_future" in engine.unrestored["by-client"]
    assert entry in json.loads(file.read_text())
