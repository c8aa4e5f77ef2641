"""The number of spans that sequences need in each cache group."""

from __future__ import annotations

from dataclasses import dataclass

#: In a sequence's span table: no span, because these positions are before the group's attention window.
NO_SPAN = -1
#: Recurrent states advance at multiples of this many positions (kStateStep in native/batch/batch.h).
STATE_STEP = 64


@dataclass(frozen=True)
class SpanGroups:
    """The cache groups of a model: groups of full attention first, then groups with attention windows.

    All groups take spans of one size in bytes from one pool. size: positions of a span. windows: for each group, the
    number of last positions that its layers attend to; 0: all. ahead: the positions after the window for which a
    windowed group has spans: those that submitted steps and the next one compute. state_spans: the number of spans that
    hold a checkpoint of a sequence's recurrent state; 0: the model has no state.
    """

    size: int
    windows: tuple[int, ...] = (0,)
    ahead: int = 0
    state_spans: int = 0

    @property
    def windowed(self) -> list[tuple[int, int]]:
        """(group, window) of the groups that have a window."""
        return [(group, window) for group, window in enumerate(self.windows) if window]

    def count_for(self, positions: int) -> int:
        """The number of spans of one group that hold `positions` positions."""
        return -(-positions // self.size)

    def passed_spans(self, window: int, position: int) -> int:
        """The number of first spans to which no row from `position` on attends."""
        return max(0, position + 1 - window) // self.size if window else 0

    def end(self, window: int, begin: int, positions: int) -> int:
        """The end of the span table of a history of `positions` positions while it is computed.

        begin: the number of first spans that are before the window.
        """
        count = self.count_for(positions)
        return min(count, begin + self.count_for(window - 1 + self.ahead) + 1) if window else count

    def needed(self, positions: int) -> int:
        """The most spans of all groups that a sequence with a history of `positions` positions has."""
        return sum(self.end(window, 0, positions) for window in self.windows)

    def positions(self, spans: int) -> int:
        """The positions that `spans` spans hold, for sequences not longer than the windows."""
        return spans // len(self.windows) * self.size
