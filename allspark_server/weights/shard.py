"""How weights and activations are divided among the ranks of a tensor-parallel group.

Ranges are contiguous and balanced, and need not be even: Xeon 6 has three NUMA nodes a socket, so 14 heads on 3 ranks
become 5, 5 and 4. KV heads are shared by several query heads (grouped-query attention): a rank keeps a copy of every
KV head that its query heads read, so neighbouring ranks may hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass


def split(n: int, rank: int, world: int) -> tuple[int, int]:
    """The half-open range (begin, end) of `n` units that `rank` of `world` holds; the first ranks hold one more."""
    base, extra = divmod(n, world)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (1 if rank < extra else 0)


@dataclass(frozen=True)
class Split:
    """A dimension divided among ranks: `units` units, balanced, each `size` features wide.

    With `group` > 1 the units are query heads and the features belong to units // group KV heads: a rank's range covers
    each KV head that one of its query heads reads.

    least: where a rank would hold fewer features, every rank holds all of them. unless: a dimension that is divided
    instead, where it can be: then every rank holds all of this one (whole experts are, where slices of each would be
    too narrow).
    """

    units: int
    size: int = 1
    group: int = 1
    least: int = 0
    unless: Split | None = None

    def divides(self, world: int) -> bool:
        """Whether ranks hold different parts."""
        if self.unless is not None and self.unless.divides(world):
            return False
        return self.units // world * self.size >= self.least

    @property
    def width(self) -> int:
        """Features of the whole dimension."""
        return self.units // self.group * self.size

    def units_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of units (KV heads when group > 1) that `rank` holds."""
        begin, end = split(self.units, rank, world) if self.divides(world) else (0, self.units)
        if self.group == 1 or begin == end:
            return begin // self.group, end // self.group
        return begin // self.group, (end - 1) // self.group + 1

    def range_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of features that `rank` holds."""
        begin, end = self.units_of(rank, world)
        return begin * self.size, end * self.size
