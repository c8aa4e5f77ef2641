"""Spans that are being computed, so that they are computed once."""

from __future__ import annotations

import heapq

from .sequence import Sequence


class PendingSpans:
    """Full spans of histories that running sequences compute, by their keys, and the sequences that wait for some."""

    def __init__(self) -> None:
        self._of: dict[bytes, Sequence] = {}
        self._waits = 0

    def announce(self, sequence: Sequence, begin: int, end: int) -> None:
        """The spans begin ... end-1 of a sequence, whose keys it has, will be computed."""
        sequence.announced = end
        for key in sequence.keys[begin:end]:
            self._of.setdefault(key, sequence)

    def find(self, keys: list[bytes], begin: int) -> tuple[Sequence | None, int]:
        """Who computes the span of keys[begin], and how many of the keys it will have by and by."""
        producer = self._of.get(keys[begin]) if begin < len(keys) else None
        end = begin
        while producer is not None and end < len(keys) and self._of.get(keys[end]) is producer:
            end += 1
        return producer, end

    def wait(self, sequence: Sequence, producer: Sequence, spans: int) -> None:
        """The sequence waits until the producer has entered so many spans into the prefix cache. It pulls the producer
        forward: whoever waits for it is served with it.
        """
        self._waits += 1
        sequence.awaited = producer
        heapq.heappush(producer.followers, (spans, self._waits, sequence))
        producer.pull = min(producer.pull, (sequence.account.time, sequence.rank), sequence.pull)

    def arrived(self, sequence: Sequence, begin: int, end: int) -> list[Sequence]:
        """The sequence's spans begin ... end-1 are in the prefix cache: who has waited for that."""
        self._withdraw(sequence, begin, min(end, sequence.announced))
        ready = []
        while sequence.followers and sequence.followers[0][0] <= end:
            ready += self._release(sequence, heapq.heappop(sequence.followers)[-1])
        return ready

    def abandon(self, sequence: Sequence) -> list[Sequence]:
        """The sequence will not compute what is left: who has waited for it."""
        self._withdraw(sequence, sequence.entered, sequence.announced)
        ready = [one for *_, follower in sequence.followers for one in self._release(sequence, follower)]
        sequence.followers, sequence.announced, sequence.pull = [], 0, Sequence.pull
        return ready

    def _withdraw(self, sequence: Sequence, begin: int, end: int) -> None:
        for key in sequence.keys[begin:end]:
            if self._of.get(key) is sequence:
                del self._of[key]

    @staticmethod
    def _release(producer: Sequence, follower: Sequence) -> list[Sequence]:
        if follower.awaited is not producer:  # it has gone its own way
            return []
        follower.awaited = None
        return [follower]
