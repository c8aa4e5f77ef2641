"""The range of float16: activations, keys and values beyond it are clamped, weights beyond it are counted; and the
types of everything beside float16 matrices.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import SAMPLE
from reference.toy import item, plan, start
from support.gpu_toys import (
    FLOAT16_FACTOR,
    FLOAT16_MAX,
    LENGTHS,
    ROUNDED,
    SEED,
    VOCAB,
    compiled,
    embedded,
    executor,
    rounded,
    step_of,
    toy,
)

pytestmark = pytest.mark.cuda


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED + 1)
    return [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("n, k", [(70, 300), (1030, 900)])
def test_rows(n, k):
    """Every kernel clamps values beyond the range; a row with a NaN becomes NaN, and no other."""
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, "float16")
    gpu.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32), "F32")
    x = rng.normal(size=(301, k)).astype(np.float32)
    x[3] *= 1e6
    x[11, 5], x[12, k - 1], x[40, ::3], x[41] = 1e30, -65521, FLOAT16_MAX, 1e-6  # the last is subnormal
    bad = [7, 30, 200]
    x[7, k - 1], x[30, 0], x[200] = np.nan, -np.float32(np.nan), np.nan
    expected = rounded(x, "float16") @ gpu.read_rows(handle).astype(float).T
    scale = np.sqrt(np.mean(expected**2, 1, keepdims=True))
    every = gpu.multiply(handle, x, n)
    assert np.isnan(every[bad]).all()
    error = np.abs(np.delete((every - expected) / scale, bad, 0)).max()
    print(f"error {error:.2e}")
    assert error < 3e-5
    for first, rows in ((3, 1), (7, 1), (12, 1), (3, 9), (0, 32), (0, 65), (150, 128)):
        for algo in ("mma", "mma_prefill", "split_k", "stream_k", "prefill"):
            part = gpu.multiply(handle, x[first:first + rows], n, None, algo)
            np.testing.assert_array_equal(part, every[first:first + rows], f"{first} {rows} {algo}")


@pytest.mark.parametrize("inner", [37, 200, 1100])
def test_gates(inner):
    """With rows that are given, and with a GEMM's output."""
    own, hidden = toy(), 24
    both = embedded(own, 2 * inner)
    own.weights[0] *= 300.0

    def matrix(n, k, size=1.0):
        handle = own.program.add_matrix(n, k, "float16", 0)
        own.weights[handle] = own.rng.normal(size=(n, k)) * size * k**-0.5
        return handle

    down, up, last = matrix(hidden, inner), matrix(2 * inner, hidden, 0.0075), matrix(VOCAB, inner)
    x = own.op("linear", (own.op("silu_mul", (both,), inner),), hidden, (down,))
    gated = own.op("silu_mul", (own.op("linear", (x,), 2 * inner, (up,)),), inner)
    own.finish(own.op("linear", (gated,), VOCAB, (last,)))
    found = compiled(own).step(step_of(prompts()), True).logits

    def gates(both: np.ndarray) -> np.ndarray:
        """Some of the gates exceed the range."""
        g, u = both[:, :inner], both[:, inner:]
        values = g / (1 + np.exp(np.clip(-g, None, 700))) * u
        assert (np.abs(values) > FLOAT16_MAX).any()
        return rounded(values, "float16")

    values = gates(own.weights[0][[prompt[-1] for prompt in prompts()]].astype(float))
    values = gates(rounded(values @ own.weights[down].astype(float).T, "float16") @ own.weights[up].astype(float).T)
    expected = values @ own.weights[last].astype(float).T
    error = np.abs(found - expected).max() / np.sqrt(np.mean(expected**2))
    print(f"error {error:.2e}")
    assert error < ROUNDED * FLOAT16_FACTOR


@pytest.mark.parametrize("dim", [24, 64, 128])
def test_keys_and_values(dim):
    """They are clamped; those that are not finite affect only their own sequence."""
    own = toy()
    table = own.rng.normal(size=(VOCAB, 4 * dim)).astype(np.float32)  # two heads of queries, one of keys and of values
    own.finish(own.attention(own.embedding(VOCAB, 4 * dim, table), 2, 1, dim))
    data = step_of(prompts())
    for first in (3, 2):  # values; keys, too
        large, found = own.rng.random(table.shape) < 0.02, []
        large[:, :first * dim] = False
        for most in (np.inf, FLOAT16_MAX):
            own.weights[0] = np.clip(np.where(large, 1e6 * table, table), -most, most).astype(np.float32)
            found.append(compiled(own, "float16").step(data, True).logits)
        assert np.isfinite(found[0]).all() and found[0].tobytes() == found[1].tobytes()
        if first == 3:
            expected = own.runner().step(data).logits
            assert np.abs(found[0] - expected).max() < 5e-2 * FLOAT16_FACTOR * np.sqrt(np.mean(expected**2))
    for column in (2 * dim + 1, 4 * dim - 1):
        broken = table.copy()
        broken[7, column], own.weights[0] = np.nan, broken
        work = [item(slot, 3, SAMPLE, spans=[8 * slot]) for slot in range(3)]
        new = [start(i, [5, 6, 7 if i == 1 else 8], logprobs=False) for i in range(3)]
        assert compiled(own, "float16").step(plan(work, new)).status.tolist() == [0, 1, 0]


def test_weights():
    """Weights beyond the range are counted with those that are not finite; all others are rounded to the nearest,
    subnormal or not.
    """
    rng, gpu = np.random.default_rng(SEED), executor()
    values = (rng.normal(size=(70, 200)) * 10.0 ** rng.integers(-9, 4, (70, 1))).astype(np.float32)
    values[5, 90:94] = FLOAT16_MAX, -FLOAT16_MAX, 2.0**-24, 3 * 2.0**-25
    values[3, 80], values[40, 196], values[41, 77] = 1e6, -65536, np.inf
    values[50, 10] = np.nan  # is not taken
    upper = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    for source, stored, held in (("F32", values, values), ("BF16", bits, upper)):
        handle = gpu.add_matrix(100, 120, "float16")
        assert gpu.fill_rows(handle, [stored[:30], stored[30:]], source, 20, 77) == [1, 2]
        found, held = gpu.read_rows(handle), held[:, 77:197]
        fits = np.abs(held) <= FLOAT16_MAX
        assert fits.sum() == fits.size - 3
        np.testing.assert_array_equal(found[20:90][fits], rounded(held, "float16")[fits])
        assert not found[:20].any() and not found[90:].any()
    handle = gpu.add_matrix(70, 200, "float16")
    with np.errstate(over="ignore"):
        assert gpu.fill_matrix(handle, values.astype(np.float16), "F16") == 4


@pytest.mark.parametrize("first, second", [("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "int4"),
                                           ("int8", "float16"), ("float16", "w8a8"), ("float8", "float16")])
def test_a_program_has_one_type_of_16_bits(first, second):
    """Quantized values go with bfloat16."""
    own = toy()
    x = embedded(own, 64)
    for form in (first, second):
        matrix = own.program.add_matrix(64, 64, form, 0)
        own.weights[matrix] = own.rng.normal(size=(64, 64))
        x = own.op("linear", (x,), 64, (matrix,))
    own.finish(x)
    with pytest.raises(ValueError, match="float16"):
        compiled(own)
