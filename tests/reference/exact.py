"""The exact recipe of experts' products in mixed groups, bit for bit (docs/decisions/hybrid.md, *Exact experts*)."""

from __future__ import annotations

import math

import numpy as np

LEVELS = {8: 127, 16: 127 * 257}    # the largest integer of an activation
SMALLEST = np.float32(1e-34)        # a row whose largest value is not above it becomes zeros
LONGEST = 1024                      # columns that are summed as integers with 16-bit activations


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The sum a * b + c of float32, rounded once to float32 (ties to even)."""
    with np.errstate(all="ignore"):
        product, other = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)     # both exact
        total = product + other
        part = total - product
        lost = (product - (total - part)) + (other - part)      # exact: total + lost is the sum
        # Rounded to odd in float64, the sum is rounded to float32 as the exact one is.
        odd = np.atleast_1d(total).view(np.int64)
        inexact = (np.atleast_1d(lost) != 0) & (odd & 1 == 0) & np.isfinite(np.atleast_1d(total))
        away = (np.atleast_1d(lost) > 0) == (np.atleast_1d(total) > 0)
        odd = np.where(inexact, np.where(away, odd + 1, odd - 1), odd)
        return odd.view(np.float64).reshape(np.shape(total)).astype(np.float32)


def activations(x: np.ndarray, bits: int, unit: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows x, float32 [m, k], as integers of int64 [m, k] and the rows' scales, float32 [m].

    bits: of an activation, 8 or 16. unit: the weights' integers are this many times the weights.
    """
    levels = np.float32(LEVELS[bits])
    with np.errstate(all="ignore"):
        largest = np.abs(x).max(axis=1, initial=np.float32(0))
        usable = np.isfinite(x).all(axis=1) & (largest > SMALLEST)
        inverse = np.where(usable, levels / np.where(usable, largest, np.float32(1)), np.float32(0))
        scale = np.where(usable, largest / (levels * np.float32(unit)), np.float32(0)).astype(np.float32)
        scale[~np.isfinite(x).all(axis=1)] = np.nan
        values = np.where(usable[:, None], x, np.float32(0)) * inverse.astype(np.float32)[:, None]
    return np.rint(values.astype(np.float32)).astype(np.int64), scale


def product(x: np.ndarray, weights: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, group: int, bits: int,
            unit: int = 1, bias: np.ndarray | None = None) -> np.ndarray:
    """Rows x float32 [m, k] times integer weights [n, k] with scales (and offsets) float32 [n, groups] of `group`
    columns (0: all): float32 [m, n]. NaN stand for any NaN.
    """
    (n, k), m = weights.shape, len(x)
    size = group or k
    values, row_scale = activations(x, bits, unit)
    total = np.zeros((m, n), np.float32)
    cut = math.gcd(group, LONGEST) if bits == 16 and not 0 < group <= LONGEST else size
    for g, first in enumerate(range(0, k, size)):
        for begin in range(first, min(first + size, k), cut):
            columns = slice(begin, min(begin + cut, first + size, k))
            integers = values[:, columns]
            sums = integers @ weights[:, columns].astype(np.int64).T
            rounded = sums.astype(np.float64).astype(np.float32)    # float64 holds all sums exactly
            total = fused(np.broadcast_to(scales[:, g], total.shape), rounded, total)
            if offsets is not None:
                of_values = integers.sum(axis=1).astype(np.float64).astype(np.float32)
                total = fused(np.broadcast_to(offsets[:, g], total.shape),
                              np.broadcast_to(of_values[:, None], total.shape), total)
    with np.errstate(all="ignore"):
        total = total * row_scale[:, None]
        return total if bias is None else total + bias


# -- activations between gate_up and down ------------------------------------------------------------------------------
F = np.float32


def exp(x: np.ndarray) -> np.ndarray:
    """The exponential e^x of float32 x <= 88; 0 below -87.3. NaN stays."""
    low = F(-87.3)
    with np.errstate(all="ignore"):
        clipped = np.where(np.isnan(x), x, np.maximum(x, low))
        n = np.rint(clipped * F(1.44269504088896341))
        r = fused(n, np.full_like(x, F(-0.693359375)), clipped)
        r = fused(n, np.full_like(x, F(2.12194440e-4)), r)
        p = np.full_like(x, F(1) / F(5040))
        for factor in (F(1) / F(720), F(1) / F(120), F(1) / F(24), F(1) / F(6), F(0.5), F(1), F(1)):
            p = fused(p, r, np.full_like(x, factor))
        power = ((np.nan_to_num(n).astype(np.int32) + 127) << 23).view(np.float32)
        return np.where(x < low, F(0), p * power).astype(np.float32)


def gated(gate: np.ndarray, x: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Float32 of gate / (1 + e^-x) * up."""
    with np.errstate(all="ignore"):
        negated = F(0) - x
        e = exp(np.where(np.isnan(x), x, np.minimum(F(88), negated)))
        return gate / (F(1) + e) * up


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The product silu(gate) * up."""
    return gated(gate, gate, up)


def gelu_tanh_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The product gelu(gate) * up, gelu by its approximation with tanh."""
    with np.errstate(all="ignore"):
        slope = fused(gate * gate, np.full_like(gate, F(0.0713548162726)), np.full_like(gate, F(1.5957691216057308)))
        return gated(gate, gate * slope, up)


def clamped_silu_mul(gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    """Product of gpt-oss: g * sigmoid(alpha * g) * (u + 1) with g <= limit and |u| <= limit."""
    with np.errstate(all="ignore"):
        g, u = np.minimum(gate, F(limit)), np.clip(up, F(-limit), F(limit))
        return gated(g, F(alpha) * g, u + F(1))
