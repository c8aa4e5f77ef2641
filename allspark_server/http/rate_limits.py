"""Rate limits of keys: requests and tokens a minute, which all workers of an HTTP server count together.

A limit is a bucket that holds as much as a minute allows and fills evenly. A request needs a part of each bucket. It
takes its tokens when they are known: those of its prompt before its answer begins, the others at its end. So a bucket
may be in debt for a while, and in the long run no key exceeds its limits.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from allspark_server.access import RateLimit

from .errors import ApiError

#: a key's name, then of requests and of tokens what is left and when that was, s on the monotonic clock
_RECORD = struct.Struct("<32sdddd")
_RECORDS = 4096


@dataclass
class _Bucket:
    """What is left of `limit` a minute."""

    unit: str
    limit: int
    left: float

    @property
    def full_in(self) -> float:
        """Seconds until it is full."""
        return (self.limit - self.left) * 60 / self.limit

    def ready_in(self) -> float:
        """Seconds until it has room for a request."""
        return max(0.0, (1 - self.left) * 60 / self.limit)


class RateLimits:
    """The buckets of all keys, in a file that the workers share."""

    def __init__(self, folder: str | None = None):
        """`folder`: that of the file; None: only this process counts."""
        path = f"{folder}/rate_limits" if folder else None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if path else _unnamed_file()
        os.posix_fallocate(self._file, 0, _RECORD.size * _RECORDS)      # a full disk must fail here
        self._memory = mmap.mmap(self._file, _RECORD.size * _RECORDS)

    def take(self, name: str, limit: RateLimit) -> None:
        """Counts a request of the key `name`. Raises ApiError (429) if its limits do not allow it now."""
        with self._buckets(name, limit) as buckets:
            for bucket in buckets:
                if seconds := bucket.ready_in():
                    raise ApiError(
                        429, f"Rate limit reached: {bucket.limit} {bucket.unit} per minute. Please try again in "
                             f"{_duration(seconds)}.", code="rate_limit_exceeded", retry_after=math.ceil(seconds),
                        retry_after_ms=math.ceil(1e3 * seconds))
            for bucket in buckets:
                if bucket.unit == "requests":
                    bucket.left -= 1

    def charge(self, name: str, limit: RateLimit, tokens: int) -> None:
        """Counts tokens."""
        with self._buckets(name, limit) as buckets:
            for bucket in buckets:
                if bucket.unit == "tokens":
                    bucket.left -= tokens

    def headers(self, name: str, limit: RateLimit) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers that say what is left."""
        headers: list[tuple[str, str]] = []
        with self._buckets(name, limit) as buckets:
            for bucket in buckets:
                headers += [(f"x-ratelimit-limit-{bucket.unit}", str(bucket.limit)),
                            (f"x-ratelimit-remaining-{bucket.unit}", str(max(0, math.floor(bucket.left)))),
                            (f"x-ratelimit-reset-{bucket.unit}", _duration(bucket.full_in))]
        return [(key.encode(), value.encode()) for key, value in headers]

    @contextlib.contextmanager
    def _buckets(self, name: str, limit: RateLimit) -> Iterator[list[_Bucket]]:
        """The buckets of a key that has limits, as they are now; they are kept unless the body raises."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            at, now = self._place(name.encode()[-32:].ljust(32)), time.monotonic()
            key, *state = _RECORD.unpack_from(self._memory, at)
            buckets = []
            for index, (unit, most) in enumerate((("requests", limit.requests), ("tokens", limit.tokens))):
                left, since = state[2 * index:2 * index + 2]
                if most:
                    buckets.append(_Bucket(unit, most, min(most, left + (now - since) * most / 60) if since else most))
            yield buckets
            for bucket in buckets:
                index = 0 if bucket.unit == "requests" else 2
                state[index:index + 2] = bucket.left, now
            _RECORD.pack_into(self._memory, at, key, *state)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _place(self, name: bytes) -> int:
        """Where a key's record is; it replaces the one that was not used for longest if there is no other place."""
        oldest, place = math.inf, 0
        for at in range(0, _RECORD.size * _RECORDS, _RECORD.size):
            key, _, requests_at, _, tokens_at = _RECORD.unpack_from(self._memory, at)
            if key == name:
                return at
            if not any(key):
                place = at
                break
            if max(requests_at, tokens_at) < oldest:
                oldest, place = max(requests_at, tokens_at), at
        _RECORD.pack_into(self._memory, place, name, 0.0, 0.0, 0.0, 0.0)
        return place


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _duration(seconds: float) -> str:
    """A time in OpenAI's form, such as 6m0s, 1.2s or 20ms."""
    if seconds < 1:
        return f"{math.ceil(1e3 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
