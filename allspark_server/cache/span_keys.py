"""Keys that identify full spans by their content."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

from ..runtime.native import native_library

_DIGEST_SIZE = 16


def scope(salt: str, adapter: str = "", tenant: str = "") -> str:
    """The salt of a request's keys: its cache_salt, the adapter's digest, as adapters change keys and values, and the
    tenant, unless tenants share.

    A client's cache_salt cannot equal the scope of an adapter or of a tenant.
    """
    if adapter:
        salt = f"\0adapter {adapter} {salt}"
    elif salt.startswith("\0"):
        salt = f"\0{salt}"
    return f"\0tenant {hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()} {salt}" if tenant else salt


def in_group(key: bytes, group: int) -> bytes:
    """The key of the same positions in another cache group."""
    return bytes((key[0] ^ group,)) + key[1:] if group else key


def of_state(key: bytes, part: int) -> bytes:
    """The key of one of the spans that hold the recurrent state after the span with this key."""
    return bytes((key[0] ^ 0xFF, key[1] ^ (part & 0xFF), key[2] ^ (part >> 8 & 0xFF), key[3] ^ (part >> 16))) + key[4:]


class Images(Protocol):
    """The images of a prompt."""

    def content(self, begin: int, end: int) -> bytes:
        """What identifies the images that positions [begin, end) show."""


class SpanKeys:
    """A hash chain: a span's key is the hash of its token ids, of the images that it shows, and of the key of the span
    before it.

    The chain's root covers the request's salt, so requests share spans only within one salt. It also covers what the
    rotary embedding depends on: with dynamic scaling, the prompt's length if that is above the original length; with
    LongRoPE, whether the history is above the original length. Therefore spans with equal keys hold the same bits. The
    chain's keys are those of the first cache group; see `in_group` for others. Any thread may call the methods.
    """

    def __init__(self, span_size: int, dynamic_rope_original: int = 0, long_rope_original: int = 0):
        """dynamic_rope_original, long_rope_original: the length for which the model was trained, if its rotary scaling
        is dynamic or LongRoPE; otherwise 0.
        """
        self.span_size = span_size
        self._dynamic_rope_original = dynamic_rope_original
        self._long_rope_original = long_rope_original
        self._keys = native_library().span_keys

    @property
    def depends_on_history(self) -> bool:
        """Whether a history's root changes as it grows."""
        return self._long_rope_original > 0

    def root(self, salt: str, prompt_len: int, history: int = 0) -> bytes:
        """The key before the first span of a sequence with a history of `history` tokens."""
        length = prompt_len if 0 < self._dynamic_rope_original < prompt_len else 0
        if 0 < self._long_rope_original < max(prompt_len, history):
            length = 1
        return hashlib.blake2b(struct.pack("<q", length) + salt.encode(), digest_size=_DIGEST_SIZE).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: list[int], count: int, images: Images | None = None
               ) -> None:
        """Appends to `keys` (the chain of `tokens` so far) until it has `count` keys. `images`: those of the tokens."""
        size, begin = self.span_size, len(keys)
        if count <= begin:
            return
        shown = None
        if images is not None:
            shown = [images.content(index * size, (index + 1) * size) for index in range(begin, count)]
        keys += self._keys(keys[-1] if keys else root, tokens, begin, count, size, shown)
