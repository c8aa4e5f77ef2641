"""FastChat's worker: the protocol alone, and behind FastChat's own controller and API server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

import httpx
import pytest

from allspark_client import ClientEngine, ModelInfo
from allspark_launch.cli import main
from allspark_launch.commands.fastchat_worker import CHATML, Refused, config_of, conversation
from allspark_launch.group.background import background_group, shipped_model
from support.waiting import wait_for

MODEL = "fable"
PROMPT = "<|im_start|>user\nWhat is 12+30?<|im_end|>\n<|im_start|>assistant\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def process(*words: str, **environment: str):
    running = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env={**os.environ, **environment})
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(url, timeout=5).status_code < 500
    return False


@pytest.fixture(scope="module")
def group():
    with background_group(["--model", str(shipped_model()), "--max-length", "512"], timeout=60.0) as running:
        yield running.addresses[0]


@pytest.fixture(scope="module")
def worker(group):
    """The URL of a worker that registers with no controller."""
    port = free_port()
    with process("allspark_launch", "fastchat-worker", "--address", group, "--host", "127.0.0.1", "--port", str(port),
                 "--no-register", "--model-names", "fox,story"):
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/worker_get_status"), 60)
        yield f"http://127.0.0.1:{port}"


def post(url: str, **body):
    return httpx.post(url, json=body, timeout=60).json()


def test_protocol(worker):
    assert post(f"{worker}/worker_get_status") == {"model_names": ["fox", "story"], "speed": 1, "queue_length": 0}
    assert post(f"{worker}/model_details", model="fox") == {"context_length": 512}
    assert post(f"{worker}/worker_get_conv_template", model="fox") == {"conv": CHATML}
    count = post(f"{worker}/count_token", prompt=PROMPT)["count"]
    whole = post(f"{worker}/worker_generate", prompt=PROMPT, temperature=0, max_new_tokens=40, echo=False, stop=None)
    assert whole["error_code"] == 0 and "42" in whole["text"] and whole["finish_reason"] == "stop"
    assert whole["usage"]["prompt_tokens"] == count
    with httpx.stream("POST", f"{worker}/worker_generate_stream", timeout=60, json={
            "prompt": PROMPT, "temperature": 0, "max_new_tokens": 40, "echo": True, "stop": ["2"]}) as response:
        pieces = [json.loads(piece) for piece in response.read().split(b"\0") if piece]
    assert [p["text"] for p in pieces] == sorted((p["text"] for p in pieces), key=len)
    assert pieces[-1]["text"] == PROMPT + whole["text"][: whole["text"].index("2")]
    assert pieces[-1]["finish_reason"] == "stop" and pieces[0]["finish_reason"] is None
    short = post(f"{worker}/worker_generate", prompt=PROMPT, temperature=0, max_new_tokens=2, echo=False)
    assert short["finish_reason"] == "length" and short["usage"]["completion_tokens"] == 2
    found = post(f"{worker}/worker_get_embeddings", input=["a", "b c"])
    assert len(found["embedding"]) == 2 and abs(sum(x * x for x in found["embedding"][0]) - 1) < 1e-4


def test_refusals(worker, group):
    for change, code in (({"temperature": -1}, 40302), ({"top_p": 3}, 40302), ({"best_of": 3}, 40302),
                         ({"logprobs": 2}, 40302), ({"prompt": "a " * 5000}, 40303), ({"prompt": ""}, 40302)):
        answer = post(f"{worker}/worker_generate", **{"prompt": PROMPT, "max_new_tokens": 3, **change})
        assert answer["error_code"] == code and answer["text"], change
    assert post(f"{worker}/count_token")["error_code"] == 40302
    with httpx.stream("POST", f"{worker}/worker_generate_stream", timeout=60, json={
            "prompt": "Once", "max_new_tokens": 400, "stop_token_ids": [], "temperature": 1}) as response:
        next(response.iter_bytes())
    with ClientEngine(group) as engine:  # a client that has gone needs no answer
        wait_for(lambda: engine.get_as_engine_stat(MODEL).running_request == 0, 10)
    assert post(f"{worker}/worker_get_status")["queue_length"] == 0


def test_parameters():
    info = ModelInfo(vocab_size=100)
    config = config_of({"temperature": 0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 9, "stop": "x", "prompt": "p",
                        "stop_token_ids": [5, 1000], "presence_penalty": 0.5, "seed": 3}, info)
    assert (config.do_sample, config.top_k, config.max_new_tokens, config.stop) == (False, 0, 9, ["x"])
    assert config.stop_words_ids == [[5]] and config.presence_penalty == 0.5 and config.seed == 3
    assert config_of({"temperature": 0.7, "top_p": 0}, info).do_sample is False
    with pytest.raises(Refused, match="beam search"):
        config_of({"use_beam_search": True}, info)


def test_wrong_uses(capsys):
    for words, text in ((["--port", "0"], "--port"), (["--address", "unix:/x", "--model", "/y"], "give one of them"),
                        (["--conv-template", "no such"], "conv-template")):
        assert main(["fastchat-worker", *words]) == 1 and text in capsys.readouterr().err


#: FastChat 0.2.36 streams by a keyword that pydantic 2 has no more
PYDANTIC = """
import pydantic
pydantic.BaseModel.json = lambda self, ensure_ascii=True, **keywords: self.model_dump_json(**keywords)
"""


@pytest.mark.slow
def test_fastchat_itself(group, tmp_path):
    """FastChat's controller and API server, with OpenAI's client."""
    pytest.importorskip("fastchat")
    openai = pytest.importorskip("openai")
    assert conversation("qwen-7b-chat")["sep_style"] == CHATML["sep_style"]
    controller, api, port = free_port(), free_port(), free_port()
    address = f"http://127.0.0.1:{controller}"
    (tmp_path / "sitecustomize.py").write_text(PYDANTIC)
    with contextlib.ExitStack() as stack:
        def start(*words):
            stack.enter_context(process(*words, LOGDIR=str(tmp_path), PYTHONPATH=str(tmp_path)))

        start("allspark_launch", "fastchat-worker", "--address", group, "--host", "127.0.0.1", "--port", str(port),
              "--controller-address", address)  # before its controller
        start("fastchat.serve.controller", "--host", "127.0.0.1", "--port", str(controller))
        start("fastchat.serve.openai_api_server", "--host", "127.0.0.1", "--port", str(api), "--controller-address",
              address)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{api}/v1", api_key="EMPTY", max_retries=0)

        def models() -> list[str]:
            with contextlib.suppress(openai.OpenAIError):
                return [model.id for model in client.models.list().data]
            return []

        wait_for(lambda: models() == [MODEL], 60)
        messages = [{"role": "user", "content": "What is 12+30?"}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        assert "42" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0.7)
        assert done.choices[0].text and done.usage.completion_tokens <= 8
        vector = client.embeddings.create(model=MODEL, input="a fox").data[0].embedding
        assert len(vector) > 10
        with pytest.raises(openai.OpenAIError, match="context length"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a " * 4000}])
