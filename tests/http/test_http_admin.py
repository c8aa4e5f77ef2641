"""Sleep and wake, the prefix cache and the server's description over HTTP, in vLLM's form."""

from __future__ import annotations

import dataclasses

import httpx
import pytest

from allspark_client.errors import AllSparkError, AsStatus
from support.fake_service import serving
from support.http_helpers import KEYS, http_server_for, token_file
from support.script_engine import ScriptEngine
from support.waiting import wait_for


class _OnGpus(ScriptEngine):
    """Notes the calls for device memory, as an engine with models on GPUs takes them."""

    def __init__(self):
        super().__init__("hermes")
        self.moves: list[str] = []

    def unload_device_mem(self, model_name):
        if model_name == "full":
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR, "too little host memory")
        assert not self._models[model_name].running
        self.moves.append("unload")

    def load_device_mem(self, model_name):
        self.moves.append("load")

    def _publish(self, config, model):
        super()._publish(config, model)
        model.info.isa = "avx2" if model.name == "cpu" else "sm_90"


@pytest.fixture(scope="module")
def admin(tmp_path_factory):
    with serving(core=_OnGpus()) as (engine, group), \
            http_server_for(group, token_file=token_file(tmp_path_factory.mktemp("keys"))) as address, \
            httpx.Client(base_url=f"http://{address}", timeout=60,
                         headers={"authorization": f"Bearer {KEYS['admin']}"}) as client:
        yield client, engine


def ask(client: httpx.Client) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return client.post("/v1/chat/completions", json=body)


def test_sleep_and_wake(admin):
    client, engine = admin
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/sleep?level=1").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True} and engine.moves == ["unload"]
    assert client.get("/v1/models").json()["data"] == [] and ask(client).status_code == 400
    assert client.post("/wake_up?tags=weights").status_code == 200
    assert client.get("/is_sleeping?model=m").json() == {"is_sleeping": False} and engine.moves == ["unload", "load"]
    assert ask(client).json()["choices"][0]["message"]["content"] == "hello"
    wrong = client.post("/sleep?level=2")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "level"
    assert client.post("/sleep?model=none").status_code == 404
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        assert client.post(path, headers={"authorization": f"Bearer {KEYS['generate']}"}).status_code == 403


@pytest.mark.parametrize("name, why, status", [("cpu", "GPUs", 400), ("full", "too little host memory", 503)])
def test_a_model_that_cannot_sleep_goes_on(admin, name, why, status):
    client, engine = admin
    engine.serve(name)
    wait_for(lambda: client.get("/server_info").json()["models"][-1]["name"] == name, 10)
    refused = client.post("/sleep", params={"model": name})
    assert refused.status_code == status and why in refused.json()["error"]["message"]
    assert engine._models[name].running
    engine.release_model(name)


def test_description(admin):
    client, engine = admin
    engine._models["m"].info.chat_format_guessed = True
    found = client.get("/server_info").json()
    model = next(model for model in found["models"] if model["name"] == "m")
    assert model["running"] and model["max_length"] == engine._models["m"].info.max_length
    assert not any("dir" in name for name in model) and found["members"][0]["connected"]
    assert found["version"] == client.get("/version").json()["version"]
    assert dataclasses.asdict(engine._models["m"].info).keys() >= model.keys() - {"running"}


def test_prefixes_are_forgotten(http_server):
    body = {"model": "fable", "prompt": "One day a fox and a bear met. " * 12, "max_tokens": 1}

    def cached() -> int:
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with http_server.client(KEYS["admin"]) as client:
        cached()
        assert cached() > 0
        assert client.post("/reset_prefix_cache?model=fable").status_code == 200
        assert cached() == 0 and cached() > 0
