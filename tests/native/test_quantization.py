"""Quantized weight formats: packing, GEMM against float64 and exact integers, bits, whole models."""
import mmap
import os

import numpy as np
import pytest

from allspark_server import _native
from support.levels import LOWER, run_again
from support.quantization import quantized_rows

FORMATS = {"int8": (8, False), "int4": (4, False), "w8a8": (8, True), "w4a8": (4, True)}
SIZES = [1, 3, 17, 63, 64, 65, 896]
ROWS = [1, 2, 3, 5, 12, 13, 25, 31, 64]


def outwards(x):
    """Positive float32 rounded up to bfloat16."""
    return ((x.astype(np.float32).view(np.uint32) + 0xffff) & 0xffff0000).view(np.float32)


def nearest(x):
    """float32 rounded to the nearest bfloat16, ties to even, below the values whose double is infinite."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000
    return ((bits & 0x80000000) | np.minimum(bits & 0x7fffffff, 0x7eff0000)).view(np.float32)


def instant_quant(weights, bits, group):
    """(q - middle, scale, offset), the latter two per group and repeated along k, in the native code's arithmetic.

    The offset is the middle of the range in bfloat16; the scale the least bfloat16 with which minimum and maximum still
    have a q.
    """
    n, k = weights.shape
    group = min(group or k, k)
    levels, middle = np.float32(2**bits - 1), np.float32(2**(bits - 1))
    q, scales, offsets = (np.zeros((n, k), np.float32) for _ in range(3))
    half = weights.astype(np.float32) * np.float32(0.5)
    for first in range(0, k, group):
        part = half[:, first:first + group]
        low, high = part.min(axis=1, keepdims=True), part.max(axis=1, keepdims=True)
        offset = nearest(low + middle * ((high - low) / levels))
        step = outwards(np.maximum((offset - low) / middle, (high - offset) / (levels - middle)))
        flat = step < 2.0**-120
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = np.where(flat, np.float32(0), np.float32(1) / step).astype(np.float32)
        columns = slice(first, first + group)
        q[:, columns] = np.clip(np.rint((part - offset) * factor) + middle, 0, levels) - middle
        scales[:, columns] = np.where(flat, 0, 2 * step)
        offsets[:, columns] = 2 * offset
        q[:, columns] = np.where(flat, 0, q[:, columns])
    return q, scales, offsets


def activation_levels(dtype):
    """The largest integer of a quantized activation."""
    return 127 if FORMATS[dtype][1] else 127 * 257


def expected_product(x, weights, dtype, group):
    """(product in float64, bound of the error of float32 sums)."""
    q, scales, offsets = (a.astype(np.float64) for a in instant_quant(weights, FORMATS[dtype][0], group))
    rounded, scale = quantized_rows(x, activation_levels(dtype))
    values = rounded * scale.astype(np.float64)
    bound = np.abs(values) @ (np.abs(q * scales) + np.abs(offsets)).T
    return values @ (q * scales + offsets).T, bound


def with_outliers(rng, shape):
    x = rng.normal(size=shape).astype(np.float32)
    x.flat[rng.integers(0, x.size, max(1, x.size // 200))] *= 50
    return x


def matrix(executor, weights, dtype, group=0):
    handle = executor.add_matrix(*weights.shape, dtype, group)
    assert executor.fill_matrix(handle, weights, "F32") == 0
    return handle


def bits_of(x):
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [0, 32, 64, 512])
@pytest.mark.parametrize("k", SIZES)
def test_matmul_against_float64(dtype, group, k):
    rng = np.random.default_rng(k + group)
    executor = _native.Executor(num_threads=2)
    for n in (1, 17, 65, 151):
        weights, bias = with_outliers(rng, (n, k)), rng.normal(size=n).astype(np.float32)
        handle = matrix(executor, weights, dtype, group)
        x = with_outliers(rng, (max(ROWS), k))
        expected, bound = expected_product(x, weights, dtype, group)
        for m in ROWS:
            got = executor.multiply(handle, x[:m], n, bias)
            allowed = (k + 8) * 2.0**-23 * (bound[:m] + np.abs(bias))
            assert np.all(np.abs(got - expected[:m] - bias) <= allowed + 1e-30)


@pytest.mark.parametrize("dtype", FORMATS)
def test_long_rows_and_many_panels(dtype):
    rng = np.random.default_rng(2)
    executor = _native.Executor(num_threads=2)
    for n, k, group in ((70, 4864, 0), (4864, 70, 64), (33, 4865, 512)):
        weights, x = with_outliers(rng, (n, k)), with_outliers(rng, (300, k))
        handle = matrix(executor, weights, dtype, group)
        expected, bound = expected_product(x, weights, dtype, group)
        for m in (1, 7, 300):
            got = executor.multiply(handle, x[:m], n)
            assert np.all(np.abs(got - expected[:m]) <= 64 * 2.0**-23 * bound[:m] + 1e-30)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("m, n, k, group", [(1, 151_936, 65, 64), (4864, 17, 63, 0), (896, 65, 64, 32),
                                            pytest.param(3, 33, 151_936, 512, marks=pytest.mark.slow)])
def test_a_model_s_largest_sizes(dtype, m, n, k, group):
    """A vocabulary's rows, as many rows of activations, and as many columns (in groups, because whole rows exceed exact
    sums).
    """
    rng = np.random.default_rng(m)
    executor = _native.Executor(num_threads=2)
    weights, x = with_outliers(rng, (n, k)), with_outliers(rng, (m, k))
    got = executor.multiply(matrix(executor, weights, dtype, group), x, n)
    columns = rng.choice(n, min(n, 300), replace=False)
    expected, bound = expected_product(x, weights[columns], dtype, group)
    assert np.all(np.abs(got[:, columns] - expected) <= (k // (group or k) + 64) * 2.0**-23 * bound + 1e-30)


@pytest.mark.parametrize("dtype", ["w8a8", "w4a8"])
def test_sums_are_exact_at_the_largest_values(dtype):
    """Activations of +-127 and the largest and least q: nothing saturates, at a length where 16 bits would."""
    executor = _native.Executor(num_threads=2)
    levels, middle = 2**FORMATS[dtype][0] - 1, 2**(FORMATS[dtype][0] - 1)
    for k in (64, 4096, 130_000):
        q = np.zeros((3, k))
        q[0], q[1] = levels, levels
        q[0, ::2], q[1, 0], q[2, -1] = 0, 0, levels
        handle = matrix(executor, q.astype(np.float32), dtype)  # scale 1, minimum 0
        x = np.full((14, k), 127, np.float32)
        x[1::2, 1::2] = -127
        got = executor.multiply(handle, x, 3)
        # The integer sums are exact; what follows rounds three times.
        integers = x.astype(np.int64)
        chains, sums = integers @ (q - middle).astype(np.int64).T, integers.sum(axis=1, keepdims=True)
        total = chains.astype(np.float32).astype(np.float64) + np.float64(middle) * sums.astype(np.float32)
        assert np.array_equal(got, total.astype(np.float32))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("k, group", [(63, 0), (512, 0), (513, 0), (4864, 0), (4866, 512), (1031, 32), (896, 64),
                                      (1000, 96), (4864, 256),
                                      (130_000, 0)])
def test_sums_of_16_bits_are_exact_at_the_largest_values(dtype, k, group):
    """Activations of +-32639 and less with the largest and least q: sums of a group far beyond 32 bits are rounded once
    (once per plane if activations are planes of 8 bits), bit by bit.
    """
    rng = np.random.default_rng(k + group)
    executor = _native.Executor(num_threads=2)
    levels, middle = 2**FORMATS[dtype][0] - 1, 2**(FORMATS[dtype][0] - 1)
    q = rng.integers(0, levels + 1, (7, k))
    q[0], q[1], q[2, ::2] = 0, levels, levels
    for first in range(0, k, group or k):  # scale 1, minimum 0 in every group
        q[:, first], q[:, min(first + 1, k - 1)] = 0, levels
    x = rng.integers(-32_639, 32_640, (45, k))
    x[:, 0], x[0], x[1, 1::2], x[2], x[3] = 32_639, 32_639, -32_639, -32_639, 32_639 * rng.choice([-1, 1], k)
    handle = matrix(executor, q.astype(np.float32), dtype, group)
    total = np.zeros((45, 7), np.float32)
    def single(a):
        return a.astype(np.float32).astype(np.float64)
    for first in range(0, k, group or k):
        part, weights = x[:, first:first + (group or k)], (q[:, first:first + (group or k)] - middle).T
        planes = (part + 128) >> 8, part - 256 * ((part + 128) >> 8)
        def by_planes(w):
            return single(256 * single(planes[0] @ w) + single(planes[1] @ w))
        chain = single(part @ weights) if _native.isa() in ("avx2", "avx2_vnni", "avx512",
                                                            "neon") else by_planes(weights)
        total = single(chain + total)
        total = single(middle * by_planes(np.ones((part.shape[1], 1), np.int64)) + total)
    for rows in (1, 2, 7, 14, 45):
        assert np.array_equal(executor.multiply(handle, x[:rows].astype(np.float32), 7), total[:rows])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [0, 32, 128])
def test_unusual_values(dtype, group):
    """Groups of equal weights, of zeros and of denormals; rows of zeros, of denormals, of tiny and of huge values."""
    rng = np.random.default_rng(5)
    executor = _native.Executor(num_threads=2)
    weights, x = rng.normal(size=(40, 203)).astype(np.float32), rng.normal(size=(40, 203)).astype(np.float32)
    weights[1], weights[2], weights[3], weights[4, :128], weights[5, 128:] = 0.375, 0, 1e-39, -3, 0
    weights[6] = rng.normal(size=203) * 1e-40
    x[1], x[3], x[5, 1:] = 0, rng.normal(size=203) * 1e-39, 0
    x[7], x[11], x[13, 17] = x[7] * np.float32(1e-33), x[11] * np.float32(1e36), 3e37
    handle = matrix(executor, weights, dtype, group)
    expected, bound = expected_product(x, weights, dtype, group)
    for rows in (1, 2, 8, 14, 40):
        got = executor.multiply(handle, x[:rows], 40)
        assert np.all(np.abs(got - expected[:rows]) <= 211 * 2.0**-23 * bound[:rows] + 1e-30)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [0, 64])
def test_bits_do_not_depend_on_rows_threads_or_place(dtype, group):
    rng = np.random.default_rng(0)
    n, k = 301, 1031
    weights, x = with_outliers(rng, (n, k)), with_outliers(rng, (301, k))
    one, two = (_native.Executor(num_threads=t) for t in (1, 2))
    a, b = matrix(one, weights, dtype, group), matrix(two, weights, dtype, group)
    whole = one.multiply(a, x, n)
    assert np.array_equal(bits_of(whole), bits_of(two.multiply(b, x, n)))
    for rows in [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 25, 64]:
        for start in rng.integers(0, 301 - rows, 3):
            part = two.multiply(b, x[start:start + rows], n)
            assert np.array_equal(bits_of(part), bits_of(whole[start:start + rows]))


@pytest.mark.parametrize("dtype", [*FORMATS, "bfloat16"])
@pytest.mark.parametrize("k, group", [(1031, 0), (200, 16), (1031, 64), (1300, 512)])
def test_one_row_has_the_bits_of_two_with_any_number_of_panels(dtype, k, group):
    """One row is multiplied with several panels in turn, and with those that are left."""
    rng = np.random.default_rng(k)
    executor, x = _native.Executor(num_threads=1), with_outliers(rng, (2, k))
    for n in [*range(23, 10 * 24, 24), 16, 64, 131]:
        handle = matrix(executor, with_outliers(rng, (n, k)), dtype, 0 if dtype == "bfloat16" else group)
        bias = rng.normal(size=n).astype(np.float32)
        both = executor.multiply(handle, x, n, bias)
        for r in range(2):
            assert np.array_equal(bits_of(executor.multiply(handle, x[r:r + 1], n, bias)), bits_of(both[r:r + 1]))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("k, group", [(2049, 0), (200, 16), (136, 24), (1031, 32), (1544, 64), (500, 80), (1000, 96),
                                      (1600, 128), (2100, 512), (2100, 1024)])
def test_many_rows_have_the_bits_of_one(dtype, k, group):
    """AMX multiplies one row by vector instructions and many rows by tiles, whose shape depends on the group."""
    rng = np.random.default_rng(k)
    n, m = 7 * 32 + 5, 417  # more panels than totals are kept of, and rows in two parts
    executor = _native.Executor(num_threads=1)
    weights, x, bias = with_outliers(rng, (n, k)), with_outliers(rng, (m, k)), rng.normal(size=n).astype(np.float32)
    x[20] = 0
    handle = matrix(executor, weights, dtype, group)
    chosen = [0, 15, 16, 20, 31, 32, 207, 208, 209, 416]
    rows = bits_of([executor.multiply(handle, x[row:row + 1], n, bias)[0] for row in chosen])
    for count in (16, 17, 33, m):
        got = bits_of(executor.multiply(handle, x[:count], n, bias))
        for row, expected in zip(chosen, rows):
            assert row >= count or np.array_equal(got[row], expected)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [0, 32])
def test_rows_are_read_back(dtype, group):
    rng = np.random.default_rng(3)
    executor = _native.Executor(num_threads=2)
    weights = with_outliers(rng, (70, 129))
    weights[3] = 7.25                       # all equal: exact
    weights[4] = rng.normal(size=129) * 1e-39  # denormals
    weights[5] = np.where(np.arange(129) % 2, 3e38, -3e38)  # the range is past the largest float
    weights[6, :32] = 0
    weights[7] = 1000 + rng.normal(size=129) * 1e-3
    handle = matrix(executor, weights, dtype, group)
    q, scales, offsets = instant_quant(weights, FORMATS[dtype][0], group)
    for row in range(70):
        got = executor.read_row(handle, row)
        assert np.array_equal(got, q[row] * scales[row] + offsets[row]), row
        step = scales[row].astype(np.float64)
        allowed = 0.501 * step + 3e-7 * np.abs(weights[row]) + 1e-36
        assert np.all(np.abs(got - weights[row].astype(np.float64)) <= allowed), row
    assert np.all(executor.read_row(handle, 3) == 7.25)
    got = executor.multiply(handle, np.full((2, 129), 1e-3, np.float32), 70)
    # Sums of up to 32,639 times the weights come before the row's scale.
    assert np.all(np.isfinite(np.delete(got, 5, axis=1)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_bfloat16_scales_cost_little_range(dtype):
    """Compared with InstantQuant's (max - min) / (2^bits - 1), scales are at most 2^-7 larger, plus the shift by the
    middle's rounding.
    """
    rng = np.random.default_rng(8)
    executor = _native.Executor()
    bits = FORMATS[dtype][0]
    weights = rng.normal(size=(200, 64)).astype(np.float32) + rng.choice([0, 0.5, 100], (200, 1)).astype(np.float32)
    handle = matrix(executor, weights, dtype, 64)
    low, high = weights.min(axis=1), weights.max(axis=1)
    step = (high - low) / (2**bits - 1)
    for row in range(200):
        error = np.abs(executor.read_row(handle, row) - weights[row]).max()
        moved = np.abs(low[row] + high[row]) / 2 * 2.0**-8
        assert error <= 0.501 * (step[row] + moved / (2**(bits - 1) - 1)) * (1 + 2.0**-7)


@pytest.mark.parametrize("dtype", FORMATS)
def test_packing_from_every_source_type_and_strided_views(dtype):
    rng = np.random.default_rng(1)
    executor = _native.Executor(num_threads=2)
    wide = rng.normal(size=(90, 300)).astype(np.float16)
    bf16 = (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    sources = [("F32", wide.astype(np.float32), wide), ("F16", wide, wide),
               ("BF16", bf16, (bf16.astype(np.uint32) << 16).view(np.float32))]
    for source, array, values in sources:
        handle = executor.add_matrix(80, 201, dtype, 64)
        view = array[3:83, 11:212]
        executor.fill_matrix(handle, view[:29], source)  # in two pieces whose seam is inside a panel
        executor.fill_matrix(handle, view[29:], source, 29)
        q, scales, offsets = instant_quant(values[3:83, 11:212], FORMATS[dtype][0], 64)
        for row in range(80):
            assert np.array_equal(executor.read_row(handle, row), q[row] * scales[row] + offsets[row])


def test_the_hash_of_a_source_is_of_its_bytes_alone():
    """For every format, number of threads, split and instruction set."""
    array = (np.arange(80 * 300, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(18)).astype(np.uint16)
    view, seen = array.reshape(80, 300)[:, 11:212], set()
    for dtype, threads, pieces in ((d, t, p) for d in ("bfloat16", *FORMATS) for t in (1, 3) for p in ((80,),
                                                                                                       (29, 51))):
        executor = _native.Executor(num_threads=threads)
        handle, first = executor.add_matrix(80, 201, dtype, 64 if dtype in FORMATS else 0), 0
        for rows in pieces:
            executor.fill_matrix(handle, view[first:first + rows], "F16", first)
            first += rows
        seen.add(executor.source_hash(handle))
    assert seen == {12763039719413301363}


def test_the_hash_of_words_is_of_their_bytes_alone():
    """For every number of threads, with rows that are hashed in several blocks; and each row is stored at its place."""
    n, k, rng, seen = 2500, 64, np.random.default_rng(4), set()
    words = rng.integers(0, 1 << 32, (k // 8, n), np.uint64).astype(np.uint32)
    scales = rng.random((n, k // 32), np.float32)
    quants = (words.T[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(n, k).astype(np.float32)
    expected = (quants - 8) * np.repeat(scales, 32, axis=1)
    for dtype, threads in ((d, t) for d in ("int4", "w4a8") for t in (1, 3)):
        executor = _native.Executor(num_threads=threads)
        handle = executor.add_matrix(n, k, dtype, 32, scales="float32", zeros="none")
        assert not executor.fill_quantized(handle, words.view(np.int32), scales, None, 4, k, 32, packing="words")
        seen.add(executor.source_hash(handle))
        for row in (0, 63, 1023, 1024, 1700, 2047, 2048, 2499):
            np.testing.assert_array_equal(executor.read_row(handle, row), expected[row])
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", FORMATS)
def test_non_finite_values(dtype):
    executor = _native.Executor()
    weights = np.ones((5, 80), np.float32)
    weights[2, 3], weights[4, 79] = np.nan, np.inf
    handle = executor.add_matrix(5, 80, dtype, 32)
    assert executor.fill_matrix(handle, weights, "F32") == 2
    got = executor.multiply(handle, np.ones((1, 80), np.float32), 5)[0]
    assert np.array_equal(np.isnan(got), [False, False, True, False, True])
    good = matrix(executor, np.ones((5, 80), np.float32), dtype, 32)
    for value in (np.nan, np.inf):
        x = np.ones((2, 80), np.float32)
        x[1, 77] = value
        got = executor.multiply(good, x, 5)
        assert np.all(np.isfinite(got[0])) and not np.any(np.isfinite(got[1]))
    assert np.all(executor.multiply(good, np.zeros((1, 80), np.float32), 5) == 0)


def guarded(array):
    """A copy of the array that ends at the end of a page before an unreadable page."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    import ctypes
    base = np.frombuffer(memory, np.uint8).ctypes.data
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(base + size), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *FORMATS])
def test_no_read_past_the_end_of_activations_or_source(dtype):
    rng = np.random.default_rng(4)
    executor = _native.Executor(num_threads=2)
    for k in (1, 3, 17, 63, 65, 130):
        for source in (np.float32, np.float16):
            weights = guarded(rng.normal(size=(37, k)).astype(source))
            handle = executor.add_matrix(37, k, dtype)
            executor.fill_matrix(handle, weights, "F32" if source is np.float32 else "F16")
        for m in (1, 3, 30):
            x = guarded(rng.normal(size=(m, k)).astype(np.float32))
            assert np.all(np.isfinite(executor.multiply(handle, x, 37)))


def test_what_cannot_be_is_refused():
    executor = _native.Executor()
    with pytest.raises(ValueError, match="int3"):
        executor.add_matrix(4, 4, "int3")
    with pytest.raises(ValueError, match="group_size.*33"):
        executor.add_matrix(4, 66, "int8", 33)
    with pytest.raises(ValueError, match="140000"):
        executor.add_matrix(1, 140_000, "w8a8")


# -- whole models ------------------------------------------------------------------------------------------------------
WHOLE = [("int8", 0), ("int4", 64), ("w8a8", 0), ("w4a8", 64)]


def quantized_weights(directory, dtype, group):
    """The checkpoint's matrices after quantization, recovered."""
    from allspark_server.weights.checkpoint import open_model

    model = open_model(str(directory))
    return model, lambda values: (lambda q, s, o: q * s + o)(*instant_quant(values, FORMATS[dtype][0], group))


@pytest.mark.parametrize("dtype, group", [("int8", 0), ("int8", 32), ("int4", 32)])
def test_weight_only_model_computes_with_its_quantized_weights(dtype, group):
    """Including head and embedding: against the op list in float64 with weights that NumPy quantized."""
    from reference.loading import loaded, logits_after, runner_of
    from support.checkpoints import check_logits, checkpoint, prompt_of
    from support.driver import Driver

    directory, prompt = checkpoint("qwen2-gqa-tied"), prompt_of(33)
    model, quantize = quantized_weights(directory, dtype, group)
    exact = loaded(model)
    exact.weights = {i: quantize(w).astype(np.float64) if w.ndim == 2 else w for i, w in exact.weights.items()}
    with Driver(directory, weight_dtype=dtype, weight_group_size=group) as driver:
        # 16-bit activations; in bfloat16 it would be 1e-2
        check_logits(driver.generate(prompt, 1)[1][0], logits_after(runner_of([exact]), prompt), 1e-3)
        assert (driver.info.weight_dtype, driver.info.weight_group_size) == (dtype, group)


@pytest.mark.parametrize("dtype, group", WHOLE)
def test_shipped_model_answers_and_a_request_alone_is_as_in_a_batch(dtype, group):
    import pathlib

    import allspark_server
    from allspark_client import AsModelConfig

    fable = pathlib.Path(allspark_server.__file__).parent / "assets" / "fable"
    sums = [(12, 30), (7, 8), (41, 55), (60, 19), (3, 4), (27, 27), (70, 15), (36, 48)]
    requests = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
    requests.append([{"role": "user", "content": "Tell me a story about a brave fox named Mia."}])
    greedy = {"do_sample": False, "max_new_tokens": 40, "logprobs": True}
    with allspark_server.Engine() as engine:
        engine.install_model(AsModelConfig("fable", str(fable), weight_dtype=dtype, weight_group_size=group,
                                           engine_max_length=256, num_threads=2, enable_prefix_cache=False))
        engine.start_model("fable")

        def start(messages):
            return engine.start_request("fable", {"messages": messages}, greedy)[2]

        def collect(queue):
            ids, logprobs = [], []
            for elements in queue:
                ids += elements.ids_from_generate
                logprobs += elements.token_logprobs_list
            return ids, bits_of(logprobs).tolist()

        alone = [collect(start(messages)) for messages in requests]
        together = [collect(queue) for queue in [start(messages) for messages in requests]]
        assert alone == together
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(fable / "tokenizer.json"))
    answers = [tokenizer.decode(ids) for ids, _ in alone]
    assert sum(str(a + b) in answer for (a, b), answer in zip(sums, answers)) >= 7, answers
    assert "Mia" in answers[-1] and len(set(answers[-1].split())) > 10, answers[-1]


def test_fingerprint_covers_format_and_group_size():
    from allspark_client.types import ModelInfo
    from allspark_server.engine.fingerprint import fingerprint

    infos = [ModelInfo(weight_dtype=dtype, weight_group_size=group) for dtype in FORMATS for group in (0, 64)]
    assert len({fingerprint(info) for info in infos}) == len(infos)


@pytest.mark.skipif("ALLSPARK_ISA" in os.environ, reason="an instruction set is forced from outside")
@pytest.mark.parametrize("isa", LOWER)
def test_lower_instruction_sets_pass_the_same_tests(isa):
    run_again(__file__, isa, "-k", "not largest_sizes")
