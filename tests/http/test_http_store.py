"""The store of responses, files and batches, in both of its databases."""

from __future__ import annotations

import asyncio
import os
import stat
import time

import pytest

from allspark_server.http.errors import ApiError
from allspark_server.http.store import Store, Stored, open_database


@pytest.fixture(params=["sqlite", "sqlalchemy"])
def store(request, tmp_path):
    path = tmp_path / "kept.db"
    if request.param == "sqlalchemy":
        pytest.importorskip("sqlalchemy")
    store = Store(open_database(str(path) if request.param == "sqlite" else f"sqlite:///{path}"), 100.0, 10_000)
    yield store
    store.close()


def of(name: str, **more) -> Stored:
    return Stored(name, "response", "t", {"id": name}, **more)


def test_objects(store):
    async def run():
        await store.put(of("a", created=1.0), of("b", created=2.0, state="queued"), of("c", created=2.0))
        found = await store.get("response", "a", "t")
        assert found.data == {"id": "a"} and found.state == "completed" and found.chunk_bytes == 0
        for kind, name, tenant in (("file", "a", "t"), ("response", "x", "t"), ("response", "a", "other")):
            assert await store.get(kind, name, tenant) is None and not await store.delete(kind, name, tenant)
        names = [each.id for each in await store.page("response", "t", "", 2)]
        assert names == ["c", "b"] and [e.id for e in await store.page("response", "t", "b", 5)] == ["a"]
        assert [e.id for e in await store.page("response", "t", "a", 5, ascending=True)] == ["b", "c"]
        with pytest.raises(ApiError, match="there is no 'x'"):
            await store.page("response", "t", "x", 2)
        found = await store.get("response", "b", "t")
        found.data["x"], found.state = "ü", "completed"
        assert await store.change(found) and not await store.change(found)      # final
        assert (await store.get("response", "b", "t")).data == {"id": "b", "x": "ü"}
        assert await store.delete("response", "b", "t") and not await store.delete("response", "b", "t")

    asyncio.run(run())


def test_chunks(store):
    async def run():
        await store.put(of("a"), of("b"))
        for number, data in enumerate((b"one", b"\0\xff", b"three")):
            await store.append("a", number, data)
        assert await store.chunks("a", 1) == [b"\0\xff", b"three"] and await store.chunks("a", 0, 1) == [b"one"]
        assert await store.chunks("b", 0) == []
        await store.delete("response", "a", "t")
        assert await store.chunks("a", 0) == []

    asyncio.run(run())


def test_work_is_claimed_once(store):
    async def run():
        await store.put(of("a", state="queued", touched=5.0), of("b", state="queued", touched=50.0))
        claimed = await store.claim("response", ("queued",), 10.0)
        assert claimed.id == "a" and await store.claim("response", ("queued",), 10.0) is None
        assert await store.touch(["a", "x"]) == {"x"}
        assert await store.change_state("a", "cancelling", ("queued",))
        assert not await store.change_state("a", "cancelling", ("queued",))
        assert await store.touch(["a", "b"]) == {"a"} and await store.touch([]) == set()

    asyncio.run(run())


def test_the_oldest_are_deleted(store):
    async def run():
        now = time.time()
        await store.put(of("old", created=now - 200), of("live", created=now - 200, state="in_progress"),
                        of("large", created=now - 50, chunk_bytes=9990), of("new", created=now))
        await store.append("large", 0, b"x")
        assert await store.purge() == 2 and await store.purge() == 0
        assert [each.id for each in await store.page("response", "t", "", 9)] == ["new", "live"]
        assert await store.chunks("large", 0) == []

    asyncio.run(run())


def test_the_file_is_private_and_errors_name_it(tmp_path):
    database = open_database(str(tmp_path / "a.db"))
    assert stat.S_IMODE(os.stat(tmp_path / "a.db").st_mode) == 0o600
    database.close()
    (tmp_path / "text").write_text("no database, " * 100)
    with pytest.raises(ValueError, match="text' is not a database"):
        open_database(str(tmp_path / "text"))
    with pytest.raises(OSError, match="none"):
        open_database(str(tmp_path / "none" / "a.db"))
    pytest.importorskip("sqlalchemy")
    with pytest.raises(ValueError, match="nothing://h/x") as caught:
        open_database("nothing://user:secret@h/x")
    assert "secret" not in str(caught.value)
