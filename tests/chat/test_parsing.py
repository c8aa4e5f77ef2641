"""Answers are taken apart into text, reasoning and calls, however they are cut; the format that a checkpoint has."""

from __future__ import annotations

import json
import random

import pytest

from allspark_server.chat import Content, Reasoning, ToolCallArguments, ToolCallBegin, chat_format, chat_format_of
from allspark_server.chat.format import FORMATS
from support.chat import ANY, parse
from support.paths import ROOT
from support.recorded_answers import RECORDED
from support.tool_calls import TOOLS, joined


@pytest.mark.parametrize("name, text, content, reasoning, calls", RECORDED)
def test_recorded_answers_however_they_are_cut(name, text, content, reasoning, calls):
    expected = (content, reasoning, calls)
    assert parse(name, [text]) == expected
    assert parse(name, text) == expected
    for at in range(len(text)):
        assert parse(name, [text[:at], text[at:]]) == expected, at
    draw = random.Random(0)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(text)), min(4, len(text) - 1)))
        assert parse(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_arbitrary_text_is_taken_apart_alike_however_it_is_cut(name):
    draw = random.Random(name)
    parts = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "{", "}",
             "[", "]", '"', '{"name": "now", ', '"arguments": ', '"parameters": ', "{}", ",", ":", ";", "\n", " ",
             "now", "5", "\\", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\u00e9", "[CALL_ID]",
             "[THINK]", "<", "</", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "to=", "analysis",
             "<function=", "</function>", "<parameter=", "</parameter>", ">", '<invoke name="', '">', "</invoke>",
             '<parameter name="', "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>",
             "</minimax:tool_call>", *FORMATS[name].markers, "functions.", "[now(", "a=", "'", ")", "call:now{",
             "functools[", "get_weather", "function"]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 12)))
        whole = parse(name, [text])
        assert parse(name, text) == whole, text
        cut = draw.randrange(len(text))
        assert parse(name, [text[:cut], "", text[cut:]]) == whole, text


@pytest.mark.parametrize("begin, end", ["[]", ("{a:", "}")])
@pytest.mark.parametrize("closed", [True, False])
def test_values_in_each_other_are_a_text_from_some_depth(begin, end, closed):
    text = f"<|tool_call>call:now{{x:{begin * 600}" + (f"{end * 600}}}<tool_call|>Done." if closed else "")
    content, _, [(name, arguments)] = whole = parse("gemma4", [text])
    assert parse("gemma4", text) == whole and name == "now" and content == ("Done." if closed else "")
    if closed:
        value, depth = json.loads(arguments)["x"], 0
        while not isinstance(value, str):
            value, depth = value["a"] if isinstance(value, dict) else value[0], depth + 1
        assert value == begin * (600 - depth) + end * (600 - depth) and 20 < depth < 100


def test_arguments_and_content_come_as_they_are_written():
    parser = chat_format("hermes").parser(TOOLS)
    assert parser.feed("Hello <") == [Content("Hello")] and parser.feed("b") == [Content(" <b")]
    assert parser.feed('<tool_call>{"name": "now"') == [ToolCallBegin(0, ANY, "now")]
    assert parser.feed(', "arguments": {"zo') == [ToolCallArguments(0, '{"zo')]
    assert parser.feed('ne"') == [ToolCallArguments(0, 'ne"')]
    thinking = chat_format("hermes").parser(TOOLS, opened="<think>\n")
    assert thinking.feed("Well") == [Reasoning("Well")]
    assert joined(thinking.feed(" then\n</think>\n\nfine")) == ("fine", " then", [])


def test_without_tools_nothing_is_a_call():
    text = '<think>x</think><tool_call>{"name": "now"}</tool_call>'
    assert parse("hermes", text, tools=[]) == (text[16:], "x", [])
    assert parse("hermes", text, choice="none") == (text[16:], "x", [])
    text = "<think>x</think><response>It is 5.</response>"
    assert parse("granite", text, tools=[]) == parse("granite", list(text), tools=[]) == ("It is 5.", "x", [])
    text = "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}"
    assert parse("harmony", text, tools=[]) == parse("harmony", text, choice="none") == ("{}", "x", [])


def test_the_format_is_the_checkpoints(caplog):
    assert chat_format_of({"default": "... <tool_call> ... "}, "qwen2") == "hermes"
    assert chat_format_of({"default": "<tool_call><arg_key>"}, "glm4_moe") == "glm45"
    assert chat_format_of({"default": "", "tool_use": "[TOOL_CALLS]"}, "llama") == "mistral"
    assert chat_format_of({"default": "<|python_tag|>"}, "llama") == "llama3"
    assert chat_format_of({"default": "<|start|>assistant<|channel|>final<|message|>"}, "llama") == "harmony"
    assert chat_format_of({}, "GptOssForCausalLM") == "harmony"
    assert chat_format_of({"default": "<tool_call>\n<function="}, "qwen3_moe") == "qwen3_coder"
    assert chat_format_of({"default": "<seed:tool_call>\n<function="}, "") == "seed_oss"
    assert chat_format_of({}, "MiniMaxM2ForCausalLM") == "minimax_m2"
    assert chat_format_of({}, "Glm4MoeForCausalLM") == "glm45"
    assert chat_format_of({"default": "'<｜tool▁sep｜>' + name + '\\n```json"}, "") == "deepseek_v3"
    assert chat_format_of({"default": "<｜tool▁sep｜>"}, "DeepseekV3ForCausalLM") == "deepseek_v31"
    assert chat_format_of({}, "DeepseekV3ForCausalLM") == "deepseek_v3"
    assert chat_format_of({"default": "<|tool_call_argument_begin|>"}, "deepseek_v3") == "kimi_k2"
    assert chat_format_of({}, "KimiK25ForConditionalGeneration") == "kimi_k2"
    assert chat_format_of({"default": "<|tool_call|>"}, "llama") == "granite"
    assert chat_format_of({"default": "<|tool|>"}, "phi3") == "phi4_mini"
    assert chat_format_of({"default": "[func_name1(params_name1=params_value1)]<|python_tag|>"}, "llama") == "pythonic"
    assert chat_format_of({}, "Lfm2MoeForCausalLM") == "lfm2"
    assert chat_format_of({"default": "'</arg_key><arg_value>'"}, "glm4_moe") == "glm47"
    assert chat_format_of({}, "GlmMoeDsaForCausalLM") == "glm47"
    assert chat_format_of({}, "Glm5NextForConditionalGeneration") == "glm47"
    assert chat_format_of({"default": "<tool_call>\n<function="}, "NemotronHForCausalLM") == "qwen3_coder"
    assert chat_format_of({"default": "<TOOLCALL>["}, "NemotronHForCausalLM") == "nemotron_json"
    assert chat_format_of({"default": "<{{ '｜DSML｜' }}function_calls>"}, "llama") == "deepseek_v32"
    assert chat_format_of({}, "DeepseekV32ForCausalLM") == "deepseek_v32"
    assert chat_format_of({"default": "<{{ '｜DSML｜' }}tool_calls>"}, "llama") == "deepseek_v4"
    assert chat_format_of({}, "DeepseekV4ForCausalLM") == "deepseek_v4"
    assert chat_format_of({"default": "<｜tool▁sep｜>"}, "DeepseekV32ForCausalLM") == "deepseek_v31"  # V3.2-Exp's
    assert chat_format_of({"default": "'<tool_calls><tool_call>'"}, "llama") == "hunyuan"
    assert chat_format_of({"default": "<tool_calls>[{\"name\""}, "llama") == "hunyuan"
    assert chat_format_of({}, "HunYuanDenseV1ForCausalLM") == "hunyuan"
    assert chat_format_of({"default": "'<function_calls>'"}, "llama") == "olmo3"
    assert chat_format_of({}, "Olmo3ForCausalLM") == "olmo3"
    assert chat_format_of({}, "qwen3") == "hermes" and chat_format_of({}, "mistral") == "mistral"
    assert not caplog.records
    assert chat_format_of({"default": "{{ m.tool_calls }}"}, "llama") == "hermes"
    assert [record.getMessage()[:80] for record in caplog.records] == [
        "the form of tool calls in the chat template is not known: answers are parsed as 'hermes' unless"[:80]]
    with pytest.raises(ValueError, match="chat_format='gpt' is not known; allowed: hermes, llama3, mistral, glm45, gl"):
        chat_format("gpt")


def test_the_parser_needs_no_engine():
    import subprocess
    import sys

    program = ("import sys, allspark_server.chat\n"
               "bad = {'tokenizers', 'llguidance', 'numpy.random', 'mpi4py', 'torch', 'allspark_server._native'}\n"
               "print(sorted(bad & set(sys.modules)))")
    root = ROOT
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert found.stdout.strip() == "[]", found.stderr
