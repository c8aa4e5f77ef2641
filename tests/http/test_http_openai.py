"""The HTTP server with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from support.http_helpers import KEYS, MODEL, STORY

GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def story(http_server):
    """The group's greedy answer by a client of its own: text and ids."""
    _, handle, results = http_server.engine.start_request(
        MODEL, {"messages": STORY}, {"do_sample": False, "max_new_tokens": 24})
    elements = list(results)
    http_server.engine.release_request(MODEL, handle)
    return "".join(e.text for e in elements), [i for e in elements for i in e.ids_from_generate]


def test_chat(api, story):
    answer = api.chat.completions.create(messages=STORY, **GREEDY)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", story[0], "length")
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.completion_tokens == 24 and usage.total_tokens == usage.prompt_tokens + 24
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_chat_as_it_comes(api, story):
    chunks = list(api.chat.completions.create(
        messages=STORY, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == story[0]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].usage.completion_tokens == 24
    assert not chunks[-1].choices and len({c.id for c in chunks}) == 1
    plain = list(api.chat.completions.create(messages=STORY, stream=True, **GREEDY))
    assert all(c.usage is None and c.choices for c in plain)


def test_an_answer_that_ends_by_itself(api):
    ask = {**GREEDY, "max_tokens": None, "messages": [{"role": "user", "content": "What is 2+3?"}]}
    assert api.chat.completions.create(**ask).choices[0].finish_reason == "stop"


def test_content_parts_and_developers(api, story):
    parts = [{"type": "text", "text": STORY[0]["content"]}]
    answer = api.chat.completions.create(messages=[{"role": "user", "content": parts}], **GREEDY)
    assert answer.choices[0].message.content == story[0]
    both = [api.chat.completions.create(messages=[{"role": role, "content": "Be brief."}, *STORY], **GREEDY)
            for role in ("system", "developer")]
    assert both[0].choices[0].message.content == both[1].choices[0].message.content


def test_predicted_outputs(api, story):
    """A right prediction is accepted, the wrong part of one rejected, and the answer is the same."""
    text, ids = story
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts):
        predicted = {"prediction": {"type": "content", "content": content}, "messages": STORY, **GREEDY}
        answer = api.chat.completions.create(**predicted)
        details = answer.usage.completion_tokens_details
        assert answer.choices[0].message.content == text and answer.usage.completion_tokens == len(ids)
        assert len(ids) / 2 < details.accepted_prediction_tokens < len(ids)
    last = list(api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **predicted))[-1]
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > len(ids) / 2
    predicted["prediction"] = {"type": "content", "content": text[:24] + " dog with a red hat who lived in a tree"}
    answer = api.chat.completions.create(**predicted)
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_seeds_and_samples(api):
    ask = {**GREEDY, "temperature": 1.2, "messages": STORY}
    one = api.chat.completions.create(seed=7, n=3, **ask)
    two = api.chat.completions.create(seed=7, n=3, **ask)
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) == 3
    assert [choice.index for choice in one.choices] == [0, 1, 2] and one.system_fingerprint == two.system_fingerprint
    assert one.usage.completion_tokens <= 72
    assert api.chat.completions.create(seed=-7, **ask).choices[0].message.content != texts[0]
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}
    reasons = {}
    for chunk in api.chat.completions.create(seed=7, n=3, stream=True, **ask):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert [pieces[i] for i in range(3)] == texts
    assert [reasons[i] for i in range(3)] == [choice.finish_reason for choice in one.choices]


def test_logprobs_of_chats(api, story):
    ask = {**GREEDY, "messages": STORY, "logprobs": True, "top_logprobs": 3}
    content = api.chat.completions.create(**ask).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == story[0] and len(content) == 24
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob
    streamed = [entry for chunk in api.chat.completions.create(stream=True, **ask)
                for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == content
    plain = api.chat.completions.create(**{**ask, "top_logprobs": None}).choices[0].logprobs.content
    assert [entry.logprob for entry in plain] == [entry.logprob for entry in content] and not plain[0].top_logprobs


def test_defaults_of_the_checkpoint(api, story):
    """generation_config.json asks for greedy decoding. A request with a temperature is sampled."""
    ask = {"model": MODEL, "messages": STORY, "max_tokens": 24}
    assert api.chat.completions.create(**ask).choices[0].message.content == story[0]
    assert len({api.chat.completions.create(temperature=1.5, **ask).choices[0].message.content for _ in range(4)}) > 1
    assert api.chat.completions.create(temperature=1.5, top_p=0, **ask).choices[0].message.content == story[0]
    assert api.chat.completions.create(temperature=1.5, extra_body={"top_k": 1}, **ask) \
        .choices[0].message.content == story[0]


def test_completions(api, http_server):
    answer = api.completions.create(prompt="Once upon a time", **GREEDY)
    text = answer.choices[0].text
    assert answer.object == "text_completion" and answer.usage.completion_tokens == 24
    ids = http_server.engine.tokenize(MODEL, {"text": "Once upon a time"})
    several = api.completions.create(prompt=[ids, ids], n=2, **GREEDY)
    assert [(c.index, c.text) for c in several.choices] == [(i, text) for i in range(4)]
    assert several.usage.prompt_tokens == 2 * len(ids) and several.usage.completion_tokens == 96
    assert api.completions.create(prompt=ids, echo=True, **GREEDY).choices[0].text == "Once upon a time" + text
    short = api.completions.create(prompt="Once upon a time", **{**GREEDY, "max_tokens": None})
    assert short.usage.completion_tokens == 16 and text.startswith(short.choices[0].text)
    nothing = api.completions.create(prompt="Once upon a time", echo=True, **{**GREEDY, "max_tokens": 0})
    assert nothing.choices[0].text == "Once upon a time"


def test_completions_as_they_come(api):
    ask = {**GREEDY, "prompt": ["Once upon a time", "A fox"], "echo": True}
    whole = [choice.text for choice in api.completions.create(**ask).choices]
    pieces = ["", ""]
    for chunk in api.completions.create(stream=True, stream_options={"include_usage": True}, **ask):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == whole and chunk.usage.completion_tokens == 48


def test_logprobs_of_completions(api):
    found = api.completions.create(prompt="Once upon a time", logprobs=2, **GREEDY).choices[0]
    logprobs = found.logprobs
    assert "".join(logprobs.tokens) == found.text and len(logprobs.tokens) == 24
    assert [found.text[at:at + len(t)] for at, t in zip(logprobs.text_offset, logprobs.tokens)] == logprobs.tokens
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert 2 <= len(top) <= 3 and top[token] == logprob == max(top.values())
    assert api.completions.create(prompt="A", logprobs=0, **GREEDY).choices[0].logprobs.top_logprobs is None


def test_stop_strings(api, story):
    """Stop strings may span tokens and are not part of the text, streamed or not."""
    words = story[0].split()
    stop = " ".join(words[4:7])[1:-1]   # begins and ends within words
    expected = story[0][:story[0].index(stop)]
    for ask in ({"stop": stop}, {"stop": ["never in there", stop]}):
        choice = api.chat.completions.create(messages=STORY, **ask, **GREEDY).choices[0]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")
        chunks = list(api.chat.completions.create(messages=STORY, stream=True, **ask, **GREEDY))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    ask = {**GREEDY, "temperature": 1.5, "seed": 3}
    both = api.completions.create(prompt="Once upon a time", n=2, stop="\n", **ask)
    reasons = {choice.finish_reason for choice in both.choices}
    assert reasons <= {"stop", "length"} and all("\n" not in choice.text for choice in both.choices)


def test_biases(api, http_server):
    ids = http_server.engine.tokenize(MODEL, {"text": " fox"})
    banned = api.chat.completions.create(messages=STORY, logit_bias={str(i): -100 for i in ids}, **GREEDY)
    assert " fox" not in banned.choices[0].message.content
    forced = api.completions.create(prompt="A", logit_bias={str(ids[0]): 100}, **{**GREEDY, "max_tokens": 3})
    assert forced.choices[0].text == 3 * http_server.engine.detokenize(MODEL, ids[:1]).text


def test_echo_with_logprobs(api, http_server):
    prompt = "Once upon a time there was a fox"
    ids = http_server.engine.tokenize(MODEL, {"text": prompt})
    ask = {**GREEDY, "max_tokens": 4, "prompt": prompt, "echo": True, "logprobs": 2}
    found = api.completions.create(**ask).choices[0]
    logprobs = found.logprobs
    assert "".join(logprobs.tokens) == found.text and len(logprobs.tokens) == len(ids) + 4
    assert [found.text[at:at + len(t)] for at, t in zip(logprobs.text_offset, logprobs.tokens)] == logprobs.tokens
    assert logprobs.token_logprobs[0] is None is logprobs.top_logprobs[0]
    for token, logprob, top in zip(logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:]):
        assert top[token] == logprob <= 0 and len(top) in (2, 3)
    continued = api.completions.create(prompt=ids[:-1], logprobs=2, **{**GREEDY, "max_tokens": 1})
    if continued.choices[0].text == logprobs.tokens[len(ids) - 1]:
        assert continued.choices[0].logprobs.token_logprobs[0] == logprobs.token_logprobs[len(ids) - 1]
    scored = api.completions.create(**{**ask, "max_tokens": 0})
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:len(ids)]
    assert scored.choices[0].text == prompt and scored.usage.completion_tokens == 0
    pieces = [chunk.choices[0] for chunk in api.completions.create(stream=True, **ask) if chunk.choices]
    assert "".join(piece.text for piece in pieces) == found.text
    assert [t for piece in pieces if piece.logprobs for t in piece.logprobs.tokens] == logprobs.tokens
    assert [o for piece in pieces if piece.logprobs for o in piece.logprobs.text_offset] == logprobs.text_offset


def test_embeddings(api, http_server):
    texts = ["A fox in the woods", "A fox in a wood", "What is 2+3?"]
    found = api.embeddings.create(model=MODEL, input=texts)
    assert [entry.index for entry in found.data] == [0, 1, 2]
    one, two, three = (entry.embedding for entry in found.data)
    assert abs(sum(x * x for x in one) - 1) < 1e-5
    ids = [http_server.engine.tokenize(MODEL, {"text": text}) for text in texts]
    assert found.usage.prompt_tokens == sum(map(len, ids)) == found.usage.total_tokens
    assert [entry.embedding for entry in api.embeddings.create(model=MODEL, input=ids).data] == [one, two, three]
    plain = api.embeddings.create(model=MODEL, input=texts[0], encoding_format="float").data[0].embedding
    assert plain == pytest.approx(one, abs=1e-7)
    mean = api.embeddings.create(model=MODEL, input=texts[0], extra_body={"pooling": "mean"}).data[0].embedding
    assert len(mean) == len(one) and mean != one
    assert api.embeddings.create(model=MODEL, input=texts[0], dimensions=len(one)).data[0].embedding == one
    short = api.embeddings.create(model=MODEL, input=texts[0], dimensions=3).data[0].embedding
    length = sum(x * x for x in one[:3]) ** 0.5
    assert short == pytest.approx([x / length for x in one[:3]], rel=1e-5)
    with pytest.raises(openai.BadRequestError) as wrong:
        api.embeddings.create(model=MODEL, input=texts[0], dimensions=len(one) + 1)
    assert wrong.value.param == "dimensions"


def test_models(api):
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "allspark"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.models.retrieve("other/model")


def test_errors_are_openais(api, http_server):
    with pytest.raises(openai.NotFoundError) as found:
        api.chat.completions.create(messages=STORY, **{**GREEDY, "model": "other"})
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as found:
        api.chat.completions.create(messages=STORY, **{**GREEDY, "temperature": 3})
    assert found.value.param == "temperature" and found.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as found:
        api.chat.completions.create(messages=STORY, **{**GREEDY, "max_tokens": 5000})
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as found:
        api.completions.create(prompt="fox " * 5000, **GREEDY)
    assert found.value.code == "context_length_exceeded" and found.value.param == "prompt"
    with openai.OpenAI(base_url=http_server.url + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as wrong:
            stranger.models.list()
    assert wrong.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=http_server.url + "/v1", api_key=KEYS["read"], max_retries=0) as reader:
        assert reader.models.list().data
        with pytest.raises(openai.PermissionDeniedError):
            reader.completions.create(prompt="A", **GREEDY)


def test_many_at_once(http_server, story):
    async def ask(api):
        stream = await api.chat.completions.create(messages=STORY, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=http_server.url + "/v1", api_key=KEYS["admin"], max_retries=0) as api:
            return await asyncio.gather(*(ask(api) for _ in range(40)))

    assert set(asyncio.run(all_of_them())) == {story[0]}


# --- answers of a given form -------------------------------------------------------------------------------------


class Fox(pydantic.BaseModel):
    """The type of a structured answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(pattern="^[A-Z][a-z]{2,8}$")]
    age: Literal[1, 2, 3]


def test_structured_output(api):
    ask = {"model": MODEL, "messages": STORY, "max_tokens": 100}
    found = api.chat.completions.parse(response_format=Fox, **ask).choices[0].message.parsed
    assert isinstance(found, Fox)
    answer = api.responses.parse(model=MODEL, input=STORY[0]["content"], text_format=Fox, max_output_tokens=100)
    assert answer.output_parsed == found
    with api.chat.completions.stream(response_format=Fox, **ask) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found
    for form, right in (({"type": "regex", "regex": "[ab]{5}"},
                         lambda text: set(text) <= {"a", "b"} and len(text) == 5),
                        ({"type": "choice", "choice": ["yes", "no"]}, lambda text: text in ("yes", "no"))):
        text = api.chat.completions.create(extra_body={"response_format": form}, **ask).choices[0].message.content
        assert right(text), text
    guided = api.completions.create(model=MODEL, prompt="A", extra_body={"guided_regex": "[ab]{5}"})
    assert set(guided.choices[0].text) <= {"a", "b"} and len(guided.choices[0].text) == 5
    with pytest.raises(openai.BadRequestError) as wrong:
        api.chat.completions.create(extra_body={"guided_regex": "a", "guided_choice": ["a"]}, **ask)
    assert wrong.value.param == "guided_choice"
    with pytest.raises(openai.BadRequestError) as wrong:
        api.chat.completions.create(extra_body={"response_format": {"type": "regex", "regex": "("}}, **ask)
    assert wrong.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "age"}}])
def test_forced_calls(api, choice):
    schema = {"type": "object", "properties": {"years": {"enum": [1, 2, 3]}}, "required": ["years"],
              "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("age", "rank")]
    ask = {"model": MODEL, "messages": STORY, "max_tokens": 100, "tools": tools, "tool_choice": choice,
           "parallel_tool_calls": False}
    try:
        answer = api.chat.completions.create(**ask).choices[0]
    except openai.BadRequestError as error:     # of a chat format without calls
        assert error.param == "tool_choice"
        pytest.skip(error.message)
    call = answer.message.tool_calls[0]
    assert json.loads(call.function.arguments)["years"] in (1, 2, 3)
    assert call.function.name == "age" if isinstance(choice, dict) else call.function.name in ("age", "rank")
    assert answer.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
    with api.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
