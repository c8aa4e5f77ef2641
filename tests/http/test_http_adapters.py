"""Adapters that are loaded and freed over HTTP, in vLLM's form."""

from __future__ import annotations

import shutil

import httpx
import pytest

pytest.importorskip("torch")

from allspark_launch.group.background import background_group
from support.adapters import write_adapter
from support.checkpoints import checkpoint
from support.endpoint_picker import read
from support.gemma4 import VOCAB
from support.http_helpers import KEYS, http_server_for, token_file
from support.tiny_tokenizer import add_tokenizer


def test_loading_and_freeing(tmp_path):
    base = shutil.copytree(checkpoint("qwen2-gqa-tied"), tmp_path / "base")
    add_tokenizer(base, VOCAB)
    adapter = write_adapter(tmp_path / "support", base)
    with background_group(["--model", str(base), "--model-name", "m"], timeout=60.0) as group, \
            http_server_for(group.addresses[0], token_file=token_file(tmp_path)) as address, \
            httpx.Client(base_url=f"http://{address}/v1", timeout=60,
                         headers={"authorization": f"Bearer {KEYS['admin']}"}) as client:

        def models() -> list[str]:
            return [model["id"] for model in client.get("/models").json()["data"]]

        def answer(model: str) -> list[int]:
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            return client.post("/completions", json=body).json()["choices"][0]["token_ids"]

        def known_to_a_picker() -> set[str]:
            return set(read(httpx.get(f"http://{address}/metrics", headers=client.headers).text).loaded)

        def refused(what: str, status: int, param: str | None = None, **body) -> str:
            found = client.post(f"/{what}_lora_adapter", json=body)
            assert found.status_code == status and found.json()["error"]["param"] == param, found.text
            return found.json()["error"]["message"]

        names = {"lora_name": "support", "lora_path": str(adapter)}
        done = client.post("/load_lora_adapter", json=names)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'support' added successfully.")
        assert models() == ["m", "support"] and answer("support") != answer("m")
        assert known_to_a_picker() == {"support"}, "no request runs: it is loaded"
        assert "unload it first" in refused("load", 400, **names)
        assert str(tmp_path / "none") in refused("load", 404, lora_name="other", lora_path=str(tmp_path / "none"))
        assert "no model named 'n'" in refused("load", 404, "model", **names, model="n")
        refused("load", 400, "lora_name", lora_name="a/b", lora_path=str(adapter))
        refused("load", 400, "lora_path", lora_name="other")
        denied = client.post("/unload_lora_adapter", json={"lora_name": "support"},
                             headers={"authorization": f"Bearer {KEYS['generate']}"})
        assert denied.status_code == 403 and models() == ["m", "support"]
        done = client.post("/unload_lora_adapter", json={"lora_name": "support", "model": "m"})
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'support' removed successfully.")
        assert models() == ["m"] and not known_to_a_picker()
        refused("unload", 404, lora_name="support")
