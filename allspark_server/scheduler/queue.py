"""The sequences that wait."""

from __future__ import annotations

import heapq
from typing import Optional

from .sequence import Sequence, State


class WaitingQueue:
    """Waiting sequences by rank and by length, and the blocked ones beside them.

    Two heaps hold the same sequences; those that do not wait any more are dropped when met.
    """

    def __init__(self) -> None:
        self.waiting = 0  # sequences that could be admitted
        self.blocked = 0  # sequences that wait for something else first
        self.tokens = 0  # of both
        self._entries = 0
        self._ranked: list[tuple[tuple[float, int], int, Sequence]] = []
        self._by_length: list[tuple[int, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence, as waiting or as blocked if it says what it is blocked on."""
        self.tokens += len(sequence.tokens)
        if sequence.blocked_on:
            sequence.state = State.BLOCKED
            self.blocked += 1
        else:
            self._push(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """A blocked sequence waits from now on, at the place that its rank gives it."""
        self.blocked -= 1
        self._push(sequence)

    def remove(self, sequence: Sequence, state: State) -> None:
        """Takes a waiting or blocked sequence out, into `state`."""
        self.tokens -= len(sequence.tokens)
        if sequence.state is State.BLOCKED:
            self.blocked -= 1
            sequence.state = state
            return
        self.waiting -= 1
        sequence.state = state
        for heap in (self._ranked, self._by_length):
            if len(heap) > 2 * self.waiting + 64:  # nobody may ever meet those that have left
                heap[:] = [entry for entry in heap if entry[-1].state is State.WAITING]
                heapq.heapify(heap)

    def pop_first(self) -> Optional[Sequence]:
        """The waiting sequence of the lowest rank, which still counts as waiting: remove it or put it back."""
        while self._ranked:
            sequence = heapq.heappop(self._ranked)[-1]
            if sequence.state is State.WAITING:
                return sequence
        return None

    def put_back(self, sequence: Sequence) -> None:
        """Undoes pop_first."""
        self._entries += 1
        heapq.heappush(self._ranked, (sequence.rank, self._entries, sequence))

    def pop_shortest(self, longest: int) -> Optional[tuple[int, int, Sequence]]:
        """The entry (tokens, number, sequence) of the shortest waiting sequence, if it has at most `longest` tokens."""
        heap = self._by_length
        while heap and heap[0][0] <= longest:
            entry = heapq.heappop(heap)
            if entry[-1].state is State.WAITING:
                return entry
        return None

    def put_back_shortest(self, entry: tuple[int, int, Sequence]) -> None:
        """Undoes pop_shortest."""
        heapq.heappush(self._by_length, entry)

    def _push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.waiting += 1
        self.put_back(sequence)
        heapq.heappush(self._by_length, (len(sequence.tokens), self._entries, sequence))
