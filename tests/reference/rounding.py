"""Values as number formats hold them."""

from __future__ import annotations

import numpy as np


def as_bf16(x: np.ndarray) -> np.ndarray:
    """Values of float64 that are the nearest of bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32).astype(float)
