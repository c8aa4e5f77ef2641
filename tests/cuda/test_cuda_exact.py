"""Experts by the exact recipe on the GPU, from the panels that the CPU backend has: to the bit of its kernels and of
tests/reference/exact.py, in all formats.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.exact import fused
from support.exact_matrices import CASES, adversarial, chosen_experts, gated, matrix
from support.gpu_toys import SEED, executor

pytestmark = pytest.mark.cuda
# One past a panel of any instruction set, one past a unit of k, short last groups, several tiles of columns and of k.
SIZES = ((1, 8), (25, 321), (33, 1031), (65, 96), (150, 416), (70, 2305), (300, 160))
GATES = {"none": (), "silu_mul": (), "gelu_tanh_mul": (), "clamped_silu_mul": (1.702, 7.0)}


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Compares bits; NaN stand for any NaN."""
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    """Of 1 to 200 rows. Experts without rows, with some and with all."""
    rng, gpu = np.random.default_rng(SEED), executor()
    for n, k in SIZES:
        own = matrix(case, n, k, experts=3)
        panels = own.executor.panels(own.handle)
        x, bias = rng.normal(size=(200, k)).astype(np.float32), rng.normal(size=(3, n)).astype(np.float32)
        for rows, top in ((1, 1), (1, 3), (2, 2), (5, 1), (9, 2), (17, 2), (33, 1), (66, 3), (200, 1)):
            chosen = chosen_experts(rng, rows, 3, top)
            same(gpu.multiply_exact(panels, x[:rows], chosen, bias), own.products(x[:rows], chosen, bias))
        chosen = np.ones((66, 1), np.int32)
        same(gpu.multiply_exact(panels, x[7:73], chosen), own.products(x[7:73], chosen))


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_cpu(case):
    rng, gpu = np.random.default_rng(SEED), executor()
    for n, k in SIZES:
        own = matrix(case, n, k)
        x = np.concatenate([rng.normal(size=(70, k)).astype(np.float32), adversarial(k)])
        found = gpu.multiply_exact(own.executor.panels(own.handle), x, np.zeros((len(x), 1), np.int32))
        same(found[:, 0], own.executor.multiply(own.handle, x, n, None))


@pytest.mark.parametrize("case", CASES)
def test_adversarial_rows(case):
    """Zeros, NaN, infinities, the smallest and the largest values, outliers, ties of rounding."""
    gpu = executor()
    for n, k in ((25, 321), (40, 1031), (24, 32)):
        own, x = matrix(case, n, k), adversarial(k)
        panels, chosen = own.executor.panels(own.handle), np.zeros((len(x), 1), np.int32)
        wanted = own.products(x, chosen)
        same(gpu.multiply_exact(panels, x, chosen), wanted)
        for i in range(0, len(x), 5):
            same(gpu.multiply_exact(panels, x[i:i + 1], chosen[:1]), wanted[i:i + 1])


@pytest.mark.parametrize("powers", [(-127, -120), (120, 128), (-127, 128)])
def test_scales_of_all_magnitudes(powers):
    gpu, rng = executor(), np.random.default_rng(SEED)
    own = matrix("MXFP4", 60, 160, powers=powers)
    x = np.concatenate([rng.normal(size=(5, 160)).astype(np.float32), adversarial(160)])
    panels, chosen = own.executor.panels(own.handle), np.zeros((len(x), 1), np.int32)
    products = own.products(x, chosen)
    for gate, more in GATES.items():
        same(gpu.multiply_exact(panels, x, chosen, None, gate, *more), gated(gate, products, *more))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("case", CASES)
def test_gate_and_up(case, gate):
    rng, gpu, more = np.random.default_rng(SEED), executor(), GATES[gate]
    for n, k, scale in ((2, 8, 1), (74, 192, 1e-3), (256, 321, 1e-2), (30, 64, 30)):
        own = matrix(case, n, k, experts=2)
        x = (rng.normal(size=(80, k)) * scale).astype(np.float32)
        chosen, bias = chosen_experts(rng, 80, 2, 1), rng.normal(size=(2, n)).astype(np.float32)
        wanted = gated(gate, own.products(x, chosen, bias), *more)
        same(gpu.multiply_exact(own.executor.panels(own.handle), x, chosen, bias, gate, *more), wanted)


@pytest.mark.parametrize("case", CASES)
def test_layers(case):
    """gate_up, the activation, down and the sum of each row's experts."""
    rng, gpu, experts = np.random.default_rng(SEED), executor(), 5
    for width, inner, rows, top in ((40, 72, 1, 3), (96, 321, 70, 2), (65, 24, 150, 5)):
        gate_up, down = (matrix(case, n, k, experts=experts) for n, k in ((2 * inner, width), (width, inner)))
        x = rng.normal(size=(rows, width)).astype(np.float32)
        x[rows // 2, 3], x[rows // 3] = np.nan, 0
        chosen, shares = chosen_experts(rng, rows, experts, top), rng.random((rows, top)).astype(np.float32)
        biases = [rng.normal(size=(experts, n)).astype(np.float32) for n in (2 * inner, width)]
        found = gpu.exact_layer(*(own.executor.panels(own.handle) for own in (gate_up, down)), x, chosen, shares,
                                *biases, "clamped_silu_mul", 1.702, 7.0)
        between = gated("clamped_silu_mul", gate_up.products(x, chosen, biases[0]), 1.702, 7.0)
        flat = down.products(between.reshape(-1, inner), chosen.reshape(-1, 1), biases[1]).reshape(rows, top, width)
        wanted = np.zeros((rows, width), np.float32)
        for i in range(top):
            wanted = fused(flat[:, i], np.broadcast_to(shares[:, i:i + 1], wanted.shape), wanted)
        same(found, wanted)


def test_gathered_columns():
    """Columns in the order of their groups (act-order), some of which have no input."""
    from allspark_server import _native
    rng, gpu = np.random.default_rng(SEED), executor()
    n, k = 40, 96
    order = np.concatenate([rng.permutation(k - 6), np.full(6, -1)])
    quants, scales = rng.integers(0, 256, (n, k // 2)).astype(np.uint8), rng.normal(size=(n, 3)).astype(np.float16)
    cpu = _native.Executor(num_threads=1)
    handle = cpu.add_matrix(n, k - 6, "int4", 32, order=order.tolist(), scales="float16", zeros="none")
    cpu.fill_quantized(handle, quants, scales, None, 4, k, 32)
    x = rng.normal(size=(9, k - 6)).astype(np.float32)
    found = gpu.multiply_exact(cpu.panels(handle), x, np.zeros((9, 1), np.int32))
    same(found[:, 0], cpu.multiply(handle, x, n, None))


def test_what_is_refused():
    from allspark_server import _native
    cpu, gpu = _native.Executor(num_threads=1), executor()
    x, chosen = np.zeros((1, 2048), np.float32), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="floats have no exact recipe"):
        gpu.multiply_exact(cpu.panels(cpu.add_matrix(8, 2048, "bfloat16")), x, chosen)
    with pytest.raises(ValueError, match="groups of 2048"):
        gpu.multiply_exact(cpu.panels(cpu.add_matrix(8, 2048, "int8")), x, chosen)
    with pytest.raises(ValueError, match="there are 1 experts"):
        gpu.multiply_exact(cpu.panels(cpu.add_matrix(8, 2048, "w8a8")), x, chosen + 1)
