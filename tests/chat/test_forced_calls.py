"""Grammars of calls: forced, of strict tools, and as templates show them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tokenizers

from allspark_client.chat import ChatOptions, check_messages
from allspark_server.chat import chat_format, chat_format_of
from allspark_server.chat.format import FORMATS, render
from allspark_server.guided import Guide, MatcherError
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.chat import CALLED, CALLS, STRICT, calls_of, parse, takes, with_template
from support.grammars import EOS, FABLE, VOCAB, walk
from support.shown_calls import SHOWN
from support.tool_calls import TOOLS, check_calls


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony", "plain"}))
def test_forced_calls_are_calls(guide, name):
    tokenizer = with_template("")
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        options = ChatOptions(tools=TOOLS, tool_choice=choice)
        grammar = guide.compile(calls_of(tokenizer, name, options, "Hello", response_format={"type": "json_object"}))
        for seed in range(6):
            text = tokenizer.decode(walk(grammar.matcher([EOS]), seed, longest=3000))
            content, reasoning, calls = parse(name, text, choice=choice)
            check_calls(calls)
            assert not content and not reasoning
            if choice != "required":
                assert [called for called, _ in calls] == ["now"]


#: arguments of the first are held to their schema, those of the other not
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_need_not_be_made_is_as_its_strict_tool_says(guide, name):
    tokenizer, text = with_template(""), CALLS[name]
    grammar = guide.compile(calls_of(tokenizer, name, ChatOptions(tools=STRICT), "Hello"))
    for fit in ("", "A <tool or [TOOL_CALL is no call.", text, "I shall look.\n" + text):
        assert takes(grammar, tokenizer, fit), fit
    for other in (text.replace("UTC", "UTX"), text.replace("now", "nox")):
        assert not takes(grammar, tokenizer, other), other
    assert calls_of(tokenizer, name, ChatOptions(tools=TOOLS), "Hello") is None
    assert calls_of(tokenizer, name, ChatOptions(tools=STRICT, tool_choice="none"), "Hello") is None


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form, fits, others", [
    ({"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}},
                                             "required": ["a"]}}, ['{"a": 1}'], ['{"a": "b"}', "a"]),
    ({"type": "json_object"}, ["{}"], ["[]", "a"]),
    ({"type": "regex", "regex": "a/b\\/c+"}, ["a/b/cc"], ["a/b"]),
    ({"type": "choice", "choice": ["yes", "no"]}, ["yes"], ["perhaps"]),
], ids=lambda value: value.get("type") if isinstance(value, dict) else None)
def test_an_answer_is_a_call_or_as_its_format_says(guide, name, form, fits, others):
    tokenizer = with_template("")
    if name == "llama3" and "json" in form["type"]:
        with pytest.raises(ValueError, match="JSON is a call in the chat format 'llama3'"):
            calls_of(tokenizer, name, ChatOptions(tools=TOOLS), "Hello", response_format=form)
        return
    grammar = guide.compile(calls_of(tokenizer, name, ChatOptions(tools=TOOLS), "Hello", response_format=form))
    for text in [*fits, CALLS[name]]:
        assert takes(grammar, tokenizer, text), text
    for text in others:
        assert not takes(grammar, tokenizer, text), text
    with pytest.raises(ValueError, match="use syntax 'lark'"):
        calls_of(tokenizer, name, ChatOptions(tools=TOOLS), "Hello",
                 response_format={"type": "grammar", "grammar": 'root ::= "a"', "syntax": "ebnf"})


@pytest.mark.parametrize("name", [*CALLS, "plain"])
@pytest.mark.parametrize("form, fit, other", [
    ({"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, '{"a": 1}',
     '{"a": "b"}'),
    ({"type": "json_object"}, "{}", "[]"), ({"type": "regex", "regex": "a+"}, "aa", "b"),
    ({"type": "choice", "choice": ["yes", "no"]}, "yes", "perhaps"),
    ({"type": "grammar", "grammar": 'start: "x" digits\ndigits: /[0-9]+/'}, "x12", "x"),
], ids=lambda value: value.get("type") if isinstance(value, dict) else None)
def test_a_format_holds_after_reasoning_that_the_prompt_begins(guide, name, form, fit, other):
    """The answer is content; before, the format held for the reasoning, and nothing could end that."""
    tokenizer, options = with_template("<think>"), ChatOptions()
    assert calls_of(tokenizer, name, options, "assistant\n", response_format=form) is None
    mark = {"mistral": "[/THINK]", "seed_oss": "</seed:think>"}.get(name, "</think>")
    opened = mark.replace("/", "") + "\n"
    grammar = guide.compile(calls_of(tokenizer, name, options, "assistant\n" + opened, response_format=form))
    thought = "So be it: {1}\n" + mark + "\n\n"
    assert takes(grammar, tokenizer, thought + fit)
    assert not takes(grammar, tokenizer, thought + other) and not takes(grammar, tokenizer, fit)
    assert parse(name, [thought + fit], (), opened=opened) == (fit, "So be it: {1}", [])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_at_most(guide, name, choice):
    tokenizer = with_template("")
    options = ChatOptions(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    grammar = guide.compile(calls_of(tokenizer, name, options, "Hello"))
    calls = parse(name, [CALLS[name]], TOOLS)[2]
    assert takes(grammar, tokenizer, CALLS[name]) is (len(calls) == 1)
    assert takes(grammar, tokenizer, "It is late.") is (choice == "auto")
    assert calls_of(tokenizer, "plain", ChatOptions(tools=TOOLS, parallel_tool_calls=False), "Hello") is None


def test_forced_calls_after_what_the_prompt_has_begun(guide):
    tokenizer = with_template("<think>")
    options = ChatOptions(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)

    def grammar(prompt):
        return guide.compile(calls_of(tokenizer, "hermes", options, prompt))

    text = 'Let me think.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert grammar("assistant\n<think>\n").matcher([EOS], tokenizer.encode(text)).must_stop
    call = text[text.index("<tool_call>"):]
    assert grammar("assistant\n<think>\n\n</think>\n\n").matcher([EOS], tokenizer.encode(call)).must_stop
    assert grammar("assistant\n").matcher([EOS], tokenizer.encode(call)).must_stop
    assert grammar("assistant\n").matcher([EOS], tokenizer.encode("<think>" + text)).must_stop


def test_marks_that_are_special_tokens():
    backend = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]"])
    backend.add_tokens(["<tool_call>", "</tool_call>"])  # as Qwen's: no special tokens
    tokenizer = Tokenizer(backend, {}, {"default": ""}, "it")
    guide = Guide(backend.to_str(), VOCAB, [EOS])
    options = ChatOptions(tools=TOOLS, tool_choice="required")
    try:
        for name, text in (("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "UTC"}}]'),
                           ("hermes", '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>')):
            form = chat_format(name)
            ids = tokenizer.encode(text)
            assert ids[0] >= 1536
            grammar = guide.compile(calls_of(tokenizer, name, options, "Hello"))
            assert grammar.matcher([EOS], ids).may_stop
            assert grammar.matcher([EOS]).forced()[0] == ids[0]
            stream = tokenizer.detokenizer(form.markers)
            pieces = [stream.push([i]) for i in ids] + [stream.finish()]
            assert parse(name, pieces) == ("", "", [("now", '{"zone": "UTC"}')])
            free = guide.compile(calls_of(tokenizer, name, ChatOptions(tools=STRICT), "Hello"))
            assert free.matcher([EOS], tokenizer.encode("It is late, I think.")).may_stop
            assert free.matcher([EOS], tokenizer.encode("I look: ") + ids).may_stop
            with pytest.raises(MatcherError):
                free.matcher([EOS], tokenizer.encode("I look: " + text.replace("UTC", "UTX")))
        # Marks that are spelled out in text are plain text.
        matcher = guide.compile({"type": "choice", "choice": ["a<tool_call>b"]}).matcher([EOS])
        assert len(walk(matcher, 0)) > 4 and matcher.must_stop
    finally:
        guide.close()


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_special_token_within_marks(name):
    """The marks of DeepSeek-V3.2 and V4 are plain text around one token, which no text of a lexeme can hold."""
    backend = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    backend.add_special_tokens(["｜DSML｜"])
    tokenizer, guide = Tokenizer(backend, {}, {"default": ""}, "it"), Guide(backend.to_str(), VOCAB, [EOS])
    form, text = chat_format(name), CALLS[name]
    try:
        assert tokenizer.encode(text).count(tokenizer.mark_id("｜DSML｜")) == 6
        stream = tokenizer.detokenizer(form.markers)
        pieces = [stream.push([i]) for i in tokenizer.encode(text)] + [stream.finish()]
        assert parse(name, pieces) == ("", "", [("now", '{"zone": "UTC"}')])
        options = ChatOptions(tools=TOOLS, tool_choice="required")
        forced = guide.compile(calls_of(tokenizer, name, options, "Hi"))
        assert takes(forced, tokenizer, text) and not takes(forced, tokenizer, "I look: " + text)
        for seed in range(6):
            stream = tokenizer.detokenizer(form.markers)
            ids = walk(forced.matcher([EOS]), seed, longest=3000)
            content, reasoning, calls = parse(name, [stream.push(ids) + stream.finish()])
            check_calls(calls)
            assert not content and not reasoning
        free = guide.compile(calls_of(tokenizer, name, ChatOptions(tools=STRICT), "Hi"))
        for fit in ("It is late, <b>.", "I look:\n\n" + text):
            assert takes(free, tokenizer, fit), fit
        assert not takes(free, tokenizer, "I look:\n\n" + text.replace("UTC", "UTX"))
    finally:
        guide.close()


@pytest.mark.parametrize("name", SHOWN)
def test_calls_are_parsed_and_constrained_as_their_template_shows_them(guide, name):
    tokenizer = with_template(SHOWN[name])
    assert chat_format_of(tokenizer.chat_templates, "") == name
    calls = [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "a \\"b\\"", "days": 2}'),
             ("note", '{"text": "a\\nb"}'), ("ping", "{}")]
    message = {"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": f"call_{i}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for i, (called, arguments) in enumerate(calls)]}
    note = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = [*TOOLS, {"type": "function", "function": {"name": "ping"}},
             {"type": "function", "function": {"name": "note", "parameters": note}}]
    options = ChatOptions(tools=tools, tool_choice="required")
    text = render(tokenizer.templates, check_messages([message]), options)
    text = text[text.index("I look."):].removesuffix("<｜end▁of▁sentence｜>").removesuffix("\n")
    assert parse(name, [text], tools) == ("I look.", "", calls)
    grammar = guide.compile(calls_of(tokenizer, name, options, "Hello"))
    shown = text.removeprefix("I look.").lstrip()
    assert takes(grammar, tokenizer, shown)
    for other in (shown.replace("Paris", "Paris in France"), shown.replace("2", "x"), shown.replace("ping", "pong")):
        assert not takes(grammar, tokenizer, other), other
    one = guide.compile(calls_of(tokenizer, name, dataclasses.replace(options, parallel_tool_calls=False), "Hello"))
    assert not takes(one, tokenizer, shown)


PLAIN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>VALUE</parameter>\n</function>\n</seed:tool_call>",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>VALUE</arg_value></tool_call>",
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("schema, value, expected", [
    ({"type": "string"}, "a < b:\n  '</p>'", "a < b:\n  '</p>'"), ({"type": "string", "minLength": 2}, "<b>", "<b>"),
    ({"enum": ["5", "<6>"]}, "5", "5"), ({"const": "null"}, "null", "null"),
    ({"type": "string", "enum": ["true", "no"]}, "true", "true"),
    ({"type": "integer"}, "5", 5), ({"enum": [5, "a"]}, "5", 5), ({"type": ["integer", "null"]}, "null", None),
])
def test_plain_values_are_of_the_types_of_their_schema(guide, name, schema, value, expected):
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": schema}, "required": ["a"]}}}
    text = PLAIN[name].replace("VALUE", value)
    assert parse(name, text, [tool]) == ("", "", [("f", json.dumps({"a": expected}))])
    tokenizer = with_template("")
    grammar = guide.compile(calls_of(tokenizer, name, ChatOptions(tools=[tool], tool_choice="required"), "Hello"))
    assert takes(grammar, tokenizer, text)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("pattern, fits, others", [
    ("^[a-z]+$", ["ab"], ["a1", "", "ab\n", "abcdefg"]), ("a/b", ["a/b", "xa/by"], ["ab"]),
    ("^\\d{2}", ["12", "12x"], ["1x"]), ("x\\$", ["x$", "ax$b"], ["x"]),
])
def test_plain_texts_follow_the_pattern_of_their_schema(guide, name, pattern, fits, others):
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "pattern": pattern, "maxLength": 6}},
        "required": ["a"]}}}
    tokenizer = with_template("")
    grammar = guide.compile(calls_of(tokenizer, name, ChatOptions(tools=[tool], tool_choice="required"), "Hello"))
    for text in fits:
        assert takes(grammar, tokenizer, PLAIN[name].replace("VALUE", text)), text
    for text in others:
        assert not takes(grammar, tokenizer, PLAIN[name].replace("VALUE", text)), text


@pytest.mark.parametrize("schema, value, expected", [
    ({"type": ["string", "null"]}, "12", "12"), ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
    ({"anyOf": [{"type": "string"}, {}]}, "12", 12), ({"type": ["string", "array"]}, "[1]", [1]),
    ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "1", 1), ({"$ref": "#/x"}, "1", 1), ({}, "a", "a"),
    *((wrong, "1", 1) for wrong in ({"type": 5}, {"enum": 5}, {"anyOf": 5}, {"anyOf": [5]}, {"type": [5]}, 5, True)),
])
@pytest.mark.parametrize("name", PLAIN)
def test_values_that_may_be_text_are_what_their_schema_allows(name, schema, value, expected):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    assert parse(name, PLAIN[name].replace("VALUE", value), [tool])[2] == [("f", json.dumps({"a": expected}))]


def test_templates_of_nemotron_get_text_where_a_message_has_calls_alone():
    text = render(with_template(SHOWN["nemotron_json"]).templates, check_messages([CALLED]), ChatOptions())
    assert text == '\n\n<TOOLCALL>[{"name": "now", "arguments": {"zone": "UTC"}}]</TOOLCALL>'
