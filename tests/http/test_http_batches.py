"""Files and batches with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest

from allspark_server.http.store import Store, Stored, open_database
from support.fake_service import serving
from support.http_helpers import http_server_for, token_file
from support.script_engine import ScriptEngine
from support.waiting import wait_for

pytest.importorskip("python_multipart")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A client of two workers with one store, the engine, another tenant's client, and the store's file."""
    folder = tmp_path_factory.mktemp("kept")
    with serving(core=ScriptEngine("hermes")) as (engine, group), \
            http_server_for(group, token_file=token_file(folder), store=str(folder / "kept.db"), workers=2,
                            max_file_mib=3) as address:
        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"http://{address}/v1", api_key=f"key-{key}", max_retries=0)

        yield client("generate"), engine, client("admin"), folder / "kept.db"


def line(custom_id: str, text: str, **more) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def upload(client: openai.OpenAI, lines: list[str]) -> str:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def begin(client: openai.OpenAI, name: str, **more):
    return client.batches.create(**{"input_file_id": name, "endpoint": "/v1/chat/completions",
                                    "completion_window": "24h", **more})


def ended(client: openai.OpenAI, name: str):
    wait_for(lambda: client.batches.retrieve(name).status in ("completed", "failed", "cancelled"), 30)
    return client.batches.retrieve(name)


def answers(client: openai.OpenAI, name: str) -> dict[str, dict]:
    entries = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    return {entry["custom_id"]: entry["response"] for entry in entries}


def test_files(kept):
    client, _, other, _ = kept
    content = bytes(range(256)) * 10_000 + b"\r\n--\r\n"     # more than two chunks
    made = client.files.create(file=("a ü.bin", content), purpose="user_data")
    assert made.bytes == len(content) and made.filename == "a ü.bin" and made.purpose == "user_data"
    assert client.files.retrieve(made.id) == made and client.files.content(made.id).content == content
    second = client.files.create(file=("b", b"x"), purpose="batch")
    assert [file.id for file in client.files.list()][:2] == [second.id, made.id]
    assert [file.id for file in client.files.list(purpose="user_data")] == [made.id]
    assert [file.id for file in client.files.list(after=second.id, limit=1)] == [made.id]
    assert list(other.files.list()) == []
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_refused_uploads(kept):
    client = kept[0]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"x"), purpose="nonsense")
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("a", b"x" * (4 << 20)), purpose="batch")
    assert refused.value.status_code == 413
    url, key = f"{client.base_url}files", {"authorization": f"Bearer {client.api_key}"}
    form = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    for headers, body, status in (
        ({}, b"x", 415), ({"content-type": "application/json"}, b"{}", 415),
        (form, b"nonsense", 400), (form, b"--b--\r\n", 400),
        (form, part % (b"purpose", b"", b"batch") + b"--b--", 400),
        (form, part % (b"purpose", b"", b"x" * 2000) + b"--b--", 400),
        (form, part % (b"other", b'; filename="a"', b"x") + b"--b--", 400),
        (form, part % (b"file", b'; filename="a"', b"x") * 2 + b"--b--", 400),
        (form, (part % (b"file", b'; filename="a"', b"x")).replace(b"--b", b"--c"), 400),
    ):
        answer = httpx.post(url, content=body, headers={**key, **headers})
        assert answer.status_code == status, (body[:80], answer.text)
    assert all(file.filename != "a" for file in client.files.list())


def test_a_batch(kept):
    client, _, other, _ = kept
    lines = [line(f"n{i}", f"text {i}") for i in range(70)] + ["", line("wrong", "x", max_tokens=-1)]
    made = begin(client, upload(client, lines), metadata={"a": "b"})
    assert made.status in ("validating", "in_progress") and made.metadata == {"a": "b"}
    done = ended(client, made.id)
    assert done.status == "completed" and done.completed_at and done.errors is None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (71, 70, 1)
    found = answers(client, done.output_file_id)
    assert {name: found[name]["body"]["choices"][0]["message"]["content"] for name in found} == \
        {f"n{i}": f"text {i}" for i in range(70)}
    failed = answers(client, done.error_file_id)["wrong"]
    assert failed["status_code"] == 400 and failed["body"]["error"]["param"] == "max_tokens"
    assert next(batch.id for batch in client.batches.list()) == made.id and not list(other.batches.list())
    with pytest.raises(openai.NotFoundError):
        other.batches.retrieve(made.id)
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(made.id)


def test_wrong_lines(kept):
    client = kept[0]
    lines = ["nonsense", line("a", "x"), line("a", "y"), line("b", "x", stream=True),
             line("c", "x").replace("chat/completions", "embeddings")]
    done = ended(client, begin(client, upload(client, lines)).id)
    assert done.status == "failed" and [error.line for error in done.errors.data] == [1, 3, 4, 5]
    assert "is that of another line" in done.errors.data[1].message and done.output_file_id is None
    assert ended(client, begin(client, upload(client, [""])).id).errors.data[0].code == "empty_file"
    with pytest.raises(openai.BadRequestError, match="no such File"):
        begin(client, "file-none")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        begin(client, "file-none", endpoint="/v1/none")


def test_cancelled(kept):
    client, engine, _, _ = kept
    engine.interval = 0.05
    made = begin(client, upload(client, [line(f"n{i}", "slow " * (50 * i)) for i in range(4)]))
    wait_for(lambda: client.batches.retrieve(made.id).status == "in_progress" and len(engine.live) >= 3, 20)
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    done = ended(client, made.id)
    wait_for(lambda: not engine.live, 10)
    engine.interval = 0.0
    assert done.status == "cancelled" and done.cancelled_at and done.request_counts.total == 4


def test_an_abandoned_batch_is_continued(kept):
    """As if the process that answered it had ended: what it has written is not computed again."""
    client, engine, _, path = kept
    made = begin(client, upload(client, [line(f"n{i}", f"text {i}") for i in range(5)]))
    done = ended(client, made.id)

    async def abandon() -> None:
        store = Store(open_database(str(path)), 1e6, 1 << 30)
        (tenant,), = store._database._connection.execute(
            "SELECT tenant FROM allspark_objects WHERE id = ?", (made.id,)).fetchall()
        stored = await store.get("batch", made.id, tenant)
        await store.delete("batch", made.id, tenant)
        output = await store.get("file", done.output_file_id, tenant)
        lines = b"".join(await store.chunks(output.id, 0)).splitlines(keepends=True)
        kept = {"output": "file-kept", "error": "file-empty"}
        for name in kept.values():
            data = {"filename": "out", "purpose": "batch_output", "batch": made.id}
            await store.put(Stored(name, "file", tenant, data, "in_progress"))
        await store.append("file-kept", 0, lines[0] + lines[3])
        stored.data["files"] = kept
        await store.put(Stored(made.id, "batch", tenant, stored.data, "in_progress", touched=time.time() - 100))
        store.close()

    before = len(engine.submitted)
    asyncio.run(abandon())
    again = ended(client, made.id)
    assert again.status == "completed" and again.output_file_id == "file-kept"
    assert len(engine.submitted) == before + 3 and again.request_counts.completed == 5
    assert sorted(answers(client, "file-kept")) == [f"n{i}" for i in range(5)]
