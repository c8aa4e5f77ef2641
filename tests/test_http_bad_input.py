"""Each field of each endpoint, wrong in type, in range and in size: 400 naming it, and the door goes on."""

from __future__ import annotations

import itertools

import pytest

from allspark_server.http.chat_wire import ChatRequest
from allspark_server.http.completions import CompletionRequest
from allspark_server.http.embeddings import EmbeddingRequest
from allspark_server.http.tokenize import DetokenizeRequest, TokenizeRequest
from http_helpers import MODEL, STORY, post, refusal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: a request that is right, of each endpoint, and its form
RIGHT = {
    CHAT: ({"messages": STORY, "max_tokens": 1}, ChatRequest),
    COMPLETIONS: ({"prompt": "Once", "max_tokens": 1}, CompletionRequest),
    "/v1/embeddings": ({"input": "Once"}, EmbeddingRequest),
    "/tokenize": ({"prompt": "Once"}, TokenizeRequest),
    "/detokenize": ({"tokens": [1]}, DetokenizeRequest),
}
TEXT, FLAG, NUMBER = ("x", ""), (True, False), (1, 1.5)
MANY = list(range(3000))
#: wrong values of fields, and what the error names where that is not the field itself
GENERATION = {
    "model": (1, True, None, [], {}, "", "x" * 5000),
    "temperature": ("hot", True, [], {}, -0.1, 2.1, 1e308, 10**400),
    "top_p": ("x", True, [], -0.1, 1.1),
    "n": ("1", True, 1.5, [], 0, -1, 129, 10**30),
    "seed": ("1", True, 1.5, 2**63, -(2**63) - 1, 10**400),
    "stop": (1, True, {}, "", ["a", "b", "c", "d", "e"], [""], ["a", 1], "x" * 5000),
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
    "nonsense": (1, None),
}
WRONG = {
    CHAT: {
        **GENERATION,
        "messages": (1, "x", True, None, {}, [], [1], ["x"], [[]], [{}], [{"role": "user"}], [{"role": 1}],
                     [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 1}],
                     [{"role": "user", "content": []}], [{"role": "user", "content": [{}]}],
                     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": None}],
                     [{"role": "user", "content": "x", "more": 1}], [{"role": "user", "content": "x", "name": 1}],
                     [{"role": "tool", "content": "x"}], STORY * 5000),
        "max_completion_tokens": ("1", True, 1.5, 0, -1, 2**31),
        "logprobs": ("x", 1, [], {}),
        "top_logprobs": ("1", True, 1.5, -1, 21, 1),    # 1: without logprobs
        "metadata": (1, "x", [], {"a": 1}, {"a": "x" * 600}, {str(i): "" for i in range(17)}),
        "store": ("x", 1),
        "service_tier": (1, []),
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
        "reasoning_effort": (1, "much"),
        "audio": (1, "x", {}),
        "function_call": ("auto", {}),
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
    },
    "/v1/embeddings": {
        "model": GENERATION["model"],
        "input": (1, True, None, {}, [], [[]], [True], [1, "x"], ["x", 1], [-1], "", ["x", ""], ["x"] * 3000, [10**6],
                  "x " * 5000),
        "encoding_format": (1, "hex", []),
        "dimensions": ("1", True, 0, -1, 1, 2**31),
        "user": (1, []),
        "pooling": (1, "max"),
    },
    "/tokenize": {
        "model": GENERATION["model"],
        "prompt": (1, True, [], {}),
        "messages": (1, [], [1]),
        "add_special_tokens": (1, "x"),
        "return_token_strs": (1, "x"),
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
            assert (error["param"] or "").replace("[", ".").split(".")[0] == field, f"{shown}: {error}"
            assert error["message"] and len(error["message"]) < 1000
    assert post(http_client, path, **right)


@pytest.mark.parametrize("path", RIGHT)
def test_every_field_is_tested(path):
    """Fields that are known, and no table knows how to get wrong."""
    ignored = {"prediction", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    assert set(RIGHT[path][1].model_fields) - set(WRONG[path]) <= ignored


@pytest.mark.parametrize("path", RIGHT)
def test_no_value_breaks_the_door(http_client, path):
    """Whatever stands in a field, the answer is no 500: for a model that is not there, so that nothing is computed."""
    right, form = RIGHT[path]
    values = (None, True, -1, 10**30, 1.5, 1e308, "", "\u0000", "ü" * 1000, [], {}, [[[]]], {"type": {}}, [None], [{}])
    for field, value in itertools.product(form.model_fields, values):
        body = {"model": "nobody's", **right, field: value}
        answer = http_client.post(path, json=body)
        assert answer.status_code in (400, 404), f"{field}={value!r:.60}: {answer.text:.300}"


def test_missing_fields(http_client):
    for path, body, missing in ((CHAT, {"model": MODEL}, "messages"), (CHAT, {"messages": STORY}, "model"),
                                (COMPLETIONS, {"model": MODEL}, "prompt"), ("/detokenize", {"model": MODEL}, "tokens")):
        error = refusal(http_client, path, body)
        assert error["param"] == missing and error["code"] == "missing_required_parameter"


def test_paths_of_fields(http_client):
    """The whole path, also through alternatives."""
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]
    body = {"model": MODEL, "messages": [*STORY, {"role": "user", "content": content}]}
    assert refusal(http_client, CHAT, body)["param"] == "messages[1].content[1].text"
    assert refusal(http_client, CHAT, {"model": MODEL, "messages": [{"role": "x"}]})["param"] == "messages[0].role"
    body = {"model": MODEL, "messages": STORY, "stream": True, "stream_options": {"include_usage": "yes"}}
    assert refusal(http_client, CHAT, body)["param"] == "stream_options.include_usage"
    assert refusal(http_client, COMPLETIONS, {"model": MODEL, "prompt": ["a", 3]})["param"] == "prompt[1]"
