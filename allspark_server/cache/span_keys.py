"""Names full spans by what they hold."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_DIGEST_SIZE = 16


def scope(salt: str, adapter: str = "") -> str:
    """The salt of what requests with a cache_salt share; of those with an adapter, its digest: what it computes is its
    own. No salt of a client's is taken for another's with an adapter.
    """
    if adapter:
        return f"\0adapter {adapter} {salt}"
    return f"\0{salt}" if salt.startswith("\0") else salt


def in_group(key: bytes, group: int) -> bytes:
    """Names the same positions in another cache group."""
    return bytes((key[0] ^ group,)) + key[1:] if group else key


class SpanKeys:
    """A hash chain: a span's key is the hash of its token ids and of the key of the span before it. Any thread.

    The chain begins with the salt of the request, so that requests share spans only within one salt, and, where the
    model's rotary embedding depends on the prompt's length once past the original length, with that length (dynamic
    scaling); or, where it depends on the history's (LongRoPE), with that it is past it. Equal keys
    therefore mean equal keys and values, to the bit. A chain is of the first cache group; see `in_group` for others.
    """

    def __init__(self, span_size: int, dynamic_rope_original: int = 0, long_rope_original: int = 0):
        """dynamic_rope_original, long_rope_original: the length that the model was trained for, if its rotary scaling
        is dynamic, or LongRoPE; otherwise 0.
        """
        self.span_size = span_size
        self._dynamic_rope_original = dynamic_rope_original
        self._long_rope_original = long_rope_original
        self._pack = struct.Struct(f"<{span_size}i").pack

    @property
    def depends_on_history(self) -> bool:
        """Whether a history's root changes as it grows."""
        return self._long_rope_original > 0

    def root(self, salt: str, prompt_len: int, history: int = 0) -> bytes:
        """The key before the first span, of a sequence with a history of so many tokens."""
        length = prompt_len if 0 < self._dynamic_rope_original < prompt_len else 0
        if 0 < self._long_rope_original < max(prompt_len, history):
            length = 1
        return hashlib.blake2b(struct.pack("<q", length) + salt.encode(), digest_size=_DIGEST_SIZE).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int], count: int) -> None:
        """Appends to `keys` (the chain of `tokens` so far) until it has `count` keys."""
        size = self.span_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else root
            data = parent + self._pack(*tokens[index * size : (index + 1) * size])
            keys.append(hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest())
