"""Budgets of reasoning, as the clients of OpenAI and Anthropic send them. The model's template begins reasoning."""

from __future__ import annotations

import json
from contextlib import ExitStack

import anthropic
import httpx
import openai
import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group
from support.http_helpers import STORY, http_server_for
from support.reasoning_model import reasoning_model

MODEL, BUDGET = "thinking", 20
ASKED = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 60}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
NAMES = [{"thinking_token_budget": BUDGET}, {"thinking_budget": BUDGET}, {"thinking_budget_tokens": BUDGET},
         {"custom_params": {"thinking_budget": BUDGET}}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """An HTTP server for the model, and a client of its group."""
    folder = reasoning_model(tmp_path_factory.mktemp("reasoning"))
    with ExitStack() as stack:
        model = ["--model", str(folder), "--max-length", "1024"]
        group = stack.enter_context(background_group(model, timeout=60.0)).addresses[0]
        address = stack.enter_context(http_server_for(group, insecure=True))
        yield f"http://{address}", stack.enter_context(ClientEngine(group))


@pytest.fixture(scope="module")
def client(thinking):
    with openai.OpenAI(base_url=f"{thinking[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("fields", NAMES, ids=lambda fields: next(iter(fields)))
def test_chats_by_every_name(client, fields):
    free = client.chat.completions.create(**ASKED, extra_body={"return_token_ids": True})
    assert free.choices[0].message.content == ""
    assert free.usage.completion_tokens_details.reasoning_tokens == free.usage.completion_tokens
    answer = client.chat.completions.create(**ASKED, extra_body={**fields, "return_token_ids": True})
    message = answer.choices[0].message
    assert answer.choices[0].token_ids[:BUDGET] == free.choices[0].token_ids[:BUDGET]
    assert message.content and free.choices[0].message.reasoning_content.startswith(message.reasoning_content)
    assert BUDGET < answer.usage.completion_tokens_details.reasoning_tokens < BUDGET + 10     # the mark is counted
    parts = list(client.chat.completions.create(**ASKED, extra_body=fields, stream=True))
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    same = client.chat.completions.create(**ASKED, extra_body={"thinking_token_budget": -1})
    assert same.choices[0].message.reasoning_content == free.choices[0].message.reasoning_content


def test_with_a_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    answer = client.chat.completions.create(**ASKED, response_format=form, extra_body=NAMES[0])
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)
    assert answer.choices[0].message.reasoning_content and answer.choices[0].finish_reason == "stop"


def test_completions_and_responses(client):
    prompt = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    done = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=40, extra_body=NAMES[0])
    assert done.choices[0].text.count("</think>") == 1
    answer = client.responses.create(model=MODEL, input="Tell me a story about a fox.", temperature=0,
                                     max_output_tokens=60, extra_body=NAMES[0])
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert BUDGET < answer.usage.output_tokens_details.reasoning_tokens < BUDGET + 10


def test_messages(thinking):
    """Anthropic's client, whose least budget is 1,024; the engine's length is less, so only the limits are seen."""
    with anthropic.Anthropic(base_url=thinking[0], api_key="none", max_retries=0) as client:
        asked = {"model": MODEL, "messages": STORY, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        with pytest.raises(anthropic.BadRequestError, match="must be greater than 'thinking.budget_tokens'"):
            client.messages.create(**asked, max_tokens=1024)
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 1024"):
            client.messages.create(**asked, max_tokens=1025)


def test_wrong_ones_are_named(client, thinking, http_server):
    with pytest.raises(openai.BadRequestError, match="it is 5, and 'thinking_token_budget' is 6") as wrong:
        client.chat.completions.create(**ASKED, extra_body={"thinking_token_budget": 6, "thinking_budget": 5})
    assert wrong.value.param == "thinking_budget"
    with http_server.client() as plain:
        answer = plain.post("/v1/chat/completions",
                            json={"model": "fable", "messages": STORY, "thinking_budget_tokens": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_budget_tokens"
    assert "has no reasoning" in answer.json()["error"]["message"]
    assert httpx.get(f"{thinking[0]}/health").status_code == 200
