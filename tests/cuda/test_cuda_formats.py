"""Quantized weights and caches on the GPU: recovered values equal the CPU backend's, and GEMM kernels agree bit by
bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server import _native
from reference.plan import SAMPLE
from reference.test_cpu_ops import compiled as on_cpu
from reference.toy import Toy, item, plan, start
from support.gpu_toys import (
    HEADS,
    LENGTHS,
    SEED,
    VOCAB,
    as_bf16,
    as_float8,
    compare,
    compiled,
    embedded,
    executor,
    of_bytes,
    small_model,
    step_of,
    tokens_of,
    toy,
)

pytestmark = pytest.mark.cuda
FORMATS = [("int4", 64), ("int4", 0), ("int4", 32), ("int8", 0), ("int8", 128), ("int8", 16)]
INTEGERS = [("w8a8", 0), ("w8a8", 64), ("w4a8", 0), ("w4a8", 128)]  # and activations of 8 bits
SIZES = [(1, 1), (3, 7), (41, 31), (97, 64), (130, 257), (67, 1091), (65, 2049), (200, 4100), (1030, 900)]
EXACT = 2e-5
PARTS = ((0, 1), (7, 2), (1, 8), (2, 9), (4, 17), (9, 33), (20, 65), (100, 128), (11, 190))  # first row, and how many


def stored(values: np.ndarray, source: str) -> np.ndarray:
    if source == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[source])


def rows_of(backend, handle: int, n: int) -> np.ndarray:
    if hasattr(backend, "read_rows"):  # the GPU's
        return backend.read_rows(handle)
    return np.stack([backend.read_row(handle, row) for row in range(n)])


@pytest.mark.parametrize("form, group", [*FORMATS, ("w8a8", 64)])
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
def test_weights_are_quantized_as_on_the_cpu(form, group, source):
    """Bit by bit; with equal values, zeros, wide ranges, and a slice of longer rows."""
    rng, gpu, cpu = np.random.default_rng(SEED), executor(), _native.Executor()
    for n, k in SIZES[:7]:
        values = rng.normal(size=(n, k)) * 10.0 ** rng.integers(-4, 4, (n, 1))
        values[0, :] = 0.25
        values[n // 2, : k // 2] = 0
        values[n - 1] *= np.where(np.arange(k) % 9, 1e-3, 1)
        data = stored(values, source)
        handles = [backend.add_matrix(n, k, form, group) for backend in (gpu, cpu)]
        assert gpu.fill_matrix(handles[0], data, source) == cpu.fill_matrix(handles[1], data, source) == 0
        assert rows_of(gpu, handles[0], n).tobytes() == rows_of(cpu, handles[1], n).tobytes(), (n, k)
        assert gpu.source_hash(handles[0]) == cpu.source_hash(handles[1])
    data = stored(rng.normal(size=(70, 512)), source)
    halves = [data[:30], data[30:]]
    handles = [backend.add_matrix(90, 256, form, group) for backend in (gpu, cpu)]
    for backend, handle in zip((gpu, cpu), handles):
        assert backend.fill_rows(handle, halves, source, 11, 128, group) == [0, 0]
    assert rows_of(gpu, handles[0], 90)[11:81].tobytes() == rows_of(cpu, handles[1], 90)[11:81].tobytes()
    assert not rows_of(gpu, handles[0], 90)[:11].any()
    assert gpu.source_hash(handles[0]) == cpu.source_hash(handles[1])


@pytest.mark.parametrize("form, group", [("int4", 64), ("int8", 0)])
def test_values_that_are_not_finite(form, group):
    rng, gpu, cpu = np.random.default_rng(SEED), executor(), _native.Executor()
    values = rng.normal(size=(20, 200)).astype(np.float32)
    values[3, 70], values[3, 71], values[7, 199] = np.nan, np.inf, -np.inf
    found = []
    for backend in (gpu, cpu):
        handle = backend.add_matrix(20, 200, form, group)
        assert backend.fill_matrix(handle, values, "F32") == 3
        found.append(rows_of(backend, handle, 20))
    np.testing.assert_array_equal(*found)
    assert np.isnan(found[0]).sum() == (2 * 200 if group == 0 else 64 + 8)


@pytest.mark.parametrize("form, bits, group", [("int4", 4, 64), ("int4", 4, 0), ("int8", 8, 32), ("int8", 8, 0)])
def test_rows_that_are_quantized_already(form, bits, group):
    rng, gpu, cpu = np.random.default_rng(SEED), executor(), _native.Executor()
    for n, k in ((3, 7), (70, 257), (130, 640)):
        q, scales, offsets, bad = cpu.quantize_rows(rng.normal(size=(n, k)).astype(np.float32), "F32", bits, group)
        assert bad == 0
        found = []
        for backend in (gpu, cpu):
            handle = backend.add_matrix(n + 5, k, form, group)
            assert backend.fill_quantized(handle, q, scales, offsets, bits, k, group, 2) == 0
            found.append(rows_of(backend, handle, n + 5)[2:n + 2].tobytes())
        assert found[0] == found[1]


@pytest.mark.parametrize("n, k", [(1, 1), (3, 7), *SIZES[4:]])
@pytest.mark.parametrize("form, group", [*FORMATS, ("int4", 192), *INTEGERS])
def test_products_of_any_number_of_rows_have_the_same_bits(n, k, form, group):
    """With every kernel; and against float64."""
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, form, group)
    gpu.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5 + 0.01).astype(np.float32), "F32")
    x, bias = rng.normal(size=(301, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    every = gpu.multiply(handle, x, n, bias)
    weights = rows_of(gpu, handle, n)
    if (form, group) in INTEGERS:
        expected = of_bytes(x) @ weights.astype(float).T + bias
    else:
        expected = as_bf16(x) @ as_bf16(weights).T + bias
    error = np.abs(every - expected).max() / np.sqrt(np.mean(expected**2))
    assert error < EXACT, error
    for first, rows in PARTS:
        for algo in ("any", "mma", "stream_k", "prefill"):
            part = gpu.multiply(handle, x[first:first + rows], n, bias, algo)
            assert part.tobytes() == every[first:first + rows].tobytes(), (first, rows, algo)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0, 0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2,
                0x3f10, 0x3f39, 0x3f80], np.uint32)  # as bfloat16


@pytest.mark.parametrize("n, k", [(1, 2), (3, 16), (41, 48), (97, 64), (65, 2050), (200, 4100), (1030, 900)])
@pytest.mark.parametrize("form, group", [("e2m1", 16), ("e2m1", 32), ("nf4", 64), ("nf4", 128)])
def test_products_of_small_floats(n, k, form, group):
    """As stored, from column 64 of longer rows on; by every kernel at any number of rows."""
    rng, gpu = np.random.default_rng(SEED), executor()
    first = 64 if form == "e2m1" else 128
    columns = first + k + (64 if n % 2 else 0)  # also none behind those that are taken
    quants = rng.integers(0, 16, (n, columns)).astype(np.uint8)
    scales = stored(2.0 ** rng.uniform(-9, -3, (n, -(-columns // group))), "BF16")
    handle = gpu.add_matrix(n, k, form, group, zeros="none")
    assert gpu.fill_quantized(handle, quants[:, 0::2] | quants[:, 1::2] << 4, scales, None, 4, columns, group,
                              column=first) == 0
    table = E2M1 if form == "e2m1" else (NF4 << 16).view(np.float32).astype(float)
    wide = (scales.astype(np.uint32) << 16).view(np.float32)
    expected = (table[quants] * np.repeat(wide, group, axis=1)[:, :columns])[:, first:first + k].astype(np.float32)
    np.testing.assert_array_equal(gpu.read_rows(handle), expected)
    x, bias = rng.normal(size=(301, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    every = gpu.multiply(handle, x, n, bias)
    product = as_bf16(x) @ as_bf16(expected).T
    of_addition = 2.0**-23 * np.abs(product + bias).max()  # in float32; the product of two columns may be zero
    assert np.abs(every - product - bias).max() < EXACT * np.sqrt(np.mean(product**2)) + of_addition
    for begin, rows in PARTS:
        for algo in ("any", "mma", "stream_k", "prefill"):
            part = gpu.multiply(handle, x[begin:begin + rows], n, bias, algo)
            assert part.tobytes() == every[begin:begin + rows].tobytes(), (begin, rows, algo)


def test_scales_that_e2m1_cannot_have():
    gpu, scales = executor(), stored(np.array([[4, 1], [np.nan, 3.9]]), "BF16")
    handle = gpu.add_matrix(2, 32, "e2m1", 16)
    assert gpu.fill_quantized(handle, np.zeros((2, 16), np.uint8), scales, None, 4, 32, 16) == 2


@pytest.mark.parametrize("n, k", [(3, 7), (97, 64), (67, 1091), (200, 4100)])
@pytest.mark.parametrize("form, group", [("int4", 64), ("int8", 128)])
def test_permuted_columns(n, k, form, group):
    """The bits are those of the columns in their places and of rows gathered before."""
    rng, gpu = np.random.default_rng(SEED), executor()
    bits, order = 8 if form == "int8" else 4, rng.permutation(k).astype(np.int32)
    values = rng.normal(size=(n, k)).astype(np.float32)
    q, scales, offsets, _ = _native.Executor().quantize_rows(np.ascontiguousarray(values[:, order]), "F32",
                                                           bits, group)
    permuted, plain = gpu.add_matrix(n, k, form, group, order=order.tolist()), gpu.add_matrix(n, k, form, group)
    for handle in (permuted, plain):
        gpu.fill_quantized(handle, q, scales, offsets, bits, k, group)
    np.testing.assert_array_equal(gpu.read_rows(permuted)[:, order], gpu.read_rows(plain))
    x = rng.normal(size=(301, k)).astype(np.float32)
    for rows in (1, 2, 9, 33, 301):
        expected = gpu.multiply(plain, np.ascontiguousarray(x[:rows, order]), n)
        assert gpu.multiply(permuted, x[:rows], n).tobytes() == expected.tobytes()
    for wrong in (order.tolist()[1:], [0] * k, [-1] * k):
        with pytest.raises(ValueError, match="order: must have each of"):
            gpu.add_matrix(n, k, form, group, order=wrong)


@pytest.mark.parametrize("n, k", [*SIZES, (70, 129), (300, 640), (1000, 3968)])
@pytest.mark.parametrize("group", [0, 128])
def test_float8(n, k, group):
    rng, gpu = np.random.default_rng(SEED), executor()
    values = (rng.normal(size=(n, k)) * 10.0 ** rng.integers(-3, 3, (n, 1))).astype(np.float32)
    handle = gpu.add_matrix(n, k, "float8", group)
    assert gpu.fill_matrix(handle, values, "F32") == 0
    weights = rows_of(gpu, handle, n)
    np.testing.assert_array_equal(weights, as_float8(values, group))
    x, bias = rng.normal(size=(301, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    every = gpu.multiply(handle, x, n, bias)
    expected = as_float8(x, group).astype(float) @ rows_of(gpu, handle, n).astype(float).T
    error = np.abs(every - bias - expected) / np.sqrt(np.mean(expected**2, 0))
    print(f"error {error.max():.2e}")
    assert error.max() < (2e-3 if group else 2e-2)  # few bits of a sum within 128 of K, and of K
    for first, rows in PARTS:
        for algo in ("any", "stream_k", "prefill"):
            part = gpu.multiply(handle, x[first:first + rows], n, bias, algo)
            assert part.tobytes() == every[first:first + rows].tobytes(), (first, rows, algo)


def test_float8_blocks_of_a_checkpoint():
    """Values of 128 x 128 with a scale each: whole, and the columns of a rank."""
    rng, gpu = np.random.default_rng(SEED), executor()
    n, k = 300, 520
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    exponents, fractions = codes >> 3 & 15, codes & 7
    values = np.where(exponents, (8 + fractions) * 2.0 ** (exponents.astype(int) - 10), fractions * 2.0**-9)
    values = np.where(codes & 0x80, -values, values).astype(np.float32)
    of_blocks = (rng.uniform(0.5, 2, (3, 5)) * 1e-3).astype(np.float32)
    scales = np.ascontiguousarray(of_blocks[np.arange(n) // 128])
    expected = values * np.repeat(scales, 128, 1)[:, :k]
    words = scales.view(np.uint32)
    halves = words.astype(np.uint16), (words >> 16).astype(np.uint16)
    for first, last in ((0, k), (128, 384), (384, k)):
        handle = gpu.add_matrix(n + 3, last - first, "float8", 128)
        assert gpu.fill_quantized(handle, codes, *halves, 8, k, 128, 2, first) == 0
        np.testing.assert_array_equal(rows_of(gpu, handle, n + 3)[2:-1], expected[:, first:last])
    with pytest.raises(ValueError, match="groups of 128 from column 64 on are not parts of groups of 128"):
        gpu.fill_quantized(gpu.add_matrix(n, 256, "float8", 128), codes, *halves, 8, k, 128, 0, 64)


@pytest.mark.parametrize("n, k, paired", [(300, 520, False), (300, 512, True), (4700, 1536, False), (260, 4096, True),
                                          (9000, 2816, True)])
def test_products_of_float8_blocks(n, k, paired):
    """Kernels with fewer products of scales for equal scales in a block, also if gate and up rows are interleaved."""
    rng, gpu = np.random.default_rng(SEED), executor()
    quants = rng.integers(0, 0x78, (n, k)).astype(np.uint8) | rng.integers(0, 2, (n, k)).astype(np.uint8) << 7
    scales = np.repeat(rng.uniform(1e-4, 2e-4, (-(-n // 64), -(-k // 128))), 64, 0)[:n].astype(np.float32)
    if paired:
        scales[np.arange(n) % 16 >= 8] *= np.float32(3)
    words, handle = scales.view(np.uint32), gpu.add_matrix(n, k, "float8", 128)
    gpu.fill_quantized(handle, quants, words.astype(np.uint16), (words >> 16).astype(np.uint16), 8, k, 128, 0)
    x = rng.normal(size=(301, k)).astype(np.float32)
    every = gpu.multiply(handle, x, n)
    expected = as_float8(x, 128).astype(float) @ rows_of(gpu, handle, n).astype(float).T
    assert np.abs(every - expected).max() < 3e-3 * np.sqrt(np.mean(expected**2))
    for rows in (1, 30, 64, 65, 129, 301):
        for algo in ("any", "stream_k", "prefill"):
            assert gpu.multiply(handle, x[:rows], n, None, algo).tobytes() == every[:rows].tobytes(), (rows, algo)


# With 132 SMs these are tiles of 192 columns with parts beside one another, of 64, of 128 and 192 with parts after one
# another, and of 192 with whole sums.
@pytest.mark.parametrize("n, k, rows", [(4600, 3584, 40), (3580, 3584, 250), (3580, 18944, 500), (3580, 18944, 4300),
                                        (18004, 896, 1100)])
def test_wide_tiles_of_float8_blocks(n, k, rows):
    rng, gpu = np.random.default_rng(SEED), executor()
    quants = rng.integers(0, 0x78, (n, k)).astype(np.uint8) | rng.integers(0, 2, (n, k)).astype(np.uint8) << 7
    scales = np.repeat(rng.uniform(1e-4, 2e-4, (-(-n // 64), -(-k // 128))), 64, 0)[:n].astype(np.float32)
    words, handle = scales.view(np.uint32), gpu.add_matrix(n, k, "float8", 128)
    gpu.fill_quantized(handle, quants, words.astype(np.uint16), (words >> 16).astype(np.uint16), 8, k, 128, 0)
    x = np.resize(rng.normal(size=(min(rows, 997), k)).astype(np.float32), (rows, k))
    bias = rng.normal(size=n).astype(np.float32)
    few, many = (gpu.multiply(handle, x, n, bias, algo) for algo in ("stream_k", "prefill"))
    assert np.array_equal(many.view(np.uint32), few.view(np.uint32))


@pytest.mark.parametrize("form, group", [("float8", 0), ("float8", 128), ("int4", 64), ("int8", 0), ("w8a8", 0),
                                         ("w4a8", 64)])
@pytest.mark.parametrize("n, k", [(17004, 700), (3700, 2900), (9000, 1536)])
def test_products_whose_tiles_are_shared(n, k, form, group):
    """Split-K in one part, in several with a CTA each, and in several that CTAs share, where one continues another's
    sum.
    """
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, form, group)
    gpu.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32), "F32")
    x = rng.normal(size=(300, k)).astype(np.float32)
    every = gpu.multiply(handle, x, n, None, "prefill" if form in ("float8", "int4", "int8") else "mma")
    for rows in (1, 3, 9, 20, 40, 100, 130, 300):
        for algo in ("any", "stream_k", "prefill") if form in ("float8", "w8a8") else ("any", "stream_k"):
            assert gpu.multiply(handle, x[:rows], n, None, algo).tobytes() == every[:rows].tobytes(), (rows, algo)


@pytest.mark.parametrize("form, group", [("float8", 0), ("float8", 128), ("w8a8", 0)])
@pytest.mark.parametrize("n, k", [(1, 1), (70, 129), (64, 4096), (130, 9000), (3584, 18944), (4608, 3584),
                                  (5000, 2049), (3500, 1340), (3584, 26000)])
def test_one_row_that_its_product_quantizes(n, k, form, group):
    """Each CTA has a part of the row; CTAs exchange the largest value, unless groups of it have scales."""
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, form, group)
    gpu.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32), "F32")
    x, bias = rng.normal(size=(9, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    x[1, k // 2], x[2, -1], x[3], x[4, 0], x[5, k // 3] = 1e30, -300, 0, np.nan, -np.inf
    every = gpu.multiply(handle, x, n, bias)
    for row in range(9):
        np.testing.assert_array_equal(gpu.multiply(handle, x[row:row + 1], n, bias)[0], every[row])


@pytest.mark.parametrize("form, group", [("float8", 0), ("float8", 128), ("w8a8", 0)])
@pytest.mark.parametrize("n, k, rows", [(3700, 1100, 2900), (3584, 900, 1700), (4100, 132, 4200), (17000, 320, 1500),
                                        (17000, 384, 1500), (512, 8192, 400)])
def test_wide_tiles_in_several_turns(n, k, rows, form, group):
    """CTAs have a tile, then one beyond the last row or column, and share the remaining ones."""
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, form, group)
    gpu.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5 + 0.01).astype(np.float32), "F32")
    x, bias = rng.normal(size=(rows, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    every = gpu.multiply(handle, x, n, bias, "stream_k")
    for some in (rows, rows - 70, rows * 2 // 3):
        assert gpu.multiply(handle, x[:some], n, bias, "prefill").tobytes() == every[:some].tobytes(), some


@pytest.mark.parametrize("form, group", [("w8a8", 64), ("w4a8", 64), ("float8", 0), ("float8", 128)])
def test_rows_of_activations_that_are_no_numbers(form, group):
    """A row of zeros gives zeros; a row with a NaN or an infinity gives NaN, and no other does."""
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(70, 340, form, group)
    gpu.fill_matrix(handle, rng.normal(size=(70, 340)).astype(np.float32), "F32")
    x = rng.normal(size=(40, 340)).astype(np.float32)
    x[3], x[7, 339], x[30, 0] = 0, np.nan, np.inf
    for algo in ("mma", "stream_k", "prefill"):
        y = gpu.multiply(handle, x, 70, None, algo)
        assert not y[3].any() and np.isnan(y[[7, 30]]).all()
        assert np.isfinite(np.delete(y, [7, 30], 0)).all()


@pytest.mark.parametrize("form, group", [("int4", 64), ("int4", 32), ("int4", 192), ("int8", 0), ("int8", 16),
                                         ("float8", 0), ("float8", 128), ("w8a8", 0), ("w8a8", 64), ("w4a8", 0),
                                         ("bfloat16", 0), ("float16", 0)])
@pytest.mark.parametrize("hidden, inner", [(1, 3), (7, 40), (130, 8), (257, 70), (1025, 200), (3584, 130), (4100, 70),
                                           (200, 8200), (3584, 1500)])
def test_one_row_has_the_bits_of_many(hidden, inner, form, group):
    """Also if GEMMs apply the norm themselves."""
    own = toy()

    def matrix(n, k):
        handle = own.program.add_matrix(n, k, form, group)
        own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
        return handle

    def normed(x):
        return own.op("rms_norm", (x,), hidden, (own.vector(hidden),), eps=1e-6, unit_offset=True)

    x = embedded(own, hidden)
    both = own.op("linear", (normed(x),), 2 * inner, (matrix(2 * inner, hidden),))
    own.op("add", (x, own.op("linear", (own.op("silu_mul", (both,), inner),), hidden, (matrix(hidden, inner),))))
    own.op("add", (x, own.op("linear", (normed(x),), hidden, (matrix(hidden, hidden), own.vector(hidden)))))
    own.finish(x)
    prompts = [[token] for token in range(5)]
    together = compiled(own).step(step_of(prompts), True).logits
    for prompt, expected in zip(prompts, together):
        np.testing.assert_array_equal(compiled(own).step(step_of([prompt]), True).logits[0], expected)


def test_a_matrix_that_is_widened_in_parts():
    rng, gpu = np.random.default_rng(SEED), executor()
    n, k = 70000, 4096
    handle = gpu.add_matrix(n, k, "int4", 64)
    gpu.fill_matrix(handle, np.tile((rng.normal(size=(700, k)) * k**-0.5).astype(np.float32), (100, 1)), "F32")
    x, bias = rng.normal(size=(300, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    few = gpu.multiply(handle, x[:5], n, bias, "mma")
    assert gpu.multiply(handle, x, n, bias)[:5].tobytes() == few.tobytes()
    assert gpu.multiply(handle, x[:1], n, bias).tobytes() == few[:1].tobytes()  # in turns, warps share K


@pytest.mark.parametrize("form", ["int4", "int8", "w8a8", "w4a8", "float8"])
@pytest.mark.parametrize("hidden, inner", [(24, 37), (130, 8), (64, 200)])
def test_what_is_computed_together(hidden, inner, form):
    own = toy()

    def matrix(n, k):
        handle = own.program.add_matrix(n, k, form, 0)
        own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
        return handle

    x = embedded(own, hidden)
    normed = own.op("rms_norm", (x,), hidden, (own.vector(hidden),), eps=1e-6)
    both = own.op("linear", (normed,), 2 * inner, (matrix(2 * inner, hidden), own.vector(2 * inner)))
    own.op("add", (x, own.op("linear", (own.op("silu_mul", (both,), inner),), hidden, (matrix(hidden, inner),))))
    own.finish(x)
    compare(own, 5e-2 if form.startswith("int") else 0.3)


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("width", [200, 1100])
def test_a_quantized_embedding(width, form):
    own = toy()
    table = own.program.add_matrix(VOCAB, width, form, 64)
    own.weights[table] = own.rng.normal(size=(VOCAB, width))
    own.finish(own.op("embedding", (), width, (table,), 0, vocab_begin=0, scale=1.5))
    compare(own)


@pytest.mark.parametrize("form, cache", [("int4", "bfloat16"), ("int8", "int8"), ("w8a8", "uint4"),
                                         ("float8", "bfloat16")])
def test_same_request_same_bytes(form, cache):
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 17, 33, 40, 2)]
    expected = []
    for prompt in prompts:
        expected += tokens_of(compiled(small_model(form, 64), cache, graphs=False), [prompt])
    for graphs in (True, False):
        assert tokens_of(compiled(small_model(form, 64), cache, graphs=graphs), prompts) == expected
        assert tokens_of(compiled(small_model(form, 64), cache, graphs=graphs), prompts, chunk=7) == expected


# -- caches ------------------------------------------------------------------------------------------------------------
CACHES = ["int8", "uint4"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", HEADS)
def test_quantized_caches_are_the_cpus(heads, cache):
    q_heads, kv_heads, dim = heads
    rng, logits = np.random.default_rng(SEED + 1), []
    data = step_of([rng.integers(0, VOCAB, n).tolist() for n in LENGTHS])
    own = toy()
    own.finish(own.attention(embedded(own, (q_heads + 2 * kv_heads) * dim), *heads))
    for backend in (compiled(own, cache), on_cpu(own, dtype=cache)):
        logits.append(backend.step(data, True).logits)
    rounded = dim in (64, 96, 128, 256)  # what was recovered, and queries, to bfloat16
    assert np.abs(logits[0] - logits[1]).max() < (5e-2 if rounded else 1e-3) * np.sqrt(np.mean(logits[1]**2))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("variant", [{"window": 20}, {"soft_cap": 1.5}], ids=lambda v: "+".join(v))
def test_quantized_caches_with_rotated_keys_and(variant, cache):
    rng, logits = np.random.default_rng(SEED + 1), []
    data = step_of([rng.integers(0, VOCAB, n).tolist() for n in LENGTHS])
    own = toy()
    x = embedded(own, 8 * 64)
    own.rotary(64)
    own.op("rope", (x,), offset=0, heads=6, head_dim=64)
    own.finish(own.attention(x, 4, 2, 64, **variant))
    for backend in (compiled(own, cache), on_cpu(own, dtype=cache)):
        logits.append(backend.step(data, True).logits)
    # A rotated key's last bit may differ, and then its quantized value.
    assert np.abs(logits[0] - logits[1]).max() < (0.05 if cache == "int8" else 0.15) * np.sqrt(np.mean(logits[1]**2))


@pytest.mark.parametrize("heads", HEADS)
def test_a_cache_of_float8(heads):
    """Against the reference with equally rounded keys and values."""
    q_heads, kv_heads, dim = heads
    own = toy()
    values = own.rng.normal(size=(VOCAB, (q_heads + 2 * kv_heads) * dim)).astype(np.float32)
    kept = values[:, q_heads * dim:].astype(float)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(kept))), -6) - 3)
    values[:, q_heads * dim:] = np.rint(kept / step) * step
    own.finish(own.attention(own.embedding(VOCAB, values.shape[1], values), *heads))
    compare(own, 5e-2, cache="float8")


@pytest.mark.parametrize("cache", [*CACHES, "float8"])
@pytest.mark.parametrize("dim, window", [*((dim, window) for dim in (24, 64, 128) for window in (0, 300)), (96, 0),
                                         (256, 300)])
def test_bits_of_attention_do_not_depend_on_chunks(dim, window, cache):
    results, length = [], 1290
    prompt = np.random.default_rng(3).integers(0, VOCAB, length).tolist()
    for chunk in (1290, 333, 47, -1):
        own = Toy(7)
        own.finish(own.attention(embedded(own, 9 * dim), 7, 1, dim, window=window))
        gpu, begin = compiled(own, cache, long=True), 0
        while begin < length:
            count = min(length - 1 if chunk < 0 and begin == 0 else abs(chunk), length - begin)
            last = begin + count == length
            spans = list(range(-(-begin // 16), -(-(begin + count) // 16)))
            result = gpu.step(plan([item(0, count, SAMPLE if last else 0, spans=spans)],
                                   [] if begin else [start(0, prompt)]), True)
            begin += count
        results.append(result.logits.tobytes())
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.parametrize("cache", CACHES)
def test_keys_that_are_no_numbers(cache):
    """They affect only their own sequence."""
    values = np.random.default_rng(SEED).normal(size=(VOCAB, 4 * 64))
    own = toy()
    own.finish(own.attention(own.embedding(VOCAB, 4 * 64, values), 2, 1, 64))
    gpu = executor()
    table = gpu.add_matrix(VOCAB, 4 * 64, "float32")
    own.weights[table][7] = np.inf
    gpu.fill_matrix(table, own.weights[table].astype(np.float32), "F32")
    for width, rows, _ in own.program.tensors:
        gpu.add_tensor(width, rows)
    for op in own.program.ops:
        gpu.add_op(op["name"], op["inputs"], op["outputs"], op["weights"], op["attributes"])
    gpu.allocate(64, 4, 64, 16, 16, cache)
    work = [item(slot, 3, SAMPLE, spans=[slot]) for slot in range(3)]
    result = gpu.step(plan(work, [start(i, [5, 6, 7 if i == 1 else 8], logprobs=False) for i in range(3)]))
    assert result.status.tolist() == [0, 1, 0] and result.tokens[0] == result.tokens[2] >= 0


def test_layouts_that_there_are_not_are_refused_by_name():
    gpu = executor()
    with pytest.raises(ValueError, match="in groups of 24 are not available on CUDA: groups may be 16, 32"):
        gpu.add_matrix(4, 96, "int4", 24)
    with pytest.raises(ValueError, match="w8a8 in groups of 32 are not available on CUDA: groups may be a multiple"):
        gpu.add_matrix(4, 96, "w8a8", 32)
    with pytest.raises(ValueError, match="weights of type int8 with zeros=points are not available on CUDA"):
        gpu.add_matrix(4, 96, "int8", 32, zeros="points")
    handle = gpu.add_matrix(4, 32, "int4", 32)
    rows = np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.uint16), np.zeros((4, 1), np.uint16)
    with pytest.raises(ValueError, match="packed as words are not available on CUDA"):
        gpu.fill_quantized(handle, *rows, 4, 32, 32, packing="words")
