"""The file in which a rank keeps the host cache's spans when its process ends."""

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

HEADER = 4096  # bytes before the part that the native library lays out
_MAGIC = b"ASSPANS1"
_KEY = 16


class HostCacheFile:
    """A rank's file. Its header describes the model and build that computed its spans; a file that does not match is
    overwritten. One process at a time holds it.

    The file contains keys and values of prompts, so only this user may read it.
    """

    def __init__(self, directory: str, model: str, rank: int, world: int):
        """Opens a rank's file of a model. The directory is created if it does not exist.

        Raises AllSparkError if the file cannot be opened or another process holds it.
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
            raise self._error("another process uses it; each group needs its own directory") from None

    def prepare(self, facts: dict, size: int) -> None:
        """Allocates `size` bytes after the header. Existing spans are kept only if the header holds the same `facts`.

        Raises AllSparkError if the file is not a host cache's or the disk is full.
        """
        wanted = json.dumps(facts, sort_keys=True).encode()
        head = os.pread(self.fd, HEADER, 0)
        if head and head[:8] != _MAGIC:
            raise self._error("it is not a prefix cache file, and is left as it is; use another directory")
        found = b""
        if len(head) >= 12:
            (length,) = struct.unpack_from("<I", head, 8)
            found = head[12 : 12 + length]
        total = HEADER + size
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


def pack_held(held: dict[bytes, int]) -> str:
    """The spans that a rank's host cache holds, as text for an answer."""
    return base64.b64encode(b"".join(key + struct.pack("<i", span) for key, span in held.items())).decode()


def held_by_all(packed: Iterable[str]) -> dict[bytes, int]:
    """The spans that all ranks hold under the same numbers.

    A rank that was killed may have written fewer spans than the others.
    """
    entries = [set(_entries(base64.b64decode(text))) for text in packed]
    common = set.intersection(*entries) if entries else set()
    return {entry[:_KEY]: struct.unpack_from("<i", entry, _KEY)[0] for entry in sorted(common, key=lambda e: e[_KEY:])}


def _entries(data: bytes) -> Iterable[bytes]:
    return (data[i : i + _KEY + 4] for i in range(0, len(data), _KEY + 4))
