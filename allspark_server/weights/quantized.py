"""Quantized matrices as they pass from a file to the native library: plain rows of codes, scales and what else there
is, whatever packed them. A rank's slice of K whose columns have an order of their own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.runtime.native import native_library
from allspark_server.weights.formats import SMALLEST_GROUP, WeightFormat

T = TypeVar("T")
PIECE_ELEMENTS, MAX_WORKERS = 1 << 22, 16


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows [n, k] of a quantized matrix, each array a view of any strides. codes: uint8 [n, k], or of 4 bits
    [n, ceil(k / 2)] with the even column in the lower half. scales [n, groups] of the format's type (BF16: uint16), or
    int8 of nested ones. zeros: offsets of the same type, or uint8 zero points. super_scales, super_offsets: float16
    [n, super-groups].

    packing: how codes lie if not so, as the file has them (the native library's fill_quantized); of blocks, which hold
    their scales as well, nothing else is given. skipped: of the first word of "octets", rows before the first.
    """

    codes: np.ndarray
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None
    super_scales: np.ndarray | None = None
    super_offsets: np.ndarray | None = None
    packing: str = "rows"
    skipped: int = 0

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        return self.codes, self.scales, self.zeros, self.super_scales, self.super_offsets

    def plain(self, form: WeightFormat, columns: int) -> QuantizedRows:
        """The same with plain rows of codes and scales of their own."""
        if self.packing == "rows":
            return self
        native = native_library()
        if self.scales is not None:
            codes = native.unpack_codes(self.codes, form.bits, columns, self.packing, self.skipped, len(self.scales))
            return replace(self, codes=codes, packing="rows", skipped=0)
        codes, scale, offset = native.unpack_codes(self.codes, form.bits, columns, self.packing), *block_floats(self)
        if not form.layout.super_group:
            return QuantizedRows(codes, scale, offset)
        scales, minimums = native.unpack_scales(self.codes, columns, self.packing)
        if offset is None:
            return QuantizedRows(codes, scales, None, scale)
        minus = (offset.view(np.uint16) ^ np.uint16(0x8000)).view(np.float16)  # minimums are subtracted
        return QuantizedRows(codes, scales, minimums, scale, minus)


# GGUF's blocks that the native library takes: bytes of one, and where its float16 scale and offset (or minimums') are.
BLOCKS = {"Q4_0": (18, 0, None), "Q4_1": (20, 0, 2), "Q8_0": (34, 0, None), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2),
          "Q6_K": (210, 208, None)}


def block_floats(rows: QuantizedRows) -> tuple[np.ndarray, np.ndarray | None]:
    """float16 [n, blocks]: scales and offsets of rows of blocks."""
    size, *places = BLOCKS[rows.packing]
    blocks = rows.codes.reshape(len(rows.codes), -1, size)
    scale, offset = (None if at is None else np.ascontiguousarray(blocks[:, :, at:at + 2]).view("<f2")[..., 0]
                     for at in places)
    return scale, offset


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized matrix [n, k] of a file, whose codes' tensor is called `name`. rows(begin, end) gives some of its
    rows. order: the column that each place of a row's codes is for, where they are not in turn. mapped: rows are
    little more than views of the file.
    """

    name: str
    file: Path
    rows: Callable[[int, int], QuantizedRows]
    order: np.ndarray | None = None
    mapped: bool = False

    def plain_rows(self, begin: int, end: int, form: WeightFormat, columns: int) -> QuantizedRows:
        """rows() as plain ones; AllSparkError if a block's scale is NaN or infinite."""
        found = self.rows(begin, end)
        if found.packing in BLOCKS:
            self.check_finite(*block_floats(found))
        return found.plain(form, columns)

    def pieces(self, begin: int, end: int, columns: int,
               plain: WeightFormat | None = None) -> Iterator[tuple[int, QuantizedRows]]:
        """Its rows [begin, end), some at a time, each with the first one's number; the next are unpacked meanwhile.
        plain: the matrix' format, if they are to be plain.
        """
        def some(begin: int, end: int) -> QuantizedRows:
            return self.rows(begin, end) if plain is None else self.plain_rows(begin, end, plain, columns)

        if self.mapped and plain is None:
            return iter([(begin, some(begin, end))])
        return in_pieces(some, begin, end, columns)

    def check_finite(self, *floats: np.ndarray | None) -> None:
        """AllSparkError if any of these scales is NaN or infinite."""
        bad = sum(int((~np.isfinite(x)).sum()) for x in floats if x is not None)
        if bad:
            raise self.not_finite(bad, "scales")

    def not_finite(self, count: int, what: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {self.name!r} in {self.file} holds {count} {what} "
                                                            "that are NaN or infinite")


def in_pieces(some: Callable[[int, int], T], begin: int, end: int, columns: int,
              elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, T]]:
    """What `some` makes of rows [begin, end), about so many elements at a time, each with the first row's number; the
    next are made meanwhile, by other threads.
    """
    height = max(64, elements // columns // 64 * 64)
    if end - begin <= height:
        yield begin, some(begin, end)
        return
    workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[tuple[int, Future[T]]] = deque()
        for first in range(begin, end, height):
            ahead.append((first, pool.submit(some, first, min(end, first + height))))
            if len(ahead) > workers:
                first, rows = ahead.popleft()
                yield first, rows.result()
        for first, rows in ahead:
            yield first, rows.result()


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, k] as QuantizedRows has them."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_codes(codes: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The reverse: uint8 [n, columns]."""
    if bits == 8:
        return codes
    both = np.empty((*codes.shape, 2), np.uint8)
    np.bitwise_and(codes, 15, out=both[..., 0])
    np.right_shift(codes, 4, out=both[..., 1])
    return both.reshape(len(codes), -1)[:, :columns]


def reordered(rows: QuantizedRows, form: WeightFormat, order: np.ndarray) -> QuantizedRows:
    """Plain rows with their columns in this order."""
    codes = unpack_codes(rows.codes, form.bits, len(order))
    return replace(rows, codes=pack_codes(np.take(codes, order, axis=1), form.bits))


@dataclass(frozen=True, eq=False)
class ColumnSlice:
    """Columns [first, last) of a matrix as one rank has them: `inputs` of them, in groups as `form` says. places: of
    permuted columns, where each is in a row, -1 for none; order: which of the slice's columns each then is.
    """

    form: WeightFormat
    first: int
    last: int
    places: np.ndarray | None = None
    order: np.ndarray | None = None

    @property
    def inputs(self) -> int:
        return self.last - self.first

    @property
    def gathered(self) -> int:
        """Places, padding included; 0: as many as columns."""
        return 0 if self.order is None else len(self.order)

    def native(self) -> dict[str, object]:
        """Arguments of the native library's functions."""
        return self.form.native(self.first if self.order is None else 0)

    def of(self, rows: QuantizedRows, columns: int) -> QuantizedRows:
        """The rows' codes in those places."""
        if self.places is None:
            return rows
        rows = rows.plain(self.form, columns)
        codes = unpack_codes(rows.codes, self.form.bits, columns)
        return replace(rows, codes=pack_codes(np.take(codes, np.maximum(self.places, 0), axis=1), self.form.bits))


def slice_columns(form: WeightFormat, order: np.ndarray | None, first: int, last: int,
                  columns: int) -> ColumnSlice:
    """A rank's slice of a matrix' columns. Of permuted ones (act-order) a slice has some of every group: groups are
    then as long as the one with most, rounded up, the others padded with places that no column has.
    """
    if order is None:
        return ColumnSlice(form, first, last)
    if first == 0 and last == columns:
        return ColumnSlice(form, first, last, None, order)
    inside = (order >= first) & (order < last)
    groups = form.groups(columns)
    members = [np.flatnonzero(inside[g * form.group_size:(g + 1) * form.group_size]) + g * form.group_size
               for g in range(groups)]
    size = -(-max(len(places) for places in members) // SMALLEST_GROUP) * SMALLEST_GROUP
    places = np.full((groups, size), -1, np.int64)
    for row, found in zip(places, members):
        row[:len(found)] = found
    places = places.reshape(-1)
    local = np.where(places < 0, -1, order[np.maximum(places, 0)] - first).astype(np.int32)
    return ColumnSlice(replace(form, group_size=size), first, last, places, local)


def checked_order(name: str, file: Path, groups_of: np.ndarray, group_size: int) -> np.ndarray | None:
    """The order that makes the groups of columns adjacent, from the group of each column (GPTQ's g_idx); None when they
    are. AllSparkError unless each group has `group_size` columns, the last one what is left.
    """
    columns = len(groups_of)
    size = group_size or columns
    if np.array_equal(groups_of, np.arange(columns) // size):
        return None
    count = -(-columns // size)
    if groups_of.min() < 0 or groups_of.max() >= count:
        worst = int(groups_of.max() if groups_of.max() >= count else groups_of.min())
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {name!r} in {file} names group {worst}: expected "
                                                           f"groups 0 to {count - 1}, of {size} columns each")
    sizes = np.bincount(groups_of, minlength=count)
    expected = np.minimum(size, columns - size * np.arange(count))
    wrong = np.flatnonzero(sizes != expected)
    if len(wrong):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"tensor {name!r} in {file} gives group {wrong[0]} {sizes[wrong[0]]} columns: expected "
                            f"{expected[wrong[0]]}")
    return np.argsort(groups_of, kind="stable").astype(np.int32)
