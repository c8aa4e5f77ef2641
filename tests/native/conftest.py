"""Fixtures of the native library's tests."""
from __future__ import annotations

import numpy as np
import pytest

from support.sampling_reference import SEED


@pytest.fixture(params=range(4), ids=lambda i: f"seed{SEED}+{i}")
def rng(request):
    return np.random.default_rng(SEED + request.param)


@pytest.fixture(params=[SEED], ids=lambda s: f"seed{s}")
def one_rng(request):
    return np.random.default_rng(request.param)
