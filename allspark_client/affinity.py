"""Which member of a pool has computed which beginnings of prompts, as far as a client knows."""
from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from .request import RequestSpec

#: the shortest beginning that is remembered; longer ones each have twice as many tokens
_FIRST_TOKENS = 64
_CHARACTERS_PER_TOKEN = 4       # about, of text that only the server tokenizes
_MOST_BEGINNINGS = 8192
Beginning = tuple[bytes, int]


def beginnings(spec: RequestSpec) -> list[Beginning]:
    """Digests of a prompt's beginnings, and about how many tokens each has; short ones first."""
    root = hashlib.blake2b(json.dumps([spec.model, spec.config.cache_salt]).encode(), digest_size=12)
    found = []
    for part, tokens in _parts(spec):
        root.update(part)
        if tokens >= _FIRST_TOKENS:
            found.append((root.copy().digest(), tokens))
    return found


def _parts(spec: RequestSpec) -> Iterator[tuple[bytes, int]]:
    """A prompt's pieces, and how many tokens it has up to the end of each."""
    if spec.messages is not None:       # a chat goes on where its last turn ended
        characters = 0
        for message in spec.messages:
            piece = json.dumps(message, sort_keys=True).encode()
            characters += len(piece)
            yield piece, characters // _CHARACTERS_PER_TOKEN
        return
    ids = spec.input_ids
    data = array("i", ids).tobytes() if ids is not None else (spec.text or "").encode()
    width = 4 if ids is not None else _CHARACTERS_PER_TOKEN
    begin, size = 0, _FIRST_TOKENS
    while size * width <= len(data):
        yield data[begin:size * width], size
        begin, size = size * width, 2 * size


class PrefixMemory:
    """The member that computed a beginning last. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: OrderedDict[bytes, str] = OrderedDict()

    def note(self, prompt: list[Beginning], address: str) -> None:
        """The member at `address` computes a prompt of these beginnings."""
        with self._lock:
            for digest, _ in prompt:
                self._members[digest] = address
                self._members.move_to_end(digest)
            while len(self._members) > _MOST_BEGINNINGS:
                self._members.popitem(last=False)

    def find(self, prompt: list[Beginning]) -> tuple[str, int]:
        """Who has computed the longest of these beginnings, and of how many tokens that is; ("", 0) if nobody has."""
        with self._lock:
            for digest, tokens in reversed(prompt):
                if (address := self._members.get(digest)) is not None:
                    return address, tokens
        return "", 0
