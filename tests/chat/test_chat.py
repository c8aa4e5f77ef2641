"""Chat formats: parsing of recorded answers however they are split, prompts, and grammars of forced calls."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil

import pytest
import tokenizers

from allspark_client import GenerateConfig
from allspark_client.chat import ChatOptions, check_messages
from allspark_server.chat import Content, Reasoning, ToolCallArguments, ToolCallBegin, chat_format, chat_format_of
from allspark_server.chat.format import FORMATS, TAIL_IDS, opened_in, render
from allspark_server.guided import Guide, MatcherError
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.grammars import EOS, FABLE, VOCAB, walk
from support.paths import ROOT
from support.recorded_answers import PARIS, RECORDED
from support.shown_calls import SHOWN
from support.tool_calls import TIME, TOOLS, WEATHER, check_calls, joined


def parse(name, pieces, tools=TOOLS, choice=None, opened=""):
    parser = chat_format(name).parser(tools, choice, opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


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


class _Any:
    def __eq__(self, other):
        return True


ANY = _Any()


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
    assert chat_format_of({"default": "<tool_call>\n<function="}, "NemotronHForCausalLM") == "qwen3_coder"
    assert chat_format_of({"default": "<TOOLCALL>["}, "NemotronHForCausalLM") == "nemotron_json"
    assert chat_format_of({"default": "<{{ '｜DSML｜' }}function_calls>"}, "llama") == "deepseek_v32"
    assert chat_format_of({}, "DeepseekV32ForCausalLM") == "deepseek_v32"
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


# ---- prompts --------------------------------------------------------------------------------------------------


QWEN = (
    "{%- if tools %}{{- 'TOOLS\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' }}{{- c.function.name }}{{- c.function.arguments | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- if open %}{{- '<think>\\n' }}{%- endif %}"
)


def with_template(template):
    backend = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    return Tokenizer(backend, {}, {"default": template}, "it")


CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}]}


def test_tools_parts_and_calls_are_in_the_prompt():
    tokenizer = with_template(QWEN)
    messages = check_messages([
        {"role": "user", "content": [{"type": "text", "text": "When?"}, {"type": "text", "text": "Now?"}]}, CALLED,
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}])
    text = render(tokenizer.templates, messages, ChatOptions(tools=[TIME]))
    assert text.startswith('TOOLS\n{"type": "function", "function": {"name": "now"')
    assert "When?\nNow?" in text and '<tool_call>now{"zone": "UTC"}' in text and "tool\n12:00" in text
    assert "TOOLS" not in render(tokenizer.templates, messages, ChatOptions(tools=[TIME], tool_choice="none"))
    text = render(tokenizer.templates, messages, ChatOptions(chat_template_kwargs={"enable_thinking": False}))
    assert text.endswith("</think>\n\n") and opened_in(text) == ""
    text = render(tokenizer.templates, messages, ChatOptions(chat_template_kwargs={"open": True}))
    assert opened_in(tail(tokenizer, text)) == "<think>\n"
    parts = with_template("{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}")
    assert render(parts.templates, messages[:1], ChatOptions()) == "[When?][Now?]"


DEEPSEEK = (
    "{%- for m in messages %}{%- if m['role'] == 'assistant' and m['content'] is none %}"
    "{%- for tool in m['tool_calls'] %}{{- tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json' + "
    "'\\n' + tool['function']['arguments'] + '\\n```' }}{%- endfor %}"
    "{%- else %}{{- m['content'] }}{%- endif %}{%- endfor %}"
    "{{- '<think>' if thinking else '</think>' }}"
)
KIMI = (
    "{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
    "{{- c['id'] }}<|tool_call_argument_begin|>{%- if c['function']['arguments'] is string %}{{- 'text' }}{%- else %}"
    "{{- c['function']['arguments'] | tojson }}{%- endif %}{%- endfor %}"
    "{%- if m.role == 'tool' %}{{- '|' + m.tool_call_id + '|' }}{%- endif %}{%- endfor %}"
)
PHI = ("{%- for m in messages %}{%- if m['role'] == 'system' and m['tools'] %}{{- m['content'] + '<|tool|>' + "
       "m['tools'] + '<|/tool|>' }}{%- else %}{{- m['content'] }}{%- endif %}{%- endfor %}")


def test_templates_get_calls_and_tools_in_their_own_form():
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
    messages = check_messages([{"role": "user", "content": "When?"}, CALLED, answer])
    options = ChatOptions(tools=[TIME], chat_template_kwargs={"enable_thinking": True})
    assert render(with_template(DEEPSEEK).templates, messages, options) == \
        'When?function<｜tool▁sep｜>now\n```json\n{"zone": "UTC"}\n```12:00<think>'
    assert render(with_template(DEEPSEEK).templates, messages, ChatOptions()).endswith("</think>")
    own = check_messages([CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": "functions.now:1"}]},
                          answer | {"tool_call_id": "functions.now:1"}])
    assert render(with_template(KIMI).templates, [*messages, *own], options) == (
        'functions.now:0<|tool_call_argument_begin|>{"zone": "UTC"}|functions.now:0|'
        'functions.now:1<|tool_call_argument_begin|>{"zone": "UTC"}|functions.now:1|')
    assert render(with_template(PHI).templates, messages[:1], options).startswith('<|tool|>[{"name": "now", ')
    assert render(with_template(PHI).templates, messages[:1], ChatOptions()) == "When?"
    parser = chat_format("kimi_k2").parser(TOOLS)
    assert parser.feed(CALLS["kimi_k2"])[0] == ToolCallBegin(0, "functions.now:0", "now")
    again = [event for event in parser.feed(CALLS["kimi_k2"]) if isinstance(event, ToolCallBegin)]
    assert [event.name for event in again] == ["now"] and again[0].id != "functions.now:0"
    taken = [CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": "functions.now:0"}]}]
    assert render(with_template(KIMI).templates, check_messages([*taken, *messages]), options).endswith(
        'functions.now:1<|tool_call_argument_begin|>{"zone": "UTC"}|functions.now:1|')


#: in the style of models that see
SEES = ("{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}<img>{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %};{% endfor %}")


def test_images_in_templates():
    """They stand where their parts do; a template of texts is not given them, and is named."""
    image, chat = {"type": "image"}, [{"role": "system", "content": "s"}]
    for role, parts in (("user", [image, {"type": "text", "text": "a"}, image]), ("tool", [image]), ("user", [image])):
        chat.append({"role": role, "content": parts})
    messages = check_messages(chat)
    text = render(with_template(SEES).templates, messages, ChatOptions())
    assert text == "system:s;user:<img>a<img>;tool:<img>;user:<img>;"
    with pytest.raises(ValueError, match="chat template takes no images in a message of the role 'user'"):
        render(with_template("{{ messages[0]['content'] }}").templates, messages, ChatOptions())
    for part in ({"type": "image", "image": "x"}, {"type": "image_url", "image_url": {"url": "x"}},
                 {"type": "video", "video": "x"}, {"type": "audio"}):
        with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]\[0\]"):
            check_messages([{"role": "user", "content": [part]}])


def test_deepseek_v32_chats_as_its_program_says(tmp_path):
    """The texts of encoding/encoding_dsv32.py, written out."""
    shutil.copy(FABLE / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    tokenizer = Tokenizer.from_dir(tmp_path)

    def dsml(text):
        return text.replace("DSML:", "｜DSML｜")

    chat = [{"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello! I am DeepSeek.", "reasoning_content": "thinking..."},
            {"role": "user", "content": "1+1=?"}]
    begun = ("<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek.<｜end▁of▁sentence｜>"
             "<｜User｜>1+1=?<｜Assistant｜>")
    assert tokenizer.apply_chat_template(chat, thinking=True) == begun + "<think>"      # the model card's example
    assert tokenizer.apply_chat_template(chat) == begun + "</think>"

    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    calls = [{"function": {"name": "now", "arguments": {}}},
             {"function": {"name": "now", "arguments": {"zone": "é\n", "more": [1, None]}}}]
    chat = [{"role": "user", "content": "When?"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
            {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = tokenizer.apply_chat_template(chat, tools=[tool], thinking=True)
    head, described, rest = text.partition(dsml(
        '## Tools\n\nYou have access to a set of tools you can use to answer the user\'s question.\nYou can invoke '
        'functions by writing a "<DSML:function_calls>" block like the following as part of your reply to the user:\n'))
    assert head == "<｜begin▁of▁sentence｜>\n\n" and described
    assert rest.endswith(
        '<functions>\n{"name": "now", "parameters": {"type": "object", "properties": {}}}\n</functions>\n'
        + dsml("<｜User｜>When?<｜Assistant｜><think>Hm.</think>\n\n<DSML:function_calls>\n"
               '<DSML:invoke name="now">\n\n</DSML:invoke>\n<DSML:invoke name="now">\n'
               '<DSML:parameter name="zone" string="true">é\n</DSML:parameter>\n'
               '<DSML:parameter name="more" string="false">[1, null]</DSML:parameter>\n</DSML:invoke>\n'
               "</DSML:function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>1</result>\n"
               "<result>2</result>\n</function_results>\n\n<think>"))
    with_system = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, *chat], tools=[tool])
    assert with_system.startswith("<｜begin▁of▁sentence｜>S\n\n## Tools\n") and with_system.count("## Tools") == 1
    assert "Hm." not in with_system and with_system.endswith("</function_results>\n\n</think>")
    with pytest.raises(ValueError, match="role=judge is not known; allowed: system, developer, user, assistant, tool"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}])
    own = tmp_path / "chat_template.jinja"      # V3.2-Exp has a template
    own.write_text("own")
    assert Tokenizer.from_dir(tmp_path).apply_chat_template(chat) == "own"


@pytest.mark.parametrize("template, error", [
    ("{{ 1 }}\n\n{{ raise_exception('no tools here') }}", "refused the messages in line 3: no tools here"),
    ("{{ 1 }}\n{{ messages[0].nothing.more }}", "refused the messages in line 2: .*nothing"),
    ("x\n{{ 1 / 0 }}", "failed on the messages in line 2: ZeroDivisionError"),
    ("{% for %}", "has an error in line 1"),
])
def test_errors_of_templates_name_the_line(template, error):
    with pytest.raises(ValueError, match=f"the chat template of it {error}"):
        render(with_template(template).templates, [{"role": "user", "content": "x"}], ChatOptions())


@pytest.mark.parametrize("values, kind, error", [
    ({"tools": {}}, TypeError, "tools must be a list"),
    ({"tools": [5]}, TypeError, r"tools\[0\] must be a dict"),
    ({"tools": [{"type": "code"}]}, ValueError, r"tools\[0\]\.type='code'"),
    ({"tools": [{"type": "function"}]}, TypeError, r"tools\[0\]\.function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, ValueError, r"tools\[0\]\.function\.name='a b'"),
    ({"tools": [TIME, TIME]}, ValueError, r"tools\[1\]\.function\.name='now' is also the name of another"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, TypeError, r"function\.parameters"),
    ({"tool_choice": "any"}, ValueError, "tool_choice='any' is not known; allowed: auto, none, required"),
    ({"tool_choice": "required"}, ValueError, "needs tools"),
    ({"tool_choice": 5}, TypeError, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, ValueError,
     r"tool_choice\.function\.name='x' is not one of the tools: now"),
    ({"chat_template_kwargs": {"tools": []}}, ValueError, "chat_template_kwargs must not hold 'tools'"),
    ({"chat_template_kwargs": {"x": {1}}}, ValueError, "chat_template_kwargs is not plain JSON"),
    ({"parallel_tool_calls": "no"}, TypeError, "parallel_tool_calls"),
])
def test_wrong_options_are_named(values, kind, error):
    with pytest.raises(kind, match=error):
        ChatOptions(**values).check()


@pytest.mark.parametrize("message, kind, error", [
    (5, TypeError, r"messages\[0\] must be a dict"),
    ({"role": "user"}, ValueError, r"messages\[0\] has no 'content'"),
    ({"role": 5, "content": ""}, ValueError, r"messages\[0\]\['role'\]"),
    ({"role": "user", "content": 5}, TypeError, r"messages\[0\]\['content'\] must be a str or a list"),
    ({"role": "user", "content": [{"type": "image_url"}]}, ValueError, r"\['content'\]\[0\]\.type='image_url'"),
    ({"role": "user", "content": [{"type": "text"}]}, TypeError, r"\['content'\]\[0\]\.text"),
    ({"role": "assistant", "tool_calls": [{}]}, ValueError, r"\['tool_calls'\]\[0\]"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}, ValueError,
     r"\[0\]\.function\.arguments is not valid JSON"),
    ({"role": "user", "content": "\ud800"}, ValueError, "not valid Unicode"),
])
def test_wrong_messages_are_named(message, kind, error):
    with pytest.raises(kind, match=error):
        check_messages([message])


# ---- forced calls -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guide():
    guide = Guide((FABLE / "tokenizer.json").read_text(), VOCAB, [EOS])
    yield guide
    guide.close()


def calls_of(tokenizer, name, options, prompt, **config):
    return chat_format(name).answer_format(
        options.check(), GenerateConfig(**config).response_format, tail(tokenizer, prompt),
        tokenizer.chat_templates.values(), tokenizer.marks)


def tail(tokenizer, prompt):
    return tokenizer.decode(tokenizer.encode(prompt)[-TAIL_IDS:], skip_special_tokens=False)


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
STRICT = [TIME | {"function": TIME["function"] | {"strict": True}}, WEATHER]
CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
              '<tool_call>\n{"name": "get_weather", "arguments": {"place": "x"}}\n</tool_call>',
    "llama3": '{"name": "now", "parameters": {"zone": "UTC"}}; {"name": "get_weather", "parameters": {"place": "x"}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "UTC"}}, '
               '{"name": "get_weather", "arguments": {"place": "x"}}]',
    "glm45": "<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>\"UTC\"</arg_value>\n</tool_call>",
    "glm47": '<tool_call>now<arg_key>zone</arg_key><arg_value>"UTC"</arg_value></tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=zone>\n\"UTC\"\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=now>\n<parameter=zone>\"UTC\"</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n<parameter name="zone">"UTC"</parameter>\n</invoke>\n'
                  "</minimax:tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
                   '{"zone": "UTC"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"zone": "UTC"}<｜tool▁call▁end｜>'
                    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"place": "x"}<｜tool▁call▁end｜>'
                    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
               '{"zone": "UTC"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="zone" '
                    'string="false">"UTC"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "granite": '<|tool_call|>[{"name": "now", "arguments": {"zone": "UTC"}}]',
    "phi4_mini": '<|tool_call|>[{"name": "now", "arguments": {"zone": "UTC"}}]<|/tool_call|>',
    "nemotron_json": '<TOOLCALL>[{"name": "now", "arguments": {"zone": "UTC"}}]</TOOLCALL>',
    "pythonic": "[now(zone=\"UTC\"), get_weather(city='x', days=[1, \"(\"])]",
    "lfm2": '<|tool_call_start|>[now(zone="UTC")]<|tool_call_end|>',
    "olmo3": '<function_calls>now(zone="UTC")\nget_weather(city="x")</function_calls>',
    "hunyuan": '<tool_calls><tool_call>now\n```json\n{"zone": "UTC"}\n```</tool_call></tool_calls>',
    "functiongemma": '<start_function_call>call:now{zone:"UTC"}<end_function_call>'
                     "<start_function_call>call:get_weather{city:<escape>x<escape>,days:{a:[1]}}<end_function_call>",
    "gemma4": '<|tool_call>call:now{zone:"UTC"}<tool_call|>',
}


def takes(grammar, tokenizer, text):
    try:
        return grammar.matcher([EOS], tokenizer.encode(text)).may_stop
    except MatcherError:
        return False


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


def test_a_special_token_within_marks():
    """DeepSeek-V3.2's marks are plain text around one token, which no text of a lexeme can hold."""
    backend = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    backend.add_special_tokens(["｜DSML｜"])
    tokenizer, guide = Tokenizer(backend, {}, {"default": ""}, "it"), Guide(backend.to_str(), VOCAB, [EOS])
    form, text = chat_format("deepseek_v32"), CALLS["deepseek_v32"]
    try:
        assert tokenizer.encode(text).count(tokenizer.mark_id("｜DSML｜")) == 6
        stream = tokenizer.detokenizer(form.markers)
        pieces = [stream.push([i]) for i in tokenizer.encode(text)] + [stream.finish()]
        assert parse("deepseek_v32", pieces) == ("", "", [("now", '{"zone": "UTC"}')])
        options = ChatOptions(tools=TOOLS, tool_choice="required")
        forced = guide.compile(calls_of(tokenizer, "deepseek_v32", options, "Hi"))
        assert takes(forced, tokenizer, text) and not takes(forced, tokenizer, "I look: " + text)
        for seed in range(6):
            stream = tokenizer.detokenizer(form.markers)
            ids = walk(forced.matcher([EOS]), seed, longest=3000)
            content, reasoning, calls = parse("deepseek_v32", [stream.push(ids) + stream.finish()])
            check_calls(calls)
            assert not content and not reasoning
        free = guide.compile(calls_of(tokenizer, "deepseek_v32", ChatOptions(tools=STRICT), "Hi"))
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


# ---- harmony --------------------------------------------------------------------------------------------------------

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


def test_the_parser_needs_no_engine():
    import subprocess
    import sys

    program = ("import sys, allspark_server.chat\n"
               "bad = {'tokenizers', 'llguidance', 'numpy.random', 'mpi4py', 'torch', 'allspark_server._native'}\n"
               "print(sorted(bad & set(sys.modules)))")
    root = ROOT
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert found.stdout.strip() == "[]", found.stderr
