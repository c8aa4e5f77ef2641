"""Chat formats over HTTP: `/v1/models` names the one of each model's template, and forced calls come in its form."""

from __future__ import annotations

import httpx
import pytest

from allspark_client import AsModelConfig, ClientEngine
from allspark_launch.group.background import background_group, shipped_model
from support.http_helpers import http_server_for
from support.shown_calls import SHOWN
from support.tool_calls import TIME, check_calls

NAMES = ("qwen3_coder", "nemotron_json", "deepseek_v32", "deepseek_v4", "hunyuan", "olmo3", "glm47")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """An HTTP server with the shipped model under the name of each format, with that format's template."""
    with background_group([], timeout=60.0) as group, ClientEngine(group.addresses[0]) as engine:
        for name in NAMES:
            template = tmp_path_factory.mktemp(name) / "chat_template.jinja"
            template.write_text(SHOWN[name])
            engine.install_model(AsModelConfig(model_name=name, model_path=str(shipped_model()), engine_max_length=1024,
                                               chat_template=str(template)))
            engine.start_model(name)
        with http_server_for(group.addresses[0], insecure=True) as address, \
                httpx.Client(base_url=f"http://{address}", timeout=120) as client:
            yield client


def test_models_name_their_formats(client):
    models = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    for name in NAMES:
        assert models[name]["chat_format"] == name and models[name]["chat_format_guessed"] is False


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_are_calls(client, name, choice):
    answer = client.post("/v1/chat/completions", json={
        "model": name, "messages": [{"role": "user", "content": "When?"}], "tools": [TIME], "tool_choice": choice,
        "parallel_tool_calls": False, "temperature": 0})
    assert answer.status_code == 200, answer.text
    [reply] = answer.json()["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in reply["message"]["tool_calls"]]
    check_calls(calls)
    assert len(calls) == 1 and not reply["message"]["content"]
    assert reply["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
