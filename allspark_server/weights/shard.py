"""How weights and activations are divided among the ranks of a tensor-parallel group.

Ranges are contiguous and balanced, but not always equal: a Xeon 6 has three NUMA nodes per socket, and 14 heads on 3
ranks become 5, 5 and 4. Several query heads share a KV head (grouped-query attention). A rank keeps a copy of every KV
head that its query heads read, so two neighbouring ranks may hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass


def split(n: int, rank: int, world: int) -> tuple[int, int]:
    """The half-open range of `n` units that rank `rank` of `world` holds. The first `n % world` ranks hold one more."""
    base, extra = divmod(n, world)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (1 if rank < extra else 0)


@dataclass(frozen=True)
class Split:
    """A dimension divided among ranks: `units` units in balanced ranges, each unit `size` features wide.

    group: if above 1, units are query heads and the features belong to units // group KV heads; a rank's range covers
    each KV head that one of its query heads reads.
    least: if a rank would hold fewer features than this, the dimension is not divided: every rank holds all of it.
    unless: another dimension. If that one is divided, this one is not (experts are distributed whole only where slices
    of each expert would be too narrow).
    """

    units: int
    size: int = 1
    group: int = 1
    least: int = 0
    unless: Split | None = None

    def divides(self, world: int) -> bool:
        """Whether `world` ranks hold different parts."""
        if self.unless is not None and self.unless.divides(world):
            return False
        return self.units // world * self.size >= self.least

    @property
    def width(self) -> int:
        """The number of features of the whole dimension."""
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
