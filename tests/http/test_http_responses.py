"""/v1/responses with OpenAI's own client."""

from __future__ import annotations

import openai
import pytest

from support.http_helpers import MODEL, STORY

TEXT = STORY[0]["content"]
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


@pytest.fixture(scope="module")
def story(api):
    return api.chat.completions.create(model=MODEL, messages=STORY, temperature=0, max_tokens=24)


def test_an_answer(api, story):
    found = api.responses.create(input=TEXT, store=True, metadata={"a": "b"}, **GREEDY)
    assert found.output_text == story.choices[0].message.content
    assert found.object == "response" and found.id.startswith("resp_") and found.model == MODEL
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.store is False and found.metadata == {"a": "b"} and found.error is None
    assert [item.type for item in found.output] == ["message"] and found.output[0].role == "assistant"
    assert found.usage.output_tokens == 24 and found.usage.input_tokens == story.usage.prompt_tokens
    assert found.usage.total_tokens == found.usage.input_tokens + 24
    done = api.responses.create(input="What is 2+3?", model=MODEL, temperature=0)
    assert done.status == "completed" and done.incomplete_details is None and done.output[0].status == "completed"


def test_events(api, story):
    events = list(api.responses.create(input=TEXT, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = story.choices[0].message.content
    assert "".join(event.delta for event in events[4:-4]) == text == events[-4].text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert final.output_text == text and final.usage.output_tokens == 24
    assert events[2].item.id == events[5].item_id == final.output[0].id


def test_input_items(api, story):
    def ask(*items, **more):
        return api.responses.create(input=list(items), **{**GREEDY, **more}).output_text

    expected = story.choices[0].message.content
    assert ask({"role": "user", "content": TEXT}) == expected
    assert ask({"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}) == expected
    first = api.responses.create(input=TEXT, **GREEDY)
    turn = {"role": "user", "content": "What is 2+3?"}
    again = ask({"role": "user", "content": TEXT}, *[item.model_dump() for item in first.output], turn)
    chat = [*STORY, {"role": "assistant", "content": expected}, turn]
    assert again == api.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=24) \
        .choices[0].message.content
    system = [{"role": "system", "content": "Be brief."}, *STORY]
    assert ask({"role": "user", "content": TEXT}, instructions="Be brief.") == \
        ask({"role": "developer", "content": "Be brief."}, {"role": "user", "content": TEXT}) == \
        api.chat.completions.create(model=MODEL, messages=system, temperature=0, max_tokens=24) \
        .choices[0].message.content


def test_logprobs(api, story):
    found = api.responses.create(input=TEXT, include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY)
    logprobs = found.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == found.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


@pytest.mark.parametrize("field, value", [
    ("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True), ("prompt", {"id": "x"}),
    ("truncation", "auto"), ("include", ["file_search_call.results"])])
def test_what_is_refused(api, field, value):
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.create(input=TEXT, **{**GREEDY, field: value})
    assert error.value.param.split("[")[0] == field


@pytest.mark.parametrize("kind,why", [
    ("mcp", "calls no MCP servers; let the client"), ("web_search_preview", "runs no tools itself"),
    ("code_interpreter", "runs no tools itself"), ("nonsense", "Input should be 'function'"),
])
def test_tools_that_a_server_would_run(api, kind, why):
    tool = {"type": kind, "server_label": "docs", "server_url": "https://example.org/mcp", "require_approval": "never"}
    with pytest.raises(openai.BadRequestError, match=why) as error:
        api.responses.create(input=TEXT, tools=[tool], **GREEDY)
    assert error.value.param == "tools[0].type" and f"but got '{kind}'" in error.value.message


def test_an_error_in_a_stream(api):
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.create(input=TEXT, stream=True, **{**GREEDY, "max_output_tokens": 5000})
    assert error.value.param == "max_output_tokens" and error.value.code == "context_length_exceeded"
