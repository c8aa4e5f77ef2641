"""Objects that clients can fetch again. Each has an id, an owner, a state and JSON; files and events have chunks."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ApiError
from .database import Database, Execute

logger = logging.getLogger(__name__)

T = TypeVar("T")
_COLUMNS = "id, kind, tenant, created, touched, state, size, data"
#: states of objects that somebody works at; others are final
LIVE = ("queued", "in_progress", "validating", "finalizing", "cancelling")
#: rows that are deleted in one transaction: others wait meanwhile
_PURGED_AT_ONCE = 200


@dataclass
class Stored:
    """An object. `state` changes while somebody works at it, who `touched` it last at a time in seconds since 1970."""

    id: str
    kind: str
    tenant: str
    data: dict[str, Any]
    state: str = "completed"
    created: float = field(default_factory=time.time)
    touched: float = field(default_factory=time.time)
    #: bytes that it takes beside `data`
    chunk_bytes: int = 0


class Store:
    """Objects in a database. Methods run on the event loop; a thread of its own talks to the database.

    They raise ApiError (503) if the database cannot be used now.
    """

    def __init__(self, database: Database, seconds: float, most_bytes: int):
        """Final objects are deleted after `seconds`, and the oldest ones while all take more than `most_bytes`."""
        self._database, self.seconds, self._most = database, seconds, most_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="allspark-store")
        self._lock = threading.Lock()       # also of `close`

    async def _run(self, work: Callable[[Execute], T]) -> T:
        def run() -> T:
            with self._lock, self._database.transaction() as execute:
                return work(execute)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except self._database.errors as error:
            logger.error("the store cannot be used: %s", error)
            raise ApiError(503, "The store of this server cannot be used now", code="unavailable",
                           retry_after=1) from error

    def close(self) -> None:
        """Wait for what was begun, and close the database."""
        self._thread.shutdown()
        with self._lock:
            self._database.close()

    # --- objects ---

    async def put(self, *objects: Stored) -> None:
        """Keep new objects."""
        rows = [_row(each) for each in objects]

        def work(execute: Execute) -> None:
            for row in rows:
                execute(f"INSERT INTO allspark_objects ({_COLUMNS}) VALUES "
                        "(:id, :kind, :tenant, :created, :touched, :state, :size, :data)", **row)

        await self._run(work)

    async def get(self, kind: str, name: str, tenant: str) -> Stored | None:
        """An object of a tenant."""
        found, _ = await self._run(lambda execute: execute(
            f"SELECT {_COLUMNS} FROM allspark_objects WHERE id = :id AND kind = :kind AND tenant = :tenant",
            id=name, kind=kind, tenant=tenant))
        return _stored(found[0]) if found else None

    async def change(self, stored: Stored, among: Sequence[str] = LIVE) -> bool:
        """Write an object's data, state and size, unless it is deleted or its state is not `among` these any more."""
        row = _row(stored)
        states, named = _any_of("state", among)
        _, changed = await self._run(lambda execute: execute(
            "UPDATE allspark_objects SET data = :data, state = :new, size = :size, touched = :now WHERE id = :id "
            f"AND {states}", id=row["id"], data=row["data"], new=row["state"], size=row["size"], now=time.time(),
            **named))
        return changed > 0

    async def change_state(self, name: str, state: str, among: Sequence[str]) -> bool:
        """Change only the state."""
        states, named = _any_of("state", among)
        _, changed = await self._run(lambda execute: execute(
            f"UPDATE allspark_objects SET state = :new WHERE id = :id AND {states}", id=name, new=state, **named))
        return changed > 0

    async def delete(self, kind: str, name: str, tenant: str) -> bool:
        """Delete an object of a tenant, with its chunks."""
        def work(execute: Execute) -> bool:
            _, gone = execute("DELETE FROM allspark_objects WHERE id = :id AND kind = :kind AND tenant = :tenant",
                              id=name, kind=kind, tenant=tenant)
            if gone:
                execute("DELETE FROM allspark_chunks WHERE id = :id", id=name)
            return gone > 0

        return await self._run(work)

    async def page(self, kind: str, tenant: str, after: str, limit: int, ascending: bool = False) -> list[Stored]:
        """At most `limit` objects of a tenant by age, behind the one with the id `after`; "": from the first."""
        sign, order = (">", "ASC") if ascending else ("<", "DESC")

        def work(execute: Execute) -> list[tuple[Any, ...]]:
            where, values = "", {}
            if after:
                at, _ = execute("SELECT created FROM allspark_objects WHERE id = :id AND kind = :kind AND "
                                "tenant = :tenant", id=after, kind=kind, tenant=tenant)
                if not at:
                    raise ApiError(400, f"Invalid value for 'after': there is no {after!r}", "after", "invalid_value")
                where = f" AND (created {sign} :at OR (created = :at AND id {sign} :after))"
                values = {"at": at[0][0], "after": after}
            return execute(f"SELECT {_COLUMNS} FROM allspark_objects WHERE kind = :kind AND tenant = :tenant{where} "
                           f"ORDER BY created {order}, id {order} LIMIT {limit}", kind=kind, tenant=tenant,
                           **values)[0]

        return [_stored(row) for row in await self._run(work)]

    # --- work ---

    async def claim(self, kind: str, states: Sequence[str], before: float) -> Stored | None:
        """The oldest object in one of these states that nobody has touched since `before`; it is touched now."""
        among, named = _any_of("state", states)

        def work(execute: Execute) -> tuple[Any, ...] | None:
            rows, _ = execute(f"SELECT {_COLUMNS} FROM allspark_objects WHERE kind = :kind AND {among} AND "
                              "touched < :before ORDER BY created LIMIT 1", kind=kind, before=before, **named)
            if not rows:
                return None
            _, mine = execute("UPDATE allspark_objects SET touched = :now WHERE id = :id AND touched = :was",
                              id=rows[0][0], now=time.time(), was=rows[0][4])
            return rows[0] if mine else None

        row = await self._run(work)
        return _stored(row) if row else None

    async def touch(self, names: Iterable[str]) -> set[str]:
        """Tells that somebody works at these objects. Returns those that should be worked at no longer: they are
        deleted, or are to be cancelled.
        """
        wanted = list(names)
        among, named = _any_of("id", wanted)

        def work(execute: Execute) -> list[tuple[Any, ...]]:
            execute(f"UPDATE allspark_objects SET touched = :now WHERE {among}", now=time.time(), **named)
            return execute(f"SELECT id FROM allspark_objects WHERE {among} AND state <> 'cancelling'", **named)[0]

        return set(wanted) - {row[0] for row in await self._run(work)}

    # --- chunks ---

    async def append(self, name: str, number: int, data: bytes) -> None:
        """Add the chunk with the next number."""
        await self._run(lambda execute: execute(
            "INSERT INTO allspark_chunks (id, number, data) VALUES (:id, :number, :data)",
            id=name, number=number, data=data))

    async def chunks(self, name: str, first: int, limit: int = 16) -> list[bytes]:
        """At most `limit` chunks from the one with the number `first` on."""
        rows, _ = await self._run(lambda execute: execute(
            "SELECT data FROM allspark_chunks WHERE id = :id AND number >= :first ORDER BY number "
            f"LIMIT {limit}", id=name, first=first))
        return [bytes(row[0]) for row in rows]

    # --- age and size ---

    async def purge(self) -> int:
        """Delete final objects that are too old, or too many. Returns how many."""
        live, named = _any_of("state", LIVE)

        def work(execute: Execute) -> int:
            total = execute("SELECT COALESCE(SUM(size), 0) FROM allspark_objects")[0][0][0]
            rows, _ = execute(f"SELECT id, created, size FROM allspark_objects WHERE NOT ({live}) ORDER BY created "
                              f"LIMIT {_PURGED_AT_ONCE}", **named)
            old, gone = time.time() - self.seconds, 0
            for name, created, size in rows:
                if created > old and total <= self._most:
                    break
                for table in ("objects", "chunks"):
                    execute(f"DELETE FROM allspark_{table} WHERE id = :id", id=name)
                total, gone = total - size, gone + 1
            return gone

        return await self._run(work)


def _any_of(column: str, values: Sequence[str]) -> tuple[str, dict[str, str]]:
    """A condition of SQL, and its parameters."""
    named = {f"{column}_{i}": value for i, value in enumerate(values)}
    return (f"{column} IN ({', '.join(f':{name}' for name in named)})" if named else "1 = 0"), named


def _row(stored: Stored) -> dict[str, Any]:
    data = json.dumps(stored.data)
    return {**{name: getattr(stored, name) for name in ("id", "kind", "tenant", "created", "touched", "state")},
            "data": data, "size": len(data) + stored.chunk_bytes}


def _stored(row: tuple[Any, ...]) -> Stored:
    name, kind, tenant, created, touched, state, size, data = row
    return Stored(name, kind, tenant, json.loads(data), state, created, touched, size - len(data))
