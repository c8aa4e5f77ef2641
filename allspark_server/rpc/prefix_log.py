"""Digests of the prompts that a group has computed: gateways that choose among groups send a prompt to one that knows
its beginning.
"""
from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import OrderedDict

from allspark_client._proto import allspark_pb2 as pb
from allspark_client.affinity import beginnings
from allspark_client.request import RequestSpec

#: digests that are kept, and how long after the last question prompts are digested, s
MOST_DIGESTS, ASKED_SECONDS = 8192, 60.0


class PrefixLog:
    """The beginnings of the last prompts, each with a number that grows. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._digests: OrderedDict[bytes, int] = OrderedDict()
        self._last = 0
        self._asked = -ASKED_SECONDS

    def note(self, spec: RequestSpec) -> None:
        """A prompt is computed. Without anybody who asks, nothing is kept."""
        if time.monotonic() - self._asked > ASKED_SECONDS:
            return
        found = beginnings(spec)
        with self._lock:
            for digest, _ in found:
                self._digests.pop(digest, None)
                self._digests[digest] = self._last = next(self._numbers)
            while len(self._digests) > MOST_DIGESTS:
                self._digests.popitem(last=False)

    def since(self, epoch: str, number: int) -> pb.Prefixes:
        """The digests that are newer than `number`; all of them if `epoch` is another server's."""
        with self._lock:
            self._asked = time.monotonic()
            known = number if epoch == self._epoch else 0
            new: list[bytes] = []
            for digest in reversed(self._digests):
                if self._digests[digest] <= known:
                    break
                new.append(digest)
            return pb.Prefixes(epoch=self._epoch, number=self._last, digests=b"".join(reversed(new)))
