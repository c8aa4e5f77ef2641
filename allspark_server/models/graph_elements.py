"""What a graph of ops consists of: activations, weights and ops as data, and how each is divided among ranks.

Activations are buffers of shape [rows, width], fp32. The columns of a buffer are a list of blocks. Each block is
replicated on every rank or divided by a `Split`. Rows of weights are parts of the checkpoint's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from allspark_server.models.ops import Attribute
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.shard import Split

ALL_ROWS, OUTPUT_ROWS = "all", "outputs"


def _range(size: int, split: Split | None, rank: int, world: int) -> tuple[int, int]:
    """A rank's range of `size` features. The last unit of a split may reach past the end."""
    begin, end = (0, size) if split is None else split.range_of(rank, world)
    return begin, min(end, size)


@dataclass(frozen=True)
class Block:
    """Consecutive columns of an activation: `width` columns of the whole model, divided by `split` if it is set."""

    width: int
    split: Split | None = None

    def range_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of the rank's columns."""
        return _range(self.width, self.split, rank, world)

    def width_of(self, rank: int, world: int) -> int:
        """The number of the rank's columns."""
        begin, end = self.range_of(rank, world)
        return end - begin


@dataclass(frozen=True)
class RowSet:
    """Rows that a router makes within the step: `times` entries for each row of the row set `of`."""

    name: str
    of: str
    times: int


@dataclass(frozen=True)
class Tensor:
    """An activation buffer [rows, sum of the blocks' widths], fp32.

    rows: ALL_ROWS; OUTPUT_ROWS (rows that sample, or whose hidden states or log probabilities are requested); or the
    name of a row set.
    """

    name: str
    blocks: tuple[Block, ...]
    rows: str = ALL_ROWS

    @property
    def logit_rows(self) -> bool:
        """Whether the rows are OUTPUT_ROWS."""
        return self.rows == OUTPUT_ROWS

    def width_of(self, rank: int, world: int) -> int:
        """The number of the rank's columns."""
        return sum(block.width_of(rank, world) for block in self.blocks)


@dataclass(frozen=True)
class Part:
    """`rows` rows of a weight, divided by `split` if it is set.

    They are rows [first, first + rows) of a tensor of the checkpoint with `of` rows (0: it has no others). In a tensor
    of three dimensions, `expert` is the index in the first one.
    unit, units: if set, only ranks that hold this unit of `units` have the part (whole experts).
    """

    tensor: str
    rows: int
    split: Split | None = None
    first: int = 0
    of: int = 0
    expert: int | None = None
    unit: int | None = None
    units: Split | None = None

    def range_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of the rank's rows within the part."""
        held = self.units_of(rank, world)
        return _range(self.rows, self.split, rank, world) if held is None or self.unit in held else (0, 0)

    def units_of(self, rank: int, world: int) -> range | None:
        """The units whose parts the rank holds; None if every rank has this part."""
        return None if self.unit is None or self.units is None else range(*self.units.units_of(rank, world))

    @property
    def stored_rows(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.of or self.rows

    @property
    def whole(self) -> bool:
        """Whether the part is a whole tensor of the checkpoint."""
        return self.first == 0 and self.stored_rows == self.rows and self.expert is None


@dataclass(frozen=True)
class Weight:
    """A weight of the executor: tensors of the checkpoint stacked by rows, or constants computed from the config.

    columns: in_features of a matrix, 0 for a vector.
    column_split: how in_features are divided (row-parallel layers).
    first_rank_only: zeros on the other ranks (the bias of a row-parallel layer, which all_reduce adds up), unless ranks
    hold whole experts.
    values: the constants; values_split: how they are divided.
    stored: the format of a matrix that is serialized in quantized form.
    experts: the number of experts whose parts follow one another, as many parts for each; 0: not a stack of experts.
    """

    name: str
    parts: tuple[Part, ...] = ()
    columns: int = 0
    column_split: Split | None = None
    first_rank_only: bool = False
    values: tuple[float, ...] = ()
    stored: WeightFormat | None = None
    values_split: Split | None = None
    experts: int = 0

    @property
    def stored_format(self) -> WeightFormat:
        """`stored` of a weight that is serialized in quantized form."""
        if self.stored is None:
            raise ValueError(f"weight {self.name!r} is not quantized")
        return self.stored

    @property
    def is_matrix(self) -> bool:
        """Whether it has columns."""
        return self.columns > 0

    def rows_of(self, rank: int, world: int) -> int:
        """The number of rows, or of a vector's values, that the rank holds."""
        if self.values:
            begin, end = _range(len(self.values), self.values_split, rank, world)
            return end - begin
        return sum(end - begin for begin, end in self.ranges_of(rank, world))

    def ranges_of(self, rank: int, world: int) -> Iterator[tuple[int, int]]:
        """The half-open range of the rank's rows within each part."""
        known: dict[tuple[int, int, int], tuple[range | None, tuple[int, int]]] = {}  # hundreds of experts are alike
        for part in self.parts:
            key = part.rows, id(part.split), id(part.units)
            if key not in known:
                known[key] = part.units_of(rank, world), _range(part.rows, part.split, rank, world)
            held, rows = known[key]
            yield rows if held is None or part.unit is None or part.unit in held else (0, 0)

    def experts_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of a stack's experts that the rank holds."""
        units = self.parts[0].units
        return (0, self.experts) if units is None else units.units_of(rank, world)

    def is_zero_on(self, rank: int, world: int) -> bool:
        """Whether a vector is zeros on this rank because only another rank adds it."""
        units = self.parts[0].units
        return self.first_rank_only and rank > 0 and not (units is not None and units.divides(world))

    def column_range_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of the rank's in_features."""
        return (0, self.columns) if self.column_split is None else self.column_split.range_of(rank, world)

    def elements_of(self, rank: int, world: int) -> int:
        """The number of elements that the rank holds."""
        begin, end = self.column_range_of(rank, world)
        return self.rows_of(rank, world) * (end - begin if self.is_matrix else 1)


@dataclass(frozen=True)
class Op:
    """One operation. inputs, outputs and weights are names; attrs are those of the whole model, not of a rank."""

    type: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    attrs: dict[str, Attribute] = field(default_factory=dict)


def in_groups(size: int, least: int = 0) -> Split:
    """Features between two layers, in multiples of 32 where their number allows: the second layer's matrix is cut along
    K, in whole groups. least: see Split.
    """
    unit = math.gcd(size, 32)
    return Split(size // unit, unit, least=least)
