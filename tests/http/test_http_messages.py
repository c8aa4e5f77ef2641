"""/v1/messages with Anthropic's own client."""

from __future__ import annotations

import json

import httpx
import pytest

from support.http_helpers import KEYS, MODEL, STORY

TEXT = STORY[0]["content"]
anthropic = pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def api(http_server):
    with anthropic.Anthropic(base_url=http_server.url, api_key=KEYS["generate"], max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def story(http_server):
    with http_server.client() as client:
        body = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 24}
        return client.post("/v1/chat/completions", json=body).json()


#: greedy, as the checkpoint says; newer clients know of no temperature
ASK = {"model": MODEL, "max_tokens": 24, "messages": STORY}


def test_an_answer(api, story):
    found = api.messages.create(**ASK)
    assert found.content[0].text == story["choices"][0]["message"]["content"] and len(found.content) == 1
    assert (found.type, found.role, found.stop_reason, found.stop_sequence) == \
        ("message", "assistant", "max_tokens", None)
    usage = found.usage
    assert usage.output_tokens == 24
    assert usage.input_tokens + usage.cache_read_input_tokens == story["usage"]["prompt_tokens"]
    done = api.messages.create(**{**ASK, "max_tokens": 200, "messages": [{"role": "user", "content": "What is 2+3?"}]})
    assert done.stop_reason == "end_turn"


def test_events(api, story):
    with api.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert found.content[0].text == story["choices"][0]["message"]["content"]
    assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 24
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_stop_sequences(api, story):
    text = story["choices"][0]["message"]["content"]
    stop = text.split()[5]
    found = api.messages.create(stop_sequences=["never in there", stop], **ASK)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[:text.index(stop)]


def test_forms_of_prompts(api, story, http_server):
    expected = story["choices"][0]["message"]["content"]
    blocks = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]
    assert api.messages.create(**{**ASK, "messages": [{"role": "user", "content": blocks}]}).content[0].text == expected
    system = api.messages.create(system=[{"type": "text", "text": "Be brief."}], **ASK).content[0].text
    with http_server.client() as client:
        chat = {**ASK, "messages": [{"role": "system", "content": "Be brief."}, *STORY]}
        same = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert system == same
    count = api.messages.count_tokens(model=MODEL, messages=STORY)
    assert count.input_tokens == story["usage"]["prompt_tokens"]


def test_errors_are_anthropics(api, http_server):
    with pytest.raises(anthropic.BadRequestError) as found:
        api.messages.create(extra_body={"temperature": 1.5}, **ASK)
    body = found.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "temperature" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError) as found:
        api.messages.create(**{**ASK, "model": "other"})
    assert found.value.body["error"]["type"] == "not_found_error"
    for messages in ([*STORY, {"role": "assistant", "content": "Once"}], [{"role": "system", "content": "x"}],
                     [{"role": "user", "content": [{"type": "image", "source": {}}]}]):
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            api.messages.create(**{**ASK, "messages": messages})
    with anthropic.Anthropic(base_url=http_server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(**ASK)
    with http_server.client() as client:
        missing = client.post("/v1/messages", json={"model": MODEL, "messages": STORY})
        assert missing.status_code == 400 and "max_tokens" in missing.json()["error"]["message"]


def test_events_on_the_wire(http_server):
    """Events come in the order that Anthropic documents, each under its name."""
    header = {"x-api-key": KEYS["generate"], "anthropic-version": "2023-06-01"}
    answer = httpx.post(http_server.url + "/v1/messages", json={**ASK, "max_tokens": 3, "stream": True}, headers=header)
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    kinds = [lines[0].removeprefix("event: ") for lines in events]
    assert kinds == ["message_start", "ping", "content_block_start", *["content_block_delta"] * (len(kinds) - 6),
                     "content_block_stop", "message_delta", "message_stop"]
    assert all(json.loads(lines[1].removeprefix("data: "))["type"] == kind for lines, kind in zip(events, kinds))
