"""GGUF's types: a row is divided into blocks of values; quantized blocks become plain rows of quantized values.

The number that a quantized value q stands for, as ggml dequantizes it:
  Q4_0, Q5_0, Q8_0   d * (q - middle)                       Q4_1, Q5_1   d * q + m
  Q2_K, Q4_K, Q5_K   (d * scale) * q - (dmin * minimum)     Q3_K, Q6_K   (d * scale) * (q - middle)
d, m and dmin are float16. Scales and minimums of the K types are integers of 4, 6 or 8 bits, one for each group of 16
or 32 values; a super-group has 256 values. All products are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from allspark_server.weights.formats import ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, pack_quants

SUPER = 256
_HALF = np.dtype("<f2")


@dataclass(frozen=True)
class BlockType:
    """A type of tensors, in blocks of `values` values and `bytes` bytes.

    plain: safetensors' name of a type that is not quantized. form: the matrix format of a quantized type. rows: unpacks
    blocks, uint8 [n, blocks, bytes], into rows, for types that the native library does not read.
    """

    name: str
    values: int
    bytes: int
    plain: str = ""
    form: WeightFormat | None = None
    rows: Callable[[np.ndarray], QuantizedRows] | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block: [n, blocks]."""
    return np.ascontiguousarray(blocks[:, :, at:at + 2]).view(_HALF)[..., 0]


def _flat(values: np.ndarray, bits: int) -> np.ndarray:
    """Values [n, blocks, ...] packed into rows of `bits` bits a value."""
    return pack_quants(values.reshape(len(values), -1), bits)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The lower halves of bytes, then their upper halves: [n, blocks, 2, bytes]."""
    return np.stack((packed & 15, packed >> 4), axis=2)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 32 bits at byte `at` of each block, the lowest first: [n, blocks, 32]."""
    return np.unpackbits(blocks[:, :, at:at + 4], axis=2, bitorder="little")


def _q5(blocks: np.ndarray, at: int) -> np.ndarray:
    values = _nibbles(blocks[:, :, at + 4:]).reshape(*blocks.shape[:2], 32)
    return _flat(values | _fifth_bits(blocks, at) << 4, 8)


def _q5_0(blocks: np.ndarray) -> QuantizedRows:
    return QuantizedRows(_q5(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> QuantizedRows:
    return QuantizedRows(_q5(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _minus(half: np.ndarray) -> np.ndarray:
    return (half.view(np.uint16) ^ np.uint16(0x8000)).view(_HALF)


def _nested(values: np.ndarray, bits: int, d: np.ndarray, scales: np.ndarray, dmin: np.ndarray | None = None,
            minimums: np.ndarray | None = None) -> QuantizedRows:
    def rows(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else np.ascontiguousarray(x.reshape(len(x), -1)).view(np.int8)

    return QuantizedRows(_flat(values, bits), rows(scales), rows(minimums), d, None if dmin is None else _minus(dmin))


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """The 2-bit values of 64 bytes: [n, blocks, 2, 4, 32]."""
    shifts = np.array([[0], [2], [4], [6]], np.uint8)
    return packed.reshape(*packed.shape[:2], 2, 1, 32) >> shifts & 3


def _q2_k(blocks: np.ndarray) -> QuantizedRows:
    both = blocks[:, :, :16]
    return _nested(_two_bits(blocks[:, :, 16:80]), 4, _half(blocks, 80), both & 15, _half(blocks, 82), both >> 4)


def _q3_k(blocks: np.ndarray) -> QuantizedRows:
    third = blocks[:, :, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = _two_bits(blocks[:, :, 32:96])
    values = values | (third << 2).reshape(values.shape)
    low = blocks[:, :, None, 96:104] >> np.array([[0], [4]], np.uint8) & 15
    high = blocks[:, :, None, 104:108] >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    scales = low.reshape(*blocks.shape[:2], 16) | high.reshape(*blocks.shape[:2], 16) << 4
    return _nested(values, 4, _half(blocks, 108), scales - np.uint8(32))


def _simple(dtype: str, zeros: str, center: int | None) -> WeightFormat:
    return WeightFormat(dtype, 32, ScaleLayout("float16", zeros, center=center))


def _k(dtype: str, group: int, zeros: str, center: int | None) -> WeightFormat:
    return WeightFormat(dtype, group, ScaleLayout("float16", zeros, super_group=SUPER, scale_bits=8, center=center))


TYPES = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: BlockType("Q4_0", 32, 18, form=_simple("int4", "none", None)),
    3: BlockType("Q4_1", 32, 20, form=_simple("int4", "offsets", 0)),
    6: BlockType("Q5_0", 32, 22, form=_simple("int8", "none", 16), rows=_q5_0),
    7: BlockType("Q5_1", 32, 24, form=_simple("int8", "offsets", 0), rows=_q5_1),
    8: BlockType("Q8_0", 32, 34, form=_simple("int8", "none", None)),
    10: BlockType("Q2_K", SUPER, 84, form=_k("int4", 16, "offsets", 0), rows=_q2_k),
    11: BlockType("Q3_K", SUPER, 110, form=_k("int4", 16, "none", 4), rows=_q3_k),
    12: BlockType("Q4_K", SUPER, 144, form=_k("int4", 32, "offsets", 0)),
    13: BlockType("Q5_K", SUPER, 176, form=_k("int8", 32, "offsets", 0)),
    14: BlockType("Q6_K", SUPER, 210, form=_k("int8", 16, "none", 32)),
    30: BlockType("BF16", 1, 2, "BF16"),
}
# Other types of ggml, past and present, which errors name.
TYPE_NAMES = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
              22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
              31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
