"""Quantized matrices on their way from a file to the native library: rows of quantized values (quants) with their
scales, independent of the format of the file; and a rank's slice of K, also for permuted columns.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.runtime.native import native_library
from allspark_server.weights.formats import SMALLEST_GROUP, WeightFormat
from allspark_server.weights.safetensors import aligned

T = TypeVar("T")
PIECE_ELEMENTS, MAX_WORKERS = 1 << 22, 16


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows [n, k] of a quantized matrix. Each array is an aligned view with any strides.

    quants: uint8 [n, k]; 4-bit values uint8 [n, ceil(k / 2)] with the even column in the lower half.
    scales: [n, groups] in the format's type (BF16 as uint16); nested scales int8.
    zeros: offsets in the same type, or zero points uint8.
    super_scales, super_offsets: float16 [n, super-groups].
    packing: "rows" if quants are laid out as above, otherwise the file's layout (see fill_quantized in the native
    library). Blocks contain their scales, so nothing but quants is given for them.
    skipped: with packing "octets", the rows in the first word that come before the first row.
    """

    quants: np.ndarray
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None
    super_scales: np.ndarray | None = None
    super_offsets: np.ndarray | None = None
    packing: str = "rows"
    skipped: int = 0

    def __post_init__(self) -> None:
        for name in ("quants", "scales", "zeros", "super_scales", "super_offsets"):
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, aligned(array))

    @property
    def own_scales(self) -> np.ndarray:
        """`scales` of rows whose packing is "rows"."""
        assert self.scales is not None, f"rows packed as {self.packing} have no scales of their own"
        return self.scales

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """quants, scales, zeros, super_scales, super_offsets."""
        return self.quants, self.scales, self.zeros, self.super_scales, self.super_offsets

    def plain(self, form: WeightFormat, columns: int) -> QuantizedRows:
        """The same rows with the packing "rows" and separate scales."""
        if self.packing == "rows":
            return self
        native = native_library()
        if self.scales is not None:
            quants = native.unpack_quantized(self.quants, form.bits, columns, self.packing, self.skipped,
                                             len(self.scales))
            return replace(self, quants=quants, packing="rows", skipped=0)
        quants = native.unpack_quantized(self.quants, form.bits, columns, self.packing)
        scale, offset = block_floats(self)
        if not form.layout.super_group:
            return QuantizedRows(quants, scale, offset)
        scales, minimums = native.unpack_scales(self.quants, columns, self.packing)
        if offset is None:
            return QuantizedRows(quants, scales, None, scale)
        minus = (offset.view(np.uint16) ^ np.uint16(0x8000)).view(np.float16)  # the file's minimums are subtracted
        return QuantizedRows(quants, scales, minimums, scale, minus)


# GGUF's blocks that the native library reads: bytes of a block, and the places of its float16 scale and offset.
BLOCKS: dict[str, tuple[int, int, int | None]] = {
    "Q4_0": (18, 0, None), "Q4_1": (20, 0, 2), "Q8_0": (34, 0, None), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2),
    "Q6_K": (210, 208, None)}


def block_floats(rows: QuantizedRows) -> tuple[np.ndarray, np.ndarray | None]:
    """The scales and offsets of rows of GGUF blocks: float16 [n, blocks]; None if the blocks have no offsets."""
    size, scale_at, offset_at = BLOCKS[rows.packing]
    blocks = rows.quants.reshape(len(rows.quants), -1, size)
    def floats(at: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, :, at:at + 2]).view("<f2")[..., 0]

    return floats(scale_at), None if offset_at is None else floats(offset_at)


@dataclass(frozen=True, eq=False)
class ScaleBlocks:
    """8-bit values [n, k] of which `height` adjacent rows share the scales of their groups: scales [ceil(n / height),
    groups] in the format's type (BF16 as uint16). Aligned views of the file.
    """

    quants: np.ndarray
    scales: np.ndarray
    height: int

    def rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """Rows [begin, end), the scales of their blocks, and (height, rows of the first block that come before
        `begin`).
        """
        first = begin // self.height
        return self.quants[begin:end], self.scales[first:-(-end // self.height)], (
            self.height, begin - first * self.height)

    def repeated(self, begin: int, end: int) -> QuantizedRows:
        """Rows [begin, end), each with scales of its own."""
        quants, scales, (height, skipped) = self.rows(begin, end)
        return QuantizedRows(quants, np.repeat(scales, height, 0)[skipped:skipped + end - begin])


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized matrix [n, k] of a file.

    name: of the tensor with the quantized values. rows(begin, end): some of its rows. order: the column of each place
    in a row, if columns are permuted. mapped: rows are views of the mapped file, so reading them costs nothing.
    mxfp4: of MXFP4, views of the values of some rows and of their scales as bytes (e8m0), if the file has them so; then
    all tensors of a matrix have it.
    blocks: the same matrix as a view whose rows share scales, if rows() would repeat them.
    """

    name: str
    file: Path
    rows: Callable[[int, int], QuantizedRows]
    order: np.ndarray | None = None
    mapped: bool = False
    mxfp4: Callable[[int, int], tuple[np.ndarray, np.ndarray]] | None = None
    blocks: ScaleBlocks | None = None

    def plain_rows(self, begin: int, end: int, form: WeightFormat, columns: int) -> QuantizedRows:
        """rows(begin, end) with the packing "rows". AllSparkError if the scale of a block is NaN or infinite."""
        found = self.rows(begin, end)
        if found.packing in BLOCKS:
            self.check_finite(*block_floats(found))
        return found.plain(form, columns)

    def pieces(self, begin: int, end: int, columns: int,
               plain: WeightFormat | None = None) -> Iterator[tuple[int, QuantizedRows]]:
        """Rows [begin, end) in pieces, each with the index of its first row. Other threads prepare the next pieces.

        plain: the matrix's format if pieces are to have the packing "rows".
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
        """The error for `count` values or scales that are not finite."""
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {self.name!r} in {self.file} holds {count} {what} "
                                                            "that are NaN or infinite")


def in_pieces(some: Callable[[int, int], T], begin: int, end: int, columns: int,
              elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, T]]:
    """`some(begin, end)` of rows [begin, end) in pieces of about `elements` elements, each with the index of its first
    row. Other threads prepare the next pieces.
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


def pack_quants(quants: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 [n, k] as in QuantizedRows.quants."""
    if bits == 8:
        return np.ascontiguousarray(quants)
    if quants.shape[1] % 2:
        quants = np.pad(quants, ((0, 0), (0, 1)))
    return quants[:, 0::2] | quants[:, 1::2] << 4


def unpack_quants(quants: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The reverse of pack_quants: uint8 [n, columns]."""
    if bits == 8:
        return quants
    both = quants.astype("<u2", order="C")  # its two bytes; every other byte of an array would be written one by one
    both |= both << 4
    both &= 0x0F0F
    return both.view(np.uint8)[:, :columns]


def reordered(rows: QuantizedRows, form: WeightFormat, order: np.ndarray) -> QuantizedRows:
    """Plain rows with their columns in this order."""
    quants = unpack_quants(rows.quants, form.bits, len(order))
    return replace(rows, quants=pack_quants(np.take(quants, order, axis=1), form.bits))


@dataclass(frozen=True, eq=False)
class ColumnSlice:
    """Columns [first, last) of a matrix, as one rank holds them in the format `form`.

    places: for permuted columns, the place of each in a stored row, -1 for padding. order: the column of the slice that
    each place holds.
    """

    form: WeightFormat
    first: int
    last: int
    places: np.ndarray | None = None
    order: np.ndarray | None = None

    @property
    def inputs(self) -> int:
        """The number of columns."""
        return self.last - self.first

    @property
    def gathered(self) -> int:
        """The number of places with padding; 0 if columns are not permuted."""
        return 0 if self.order is None else len(self.order)

    def native(self) -> dict[str, Any]:
        """Arguments of the native library's functions."""
        return self.form.native(self.first if self.order is None else 0)

    def of(self, rows: QuantizedRows, columns: int) -> QuantizedRows:
        """The rows with their values moved to `places`."""
        if self.places is None:
            return rows
        rows = rows.plain(self.form, columns)
        quants = unpack_quants(rows.quants, self.form.bits, columns)
        return replace(rows, quants=pack_quants(np.take(quants, np.maximum(self.places, 0), axis=1), self.form.bits))


def slice_columns(form: WeightFormat, order: np.ndarray | None, first: int, last: int,
                  columns: int) -> ColumnSlice:
    """A rank's slice of a matrix's columns.

    If columns are permuted (act-order), the slice contains columns of every group. All groups of the slice are then as
    long as its longest, rounded up; the others are padded.
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
    flat = places.reshape(-1)
    local = np.where(flat < 0, -1, order[np.maximum(flat, 0)] - first).astype(np.int32)
    return ColumnSlice(replace(form, group_size=size), first, last, flat, local)


@lru_cache(16)
def _adjacent(columns: int, size: int) -> np.ndarray:
    """The group of each column where groups of `size` columns are adjacent."""
    return np.arange(columns, dtype=np.int32) // np.int32(size)


def checked_order(name: str, file: Path, groups_of: np.ndarray, group_size: int) -> np.ndarray | None:
    """The order of columns that makes groups adjacent, from the group of each column (GPTQ's g_idx); None if they are
    adjacent already. AllSparkError unless each group has `group_size` columns; the last one may have fewer.
    """
    columns = len(groups_of)
    size = group_size or columns
    if np.array_equal(groups_of, _adjacent(columns, size)):
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
