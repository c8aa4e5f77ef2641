"""Responses in the store: what came before a response, its events while they come, and the endpoints for both."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

from pydantic import TypeAdapter

from .call import Call, new_id
from .errors import ApiError, bad_value
from .paging import page_limit, page_of
from .responses_wire import CallItem, CallOutputItem, Item, MessageItem, ResponsesRequest
from .store import Store, Stored
from .store.store import LIVE

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
#: items of all responses that one continues
_MOST_ITEMS = 4096
#: pauses between writing events to the store, and between reading them there, s
_WRITE_SECONDS = _READ_SECONDS = 0.1
#: how long `cancel` waits for the process that computes, s
_CANCEL_SECONDS = 3.0
_SEQUENCE = re.compile(rb'"sequence_number": ?(\d+)')


def shown(stored: Stored) -> dict[str, Any]:
    """A response as clients see it."""
    state = "cancelled" if stored.state == "cancelling" else stored.state
    return {**stored.data["response"], "status": state}


async def _get(call: Call) -> Stored:
    stored = await call.jobs.store.get("response", call.path_rest, call.client.tenant)
    if stored is None:
        raise ApiError(404, f"Response with id '{call.path_rest}' not found.")
    return stored


# --- items -------------------------------------------------------------------------------------------------------


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input of a request as items with ids."""
    if isinstance(request.input, str):
        return [_item(MessageItem(role="user", content=request.input))]
    return [_item(item) for item in request.input]


def _item(item: Item) -> dict[str, Any]:
    prefix = ("msg_" if isinstance(item, MessageItem) else "fc_" if isinstance(item, CallItem) else
              "fco_" if isinstance(item, CallOutputItem) else "rs_")
    plain = {"id": new_id(prefix), "status": "completed", **item.model_dump(exclude_none=True)}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        plain["content"] = [{**part, "text": item.content}]
    return plain


async def _chain(call: Call, name: str | None) -> list[dict[str, Any]]:
    """The inputs and outputs of a response and of all that it continues, in order."""
    turns: list[list[dict[str, Any]]] = []
    count = 0
    while name:
        stored = await call.jobs.store.get("response", name, call.client.tenant)
        if stored is None:
            raise ApiError(400, f"Previous response with id '{name}' not found.", "previous_response_id",
                           "previous_response_not_found")
        if stored.state in LIVE:
            raise bad_value("previous_response_id", f"response '{name}' is not complete yet")
        turns.append([*stored.data["input"], *stored.data["response"]["output"]])
        count += len(turns[-1])
        if count > _MOST_ITEMS:
            raise bad_value("previous_response_id", f"more than {_MOST_ITEMS} items came before")
        name = stored.data["previous"]
    return [item for turn in reversed(turns) for item in turn]


async def items_before(call: Call, name: str) -> list[Item]:
    """The items of a response and of all that it continues. Raises ApiError if one of them is not stored."""
    return _ITEMS.validate_python(await _chain(call, name))


# --- events of background responses ------------------------------------------------------------------------------


class EventLog:
    """Takes the answer to a call, and keeps its events as chunks of a response, several in one."""

    def __init__(self, store: Store, name: str):
        """`name`: of the response; "": the answer is dropped."""
        self._store, self._name = store, name
        self._waiting: list[bytes] = []
        self._number = 0
        self._closed = asyncio.Event()
        self._writer = asyncio.ensure_future(self._run()) if name else None

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI's send."""
        if self._name and (body := message.get("body")):
            self._waiting.append(body)

    async def _run(self) -> None:
        while not self._closed.is_set():
            await self._write()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _WRITE_SECONDS)
        await self._write()

    async def _write(self) -> None:
        if self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            await self._store.append(self._name, self._number, data)
            self._number += 1

    def stop(self) -> None:
        """Take no more; what is left is still written."""
        self._closed.set()

    async def close(self) -> None:
        """Write what is left."""
        self.stop()
        if self._writer is not None:
            await self._writer


async def follow(call: Call, stored: Stored, after: int) -> None:
    """Streams the events of a background response behind the one with the number `after`, as they come."""
    store, number = call.jobs.store, 0
    await call.stream()
    while True:
        chunks = await store.chunks(stored.id, number)
        for chunk in chunks:
            await call.write(b"".join(event for event in _events(chunk) if _sequence(event) > after))
        number += len(chunks)
        if chunks:
            continue
        current = await store.get("response", stored.id, stored.tenant)
        if current is None or (current.state not in LIVE and not await store.chunks(stored.id, number)):
            break
        await asyncio.sleep(_READ_SECONDS)
    await call.write(b"", False)


def _events(chunk: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in chunk.split(b"\n\n") if event]


def _sequence(event: bytes) -> int:
    found = _SEQUENCE.search(event)
    return int(found[1]) if found else 0


# --- endpoints ---------------------------------------------------------------------------------------------------


async def get_response(call: Call, _: None) -> None:
    """A stored response; with `stream=true` the events of one that is computed in the background."""
    stored = await _get(call)
    if call.query("stream") != "true":
        await call.reply(shown(stored))
        return
    if not stored.data["response"]["background"]:
        raise bad_value("stream", "only events of background responses are stored")
    after = call.query("starting_after") or "-1"
    if not re.fullmatch(r"-1|\d{1,9}", after):
        raise bad_value("starting_after", f"it is {after!r:.80}; it must be the number of an event")
    await follow(call, stored, int(after))


async def delete_response(call: Call, _: None) -> None:
    """Deletes a stored response; one that is being computed ends."""
    stored = await _get(call)
    await call.jobs.store.delete("response", stored.id, stored.tenant)
    call.jobs.cancel(stored.id)
    await call.reply({"id": stored.id, "object": "response", "deleted": True})


async def cancel_response(call: Call, _: None) -> None:
    """Ends a response that is being computed in the background."""
    stored, jobs = await _get(call), call.jobs
    if not stored.data["response"]["background"]:
        raise ApiError(400, "Only background responses can be cancelled")
    if await jobs.store.change_state(stored.id, "cancelling", ("queued", "in_progress")):
        jobs.cancel(stored.id)
    for _attempt in range(int(_CANCEL_SECONDS / _READ_SECONDS)):
        if (stored := await _get(call)).state not in LIVE:
            break
        await asyncio.sleep(_READ_SECONDS)
    await call.reply(shown(stored))


async def list_input_items(call: Call, _: None) -> None:
    """The items that a stored response was made from, the newest first."""
    stored = await _get(call)
    items = [*await _chain(call, stored.data["previous"]), *stored.data["input"]]
    if call.query("order") != "asc":
        items.reverse()
    limit, after = page_limit(call), call.query("after")
    if after:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_value("after", f"there is no item {after!r:.80}")
        items = items[at + 1:]
    await call.reply(page_of(items[:limit], len(items) > limit))
