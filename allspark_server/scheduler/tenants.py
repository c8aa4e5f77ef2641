"""Who requests come from, and what has been computed for each."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .sequence import Sequence

# Of tenants that have nothing in the engine: whose times are remembered, so that leaving does not make one a newcomer.
_REMEMBERED = 1024
_FIRST_ACCOUNTS = 8


class Account:
    """What the scheduler keeps of one tenant. `queued` sequences, those that are blocked included, have `queued_bytes`;
    `waiting` of them could be admitted: they are in `ranked`, a heap by rank that also has some that do not wait any
    more. `listed`: it is among those whose turn may come.
    """

    def __init__(self, name: str, index: int, tenants: Tenants):
        self.name, self.index, self._tenants = name, index, tenants
        self.queued = self.queued_bytes = self.waiting = 0
        self.ranked: list[tuple[tuple[float, int], int, Sequence]] = []
        self.listed = False

    @property
    def time(self) -> float:
        """Its virtual time: rows that were computed for it. Whoever has the least goes first."""
        return float(self._tenants.times[self.index])

    @property
    def running(self) -> int:
        """Its sequences with a slot."""
        return int(self._tenants.running[self.index])


class Tenants:
    """Those that have sequences in the engine, with a virtual time each (Sheng et al., "Fairness in serving large
    language models", 2024: the virtual token counter).

    One that has something in the queue again, after it had nothing, begins not before the one that was served last:
    nobody saves up for later by not asking.
    """

    def __init__(self, slots: int):
        self.times = np.zeros(_FIRST_ACCOUNTS)  # by the accounts' indices
        self.running = np.zeros(_FIRST_ACCOUNTS, np.int64)
        self._of_slot = np.zeros(slots, np.int64)
        self.accounts: dict[str, Account] = {}
        self._at: list[Account | None] = [None] * _FIRST_ACCOUNTS
        self._free = list(range(_FIRST_ACCOUNTS - 1, -1, -1))
        self._departed: OrderedDict[str, float] = OrderedDict()
        self._floor = 0.0  # the time of the one that was served last, before it was

    def __len__(self) -> int:
        return len(self.accounts)

    def enter_queue(self, name: str, size: int) -> Account:
        """The account of a tenant, one of whose sequences, of so many bytes, enters the queue."""
        account = self.accounts.get(name)
        if account is None:
            if not self._free:
                self._grow()
            account = self.accounts[name] = Account(name, self._free.pop(), self)
            self._at[account.index] = account
            self.times[account.index] = self._departed.pop(name, 0.0)
        if not account.queued:
            self.times[account.index] = max(account.time, self._floor)
        account.queued += 1
        account.queued_bytes += size
        return account

    def leave_queue(self, account: Account, size: int, running: bool) -> None:
        """One of its sequences leaves the queue: `running` into a slot (see `enter_slot`), otherwise for good."""
        account.queued -= 1
        account.queued_bytes -= size
        if not running:
            self._forget(account)

    def enter_slot(self, account: Account, slot: int) -> None:
        """One of its sequences, which has left the queue, is in this slot."""
        self.running[account.index] += 1
        self._of_slot[slot] = account.index

    def leave_slot(self, account: Account) -> None:
        """One of its sequences has left its slot; if it goes back to the queue, it is there already."""
        self.running[account.index] -= 1
        self._forget(account)

    def serve(self, account: Account, rows: int) -> None:
        """It is its turn: so many rows of a prompt are computed for it."""
        self._floor = max(self._floor, account.time)
        self.times[account.index] += rows

    def charge_slots(self, slots: np.ndarray) -> None:
        """A row is computed for each of these slots."""
        self.times += np.bincount(self._of_slot[slots], minlength=len(self.times))

    def busiest(self) -> Account:
        """The one with the most slots. There must be one."""
        return self._at[int(self.running.argmax())]

    def _grow(self) -> None:
        size = len(self.times)
        self._free = list(range(2 * size - 1, size - 1, -1))
        self._at += [None] * size
        self.times = np.concatenate([self.times, np.zeros_like(self.times)])
        self.running = np.concatenate([self.running, np.zeros_like(self.running)])

    def _forget(self, account: Account) -> None:
        if account.queued or account.running:
            return
        del self.accounts[account.name]
        self._at[account.index] = None
        self._free.append(account.index)
        if not self.accounts:  # nobody is left to compare anybody with
            self._departed.clear()
            self._floor = 0.0
            return
        self._departed[account.name] = account.time
        if len(self._departed) > _REMEMBERED:
            self._departed.popitem(last=False)
