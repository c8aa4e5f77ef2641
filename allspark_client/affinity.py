"""Prefix affinity: a client remembers which member of a pool has computed which prompt prefixes. Members tell HTTP
servers and administrators also of the prompts of other clients.
"""
from __future__ import annotations

import hashlib
import itertools
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from .images import images_in
from .request import RequestSpec

#: length in tokens of the shortest prefix that is remembered; each further length is twice the one before
_FIRST_TOKENS = 64
_CHARACTERS_PER_TOKEN = 4       # about, in text that the server tokenizes
_MOST_BEGINNINGS = 8192
DIGEST_BYTES = 12
Beginning = tuple[bytes, int]


def beginnings(spec: RequestSpec) -> list[Beginning]:
    """Digests of a prompt's prefixes and their approximate lengths in tokens, shortest first."""
    root = hashlib.blake2b(json.dumps([spec.model, spec.config.cache_salt]).encode(), digest_size=DIGEST_BYTES)
    digests = []
    for part, tokens in _parts(spec):
        root.update(part)
        if tokens >= _FIRST_TOKENS:
            digests.append((root.copy().digest(), tokens))
    return digests


def _parts(spec: RequestSpec) -> Iterator[tuple[bytes, int]]:
    """A prompt's parts, each with the number of tokens up to its end."""
    if spec.messages is not None:       # the next turn of a chat extends the last one
        characters, images = 0, iter(spec.images)
        for message in spec.messages:
            part = json.dumps(message, sort_keys=True).encode()
            characters += len(part)
            seen = b"".join(image.digest for image in itertools.islice(images, images_in(message)))
            yield part + seen, characters // _CHARACTERS_PER_TOKEN
        return
    ids = spec.input_ids
    data = array("i", ids).tobytes() if ids is not None else (spec.text or "").encode()
    width = 4 if ids is not None else _CHARACTERS_PER_TOKEN
    yield b"".join(image.digest for image in spec.images), 0
    begin, size = 0, _FIRST_TOKENS
    while size * width <= len(data):
        yield data[begin:size * width], size
        begin, size = size * width, 2 * size


class PrefixMemory:
    """The member that last computed each prefix. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: OrderedDict[bytes, str] = OrderedDict()

    def note(self, prompt: list[Beginning], address: str) -> None:
        """The member at `address` computes a prompt with these prefixes."""
        self.learn([digest for digest, _ in prompt], address)

    def learn(self, digests: list[bytes], address: str) -> None:
        """The member at `address` has computed prompts with these prefixes."""
        with self._lock:
            for digest in digests:
                self._members[digest] = address
                self._members.move_to_end(digest)
            while len(self._members) > _MOST_BEGINNINGS:
                self._members.popitem(last=False)

    def forget(self, address: str) -> None:
        """The member at `address` has lost its cache."""
        with self._lock:
            for digest in [digest for digest, owner in self._members.items() if owner == address]:
                del self._members[digest]

    def find(self, prompt: list[Beginning]) -> tuple[str, int]:
        """The address of the member that computed the longest of these prefixes, and its tokens; ("", 0): none did."""
        with self._lock:
            for digest, tokens in reversed(prompt):
                if (address := self._members.get(digest)) is not None:
                    return address, tokens
        return "", 0
