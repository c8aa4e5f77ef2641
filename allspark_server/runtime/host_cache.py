"""The file in which a rank keeps the host cache's spans when its process ends, and from which others take them."""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterable

from allspark_client.errors import AllSparkError, AsStatus

from .native import native_library

logger = logging.getLogger(__name__)

HEADER = 4096  # bytes before the part that the native library lays out
_MAGIC = b"ASSPANS2"  # with the version as its last character
_KEY = 16
_PAGE, _ALIGNMENT = 4096, 64
_ENTRY, _SUM = 32, struct.Struct("<Q")  # of each span: key, checksum and 8 bytes; see native/batch/span_records.h


class HostCacheFile:
    """A rank's file. Its header describes the model and build that computed its spans; a file that does not match is
    overwritten. One process at a time holds it.

    The file contains keys and values of prompts, so only this user may read it.
    """

    def __init__(self, directory: str, model: str, rank: int, world: int):
        """Opens a rank's file of a model. The directory is created if it does not exist.

        Raises AllSparkError if the file cannot be opened or another process holds it.
        """
        self.path = records_path(directory, model, rank, world)
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise self._error("another process uses it; each group needs its own directory") from None

    def prepare(self, facts: dict, size: int) -> None:
        """Allocates `size` bytes after the header. Existing spans are kept only if the header holds the same `facts`.

        Raises AllSparkError if the file is not a host cache's or the disk is full.
        """
        wanted = json.dumps(facts, sort_keys=True).encode()
        head = os.pread(self.fd, HEADER, 0)
        if head and head[:7] != _MAGIC[:7]:
            raise self._error("it is not a prefix cache file, and is left as it is; use another directory")
        found, total = _facts(head) if head[:8] == _MAGIC else b"", HEADER + size
        if found == wanted and os.fstat(self.fd).st_size == total:
            return
        if head:
            logger.warning("%s holds spans of another model, build or size, or is incomplete: it is overwritten",
                           self.path)
        try:
            os.ftruncate(self.fd, 0)
            os.posix_fallocate(self.fd, 0, total)  # otherwise a write to a full disk would kill the process
            os.pwrite(self.fd, _MAGIC + struct.pack("<I", len(wanted)) + wanted, 0)
        except OSError as error:
            raise self._error(f"{error.strerror} ({total} bytes are needed)") from error

    def close(self) -> None:
        """Closes the file, so that another process can open it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _error(self, why: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"host_cache_dir: the file {self.path}: {why}")


class SpanRecords:
    """The records of a rank's host cache file, as another process maps them: a group's rank 0 to write spans that
    another group has computed, or to read those that it wants.

    The owner may write records meanwhile. So what is read counts only if its checksum is right. A record is written as
    the owner does it, the key last: see native/batch/span_records.h. `facts`: what its spans depend on; `facts_text`:
    the same as JSON.
    """

    def __init__(self, path: str, writable: bool = False):
        """Raises OSError if the file cannot be opened, ValueError if it is no complete host cache file."""
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            head = os.pread(fd, HEADER, 0)
            if head[:8] != _MAGIC:
                raise ValueError(f"{path} is not a host cache file of this version")
            self.facts_text = _facts(head).decode()
            self.facts: dict = json.loads(self.facts_text)
            self.spans, self.bytes = self.facts["spans"], self.facts["span"][1]
            self._begin = HEADER + _rounded(self.spans * _ENTRY, _PAGE)
            self._stride = _rounded(self.bytes, _ALIGNMENT)
            if os.fstat(fd).st_size != self._begin + self.spans * self._stride:
                raise ValueError(f"{path} is not as large as its {self.spans} spans of {self.bytes} bytes are")
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        self._copy = native_library().copy_span     # kept: native_library() asks the CPU each time, which is slow

    @property
    def spans_depend_on(self) -> dict:
        """The facts, without the number of spans: spans of files in which these are equal are interchangeable."""
        return {name: value for name, value in self.facts.items() if name != "spans"}

    def checksum(self, record: int, key: bytes) -> int | None:
        """The checksum of a record's content; None if it has another key."""
        at = HEADER + record * _ENTRY
        if not 0 <= record < self.spans or self._map[at : at + _KEY] != key:
            return None
        (checksum,) = _SUM.unpack_from(self._map, at + _KEY)
        return checksum

    def content(self, record: int) -> memoryview:
        """A record's content, without a copy."""
        at = self._begin + record * self._stride
        return self._view[at : at + self.bytes]

    def write(self, record: int, key: bytes, content: memoryview | bytearray, checksum: int) -> bool:
        """Fills a record. Returns False, and leaves it empty, if the content does not have this checksum."""
        at = HEADER + record * _ENTRY
        self._map[at : at + _KEY] = bytes(_KEY)
        if self._copy(self.content(record), content) != checksum:
            return False
        _SUM.pack_into(self._map, at + _KEY, checksum)
        self._map[at : at + _KEY] = key
        return True


def records_path(directory: str, model: str, rank: int, world: int) -> str:
    """The host cache file of a rank."""
    name = re.sub(r"[^\w.-]", "_", model)[:80]
    return os.path.join(os.path.abspath(directory), f"{name}.rank{rank}of{world}.spans")


def _facts(head: bytes) -> bytes:
    """The facts in a file's header; nothing if it is incomplete."""
    if len(head) < 12:
        return b""
    (length,) = struct.unpack_from("<I", head, 8)
    return head[12 : 12 + length]


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


_NO_CACHE = "none"


def pack_held(held: dict[bytes, int] | None) -> str:
    """The spans that a rank's host cache holds, as text for an answer. None: the rank has no cache at all."""
    if held is None:
        return _NO_CACHE
    return base64.b64encode(b"".join(key + struct.pack("<i", span) for key, span in held.items())).decode()


def held_by_all(packed: Iterable[str]) -> dict[bytes, int]:
    """The spans that all ranks with a cache hold under the same numbers.

    A rank that was killed may have written fewer spans than the others.
    """
    entries = [set(_entries(base64.b64decode(text))) for text in packed if text != _NO_CACHE]
    common = set.intersection(*entries) if entries else set()
    return {entry[:_KEY]: struct.unpack_from("<i", entry, _KEY)[0] for entry in sorted(common, key=lambda e: e[_KEY:])}


def _entries(data: bytes) -> Iterable[bytes]:
    return (data[i : i + _KEY + 4] for i in range(0, len(data), _KEY + 4))
