"""DeepSeek-V3.2's chat template. Its checkpoints have a Python program instead, `encoding/encoding_dsv32.py`, which is
never run. The template gives the text that the program gives if the tools are in its first message, of the system.

`thinking`: the answer begins with reasoning. Reasoning before the last message of the user is not shown again.
"""
# ruff: noqa: RUF001
from __future__ import annotations

from .dsml import template

_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<DSML:function_calls>" block like the following as part of your reply to the \
user:
<DSML:function_calls>
<DSML:invoke name="$FUNCTION_NAME">
<DSML:parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</DSML:parameter>
...
</DSML:invoke>
<DSML:invoke name="$FUNCTION_NAME2">
...
</DSML:invoke>
</DSML:function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<DSML:function_calls>
...
</DSML:function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{% for tool in tools %}
{{ tool['function'] | tojson }}
{% endfor %}
</functions>
"""

# `from_user` is the index of the last message of the user.
_MESSAGES = """\
{%- set thinking = thinking is defined and thinking -%}
{%- set ns = namespace(from_user=-1) -%}
{%- for message in messages -%}
{%- if message['role'] in ('user', 'developer') -%}{%- set ns.from_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if tools and messages[0]['role'] != 'system' -%}{{- '\\n\\n' + described() -}}{%- endif -%}
{%- for message in messages -%}
{%- set begun = '<think>' if thinking and loop.index0 >= ns.from_user else '</think>' -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] or '' -}}
{%- if tools and loop.first -%}{{- '\\n\\n' + described() -}}{%- endif -%}
{%- elif message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] + '<｜Assistant｜>' + begun -}}
{%- elif message['role'] == 'developer' -%}
{{- '<｜User｜>\\n\\n# The user\\'s message is: ' + message['content'] + '<｜Assistant｜>' + begun -}}
{%- elif message['role'] == 'tool' -%}
{%- if loop.first or loop.previtem['role'] != 'tool' -%}{{- '\\n\\n<function_results>' -}}{%- endif -%}
{{- '\\n<result>' + message['content'] + '</result>' -}}
{%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{- '\\n</function_results>\\n\\n' + begun -}}{%- endif -%}
{%- elif message['role'] == 'assistant' -%}
{%- if thinking and loop.index0 > ns.from_user -%}
{{- (message['reasoning_content'] or '') + '</think>' -}}
{%- endif -%}
{{- message['content'] or '' -}}
CALLS
{{- '<｜end▁of▁sentence｜>' -}}
{%- else -%}
{{- raise_exception('role=' + message['role'] + ' is not known; allowed: system, developer, user, assistant, tool') -}}
{%- endif -%}
{%- endfor -%}
"""

CHAT = template("{%- macro described() -%}" + _TOOLS + "{% endmacro -%}" + _MESSAGES, "function_calls")
