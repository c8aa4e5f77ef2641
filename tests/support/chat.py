"""Chats, answers and constraints of calls, for tests of chat formats."""

from __future__ import annotations

import tokenizers

from allspark_client import GenerateConfig
from allspark_server.chat import chat_format
from allspark_server.chat.format import TAIL_IDS
from allspark_server.guided import MatcherError
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.grammars import EOS, FABLE
from support.tool_calls import TIME, TOOLS, WEATHER, joined


def parse(name, pieces, tools=TOOLS, choice=None, opened=""):
    """The content, reasoning and calls of an answer that comes in pieces."""
    parser = chat_format(name).parser(tools, choice, opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


class _Any:
    def __eq__(self, other):
        return True


#: equals everything
ANY = _Any()
#: a message with a call
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}]}
STRICT = [TIME | {"function": TIME["function"] | {"strict": True}}, WEATHER]
#: answers with calls, by the name of the format
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
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="zone" '
                   'string="false">"UTC"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
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


def with_template(template):
    """A tokenizer with this chat template."""
    backend = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    return Tokenizer(backend, {}, {"default": template}, "it")


def calls_of(tokenizer, name, options, prompt, **config):
    """What constrains the answer to a chat in a format."""
    return chat_format(name).answer_format(
        options.check(), GenerateConfig(**config).response_format, tail(tokenizer, prompt),
        tokenizer.chat_templates.values(), tokenizer.marks)


def tail(tokenizer, prompt):
    """The end of a prompt that a format sees."""
    return tokenizer.decode(tokenizer.encode(prompt)[-TAIL_IDS:], skip_special_tokens=False)


def takes(grammar, tokenizer, text):
    """Whether a text fits a grammar and may end there."""
    try:
        return grammar.matcher([EOS], tokenizer.encode(text)).may_stop
    except MatcherError:
        return False
