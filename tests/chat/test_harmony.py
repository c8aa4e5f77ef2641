"""Chats in harmony, the format of gpt-oss: prompts, answers and grammars."""

from __future__ import annotations

import pytest
import tokenizers

from allspark_client.chat import ChatOptions
from allspark_server.chat import Reasoning, ToolCallArguments, ToolCallBegin, chat_format
from allspark_server.chat.format import opened_in, render
from allspark_server.guided import Guide
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.chat import ANY, CALLED, STRICT, calls_of, parse, tail, takes
from support.grammars import EOS, FABLE, VOCAB
from support.recorded_answers import PARIS
from support.tool_calls import TOOLS

# The part of the published template that matters here.
HARMONY = (
    "{%- macro message(head, text, end='<|end|>') %}{{- '<|start|>' + head + '<|message|>' + text + end }}"
    "{%- endmacro %}"
    "{{- message('system', 'Reasoning: ' + (reasoning_effort or 'medium') + '\\nValid channels: analysis, commentary, "
    "final.') }}"
    "{%- if tools %}{{- message('developer', tools | map(attribute='function.name') | join(', ')) }}{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    "{%- if m.thinking and m.content %}{{- raise_exception('both content and thinking') }}{%- endif %}"
    "{%- if m.thinking %}{{- message('assistant<|channel|>analysis', m.thinking) }}{%- endif %}"
    "{{- message('assistant to=functions.' + call.name + '<|channel|>commentary json', call.arguments | tojson, "
    "'<|call|>') }}{%- elif m.role == 'assistant' %}{{- message('assistant<|channel|>final', m.content) }}"
    "{%- else %}{{- message(m.role, m.content) }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{{- begun or '' }}{%- endif %}"
)
ANALYSIS, GO_ON = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>", "<|start|>assistant"
CALL_NOW = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"zone": "UTC"}'
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module", params=["special", "text"])
def harmony(request):
    """A tokenizer with or without special tokens for the marks, as o200k_harmony has them; and its guide."""
    backend = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    if request.param == "special":
        backend.add_special_tokens(list(chat_format("harmony").markers))
    guide = Guide(backend.to_str(), VOCAB, [EOS])
    yield Tokenizer(backend, {}, {"default": HARMONY}, "it"), guide
    guide.close()


def test_a_chat_in_harmony(harmony):
    tokenizer, _ = harmony
    thought = {**CALLED, "reasoning_content": "I", "content": "call."}
    options = ChatOptions(tools=TOOLS, chat_template_kwargs={"reasoning_effort": "xhigh"})
    text = render(tokenizer.templates, [{"role": "user", "content": "When?"}, thought], options)
    assert text.endswith('<|start|>user<|message|>When?<|end|><|start|>assistant<|channel|>analysis<|message|>I\ncall.'
                         '<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>'
                         '{"zone": "UTC"}<|call|><|start|>assistant')
    assert "Reasoning: high" in text and "get_weather, now" in text
    assert opened_in(tail(tokenizer, text)) == ""
    for begun in ("<|channel|>final<|message|>", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"):
        options = ChatOptions(chat_template_kwargs={"begun": begun})
        text = render(tokenizer.templates, [{"role": "user", "content": "When?"}], options)
        assert opened_in(text) == begun
    assert parse("harmony", '{"zone"', opened=begun) == ("", "", [("now", '{"zone"')])


def test_answers_in_messages_are_taken_apart_as_they_come(harmony):
    tokenizer, _ = harmony
    form = chat_format("harmony")
    ids, stream = tokenizer.encode(ANALYSIS + GO_ON + CALL_NOW), tokenizer.detokenizer(form.markers)
    pieces = [stream.push([i]) for i in ids] + [stream.finish()]
    assert parse("harmony", pieces) == ("", "Hm, 1 < 2.", [("now", '{"zone": "UTC"}')])
    parser = form.parser(TOOLS)
    assert parser.feed("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert not parser.feed("<|end|><|start|>assi")
    assert parser.feed("stant" + CALL_NOW[:-6]) == [ToolCallBegin(0, ANY, "now"), ToolCallArguments(0, '{"zone": ')]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_in_harmony(harmony, choice):
    tokenizer, guide = harmony
    options = ChatOptions(tools=TOOLS, tool_choice=choice)
    grammar = guide.compile(calls_of(tokenizer, "harmony", options, "Hi<|end|><|start|>assistant"))
    for fit in (CALL_NOW, ANALYSIS + GO_ON + CALL_NOW):
        assert grammar.matcher([EOS], tokenizer.encode(fit)).must_stop
    weather = CALL_NOW.replace("now", "get_weather").replace("zone", "city")
    assert takes(grammar, tokenizer, weather) == (choice == "required")
    for other in (FINAL + "x", CALL_NOW.replace("UTC", "UTX"), PARIS, ANALYSIS, "<|channel|>commentary<|message|>x"):
        assert not takes(grammar, tokenizer, other), other
    begun = guide.compile(calls_of(tokenizer, "harmony", options, "<|start|>assistant<|channel|>analysis<|message|>"))
    assert takes(begun, tokenizer, "Hm.<|end|>" + GO_ON + CALL_NOW) and not takes(begun, tokenizer, CALL_NOW)
    with pytest.raises(ValueError, match="the prompt has begun a message"):
        calls_of(tokenizer, "harmony", options, "<|start|>assistant<|channel|>final<|message|>")


@pytest.mark.parametrize("tools", [[], STRICT])
def test_text_and_calls_in_harmony_are_as_their_formats_say(harmony, tools):
    tokenizer, guide = harmony
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}},
                                                   "required": ["a"]}}
    options = ChatOptions(tools=tools)
    grammar = guide.compile(calls_of(tokenizer, "harmony", options, "<|start|>assistant", response_format=form))
    for fit in (FINAL + '{"a": 1}', ANALYSIS + GO_ON + FINAL + '{"a": 1}',
                "<|channel|>commentary<|message|>So.<|end|>" + GO_ON + FINAL + '{"a": 1}'):
        assert takes(grammar, tokenizer, fit), fit
    for other in ('{"a": 1}', FINAL + '{"a": "b"}', ANALYSIS, CALL_NOW.replace("UTC", "UTX")):
        assert not takes(grammar, tokenizer, other), other
    assert takes(grammar, tokenizer, ANALYSIS + GO_ON + CALL_NOW) == bool(tools)
    begun = guide.compile(calls_of(tokenizer, "harmony", options, "<|start|>assistant" + FINAL, response_format=form))
    assert takes(begun, tokenizer, '{"a": 1}') and not takes(begun, tokenizer, "a")
    grammar = {"type": "grammar", "grammar": "start: /a+/"}
    begun = calls_of(tokenizer, "harmony", options, "<|start|>assistant" + FINAL, response_format=grammar)
    begun = guide.compile(begun)
    assert takes(begun, tokenizer, "aa") and not takes(begun, tokenizer, "b")
    with pytest.raises(ValueError, match="within a message, use syntax 'lark'"):
        calls_of(tokenizer, "harmony", options, "<|start|>assistant", response_format={**grammar, "syntax": "ebnf"})
