"""Chat templates that the operator or the request chooses."""

from __future__ import annotations

import shutil

import httpx
import pytest

pytest.importorskip("torch")

from allspark_client import AsModelConfig, ClientEngine
from allspark_launch.group.background import background_group
from support.checkpoints import checkpoint
from support.gemma4 import VOCAB
from support.http_helpers import http_server_for
from support.tiny_tokenizer import add_tokenizer
from support.waiting import wait_for

TEMPLATE = "{% for m in messages %}{{ m.role }} said {{ m.content }}. {% endfor %}"
OWN = "{% for m in messages %}{{ m.content }} {{ sign }}{% endfor %}"
CHAT = [{"role": "user", "content": "the fox"}]


def test_of_the_operator_and_of_requests(tmp_path):
    base = shutil.copytree(checkpoint("qwen2-gqa-tied"), tmp_path / "base")
    add_tokenizer(base, VOCAB)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    flags = ["--chat-template", str(tmp_path / "chat.jinja"), "--trust-request-chat-template"]
    with background_group(["--model", str(base), "--model-name", "m", *flags], timeout=60.0) as group, \
            http_server_for(group.addresses[0], insecure=True) as address, ClientEngine(group.addresses[0]) as engine, \
            httpx.Client(base_url=f"http://{address}", timeout=60) as client:

        def prompt(**fields) -> list[int]:
            answer = client.post("/tokenize", json={"model": "m", **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()["tokens"]

        def ids(text: str) -> list[int]:
            return prompt(prompt=text, add_special_tokens=False)

        assert prompt(messages=CHAT) == ids("user said the fox. ")
        assert prompt(messages=CHAT, chat_template=OWN, chat_template_kwargs={"sign": "!"}) == ids("the fox !")
        body = {"model": "m", "messages": CHAT, "max_tokens": 2, "return_token_ids": True, "chat_template": OWN}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["prompt_token_ids"] == ids("the fox ")
        wrong = client.post("/v1/chat/completions", json={**body, "chat_template": "{% for %}"})
        assert wrong.status_code == 400 and "chat template" in wrong.json()["error"]["message"]

        engine.install_model(AsModelConfig("strict", base))
        engine.start_model("strict")
        wait_for(lambda: len(client.get("/v1/models").json()["data"]) == 2, 10)
        error = client.post("/v1/chat/completions", json={**body, "model": "strict"}).json()["error"]
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
