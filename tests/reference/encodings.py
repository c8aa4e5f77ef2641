"""Stored matrices: a common form for all that a Program can declare (native/program/weight_spec.h), its decoding, and
the conversion of checkpoints' packings to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allspark_server.weights.formats import ScaleLayout

# QLoRA (Dettmers et al., 2023), appendix E; OCP Microscaling Formats 1.0, table 5.
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                1.0])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3(quants):
    """OCP FP8 E4M3: no infinities, one NaN per sign."""
    sign, exponent, mantissa = np.where(quants >> 7, -1.0, 1.0), quants >> 3 & 15, quants & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7))
    return np.where(quants & 127 == 127, np.nan, sign * values)


BITS = {"int8": 8, "w8a8": 8, "int6": 6, "int5": 5, "int4": 4, "w4a8": 4, "int3": 3, "int2": 2}
TABLES = {"nf4": NF4, "e2m1": E2M1, "e4m3": _e4m3(np.arange(256))}


@dataclass
class Stored:
    """A matrix [n, k].

    `quants` is uint8 [n, k]: quantized values, for integers the value + 2^(bits - 1). `scales` and `offsets` are
    numbers for each row (or block of rows) and group; nested scales are integers that super_scales and super_offsets of
    each super-group multiply. `points` are integers that replace 2^(bits - 1). `group_of` is the group of each column,
    if columns are permuted.
    """

    format: str
    group: int
    layout: ScaleLayout
    quants: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    points: np.ndarray | None = None
    super_scales: np.ndarray | None = None
    super_offsets: np.ndarray | None = None
    group_of: np.ndarray | None = None

    def declare(self, program) -> int:
        return program.add_matrix(*self.quants.shape, self.format, self.group, **self.layout.changed())

    def decode(self) -> np.ndarray:
        """The matrix in float64."""
        (n, k), layout = self.quants.shape, self.layout
        column_groups = np.arange(k) // (self.group or k) if self.group_of is None else self.group_of
        rows = np.arange(n)[:, None] // layout.group_rows
        values, scales = self.quants.astype(float), self.scales[rows, column_groups].astype(float)
        if layout.super_group:
            scales = scales * self.super_scales[rows, np.arange(k) // layout.super_group]
        if self.format in TABLES:
            values = TABLES[self.format][self.quants]
        elif layout.zeros == "points":
            values = values - self.points[rows, column_groups]
        else:
            values = values - (1 << (BITS[self.format] - 1)) * (layout.zeros != "offsets" or not layout.super_group)
        if layout.zeros != "offsets":
            return scales * values
        offsets = self.offsets[rows, column_groups].astype(float)
        if layout.super_group:
            offsets = offsets * self.super_offsets[rows, np.arange(k) // layout.super_group]
        return scales * values + offsets


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Fields of each word along the last axis, the lowest first: [..., words * fields]."""
    width = 8 * words.itemsize
    fields = words[..., None].view(f"u{words.itemsize}") >> np.arange(0, width, bits, dtype=f"u{words.itemsize}")
    return (fields & ((1 << bits) - 1)).astype(np.uint8).reshape(*words.shape[:-1], -1)


def gptq(qweight, qzeros, scales, g_idx, bits: int, group: int) -> Stored:
    """`qweight` int32 [k * bits / 32, n], qzeros int32 [groups, n * bits / 32] (one less than the zero point), scales
    float16 [groups, n], g_idx [k].
    """
    quants = unpacked(np.ascontiguousarray(qweight.T), bits)
    points = unpacked(qzeros, bits).astype(int).T + 1
    layout = ScaleLayout("float16", "points", permuted=True)
    return Stored(f"int{bits}", group, layout, quants, scales.T, points=points, group_of=g_idx)


AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where columns 0 to 7 are in a word


def awq(qweight, qzeros, scales, group: int) -> Stored:
    """`qweight` int32 [k, n / 8], qzeros int32 [groups, n / 8], scales float16 [groups, n]."""

    def ordered(words):
        return unpacked(words, 4).reshape(len(words), -1, 8)[:, :, AWQ_ORDER].reshape(len(words), -1).T

    layout = ScaleLayout("float16", "points")
    return Stored("int4", group, layout, ordered(qweight), scales.T, points=ordered(qzeros).astype(int))


def packed_int4(packed, scales, k: int, group: int) -> Stored:
    """compressed-tensors' pack-quantized: int32 [n, k / 8], the lowest field first; bfloat16 scales [n, groups]."""
    return Stored("int4", group, ScaleLayout("bfloat16", "none"), unpacked(packed, 4)[:, :k], scales)


def fp8_blocks(quants, scales) -> Stored:
    """E4M3 [n, k] and float32 scales of blocks of 128 x 128."""
    return Stored("e4m3", 128, ScaleLayout("float32", "none", group_rows=128), quants, scales)


def mxfp4(blocks, scales) -> Stored:
    """uint8 [n, groups, 16] of 32 quants, the lower half first, and scales' exponents uint8 [n, groups]."""
    quants = unpacked(blocks, 4).reshape(len(blocks), -1)
    return Stored("e2m1", 32, ScaleLayout("e8m0", "none"), quants, 2.0 ** (scales.astype(float) - 127))


def nf4(packed, absmax, n: int, k: int) -> Stored:
    """bitsandbytes: uint8 of two quants, the upper half first, over the rows one after the other; a float32 scale for
    each 64.
    """
    quants = unpacked(packed.ravel(), 4).reshape(-1, 2)[:, ::-1].reshape(n, k)
    return Stored("nf4", 64, ScaleLayout("float32", "none"), quants, absmax.reshape(n, -1))


# -- ggml's blocks: uint8 [n, blocks, bytes] ---------------------------------------------------------------------------
def _halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16)[..., 0].astype(float)


def q8_0(data: np.ndarray) -> Stored:
    quants = (data[..., 2:] ^ 0x80).reshape(len(data), -1)
    return Stored("int8", 32, ScaleLayout("float16", "none"), quants, _halves(data[..., :2]))


def q4_0(data: np.ndarray) -> Stored:
    octets = data[..., 2:]
    quants = np.concatenate([octets & 15, octets >> 4], -1).reshape(len(data), -1)
    return Stored("int4", 32, ScaleLayout("float16", "none"), quants, _halves(data[..., :2]))


def q4_k(data: np.ndarray) -> Stored:
    packed, octets = data[..., 4:16], data[..., 16:].reshape(*data.shape[:-1], 4, 32)
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, last & 15 | low >> 6 << 4], -1)
    mins = np.concatenate([high & 63, last >> 4 | high >> 6 << 4], -1)
    quants = np.stack([octets & 15, octets >> 4], -2)
    n = len(data)
    return Stored("int4", 32, ScaleLayout("float16", "offsets", super_group=256, scale_bits=6), quants.reshape(n, -1),
                  scales.reshape(n, -1), mins.reshape(n, -1), super_scales=_halves(data[..., :2]),
                  super_offsets=-_halves(data[..., 2:4]))


def q6_k(data: np.ndarray) -> Stored:
    n, blocks = data.shape[:2]
    low, high = data[..., :128].reshape(n, blocks, 2, 2, 32), data[..., 128:192].reshape(n, blocks, 2, 1, 32)
    fields = np.concatenate([low & 15, low >> 4], -2)  # [.., 2, 4, 32]
    quants = fields | (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    return Stored("int6", 16, ScaleLayout("float16", "none", super_group=256, scale_bits=8), quants.reshape(n, -1),
                  data[..., 192:208].view(np.int8).reshape(n, -1), super_scales=_halves(data[..., 208:]))
