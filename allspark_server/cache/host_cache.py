"""the host cache: which spans it holds, and the copies that bring them there and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Of what was measured, how much stays with each new measurement.
_MEMORY = 0.9
# What is not worth the copying is tried again now and then: whatever made it slow may have gone.
_FORGET = 0.98


@dataclass
class Copies:
    """Of one step, which makes them before it computes anything: {span: (span of the host cache, key)}."""

    saved: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    restored: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.saved) + len(self.restored)

    def words(self) -> list[int]:
        """Of the plan's section."""
        words = [len(self.saved)]
        for copies in (self.saved, self.restored):
            for span, (host, key) in copies.items():
                words += (span, host, *(int.from_bytes(key[i : i + 4], "little", signed=True) for i in (0, 4, 8, 12)))
        return words


class CopyCosts:
    """What bringing a span back costs, and computing it anew, as measured while steps run. Seconds; 0: unknown."""

    def __init__(self, span_size: int):
        self._span_size = span_size
        self.copy = self.row = 0.0

    def learn(self, rows: int, seconds: float, copies: int, copy_seconds: float) -> None:
        """Takes notice of a step of so many rows, copies included in its time."""
        if copies:
            self.copy = _mix(self.copy, copy_seconds / copies)
        if rows >= self._span_size:  # of few rows a step's time is that of reading the weights
            self.row = _mix(self.row, (seconds - copy_seconds) / rows)

    def worthwhile(self) -> bool:
        """Whether to copy a span rather than compute it. Asked for each: an answer that was right once is doubted ever
        more.
        """
        if not self.copy or not self.row or self.copy < self._span_size * self.row:
            return True
        self.copy *= _FORGET
        return False


class HostCache:
    """Spans that were evicted from the cache, by their keys, the least recently used first to go.

    A span that is evicted is not copied until somebody is about to write to it: so a long prompt's admission, which
    takes many at once, does not hold up the next step. Until a step's plan is made, its copies are in `copies`.
    """

    def __init__(self, spans: int, span_size: int, held: Mapping[bytes, int] | None = None, lasting: bool = False):
        """`spans`: how many it holds; `held`: those that are there already. `lasting`: it outlives this process, so
        spans go there as soon as they are computed.
        """
        self.spans, self.lasting = spans, lasting
        self.costs = CopyCosts(span_size)
        self.copies = Copies()
        self._host_of: OrderedDict[bytes, int] = OrderedDict(held or {})
        taken = set(self._host_of.values())
        self._free = [host for host in range(spans - 1, -1, -1) if host not in taken]
        self._unsaved: dict[int, bytes] = {}  # evicted spans that still hold what they held
        self._span_of: dict[bytes, int] = {}  # the same
        self._busy: set[int] = set()  # spans of the host cache that `copies` name

    def __len__(self) -> int:
        return len(self._host_of) + len(self._unsaved)

    def __contains__(self, key: bytes) -> bool:
        return key in self._host_of or key in self._span_of

    def computed(self, key: bytes, span: int) -> None:
        """A span was computed and is in the cache."""
        if self.lasting and key not in self._host_of and self.costs.worthwhile():
            self._save(key, span)

    def evicted(self, key: bytes, span: int) -> None:
        """A span of the cache was given away. Nobody has written to it yet."""
        if key in self._host_of:
            self._host_of.move_to_end(key)
        elif key not in self._span_of and self.costs.worthwhile():
            self._unsaved[span] = key
            self._span_of[key] = span

    def before_writes(self, spans: Sequence[int]) -> None:
        """The step that is planned will write to these spans."""
        if self._unsaved:
            for span in spans:
                self._save_evicted(span)

    def restore(self, key: bytes, span: int) -> bool:
        """Brings what the key names back, to this span. False if it is no longer there."""
        if key in self._span_of:
            self._save_evicted(self._span_of[key])
        self._save_evicted(span)
        host = self._host_of.get(key)
        if host is None:
            return False
        self._host_of.move_to_end(key)
        self._busy.add(host)
        self.copies.restored[span] = (host, key)
        return True

    def take_copies(self) -> Copies | None:
        """Those of the step that is planned now."""
        if not self.copies:
            return None
        copies, self.copies = self.copies, Copies()
        self._busy.clear()
        return copies

    def cache_is_lost(self) -> None:
        """No span of the cache holds anything any more: what was still to be copied from there is lost, too."""
        for host, key in self.copies.saved.values():
            if self._host_of.get(key) == host:
                del self._host_of[key]
                self._free.append(host)
        self.copies = Copies()
        self._busy.clear()
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
        else:
            oldest = next(iter(self._host_of))
            if self._host_of[oldest] in self._busy:  # more copies in a step than it holds
                return
            host = self._host_of.pop(oldest)
        self._host_of[key] = host
        self._busy.add(host)
        self.copies.saved[span] = (host, key)


def _mix(old: float, new: float) -> float:
    return _MEMORY * old + (1 - _MEMORY) * new if old else new
