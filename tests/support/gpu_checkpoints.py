"""Checkpoints that other programs quantized, for the tests of how GPUs store them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support import gguf_files
from support.gguf_files import FILES
from support.quantized_checkpoints import SCHEMES, scheme_pair

QUICK = ("gptq-4", "gptq-4-order", "awq", "fp8", "mxfp4", "ct-w8a8", "q4_k_m", "mixed")
ROUNDING = 2.6e-3   # relative root mean square of the errors of rounding a weight and its scale to bfloat16


def pair_of(directory: Path, name: str) -> tuple[Path, Path]:
    """A quantized checkpoint and its twin in float32."""
    if name in SCHEMES:
        return scheme_pair(directory, name)
    return gguf_files.write_pair(directory, *FILES[name], seed=sum(map(ord, name)))


def check_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compares each matrix of a loaded model with the values of the checkpoint's float32 twin."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.sqrt(np.mean((found[name] - values) ** 2)) <= ROUNDING * np.sqrt(np.mean(values ** 2)), name
