"""/v1/files, OpenAI's: files that clients upload for batches, and those that batches write."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from .bodies import CHUNK_SECONDS, ClientDisconnected, Receive
from .call import Call, new_id
from .errors import ApiError, bad_value
from .jobs import Jobs
from .paging import page_limit, page_of
from .store import Store, Stored
from .store.store import LIVE

PURPOSES = ("batch", "batch_output", "user_data", "assistants", "fine-tune", "vision", "evals")
_CHUNK = 1 << 20
#: characters of form fields, and how long a whole upload may take, s
_MOST_FIELD, _UPLOAD_SECONDS = 1024, 3600.0
_MOST_FIELDS = 16
_BOUNDARY = re.compile(rb"""boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))""", re.IGNORECASE)


def file_object(stored: Stored) -> dict[str, Any]:
    """A file in OpenAI's form."""
    return {"id": stored.id, "object": "file", "bytes": stored.chunk_bytes, "created_at": int(stored.created),
            "status": "processed", "status_details": None, **stored.data}


class FileWriter:
    """Writes a new file in chunks."""

    def __init__(self, store: Store, tenant: str, filename: str, purpose: str):
        self._store, self._waiting, self._number = store, bytearray(), 0
        self.stored = Stored(new_id("file-"), "file", tenant, {"filename": filename, "purpose": purpose}, "in_progress")

    async def begin(self) -> None:
        """Create the file, which is not complete yet."""
        await self._store.put(self.stored)

    async def write(self, data: bytes, now: bool = False) -> None:
        """Add data, which is kept in memory up to a chunk unless it is written `now`."""
        self._waiting += data
        while len(self._waiting) >= _CHUNK or (now and self._waiting):
            chunk = bytes(self._waiting[:_CHUNK])
            del self._waiting[:_CHUNK]
            await self._store.append(self.stored.id, self._number, chunk)
            self._number += 1
            self.stored.chunk_bytes += len(chunk)

    async def resume(self) -> list[bytes]:
        """Continue a file that another process has begun; returns its chunks."""
        known: list[bytes] = []
        while chunks := await self._store.chunks(self.stored.id, len(known)):
            known += chunks
        self._number = len(known)
        self.stored.chunk_bytes = sum(map(len, known))
        return known

    async def end(self) -> None:
        """Complete the file."""
        await self.write(b"", now=True)
        self.stored.state = "completed"
        await self._store.change(self.stored)

    async def drop(self) -> None:
        """Delete the file."""
        await self._store.delete("file", self.stored.id, self.stored.tenant)


class _Form:
    """The parts of a multipart form, as they arrive: texts of fields, and one file that goes to the store."""

    def __init__(self, call: Call):
        self._call, self._store = call, call.jobs.store
        self.fields: dict[str, str] = {}
        self.file: FileWriter | None = None
        self.data: list[bytes] = []     # of the file, not written yet
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._name, self._text = "", b""

    def callbacks(self) -> dict[str, Any]:
        """What python_multipart calls."""
        return {"on_part_begin": self._begin, "on_header_field": self._add_header, "on_header_value": self._add_value,
                "on_header_end": self._end_header, "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data, "on_part_end": self._end}

    def _begin(self) -> None:
        self._headers, self._text = {}, b""
        if len(self.fields) >= _MOST_FIELDS:
            raise bad_value("body", f"it has more than {_MOST_FIELDS} fields")

    def _add_header(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _add_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if b"filename" not in options:
            return
        if self._name != "file" or self.file is not None:
            raise bad_value(self._name or "file", "one file is taken, in the field 'file'")
        filename = options[b"filename"].decode(errors="replace")[:255] or "upload"
        self.file = FileWriter(self._store, self._call.client.tenant, filename, "")

    def _add_data(self, data: bytes, begin: int, end: int) -> None:
        if self.file is not None and self._name == "file":
            self.data.append(data[begin:end])
            return
        self._text += data[begin:end]
        if len(self._text) > _MOST_FIELD:
            raise bad_value(self._name or "body", f"it is longer than {_MOST_FIELD} bytes")

    def _end(self) -> None:
        if self._name and self._name != "file":
            self.fields[self._name] = self._text.decode(errors="replace")


async def read_upload(call: Call, scope: dict[str, Any], receive: Receive) -> FileWriter:
    """Writes the file of a multipart body to the store, as it arrives. Raises ApiError or ClientDisconnected."""
    _ = call.jobs   # raises if there is no store
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser
    except ImportError:
        raise ApiError(501, "This server takes no uploads: python-multipart is not installed there") from None
    kind = dict(scope["headers"]).get(b"content-type", b"")
    boundary = _BOUNDARY.search(kind)
    if not kind.lower().startswith(b"multipart/form-data") or boundary is None:
        raise ApiError(415, "The body must be a form, with the header 'Content-Type: multipart/form-data; boundary=…'")
    form, limit = _Form(call), call.worker.max_file_bytes
    parser = MultipartParser(boundary[1] or boundary[2], form.callbacks())  # type: ignore[arg-type]
    size, begun, deadline = 0, False, time.monotonic() + _UPLOAD_SECONDS
    try:
        more = True
        while more:
            message = await asyncio.wait_for(receive(), min(CHUNK_SECONDS, max(0.0, deadline - time.monotonic())))
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body, more = message.get("body", b""), message.get("more_body", False)
            size += len(body)
            if size > limit:
                raise ApiError(413, f"The file is larger than the {limit} bytes that this server takes",
                               code="request_too_large")
            pause = call.worker.bodies.allowances.take(call.tenant, len(body))
            parser.write(body)
            if form.file is not None and not begun:
                await form.file.begin()
                begun = True
            if form.file is not None:
                data, form.data = form.data, []
                await form.file.write(b"".join(data))
            await asyncio.sleep(pause)
        parser.finalize()
        purpose = form.fields.get("purpose", "")
        if form.file is None:
            raise ApiError(400, "Missing required parameter: 'file'.", "file", "missing_required_parameter")
        if purpose not in PURPOSES:
            raise bad_value("purpose", f"it is {purpose!r:.80}; allowed: {', '.join(PURPOSES)}")
        form.file.stored.data["purpose"] = purpose
        await form.file.end()
    except BaseException as error:
        if form.file is not None and begun:
            await form.file.drop()
        if isinstance(error, FormParserError):
            raise ApiError(400, f"The body is not a valid form: {error}") from None
        if isinstance(error, asyncio.TimeoutError):
            raise ApiError(408, "The body did not arrive in time") from None
        raise
    return form.file


async def upload_file(call: Call, file: FileWriter) -> None:
    """Stores a file."""
    await call.reply(file_object(file.stored))


async def find_file(call: Call, name: str, param: str | None = None) -> Stored:
    """A complete file of the client. Raises ApiError."""
    stored = await call.jobs.store.get("file", name, call.client.tenant)
    if stored is None or stored.state in LIVE:
        raise bad_value(param, f"no such File object: {name:.80}") if param else \
            ApiError(404, f"No such File object: {name:.80}", "id")
    return stored


async def read_file(call: Call, stored: Stored) -> bytes:
    """The content of a file. Raises ApiError."""
    content, number = bytearray(), 0
    while chunks := await call.jobs.store.chunks(stored.id, number):
        content += b"".join(chunks)
        number += len(chunks)
    return bytes(content)


async def list_files(call: Call, _: None) -> None:
    """The files of the client, the newest first."""
    limit = page_limit(call, 10_000)
    found = await call.jobs.store.page("file", call.client.tenant, call.query("after"), limit + 1,
                                       call.query("order") == "asc")
    purpose = call.query("purpose")
    data = [file_object(stored) for stored in found[:limit]
            if stored.state not in LIVE and purpose in ("", stored.data["purpose"])]
    await call.reply(page_of(data, len(found) > limit))


async def get_file(call: Call, _: None) -> None:
    """The description of a file."""
    await call.reply(file_object(await find_file(call, call.path_rest)))


async def delete_file(call: Call, _: None) -> None:
    """Deletes a file."""
    stored = await find_file(call, call.path_rest)
    await call.jobs.store.delete("file", stored.id, stored.tenant)
    await call.reply({"id": stored.id, "object": "file", "deleted": True})


async def file_content(call: Call, _: None) -> None:
    """The content of a file."""
    stored = await find_file(call, call.path_rest)
    await call.begin(b"application/octet-stream", stored.chunk_bytes)
    number = 0
    while chunks := await call.jobs.store.chunks(stored.id, number, 4):
        for chunk in chunks:
            await call.write(chunk)
        number += len(chunks)
    await call.write(b"", False)


async def drop_upload(jobs: Jobs, stored: Stored) -> None:
    """Deletes an incomplete file whose process has ended, unless a batch continues it."""
    if "batch" not in stored.data:
        await jobs.store.delete("file", stored.id, stored.tenant)
