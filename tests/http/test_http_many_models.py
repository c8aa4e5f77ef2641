"""Many models behind one address: loaded on demand, aliases, and keys that allow some of them."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from allspark_client import AsModelConfig
from support.fake_service import serving
from support.http_helpers import http_server_for
from support.script_engine import ScriptEngine
from support.waiting import wait_for

TOKENS = {"admin": "admin-key-0123456789", "all": "all-key-0123456789", "some": "some-key-0123456789"}


class _Small(ScriptEngine):
    """An engine with room for the model "m" and one of "a" and "b", which are loaded on demand."""

    def __init__(self):
        super().__init__("hermes")
        for name in "ab":
            self.install_model(AsModelConfig(name, "/none", on_demand=True, aliases=[f"gpt-{name}"]))
            self.start_model(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"admin {TOKENS['admin']}\ngenerate {TOKENS['all']}\n"
                    f"generate {TOKENS['some']} models=a,gpt-b requests_per_minute=1000\n")
    path.chmod(0o600)
    with serving(core=_Small()) as (engine, group), http_server_for(group, token_file=str(path)) as address:
        yield engine, address


def client(address: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{address}", timeout=30, headers={"authorization": f"Bearer {TOKENS[key]}"})


def ask(http: httpx.Client, model: str, **fields) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
    return http.post("/v1/chat/completions", json=body)


def loaded(engine) -> set[str]:
    return {state.name for state in engine.list_models() if state.running}


def test_a_request_loads_its_model(server):
    engine, address = server
    with client(address, "admin") as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert {name: card["loaded"] for name, card in cards.items()} == \
            {"m": True, "a": False, "gpt-a": False, "b": False, "gpt-b": False}
        assert {name for name, card in cards.items() if card["on_demand"]} == {"a", "gpt-a", "b", "gpt-b"}
        assert cards["gpt-a"]["parent"] == "a" and "max_model_len" not in cards["a"]
        answer = ask(http, "gpt-a")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "hello" and "a" in loaded(engine)
        card = http.get("/v1/models/a").json()
        assert card["max_model_len"] > 0 and card["loaded"] and card["on_demand"]
        assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
        assert "a" not in loaded(engine)
        assert http.post("/models/load", json={"model": "gpt-b"}).json() == {"success": True} and "b" in loaded(engine)
        refused = http.post("/models/unload", json={"model": "m"})
        assert refused.status_code == 400 and "on_demand" in refused.json()["error"]["message"]
        http.post("/models/unload", json={"model": "b"})


def test_a_stream_is_told_of_the_load(server):
    engine, address = server
    engine._group.loaded = threading.Event()
    lines: list[str] = []

    def read():
        with client(address, "all") as http, http.stream("POST", "/v1/chat/completions", json={
                "model": "a", "stream": True, "messages": [{"role": "user", "content": "hello"}]}) as answer:
            assert answer.status_code == 200
            lines.extend(answer.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    with client(address, "all") as http:
        other = threading.Thread(target=lambda: ask(http, "a"))
        other.start()
        wait_for(lambda: engine._on_demand.part("a") == 0.5, 5)
        thread.join(1.5)
        engine._group.loaded.set()
        thread.join(10)
        other.join(10)
    assert not thread.is_alive() and lines[0] == ": the model is being loaded, 50 %"
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
    engine.unload_model("a")


def test_the_stream_of_a_load_that_fails_ends_with_the_error(server, monkeypatch):
    engine, address = server

    def fail(config):
        raise ValueError("a broken checkpoint")

    monkeypatch.setattr(engine._group, "start_load", fail)
    sdk = openai.OpenAI(base_url=f"http://{address}/v1", api_key=TOKENS["all"], max_retries=0)
    with pytest.raises(openai.APIError, match="a broken checkpoint"):
        sdk.chat.completions.create(model="b", messages=[{"role": "user", "content": "hello"}])


def test_keys_allow_models(server):
    _, address = server
    with client(address, "some") as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "gpt-a", "gpt-b"]
        assert http.get("/v1/models/m").status_code == 404
        assert ask(http, "a").status_code == 200 and ask(http, "gpt-b").status_code == 200
        for path, body in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                           ("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"}),
                           ("/v1/responses", {"input": "x"}), ("/v1/embeddings", {"input": "x"}),
                           ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]})):
            answer = http.post(path, json={"model": "m", **body})
            assert answer.status_code == 404 and "key does not allow" in answer.text, path
        assert http.post("/detokenize", json={"model": "m", "tokens": [1]}).status_code == 404
        assert http.post("/models/load", json={"model": "a"}).status_code == 403
