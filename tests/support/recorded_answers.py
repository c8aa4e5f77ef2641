"""Answers in the form that the families' model cards and templates publish: format, text, and the content, reasoning
and calls in it.
"""
from __future__ import annotations

PARIS, BERLIN = '{"city": "Paris"}', '{"city": "Berlin", "days": 2}'
RECORDED = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", "",
     [("get_weather", PARIS)]),
    ("hermes", 'I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
     '<tool_call>\n{"arguments": {"city": "Berlin", "days": 2}, "name": "get_weather"}\n</tool_call>',
     "I will look.", "",
     [("get_weather", PARIS), ("get_weather", BERLIN)]),
    ("hermes", '<think>\nThe user asks.\nSo I call.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n'
     "</tool_call>", "", "The user asks.\nSo I call.", [("now", "{}")]),
    ("hermes", "<think>\n\n</think>\n\nIt is 12 o'clock.\n", "It is 12 o'clock.\n", "", []),
    ("hermes", "a < b and <tool_calls> are no calls  ", "a < b and <tool_calls> are no calls  ", "", []),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": "{\\"zone\\": \\"UTC\\"}"}\n</tool_call>', "", "",
     [("now", '{"zone": "UTC"}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', " Done.", "", [("now", "{}")]),
    ("hermes", 'So <tool_call>\n{"name": 5}</tool_call>', 'So <tool_call>\n{"name": 5}</tool_call>', "", []),
    ("hermes", "<tool_call>\nnow()\n</tool_call>", "<tool_call>\nnow()\n</tool_call>", "", []),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}\\"]\\u00e9<\\/tool_call>", '
     '"x": [{}, {"y": [1]}]}}\n</tool_call>', "", "",
     [("get_weather", '{"city": "a}\\"]\\u00e9<\\/tool_call>", "x": [{}, {"y": [1]}]}')]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par', "", "",
     [("get_weather", '{"city": "Par')]),
    ("hermes", '<tool_call>\n{"name": "get_we', '<tool_call>\n{"name": "get_we', "", []),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [("get_weather", PARIS)]),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": '
     '{"zone": "UTC"}}', "", "", [("get_weather", PARIS), ("now", '{"zone": "UTC"}')]),
    ("llama3", '{"type": "function", "name": "now", "parameters": {"zone": "UTC"}}\n', "", "",
     [("now", '{"zone": "UTC"}')]),
    ("llama3", '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', "", []),
    ("llama3", ' {"answer": 42} is it.', ' {"answer": 42} is it.', "", []),
    ("llama3", 'Sure: {"name": "now", "parameters": {}}', 'Sure: {"name": "now", "parameters": {}}', "", []),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', 'brave_search.call(query="x")', "", []),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", "",
     [("get_weather", PARIS)]),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
     '{"name": "now", "arguments": {"zone": "UTC"}}]', "", "", [("get_weather", PARIS), ("now", '{"zone": "UTC"}')]),
    ("mistral", 'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{"zone": "UTC"}',
     "Let me see.", "", [("get_weather", PARIS), ("now", '{"zone": "UTC"}')]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", "", [("get_weather", PARIS)]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", "", [("get_weather", PARIS)]),
    ("mistral", "[THINK]Hm, hm.[/THINK]The answer [TOOL] is 5.", "The answer [TOOL] is 5.", "Hm, hm.", []),
    ("glm45", "<think>I should look.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
     "<arg_value>Paris</arg_value>\n</tool_call>", "", "I should look.", [("get_weather", PARIS)]),
    ("glm45", "\n<think></think>\nOK\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", "OK", "",
     [("get_weather", BERLIN), ("now", "{}")]),
    ("glm45", '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12 "a"\nb</arg_value>\n'
     '<arg_key>more</arg_key>\n<arg_value>{"x":[1,"y"]}</arg_value>\n<arg_key>word</arg_key>\n'
     '<arg_value>a word</arg_value>\n</tool_call>', "", "",
     [("get_weather", '{"city": "12 \\"a\\"\\nb", "more": {"x": [1, "y"]}, "word": "a word"}')]),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par", "", "",
     [("get_weather", '{"city": "Par')]),
    ("glm47", "<think>I should look.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Berlin</arg_value>"
     "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>", "", "I should look.",
     [("get_weather", BERLIN), ("now", "{}")]),
    ("glm47", "I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par", "I look.", "",
     [("get_weather", '{"city": "Par')]),
    ("qwen3_coder", "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n"
     "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
     "</tool_call>", "Let me see.", "", [("get_weather", BERLIN), ("now", "{}")]),
    ("qwen3_coder", '<tool_call>\n<function=get_weather>\n<parameter=city>\n\n"a" <b>\n\n</parameter>\n<parameter=x>\n'
     '[{"y": 1}]\n</parameter>\n</function>\n</tool_call>', "", "",
     [("get_weather", '{"city": "\\n\\"a\\" <b>\\n", "x": [{"y": 1}]}')]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", "", "",
     [("get_weather", '{"city": "Par')]),
    ("qwen3_coder", "<tool_call>\n<function=get_we", "<tool_call>\n<function=get_we", "", []),
    ("qwen3_coder", "<tool_call>\nnow()\n</tool_call>", "<tool_call>\nnow()\n</tool_call>", "", []),
    ("qwen3_coder", "<think>\nThe user asks.\n</think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
     "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n", "",
     "The user asks.", [("get_weather", PARIS), ("now", "{}")]),   # Nemotron 3
    ("seed_oss", "<seed:think>The user asks.</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n"
     "<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>", "I look.", "The user asks.",
     [("get_weather", PARIS)]),
    ("minimax_m2", '<think>\nBoth.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
     '<parameter name="city">Berlin</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
     '<invoke name="now">\n<parameter name="zone">UTC</parameter>\n</invoke>\n</minimax:tool_call>', "", "Both.",
     [("get_weather", BERLIN), ("now", '{"zone": "UTC"}')]),
    ("minimax_m2", "<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call> Done.", " Done.", "",
     [("now", "{}")]),
    ("harmony", "<|channel|>analysis<|message|>The user asks. 1 < 2.<|end|><|start|>assistant<|channel|>final"
     "<|message|>It is **5**.\n<|return|>", "It is **5**.\n", "The user asks. 1 < 2.", []),
    ("harmony", "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', "", "I should look.",
     [("get_weather", PARIS)]),
    ("harmony", " to=functions.get_weather<|channel|>commentary json<|message|>" + PARIS, "", "",
     [("get_weather", PARIS)]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis to=functions.now code"
     "<|message|>{}<|call|>", "", "Hm.", [("now", "{}")]),
    ("harmony", "<|channel|>commentary<|message|>I will look.\n<|end|><|start|>assistant to=functions.get_weather"
     "<|channel|>commentary <|constrain|>json<|message|>" + PARIS + "<|call|><|start|>assistant<|channel|>commentary "
     "to=functions.get_weather json<|message|>" + BERLIN + "<|call|>", "I will look.", "",
     [("get_weather", PARIS), ("get_weather", BERLIN)]),
    ("harmony", "<|start|>assistant<|channel|>analysis<|message|>a<|end|>\n<|start|>assistant<|channel|>analysis"
     "<|message|>b<|start|>assistant<|channel|>final<|message|>c<|channel|>final<|message|>d", "c\nd", "a\nb", []),
    ("harmony", "<|channel|>final<|message|>It is 12", "It is 12", "", []),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin", "", "Hm.", []),
    ("harmony", "Just text, < of no message.", "Just text, < of no message.", "", []),
    *((name, *(part.replace("DSML:", "｜DSML｜").replace("function_calls", block) for part in (text, content)), *rest)
      for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
      for text, content, *rest in (
          ('<think>Both.</think>I look.\n\n<DSML:function_calls>\n<DSML:invoke name="get_weather">\n<DSML:parameter '
           'name="city" string="true">Berlin</DSML:parameter>\n<DSML:parameter name="days" string="false">2'
           '</DSML:parameter>\n</DSML:invoke>\n<DSML:invoke name="now">\n\n</DSML:invoke>\n</DSML:function_calls>',
           "I look.", "Both.", [("get_weather", BERLIN), ("now", "{}")]),
          ('<DSML:function_calls>\n<DSML:invoke name="now">\n<DSML:parameter name="zone" string="true">["x" <b>]\n'
           '</DSML:parameter>\n<DSML:parameter name="more" string="false">{"a":[1,null]}</DSML:parameter>\n'
           '<DSML:parameter name="word" string="false">word</DSML:parameter>\n</DSML:invoke>\n</DSML:function_calls>',
           "", "", [("now", '{"zone": "[\\"x\\" <b>]\\n", "more": {"a": [1, null]}, "word": "word"}')]),
          ('<DSML:function_calls>\n<DSML:invoke name="get_weather">\n<DSML:parameter name="city">12</DSML:parameter>\n'
           '<DSML:parameter name="days">2</DSML:parameter>\n</DSML:invoke>\n</DSML:function_calls> Done.', " Done.", "",
           [("get_weather", '{"city": "12", "days": 2}')]),
          ('<DSML:function_calls>\n<DSML:invoke name="now">\n<DSML:parameter name="zone" string="true">U', "", "",
           [("now", '{"zone": "U')]),
          ('<DSML:function_calls>\n<DSML:invoke name="no', '<DSML:function_calls>\n<DSML:invoke name="no', "", []),
          ("a <DSML:function and DSML:", "a <DSML:function and DSML:", "", []))),
    ("deepseek_v3", "<think>\nA city.\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
     "function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "I look.", "A city.",
     [("get_weather", PARIS), ("now", "{}")]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>Done.", "Done.", "", [("now", "{}")]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now{\"zone\": \"}\"}"
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_wea",
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_wea", "", [("now", '{"zone": "}"}')]),
    ("deepseek_v3", "a <｜tool▁calls and ```json\n{}```", "a <｜tool▁calls and ```json\n{}```", "", []),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜><｜tool▁call▁end｜>",
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "", []),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}",
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}", "", []),
    ("deepseek_v31", "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}"
     "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"zone\": \"UTC\"}<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "Both.", "", [("get_weather", PARIS), ("now", '{"zone": "UTC"}')]),
    ("deepseek_v31", "</think>It is late.", "</think>It is late.", "", []),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>Done.", "Done.", "",
     [("now", "{}")]),
    ("kimi_k2", "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
     '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1 '
     '<|tool_call_argument_begin|> {"zone": "UTC"} <|tool_call_end|><|tool_calls_section_end|>', "I look.", "Hm.",
     [("get_weather", PARIS), ("now", '{"zone": "UTC"}')]),
    ("kimi_k2", "<think>So I look.\n<|tool_calls_section_begin|><|tool_call_begin|>now:7<|tool_call_argument_begin|>"
     '{"zone": "U', "", "So I look.", [("now", '{"zone": "U')]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:2", "<|tool_call_begin|>functions.now:2",
     "", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
     "<|tool_calls_section_end|>Text after", "Text after", "", [("now", "{}")]),
    ("kimi_k2", "a <|tool_calls_section_begin|> No call. <|tool_calls_section_end|>b", "a No call. b", "", []),
    ("kimi_k2", "a <|tool_calls_section_begin|>\n<|tool_calls_section_end|>b", "a b", "", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now()<|tool_call_begin|>functions.now:0"
     "<|tool_call_argument_begin|>{}<|tool_call_end|>", "<|tool_call_begin|>now()", "", [("now", "{}")]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now()<|tool_call_end|>\n<|tool_call_begin|>"
     "functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>\n<|tool_calls_section_end|>Done.",
     "<|tool_call_begin|>now()<|tool_call_end|>Done.", "", [("now", "{}")]),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": '
     '{"zone": "UTC"}}]', "", "", [("get_weather", PARIS), ("now", '{"zone": "UTC"}')]),
    ("granite", "Here is my thought process: Easy.\nHere is my response: It is 5.", "It is 5.", "Easy.", []),
    ("granite", "<think>Easy.</think><response>It is 5.</response>", "It is 5.", "Easy.", []),
    ("granite", "<|tool_call|>none", "<|tool_call|>none", "", []),
    ("granite", "<|tool_call|>  hi", "<|tool_call|>  hi", "", []),
    ("phi4_mini", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>', "", "",
     [("get_weather", PARIS)]),
    ("phi4_mini", 'functools[{"name": "now", "arguments": {}}] and functools', " and functools", "", [("now", "{}")]),
    ("phi4_mini", "functools[1, 2]", "functools[1, 2]", "", []),
    ("phi4_mini", "functools[ 1, 2 ] x", "functools[ 1, 2 ] x", "", []),
    ("phi4_mini", "a functools[] b", "a functools[] b", "", []),
    ("phi4_mini", "functools[ , {\"x\": 1}] b", "functools[ , {\"x\": 1}] b", "", []),
    ("phi4_mini", '<|tool_call|>[{"name": "now"}] So.<|tool_call|>[{"name": "now"}] Done.', " So. Done.", "",
     [("now", "{}"), ("now", "{}")]),
    ("nemotron_json", "<think>\nThe user asks.\n</think>\n\nI look.\n\n<TOOLCALL>[{\"name\": \"get_weather\", "
     '"arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]</TOOLCALL>\n', "I look.", "The user asks.",
     [("get_weather", PARIS), ("now", "{}")]),
    ("nemotron_json", '<TOOLCALL>[{"name": "now", "arguments": "{\\"zone\\": \\"UTC\\"}"}]', "", "",
     [("now", '{"zone": "UTC"}')]),
    ("nemotron_json", "It is late.<TOOLCALL>[]</TOOLCALL>", "It is late.", "", []),
    ("nemotron_json", "<TOOLCALL>[ 1 ]</TOOLCALL> x", "<TOOLCALL>[ 1 ]</TOOLCALL> x", "", []),
    ("nemotron_json", '<TOOLCALL>[{"name": "now", "arg', "", "", [("now", "")]),
    ("pythonic", "[get_weather(city='Pa\\'r)is', days=2), now()]", "", "",
     [("get_weather", '{"city": "Pa\'r)is", "days": 2}'), ("now", "{}")]),
    ("pythonic", 'get_weather(city="Paris")', 'get_weather(city="Paris")', "", []),
    ("pythonic", "[1] and [2]", "[1] and [2]", "", []),
    ("pythonic", '[now(zone={"a": [True, None]}, x=[-1, (2.5)], y=UTC)]', "", "",
     [("now", '{"zone": {"a": [true, null]}, "x": [-1, 2.5], "y": "UTC"}')]),
    ("pythonic", "[now(zone='UT", "", "", [("now", "")]),
    ("pythonic", '[get_weather(city="x"), unknown(1)] rest', "unknown(1)] rest", "",
     [("get_weather", '{"city": "x"}')]),
    ("pythonic", '[get_weather("Paris", days=1), get_weather("Berlin", 2)]', "", "",
     [("get_weather", '{"city": "Paris", "days": 1}'), ("get_weather", BERLIN)]),
    ("pythonic", '[get_weather("Paris", 1, 2)]', '[get_weather("Paris", 1, 2)]', "", []),
    ("pythonic", '[now(**{"zone": "UTC"})]', '[now(**{"zone": "UTC"})]', "", []),
    ("pythonic", '[now(zone="UTC", **more)]', "**more", "", [("now", '{"zone": "UTC"}')]),
    ("pythonic", "[now(a=NaN, b=1e999, c=\"x\ny\", d='x\ny', e=x])]", "", "",
     [("now", '{"a": "NaN", "b": "1e999", "c": "x\\ny", "d": "x\\ny", "e": "x]"}')]),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>I look.', "I look.", "",
     [("get_weather", PARIS)]),
    ("lfm2", "<|tool_call_start|>[other()]<|tool_call_end|>", "<|tool_call_start|>[other()]<|tool_call_end|>", "", []),
    ("lfm2", "<|tool_call_start|>  hi", "<|tool_call_start|>  hi", "", []),
    ("lfm2", "<|tool_call_start|>[now(), other()]<|tool_call_end|>Done.", "other()]Done.", "", [("now", "{}")]),
    ("lfm2", "<|tool_call_start|>[now()] So.<|tool_call_start|>[now()] Done.", " So. Done.", "",
     [("now", "{}"), ("now", "{}")]),
    ("olmo3", '<function_calls>get_weather(city="Paris")\nget_weather(city="Berlin", days=2)</function_calls>', "", "",
     [("get_weather", PARIS), ("get_weather", BERLIN)]),
    ("olmo3", "<think>Hm.</think>Sure.\n<function_calls>\nget_weather(city='Pa\\'r)is', days=null)\nnow()\n"
     "</function_calls>", "Sure.", "Hm.", [("get_weather", '{"city": "Pa\'r)is", "days": null}'), ("now", "{}")]),
    ("olmo3", '<function_calls>now(a=true, b=[1, {"c": false}], c=None)</function_calls>Done.', "Done.", "",
     [("now", '{"a": true, "b": [1, {"c": false}], "c": null}')]),
    ("olmo3", "<function_calls>other()</function_calls>", "<function_calls>other()</function_calls>", "", []),
    ("olmo3", "<function_calls>now()\nother()</function_calls> x", "other() x", "", [("now", "{}")]),
    ("olmo3", "<function_calls>now(zone='UT", "", "", [("now", "")]),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Ber\"lin<escape>,days:2}<end_function_call>"
     "<start_function_call>call:now{}<end_function_call>", "", "",
     [("get_weather", '{"city": "Ber\\"lin", "days": 2}'), ("now", "{}")]),
    ("functiongemma", "<start_function_call>call:now{a:{b:[<escape>x,}<escape>,true,null],c:{}},d:word,\"e\":\"f\"}"
     "<end_function_call>", "", "",
     [("now", '{"a": {"b": ["x,}", true, null], "c": {}}, "d": "word", "e": "f"}')]),
    ("gemma4", "<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>}"
     "<tool_call|>", "I look.", "Hm.", [("get_weather", PARIS)]),
    ("gemma4", "<|tool_call>get_weather", "<|tool_call>get_weather", "", []),
    ("gemma4", '<|tool_call>call:now{a:NaN,b:1e999,c:"x\ny",d:None,e:Nones}<tool_call|>', "", "",
     [("now", '{"a": "NaN", "b": "1e999", "c": "x\\ny", "d": null, "e": "Nones"}')]),
    ("gemma4", "<|tool_call>x<|tool_call>call:now{} So.<|tool_call>call:now{} Done.", "<|tool_call>x So. Done.", "",
     [("now", "{}"), ("now", "{}")]),
    ("hunyuan", "<think>\nEasy.\n</think>\n<answer>\nIt is 5.\n</answer>", "It is 5.", "Easy.", []),
    ("hunyuan", "<think>\nBoth.\n</think>\n<answer>\nI look.\n<tool_calls><tool_call>get_weather\n```json\n"
     '{"city": "Paris"}\n```</tool_call>\n<tool_call>now\n```json\n{"zone": "}"}\n```</tool_call></tool_calls>\n'
     "</answer>", "I look.", "Both.", [("get_weather", PARIS), ("now", '{"zone": "}"}')]),
    ("hunyuan", "<tool_calls>\n<tool_call>\nnow\n```json\n{}\n```\n</tool_call>\n</tool_calls>\n</answer>", "", "",
     [("now", "{}")]),
    ("hunyuan", '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": '
     "{}}]</tool_calls>", "", "", [("get_weather", PARIS), ("now", "{}")]),
    ("hunyuan", "Marks <answer> and </answer> within a text ", "Marks <answer> and </answer> within a text ", "", []),
    ("hunyuan", "<answer> a <answer> b", "a <answer> b", "", []),
    ("hunyuan", "<answ", "<answ", "", []),
    ("hunyuan", "<tool_calls> [x]</tool_calls>", "<tool_calls> [x]</tool_calls>", "", []),
    ("hunyuan", '<tool_calls><tool_call>now\n```json\n{"zo', "", "", [("now", '{"zo')]),
    ("hunyuan", "<tool_calls><tool_call>now", "<tool_call>now", "", []),
    ("plain", "<think>a</think>b<tool_call>", "b<tool_call>", "a", []),
]
