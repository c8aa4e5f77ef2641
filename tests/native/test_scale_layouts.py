"""Matrices that others have quantized, in the kernels: each layout of scales and each type of quants against float64,
to the bit where they are recovered; rows, threads and slices of K; orders of columns; what is refused.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from allspark_server import _native
from support.levels import LOWER, run_again
from support.quantization import quantized_rows

LAYOUTS = {
    "float16": dict(scales="float16", zeros="none"),
    "bfloat16": dict(scales="bfloat16", zeros="none"),
    "float32": dict(scales="float32", zeros="none"),
    "points": dict(scales="float16", zeros="points"),
    "points-bfloat16": dict(scales="bfloat16", zeros="points"),
    "minimums": dict(scales="float16", zeros="offsets", center=0),
    "offsets": dict(scales="float32", zeros="offsets"),
    "nested": dict(scales="float16", zeros="none", super_group=128, scale_bits=8, center=5),
    "nested-minimums": dict(scales="float16", zeros="offsets", super_group=64, scale_bits=8, center=0),
}
CODED = dict(scales="float32", zeros="none")
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
CASES = [(dtype, layout) for dtype in ("int4", "int8", "w4a8", "w8a8") for layout in LAYOUTS]
CASES += [(dtype, "coded") for dtype in ("e4m3", "nf4", "e2m1")]


def values_of(dtype: str) -> np.ndarray:
    """float32: what quants of floats stand for."""
    if dtype == "nf4":
        return np.array(NF4, np.float32)
    if dtype == "e2m1":
        return np.array(E2M1 + [-x for x in E2M1], np.float32)
    quants = np.arange(256)
    exponent, fraction = quants >> 3 & 15, quants & 7
    values = np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    return np.where(quants & 0x80, -values, values).astype(np.float32)


class Matrix:
    """Random rows, what is recovered of them [n, k], and arguments of the native library."""

    def __init__(self, dtype: str, layout: str, n: int, k: int, group: int, seed: int = 0):
        self.rng = rng = np.random.default_rng((n, k, group, seed))
        self.dtype, self.k, self.group = dtype, k, group
        self.layout = layout = LAYOUTS.get(layout, CODED)
        self.bits = 8 if dtype in ("int8", "w8a8", "e4m3") else 4
        size, self.sup = group or k, layout.get("super_group", 0)
        groups = -(-k // size)
        coded = dtype in ("e4m3", "nf4", "e2m1")
        center = layout.get("center", 1 << (self.bits - 1))
        most = 128 + center if self.bits == 8 and not coded else 1 << self.bits
        quants = rng.integers(0, most, (n, k)).astype(np.uint8)
        if dtype == "e4m3":
            quants = np.where((quants & 0x7F) == 0x7F, 0, quants).astype(np.uint8)
        index = np.arange(k) // size
        self.zeros = self.super_scales = self.super_offsets = None
        if self.sup:
            self.scales = rng.integers(-128, 128, (n, groups)).astype(np.int8)
            above = np.arange(groups) * size // self.sup
            self.super_scales = rng.normal(size=(n, -(-k // self.sup))).astype(np.float16)
            scale, offset = self.scales.astype(np.float32) * self.super_scales.astype(np.float32)[:, above], 0
            if layout["zeros"] == "offsets":
                self.zeros = rng.integers(-128, 128, (n, groups)).astype(np.int8)
                self.super_offsets = rng.normal(size=self.super_scales.shape).astype(np.float16)
                offset = self.zeros.astype(np.float32) * self.super_offsets.astype(np.float32)[:, above]
        else:
            def some():
                values = rng.normal(size=(n, groups)).astype(np.float32)
                if layout["scales"] == "bfloat16":
                    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
                    return bits, (bits.astype(np.uint32) << 16).view(np.float32)
                values = values.astype(layout["scales"])
                return values, values.astype(np.float32)

            self.scales, scale = some()
            offset = 0
            if layout["zeros"] == "offsets":
                self.zeros, offset = some()
        if layout["zeros"] == "points":
            self.zeros = rng.integers(0, 1 << self.bits, (n, groups)).astype(np.uint8)
            numbers = quants.astype(np.float32) - self.zeros.astype(np.float32)[:, index]
        elif coded:
            numbers = values_of(dtype)[quants]
        else:
            numbers = quants.astype(np.float32) - np.float32(center)
        self.whole = scale[:, index] * numbers
        if layout["zeros"] == "offsets":
            self.whole = self.whole + offset[:, index]
        # What is summed: with a center that is not the middle, more than what is recovered.
        self.bound = np.abs(scale[:, index]).astype(np.float64) * (256 if self.bits == 8 else 16)
        self.bound = np.maximum(self.bound, np.abs(scale[:, index]) * np.abs(numbers)) + np.abs(
            offset[:, index] if layout["zeros"] == "offsets" else 0)
        self.quants = quants
        if self.bits == 4:
            even = np.pad(quants, ((0, 0), (0, k % 2)))
            self.quants = np.ascontiguousarray(even[:, 0::2] | even[:, 1::2] << 4)

    def into(self, executor, column=0, length=None, group=None, sup=None, order=()) -> int:
        layout = {**self.layout, **({"super_group": sup} if sup else {})}
        n = len(self.whole)
        handle = executor.add_matrix(n, length or self.k, self.dtype, self.group if group is None else group,
                                     order=list(order), **layout)

        def bits(x):
            return None if x is None else x.view(np.uint16)

        executor.fill_quantized(handle, self.quants, self.scales, self.zeros, self.bits, self.k, self.group,
                                column=column,
                                super_group=self.sup, super_scales=bits(self.super_scales),
                                super_offsets=bits(self.super_offsets))
        return handle


def expected(x: np.ndarray, matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """(float64 product, bound of what float32 sums may lose)."""
    values = x.astype(np.float64)
    if matrix.layout is not CODED:
        rounded, scale = quantized_rows(x, 127 if matrix.dtype.startswith("w") else 127 * 257)
        values = rounded * scale.astype(np.float64)
    return values @ matrix.whole.astype(np.float64).T, np.abs(values) @ matrix.bound.T


@pytest.mark.parametrize("dtype, layout", CASES)
def test_products_against_float64_and_rows_to_the_bit(dtype, layout):
    executor = _native.Executor(num_threads=2)
    for n, k, group in ((1, 128, 64), (75, 321, 32), (131, 640, 16), (40, 1031, 8), (70, 777, 0)):
        if LAYOUTS.get(layout, {}).get("super_group") and not group:
            continue
        matrix = Matrix(dtype, layout, n, k, group)
        handle = matrix.into(executor)
        rows = np.stack([executor.read_row(handle, row) for row in range(n)])
        np.testing.assert_array_equal(rows, matrix.whole)
        x = matrix.rng.normal(size=(37, k)).astype(np.float32)
        product, bound = expected(x, matrix)
        bias = matrix.rng.normal(size=n).astype(np.float32)
        whole = executor.multiply(handle, x, n, bias)
        allowed = (k // (group or k) + 64) * 2.0**-23 * (bound + np.abs(bias))
        assert np.all(np.abs(whole - product - bias) <= allowed)
        for first, count in ((0, 1), (5, 2), (3, 3), (7, 5), (9, 13), (1, 25)):
            part = executor.multiply(handle, x[first:first + count], n, bias)
            np.testing.assert_array_equal(part.view(np.uint32), whole[first:first + count].view(np.uint32))


@pytest.mark.parametrize("dtype, layout", [("int4", "points"), ("int8", "nested"), ("int4", "nested-minimums"),
                                           ("e4m3", "coded")])
def test_slices_of_k(dtype, layout):
    """A slice that begins inside groups and super-groups has the values of the whole's."""
    executor = _native.Executor(num_threads=2)
    matrix = Matrix(dtype, layout, 50, 320, 32)
    for first, length, group, sup in ((0, 96, 32, 0), (96, 224, 32, 32), (48, 272, 16, 16), (64, 200, 32, 64)):
        part = matrix.into(executor, first, length, group, (sup or matrix.sup) if matrix.sup else None)
        rows = np.stack([executor.read_row(part, row) for row in range(50)])
        np.testing.assert_array_equal(rows, matrix.whole[:, first:first + length])


def test_columns_in_an_order_of_their_own():
    executor = _native.Executor(num_threads=2)
    for dtype in ("int4", "w8a8"):
        matrix = Matrix(dtype, "points", 60, 256, 32)
        order = matrix.rng.permutation(256)
        plain, ordered = matrix.into(executor), matrix.into(executor, order=order)
        x = matrix.rng.normal(size=(17, 256)).astype(np.float32)
        for rows in (1, 17):
            np.testing.assert_array_equal(executor.multiply(ordered, x[:rows], 60),
                                          executor.multiply(plain, np.ascontiguousarray(x[:rows][:, order]), 60))
        back = np.empty_like(matrix.whole)
        back[:, order] = matrix.whole
        np.testing.assert_array_equal(np.stack([executor.read_row(ordered, row) for row in range(60)]), back)
        # Fewer inputs than places: -1 is a place that no input has.
        some = [int(i) if i < 200 else -1 for i in order]
        fewer = matrix.into(executor, length=200, order=some)
        padded = np.zeros((3, 256), np.float32)
        padded[:, :200] = x[:3, :200]
        np.testing.assert_array_equal(executor.multiply(fewer, x[:3, :200], 60), executor.multiply(ordered, padded, 60))


def packed_as(packing: str, quants: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [n, k] of 4 or 8 bits as a file may have them, and as plain rows."""
    plain = quants if packing in ("signed", "words-8", "rows-8") else quants[:, 0::2] | quants[:, 1::2] << 4
    if packing == "signed":
        return quants ^ np.uint8(0x80), plain
    if packing == "swapped":
        return quants[:, 1::2] | quants[:, 0::2] << 4, plain
    if packing.startswith("words"):
        return np.ascontiguousarray(plain.view(np.int32).T), plain
    if packing == "octets":
        padded = np.pad(quants, ((0, -len(quants) % 8), (0, 0)))
        each = padded.reshape(-1, 8, quants.shape[1])[:, [0, 2, 4, 6, 1, 3, 5, 7]]
        words = np.bitwise_or.reduce(each.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))[:, None], axis=1)
        return np.ascontiguousarray(words.T).view(np.int32), plain
    return plain, plain


@pytest.mark.parametrize("packing, dtype", [("rows", "int4"), ("rows-8", "int8"), ("signed", "w8a8"),
                                            ("swapped", "nf4"),
                                            ("swapped", "int4"), ("words", "int4"), ("words-8", "int8"),
                                            ("octets", "w4a8"), ("rows-8", "e4m3"), ("rows", "e2m1")])
def test_a_matrix_is_the_same_however_its_codes_are_packed(packing, dtype):
    """Whole vectors and what is left of rows and columns, slices of both, views of larger arrays."""
    rng, bits = np.random.default_rng(0), 8 if dtype in ("int8", "w8a8", "e4m3") else 4
    for n, k, group, column, length in ((96, 512, 128, 0, 512), (75, 640, 32, 64, 512), (51, 1032, 8, 520, 512),
                                        (200, 288, 0, 0, 288), (131, 328, 64, 64, 264)):
        quants = rng.integers(0, 120 if bits == 8 else 16, (n + 16, k)).astype(np.uint8)
        packed, plain = packed_as(packing, quants)
        scales = rng.normal(size=(-(-k // (group or k)), n)).astype(np.float32).T
        for cuts in ((0, n), (0, 13, 40, n)):
            found = []
            for as_packed in (False, True):
                executor = _native.Executor(num_threads=2)
                handle = executor.add_matrix(n, length, dtype, group, scales="float32", zeros="none")
                for first, last in itertools.pairwise(cuts):
                    rows, more = slice(first + 11, last + 11), {"packing": "rows"}
                    if not as_packed:
                        part = plain[rows]
                    elif packing == "octets":
                        part, more = packed[:, rows.start // 8:-(-rows.stop // 8)], {"skipped": rows.start % 8}
                    else:
                        part = packed[:, rows] if packing.startswith("words") else packed[rows]
                    if as_packed:
                        more["packing"] = packing.removesuffix("-8")
                    bad = executor.fill_quantized(handle, part, scales[first:last], None, bits, k, group,
                                                  row_offset=first,
                                                  column=column, **more)
                    assert bad == 0
                found.append((np.stack([executor.read_row(handle, row) for row in range(n)]),
                              executor.multiply(handle, np.ones((3, length), np.float32), n)))
            np.testing.assert_array_equal(found[0][0], found[1][0])
            np.testing.assert_array_equal(found[0][1], found[1][1])
    assert (found[0][0] != 0).any()


MASK, KEYS = (1 << 64) - 1, (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)


def fold(a: int, b: int) -> int:
    return (a * b & MASK) ^ a * b >> 64


def row_hash(row: np.ndarray, key: int) -> int:
    """As common/row_hash.h has it."""
    data, key = row.tobytes(), key & MASK
    lanes = [fold(key ^ KEYS[i], len(data) ^ KEYS[(i + 1) % 4]) for i in range(4)]
    words = np.frombuffer(data + bytes(-len(data) % 64), np.uint64).tolist()
    for at in range(0, len(words), 8):
        for i in range(4):
            lanes[i] = fold(words[at + 2 * i] ^ KEYS[i], words[at + 2 * i + 1] ^ lanes[i])
    for lane, own in zip(lanes, KEYS):
        key = fold(key ^ lane, own)
    return key


def transposed_hash(lines: np.ndarray, scales: np.ndarray, zeros: np.ndarray, octets: bool, first: int,
                    skipped: int) -> int:
    """The hash of an array of words or octets, scales [n, groups] and zeros [n, groups] whose first row, after
    `skipped` ones in its word, is row `first` of a matrix.
    """
    n, together, total = len(scales), 8192 if octets else 1024, 0
    for block, row in enumerate(range(0, n, together)):
        rows = slice(row, min(n, row + together))
        own = slice((skipped + rows.start) // 8, -(-(skipped + rows.stop) // 8)) if octets else rows
        of_block = sum(row_hash(line[own], i) for i, line in enumerate(lines))
        for g, (s, z) in enumerate(zip(scales.T, zeros.T)):
            of_block += row_hash(s[rows], ~g) + fold(row_hash(z[rows], g), 0xA24BAED4963EE407)
        total += fold(of_block & MASK, 2 * first + block)
    return total & MASK


# n: one panel or less, one row past a block, several; k: chunks of columns that groups divide, that divide groups, that
# do neither, one line past a chunk, none whole. (first column, columns of the matrix): a rank's slice, too.
@pytest.mark.parametrize("packing, bits, n, k, group, part", [
    ("words", 4, 1025, 136, 8, None), ("words", 4, 2500, 264, 24, None), ("words", 4, 1000, 520, 0, None),
    ("words", 4, 41, 640, 160, (320, 320)), ("words", 8, 1061, 132, 32, None), ("words", 8, 130, 512, 256, (256, 256)),
    ("words", 4, 1027, 264, 0, (4, 200)),    # no whole lanes
    ("octets", 4, 8200, 40, 8, None), ("octets", 4, 8193, 72, 24, None), ("octets", 4, 90, 264, 0, None),
    ("octets", 4, 1001, 320, 80, (80, 160)), ("octets", 4, 8195, 36, 0, None)])
def test_bits_and_hash_of_transposed_lines_at_awkward_sizes(packing, bits, n, k, group, part):
    """Bits and hash for every number of threads, more than panels included, and rows in two arrays."""
    rng, octets = np.random.default_rng(n + k), packing == "octets"
    column, width = part or (0, k)
    quants = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (-(-k // (group or k)), n)).astype(np.float32).T
    zeros = rng.integers(0, 1 << bits, scales.T.shape).astype(np.uint8).T
    at = np.arange(k) // (group or k)
    expected = (scales[:, at] * (quants.astype(np.float32) - zeros[:, at]))[:, column:column + width]
    for cut in (0, n // 3 // 8 * 8, n // 2 + 3):
        arrays = []
        for first, last in ((0, cut), (cut, n)):
            skipped = first % 8 if octets else 0
            lines, _ = packed_as(packing if bits == 4 else packing + "-8", quants[first - skipped:last])
            arrays.append((first, last, lines, skipped))
        wanted = sum(transposed_hash(lines, scales[first:last], zeros[first:last], octets, first, skipped)
                     for first, last, lines, skipped in arrays if first < last) & MASK
        for threads in (1, 2, 3, 7):
            executor = _native.Executor(num_threads=threads)
            handle = executor.add_matrix(n, width, "int4" if bits == 4 else "int8", group and min(group, width),
                                         scales="float32", zeros="points")
            for first, last, lines, skipped in arrays:
                if first < last:
                    assert not executor.fill_quantized(handle, lines, scales[first:last], zeros[first:last], bits, k,
                                                       group, row_offset=first, column=column, packing=packing,
                                                       **({"skipped": skipped} if octets else {}))
            found = np.stack([executor.read_row(handle, row) for row in range(n)])
            np.testing.assert_array_equal(found, expected)
            assert executor.source_hash(handle) == wanted


def test_numbers_that_are_none_are_counted():
    rng = np.random.default_rng(0)
    executor = _native.Executor(num_threads=2)
    quants = rng.integers(0, 120, (70, 200)).astype(np.uint8)
    quants[[3, 40, 69, 69], [7, 199, 0, 64]] = 0x7F, 0xFF, 0x7F, 0xFF
    handle = executor.add_matrix(70, 200, "e4m3", 0, **CODED)
    assert executor.fill_quantized(handle, quants, np.ones((70, 1), np.float32), None, 8, 200, 0) == 4
    blocks = rng.integers(0, 120, (70, 8 * 18)).astype(np.uint8)
    blocks[69, 18 * 7:18 * 7 + 2] = 0, 0x7C
    handle = executor.add_matrix(70, 256, "int4", 32, scales="float16", zeros="none")
    assert executor.fill_quantized(handle, blocks, None, None, 4, 256, 32, packing="Q4_0") == 1


@pytest.mark.parametrize("dtype", ["e4m3", "nf4", "e2m1"])
@pytest.mark.parametrize("n, k, group, first", [(26, 200, 0, 0), (97, 1040, 208, 208), (61, 96, 32, 32)])
def test_small_floats_are_placed_byte_by_byte(dtype, n, k, group, first):
    """Any bytes, NaN of both signs among them, in rows and lines that no square of sixteen or eight divides."""
    rng, bits = np.random.default_rng(n), 8 if dtype == "e4m3" else 4
    quants = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (n, k // (group or k))).astype(np.float32)
    executor = _native.Executor(num_threads=2)
    matrix = executor.add_matrix(n, k - first, dtype, group, **CODED)
    packed = quants if bits == 8 else quants[:, 0::2] | quants[:, 1::2] << 4
    bad = executor.fill_quantized(matrix, packed, scales, None, bits, k, group, column=first)
    held = quants[:, first:]
    assert bad == (np.count_nonzero(held & 0x7f == 0x7f) if bits == 8 else 0)
    number = held & 0x7f != 0x7f if bits == 8 else np.full(held.shape, True)
    expected = values_of(dtype)[held] * np.repeat(scales, group or k, 1)[:, first:] + 0
    found = np.stack([executor.read_row(matrix, row) for row in range(n)])
    np.testing.assert_array_equal(found[number], expected[number])


@pytest.mark.parametrize("k, group", [(200, 128), (515, 8), (96, 0)])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_several_arrays_are_filled_as_one_by_one(threads, k, group):
    rng, experts, n = np.random.default_rng(k), 5, 26
    executor = _native.Executor(num_threads=threads)
    counts = [n, 7, n - 7, 2 * n + 3, n - 3]        # of the stack's rows: some begin or end within a matrix
    quants = [rng.integers(0, 120, (count, k + 9)).astype(np.uint8)[:, 9:] for count in counts]
    scales = [np.repeat(rng.uniform(0.5, 2, (1, -(-k // (group or k)))), count, 0).astype(np.float32)
              for count in counts]
    first, width = (8, k - 8) if group == 8 else (0, k)     # a rank's slice of K, too
    one, all_rows = (executor.add_matrix(experts * n, width, "e4m3", group, experts=experts, **CODED) for _ in range(2))
    row = 0
    for q, s in zip(quants, scales):
        assert executor.fill_quantized(one, q, s, None, 8, k, group, row_offset=row, column=first) == 0
        row += len(q)
    assert executor.fill_quantized_rows(all_rows, quants, scales, 8, k, group, "float32", column=first) == [0] * 5
    for row in range(experts * n):
        np.testing.assert_array_equal(executor.read_row(one, row), executor.read_row(all_rows, row))
    assert executor.source_hash(one) == executor.source_hash(all_rows)


@pytest.mark.parametrize("packing, dtype", [("words", "int4"), ("octets", "int4"), ("signed", "int8"),
                                            ("Q4_0", "int4")])
def test_arrays_of_any_packing_are_filled_in_one_call(packing, dtype):
    rng, k, group, bits = np.random.default_rng(4), 256, 32, 4 if dtype == "int4" else 8
    blocks = packing == "Q4_0"
    counts, skipped = [61, 130, 9], [0, 5, 6] if packing == "octets" else []
    executor = _native.Executor(num_threads=3)
    layout = {"scales": "float16" if blocks else "float32", "zeros": "none" if blocks else "points"}
    one, other = (executor.add_matrix(sum(counts), k, dtype, group, **layout) for _ in range(2))
    if blocks:
        quants = [rng.integers(0, 120, (count, k // 32 * 18)).astype(np.uint8) for count in counts]
        scales, zeros = [], []
    else:
        quants = [packed_as(packing, rng.integers(0, 1 << bits, (before + count, k)).astype(np.uint8))[0]
                  for before, count in zip(skipped or [0] * 3, counts)]
        scales = [rng.uniform(0.5, 2, (k // group, count)).astype(np.float32).T for count in counts]
        zeros = [rng.integers(0, 1 << bits, (k // group, count)).astype(np.uint8).T for count in counts]
    row = 0
    for i, count in enumerate(counts):
        more = {"skipped": skipped[i]} if skipped else {}
        own = (None, None) if blocks else (scales[i], zeros[i])
        assert not executor.fill_quantized(one, quants[i], *own, bits, k, group, row, packing=packing, **more)
        row += count
    settings = (other, quants, scales, bits, k, group, layout["scales"])
    assert executor.fill_quantized_rows(*settings, zeros=zeros, packing=packing, skipped=skipped) == [0] * 3
    assert executor.panels(one).bytes().tobytes() == executor.panels(other).bytes().tobytes()
    assert executor.source_hash(one) == executor.source_hash(other)
    with pytest.raises(ValueError, match="as many scales"):
        executor.fill_quantized_rows(*settings, zeros=[*zeros, np.zeros((1, 8), np.uint8)], packing=packing)


@pytest.mark.parametrize("dtype", ["e4m3", "float32", "bfloat16"])
@pytest.mark.parametrize("scale_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_scales_of_blocks_are_those_of_each_of_their_rows(threads, scale_type, dtype):
    rng, k, group, experts, n = np.random.default_rng(2), 520, 128, 3, 150
    executor, layout = _native.Executor(num_threads=threads), {"scales": scale_type, "zeros": "none"}
    # (rows, rows of a block, rows of the first block that come before): a part of a block, more than one, all, each row
    pieces = [(100, 128, 0), (50, 128, 100), (n, 48, 47), (29, n, 5), (n - 29, 1, 0)]
    quants = [rng.integers(0, 120, (count, k)).astype(np.uint8) for count, *_ in pieces]
    scales = [rng.uniform(0.5, 2, (-(-(skipped + count) // height), 5)).astype(np.float32)
              for count, height, skipped in pieces]
    if scale_type == "bfloat16":
        scales = [(s.view(np.uint32) >> 16).astype(np.uint16) for s in scales]
    repeated = [np.repeat(s, height, 0)[skipped:skipped + count]
                for s, (count, height, skipped) in zip(scales, pieces)]
    one, other = (executor.add_matrix(experts * n, k - 128, dtype, group if dtype == "e4m3" else 0, experts=experts,
                                      **(layout if dtype == "e4m3" else {})) for _ in range(2))
    settings = (8, k, group, scale_type, 0, 128)
    assert executor.fill_quantized_rows(one, quants, repeated, *settings) == [0] * 5
    shared = [piece[1:] for piece in pieces]
    assert executor.fill_quantized_rows(other, quants, scales, *settings, shared) == [0] * 5
    for row in range(experts * n):
        assert executor.read_row(one, row).tobytes() == executor.read_row(other, row).tobytes()
    assert executor.source_hash(one) == executor.source_hash(other)
    for wrong, problem in ((shared[:4], "as many scales"), ([(0, 0)] * 5, "rows of a scale"),
                           ([(128, 128)] * 5, "rows of a scale"), ([(128, 0)] * 5, r"must be \[rows, 5\]")):
        with pytest.raises(ValueError, match=problem):
            executor.fill_quantized_rows(other, quants, scales, *settings, wrong)


@pytest.mark.parametrize("dtype", ["e2m1", "e2m1a16"])
@pytest.mark.parametrize("scale_type", ["float32", "bfloat16"])
def test_scales_as_powers_are_those_of_the_matrix_type(scale_type, dtype):
    """Every byte of e8m0 but NaN, 2^-127 too, which is subnormal; the hash is that of the converted scales."""
    rng, n, k, first = np.random.default_rng(3), 70, 8 * 32, 64
    executor = _native.Executor(num_threads=3)
    quants = [rng.integers(0, 256, (count, k // 2)).astype(np.uint8) for count in (n - 9, 9)]
    powers = np.resize(np.arange(255, dtype=np.uint8), (n, 8))
    wide = np.maximum(powers.astype(np.uint32) << 23, 1 << 22)
    scales = wide.view(np.float32) if scale_type == "float32" else (wide >> 16).astype(np.uint16)
    layout = {"scales": scale_type, "zeros": "none"}
    one, other = (executor.add_matrix(n, k - first, dtype, 32, **layout) for _ in range(2))
    parts = [slice(0, n - 9), slice(n - 9, n)]
    settings = (4, k, 32)
    for matrix, given, kind in ((one, scales, scale_type), (other, powers, "e8m0")):
        assert executor.fill_quantized_rows(matrix, quants, [given[part] for part in parts], *settings, kind,
                                            column=first) == [0, 0]
    assert executor.panels(one).bytes().tobytes() == executor.panels(other).bytes().tobytes()
    assert executor.source_hash(one) == executor.source_hash(other)
    half = executor.add_matrix(n, k, dtype, 32, scales="float16", zeros="none")
    for matrix, shared, problem in ((half, [], "scales of float32 or bfloat16"), (other, [(2, 0)] * 2, "shared")):
        with pytest.raises(ValueError, match=problem):
            executor.fill_quantized_rows(matrix, quants, [powers[part] for part in parts], *settings, "e8m0", 0, 0,
                                         shared)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_type", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_matrices_of_floats_take_e4m3(threads, scale_type, dtype):
    rng, k, group, counts = np.random.default_rng(1), 333, 128, [70, 3, 59]
    executor = _native.Executor(num_threads=threads)
    codes = np.array([x for x in range(256) if x & 0x7F != 0x7F], np.uint8)     # zeros and subnormals among them
    quants = [codes[rng.integers(0, len(codes), (count, k))] for count in counts]
    floats = [rng.uniform(-2, 2, (count, 3)).astype(np.float32) for count in counts]
    floats[0][3] = -0.0
    if scale_type == "bfloat16":
        stored = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in floats]
        floats = [(x.astype(np.uint32) << 16).view(np.float32) for x in stored]
    else:
        stored = [x.astype(scale_type) for x in floats]
        floats = [x.astype(np.float32) for x in stored]
        stored = [x if scale_type == "float32" else x.view(np.uint16) for x in stored]
    one, other = (executor.add_matrix(sum(counts), k - 128, dtype) for _ in range(2))
    assert executor.fill_quantized_rows(one, quants, stored, 8, k, group, scale_type, column=128) == [0, 0, 0]
    values = [values_of("e4m3")[q] * np.repeat(s, 128, 1)[:, :k] + np.float32(0) for q, s in zip(quants, floats)]
    executor.fill_rows(other, values, "F32", 0, 128, 0)
    for row in range(sum(counts)):
        assert executor.read_row(one, row).tobytes() == executor.read_row(other, row).tobytes()
    assert executor.source_hash(one) == executor.source_hash(other)
    quants[2][5, [130, 332]] = 0x7F, 0xFF
    assert executor.fill_quantized_rows(one, quants, stored, 8, k, group, scale_type, column=128) == [0, 0, 2]
    for call, problem in ((lambda: executor.fill_quantized(one, quants[0], stored[0], None, 8, k, group),
                           "the matrix is not quantized"),
                          (lambda: executor.fill_quantized_rows(one, quants, stored[:2], 8, k, group, scale_type),
                           "as many scales"),
                          (lambda: executor.fill_quantized_rows(one, quants, [s[:, :2] for s in stored], 8, k, group,
                                                                scale_type), "must be \\[rows, 3\\]")):
        with pytest.raises(ValueError, match=problem):
            call()


def test_what_is_refused():
    executor = _native.Executor()
    for arguments, layout, problem in (
            ((8, 64, "int5", 32), {}, "int5"), ((8, 64, "int4", 20), {}, "group_size must be a multiple of 8"),
            ((8, 64, "e4m3", 32), {}, "has no offsets: pass the layout of its scales"),
            ((8, 64, "nf4", 32), dict(scales="float32", zeros="points"), "has no zero points"),
            ((8, 64, "int4", 32), dict(scales="e8m0", zeros="none"), "takes scales of float32, bfloat16 and float16"),
            ((8, 64, "int4", 32), dict(scales="float8"), "scales must be one of"),
            ((8, 64, "int4", 32), dict(center=16), "has no quantized value 16 to stand for 0"),
            ((8, 64, "int4", 32), dict(scales="float16", super_group=48, scale_bits=8), "nested scales need"),
            ((8, 64, "float32", 0), dict(scales="float16"), "has no scales")):
        with pytest.raises(ValueError, match=problem):
            executor.add_matrix(*arguments, **layout)
    with pytest.raises(TypeError, match="has no field blocks"):
        executor.add_matrix(8, 64, "int4", 32, blocks=1)
    with pytest.raises(ValueError, match="there is no input feature 64 of 64"):
        executor.add_matrix(8, 64, "int4", 32, order=[64])
    with pytest.raises(ValueError, match="an order of columns needs a matrix of quantized integers"):
        executor.add_matrix(8, 64, "e4m3", 32, order=list(range(64)), **CODED)
    handle = executor.add_matrix(8, 64, "int4", 32, scales="float16", zeros="none")
    for arguments, more, problem in (
            ((np.zeros((8, 33), np.uint8), None, None, 4, 64, 32), {"packing": "Q4_0"},
             r"must be \[rows, 36\] of a byte"),
            ((np.zeros((8, 36), np.uint8), None, None, 4, 65, 32), {"packing": "Q4_0"},
             "65 values of 4 bits are no whole"),
            ((np.zeros((8, 32), np.uint8), None, None, 4, 64, 32), {"packing": "columns"},
             "packing must be rows, signed"),
            ((np.zeros((9, 8), np.int32), None, None, 4, 64, 32), {"packing": "words"}, "words must be .8, rows"),
            ((np.zeros((8, 8), np.int32), None, None, 4, 64, 32), {"packing": "words"}, "scales are missing"),
            ((np.zeros((64, 1), np.int32), None, None, 4, 64, 32), {"packing": "octets", "skipped": 8}, "skipped")):
        with pytest.raises(ValueError, match=problem):
            executor.fill_quantized(handle, *arguments, **more)
    matrix = Matrix("int4", "points", 8, 64, 32)
    for name, array, problem in (
            ("scales", matrix.scales[:, 1:], "scales must be"),
            ("scales", matrix.scales.astype(np.float32), "scales must be"),
            ("zeros", None, "must be those of the matrix' layout"), ("zeros", matrix.zeros[:4], "zeros must be"),
            ("quants", matrix.quants[:, 1:], "packed as rows must be")):
        kept = getattr(matrix, name)
        setattr(matrix, name, array if array is None else np.ascontiguousarray(array))
        with pytest.raises(ValueError, match=problem):
            matrix.into(executor)
        setattr(matrix, name, kept)
    with pytest.raises(ValueError, match="takes quantized rows"):
        executor.fill_matrix(executor.add_matrix(8, 64, "int4", 32, **LAYOUTS["points"]), np.ones((8, 64), np.float32),
                             "F32")


@pytest.mark.slow
@pytest.mark.skipif("ALLSPARK_ISA" in os.environ, reason="an instruction set is forced from outside")
@pytest.mark.parametrize("isa", LOWER)
def test_lower_instruction_sets_pass_the_same_tests(isa):
    run_again(__file__, isa)
