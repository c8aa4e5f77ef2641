"""Fields of vLLM's that OpenAI's API does not have: with OpenAI's client, as vLLM's users send them."""

from __future__ import annotations

import json

import openai
import pytest

from support.http_helpers import MODEL, STORY

PROMPT = "Once upon a time"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


def ids_of(http_server, inputs: dict, **config) -> list[int]:
    """The ids that a client of the group's own gets."""
    _, handle, results = http_server.engine.start_request(MODEL, inputs, {"do_sample": False, **config})
    ids = [i for elements in results for i in elements.ids_from_generate]
    http_server.engine.release_request(MODEL, handle)
    return ids


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_completions(api, http_server, stream):
    right = ids_of(http_server, {"text": PROMPT}, max_new_tokens=24)
    prompt = http_server.engine.tokenize(MODEL, {"text": PROMPT})
    asked = api.completions.create(prompt=PROMPT, n=2, stream=stream, extra_body={"return_token_ids": True}, **GREEDY)
    parts = [chunk.choices[0] for chunk in asked] if stream else asked.choices
    for index in range(2):
        own = [part for part in parts if part.index == index]
        assert [i for part in own for i in getattr(part, "token_ids", [])] == right
        assert own[0].prompt_token_ids == prompt
        assert not any(hasattr(part, "prompt_token_ids") for part in own[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_chats(api, http_server, stream):
    right = ids_of(http_server, {"messages": STORY}, max_new_tokens=24)
    prompt = http_server.engine.tokenize(MODEL, {"messages": STORY})
    asked = api.chat.completions.create(messages=STORY, stream=stream, extra_body={"return_token_ids": True}, **GREEDY)
    if stream:
        chunks = list(asked)
        assert chunks[0].prompt_token_ids == prompt and not hasattr(chunks[1], "prompt_token_ids")
        assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])] == right
    else:
        assert asked.prompt_token_ids == prompt and asked.choices[0].token_ids == right
    plain = api.chat.completions.create(messages=STORY, **GREEDY)
    assert not hasattr(plain, "prompt_token_ids") and not hasattr(plain.choices[0], "token_ids")


def test_fewest_tokens_and_further_ends(api, http_server):
    """The sixth token ends an answer where it is an end, and not where more tokens are asked for."""
    ids = ids_of(http_server, {"text": PROMPT}, max_new_tokens=24)
    place = next(i for i in range(3, 20) if ids[i] not in ids[:i])

    def tokens(**fields) -> tuple[int, str]:
        answer = api.completions.create(prompt=PROMPT, extra_body=fields, **GREEDY)
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    end = {"stop_token_ids": [ids[place]]}
    assert tokens(**end) == (place + 1, "stop")
    assert tokens(**end, ignore_eos=True) == (place + 1, "stop")
    count, _ = tokens(**end, min_tokens=place + 2)
    assert count >= place + 2
    assert tokens(min_tokens=24)[0] == 24
    with pytest.raises(openai.BadRequestError, match="it is 25, and at most 24 tokens are generated") as wrong:
        tokens(min_tokens=25)
    assert wrong.value.param == "min_tokens"
    short = api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "What is 2+3?"}],
                                        temperature=0, max_tokens=60)
    longer = api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 2+3?"}], temperature=0, max_tokens=60,
        extra_body={"min_tokens": short.usage.completion_tokens + 5})
    assert short.choices[0].finish_reason == "stop"
    assert longer.usage.completion_tokens >= short.usage.completion_tokens + 5


SCHEMA = {"type": "object", "properties": {"age": {"enum": [1, 2, 3]}}, "required": ["age"],
          "additionalProperties": False}


@pytest.mark.parametrize("form, right", [
    ({"json": SCHEMA}, lambda text: json.loads(text)["age"] in (1, 2, 3)),
    ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["age"] in (1, 2, 3)),
    ({"json": SCHEMA, "disable_any_whitespace": True}, lambda text: text in [f'{{"age":{i}}}' for i in (1, 2, 3)]),
    ({"regex": "[ab]{5}"}, lambda text: set(text) <= {"a", "b"} and len(text) == 5),
    ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"grammar": 'root ::= "x" "y"*'}, lambda text: text[0] == "x" and set(text[1:]) <= {"y"}),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_structured_outputs(api, form, right):
    ask = {**GREEDY, "max_tokens": 200, "extra_body": {"structured_outputs": form}}
    if "json_object" not in form:   # whose text need not end
        assert right(api.completions.create(prompt="A", **ask).choices[0].text)
    answer = api.chat.completions.create(messages=STORY, **ask).choices[0]
    assert answer.finish_reason == "length" or right(answer.message.content)


def test_response_formats_of_completions(api):
    ask = {**GREEDY, "max_tokens": 60, "prompt": "A"}
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA}}
    text = api.completions.create(extra_body={"response_format": form}, **ask).choices[0].text
    assert json.loads(text)["age"] in (1, 2, 3)
    with pytest.raises(openai.BadRequestError) as wrong:
        api.completions.create(extra_body={"response_format": form, "structured_outputs": {"regex": "a"}}, **ask)
    assert wrong.value.param == "structured_outputs.regex"


def test_usage_in_each_chunk(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunks in (api.completions.create(prompt=PROMPT, stream=True, stream_options=options, **GREEDY),
                   api.chat.completions.create(messages=STORY, stream=True, stream_options=options, **GREEDY)):
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert counts == sorted(counts) and counts[-1] == 24 and len(set(counts)) > 10
