"""How many spans sequences have in each cache group."""

from __future__ import annotations

from dataclasses import dataclass

#: In a sequence's span table: no span, as the group's window has left these positions behind.
NO_SPAN = -1


@dataclass(frozen=True)
class SpanGroups:
    """The cache groups of a model: first those of full attention, then those with windows. All take their spans, which
    are of one size in bytes, from one pool.

    `size`: positions of a span. `windows`: of each group, how many of the last positions its layers see; 0: all.
    `ahead`: of a prompt, how many positions beside the window a windowed group has spans for: what steps under way and
    the next one compute.
    """

    size: int
    windows: tuple[int, ...] = (0,)
    ahead: int = 0

    @property
    def windowed(self) -> list[tuple[int, int]]:
        """(number, window) of the groups that have one."""
        return [(group, window) for group, window in enumerate(self.windows) if window]

    def count_for(self, positions: int) -> int:
        """Spans of one group that hold so many positions."""
        return -(-positions // self.size)

    def behind(self, window: int, position: int) -> int:
        """Spans at the front that no row sees from `position` on."""
        return max(0, position + 1 - window) // self.size if window else 0

    def end(self, window: int, begin: int, positions: int) -> int:
        """Where the table of a history of so many positions ends, as long as it is being computed, if the first `begin`
        spans are behind the window.
        """
        count = self.count_for(positions)
        return min(count, begin + self.count_for(window - 1 + self.ahead) + 1) if window else count

    def needed(self, positions: int) -> int:
        """Spans that a sequence with a history of so many positions has at most, in all groups."""
        return sum(self.end(window, 0, positions) for window in self.windows)

    def positions(self, spans: int) -> int:
        """What so many spans hold of sequences that are no longer than the windows."""
        return spans // len(self.windows) * self.size
