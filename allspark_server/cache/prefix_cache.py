"""Finds spans already computed for the beginning of a prompt."""

from __future__ import annotations

import hashlib
import struct
import time
from typing import Callable, Sequence

from .span_pool import SpanPool

_DIGEST_SIZE = 16


class PrefixCache:
    """Full spans by a hash chain: a span's key is the hash of its token ids and of the key of the span before it.

    The chain begins with the salt of the request, so that requests share spans only within one salt, and, where the
    model's rotary embedding depends on the prompt's length (dynamic scaling, once past the original length), with that
    length. Equal keys therefore mean equal keys and values, to the bit.
    """

    def __init__(
        self,
        pool: SpanPool,
        span_size: int,
        ttl: float = 300.0,
        dynamic_rope_original: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`ttl`: seconds an unreferenced span is kept. `dynamic_rope_original`: the length that the model was trained
        for, if its rotary scaling is dynamic, otherwise 0."""
        self.span_size = span_size
        self.ttl = ttl
        self._pool = pool
        self._dynamic_rope_original = dynamic_rope_original
        self._clock = clock
        self._pack = struct.Struct(f"<{span_size}i").pack
        self._span_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.set_evict_listener(self._forget)

    def __len__(self) -> int:
        return len(self._span_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._span_of

    def root(self, salt: str, prompt_len: int) -> bytes:
        """The key before the first span."""
        length = prompt_len if 0 < self._dynamic_rope_original < prompt_len else 0
        return hashlib.blake2b(struct.pack("<q", length) + salt.encode(), digest_size=_DIGEST_SIZE).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int], count: int) -> None:
        """Appends to `keys` (the chain of `tokens` so far) until it has `count` keys."""
        size = self.span_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else root
            data = parent + self._pack(*tokens[index * size : (index + 1) * size])
            keys.append(hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest())

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The spans of the longest known beginning of the chain. Takes no reference: call `SpanPool.acquire` next."""
        self.expire()
        spans = []
        for key in keys:
            span = self._span_of.get(key)
            if span is None:
                break
            spans.append(span)
        return spans

    def enter(self, key: bytes, span: int) -> None:
        """Makes a fully computed span findable. A second span with the same content stays private to its sequence."""
        if key not in self._span_of:
            self._span_of[key] = span
            self._key_of[span] = key
            self._pool.keep(span)

    def expire(self) -> None:
        """Frees the spans that nobody has used for `ttl` seconds."""
        self._pool.evict_older_than(self._clock() - self.ttl)

    def _forget(self, span: int) -> None:
        del self._span_of[self._key_of.pop(span)]
