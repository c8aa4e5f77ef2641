"""Fields of vLLM's that OpenAI's API does not have: with OpenAI's client, as vLLM's users send them."""

from __future__ import annotations

import json
import time

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
        # A worker that is late sends several tokens at once.
        assert counts == sorted(counts) and counts[-1] == 24 and len(set(counts)) > 2


def test_words_that_are_not_generated(api, http_server):
    text = api.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    words = [word for word in text.replace(",", " ").replace(".", " ").split() if len(word) > 2][:3]
    assert words
    other = api.completions.create(prompt=PROMPT, extra_body={"bad_words": words}, **GREEDY).choices[0].text
    assert not [word for word in words if word in other.split()] and other != text
    ids = ids_of(http_server, {"text": PROMPT}, max_new_tokens=24, bad_words=words)
    assert http_server.engine.detokenize(MODEL, ids).text.startswith(other)
    with pytest.raises(openai.BadRequestError) as wrong:
        api.completions.create(prompt=PROMPT, extra_body={"bad_words": ["x" * 1020]}, **GREEDY)
    assert wrong.value.param == "bad_words" and "at most 256" in wrong.value.message


def test_tokens_that_alone_are_generated(api, http_server):
    ids = http_server.engine.tokenize(MODEL, {"text": "the cat sat"})
    ask = {**GREEDY, "prompt": PROMPT}
    found = api.completions.create(extra_body={"allowed_token_ids": ids, "return_token_ids": True}, **ask).choices[0]
    assert set(found.token_ids) <= set(ids) and len(found.token_ids) == 24 and found.finish_reason == "length"
    end = http_server.engine.get_model_info(MODEL).eos_token_ids[0]
    found = api.completions.create(extra_body={"allowed_token_ids": [end], "return_token_ids": True}, **ask).choices[0]
    assert found.token_ids == [end] and found.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="999999999 is not one") as wrong:
        api.completions.create(extra_body={"allowed_token_ids": [5, 999999999]}, **ask)
    assert wrong.value.param == "allowed_token_ids"
    with pytest.raises(openai.BadRequestError, match="another field already constrains"):
        api.completions.create(extra_body={"allowed_token_ids": ids, "guided_regex": "a"}, **ask)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_in_the_output(api, stream):
    whole = api.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole[8:12]
    end = whole.index(stop)

    def text(**fields) -> str:
        asked = api.completions.create(prompt=PROMPT, stop=[stop], stream=stream, extra_body=fields, **GREEDY)
        parts = asked if stream else [asked]
        return "".join(part.choices[0].text for part in parts)

    assert text() == whole[:end]
    assert text(include_stop_str_in_output=True) == whole[:end] + stop


def test_special_tokens_in_the_output(api, http_server):
    """The end has no text, unless it is asked for."""
    info = http_server.engine.get_model_info(MODEL)
    end = http_server.engine.detokenize(MODEL, info.eos_token_ids[:1]).text
    assert end.startswith("<")
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2+3?"}], "temperature": 0,
           "max_tokens": 60}

    def text(**fields) -> str:
        answer = api.chat.completions.create(extra_body=fields, **ask).choices[0]
        assert answer.finish_reason == "stop"
        return answer.message.content

    plain = text()
    assert end not in plain
    assert text(skip_special_tokens=False) == plain
    assert text(skip_special_tokens=False, include_stop_str_in_output=True) == plain + end
    shown = api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0,
        extra_body={"skip_special_tokens": False, "ignore_eos": True, "allowed_token_ids": info.eos_token_ids[:1]})
    assert shown.choices[0].text == 3 * end


def test_prompts_that_are_cut(api, http_server):
    ids = http_server.engine.tokenize(MODEL, {"text": PROMPT})
    ask = {**GREEDY, "extra_body": {"return_token_ids": True, "truncate_prompt_tokens": 2}}
    cut = api.completions.create(prompt=PROMPT, **ask)
    assert cut.choices[0].prompt_token_ids == ids[-2:] and cut.usage.prompt_tokens == 2
    assert cut.choices[0].text == api.completions.create(prompt=ids[-2:], **GREEDY).choices[0].text
    length = http_server.engine.get_model_info(MODEL).max_length
    ask["extra_body"]["truncate_prompt_tokens"] = -1
    cut = api.completions.create(prompt=[7] * (length + 5), **ask)
    assert cut.usage.prompt_tokens == length - 24 and cut.usage.completion_tokens == 24
    assert api.completions.create(prompt=PROMPT, **ask).choices[0].prompt_token_ids == ids
    assert ids_of(http_server, {"input_ids": [7] * (2 * length)}, max_new_tokens=4, truncate_prompt_tokens=3) == \
        ids_of(http_server, {"input_ids": [7] * 3}, max_new_tokens=4)
    with pytest.raises(openai.BadRequestError, match="at least 1, or -1"):
        api.completions.create(prompt=PROMPT, extra_body={"truncate_prompt_tokens": 0}, **GREEDY)


def test_log_probabilities_of_prompts(api, http_server):
    ids = http_server.engine.tokenize(MODEL, {"text": PROMPT})
    echoed = api.completions.create(prompt=PROMPT, echo=True, logprobs=2, extra_body={"prompt_logprobs": 4}, **GREEDY)
    found = echoed.choices[0].prompt_logprobs
    assert len(found) == len(ids) and found[0] is None
    assert [len(pairs) for pairs in echoed.choices[0].logprobs.top_logprobs[1:len(ids)]] == [2] * (len(ids) - 1)
    for i, entries, logprob in zip(ids[1:], found[1:], echoed.choices[0].logprobs.token_logprobs[1:]):
        assert entries[str(i)]["logprob"] == pytest.approx(logprob)
        ranked = sorted((entry for entry in entries.values() if entry["rank"]), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in ranked] == [1, 2, 3, 4]
        assert [entry["logprob"] for entry in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)
        assert len(entries) == 4 + (entries[str(i)]["rank"] is None)
        assert entries[str(i)]["decoded_token"] == http_server.engine.detokenize(MODEL, [i]).text
    alone = api.completions.create(prompt=PROMPT, extra_body={"prompt_logprobs": 0}, **GREEDY).choices[0]
    assert [list(entries) for entries in alone.prompt_logprobs[1:]] == [[str(i)] for i in ids[1:]]
    chat = api.chat.completions.create(messages=STORY, extra_body={"prompt_logprobs": 1}, **GREEDY)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="not allowed when 'stream' is true"):
        api.completions.create(prompt=PROMPT, stream=True, extra_body={"prompt_logprobs": 1}, **GREEDY)


def test_messages_that_are_continued(api, http_server):
    """The answer is that to the rendered text, cut behind the message."""
    begun = [*STORY, {"role": "assistant", "content": " Once upon a time there "}]
    ask = {**GREEDY, "messages": begun, "extra_body": {"continue_final_message": True, "return_token_ids": True}}
    answer = api.chat.completions.create(**ask)
    prompt = http_server.engine.detokenize(MODEL, answer.prompt_token_ids).text
    assert prompt.endswith("Once upon a time there ")
    assert prompt.startswith(http_server.engine.detokenize(
        MODEL, http_server.engine.tokenize(MODEL, {"messages": STORY})).text)
    plain = api.completions.create(prompt=answer.prompt_token_ids, **GREEDY).choices[0].text
    assert plain.startswith(answer.choices[0].message.content) and answer.choices[0].message.content

    ask["extra_body"] = {"add_generation_prompt": False, "return_token_ids": True}
    ids = api.chat.completions.create(**{**ask, "messages": STORY}).prompt_token_ids
    opened = http_server.engine.tokenize(MODEL, {"messages": STORY})
    assert opened[:len(ids)] == ids and len(ids) < len(opened)

    for messages, fields, param in (
            (STORY, {"continue_final_message": True}, "continue_final_message"),
            (begun, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message")):
        with pytest.raises(openai.BadRequestError) as wrong:
            api.chat.completions.create(**{**ask, "messages": messages, "extra_body": fields})
        assert wrong.value.param == param


@pytest.mark.parametrize("stream, usage", [(False, True), (True, True), (True, False)])
def test_timings_as_llama_server_has_them(api, http_server, stream, usage):
    """They add up to less than the client's own time, and count what `usage` counts."""
    options = {"stream": True, "stream_options": {"include_usage": usage}} if stream else {}
    body = {"cache_salt": f"timings {stream} {usage}", "timings_per_token": True}
    long = [{"role": "user", "content": 20 * STORY[0]["content"]}]
    for cached in (False, True):
        began = time.monotonic()
        asked = api.chat.completions.create(messages=long, extra_body=body, **options, **GREEDY)
        chunks = list(asked) if stream else [asked]
        took = 1e3 * (time.monotonic() - began)
        assert [hasattr(chunk, "timings") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        found = chunks[-1].timings
        assert found["queue_ms"] > 0 and found["prompt_ms"] > 0 and found["predicted_ms"] > 0
        assert found["queue_ms"] + found["prompt_ms"] + found["predicted_ms"] < took
        assert found["predicted_n"] == 24 and (found["cache_n"] > 0) == cached
        assert found["predicted_per_second"] >= 23e3 / found["predicted_ms"] * 0.999
        assert found["predicted_per_token_ms"] == pytest.approx(1e3 / found["predicted_per_second"])
        assert found["prompt_per_second"] == pytest.approx(1e3 * found["prompt_n"] / found["prompt_ms"])
        if usage:
            counts = chunks[-1].usage
            assert counts.prompt_tokens == found["prompt_n"] + found["cache_n"]
            assert counts.prompt_tokens_details.cached_tokens == found["cache_n"]
    plain = api.chat.completions.create(messages=STORY, **GREEDY)
    assert not hasattr(plain, "timings")


def test_lengths_of_models_and_the_version(api, http_server):
    from allspark_client.version import __version__

    length = http_server.engine.get_model_info(MODEL).max_length
    assert {model.max_model_len for model in api.models.list().data} == {length}
    assert api.get("/../version", cast_to=object) == {"version": __version__}


def test_fields_of_responses(api):
    """What vLLM's /v1/responses takes beside OpenAI's fields means what it means in chats."""
    def ask(question, **more):
        return api.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=20, extra_body=more)

    sum_, fox = "What is 2+3?", STORY[0]["content"]
    assert ask(sum_).status == "completed" and ask(sum_).usage.output_tokens < 10
    assert ask(sum_, ignore_eos=True, stop=None).usage.output_tokens == 20    # as guidellm asks
    assert ask(sum_, min_tokens=15).usage.output_tokens >= 15
    story = ask(fox).output_text
    assert "there" in story and ask(fox, stop=[" there"]).output_text == story.split(" there")[0]
    kept = ask(fox, stop="there", include_stop_str_in_output=True).output_text
    assert kept == story.split("there")[0] + "there"
    assert ask(fox, structured_outputs={"choice": ["zebra"]}).output_text == "zebra"
    assert ask(fox, frequency_penalty=2.0, presence_penalty=2.0).output_text != story
    with pytest.raises(openai.BadRequestError, match="'text.format' already constrains"):
        ask(fox, structured_outputs={"choice": ["a"]}, text={"format": {"type": "json_object"}})
