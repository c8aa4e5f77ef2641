"""The file in which a rank keeps spans of the host cache from one process to the next."""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
import re
import struct
from collections.abc import Iterable

from allspark_client.errors import AllSparkError, AsStatus

logger = logging.getLogger(__name__)

HEADER = 4096  # bytes before what the native library lays out
_MAGIC = b"ASSPANS1"
_KEY = 16


class HostCacheFile:
    """Its header says what its spans were computed by; one of other spans is made anew. Held by one process at a time.

    Whoever may read it can read the keys and values of prompts: it is this user's alone.
    """

    def __init__(self, directory: str, model: str, rank: int, world: int):
        """Opens the file of a rank of a model, in a directory that is made if need be. AllSparkError if that cannot be
        done, or another process has it, or it is something else.
        """
        name = re.sub(r"[^\w.-]", "_", model)[:80]
        self.path = os.path.join(os.path.abspath(directory), f"{name}.rank{rank}of{world}.spans")
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise self._error("another process uses it; give each group a directory of its own") from None

    def prepare(self, facts: dict, size: int) -> None:
        """Makes room for `size` bytes behind the header. What the file has stays only if its spans were computed by
        the same: `facts`.
        """
        wanted = json.dumps(facts, sort_keys=True).encode()
        head = os.pread(self.fd, HEADER, 0)
        if head and head[:8] != _MAGIC:
            raise self._error("it is no file of a prefix cache, and is left as it is; give another directory")
        found = b""
        if len(head) >= 12:
            (length,) = struct.unpack_from("<I", head, 8)
            found = head[12 : 12 + length]
        total = HEADER + size
        if found == wanted and os.fstat(self.fd).st_size == total:
            return
        if head:
            logger.warning("%s holds spans of another model, build or size, or is torn: it is made anew", self.path)
        try:
            os.ftruncate(self.fd, 0)
            os.posix_fallocate(self.fd, 0, total)  # or a full disk would end the process when it writes there
            os.pwrite(self.fd, _MAGIC + struct.pack("<I", len(wanted)) + wanted, 0)
        except OSError as error:
            raise self._error(f"{error.strerror} ({total} bytes are wanted)") from error

    def close(self) -> None:
        """Lets another process have it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _error(self, why: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"host_cache_dir: the file {self.path}: {why}")


def pack_held(held: dict[bytes, int]) -> str:
    """What a rank's host cache holds, for an answer."""
    return base64.b64encode(b"".join(key + struct.pack("<i", span) for key, span in held.items())).decode()


def held_by_all(packed: Iterable[str]) -> dict[bytes, int]:
    """What all ranks hold under the same numbers: a rank that was killed may have written more than another."""
    entries = [set(_entries(base64.b64decode(text))) for text in packed]
    common = set.intersection(*entries) if entries else set()
    return {entry[:_KEY]: struct.unpack_from("<i", entry, _KEY)[0] for entry in sorted(common, key=lambda e: e[_KEY:])}


def _entries(data: bytes) -> Iterable[bytes]:
    return (data[i : i + _KEY + 4] for i in range(0, len(data), _KEY + 4))
