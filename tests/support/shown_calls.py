"""The parts of the families' published templates that show calls, by chat format; qwen3_coder's is of Nemotron 3."""
from __future__ import annotations

from allspark_server.tokenizer import deepseek_v4, deepseek_v32

SHOWN = {
    "qwen3_coder":
        "{%- for m in messages %}{{- m.content ~ '\n' }}{%- for c in m.tool_calls %}{%- set c = c.function %}"
        "{{- '<tool_call>\n<function=' ~ c.name ~ '>\n' -}}{%- for k, v in c.arguments|items %}"
        "{{- '<parameter=' ~ k ~ '>\n' -}}{%- set v = v | tojson | safe if v is mapping or (v is sequence and "
        "v is not string) else v | string %}{{- v ~ '\n</parameter>\n' -}}{%- endfor %}"
        "{{- '</function>\n</tool_call>\n' -}}{%- endfor %}{%- endfor %}",
    "nemotron_json":
        "{%- for m in messages %}{%- set content = m['content'] %}{{- content.strip() + '\n\n<TOOLCALL>[' -}}"
        "{%- for c in m.tool_calls -%}{%- set fn = c.function -%}"
        "{{- '{\"name\": \"' + fn.name + '\", \"arguments\": ' -}}{%- if fn.arguments is string -%}"
        "{{- fn.arguments -}}{%- else -%}{{- fn.arguments | tojson -}}{%- endif -%}"
        "{{- '}' + (', ' if not loop.last else '') -}}{%- endfor -%}{{- ']</TOOLCALL>' -}}{%- endfor %}",
    "hunyuan":
        "{%- for message in messages %}{{- message['content'] }}{%- for tool in message['tool_calls'] %}"
        "{%- set arguments = tool['function']['arguments'] %}{%- if arguments is not string %}"
        "{%- set arguments = arguments | tojson %}{%- endif %}{%- set call = tool['function']['name'] + '\n```json\n' "
        "+ arguments + '\n```</tool_call>' %}{{- '<tool_calls><tool_call>' + call if loop.first else "
        "'\n<tool_call>' + call }}{%- endfor %}{{- '</tool_calls>' }}{%- endfor %}",
    "olmo3":
        "{%- for message in messages -%}{{- message['content'] + '<function_calls>' -}}"
        "{%- for tool_call in message['tool_calls'] %}{%- set args = tool_call['function']['arguments'] -%}"
        "{%- set ns = namespace(arguments_list=[]) -%}{%- for key, value in args.items() -%}"
        "{%- set ns.arguments_list = ns.arguments_list + [key ~ '=' ~ (value | tojson)] -%}{%- endfor -%}"
        "{{- tool_call['function']['name'] + '(' + ns.arguments_list | join(', ') + ')' -}}"
        "{%- if not loop.last -%}{{ '\n' }}{%- endif -%}{%- endfor %}{{- '</function_calls>' -}}{%- endfor -%}",
    "glm47":
        "{%- for m in messages -%}{{ m.content.strip() }}{% for tc in m.tool_calls %}{%- set tc = tc.function %}"
        "{{- '<tool_call>' ~ tc.name -}}{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}"
        "</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}"
        "</tool_call>{% endfor %}{%- endfor -%}",
    "glm45":
        "{%- for m in messages -%}{{ m.content.strip() }}{% for tc in m.tool_calls %}\n{%- set tc = tc.function %}"
        "{{ '\n<tool_call>' + tc.name }}\n{% set _args = tc.arguments %}{% for k, v in _args.items() %}\n"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}"
        "</arg_value>\n{% endfor %}\n</tool_call>{% endfor %}{%- endfor -%}",
    "deepseek_v32": deepseek_v32.CHAT,
    "deepseek_v4": deepseek_v4.CHAT,
    "deepseek_v31":
        "{%- for message in messages -%}{%- for tool in message['tool_calls'] -%}{%- if loop.first -%}"
        "{{- message['content'] + '<｜tool▁calls▁begin｜>' }}{%- endif -%}{{- '<｜tool▁call▁begin｜>' + "
        "tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
        "{%- endfor -%}{{- '<｜tool▁calls▁end｜>' }}{%- endfor -%}",
    "kimi_k2":
        "{%- for message in messages -%}{{- message['content'] -}}<|tool_calls_section_begin|>"
        "{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>{{ tool_call['id'] }}"
        "<|tool_call_argument_begin|>{% if tool_call['function']['arguments'] is string %}"
        "{{ tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}"
        "<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>{%- endfor -%}",
    "minimax_m2":
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{%- for message in messages -%}{{- message.content }}"
        "{{- '\n' ~ toolcall_begin_token ~ '\n' }}{%- for tool_call in message.tool_calls -%}"
        "{%- set tool_call = tool_call.function %}{{- '<invoke name=\"' + tool_call.name + '\">\n' }}"
        "{%- for k, v in tool_call.arguments|items %}{{- '<parameter name=\"' + k + '\">' }}"
        "{{- v | tojson | string if v is not string else v }}{{- '</parameter>\n' }}{%- endfor -%}"
        "{{- '</invoke>' ~ '\n' }}{%- endfor -%}{{- '</minimax:tool_call>' }}{%- endfor -%}",
    "seed_oss":
        "{%- for message in messages -%}{{- message.content }}{%- for tool_call in message.tool_calls -%}"
        "{%- set tool_call = tool_call.function %}{{- '\n<seed:tool_call>\n<function=' + tool_call.name + '>\n' }}"
        "{%- for arg_name, arg_value in tool_call.arguments | items %}{{- '<parameter=' + arg_name + '>' }}"
        "{%- set arg_value = arg_value if arg_value is string else arg_value | string %}"
        "{{- arg_value + '</parameter>\n' }}{%- endfor %}{{- '</function>\n</seed:tool_call>' }}{%- endfor %}"
        "{%- endfor -%}",
    "gemma4":
        "{%- for message in messages -%}{{- message.content }}{%- for tool_call in message['tool_calls'] -%}"
        "{%- set function = tool_call['function'] -%}{{- '<|tool_call>call:' + function['name'] + '{' -}}"
        "{%- for key, value in function['arguments'] | dictsort -%}{{- ',' if not loop.first -}}{{- key -}}:"
        "{{- '<|\"|>' + value + '<|\"|>' if value is string else value -}}{%- endfor -%}{{- '}<tool_call|>' -}}"
        "{%- endfor -%}{%- endfor -%}",
    "hermes":
        "{%- for message in messages -%}{{- message.content }}{%- for tool_call in message.tool_calls %}"
        "{%- set tool_call = tool_call.function %}{{- '\n<tool_call>\n{\"name\": \"' }}{{- tool_call.name }}"
        "{{- '\", \"arguments\": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
        "{%- endfor -%}",
}
