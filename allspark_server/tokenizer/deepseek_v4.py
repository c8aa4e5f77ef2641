"""DeepSeek-V4's chat template. Its checkpoints have a Python program instead, `encoding/encoding_dsv4.py`, which is
never run. The template gives the text that the program gives if the tools are in its first message, of the system, and
results of tools come in the order of their calls.

`thinking` (or `enable_thinking`): the answer begins with reasoning; `reasoning_effort` "max": with as much as possible.
Reasoning before the last message of the user is shown again only if there are tools.
"""
# ruff: noqa: RUF001
from __future__ import annotations

from .dsml import template

_MOST = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<DSML:tool_calls>" block like the following:

<DSML:tool_calls>
<DSML:invoke name="$TOOL_NAME">
<DSML:parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</DSML:parameter>
...
</DSML:invoke>
<DSML:invoke name="$TOOL_NAME2">
...
</DSML:invoke>
</DSML:tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{% for tool in tools %}
{{ tool['function'] | tojson }}
{% endfor %}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

# Adjacent messages of the user and of tools are one. `from_user` is the index where the last of these begins.
_MESSAGES = """\
{%- set thinking = thinking if thinking is defined else enable_thinking is defined and enable_thinking -%}
{%- set asking = ['user', 'tool'] -%}
{%- set ns = namespace(from_user=-1) -%}
{%- for message in messages -%}
{%- if message['role'] == 'developer' or (message['role'] in asking and (
    loop.first or loop.previtem['role'] not in asking)) -%}{%- set ns.from_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if thinking and reasoning_effort is defined and reasoning_effort == 'max' -%}{{- most() -}}{%- endif -%}
{%- if tools and messages[0]['role'] != 'system' -%}{{- '\\n\\n' + described() -}}{%- endif -%}
{%- for message in messages -%}
{%- set recent = tools or loop.index0 >= ns.from_user -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] or '' -}}
{%- if tools and loop.first -%}{{- '\\n\\n' + described() -}}{%- endif -%}
{%- elif message['role'] in asking -%}
{{- '\\n\\n' if not loop.first and loop.previtem['role'] in asking else '<｜User｜>' -}}
{{- '<tool_result>' + message['content'] + '</tool_result>' if message['role'] == 'tool' else message['content'] -}}
{%- elif message['role'] == 'developer' -%}
{%- if recent or not thinking -%}{{- '<｜User｜>' + message['content'] -}}{%- endif -%}
{%- elif message['role'] == 'assistant' -%}
{%- if thinking and (tools or loop.index0 > ns.from_user) -%}
{{- (message['reasoning_content'] or '') + '</think>' -}}
{%- endif -%}
{{- message['content'] or '' -}}
CALLS
{{- '<｜end▁of▁sentence｜>' -}}
{%- else -%}
{{- raise_exception('role=' + message['role'] + ' is not known; allowed: system, developer, user, assistant, tool') -}}
{%- endif -%}
{%- if message['role'] in asking + ['developer'] and (loop.last or loop.nextitem['role'] == 'assistant') -%}
{%- if recent or not thinking or message['role'] != 'developer' -%}
{{- '<｜Assistant｜>' + ('<think>' if thinking and recent else '</think>') -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""

CHAT = template("{%- macro most() -%}" + _MOST + "{% endmacro -%}{%- macro described() -%}" + _TOOLS + "{% endmacro -%}"
                + _MESSAGES, "tool_calls")
