"""The exact recipe of experts in mixed groups, to the bit of tests/reference/exact.py on every instruction set: all
formats, numbers of rows, and rows of zeros, NaN, infinities, extremes and outliers.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.digest import exact_digests
from allspark_server.runtime.sampler_digest import fixed_values
from allspark_server.weights.formats import WeightFormat, exact
from reference import exact as reference
from reference.encodings import E2M1
from support.exact_matrices import CASES, adversarial, as_bfloat16, matrix
from support.levels import LOWER, run_again

# One past a panel of any instruction set, one past a unit of k, a short last group, more than a block of k.
SIZES = ((1, 8), (25, 321), (33, 1031), (65, 96), (70, 2305))
ROWS = (1, 2, 3, 5, 13, 40)


@pytest.mark.parametrize("case", CASES)
def test_random_rows(case):
    for n, k in SIZES:
        own = matrix(case, n, k)
        rng = np.random.default_rng(n)
        x, bias = rng.normal(size=(40, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
        for rows in ROWS:
            own.check(x[:rows], bias)
        own.check(x[7:9])


@pytest.mark.parametrize("case", CASES)
def test_adversarial_rows(case):
    for n, k in ((25, 321), (40, 1031), (24, 32)):
        own, x = matrix(case, n, k), adversarial(k)
        own.check(x)
        for row in x:
            own.check(row[None])


@pytest.mark.parametrize("powers", [(-127, -120), (120, 128), (-127, 128)])
def test_scales_of_all_magnitudes(powers):
    own = matrix("MXFP4", 30, 160, powers=powers)
    own.check(np.random.default_rng(0).normal(size=(5, 160)).astype(np.float32))
    own.check(adversarial(160))


@pytest.mark.parametrize("case", ["MXFP4", "NVFP4", "e2m1 in a row"])
def test_weights_are_those_stored(case):
    for n, k in ((25, 322), (33, 1031), (64, 512)):
        own = matrix(case, n, k)
        rows = np.stack([own.executor.read_row(own.handle, row) for row in range(n)])
        np.testing.assert_array_equal(rows, own.whole)


@pytest.mark.parametrize("packing", ["rows", "swapped"])
def test_slices_are_loaded_from_any_column(packing):
    """Whole vectors and what is left, slices that begin inside a group."""
    rng = np.random.default_rng(1)
    n, k = 75, 640
    quants = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales, whole = as_bfloat16(rng.normal(size=(n, k // 32)))
    values = E2M1.astype(np.float32)[quants] * np.repeat(whole, 32, axis=1)
    first, second = (quants[:, 0::2], quants[:, 1::2])[:: 1 if packing == "rows" else -1]
    for column, length, group in ((0, 640, 32), (64, 512, 32), (16, 200, 16), (8, 72, 8)):
        executor = _native.Executor(num_threads=2)
        handle = executor.add_matrix(n, length, "e2m1a16", group, scales="bfloat16", zeros="none")
        assert not executor.fill_quantized(handle, np.ascontiguousarray(first | second << 4), scales, None, 4, k, 32,
                                           column=column, packing=packing)
        rows = np.stack([executor.read_row(handle, row) for row in range(n)])
        np.testing.assert_array_equal(rows, values[:, column:column + length])


def gates() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    gate = np.concatenate([rng.normal(size=3001) * scale for scale in (1e-40, 1e-3, 1, 10, 80, 1e4)]).astype(np.float32)
    special = np.array([0, -0.0, 87.3, -87.3, 88, -88, 88.1, -88.1, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-45])
    gate = np.concatenate([gate, np.repeat(special, 9).astype(np.float32)])
    up = rng.normal(size=gate.size).astype(np.float32)
    up[-9:], up[5], up[6] = (0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e38, 1e-45), np.inf, np.nan
    return gate, up


@pytest.mark.parametrize("name, more", [("silu_mul", ()), ("gelu_tanh_mul", ()), ("clamped_silu_mul", (1.702, 7.0))])
def test_activations(name, more):
    gate, up = gates()
    found = getattr(_native.kernels, name)(gate, up, *more, exact=True)
    wanted = getattr(reference, name)(gate, up, *more)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


def test_the_bits_are_those_of_every_machine():
    digests = exact_digests()
    assert (digests["exact 0"], digests["exact 1"]) == ("b36c89d68fa281fe", "ac547cd71505efde")
    gate, up = fixed_values((4099,), 7) * np.float32(100), fixed_values((4099,), 8) * np.float32(9)
    kernels = _native.kernels
    results = (kernels.silu_mul(gate, up, True), kernels.gelu_tanh_mul(gate, up, True),
               kernels.gelu_mul(gate, up, True), kernels.clamped_silu_mul(gate, up, 1.702, 7.0, True))
    assert hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest()[:16] == "cd225c56bd65af07"


def test_the_reference_rounds_once():
    """Its fused multiply-add against exact sums."""
    from fractions import Fraction
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=3000).astype(np.float32) for _ in range(3))
    c = np.where(rng.random(3000) < 0.5, -a * b * (1 + rng.integers(-2, 3, 3000) * 2.0**-23), c).astype(np.float32)
    found = reference.fused(a, b, c)
    for x, y, z, value in zip(a, b, c, found):
        wanted = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [value, np.nextafter(value, np.float32(np.inf)), np.nextafter(value, np.float32(-np.inf))]
        distances = [abs(Fraction(float(each)) - wanted) for each in near]
        assert distances[0] == min(distances)
        assert distances.count(min(distances)) == 1 or value.view(np.uint32) % 2 == 0


def test_what_is_refused():
    executor = _native.Executor()
    with pytest.raises(ValueError, match="has no offsets"):
        executor.add_matrix(8, 64, "e2m1a16", 32)
    with pytest.raises(ValueError, match="has no zero points"):
        executor.add_matrix(8, 64, "e2m1a16", 32, scales="float32", zeros="points")


def test_formats_without_a_recipe_stay():
    for dtype in ("float32", "bfloat16", "e4m3", "nf4"):
        assert not exact(WeightFormat(dtype)).exact
    long = exact(WeightFormat("int8", 1536))
    assert long.native()["group_size"] == 512 and str(long) == "int8:1536/exact"
    assert exact(WeightFormat("w8a8")).native()["group_size"] == 0


@pytest.mark.skipif("ALLSPARK_ISA" in os.environ, reason="this is such a run")
@pytest.mark.parametrize("isa", LOWER)
def test_lower_instruction_sets(isa):
    run_again(__file__, isa)
