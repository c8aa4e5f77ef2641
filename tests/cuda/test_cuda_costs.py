"""What kernels cost on this GPU, and that choices by it do not change bits."""

from __future__ import annotations

import numpy as np
import pytest

from support.gpu_toys import SEED

pytestmark = pytest.mark.cuda


def test_costs_are_measured():
    """Twice nearly the same, and such as the chip can have, unless something else uses the GPU."""
    from allspark_server import _cuda

    found = [_cuda.measure_costs(0) for _ in range(2)]
    if any(doubt for _, doubt in found):
        pytest.skip(f"the GPU has other work: {found}")
    for name in ("read", "mma_prefill", "mma"):
        first, second = (np.array(costs[name]) for costs, _ in found)
        np.testing.assert_allclose(first, second, rtol=0.25)


@pytest.mark.parametrize("form, group", [("bfloat16", 0), ("int4", 64), ("int8", 0)])
def test_bits_do_not_depend_on_costs(form, group):
    """Costs that prefer each kernel and each tile in turn, also on chips that do not follow them."""
    from allspark_server import _cuda, _native

    default, rng, n, k = _cuda.default_costs(), np.random.default_rng(SEED), 1032, 500
    weights = rng.standard_normal((n, k), np.float32)
    given = [{}, {**default, "mma": [1e6] * 3}, {**default, "mma_prefill": [1e6] * 6}]
    for one in range(6):
        given.append({**default, "mma": [1e6] * 3, "mma_prefill": [1 if i == one else 1e5 for i in range(6)]})
    products = []
    for costs in given:
        gpu = _cuda.Executor(0, _native.HostSampler(1), None, costs)
        handle = gpu.add_matrix(n, k, form, group)
        assert gpu.fill_matrix(handle, weights, "F32") == 0
        x = np.random.default_rng(SEED + 1).standard_normal((300, k), np.float32)
        products.append([gpu.multiply(handle, x[:rows], n).tobytes() for rows in (40, 130, 300)])
    assert all(each == products[0] for each in products)
