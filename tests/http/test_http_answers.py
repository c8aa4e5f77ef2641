"""Tool calls and reasoning in the HTTP server's answers, in each of the three chat APIs. The model says what the test
writes.
"""

from __future__ import annotations

import json

import openai
import pytest

CALLS = ('Let me see.\n'
         '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>\n'
         '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
THOUGHT = "<think>\nShould I?\n</think>\n\nYes."
FUNCTIONS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "time": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": name, "description": "It does.", "parameters": parameters}}
         for name, parameters in FUNCTIONS.items()]
CITY = {"city": "Zürich", "days": [1, 2]}


@pytest.fixture(scope="module")
def server(scripted):
    return scripted["hermes"]


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"http://{server[0]}/v1", api_key="any", max_retries=0) as found:
        yield found


def ask(text: str, **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def test_calls_of_tools(api, server):
    answer = api.chat.completions.create(**ask(CALLS, tools=TOOLS))
    message = answer.choices[0].message
    assert message.content == "Let me see." and answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [CITY, {}]
    assert len({call.id for call in message.tool_calls}) == 2 and all(c.type == "function" for c in message.tool_calls)
    sent = server[1].submitted[-1]
    assert [tool["function"]["name"] for tool in sent.chat.tools] == ["weather", "time"]
    # Without tools, or with tool_choice "none", it is text.
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain = api.chat.completions.create(**ask(CALLS, **more)).choices[0]
        assert plain.message.content == CALLS and not plain.message.tool_calls and plain.finish_reason == "stop"


def test_calls_as_they_come(api):
    with api.chat.completions.stream(**ask(CALLS, tools=TOOLS)) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls] == [CITY, {}]
    assert final.message.content == "Let me see." and final.finish_reason == "tool_calls"
    pieces = [call.function.arguments for chunk in chunks for choice in chunk.choices
              for call in choice.delta.tool_calls or () if call.index == 0]
    assert len(pieces) > 5, "arguments do not come as they are written"


def test_reasoning(api):
    for more in ({}, {"chat_template_kwargs": {"opened": "<think>\n"}}):
        body = ask(THOUGHT)
        answer = api.chat.completions.create(**body, extra_body=more)
        message = answer.choices[0].message
        assert message.content == "Yes." and message.reasoning_content == "Should I?"
        details = answer.usage.completion_tokens_details
        opened = len(more["chat_template_kwargs"]["opened"]) if more else 0
        assert details.reasoning_tokens == THOUGHT.index("</think>") + len("</think>") - opened
        assert answer.usage.completion_tokens == len(THOUGHT) + 1 - opened
        deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(stream=True, extra_body=more, **body)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Should I?"
        assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_a_conversation_goes_on(api, server):
    """An answer can be sent back unchanged, with the results of its calls."""
    body = ask(CALLS, tools=TOOLS)
    message = api.chat.completions.create(**body).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls]
    body["messages"] += [message.model_dump(), *results, {"role": "user", "content": "Good."}]
    assert api.chat.completions.create(**body).choices[0].message.content == "Good."
    prompt = bytes(i for i in server[1].submitted[-1].input_ids if i < 256).decode()
    assert "'tool_call_id'" in prompt and "'city': 'Zürich'" in prompt


def test_responses(api):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    text = "<think>Hm.</think>" + CALLS
    found = api.responses.create(model="m", input=text, tools=tools)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output[0].content[0].text == "Hm." and found.output_text == "Let me see."
    assert [json.loads(item.arguments) for item in found.output[2:]] == [CITY, {}]
    assert found.usage.output_tokens_details.reasoning_tokens == len("<think>Hm.</think>")
    events = list(api.responses.create(model="m", input=text, tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    written = {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    for event in events:
        if event.type.endswith(".delta"):
            written[event.type.split(".")[1]] += event.delta
    assert written["reasoning_text"] == "Hm." and written["output_text"] == "Let me see."
    assert written["function_call_arguments"] == "".join(item.arguments for item in found.output[2:])
    last = events[-1].response.output
    assert [(i.type, getattr(i, "arguments", None)) for i in last] == \
        [(i.type, getattr(i, "arguments", None)) for i in found.output]
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "fine"} for item in found.output[2:]]
    again = api.responses.create(model="m", tools=tools, input=[
        {"role": "user", "content": text}, *[item.model_dump() for item in found.output], *outputs,
        {"role": "user", "content": "Good."}])
    assert again.output_text == "Good."


def test_messages(server):
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]
    with anthropic.Anthropic(base_url=f"http://{server[0]}", api_key="any", max_retries=0) as api:
        body = {**ask("<think>Hm.</think>" + CALLS, tools=tools), "max_tokens": 500}
        found = api.messages.create(**body)
        assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in found.content[2:]] == [CITY, {}] and found.stop_reason == "tool_use"
        with api.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == [block.type for block in found.content]
        assert [block.input for block in streamed.content[2:]] == [CITY, {}]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "fine"}]}
                   for block in found.content[2:]]
        body["messages"] = [*body["messages"], {"role": "assistant", "content": [b.to_dict() for b in found.content]},
                            {"role": "user", "content": [*results, {"type": "text", "text": "Good."}]}]
        assert api.messages.create(**body).content[0].text == "Good."


HARMONY = ("<|channel|>analysis<|message|>Should I?<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
           '<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>'
           '{"city": "Zürich", "days": [1, 2]}<|call|>')


def test_harmony(scripted):
    """gpt-oss' channels in chats, responses and messages, whole and streamed."""
    address = scripted["harmony"][0]
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as api:
        answer = api.chat.completions.create(**ask(HARMONY, tools=TOOLS))
        message = answer.choices[0].message
        assert message.content == "Let me see." and message.reasoning_content == "Should I?"
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [("weather", CITY)]
        assert answer.choices[0].finish_reason == "tool_calls"
        details = answer.usage.completion_tokens_details
        assert details.reasoning_tokens == HARMONY.index("<|end|>") + len("<|end|>")
        deltas = [c.choices[0].delta for c in api.chat.completions.create(stream=True, **ask(HARMONY, tools=TOOLS))]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Should I?"
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        pieces = [c.function.arguments for delta in deltas for c in delta.tool_calls or ()]
        assert len(pieces) > 1 and json.loads("".join(pieces)) == CITY
        text = HARMONY[:HARMONY.index("commentary")] + "final<|message|>Yes."
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
            plain = api.chat.completions.create(**ask(text, **more)).choices[0]
            assert plain.message.content == "Yes." and plain.finish_reason == "stop" and not plain.message.tool_calls
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        found = api.responses.create(model="m", input=HARMONY, tools=tools)
        assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
        assert json.loads(found.output[2].arguments) == CITY
        anthropic = pytest.importorskip("anthropic")
        with anthropic.Anthropic(base_url=f"http://{address}", api_key="any", max_retries=0) as other:
            tools = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]
            found = other.messages.create(**ask(HARMONY, tools=tools), max_tokens=500)
            assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]


def test_an_answer_cut_short_in_a_call(api):
    cut = len(CALLS) - 60
    choice = api.chat.completions.create(**ask(CALLS, tools=TOOLS, max_tokens=cut)).choices[0]
    assert choice.finish_reason == "length"
    assert api.chat.completions.create(**ask("Only text.", tools=TOOLS)).choices[0].finish_reason == "stop"
