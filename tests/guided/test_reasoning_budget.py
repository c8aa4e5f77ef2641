"""Budgets of reasoning: it ends where its budget is used up, and every other token has the bits that it has without."""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import allspark_server
from allspark_client import AsModelConfig
from allspark_client.chat import ChatOptions
from allspark_client.config import GenerateConfig
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server import Engine
from allspark_server.chat import chat_format
from allspark_server.engine.results import QueueSink
from allspark_server.guided import ReasoningBudget, ReasoningTokens
from support.reasoning_model import reasoning_model
from support.tool_calls import TOOLS

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "disable_any_whitespace": True}
ALWAYS = {"logprobs": True, "top_logprobs": 2, "max_new_tokens": 80}
BUDGET = 24
#: (inputs, config); each is compared with itself alone
REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": CHAT}, {"seed": 1}),
    ({"messages": CHAT}, {"do_sample": False}),
    ({"messages": CHAT}, {"seed": 2, "n": 3, "temperature": 1.2, "repetition_penalty": 1.1}),
    ({"messages": CHAT, "tool_choice": "auto"}, {"seed": 3, "response_format": JSON}),
    ({"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
     {"seed": 4, "max_new_tokens": 200}),
]
_names = (f"reasoning-{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reasoning_model(tmp_path_factory.mktemp("reasoning"))


@contextmanager
def engine_with(folder: Path, **fields: Any):
    config = {"engine_max_length": 512, "num_threads": 1, "engine_max_batch": 24, **fields}
    with Engine() as engine:
        name = next(_names)
        engine.install_model(AsModelConfig(model_name=name, model_path=str(folder), **config))
        engine.start_model(name)
        yield engine, name


def start(engine, name, request, budget: int | None):
    limit = {} if budget is None else {"thinking_token_budget": budget}
    return engine.start_request(name, request[0], {**ALWAYS, **request[1], **limit})[2]


def collect(results) -> dict[int, tuple[list[int], list[Any], str]]:
    """Ids, log probabilities with the best alternatives, and text, of each sample."""
    samples: dict[int, tuple[list[int], list[Any], str]] = {}
    for elements in results:
        ids, values, text = samples.get(elements.sample_index, ([], [], ""))
        samples[elements.sample_index] = (
            ids + elements.ids_from_generate,
            values + [(value, *top) for value, top in zip(elements.token_logprobs_list, elements.log_probs_list)],
            text + elements.text)
    return samples


@pytest.fixture(scope="module")
def alone(folder):
    """Each request alone: without a budget, and with one."""
    with engine_with(folder, enable_prefix_cache=False) as (engine, name):
        return [[collect(start(engine, name, request, budget)) for request in REQUESTS] for budget in (None, BUDGET)]


def test_reasoning_ends_at_its_budget(alone, folder):
    free, limited = alone
    with engine_with(folder) as (engine, name):
        ends = [engine.tokenize(name, {"text": text}) for text in ("</think>", "\n</think>")]
        for index in (0, 1, 2):
            for sample, (ids, values, text) in limited[index].items():
                assert "</think>" not in free[index][sample][2]
                assert ids[:BUDGET] == free[index][sample][0][:BUDGET]
                assert values[:BUDGET] == free[index][sample][1][:BUDGET]
                assert any(ids[BUDGET:BUDGET + len(end)] == end for end in ends)
                assert text.count("</think>") == 1 and len(ids) > BUDGET + 5
        text = limited[3][0][2].partition("</think>")[2]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert "<tool_call>" in limited[4][0][2].partition("</think>")[2]
        # a budget that is not reached changes nothing, and neither does one where the template has ended the reasoning
        for request, right in zip(REQUESTS[:3], free):
            assert collect(start(engine, name, request, 80)) == right
        closed = ({"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}, {"seed": 1})
        assert collect(start(engine, name, closed, 5)) == collect(start(engine, name, closed, None))
        at_once = collect(start(engine, name, REQUESTS[0], 0))[0]
        assert at_once[0][:len(ends[0])] == ends[0]


@pytest.mark.parametrize("fields", [
    {},
    {"speculation": "prompt_lookup"},
    {"speculation": "draft", "draft_model": "itself"},
    {"max_step_tokens": 40, "engine_max_batch": 8},
    {"engine_max_batch": 3},
])
def test_the_same_bits_in_any_batch(alone, folder, fields):
    if "draft_model" in fields:
        fields = {**fields, "draft_model": str(folder)}
    with engine_with(folder, **fields) as (engine, name):
        queues = [start(engine, name, request, budget) for budget in (None, BUDGET) for request in REQUESTS]
        assert [collect(queue) for queue in queues] == [one for part in alone for one in part]


def test_the_same_bits_after_resumption(alone, folder):
    with engine_with(folder) as (engine, name):
        for index in (0, 3, 4):
            (inputs, config), (ids, values, _) = REQUESTS[index], alone[1][index][0]
            for place in (1, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 3, BUDGET + 8):
                options = {key: value for key, value in inputs.items() if key != "messages"}
                spec = RequestSpec(
                    name, messages=CHAT, chat=ChatOptions(**options) if options else None, generated=ids[:place],
                    config=GenerateConfig.parse({**ALWAYS, **config, "thinking_token_budget": BUDGET}))
                spec.set_prompt(engine._models[name].input.tokenize(spec))      # as ClientEngine does
                engine.submit(spec, QueueSink(results := ResultQueue()))
                assert collect(results)[0][:2] == (ids[place:], values[place:]), (index, place)


@pytest.mark.parametrize("kind", ["client-1", "client-2"])
def test_through_groups(engine_of, alone, folder, kind):
    engine, name = engine_of(kind), next(_names)
    engine.install_model(AsModelConfig(model_name=name, model_path=str(folder), engine_max_length=512, num_threads=1))
    try:
        engine.start_model(name)
        assert engine.get_model_info(name).reasoning
        found = [collect(queue) for queue in [start(engine, name, request, BUDGET) for request in REQUESTS]]
        if kind == "client-1":
            assert found == alone[1]
        else:
            assert [collect(start(engine, name, request, BUDGET)) for request in REQUESTS] == found
            assert all(sample[2].count("</think>") == 1 for one in found for sample in one.values())
    finally:
        engine.release_model(name)


def test_models_without_reasoning_refuse_budgets():
    with engine_with(Path(allspark_server.__file__).parent / "assets/fable") as (engine, name):
        assert not engine.get_model_info(name).reasoning
        with pytest.raises(ValueError, match="thinking_token_budget=5: .* has no reasoning that a budget could end"):
            start(engine, name, REQUESTS[0], 5)


class Bytes:
    """A vocabulary of one id for each byte, and of marks."""

    def __init__(self, *marks: str):
        self.marks = {256 + i: mark for i, mark in enumerate(marks)}
        self.size = 256 + len(marks)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((i for i, mark in self.marks.items() if text.startswith(mark)), None)
            ids += [mark] if mark is not None else list(text[0].encode())
            text = text[len(self.marks[mark]):] if mark is not None else text[1:]
        return ids

    def token_bytes(self, ids) -> list[bytes]:
        return [self.marks[i].encode() if i in self.marks else bytes([i]) for i in ids]

    def budget(self, name: str, template: str, left: int, prompt: str = "") -> ReasoningBudget:
        form = chat_format(name)
        tokens = ReasoningTokens.of(form.reasoning([template]), self.size, self.encode, self.token_bytes)
        return ReasoningBudget(tokens, left, 0, *form.reasoning_at(prompt))

    def answer(self, budget: ReasoningBudget, wanted: str) -> str:
        """What becomes of an answer that the model wants to give."""
        ids, found = self.encode(wanted), []
        while ids:
            row = np.full((self.size + 31) // 32, 0xFFFFFFFF, np.uint32)
            if len(found) >= budget.first_masked:
                budget.restrict(row)
            allowed = [i for i in range(self.size) if row[i // 32] >> (i % 32) & 1]
            if len(allowed) == 1 and ids[0] not in allowed:
                found.append(allowed[0])
            elif ids[0] in allowed:
                found.append(ids.pop(0))
            else:
                ids.pop(0)
                continue
            budget.accept(found[-1:])
        return b"".join(self.token_bytes(found)).decode(errors="replace")


def test_marks_of_families():
    plain = Bytes("<think>", "</think>")
    template = r"<think>\n</think>"
    cases = [("", 5, "<think>abcdefgh", "<think>abcde\n</think>fgh"),
             ("", 5, "\n<think>\nabc\n</think>\n\nfour five", "\n<think>\nabc\n</think>\n\nfour five"),
             ("", 3, "no reasoning here: <think>abcdef", "no reasoning here: <think>abcdef"),
             ("<think>\n", 3, "abcdefg", "abc\n</think>defg"), ("<think>\n", 0, "abc", "</think>abc"),
             ("<think>\n", 2, "a€b", "a€\n</think>b"), ("<think>\n", 2, "a\nb", "a\n</think>b"),
             ("<think>\n\n</think>\n\n", 2, "abcdef", "abcdef")]
    for prompt, left, wanted, right in cases:
        assert plain.answer(plain.budget("hermes", template, left, prompt), wanted) == right
    assert chat_format("hermes").reasoning(["no marks"]) is None
    letters = Bytes()       # marks of several tokens
    assert letters.answer(letters.budget("seed_oss", "<seed:think>", 4), "<seed:think>abcdXYZ") == \
        "<seed:think>abcd</seed:think>XYZ"
    harmony = Bytes("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    first, again = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"
    final = "<|start|>assistant<|channel|>final<|message|>"
    whole = f"{first}abc<|end|>{again}de<|end|>{final}the end"
    assert harmony.answer(harmony.budget("harmony", "", 6), whole) == whole
    assert harmony.answer(harmony.budget("harmony", "", 5), whole) == \
        f"{first}abc<|end|>{again}d<|end|>e<|end|>{final}the end"
    wanted = f"abcdef<|end|><|start|>assistant<|channel|>a{final[len('<|start|>assistant<|channel|>'):]}x analysis"
    assert harmony.answer(harmony.budget("harmony", "", 2, f"<|start|>assistant{first}"), wanted).endswith(
        "<|start|>assistant<|channel|>final<|message|>x analysis")
