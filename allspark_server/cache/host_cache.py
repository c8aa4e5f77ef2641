"""The host cache: the spans that it holds, and the copies that save and restore them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Weight of the old average when a new measurement is added to it.
_MEMORY = 0.9
# Factor on the estimated cost of a copy each time that copying is rejected. The cost falls, so copies are tried again
# later, in case their slowness was temporary.
_FORGET = 0.98
# Bytes in a second that copies from the host cache are expected to reach, with their checksums, on any machine.
_EXPECTED_RATE = 2e9


@dataclass
class Copies:
    """The copies of one step, made before it computes anything: {span: (span of the host cache, key)}."""

    saved: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    restored: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.saved) + len(self.restored)

    def words(self) -> np.ndarray:
        """The words of the plan's section COPIES."""
        words = np.empty(1 + 6 * len(self), "<i4")
        words[0], table = len(self.saved), words[1:].reshape(-1, 6)
        table[:, 0] = [*self.saved, *self.restored]
        places = [*self.saved.values(), *self.restored.values()]
        table[:, 1] = [host for host, _ in places]
        table[:, 2:] = np.frombuffer(b"".join([key for _, key in places]), "<i4").reshape(-1, 4)
        return words


class CopyCosts:
    """Measured costs in seconds: copy, of restoring a span; row, of computing a row. 0: unknown."""

    def __init__(self, span_size: int, span_bytes: int = 0):
        """span_bytes: 0: unknown."""
        self._span_size = span_size
        self._expected = span_bytes / _EXPECTED_RATE
        self.copy = self.row = 0.0

    @property
    def expected_copy(self) -> float:
        """As `copy`; before that is measured, what it will hardly exceed. 0: unknown."""
        return self.copy or self._expected

    def learn(self, rows: int, seconds: float, copies: int, copy_seconds: float) -> None:
        """Records a step with `rows` rows, whose time `seconds` includes its copies' time."""
        if copies:
            self.copy = _mix(self.copy, copy_seconds / copies)
        if rows >= self._span_size:  # with few rows, a step takes the time of reading the weights
            self.row = _mix(self.row, (seconds - copy_seconds) / rows)

    def worthwhile(self) -> bool:
        """Whether to copy a span instead of computing it. Each rejection lowers the estimated cost of a copy."""
        if not self.copy or not self.row or self.copy < self._span_size * self.row:
            return True
        self.copy *= _FORGET
        return False


class HostCache:
    """Spans that were evicted from the cache, by key. The least recently used one is evicted from here first.

    An evicted span is copied only before the first write to it. So the admission of a long prompt, which evicts many
    spans at once, does not delay the next step. copies: the copies of the step that is being planned.
    """

    def __init__(self, spans: int, span_size: int, held: Mapping[bytes, int] | None = None, lasting: bool = False,
                 span_bytes: int = 0):
        """spans: its capacity. held: the spans that it already holds, by key. lasting: it outlives this process, so
        spans are saved as soon as they are computed. span_bytes: of a span on one rank; 0: unknown.
        """
        self.spans, self.lasting = spans, lasting
        self.costs = CopyCosts(span_size, span_bytes)
        self.copies = Copies()
        self._host_of: OrderedDict[bytes, int] = OrderedDict(held or {})
        taken = set(self._host_of.values())
        self._free = [host for host in range(spans - 1, -1, -1) if host not in taken]
        self._unsaved: dict[int, bytes] = {}  # keys of evicted spans that are not overwritten yet
        self._span_of: dict[bytes, int] = {}  # the inverse of _unsaved
        self._busy: set[int] = set()  # spans of the host cache that `copies` uses

    def __len__(self) -> int:
        return len(self._host_of) + len(self._unsaved)

    def __contains__(self, key: bytes) -> bool:
        return key in self._host_of or key in self._span_of

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether it is here."""
        saved, unsaved = self._host_of, self._span_of
        return [key in saved or key in unsaved for key in keys]

    def computed(self, key: bytes, span: int) -> None:
        """Called when a span was computed and is in the cache."""
        if self.lasting and key not in self._host_of and self.costs.worthwhile():
            self._save(key, span)

    def evicted(self, key: bytes, span: int) -> None:
        """Called when a span of the cache was evicted and is not overwritten yet."""
        if key in self._host_of:
            self._host_of.move_to_end(key)
        elif key not in self._span_of and self.costs.worthwhile():
            self._unsaved[span] = key
            self._span_of[key] = span

    def before_writes(self, spans: Sequence[int]) -> None:
        """Called before the planned step writes to these spans."""
        if self._unsaved:
            for span in spans:
                self._save_evicted(span)

    def restore(self, keys: Sequence[bytes], spans: Sequence[int]) -> int:
        """Plans copies of the keys' content to these spans, in order. Returns their number, which is less if the host
        cache no longer holds the next one.
        """
        count = 0
        evicted: list[int] = []
        if self._unsaved:
            evicted = [index for index, (key, span) in enumerate(zip(keys, spans))
                       if key in self._span_of or span in self._unsaved]
        for index in evicted:   # saving what is evicted may evict what would be restored next
            count += self._restore(keys[count:index], spans[count:index])
            if count < index:
                return count
            if keys[index] in self._span_of:
                self._save_evicted(self._span_of[keys[index]])
            self._save_evicted(spans[index])
        return count + self._restore(keys[count:], spans[count:])

    def _restore(self, keys: Sequence[bytes], spans: Sequence[int]) -> int:
        found = list(map(self._host_of.get, keys))
        if None in found:
            keys = keys[: found.index(None)]
        hosts = [self._host_of[key] for key in keys]
        for key in keys:
            self._host_of.move_to_end(key)
        self._busy.update(hosts)
        self.copies.restored.update(zip(spans, zip(hosts, keys)))
        return len(keys)

    def save(self, key: bytes, span: int | None) -> None:
        """Plans a copy of the key's content to the host cache, unless it is there. span: the one in the cache; None if
        it was evicted.
        """
        if key in self._span_of:
            self._save_evicted(self._span_of[key])
        elif key in self._host_of:
            self._host_of.move_to_end(key)
        elif span is not None:
            self._save(key, span)

    def host_span(self, key: bytes) -> int | None:
        """The span of the host cache that holds the key's content once the planned copies are made; None for none."""
        return self._host_of.get(key)

    def reserve(self, count: int, beside: Sequence[bytes]) -> list[int]:
        """Up to `count` spans of the host cache, for content that comes from elsewhere: see `commit`. Spans with the
        keys `beside` are evicted last. Steps that were planned before may still use them.
        """
        for key in reversed(beside):
            if key in self._host_of:
                self._host_of.move_to_end(key)
        hosts: list[int] = []
        while len(hosts) < count and (self._free or self._host_of):
            if self._free:
                hosts.append(self._free.pop())
                continue
            oldest = next(iter(self._host_of))
            if self._host_of[oldest] in self._busy:
                break
            hosts.append(self._host_of.pop(oldest))
        return hosts

    def commit(self, hosts: Sequence[int], keys: Mapping[int, bytes]) -> None:
        """Ends a reservation. keys: of the spans that were filled; the others are free again."""
        for host in hosts:
            key = keys.get(host)
            if key is None or key in self._host_of:
                self._free.append(host)
            else:
                self._host_of[key] = host

    def take_copies(self) -> Copies | None:
        """The copies of the planned step, or None. Starts the next step's."""
        if not self.copies:
            return None
        copies, self.copies = self.copies, Copies()
        self._busy.clear()
        return copies

    def cache_is_lost(self) -> None:
        """Called when the cache lost its content: spans that were not copied yet are lost too."""
        for host, key in self.copies.saved.values():
            if self._host_of.get(key) == host:
                del self._host_of[key]
                self._free.append(host)
        self.copies = Copies()
        self._busy.clear()
        self._unsaved.clear()
        self._span_of.clear()

    def reset(self) -> None:
        """Forgets all spans but those that the planned copies use."""
        for key, host in list(self._host_of.items()):
            if host not in self._busy:
                del self._host_of[key]
                self._free.append(host)
        self._unsaved.clear()
        self._span_of.clear()

    def _save_evicted(self, span: int) -> None:
        key = self._unsaved.pop(span, None)
        if key is not None:
            del self._span_of[key]
            if key not in self._host_of:
                self._save(key, span)

    def _save(self, key: bytes, span: int) -> None:
        if span in self.copies.saved:
            return
        if self._free:
            host = self._free.pop()
        elif not self._host_of:  # all are reserved
            return
        else:
            oldest = next(iter(self._host_of))
            if self._host_of[oldest] in self._busy:  # the step already uses every span of the host cache
                return
            host = self._host_of.pop(oldest)
        self._host_of[key] = host
        self._busy.add(host)
        self.copies.saved[span] = (host, key)


def _mix(old: float, new: float) -> float:
    return _MEMORY * old + (1 - _MEMORY) * new if old else new
