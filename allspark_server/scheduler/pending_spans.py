"""Spans being computed by running sequences. Other sequences wait for them instead of computing them again."""

from __future__ import annotations

import heapq

from .sequence import Sequence


class PendingSpans:
    """Full spans of histories that running sequences compute, by key, and the sequences that wait for them."""

    def __init__(self) -> None:
        self._producers: dict[bytes, Sequence] = {}
        self._waits = 0

    def announce(self, sequence: Sequence, begin: int, end: int) -> None:
        """The sequence, whose keys are known, will compute its spans begin ... end-1."""
        sequence.announced = end
        for key in sequence.keys[begin:end]:
            self._producers.setdefault(key, sequence)

    def find(self, keys: list[bytes], begin: int) -> tuple[Sequence | None, int]:
        """The sequence that computes the span of keys[begin], and the end of the keys that it will compute."""
        producer = self._producers.get(keys[begin]) if begin < len(keys) else None
        end = begin
        while producer is not None and end < len(keys) and self._producers.get(keys[end]) is producer:
            end += 1
        return producer, end

    def wait(self, sequence: Sequence, producer: Sequence, spans: int) -> None:
        """The sequence waits until the producer has entered `spans` spans into the prefix cache. If the sequence's turn
        is earlier than the producer's, the producer gets that turn.
        """
        self._waits += 1
        sequence.awaited = producer
        heapq.heappush(producer.followers, (spans, self._waits, sequence))
        producer.inherited_turn = min(producer.inherited_turn, sequence.turn)

    def arrived(self, sequence: Sequence, begin: int, end: int) -> list[Sequence]:
        """Spans begin ... end-1 of the sequence are in the prefix cache. Returns the sequences that waited for them."""
        self._withdraw(sequence, begin, min(end, sequence.announced))
        ready = []
        while sequence.followers and sequence.followers[0][0] <= end:
            ready += self._release(sequence, heapq.heappop(sequence.followers)[-1])
        return ready

    def abandon(self, sequence: Sequence) -> list[Sequence]:
        """The sequence will not compute the rest of its spans. Returns the sequences that waited for them."""
        self._withdraw(sequence, sequence.entered, sequence.announced)
        ready = [one for *_, follower in sequence.followers for one in self._release(sequence, follower)]
        sequence.followers, sequence.announced, sequence.inherited_turn = [], 0, Sequence.inherited_turn
        return ready

    def _withdraw(self, sequence: Sequence, begin: int, end: int) -> None:
        for key in sequence.keys[begin:end]:
            if self._producers.get(key) is sequence:
                del self._producers[key]

    @staticmethod
    def _release(producer: Sequence, follower: Sequence) -> list[Sequence]:
        if follower.awaited is not producer:  # it does not wait any more
            return []
        follower.awaited = None
        return [follower]
