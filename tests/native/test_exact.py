"""Elementary functions of the native library (native/common/exact.h) against exact ones and against recorded bits."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.sampler_digest import fixed_values

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211707")


def uniform(low: float, high: float, count: int = 400) -> np.ndarray:
    return low + (fixed_values((count,), 5).astype(np.float64) + 1) / 2 * (high - low)


def relative(found: float, exact: Decimal) -> float:
    return float(abs(Decimal(found) - exact) / abs(exact))


@pytest.fixture(autouse=True)
def digits():
    with localcontext() as context:
        context.prec = 60
        yield


def test_exp_and_log():
    for x in uniform(-700, 700):
        assert relative(_native.exact.exp(x), Decimal(x).exp()) < 1e-15
    assert _native.exact.exp(-1e9) == 0 and _native.exact.exp(0.0) == 1 and _native.exact.exp(1e9) == math.inf
    for x in [*uniform(1e-9, 3), *uniform(1, 1e12), 2.0**-1000, 5e300]:
        wanted = Decimal(x).ln()
        assert abs(Decimal(_native.exact.log(x)) - wanted) < max(Decimal("1e-16"), abs(wanted)) * Decimal("3e-16")
    assert _native.exact.log(1.0) == 0


def test_pow():
    for base in (1e4, 5e5, 1e6, 123456.789):
        for exponent in uniform(0, 1.2, 100):
            assert relative(_native.exact.pow(base, exponent), Decimal(base) ** Decimal(exponent)) < 1e-14


def cos_sin(x: float) -> tuple[Decimal, Decimal]:
    r = Decimal(x) % (2 * PI)
    term, total = Decimal(1), [Decimal(0), Decimal(0)]
    for n in range(1, 80):
        total[(n - 1) % 2] += term * (-1) ** ((n - 1) // 2)
        term *= r / n
    return total[0], total[1]


@pytest.mark.parametrize("high", [0.1, 3.0, 100.0, 1e5, 2e7])
def test_cosines_and_sines(high):
    for x in uniform(-high, high, 120).astype(np.float32):
        for found, wanted in zip(_native.exact.cos_sin(float(x)), cos_sin(float(x))):
            assert abs(Decimal(found) - wanted) < Decimal("4e-16"), x
    assert _native.exact.cos_sin(0.0) == (1, 0)


def test_rounded_to_float_as_libm():
    """The rotary table's values equal libm's results rounded to float, but for one in a million."""
    angles = np.float32(np.arange(4000)[:, None] * np.float32(1e4) ** -np.linspace(0, 1, 32, dtype=np.float32)).ravel()
    found = np.array([_native.exact.cos_sin(float(a)) for a in angles[::7]])
    wanted = np.stack([np.cos(angles[::7].astype(np.float64)), np.sin(angles[::7].astype(np.float64))], axis=1)
    assert (np.float32(found) != np.float32(wanted)).mean() < 1e-4


def test_same_bits_everywhere():
    values = [f(float(x)) for x in uniform(1e-3, 50) for f in (_native.exact.exp, _native.exact.log)]
    values += [_native.exact.pow(1e6, float(x)) for x in uniform(-2, 2)]
    values += [v for x in uniform(-1e5, 1e5) for v in _native.exact.cos_sin(float(x))]
    digest = hashlib.sha256(np.array(values, np.float64).tobytes()).hexdigest()
    assert digest[:16] == "667169447fee5b25"
