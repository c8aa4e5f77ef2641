"""Prompts of chats: what templates get, and errors of templates, options and messages."""

from __future__ import annotations

import shutil

import pytest

from allspark_client.chat import ChatOptions, check_messages
from allspark_server.chat import ToolCallBegin, chat_format
from allspark_server.chat.format import opened_in, render
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.chat import CALLED, CALLS, tail, with_template
from support.grammars import FABLE
from support.tool_calls import TIME, TOOLS

QWEN = (
    "{%- if tools %}{{- 'TOOLS\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' }}{{- c.function.name }}{{- c.function.arguments | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- if open %}{{- '<think>\\n' }}{%- endif %}"
)


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


def test_deepseek_v4_chats_as_its_program_says(tmp_path):
    """The texts of encoding/encoding_dsv4.py, written out."""
    shutil.copy(FABLE / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    tokenizer = Tokenizer.from_dir(tmp_path)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello!", "reasoning_content": "thinking..."},
            {"role": "user", "content": "1+1=?"}]
    begun = ("S<｜User｜>hello<｜Assistant｜></think>Hello!<｜end▁of▁sentence｜><｜User｜>1+1=?<｜Assistant｜>")
    start = "<｜begin▁of▁sentence｜>"
    assert tokenizer.apply_chat_template(chat, thinking=True) == start + begun + "<think>"
    assert tokenizer.apply_chat_template(chat, enable_thinking=True, reasoning_effort="high") == \
        start + begun + "<think>"
    assert tokenizer.apply_chat_template(chat) == start + begun + "</think>"
    most = tokenizer.apply_chat_template(chat, thinking=True, reasoning_effort="max")
    head, _, rest = most.partition("Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very ")
    assert head == start and rest.endswith("no assumption is left unchecked.\n\n" + begun + "<think>")

    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    calls = [{"function": {"name": "now", "arguments": {}}},
             {"function": {"name": "now", "arguments": {"zone": "é\n", "more": [1, None]}}}]
    chat = [{"role": "user", "content": "When?"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
            {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "user", "content": "And?"}]
    text = tokenizer.apply_chat_template(chat, tools=[tool], thinking=True)
    head, described, rest = text.partition(
        "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by "
        'writing a "<｜DSML｜tool_calls>" block')
    assert head == start + "\n\n" and described
    called = ('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke '
              'name="now">\n<｜DSML｜parameter name="zone" string="true">é\n</｜DSML｜parameter>\n'
              '<｜DSML｜parameter name="more" string="false">[1, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
              "</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>1</tool_result>\n\n"
              "<tool_result>2</tool_result>\n\nAnd?<｜Assistant｜>")
    assert rest.endswith(
        '### Available Tool Schemas\n\n{"name": "now", "parameters": {"type": "object", "properties": {}}}\n\nYou MUST '
        "strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
        "<｜User｜>When?<｜Assistant｜><think>Hm.</think>" + called + "<think>")
    without = tokenizer.apply_chat_template(chat, thinking=True)    # reasoning before the last question is left out
    assert without == start + "<｜User｜>When?<｜Assistant｜></think>" + called + "<think>"
    last = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "Now.", "reasoning_content": "So."}],
                                         thinking=True)
    assert last.endswith("And?<｜Assistant｜><think>So.</think>Now.<｜end▁of▁sentence｜>")
    developer = tokenizer.apply_chat_template([{"role": "developer", "content": "D"}, *chat[:1]], thinking=True)
    assert developer == start + "<｜User｜>When?<｜Assistant｜><think>"
    assert tokenizer.apply_chat_template([{"role": "developer", "content": "D"}]) == \
        start + "<｜User｜>D<｜Assistant｜></think>"
    with pytest.raises(ValueError, match="role=judge is not known; allowed: system, developer, user, assistant, tool"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}])


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
