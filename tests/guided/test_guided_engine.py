"""Constrained decoding through the engines: outputs match their schema, and requests have the bits that they have
alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import struct
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import allspark_server
from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server import Engine
from allspark_server.chat import chat_format
from allspark_server.engine.results import QueueSink
from allspark_server.guided import Matcher, MatcherError
from support.processes import ranks_of
from support.random_schemas import longest_text, random_schema
from support.tool_calls import TOOLS, check_calls, joined

FABLE = Path(allspark_server.__file__).parent / "assets/fable"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 20},
        "occupation_of_the_person": {"enum": ["carpenter", "baker", "clockmaker"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "occupation_of_the_person", "tags", "age"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}, "disable_any_whitespace": True}
EXPRESSION = {"type": "regex", "regex": "[A-Z][a-z]{3,40} (and [A-Z][a-z]{3,40} )?went home\\."}
CHOICE = {"type": "choice", "choice": ["the red fox", "the red hen", "a clock"]}
GRAMMAR = {"type": "grammar", "grammar": 'start: "sum:" n ("+" n){1,12} "=" n\nn: /[1-9][0-9]{0,2}/'}
CHAT = [{"role": "user", "content": "Give me a JSON record of a person with name, age and city."}]
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.1, "no_repeat_ngram_size": 4}
#: (prompt, config); every one is compared with itself alone
REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": CHAT}, {"response_format": JSON, "seed": 1}),
    ({"messages": CHAT}, {"response_format": JSON, "do_sample": False}),
    ({"messages": CHAT}, {"response_format": JSON, "seed": 2, "n": 3, "temperature": 1.3}),
    ({"messages": CHAT}, {"response_format": JSON, "seed": 3, **PENALTIES, "bad_words_ids": [[4], [23], [268, 299]],
                          "min_length": 90, "logit_bias": {26: 4.0}, "top_k": 40, "top_p": 0.95}),
    ({"text": "Once upon a time"}, {"response_format": EXPRESSION, "seed": 4}),
    ({"text": "Once upon a time"}, {"response_format": CHOICE, "seed": 5, "early_stopping": False}),
    ({"text": "Once upon a time there was a fox. " * 9}, {"response_format": GRAMMAR, "seed": 6, "eos_token_id": [0]}),
    ({"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, {"seed": 7}),
    ({"text": "Once upon a time"}, {"seed": 8}),
]
ALWAYS = {"logprobs": True, "top_logprobs": 2, "max_new_tokens": 96}

_names = (f"guided-{i}" for i in itertools.count())


@contextlib.contextmanager
def engine_with(**fields: Any):
    config = {"engine_max_length": 512, "num_threads": 1, "engine_max_batch": 24, **fields}
    with Engine() as engine:
        name = next(_names)
        engine.install_model(AsModelConfig(model_name=name, model_path=str(FABLE), **config))
        engine.start_model(name)
        yield engine, name


def start(engine, name, request):
    return engine.start_request(name, request[0], {**ALWAYS, **request[1]})[2]


def collect(results) -> dict[int, tuple[list[int], list[str], str]]:
    """Ids, bits of their logprobs and of the best alternatives, and text, of each sample."""
    samples: dict[int, list] = {}
    for elements in results:
        one = samples.setdefault(elements.sample_index, [[], [], ""])
        one[0] += elements.ids_from_generate
        for value, top in zip(elements.token_logprobs_list, elements.log_probs_list):
            values = struct.pack(f"<{1 + len(top)}f", value, *(p for _, p in top))
            one[1].append((values.hex(), [i for i, _ in top]))
        one[2] += elements.text
    return {index: tuple(one) for index, one in samples.items()}


@pytest.fixture(scope="module")
def alone():
    """Runs each request alone, with its prompt in one chunk and without drafts."""
    with pytest.MonkeyPatch.context() as patch, engine_with(enable_prefix_cache=False) as (engine, name):
        patch.setattr("allspark_server.guided.grammar.MAX_FORCED", 0)
        return [collect(start(engine, name, request)) for request in REQUESTS]


def test_what_is_generated_is_what_the_format_says(alone):
    for samples in alone[:4]:
        for _ids, _, text in samples.values():
            jsonschema.validate(json.loads(text), SCHEMA)
    assert len(alone[2]) == 3 and len({text for *_, text in alone[2].values()}) > 1
    assert alone[4][0][2].endswith("went home.")
    assert alone[5][0][2] in CHOICE["choice"] and len(alone[5][0][0]) == 96 and set(alone[5][0][0][20:]) <= {0, 2}
    assert alone[6][0][2].startswith("sum:") and alone[6][0][0][-1] == 0
    parser = chat_format("hermes").parser(TOOLS)
    check_calls(joined(parser.feed(alone[7][0][2]) + parser.finish())[2])


@pytest.mark.parametrize("fields", [
    {},
    {"speculation": "prompt_lookup"},
    {"speculation": "draft", "draft_model": str(FABLE)},
    {"max_step_tokens": 40, "engine_max_batch": 8},
    {"engine_max_batch": 3},
    {"num_threads": 2},
], ids=str)
def test_the_same_bits_in_any_batch(alone, fields):
    with engine_with(**fields) as (engine, name):
        for _ in range(2):  # the second time prefixes are cached
            queues = [start(engine, name, request) for request in REQUESTS]
            assert [collect(queue) for queue in queues] == alone
        counters = engine._models[name].scheduler.counters
        assert counters.accepted_tokens > 100  # what is forced is not computed token by token


def test_the_same_bits_after_preemption(alone):
    with engine_with(cache_span_size=16, cache_memory=17 * 24576, engine_max_batch=12) as (engine, name):
        assert engine.get_model_info(name).num_spans == 17
        for _ in range(10):
            queues = [start(engine, name, request) for request in REQUESTS]
            assert [collect(queue) for queue in queues] == alone
            if engine.get_as_engine_stat(name).preempted_request:
                return
        raise AssertionError("nobody was preempted")


def test_the_same_bits_after_resumption(alone):
    """Resumed on another group as ClientEngine does it: by ids, and with the format or the tools."""
    with engine_with() as (engine, name):
        for (inputs, config), samples in zip(REQUESTS, alone):
            if config.get("n", 1) > 1:
                continue
            ids, logprobs, _ = samples[0]
            for cut in {1, len(ids) // 2, len(ids) - 1}:
                spec = _resumed(engine, name, inputs, {**ALWAYS, **config}, ids[:cut])
                results = ResultQueue()
                engine.submit(spec, QueueSink(results))
                again = collect(results)[0]
                assert again[:2] == (ids[cut:], logprobs[cut:]), (config, cut)
        bad = _resumed(engine, name, {"text": "x"}, {**ALWAYS, "response_format": CHOICE}, [5, 6, 7])
        with pytest.raises(ValueError, match="generated does not follow the response_format"):
            engine.submit(bad, QueueSink(ResultQueue()))


def _resumed(engine, name, inputs, config, generated) -> RequestSpec:
    from allspark_client.chat import ChatOptions
    from allspark_client.config import GenerateConfig

    spec = RequestSpec(name, config=GenerateConfig.parse(config), generated=list(generated))
    spec.text, spec.messages = inputs.get("text"), inputs.get("messages")
    options = {key: value for key, value in inputs.items() if key not in ("text", "messages")}
    spec.chat = ChatOptions(**options) if options else None
    spec.set_prompt(engine._models[name].input.tokenize(spec))
    return spec


def test_steps_and_models_end_while_masks_are_awaited():
    with engine_with() as (engine, name):
        endless = {"response_format": {"type": "regex", "regex": "[a-z]*"}, "early_stopping": False,
                   "max_new_tokens": 450, "bad_words_ids": [[2], [0]]}
        handles = [engine.start_request(name, {"text": "Once"}, endless) for _ in range(6)]
        for _, _, queue in handles:
            queue.Get()
        began = time.monotonic()
        assert "sample" in engine.get_op_profiling_info(name)
        engine.stop_request(name, handles[0][1])
        other = next(_names)
        engine.install_model(AsModelConfig(model_name=other, model_path=str(FABLE), num_threads=1))
        engine.stop_model(name)
        engine.release_model(name)
        assert time.monotonic() - began < 20  # no step waited for a mask that nothing writes
        engine.start_model(other)
        engine.start_request(other, {"text": "Once"}, endless)[2].Get()


def test_what_cannot_be():
    with engine_with() as (engine, name):
        for config, match in (
            ({"response_format": {"type": "regex", "regex": "("}}, r"response_format\.regex: .*unclosed"),
            ({"response_format": {"type": "json_schema", "json_schema": {"type": "x"}}}, r"format\.json_schema"),
            ({"response_format": CHOICE, "eos_token_id": -1}, "needs an id that ends the output"),
            ({"response_format": CHOICE, "vocab": {"a": 1 << 20}}, "vocab has id"),
        ):
            with pytest.raises(ValueError, match="(?s)" + match):
                engine.start_request(name, {"text": "x"}, config)
        with pytest.raises(ValueError, match="tools: "):
            engine.start_request(name, {"messages": CHAT, "tool_choice": "required", "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]})
        with pytest.raises(ValueError, match="chat format 'plain' has no tool calls"):
            engine.start_request(name, {"messages": CHAT, "tools": TOOLS, "tool_choice": "required",
                                        "chat_format": "plain"})


def test_a_vocabulary_of_the_request():
    with engine_with() as (engine, name):
        vocab = engine._models[name].input.tokenizer.backend.get_vocab()
        request = REQUESTS[0]
        given = ({"messages": CHAT}, {**request[1], "vocab": vocab, "vocab_type": "VOCAB_TYPE_BPE"})
        (_ids, _, text) = collect(start(engine, name, given))[0]
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_grammar_that_llguidance_gives_up_ends_its_request_alone(monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr(Matcher, "error", lambda self: MatcherError("too complex") if next(calls) == 5 else None)
    with engine_with() as (engine, name):
        other = engine.start_request(name, {"text": "Once"}, {"max_new_tokens": 60, "early_stopping": False})[2]
        queue = engine.start_request(name, {"text": "Once"}, {"response_format": EXPRESSION})[2]
        with pytest.raises(AllSparkError, match="response_format: too complex"):
            for _ in queue:
                pass
        assert sum(len(elements.ids_from_generate) for elements in other) == 60
        assert collect(start(engine, name, REQUESTS[5]))[0][2] in CHOICE["choice"]


@pytest.mark.parametrize("kind", ["client-1", "client-2"])
def test_through_groups(engine_of, alone, kind):
    engine = engine_of(kind)
    name = next(_names)
    config = AsModelConfig(model_name=name, model_path=str(FABLE), engine_max_length=512, num_threads=1)
    engine.install_model(config)
    try:
        engine.start_model(name)
        queues = [start(engine, name, request) for request in REQUESTS]
        found = [collect(queue) for queue in queues]
        if kind == "client-1":
            assert found == alone
        assert [collect(start(engine, name, request)) for request in REQUESTS] == found
        for *_, text in (sample for samples in found[:4] for sample in samples.values()):
            jsonschema.validate(json.loads(text), SCHEMA)
        for config, match in (({"type": "regex", "regex": "("}, r"response_format\.regex: .*unclosed"),
                              ({"type": "regex", "regex": "((a{1000}){1000}){1000}"}, "too complex")):
            with pytest.raises(ValueError, match="(?s)" + match):
                engine.start_request(name, {"text": "x"}, {"response_format": config})
    finally:
        engine.release_model(name)


def test_a_hostile_format_holds_up_nobody_of_its_session(engine_of):
    engine = engine_of("client-1")
    name = next(_names)
    engine.install_model(AsModelConfig(model_name=name, model_path=str(FABLE), engine_max_length=512, num_threads=1))
    try:
        engine.start_model(name)
        collect(start(engine, name, REQUESTS[5]))  # the process that tries grammars out is running
        hostile = {"response_format": {"type": "regex", "regex": "((a{1000}){1000}){999}"}}
        ended: dict[str, float] = {}

        def ask():
            with pytest.raises(ValueError, match="too complex"):
                engine.start_request(name, {"text": "x"}, hostile)
            ended["hostile"] = time.monotonic()

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.05)
        for _ in range(3):
            collect(start(engine, name, ({"text": "Once"}, {"max_new_tokens": 3})))
        ended["others"] = time.monotonic()
        thread.join()
        assert ended["others"] < ended["hostile"]
    finally:
        engine.release_model(name)


def test_requests_outlive_their_server(monkeypatch):
    monkeypatch.setenv("AS_NUMA_NUM", "1")
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    requests = [
        ({"messages": CHAT, "tools": TOOLS, "tool_choice": "required"}, {"seed": 1}),
        ({"text": "Once"}, {"response_format": {"type": "regex", "regex": "([a-z]{1,9} )*"}, "seed": 2}),
    ]
    always = {"max_new_tokens": 450, "early_stopping": False, "logprobs": True}
    with ClientEngine(reconnect_timeout=60) as engine:
        engine.install_model(AsModelConfig("m", FABLE, engine_max_length=768))
        engine.start_model("m")
        started = [engine.start_request("m", inputs, {**config, **always})[2] for inputs, config in requests]
        expected = [collect(queue)[0][:2] for queue in started]
        queues = [engine.start_request("m", inputs, {**config, **always})[2] for inputs, config in requests]
        while min(queue.GeneratedLength() for queue in queues) < 20:
            time.sleep(0.002)
        assert max(queue.GeneratedLength() for queue in queues) < 440
        ranks_of(engine._pool.group._process.pid)[0].kill()
        assert [collect(queue)[0][:2] for queue in queues] == expected


def check_random_schemas(count: int) -> None:
    draw = random.Random(count)
    schemas = [random_schema(draw) for _ in range(count)]
    with engine_with(engine_max_length=1024, engine_max_batch=32) as (engine, name):
        info, running = engine.get_model_info(name), []

        def finish(queue, schema):
            elements = list(queue)
            text = "".join(e.text for e in elements)
            jsonschema.validate(json.loads(text), schema)
            assert queue.FinishReason() == "stop"

        for seed, schema in enumerate(schemas):
            form = {"type": "json_schema", "json_schema": {"schema": schema}, "disable_any_whitespace": True}
            config = {"seed": seed, "temperature": 1.0, "response_format": form, "max_new_tokens": longest_text(schema)}
            assert config["max_new_tokens"] < info.max_length - 20
            queue = engine.start_request(name, {"messages": CHAT}, config)[2]
            running.append((queue, schema))
            if len(running) >= 48:
                finish(*running.pop(0))
        for one in running:
            finish(*one)


def test_random_schemas_are_satisfied():
    check_random_schemas(100)


@pytest.mark.slow
def test_thousands_of_random_schemas_are_satisfied():
    check_random_schemas(2000)
