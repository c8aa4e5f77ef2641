"""What the chat templates of DeepSeek-V3.2 and V4 have in common: calls of tools in XML with the token DSML."""
# ruff: noqa: RUF001
from __future__ import annotations

_CALLS = """\
{%- if message['tool_calls'] -%}
{{- '\\n\\n<DSML:BLOCK>' -}}
{%- for call in message['tool_calls'] -%}
{{- '\\n<DSML:invoke name="' + call['function']['name'] + '">\\n' -}}
{%- for key, value in call['function']['arguments'].items() -%}
{{- '<DSML:parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' -}}
{{- (value if value is string else value | tojson) + '</DSML:parameter>' + ('' if loop.last else '\\n') -}}
{%- endfor -%}
{{- '\\n</DSML:invoke>' -}}
{%- endfor -%}
{{- '\\n</DSML:BLOCK>' -}}
{%- endif -%}
"""


def template(text: str, block: str) -> str:
    """A template in which the line CALLS stands for a message's calls, and DSML: for their mark. block: the name of
    the element around them.
    """
    return text.replace("CALLS\n", _CALLS.replace("BLOCK", block)).replace("DSML:", "｜DSML｜")
