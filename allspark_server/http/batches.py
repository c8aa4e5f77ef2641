"""/v1/batches, OpenAI's: files of requests, which are answered in the background by this server's own endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from .batch_lines import MAX_LINE, NoRequest, parse_line
from .call import Call, new_id
from .errors import ApiError
from .files import FileWriter, find_file
from .internal import post_until_taken
from .jobs import Jobs
from .paging import page_limit, page_of
from .store import Stored
from .wire import CUT, Body, Metadata

logger = logging.getLogger(__name__)

_MOST_LINES, _MOST_ERRORS = 50_000, 100
_CONCURRENCY = 64
_WINDOW_SECONDS = 24 * 3600
#: how often answers are written to the store, s: what a process has not written is computed again after its end
_WRITE_SECONDS = 2.0
_FINAL = {"completed": "completed_at", "failed": "failed_at", "cancelled": "cancelled_at", "expired": "expired_at"}


class BatchRequest(Body):
    """A request to answer the lines of a file."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=200), CUT]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


def _shown(stored: Stored) -> dict[str, Any]:
    return {**stored.data["batch"], "status": stored.state}


async def _get(call: Call) -> Stored:
    stored = await call.jobs.store.get("batch", call.path_rest, call.client.tenant)
    if stored is None:
        raise ApiError(404, f"No batch found with id '{call.path_rest}'.")
    return stored


async def create_batch(call: Call, request: BatchRequest) -> None:
    """Begins to answer the lines of a file."""
    await find_file(call, request.input_file_id, "input_file_id")
    batch = {
        "id": new_id("batch_"), "object": "batch", "endpoint": request.endpoint, "errors": None,
        "input_file_id": request.input_file_id, "completion_window": request.completion_window,
        "output_file_id": None, "error_file_id": None, "created_at": call.created, "in_progress_at": None,
        "expires_at": call.created + _WINDOW_SECONDS, "finalizing_at": None, "completed_at": None, "failed_at": None,
        "expired_at": None, "cancelling_at": None, "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": request.metadata,
    }
    # It was touched by nobody: a process with room for it takes it over at once.
    stored = Stored(str(batch["id"]), "batch", call.client.tenant, {"batch": batch}, "validating", touched=0.0)
    await call.jobs.store.put(stored)
    call.jobs.look_now()
    await call.reply(_shown(stored))


async def list_batches(call: Call, _: None) -> None:
    """The batches of the client, the newest first."""
    limit = page_limit(call)
    found = await call.jobs.store.page("batch", call.client.tenant, call.query("after"), limit + 1)
    await call.reply(page_of([_shown(stored) for stored in found[:limit]], len(found) > limit))


async def get_batch(call: Call, _: None) -> None:
    """A batch, with how many of its lines are answered."""
    await call.reply(_shown(await _get(call)))


async def cancel_batch(call: Call, _: None) -> None:
    """Ends a batch. What is answered already stands in its output file."""
    stored, jobs = await _get(call), call.jobs
    if not await jobs.store.change_state(stored.id, "cancelling", ("validating", "in_progress")):
        if stored.state not in ("cancelling", "cancelled"):
            raise ApiError(409, f"Cannot cancel a batch with status '{stored.state}'.")
    jobs.cancel(stored.id)
    jobs.look_now()
    await call.reply({**_shown(await _get(call)), "cancelling_at": int(time.time())})


async def continue_batch(jobs: Jobs, stored: Stored) -> None:
    """Answers a batch that no process answers."""
    jobs.start(stored.id, _Batch(jobs, stored).run())


class _Batch:
    """A batch that this process answers."""

    def __init__(self, jobs: Jobs, stored: Stored):
        self._jobs, self._stored, self._batch = jobs, stored, stored.data["batch"]
        self._client = jobs.client_of(stored.tenant)
        self._files: dict[str, FileWriter] = {}
        self._waiting: dict[str, list[bytes]] = {"output": [], "error": []}
        self._done: set[str] = set()
        self._counts = self._batch["request_counts"]

    async def run(self) -> None:
        """Do all of it, or end it if it is to be cancelled."""
        if self._stored.state == "cancelling":
            await self._open_files()
            await self._end("cancelled")
            return
        try:
            try:
                if self._stored.state == "validating" and not await self._validate():
                    return
                await self._open_files()
                writer = asyncio.ensure_future(self._write_often())
                try:
                    expired = await self._answer_all()
                finally:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)
                await self._end("expired" if expired else "completed")
            except ApiError as error:
                logger.error("batch %s: %s", self._stored.id, error.message)
                self._note_errors([{"code": error.code, "message": error.message, "param": error.param, "line": None}])
                await self._end("failed")
        except asyncio.CancelledError:
            current = await self._jobs.store.get("batch", self._stored.id, self._stored.tenant)
            if current is not None and current.state == "cancelling":
                self._stored.state = "cancelling"
                await self._end("cancelled")
            raise

    async def _lines(self) -> AsyncIterator[bytes]:
        """The lines of the input that are not empty."""
        name, tenant = self._batch["input_file_id"], self._stored.tenant
        if await self._jobs.store.get("file", name, tenant) is None:
            raise ApiError(400, f"No such File object: {name}", "input_file_id")
        number, rest = 0, b""
        while chunks := await self._jobs.store.chunks(name, number, 4):
            number += len(chunks)
            *lines, rest = (rest + b"".join(chunks)).split(b"\n")
            if len(rest) > MAX_LINE:
                raise ApiError(400, f"A line has more than {MAX_LINE} bytes", "input_file_id")
            for line in lines:
                if line.strip():
                    yield line
        if rest.strip():
            yield rest

    async def _validate(self) -> bool:
        """Looks at all lines; ends the batch as failed if one is not a request."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        number = 0
        async for line in self._lines():
            number += 1
            try:
                custom_id, url, _ = parse_line(line)
                if url != self._batch["endpoint"]:
                    raise NoRequest(f"url is {url}; the batch's endpoint is {self._batch['endpoint']}")
                if custom_id in seen:
                    raise NoRequest(f"custom_id {custom_id!r:.80} is that of another line")
                if number > _MOST_LINES:
                    raise NoRequest(f"the file has more than {_MOST_LINES} lines")
                seen.add(custom_id)
            except NoRequest as error:
                errors.append({"code": "invalid_request", "message": str(error), "param": None, "line": number})
                if len(errors) == _MOST_ERRORS or number > _MOST_LINES:
                    break
            await asyncio.sleep(0)
        if not number:
            errors.append({"code": "empty_file", "message": "The file has no lines", "param": None, "line": None})
        self._counts["total"] = number
        if errors:
            self._note_errors(errors)
            await self._end("failed")
            return False
        self._batch["in_progress_at"], self._stored.state = int(time.time()), "in_progress"
        await self._open_files()
        await self._save(("validating",))
        return True

    def _note_errors(self, errors: list[dict[str, Any]]) -> None:
        self._batch["errors"] = {"object": "list", "data": errors}

    async def _open_files(self) -> None:
        """Begins the files of answers, or continues those of a process that has ended."""
        store, names = self._jobs.store, self._stored.data.setdefault("files", {})
        for kind in ("output", "error"):
            if kind in self._files:
                continue
            file = FileWriter(store, self._stored.tenant, f"{self._stored.id}_{kind}.jsonl", "batch_output")
            self._files[kind] = file
            file.stored.data["batch"] = self._stored.id
            if kind in names:
                file.stored.id = names[kind]
                lines = b"".join(await file.resume()).splitlines()
                self._done |= {json.loads(line)["custom_id"] for line in lines}
                self._counts["completed" if kind == "output" else "failed"] = len(lines)
            else:
                names[kind] = file.stored.id
                await file.begin()

    async def _answer_all(self) -> bool:
        """Answers the lines that have no answer yet. Returns whether the time was too short."""
        running: set[asyncio.Task[None]] = set()
        expired = False
        try:
            async for line in self._lines():
                custom_id, url, body = parse_line(line)
                if custom_id in self._done:
                    continue
                if expired := time.time() > self._batch["expires_at"]:
                    break
                if len(running) >= _CONCURRENCY:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                running.add(asyncio.ensure_future(self._answer(custom_id, url, body)))
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return expired

    async def _answer(self, custom_id: str, url: str, body: dict[str, Any]) -> None:
        request_id = new_id("req_")
        status, data = await post_until_taken(self._jobs.application, url, json.dumps(body).encode(), self._client,
                                              request_id)
        entry = {"id": new_id("batch_req_"), "custom_id": custom_id, "error": None, "response": {
            "status_code": status, "request_id": request_id, "body": json.loads(data)}}
        right = status == 200
        self._waiting["output" if right else "error"].append(json.dumps(entry).encode() + b"\n")
        self._counts["completed" if right else "failed"] += 1

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await asyncio.shield(self._write())

    async def _write(self) -> None:
        for kind, file in self._files.items():
            lines, self._waiting[kind] = self._waiting[kind], []
            if lines:
                await file.write(b"".join(lines), now=True)
        await self._save(("in_progress",))

    async def _save(self, among: tuple[str, ...]) -> None:
        await self._jobs.store.change(self._stored, among)

    async def _end(self, state: str) -> None:
        """Completes the files, of which empty ones are deleted, and the batch."""
        if self._files:
            self._batch["finalizing_at"] = int(time.time())
        for kind, file in self._files.items():
            await file.write(b"".join(self._waiting[kind]), now=True)
            if file.stored.chunk_bytes:
                del file.stored.data["batch"]
                await file.end()
                self._batch[f"{kind}_file_id"] = file.stored.id
            else:
                await file.drop()
        self._stored.data.pop("files", None)
        self._batch[_FINAL[state]], self._stored.state = int(time.time()), state
        await self._save(("validating", "in_progress", "cancelling"))
