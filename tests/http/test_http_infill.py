"""Completions with a suffix: the prompt has the tokens that the model's tokenizer has for filling in. A model without
such tokens is in test_http_bad_input.py.
"""

from __future__ import annotations

import shutil

import httpx
import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group
from support.checkpoints import checkpoint
from support.gemma4 import VOCAB
from support.http_helpers import http_server_for
from support.tiny_tokenizer import add_tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_suffixes(tmp_path):
    pytest.importorskip("torch")
    shutil.copytree(checkpoint("qwen2-gqa-tied"), tmp_path / "m")
    add_tokenizer(tmp_path / "m", VOCAB, MARKS)
    command = ["--model", str(tmp_path / "m"), "--model-name", "m"]
    with background_group(command, timeout=60.0) as group, ClientEngine(group.addresses) as engine, \
            http_server_for(group.addresses[0], insecure=True) as address, \
            httpx.Client(base_url=f"http://{address}/v1", timeout=60) as client:
        body = {"model": "m", "prompt": ["the quick ", "one "], "max_tokens": 5, "temperature": 0,
                "return_token_ids": True, "suffix": " dog"}
        answer = client.post("/completions", json=body)
        found = [choice["prompt_token_ids"] for choice in answer.json()["choices"]]
        before, behind, middle = (engine.tokenize("m", {"text": mark})[0] for mark in MARKS)
        for ids, prompt in zip(found, body["prompt"]):
            text, suffix = (engine.tokenize("m", {"text": text}) for text in (prompt, " dog"))
            assert ids == [before, *text, behind, *suffix, middle]
        for more in ({"prompt": [5, 6]}, {"echo": True}):
            wrong = client.post("/completions", json={**body, **more})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "suffix"
        plain = client.post("/completions", json={**body, "suffix": ""}).json()["choices"][1]["prompt_token_ids"]
        assert plain == engine.tokenize("m", {"text": "one "})
