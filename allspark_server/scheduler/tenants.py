"""Fair sharing among tenants: each has a virtual time, the rows computed for it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .sequence import Sequence

# The number of tenants without sequences whose times are remembered. Otherwise a tenant could reset its time by
# letting its last sequence end.
_REMEMBERED = 1024
_FIRST_ACCOUNTS = 8


class Account:
    """The scheduler's record of one tenant.

    `queued`: its sequences in the queue, blocked ones included, which take `queued_bytes`. `waiting`: the number of
    these that could be admitted; they are in `by_order`, a heap, which may also hold sequences that have left the
    queue. `listed`: the queue's heap of turns has an entry for it.
    """

    def __init__(self, name: str, index: int, tenants: Tenants):
        self.name, self.index, self._tenants = name, index, tenants
        self.queued = self.queued_bytes = self.waiting = 0
        self.by_order: list[tuple[tuple[float, int], int, Sequence]] = []
        self.listed = False

    @property
    def time(self) -> float:
        """Its virtual time: the rows computed for it. The tenant with the least time is served first."""
        return float(self._tenants.times[self.index])

    @property
    def running(self) -> int:
        """Its sequences with a slot."""
        return int(self._tenants.running[self.index])


class Tenants:
    """The tenants that have sequences in the engine, each with a virtual time (the virtual token counter of Sheng et
    al., "Fairness in serving large language models", 2024). `accounts`: by name; any thread may read it.

    A tenant whose queue was empty gets at least the time of the tenant served last, so idle tenants gain no credit.
    """

    def __init__(self, slots: int):
        self.times = np.zeros(_FIRST_ACCOUNTS)  # by index of the account
        self.running = np.zeros(_FIRST_ACCOUNTS, np.int64)
        self._of_slot = np.zeros(slots, np.int64)
        self.accounts: dict[str, Account] = {}
        self._at: list[Account | None] = [None] * _FIRST_ACCOUNTS
        self._free = list(range(_FIRST_ACCOUNTS - 1, -1, -1))
        self._departed: OrderedDict[str, float] = OrderedDict()
        self._floor = 0.0  # the time of the tenant served last, before it was served

    def __len__(self) -> int:
        return len(self.accounts)

    def enter_queue(self, name: str, size: int) -> Account:
        """Counts a sequence of `size` bytes that enters the queue. Returns its tenant's account."""
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
        """One of its sequences leaves the queue, into a slot if `running` (see `enter_slot`)."""
        account.queued -= 1
        account.queued_bytes -= size
        if not running:
            self._forget(account)

    def enter_slot(self, account: Account, slot: int) -> None:
        """One of its sequences, which has left the queue, takes this slot."""
        self.running[account.index] += 1
        self._of_slot[slot] = account.index

    def leave_slot(self, account: Account) -> None:
        """One of its sequences has left its slot. If it was preempted, the caller has put it into the queue before."""
        self.running[account.index] -= 1
        self._forget(account)

    def serve(self, account: Account, rows: int) -> None:
        """Charges the tenant whose turn it is for this many prompt rows."""
        self._floor = max(self._floor, account.time)
        self.times[account.index] += rows

    def charge_slots(self, slots: np.ndarray) -> None:
        """Charges tenants for a row in each of these slots."""
        self.times += np.bincount(self._of_slot[slots], minlength=len(self.times))

    def busiest(self) -> Account:
        """The tenant with the most slots. There must be one."""
        account = self._at[int(np.argmax(self.running))]
        assert account is not None
        return account

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
        if not self.accounts:  # no tenant is left to compare with
            self._departed.clear()
            self._floor = 0.0
            return
        self._departed[account.name] = account.time
        if len(self._departed) > _REMEMBERED:
            self._departed.popitem(last=False)
