"""Inverse frequencies of the rotary embedding for each scaling type.

They are computed as in transformers, in float32 with the same order of operations: a difference in the last bit of a
frequency grows with the position, and logits must agree to 1e-4 of their standard deviation. Powers and logarithms come
from `decimal`, which rounds correctly and so gives the same bits on every machine; those of the C library and NumPy
differ between machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from allspark_server.models.network import RopeConfig


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding.

    dim: rotated features of a head. inv_freq: float32 [dim / 2], radians per position. attention_factor multiplies
    cosines and sines. long_inv_freq: used instead of inv_freq by rows whose length, max(prompt length, position + 1),
    is beyond original_max. dynamic: such rows use a base that grows with the length (see the table of ops).
    """

    dim: int
    base: float
    inv_freq: np.ndarray
    attention_factor: float = 1.0
    dynamic: bool = False
    factor: float = 1.0
    original_max: int = 0
    growth: str = "linear"
    long_inv_freq: np.ndarray | None = None


def rotary_of(rope: RopeConfig, head_dim: int) -> Rotary:
    """The rotary embedding for heads of that size. ValueError if its frequencies are not finite."""
    try:
        with np.errstate(all="ignore"):
            rotary = _rotary_of(rope, rope.dim or head_dim)
        sound = math.isfinite(rotary.attention_factor) and bool(np.isfinite(rotary.inv_freq).all()) and (
            rotary.long_inv_freq is None or bool(np.isfinite(rotary.long_inv_freq).all()))
    except (ArithmeticError, ValueError):  # a division by zero, an overflow, a logarithm of zero
        sound = False
    if not sound:
        raise ValueError(f"the rotary embedding of head_dim {head_dim} and {rope} is not finite")
    return rotary


def _rotary_of(rope: RopeConfig, dim: int) -> Rotary:
    if rope.type == "yarn":
        return Rotary(dim, rope.theta, _yarn(rope, dim), _yarn_attention_factor(rope))
    if rope.type == "longrope":
        powers = _powers(rope.theta, dim)
        short, long = (np.float32(1) / (np.array(factors, np.float32) * powers)
                       for factors in (rope.short_factors, rope.long_factors))
        return Rotary(dim, rope.theta, short, _longrope_attention_factor(rope), original_max=rope.original_max,
                      long_inv_freq=long)
    inv_freq = np.float32(1) / _powers(rope.theta, dim)
    if rope.type == "proportional":
        inv_freq[int(rope.part * dim // 2):] = 0
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.type == "linear":
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.type == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    dynamic = rope.type == "dynamic"
    return Rotary(dim, rope.theta, inv_freq.astype(np.float32), 1.0, dynamic, rope.factor if dynamic else 1.0,
                  rope.original_max if dynamic else 0, rope.growth)


def _powers(base: float, dim: int) -> np.ndarray:
    """`base ** (i / dim)` for i = 0, 2, 4, …: float32 [dim / 2]."""
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    return np.array([float(Decimal(base) ** Decimal(float(e))) for e in exponents], np.float64).astype(np.float32)


def _log(x: float) -> float:
    return float(Decimal(x).ln())


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Llama 3's scaling: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    f32 = np.float32
    longest, shortest = rope.original_max / rope.low_freq_factor, rope.original_max / rope.high_freq_factor
    wavelength = f32(2 * math.pi) / inv_freq
    scaled = np.where(wavelength > f32(longest), inv_freq / f32(rope.factor), inv_freq)
    smooth = ((f32(rope.original_max) / wavelength - f32(rope.low_freq_factor))
              / f32(rope.high_freq_factor - rope.low_freq_factor))
    between = (f32(1) - smooth) * scaled / f32(rope.factor) + smooth * scaled
    return np.where((wavelength >= f32(shortest)) & (wavelength <= f32(longest)), between, scaled)


def _yarn(rope: RopeConfig, dim: int) -> np.ndarray:
    """YaRN (Peng et al., 2023): a ramp over the features between plain frequencies and those divided by the factor."""
    f32 = np.float32

    def feature(rotations: float) -> float:
        """The index of the feature that makes this number of rotations within the original context."""
        return dim * _log(rope.original_max / (rotations * 2 * math.pi)) / (2 * _log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # an empty ramp would divide by zero
    powers = _powers(rope.theta, dim)
    plain, scaled = f32(1) / powers, f32(1) / (f32(rope.factor) * powers)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - f32(low)) / f32(high - low), f32(0), f32(1))
    keep = f32(1) - ramp
    return (scaled * (f32(1) - keep) + plain * keep).astype(np.float32)


def yarn_mscale(rope: RopeConfig, weight: float) -> float:
    """YaRN's factor for a context that was extended: 0.1 weight log(factor) + 1."""
    return 0.1 * weight * _log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope, rope.mscale) / yarn_mscale(rope, rope.mscale_all_dim)
    return yarn_mscale(rope, 1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + _log(rope.factor) / _log(rope.original_max))
