"""Weights in foreign formats: decoded by the reference backend, and value by value from their published layouts."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from allspark_server import _native
from reference import encodings
from reference.toy import Toy

RNG = np.random.default_rng(12)


def words(*shape):
    return RNG.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def octets(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


def halves(*shape):
    return RNG.normal(size=shape).astype(np.float16)


def field(word, index, bits):
    return (int(word) & 0xFFFFFFFF) >> index * bits & (1 << bits) - 1


def with_halves(data, *at):
    """GGML blocks whose float16 fields are numbers."""
    for offset in at:
        data[..., offset:offset + 2] = halves(*data.shape[:2])[..., None].view(np.uint8)
    return data


def half(block, at):
    return struct.unpack_from("<e", block.tobytes(), at)[0]


# Each returns the stored matrix and a function (row, column) -> value written from the published layout alone.
def case_gptq(bits=4):
    k, n, group = 64, 24, 32
    qweight, qzeros, scales = words(k * bits // 32, n), words(k // group, n * bits // 32), halves(k // group, n)
    g_idx = RNG.permutation(np.arange(k) // group)  # act-order
    each = 32 // bits

    def value(row, column):
        g = g_idx[column]
        zero = field(qzeros[g, row // each], row % each, bits) + 1
        return float(scales[g, row]) * (field(qweight[column // each, row], column % each, bits) - zero)

    return encodings.gptq(qweight, qzeros, scales, g_idx, bits, group), value


def case_gptq_8_bits():
    return case_gptq(8)


def case_awq():
    k, n, group = 64, 24, 32
    qweight, qzeros, scales = words(k, n // 8), words(k // group, n // 8), halves(k // group, n)
    place = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7

    def value(row, column):
        zero = field(qzeros[column // group, row // 8], place[row % 8], 4)
        return float(scales[column // group, row]) * (field(qweight[column, row // 8], place[row % 8], 4) - zero)

    return encodings.awq(qweight, qzeros, scales, group), value


def case_packed_int4():
    n, k, group = 5, 64, 32
    packed, scales = words(n, k // 8), halves(n, k // group).astype(float)
    return (encodings.packed_int4(packed, scales, k, group),
            lambda row, column: scales[row, column // group] * (field(packed[row, column // 8], column % 8, 4) - 8))


def case_fp8_blocks():
    n, k = 131, 200
    quants, scales = octets(n, k) & 0xFE, RNG.normal(size=(2, 2)).astype(np.float32)

    def value(row, column):
        code = int(quants[row, column])
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        return (-size if code >> 7 else size) * float(scales[row // 128, column // 128])

    return encodings.fp8_blocks(quants, scales), value


def case_mxfp4():
    n, groups = 6, 3
    blocks, scales = octets(n, groups, 16), RNG.integers(118, 136, (n, groups)).astype(np.uint8)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

    def value(row, column):
        code = field(blocks[row, column // 32, column % 32 // 2], column % 2, 4)
        return (-1) ** (code >> 3) * sizes[code & 7] * 2.0 ** (int(scales[row, column // 32]) - 127)

    return encodings.mxfp4(blocks, scales), value


def case_nf4():
    n, k = 4, 128
    packed, absmax = octets(n * k // 2), np.abs(RNG.normal(size=n * k // 64)).astype(np.float32)

    def value(row, column):
        flat = row * k + column
        return encodings.NF4[packed[flat // 2] >> (4 if flat % 2 == 0 else 0) & 15] * float(absmax[flat // 64])

    return encodings.nf4(packed, absmax, n, k), value


def case_q8_0():
    data = with_halves(octets(3, 2, 34), 0)

    def value(row, column):
        block = data[row, column // 32]
        return half(block, 0) * int(block[2:].view(np.int8)[column % 32])

    return encodings.q8_0(data), value


def case_q4_0():
    data = with_halves(octets(3, 2, 18), 0)

    def value(row, column):
        block, i = data[row, column // 32], column % 32
        return half(block, 0) * ((int(block[2 + i % 16]) >> (0 if i < 16 else 4) & 15) - 8)

    return encodings.q4_0(data), value


def case_q4_k():
    """ggml-quants.c: dequantize_row_q4_K and get_scale_min_k4."""
    data = with_halves(octets(3, 2, 144), 0, 2)

    def value(row, column):
        block, i = data[row, column // 256], column % 256
        q, j = [int(b) for b in block[4:16]], i // 32
        if j < 4:
            scale, minimum = q[j] & 63, q[j + 4] & 63
        else:
            scale = q[j + 4] & 0xF | q[j - 4] >> 6 << 4
            minimum = q[j + 4] >> 4 | q[j] >> 6 << 4
        code = int(block[16 + 32 * (i // 64) + i % 32]) >> (4 if i % 64 >= 32 else 0) & 15
        return half(block, 0) * scale * code - half(block, 2) * minimum

    return encodings.q4_k(data), value


def case_q6_k():
    """ggml-quants.c: dequantize_row_q6_K."""
    data = with_halves(octets(3, 2, 210), 208)

    def value(row, column):
        block, i = data[row, column // 256], column % 256
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        ql = int(block[64 * part + lane + 32 * (quarter % 2)])
        qh = int(block[128 + 32 * part + lane])
        code = (ql >> 4 if quarter >= 2 else ql & 15) | (qh >> 2 * quarter & 3) << 4
        scale = int(block[192:208].view(np.int8)[8 * part + 2 * quarter + lane // 16])
        return half(block, 208) * scale * (code - 32)

    return encodings.q6_k(data), value


CASES = [case_gptq, case_gptq_8_bits, case_awq, case_packed_int4, case_fp8_blocks, case_mxfp4, case_nf4, case_q8_0,
         case_q4_0, case_q4_k, case_q6_k]  # fmt: skip
# Bytes of a row of 256 values as llama.cpp and the others have them.
ROW_BYTES = {"case_q8_0": 8 * 34, "case_q4_0": 8 * 18, "case_q4_k": 144, "case_q6_k": 210, "case_mxfp4": 8 * 17,
             "case_packed_int4": 128 + 8 * 2, "case_nf4": 128 + 4 * 4}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
def test_decoding(case):
    stored, value = case()
    found = stored.decode()
    expected = [[value(row, column) for column in range(found.shape[1])] for row in range(found.shape[0])]
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    assert np.isfinite(found).all() and len(np.unique(found)) > 9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
def test_a_program_declares_it_and_computes_with_it(case):
    stored, _ = case()
    n, k = stored.quants.shape
    toy = Toy()
    x = toy.embedding(3, k)
    handle = stored.declare(toy.program)
    toy.weights[handle] = stored
    toy.emit(toy.op("linear", (x,), n, (handle,)))
    rows = RNG.normal(size=(5, k)).astype(np.float32).astype(float)
    np.testing.assert_allclose(toy.emitted(embeddings=rows), rows @ stored.decode().T, rtol=1e-12, atol=1e-12)
    if case.__name__ in ROW_BYTES:
        program = _native.Program()
        a, b = program.add_tensor(256), program.add_tensor(7)
        matrix = program.add_matrix(7, 256, stored.format, stored.group, **stored.layout.changed())
        op = program.add_op("linear", [a], [b], [matrix], {})
        assert program.cost(op, rows=0)[0] == 7 * ROW_BYTES[case.__name__]


def test_k_quants_are_those_of_the_gguf_library():
    gguf = pytest.importorskip("gguf")
    for kind, size, at, unpack in (("Q4_K", 144, (0, 2), encodings.q4_k), ("Q6_K", 210, (208,), encodings.q6_k),
                                   ("Q8_0", 34, (0,), encodings.q8_0), ("Q4_0", 18, (0,), encodings.q4_0)):
        data = with_halves(octets(3, 2, size), *at)
        expected = gguf.quants.dequantize(data.reshape(3, -1), gguf.GGMLQuantizationType[kind])
        np.testing.assert_allclose(unpack(data).decode(), expected, rtol=1e-5, atol=1e-6)


def test_a_weight_stored_otherwise_than_declared_is_refused():
    stored, _ = case_mxfp4()
    toy = Toy()
    toy.weights[toy.program.add_matrix(*stored.quants.shape, "e2m1", 32)] = stored
    with pytest.raises(ValueError, match="weight 0 is declared as e2m1, groups of 32, and is e2m1"):
        toy.runner()


@pytest.mark.parametrize("form, group, layout, problem", [
    ("float16", 0, {"scales": "float16"}, "matrix of format float16 has no scales"),
    ("nf4", 64, {"zeros": "points"}, "no zero points: its quantized values are not integers"),
    ("int4", 32, {"scales": "int8"}, "scales must be one of none, float32, bfloat16, float16, e8m0, got int8"),
    ("int4", 32, {"zeros": "some"}, "zeros must be one of none, offsets, points, got some"),
    ("e4m3", 0, {"group_rows": 128}, "scales of 128 rows need .* groups along in_features"),
    ("int4", 32, {"super_group": 256}, "nested scales need 1 to 8 bits and super-groups that are whole groups"),
    ("int4", 32, {"super_group": 80, "scale_bits": 6}, "super-groups of 80 values over groups of 32"),
])  # fmt: skip
def test_layouts_that_cannot_be(form, group, layout, problem):
    with pytest.raises(ValueError, match=problem):
        _native.Program().add_matrix(4, 512, form, group, **layout)
