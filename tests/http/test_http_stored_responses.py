"""Stored responses with OpenAI's own client: fetched, continued, computed in the background, cancelled."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest

from allspark_server.http.store import Store, Stored, open_database
from support.fake_service import serving
from support.http_helpers import http_server_for, token_file
from support.script_engine import ScriptEngine
from support.waiting import wait_for


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A client of two workers with one store, the engine, and another tenant's client."""
    folder = tmp_path_factory.mktemp("kept")
    with serving(core=ScriptEngine("hermes")) as (engine, group), \
            http_server_for(group, token_file=token_file(folder), store=str(folder / "kept.db"),
                            workers=2) as address:
        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"http://{address}/v1", api_key=f"key-{key}", max_retries=0)

        yield client("generate"), engine, client("admin"), folder / "kept.db"


def prompt(engine) -> str:
    return bytes(i for i in engine.submitted[-1].input_ids if i < 256).decode()


def test_fetched_and_deleted(kept):
    client, _, other, _ = kept
    made = client.responses.create(model="m", input="hello", metadata={"a": "b"})
    assert made.store and made.output_text == "hello"
    for _ in range(4):      # of both workers
        assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "hello")]
    for name in (made.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(name)
    with pytest.raises(openai.BadRequestError, match="Only background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    private = client.responses.create(model="m", input="hello", store=False)
    assert private.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(private.id)


def test_streamed_responses_are_kept(kept):
    client = kept[0]
    final = list(client.responses.create(model="m", input="a long answer", stream=True))[-1].response
    assert final.store and client.responses.retrieve(final.id) == final and final.output_text == "a long answer"


def test_continued(kept):
    client, engine, other, _ = kept
    first = client.responses.create(model="m", input="one", instructions="be brief")
    second = client.responses.create(model="m", input=[{"role": "user", "content": "two"}],
                                     previous_response_id=first.id)
    third = client.responses.create(model="m", input="three", previous_response_id=second.id)
    assert third.output_text == "three" and third.previous_response_id == second.id
    before = [("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two")]
    shown = prompt(engine)
    assert str([{"role": role, "content": text} for role, text in before]) in shown and "be brief" not in shown
    items = client.responses.input_items.list(third.id, order="asc", limit=3).data
    assert [(item.role, item.content[0].text) for item in items] == before[:3]
    rest = client.responses.input_items.list(third.id, order="asc", after=items[-1].id).data
    assert [item.content[0].text for item in rest] == ["two", "three"]
    for api, name in ((client, "resp_none"), (other, first.id)):
        with pytest.raises(openai.BadRequestError) as refused:
            api.responses.create(model="m", input="x", previous_response_id=name)
        assert refused.value.code == "previous_response_not_found"


def test_tool_calls_are_continued(kept):
    client, engine, _, _ = kept
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    first = client.responses.create(model="m", input=call, tools=[tool])
    assert first.output[0].type == "function_call"
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "3"}
    client.responses.create(model="m", input=[result], previous_response_id=first.id, tools=[tool])
    assert "'tool_calls'" in prompt(engine) and first.output[0].call_id in prompt(engine)


def test_background(kept):
    client, engine, _, _ = kept
    made = client.responses.create(model="m", input="later", background=True)
    assert made.status == "queued" and made.background and made.output == []
    wait_for(lambda: client.responses.retrieve(made.id).status == "completed", 20)
    done = client.responses.retrieve(made.id)
    assert done.output_text == "later" and done.usage.output_tokens == 6
    again = client.responses.create(model="m", input="x", previous_response_id=made.id)
    assert "later" in prompt(engine) and again.output_text == "x"
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(model="m", input="x", background=True, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="none", input="x", background=True)
    long = client.responses.create(model="m", input="x" * 1500, background=True, max_output_tokens=10**6)
    wait_for(lambda: client.responses.retrieve(long.id).status == "failed", 20)
    assert "maximum context length" in client.responses.retrieve(long.id).error.message


def test_background_events(kept):
    client, engine, _, _ = kept
    engine.interval = 0.02
    text = "this takes a while, " * 3 + "really"
    stream = client.responses.create(model="m", input=text, background=True, stream=True)
    seen = [next(stream) for _ in range(12)]
    stream.close()      # the response goes on without its reader
    name = seen[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    engine.interval = 0.0
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type == "response.completed" and events[-1].response == client.responses.retrieve(name)


def test_cancelled_and_deleted_while_they_run(kept):
    client, engine, _, _ = kept
    engine.interval = 0.05
    for _ in range(3):      # of both workers
        made = client.responses.create(model="m", input="slow " * 100, background=True)
        with pytest.raises(openai.BadRequestError, match="not complete"):
            client.responses.create(model="m", input="x", previous_response_id=made.id)
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
    gone = client.responses.create(model="m", input="slow " * 100, background=True)
    wait_for(lambda: engine.live, 10)
    client.responses.delete(gone.id)
    wait_for(lambda: not engine.live, 10)
    engine.interval = 0.0


def test_abandoned_ones_are_continued(kept):
    """As if the process that computed them had ended a while ago."""
    client, _, _, path = kept
    made = [client.responses.create(model="m", input="again", store=True) for _ in range(3)]
    tenant = None

    async def abandon() -> None:
        nonlocal tenant
        store = Store(open_database(str(path)), 1e6, 1 << 30)
        (tenant,), = store._database._connection.execute(
            "SELECT tenant FROM allspark_objects WHERE id = ?", (made[0].id,)).fetchall()
        for each, stream, state in zip(made, (False, True, False), ("in_progress", "in_progress", "cancelling")):
            stored = await store.get("response", each.id, tenant)
            await store.delete("response", each.id, tenant)
            data = {**stored.data, "request": {"model": "m", "input": "again", "background": True, "stream": stream}}
            data["response"] |= {"background": True, "output": []}
            await store.put(Stored(each.id, "response", tenant, data, state, touched=time.time() - 100))
        store.close()

    asyncio.run(abandon())
    wait_for(lambda: all(client.responses.retrieve(each.id).status not in ("queued", "in_progress", "cancelling")
                         for each in made), 20)
    wait_for(lambda: client.responses.retrieve(made[0].id).status == "completed", 20)
    assert client.responses.retrieve(made[0].id).output_text == "again"
    assert client.responses.retrieve(made[1].id).error.message.startswith("The process")
    assert client.responses.retrieve(made[2].id).status == "cancelled"


def test_without_a_store(scripted):
    address, _ = scripted["hermes"]
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0)
    assert client.responses.create(model="m", input="hello", store=True).store is False
    for more in ({"previous_response_id": "resp_x"}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="--store"):
            client.responses.create(model="m", input="hello", **more)
    with pytest.raises(openai.BadRequestError, match="--store"):
        client.responses.retrieve("resp_x")


def test_wrong_queries(kept):
    client = kept[0]
    made = client.responses.create(model="m", input="hello")
    for path, param in ((f"/responses/{made.id}?stream=true", "stream"),
                        (f"/responses/{made.id}/input_items?limit=0", "limit"),
                        (f"/responses/{made.id}/input_items?after=x", "after"), ("/files?limit=x", "limit")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.get(path, cast_to=object)
        assert refused.value.param == param
    background = client.responses.create(model="m", input="hello", background=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.get(f"/responses/{background.id}?stream=true&starting_after=x", cast_to=object)
    assert json.loads(client.responses.with_raw_response.retrieve(made.id).content)["id"] == made.id
