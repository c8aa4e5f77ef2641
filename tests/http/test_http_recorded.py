"""Requests of programs that cannot be installed here, in the form in which their sources make them: bodies, headers and
what they read of the answers. The server refuses unknown fields, so every field is one that it knows.

vllm bench serve (vllm/benchmarks/lib/endpoint_request_func.py; vLLM needs CUDA), Open WebUI
(backend/open_webui/routers/openai.py and utils/middleware.py) and Continue (core/llm/llms/OpenAI.ts,
core/autocomplete; an extension of editors).
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.http_helpers import KEYS, MODEL, STORY

KEY = KEYS["generate"]
PROMPT = "Once upon a time"


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must have succeeded."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream") and "warning" not in answer.headers
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- vllm bench serve --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, [10, 11, 12]])
def test_vllm_bench_of_completions(http_server, prompt):
    body = {"model": MODEL, "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    answer = httpx.post(f"{http_server.url}/v1/completions", json=body, timeout=60, headers={
        "Authorization": f"Bearer {KEY}", "x-request-id": "bench-1234-0"})
    chunks = events(answer)
    assert answer.headers["x-request-id"] == "bench-1234-0"
    assert chunks[0]["choices"] and all("text" in chunk["choices"][0] for chunk in chunks[:-1])
    assert not chunks[-1]["choices"] and chunks[-1]["usage"]["completion_tokens"] == 9


def test_vllm_bench_of_chats(http_server):
    body = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
            "max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    answer = httpx.post(f"{http_server.url}/v1/chat/completions", json=body, timeout=60, headers={
        "Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "x-request-id": "bench-1234-1"})
    chunks = events(answer)
    assert all("content" in chunk["choices"][0]["delta"] or chunk["choices"][0]["finish_reason"]
               for chunk in chunks[:-1])
    assert not chunks[-1]["choices"] and chunks[-1]["usage"]["completion_tokens"] == 9


# --- Open WebUI --------------------------------------------------------------------------------------------------

WEBUI = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "X-OpenWebUI-User-Name": "Ann%20B",
         "X-OpenWebUI-User-Id": "7b2c", "X-OpenWebUI-User-Email": "ann@example.org", "X-OpenWebUI-User-Role": "user",
         "X-OpenWebUI-Chat-Id": "0f6a"}
CLOCK = {"type": "function", "function": {
    "name": "get_current_time", "description": "Get the current time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string", "description": "A time zone"}},
                   "required": []}}}


def webui(http_server, **body: Any) -> httpx.Response:
    return httpx.post(f"{http_server.url}/v1/chat/completions", headers=WEBUI, content=json.dumps(body), timeout=60)


def test_open_webui_models(http_server):
    models = httpx.get(f"{http_server.url}/v1/models", headers=WEBUI).json()["data"]
    assert [model["id"] for model in models] == [MODEL]


def test_open_webui_chat(http_server):
    """A chat with the parameters of a model's settings, then the task that makes its title."""
    chunks = events(webui(
        http_server, stream=True, model=MODEL, temperature=0.0, top_p=0.9, max_tokens=12, frequency_penalty=0.0, seed=1,
        stop=["zzz"], logit_bias={"5": -50}, stream_options={"include_usage": True},
        messages=[{"role": "system", "content": "Be brief."}, *STORY]))
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    title = webui(http_server, model=MODEL, stream=False, max_completion_tokens=12,
                  messages=[{"role": "user", "content": "### Task:\nGenerate a concise title."}])
    assert title.status_code == 200 and title.json()["choices"][0]["message"]["content"]


def test_open_webui_sends_tool_calls_back_as_it_has_joined_them(http_server):
    call = {"index": 0, "id": "call_1", "type": "function",
            "function": {"name": "get_current_time", "arguments": '{"zone": "UTC"}'}}
    chunks = events(webui(
        http_server, stream=True, model=MODEL, max_tokens=8, tools=[CLOCK], messages=[
            *STORY, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}]))
    assert chunks[-1]["choices"][0]["finish_reason"]


# --- Continue ----------------------------------------------------------------------------------------------------

CONTINUE = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "api-key": KEY}
#: stop strings of a completion with Qwen's template
QWEN_STOPS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
              "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"]


def test_continue_chat(http_server):
    body = {"messages": STORY, "model": MODEL, "max_tokens": 12, "temperature": 0, "stream": True}
    answer = httpx.post(f"{http_server.url}/v1/chat/completions", headers=CONTINUE, json=body, timeout=60)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(answer)]
    assert "".join(delta.get("content") or "" for delta in deltas)


def test_continue_completes_code(http_server):
    """OpenAI takes 4 stop strings; Continue cuts the list for OpenAI's hosts only."""
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0.01, "stop": QWEN_STOPS, "stream": True,
            "prompt": "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n<|fim_middle|>"}
    answer = httpx.post(f"{http_server.url}/v1/completions", headers=CONTINUE, json=body, timeout=60)
    assert all("text" in chunk["choices"][0] for chunk in events(answer))


def test_continue_applies_an_edit(http_server):
    """The file that it rewrites goes along as the prediction."""
    with http_server.client() as client:
        body = {"messages": STORY, "model": MODEL, "max_tokens": 24, "temperature": 0, "stream": False}
        right = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        body |= {"prediction": {"type": "content", "content": right}}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == right
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 12
