"""The events of /v1/responses and /v1/messages against the official clients' own types: each event has exactly the
fields of its type, and the events come in the documented order, whatever the model writes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import typing

import anthropic.types
import httpx
import openai.types.responses
import pydantic
import pytest

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THOUGHT = "<think>\nShould I?\n</think>\n\n"
HEAD = "<|start|>assistant<|channel|>"
#: what the model writes: (chat format, text, types of the items)
SCRIPTS = {
    "text": ("hermes", "Yes, naïve 🙂.", ["message"]),
    "nothing": ("hermes", "", ["message"]),
    "thought": ("hermes", THOUGHT + "Yes.", ["reasoning", "message"]),
    "only a thought": ("hermes", THOUGHT, ["reasoning"]),
    "calls": ("hermes", THOUGHT + "See: " + CALL + "\n" + CALL,
              ["reasoning", "message", "function_call", "function_call"]),
    "a call": ("hermes", CALL, ["function_call"]),
    "messages": ("harmony", "<|channel|>analysis<|message|>Hm.<|end|>" + HEAD + "commentary<|message|>See:<|end|>"
                 + HEAD + "analysis<|message|>Well.<|end|>" + HEAD + "final<|message|>Yes.<|return|>",
                 ["reasoning", "message", "reasoning", "message"]),
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
Response, Message = openai.types.responses.Response, anthropic.types.Message


def types_of(union):
    """The types of a union of events, by their names."""
    return {typing.get_args(kind.model_fields["type"].annotation)[0]: kind
            for kind in typing.get_args(typing.get_args(union)[0])}


OPENAI = types_of(openai.types.responses.ResponseStreamEvent)
ANTHROPIC = types_of(anthropic.types.RawMessageStreamEvent)


@pytest.fixture(scope="module")
def clients(scripted):
    with contextlib.ExitStack() as stack:
        yield {kind: stack.enter_context(httpx.Client(base_url=f"http://{address}", timeout=30))
               for kind, (address, _) in scripted.items()}


def strictly(kind, data):
    """Data as a type, if it has all fields of the type and no others."""
    value = kind.model_validate(data)
    no_others(value, "")
    return value


def no_others(value, path):
    if isinstance(value, pydantic.BaseModel):
        more = set(value.model_extra or ()) - {"store", "name"}     # documented; other versions' types have them
        assert not more, f"{path} ({type(value).__name__}) has more: {more}"
        for name in value.model_fields_set:
            no_others(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, (list, dict)):
        for at, inner in enumerate(value.values() if isinstance(value, dict) else value):
            no_others(inner, f"{path}[{at}]")


def events_of(client, path, body):
    """The events of a stream as (name, data)."""
    answer = client.post(path, json={**body, "model": "m", "stream": True})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    assert all(len(lines) == 2 and lines[0].startswith("event: ") and lines[1].startswith("data: ") for lines in blocks)
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == data["type"] for name, data in found)
    return found


def cuts(text):
    """Numbers of tokens after which the answer is cut: none, and some in each part."""
    return [None, *range(1, len(text.encode()), 37)]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_responses(clients, script, logprobs):
    kind, text, types = SCRIPTS[script]
    for cut in [None] if logprobs else cuts(text):
        body = {"model": "m", "input": text or " ", "tools": [{"type": "function", **FUNCTION}]}
        if not text:
            body["input"] = [{"role": "user", "content": ""}]
        body |= {"max_output_tokens": cut} if cut else {}
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1} if logprobs else {}
        found = [strictly(OPENAI[data["type"]], data) for _, data in events_of(clients[kind], "/v1/responses", body)]
        final = check_response_events(found, logprobs)
        whole = strictly(Response, clients[kind].post("/v1/responses", json=body).json())
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert final.output_text == whole.output_text and final.usage.output_tokens == whole.usage.output_tokens
        assert final.status == whole.status == ("incomplete" if cut else "completed")
        if not cut:
            assert [item.type for item in final.output] == types


def check_response_events(events, logprobs):
    """Checks the order of events and that they make the final response; returns that."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}" and not events[0].response.output
    assert {event.response.id for event in (*events[:2], events[-1])} == {final.id}
    rest = iter(events[2:-1])
    for index, item in enumerate(final.output):
        added = next(rest)
        assert (added.type, added.output_index, added.item.id) == ("response.output_item.added", index, item.id)
        assert added.item.status == "in_progress"
        call = item.type == "function_call"
        if call:
            assert added.item.arguments == "" and added.item.call_id == item.call_id and added.item.name == item.name
            stem = "response.function_call_arguments"
        else:
            assert not added.item.content
            part = next(rest)
            assert part.type == "response.content_part.added" and part.part.text == ""
            stem = "response.reasoning_text" if item.type == "reasoning" else "response.output_text"
        pieces, tokens = [], []
        while (event := next(rest)).type == stem + ".delta":
            assert (event.item_id, event.output_index, getattr(event, "content_index", 0)) == (item.id, index, 0)
            pieces.append(event.delta)
            tokens += getattr(event, "logprobs", [])
        text = item.arguments if call else item.content[0].text
        assert event.type == stem + ".done" and (event.arguments if call else event.text) == "".join(pieces) == text
        if item.type == "message":
            assert [t.token for t in tokens] == [t.token for t in event.logprobs] == \
                [t.token for t in item.content[0].logprobs]
            assert b"".join(bytes(t.bytes) for t in item.content[0].logprobs) == (text.encode() if logprobs else b"")
        if not call:
            done = next(rest)
            assert done.type == "response.content_part.done" and done.part.to_dict() == item.content[0].to_dict()
        last = next(rest)
        assert last.type == "response.output_item.done" and last.item == item and last.output_index == index
        complete = index < len(final.output) - 1 or final.status == "completed"
        assert item.status == ("completed" if complete else "incomplete")
    assert next(rest, None) is None
    return final


@pytest.mark.parametrize("script", SCRIPTS)
def test_messages(clients, script):
    kind, text, types = SCRIPTS[script]
    types = [{"reasoning": "thinking", "message": "text", "function_call": "tool_use"}[name] for name in types]
    for cut in cuts(text):
        body = {"model": "m", "max_tokens": cut or 1000, "messages": [{"role": "user", "content": text}],
                "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
        found = [data for name, data in events_of(clients[kind], "/v1/messages", body) if name != "ping"]
        events = [strictly(ANTHROPIC[data["type"]], data) for data in found]
        whole = strictly(Message, clients[kind].post("/v1/messages", json=body).json())
        message = check_message_events(events)
        assert [block.type for block in message] == [block.type for block in whole.content]
        for mine, its in zip(message, whole.content):
            for name in ("text", "thinking"):
                assert getattr(mine, name, None) == getattr(its, name, None)
            if mine.type == "tool_use" and not cut:
                assert mine.input == its.input == {"city": "Zürich"} and mine.name == its.name
        assert events[-2].delta.stop_reason == whole.stop_reason
        assert events[-2].usage.output_tokens == whole.usage.output_tokens
        if not cut:
            assert [block.type for block in message] == (types if text else [])


def check_message_events(events):
    """Checks the order of events; returns the blocks that they make."""
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    start, blocks = events[0], []
    assert start.type == "message_start" and start.message.content == [] and start.message.stop_reason is None
    rest = iter(events[1:-2])
    for event in rest:
        assert event.type == "content_block_start" and event.index == len(blocks)
        block, pieces = event.content_block, []
        kind = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block.type]
        delta = {"tool_use": "input_json_delta"}.get(block.type, f"{block.type}_delta")
        while (event := next(rest)).type == "content_block_delta":
            assert event.index == len(blocks) and event.delta.type == delta
            pieces.append(getattr(event.delta, kind))
        assert event.type == "content_block_stop" and event.index == len(blocks)
        if block.type != "tool_use":
            assert getattr(block, kind) == ""
            setattr(block, kind, "".join(pieces))
        elif pieces:
            assert block.input == {}
            try:
                block.input = json.loads("".join(pieces))
            except ValueError:      # it was cut
                assert events[-2].delta.stop_reason == "max_tokens"
        blocks.append(block)
    return blocks


def test_all_reasoning_counts(clients):
    """Each message of reasoning, not only the first."""
    kind, text, _ = SCRIPTS["messages"]
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    usage = clients[kind].post("/v1/chat/completions", json=body).json()["usage"]
    first = text.index("<|end|>") + len("<|end|>")
    second = len(HEAD + "analysis<|message|>Well.<|end|>")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == first + second


def test_closed_connections_are_freed_without_the_collector():
    """As uvicorn's are: one that lived until the next collection would keep its headers."""
    program = """
import asyncio, gc, sys
from uvicorn import Config
from uvicorn.server import ServerState
from allspark_server.http.protocol import Connection

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    assert scope["extensions"]["allspark.chunk"](b"b")
    await send({"type": "http.response.body", "body": b""})
    assert not scope["extensions"]["allspark.chunk"](b"late")

async def main():
    config = Config(app, http=Connection, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
    for _ in range(20):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n")
        answer = await reader.read()
        assert answer.endswith(b"1\\r\\na\\r\\n1\\r\\nb\\r\\n0\\r\\n\\r\\n"), answer
        writer.close()
        await writer.wait_closed()
    await asyncio.sleep(0.05)
    return sum(isinstance(each, Connection) for each in gc.get_objects())

gc.disable()
sys.exit(asyncio.run(main()) > 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
