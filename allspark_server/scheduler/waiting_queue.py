"""The waiting queue."""

from __future__ import annotations

import heapq
from typing import Any

from .sequence import Sequence, State
from .tenants import Account, Tenants

ShortEntry = tuple[int, int, Sequence]


class WaitingQueue:
    """Waiting sequences, sorted by `order` within each tenant, and by length. It also counts the blocked sequences.

    Both kinds of heap hold the same sequences. A sequence that has left the queue is dropped when it reaches the top.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.waiting = 0  # sequences that could be admitted
        self.blocked = 0  # sequences that wait for something other than a slot and spans
        self.bytes = 0  # of both
        self._tenants = tenants
        self._entries = 0
        self._turns: list[tuple[float, int, Account]] = []  # a heap by time; an account's time may have grown since
        self._by_length: list[ShortEntry] = []

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence; it is blocked if `blocked_on` is set, otherwise it waits."""
        size = sequence.size
        self.bytes += size
        sequence.account = self._tenants.enter_queue(sequence.tenant, size)
        if sequence.blocked_on:
            sequence.state = State.BLOCKED
            self.blocked += 1
        else:
            self._push(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """Makes a blocked sequence a waiting one, sorted by its `order`."""
        self.blocked -= 1
        self._push(sequence)

    def block(self, sequence: Sequence) -> None:
        """Blocks a waiting sequence."""
        self.waiting -= 1
        sequence.account.waiting -= 1
        self.blocked += 1
        sequence.state = State.BLOCKED
        self._compact(sequence.account)

    def remove(self, sequence: Sequence, state: State) -> None:
        """Removes a waiting or blocked sequence, which gets `state`."""
        account, size = sequence.account, sequence.size
        self.bytes -= size
        if sequence.state is State.BLOCKED:
            self.blocked -= 1
        else:
            self.waiting -= 1
            account.waiting -= 1
        sequence.state = state
        self._tenants.leave_queue(account, size, state is State.RUNNING)
        self._compact(account)

    def note_growth(self, sequence: Sequence, size: int) -> None:
        """A sequence in the queue has grown by `size` bytes."""
        self.bytes += size
        sequence.account.queued_bytes += size

    def first(self) -> Sequence | None:
        """The first waiting sequence of the tenant whose turn it is. It stays in the queue: remove it,
        block it or set it aside.
        """
        turns = self._turns
        while turns:
            time, _, account = turns[0]
            by_order = account.by_order
            while by_order and by_order[0][-1].state is not State.WAITING:
                heapq.heappop(by_order)
            if not by_order:
                heapq.heappop(turns)
                account.listed = False
            elif account.time > time:
                heapq.heapreplace(turns, (account.time, self._entry(), account))
            else:
                return by_order[0][-1]
        return None

    def set_aside(self, sequence: Sequence) -> Sequence:
        """Removes the first sequence from the order. It still counts as waiting: call `put_back` later."""
        heapq.heappop(sequence.account.by_order)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        """Undoes `set_aside`."""
        account = sequence.account
        heapq.heappush(account.by_order, (sequence.order, self._entry(), sequence))
        if not account.listed:
            account.listed = True
            heapq.heappush(self._turns, (account.time, self._entry(), account))

    def pop_shortest(self, longest: int) -> ShortEntry | None:
        """The entry (tokens, number, sequence) of the shortest waiting sequence, if it has at most `longest` tokens."""
        heap = self._by_length
        while heap and heap[0][0] <= longest:
            entry = heapq.heappop(heap)
            if entry[-1].state is State.WAITING:
                return entry
        return None

    def put_back_shortest(self, entry: ShortEntry) -> None:
        """Undoes `pop_shortest`."""
        heapq.heappush(self._by_length, entry)

    def _entry(self) -> int:
        self._entries += 1
        return self._entries

    def _push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.waiting += 1
        sequence.account.waiting += 1
        self.put_back(sequence)
        heapq.heappush(self._by_length, (len(sequence.tokens), self._entry(), sequence))

    def _compact(self, account: Account) -> None:
        """Removes sequences that have left, if there are many: they may never reach the top of a heap."""
        heaps: list[tuple[list[Any], int]] = [(account.by_order, account.waiting), (self._by_length, self.waiting)]
        for heap, waiting in heaps:
            if len(heap) > 2 * waiting + 64:
                heap[:] = [entry for entry in heap if entry[-1].state is State.WAITING]
                heapq.heapify(heap)
        if len(self._turns) > 2 * len(self._tenants) + 64:
            for _, _, other in self._turns:
                other.listed = other.waiting > 0
            self._turns[:] = [entry for entry in self._turns if entry[-1].listed]
            heapq.heapify(self._turns)
