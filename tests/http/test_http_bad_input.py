"""Every field of every endpoint with a wrong type, range or size: the answer is 400 and names the field, and the server
continues.
"""

from __future__ import annotations

import itertools
import json
from random import Random

import pytest

from allspark_server.http import wire
from allspark_server.http.chat_wire import ChatRequest
from allspark_server.http.completions import CompletionRequest
from allspark_server.http.embeddings import EmbeddingRequest
from allspark_server.http.errors import ApiError
from allspark_server.http.messages_wire import MessagesRequest, Prompt
from allspark_server.http.responses_wire import ResponsesRequest
from allspark_server.http.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from allspark_server.http.tokenize import DetokenizeRequest, TokenizeRequest
from allspark_server.json_structure import MAX_BACKSLASHES, MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, JsonStructure
from support.http_helpers import MODEL, STORY, post, refusal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: a valid request of each endpoint, and its API
RIGHT = {
    CHAT: ({"messages": STORY, "max_tokens": 1}, ChatRequest),
    COMPLETIONS: ({"prompt": "Once", "max_tokens": 1}, CompletionRequest),
    "/v1/embeddings": ({"input": "Once"}, EmbeddingRequest),
    "/v1/rerank": ({"query": "Once", "documents": ["Once"]}, RerankRequest),
    "/v1/score": ({"text_1": "Once", "text_2": "Once"}, ScoreRequest),
    "/v1/classify": ({"input": "Once"}, ClassifyRequest),
    "/v1/responses": ({"input": "Once", "max_output_tokens": 1}, ResponsesRequest),
    "/v1/messages": ({"messages": STORY, "max_tokens": 1}, MessagesRequest),
    "/v1/messages/count_tokens": ({"messages": STORY}, Prompt),
    "/tokenize": ({"prompt": "Once"}, TokenizeRequest),
    "/detokenize": ({"tokens": [1]}, DetokenizeRequest),
}
CUT = ("1", True, -2, 0, 2**31)
TEXT, FLAG, NUMBER = ("x", ""), (True, False), (1, 1.5)
MANY = list(range(3000))
#: wrong values of fields, and the name in the error if it is not the field's
GENERATION = {
    "model": (1, True, None, [], {}, "", "x" * 5000),
    "temperature": ("hot", True, [], {}, -0.1, 2.1, 1e308, 10**400),
    "top_p": ("x", True, [], -0.1, 1.1),
    "n": ("1", True, 1.5, [], 0, -1, 129, 10**30),
    "seed": ("1", True, 1.5, 2**63, -(2**63) - 1, 10**400),
    "stop": (1, True, {}, "", ["a"] * 65, [""], ["a", 1], "x" * 5000),
    "presence_penalty": ("x", True, [], -2.1, 2.1),
    "frequency_penalty": ("x", True, [], -2.1, 2.1),
    "logit_bias": ("x", [], 1, {"1": "x"}, {"1": 101}, {"1": -101}, {"x": 1}, {"-1": 1}, {"1.5": 1}, {str(10**20): 1},
                   {str(i): 1 for i in MANY}),
    "max_tokens": ("1", True, 1.5, [], -1, 0, 2**31, 10**30),
    "stream": ("x", 1, 0, [], {}),
    "stream_options": ("x", 1, [], {"include_usage": 1}, {"other": True}, {"include_usage": True}),
    "user": (1, True, [], {}),
    "top_k": ("1", True, 1.5, -2, 2**31),
    "min_p": ("x", True, [], -0.1, 1.1),
    "repetition_penalty": ("x", True, [], 0, -1, 1e30),
    "ignore_eos": ("x", 1, []),
    "cache_salt": (1, True, [], "x" * 5000),
    "priority": ("1", True, 1.5, 2**31, -(2**31)),
    "guided_json": (1, "x", []),
    "guided_regex": (1, "", []),
    "guided_choice": (1, "x", [], [1]),
    "guided_grammar": (1, "", []),
    "structured_outputs": (1, {}, {"regex": ""}, {"regex": "a", "choice": ["a"]}, {"choice": []}, {"json": 1},
                           {"regex": "a", "disable_any_whitespace": True}, {"structural_tag": "x"},
                           {"json_object": False}),
    "min_tokens": ("1", True, 1.5, -1, 2, 2**31),
    "stop_token_ids": (1, "x", [-1], ["1"], [2**31], [1] * 300),
    "return_token_ids": ("x", 1),
    "bad_words": (1, "x", [1], [""], ["x" * 2000], ["a"] * 65, ["x y " * 200]),
    "allowed_token_ids": (1, [], [-1], ["1"], [2**31], [1] * 5000, [999_999_999]),
    "include_stop_str_in_output": ("x", 1),
    "skip_special_tokens": ("x", 1),
    "spaces_between_special_tokens": ("x", 1),
    "truncate_prompt_tokens": ("1", True, 1.5, -2, 0, 2**31),
    "prompt_logprobs": ("1", True, 1.5, -1, 21),
    "thinking_token_budget": ("1", True, 1.5, -2, 2**31, 5),
    "thinking_budget": ("1", True, 1.5, -2, 2**31, 5),
    "thinking_budget_tokens": ("1", True, 1.5, -2, 2**31, 5),
    "custom_params": (1, "x", {"thinking_budget": "x"}, {"x": 1}, {"thinking_budget": 5}),
    "nonsense": (1, None),
}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
COUNTED = {
    "model": GENERATION["model"],
    "messages": (1, "x", None, {}, [], [1], [{}], [{"role": "user"}], [{"role": "system", "content": "x"}],
                 [{"role": "user", "content": 1}], [{"role": "user", "content": []}],
                 [{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": [{"type": "text"}]}],
                 [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "AA=="}}]}],
                 [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}]}],
                 [*STORY, {"role": "assistant", "content": "x"}], STORY * 5000),
    "system": (1, [1], [{"type": "image"}]),
    "tools": (1, [1], [{}], [{"name": "f"}], [{**TOOL, "name": "a b"}], [{**TOOL, "type": "bash_20250124"}],
              [TOOL, TOOL], [{**TOOL, "defer_loading": True}]),
    "tool_choice": (1, "auto", {}, {"type": "x"}, {"type": "tool"}, {"type": "any"}, {"type": "tool", "name": "f"}),
    "thinking": (1, {}, {"type": "x"}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 1},
                 {"type": "enabled", "budget_tokens": 2**31}),
    "output_config": (1, {"format": {"type": "x"}}, {"effort": "x"}),
    "cache_control": (1, {"type": "x"}),
    "speed": ("fast", 1),
    "mcp_servers": (1, "x", [1], [{"type": "url", "url": "https://example.org/mcp", "name": "x"}]),
    "user_profile_id": (1,),
    "workspace_id": (1,),
    "nonsense": (1, None),
}
OWN = {name: GENERATION[name] for name in ("seed", "top_k", "min_p", "repetition_penalty", "cache_salt", "priority")}
#: vLLM's fields of responses
OF_VLLM = {name: GENERATION[name] for name in (
    "stop", "include_stop_str_in_output", "ignore_eos", "min_tokens", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "logit_bias", "skip_special_tokens", "structured_outputs")}
PIXELS = (1, "x", [], {"max_pixels": 0}, {"max_pixels": "7"}, {"min_pixels": 2**31}, {"fps": 0}, {"size": 1})
WRONG = {
    "/v1/messages/count_tokens": COUNTED,
    "/v1/messages": {
        **COUNTED,
        "max_tokens": ("1", True, None, 1.5, 0, -1, 2**31, 5000),
        "temperature": ("x", True, -0.1, 1.1),
        "top_p": GENERATION["top_p"],
        "top_k": ("1", True, 1.5, -1, 2**31),
        "stop_sequences": (1, "x", [1], [""], ["x"] * 17),
        "stream": GENERATION["stream"],
        "metadata": (1, {"user_id": 1}, {"other": "x"}),
        "service_tier": (1, "priority"),
    },
    "/v1/responses": {
        **OWN,
        **OF_VLLM,
        "model": GENERATION["model"],
        "input": (1, True, None, {}, "", [], [1], [{}], [{"role": "user"}], [{"role": "x", "content": "x"}],
                  [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "input_image"}]}],
                  [{"type": "x"}], [{"type": "function_call"}], [{"type": "function_call_output", "call_id": "x"}],
                  [{"type": "item_reference", "id": "x"}], [{"type": "reasoning", "encrypted_content": "x"}]),
        "instructions": (1, []),
        "thinking_token_budget": GENERATION["thinking_token_budget"],
        "max_output_tokens": ("1", True, 1.5, 0, 2**31, 5000),
        "temperature": GENERATION["temperature"],
        "top_p": GENERATION["top_p"],
        "top_logprobs": ("1", True, -1, 21),
        "stream": GENERATION["stream"],
        "stream_options": (1, {"include_usage": True}, {"include_obfuscation": False}),     # without a stream
        "tools": (1, [1], [{}], [{"type": "web_search"}], [{"type": "mcp", "server_label": "x"}],
                  [{"type": "function"}], [{"type": "function", "name": "a b"}],
                  2 * [{"type": "function", "name": "f"}]),
        "tool_choice": (1, "x", {}, "required", {"type": "function", "name": "f"}),
        "parallel_tool_calls": (1, "x"),
        "max_tool_calls": ("1", 0),
        "text": (1, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}, {"verbosity": "high"}),
        "reasoning": (1, {"effort": "x"}, {"effort": 1}, {"context": "all_turns"}, {"mode": "pro"}),
        "include": (1, [1], ["x"]),
        "truncation": (1, "auto"),
        "store": (1, "x"),
        "metadata": (1, {"a": 1}),
        "user": (1,),
        "service_tier": (1,),
        "previous_response_id": ("x", 1),
        "conversation": ("x", {}),
        "background": (True, 1),
        "prompt": ({}, "x"),
        "chat_template_kwargs": (1, {"messages": 1}),
        "mm_processor_kwargs": PIXELS,
        "nonsense": (1, None),
        **{name: ({}, "x") for name in (
            "access_programs", "background_options", "context_management", "image", "moderation")},
    },
    CHAT: {
        **GENERATION,
        "messages": (1, "x", True, None, {}, [], [1], ["x"], [[]], [{}], [{"role": "user"}], [{"role": 1}],
                     [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 1}],
                     [{"role": "user", "content": []}], [{"role": "user", "content": [{}]}],
                     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": None}],
                     [{"role": "user", "content": "x", "more": 1}], [{"role": "user", "content": "x", "name": 1}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AA=="}]}],
                     [{"role": "tool", "content": "x"}], STORY * 5000),
        "max_completion_tokens": ("1", True, 1.5, 0, -1, 2**31),
        "logprobs": ("x", 1, [], {}),
        "top_logprobs": ("1", True, 1.5, -1, 21, 1),    # 1: without logprobs
        "metadata": (1, "x", [], {"a": 1}, {"a": "x" * 600}, {str(i): "" for i in range(17)}),
        "store": ("x", 1),
        "service_tier": (1, []),
        "prediction": (1, "x", [], {}, {"type": "content"}, {"type": "x", "content": "x"},
                       {"type": "content", "content": 1}, {"type": "content", "content": []},
                       {"type": "content", "content": "x", "more": 1}, {"type": "content", "content": "x" * 100_000}),
        "modalities": ("text", [1], ["audio"], ["video"]),
        "verbosity": (1, "loud", "high"),
        "tools": (1, "x", [], [1], [{}], [{"type": "function"}], [{"type": "function", "function": {}}],
                  [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": {"name": "a b"}}],
                  [{"type": "function", "function": {"name": "f", "parameters": 1}}], [{"type": "web_search"}],
                  2 * [{"type": "function", "function": {"name": "f"}}]),
        "tool_choice": (1, "x", [], {}, {"type": "function"}, {"type": "function", "function": {"name": "f"}}, "auto"),
        "parallel_tool_calls": ("x", 1, True),      # True: without tools
        "response_format": (1, "json", [], {}, {"type": "x"}, {"type": "json_schema"}, {"type": "regex"},
                            {"type": "json_schema", "json_schema": {}}, {"type": "choice", "choice": []},
                            {"type": "json_object", "more": 1}),
        "chat_template_kwargs": (1, "x", [], {"messages": 1}),
        "chat_template": (1, "", "x"),
        "mm_processor_kwargs": PIXELS,
        "reasoning_effort": (1, "much"),
        "add_generation_prompt": (1, "x"),
        "continue_final_message": (1, "x", True),
        "timings_per_token": ("x", 1),
        "audio": (1, "x", {}),
        "function_call": ("auto", {}),
        "moderation": ({"model": "x"},),
        "functions": (1, [1], [{}]),
        "web_search_options": (1, {}),
    },
    COMPLETIONS: {
        **GENERATION,
        "max_tokens": GENERATION["max_tokens"],
        "prompt": (1, True, None, {}, [], [[]], [True], [1, "x"], ["x", 1], [[1], "x"], [-1], [2**31], [1.5], "", [""],
                   ["x", ""], ["x"] * 3000, [10**6]),
        "logprobs": ("1", True, 1.5, -1, 6),
        "echo": ("x", 1, []),
        "best_of": ("1", True, 1.5, 0, 21, 5),
        "suffix": (1, [], "x"),
        "response_format": (1, "json", [], {}, {"type": "x"}, {"type": "json_schema"}, {"type": "regex"}),
    },
    "/v1/embeddings": {
        "model": GENERATION["model"],
        "input": (1, True, None, {}, [], [[]], [True], [1, "x"], ["x", 1], [-1], "", ["x", ""], ["x"] * 3000, [10**6],
                  "x " * 5000),
        "encoding_format": (1, "hex", []),
        "dimensions": ("1", True, 0, -1, 1000, 2**31),
        "user": (1, []),
        "pooling": (1, "max", "cls"),
        "prompt_name": (1, [], "query"),
        "normalize": (1, "true"),
        "truncate_prompt_tokens": CUT,
    },
    "/v1/rerank": {
        "model": GENERATION["model"],
        "query": (1, True, None, {}, [], ["x"], ""),
        "documents": (1, True, None, {}, [], "x", [1], [True], [{}], [{"text": 1}], [{"text": "x", "title": "y"}], [""],
                      ["x"] * 3000),
        "top_n": ("1", True, 0, -1, 2**31),
        "return_documents": (1, "true"),
        "truncate_prompt_tokens": CUT,
        "max_tokens_per_doc": ("1", True, 0, -1, 2**31),
        "priority": ("1", 1.5, []),
        "user": (1, []),
    },
    "/v1/score": {
        "model": GENERATION["model"],
        "text_1": (1, True, None, {}, [], [1], [""], "", ["x"] * 3000, ["x", "y"]),
        "text_2": (1, True, None, {}, [], [1], [""], "", ["x"] * 3000),
        "truncate_prompt_tokens": CUT,
        "user": (1, []),
    },
    "/v1/classify": {
        "model": GENERATION["model"],
        "input": (1, True, None, {}, [], [1], [""], "", ["x"] * 3000),
        "truncate_prompt_tokens": ("1", True, -2, 2**31),
        "user": (1, []),
    },
    "/tokenize": {
        "model": GENERATION["model"],
        "prompt": (1, True, [], {}),
        "messages": (1, [], [1]),
        "add_special_tokens": (1, "x"),
        "return_token_strs": (1, "x"),
        "tools": (1, [], [{}], [{"type": "web_search"}]),
        "chat_template": (1, ""),
        "mm_processor_kwargs": PIXELS,
        "chat_template_kwargs": (1, "x", []),
        "add_generation_prompt": (1, "x"),
        "continue_final_message": (1, "x"),
    },
    "/detokenize": {
        "model": GENERATION["model"],
        "tokens": (1, None, "x", {}, ["x"], [1.5], [True], [-1], [2**31], [10**6]),
    },
}


@pytest.mark.parametrize("path", WRONG)
def test_wrong_fields(http_client, path):
    right, _ = RIGHT[path]
    for field, values in WRONG[path].items():
        for value in values:
            body = {"model": MODEL, **right, field: value}
            if field == "messages" and path == "/tokenize":
                del body["prompt"]
            shown = f"{field}={value!r:.60}"
            answer = http_client.post(path, json=body)
            assert answer.status_code == 400, f"{shown}: {answer.text:.300}"
            error = answer.json()["error"]
            if "messages" in path:      # Anthropic's form has no place for the field but the message
                assert field in error["message"], f"{shown}: {error}"
            else:
                assert (error["param"] or "").replace("[", ".").split(".")[0] == field, f"{shown}: {error}"
            assert error["message"] and len(error["message"]) < 1000
    if path != "/v1/classify":  # the model is no classifier
        assert post(http_client, path, **right)


@pytest.mark.parametrize("path", RIGHT)
def test_every_field_is_tested(path):
    """Fails for a known field that no table has wrong values for."""
    ignored = {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    assert set(RIGHT[path][1].model_fields) - set(WRONG[path]) <= ignored


@pytest.mark.parametrize("path", RIGHT)
def test_no_value_breaks_the_server(http_client, path):
    """Whatever a field holds, the answer is never 500. The model does not exist, so nothing is computed."""
    right, form = RIGHT[path]
    values = (None, True, -1, 10**30, 1.5, 1e308, "", "\u0000", "ü" * 1000, [], {}, [[[]]], {"type": {}}, [None], [{}])
    for field, value in itertools.product(form.model_fields, values):
        body = {"model": "nobody's", **right, field: value}
        answer = http_client.post(path, json=body)
        assert answer.status_code in (400, 404), f"{field}={value!r:.60}: {answer.text:.300}"


@pytest.mark.parametrize("form", dict.fromkeys(form for _, form in RIGHT.values()), ids=lambda form: form.__name__)
def test_bodies_cost_little(form):
    """Every list is bounded and ends at its first wrong item, every dict with typed values at its first wrong entry,
    and every object at its first unknown field: a body has at most about as many errors as its form has fields.
    """
    for schema in schemas_of(form.__pydantic_core_schema__):
        if schema["type"] == "list":
            assert schema["fail_fast"] and schema["max_length"] <= 1 << 19, schema
        if schema["type"] == "dict" and schema.get("values_schema", {}).get("type", "any") != "any":
            assert schema["max_length"] <= 1024, schema
    wrong = [{}] * 10_000
    body = {field.alias or name: wrong for name, field in form.model_fields.items()}
    body |= {f"unknown{i}": 1 for i in range(10_000)}
    part = {"type": "text", "text": "", **{f"unknown{i}": 1 for i in range(1000)}}
    body |= {"messages": [{"role": "user", "content": [part]}], "logit_bias": {str(i): "x" for i in range(10_000)}}
    counts = []

    def count(error, value):
        counts.append(error.error_count())
        return ApiError(400, "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "from_validation", count)
        with pytest.raises(ApiError):
            wire.parse(form, json.dumps(body).encode())
    assert 0 < counts[0] <= 100


def schemas_of(value):
    """All schemas within a pydantic core schema."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        for inner in value.values():
            yield from schemas_of(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from schemas_of(inner)


def test_a_structure_is_counted_in_pieces():
    rng = Random(1)
    for _ in range(300):
        value = any_json(rng, 4)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        structure, at = JsonStructure(), 0
        while at < len(text):
            size = rng.randrange(1, 9)
            structure.take(text[at:at + size])
            at += size
        assert (structure._values, structure._names, structure._containers) == counted(value), text
        assert structure._backslashes == text.count(b"\\")


@pytest.mark.parametrize("text, kind", [
    (b'"' + b"\\n" * (MAX_BACKSLASHES + 1) + b'"', "4194304 backslashes"),
    (b"[" + b"0," * (MAX_VALUES + 1), "524288 values"),
    (b'{"":0,' * (MAX_NAMES + 1), "65536 names"),
    (b"[" * (MAX_CONTAINERS + 1), "16384 arrays and objects"),
])
def test_a_structure_has_limits(text, kind):
    with pytest.raises(ValueError, match=f"^more than the {kind}"):
        JsonStructure().take(text)


def any_json(rng, depth):
    text = "".join(rng.choice('\\"{}[],:aé\n') for _ in range(rng.randrange(9)))
    kind = rng.randrange(5 if depth else 3)
    if kind == 3:
        return [any_json(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 4:
        return {text + str(i): any_json(rng, depth - 1) for i in range(rng.randrange(5))}
    return text if kind else 1.5


def counted(value):
    """The commas, names and containers of a JSON value."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    is_dict = isinstance(value, dict)
    inner = [counted(one) for one in (value.values() if is_dict else value)]
    return tuple(map(sum, zip((max(len(value) - 1, 0), len(value) if is_dict else 0, 1), *inner)))


def test_errors_are_short():
    body = {"model": MODEL, "messages": [{"role": ["x" * 1000] * 1000, "content": "x"}]}
    with pytest.raises(ApiError, match="Input tag .* does not match any of the expected tags: 'system'") as found:
        wire.parse(ChatRequest, json.dumps(body).encode())
    assert len(found.value.message) < 500


def test_unknown_fields_that_are_null(http_client):
    """They are ignored below the top level, where clients send answers back with all the fields of their types."""
    message = {"role": "user", "content": [{"type": "text", "text": "a", "more": None}], "other": None}
    post(http_client, CHAT, messages=[message], max_tokens=1)
    assert refusal(http_client, CHAT, {"model": MODEL, "messages": [message], "more": None})["param"] == "more"
    message["content"][0]["wrong"] = 1
    refused = refusal(http_client, CHAT, {"model": MODEL, "messages": [message]})
    assert refused["param"] == "messages[0].content[0].wrong"


def test_missing_fields(http_client):
    for path, body, missing in ((CHAT, {"model": MODEL}, "messages"), (CHAT, {"messages": STORY}, "model"),
                                (COMPLETIONS, {"model": MODEL}, "prompt"), ("/detokenize", {"model": MODEL}, "tokens")):
        error = refusal(http_client, path, body)
        assert error["param"] == missing and error["code"] == "missing_required_parameter"


def test_paths_of_fields(http_client):
    """The whole path of a field, also through alternatives."""
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]
    body = {"model": MODEL, "messages": [*STORY, {"role": "user", "content": content}]}
    assert refusal(http_client, CHAT, body)["param"] == "messages[1].content[1].text"
    assert refusal(http_client, CHAT, {"model": MODEL, "messages": [{"role": "x"}]})["param"] == "messages[0].role"
    body = {"model": MODEL, "messages": STORY, "stream": True, "stream_options": {"include_usage": "yes"}}
    assert refusal(http_client, CHAT, body)["param"] == "stream_options.include_usage"
    assert refusal(http_client, COMPLETIONS, {"model": MODEL, "prompt": ["a", 3]})["param"] == "prompt[1]"
