"""FP8 (e4m3) with a scale for each block of rows and columns (Qwen3-FP8, DeepSeek), for each row, or for the whole
matrix. Other programs also round activations to FP8; here they stay float32. DeepSeek-V4's scales are powers of two
(e8m0), and its experts are in MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from allspark_server.models.config import Fields
from allspark_server.weights.formats import MXFP4_BLOCK, SMALLEST_GROUP, ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedTensor, ScaleBlocks
from allspark_server.weights.safetensors import StoredTensor, aligned
from allspark_server.weights.schemes.mxfp4 import FORM, NAN, POWERS, mxfp4_tensor
from allspark_server.weights.schemes.scheme import SCALE_NAMES, check_finite, need, wrong
from allspark_server.weights.sources import Source


def block_of(config: Fields, name: str) -> tuple[int, int] | None:
    """A field with (rows, columns) of a block; None if it is absent."""
    sizes = config.get(name, list)
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= 1 << 16 for size in sizes) or \
            sizes[1] % SMALLEST_GROUP:
        raise config.error(name, f"is {sizes}: expected numbers of rows and columns, the latter a multiple of "
                                 f"{SMALLEST_GROUP}")
    return sizes[0], sizes[1]


def float8_tensor(weight: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None) -> QuantizedTensor:
    """A matrix [n, k] of e4m3 with a scale for each block of (rows, columns); without `block` for each row or for
    all.
    """
    check_finite(scales)
    data = scales.values.reshape(1, 1) if scales.values.size == 1 else scales.values.reshape(len(scales.values), -1)
    height = block[0] if block else 1 if len(data) > 1 else weight.shape[0]
    blocks = ScaleBlocks(aligned(weight.values), aligned(data), height)
    return QuantizedTensor(weight.name, weight.file, blocks.repeated, mapped=True, blocks=blocks)


_E8M0 = ("F8_E8M0", "U8")
_PACKED = "I8"  # two values of 4 bits


class BlockFloat8:
    """A checkpoint with weight [n, k] in e4m3, and weight_scale_inv (DeepSeek-V4: scale) with a scale for each block or
    weight_scale with a scale for each row or for all. A weight [n, k / 2] in bytes is in MXFP4.
    """

    def __init__(self, source: Source, config: Fields):
        self.source, self.block = source, block_of(config, "weight_block_size")
        self.suffix = ".weight_scale_inv" if self.block else ".weight_scale"
        names = set(source.names())
        if self.block and not any(name.endswith(self.suffix) for name in names):
            self.suffix = ".scale"
        self._modules = [module for name in names if name.endswith(self.suffix)
                         and f"{(module := name.removesuffix(self.suffix))}.weight" in names]
        # One object for each type of scales, which compares fast: there are tens of thousands of experts.
        self._forms = {stored: WeightFormat("e4m3", self.block[1] if self.block else 0, ScaleLayout(name, "none"))
                       for stored, name in SCALE_NAMES.items()}
        self._forms |= dict.fromkeys(_E8M0, self._forms["BF16"])

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return self._modules

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        return [module + suffix for suffix in (".weight", self.suffix, ".input_scale", ".input_scale_ub")]

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        if self.source.get(module + ".weight").dtype == _PACKED:
            return FORM
        return self._forms[need(self.source, module + self.suffix, tuple(self._forms)).dtype]

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        n, k = shape
        if form is FORM:
            weight = need(self.source, module + ".weight", (_PACKED,), (n, -(-k // 2)))
            powers = _powers(need(self.source, module + self.suffix, _E8M0, (n, -(-k // MXFP4_BLOCK))))
            return mxfp4_tensor(weight, weight.values.view(np.uint8), powers)
        weight = need(self.source, module + ".weight", ("F8_E4M3",), shape)
        shapes = [(-(-n // self.block[0]), -(-k // self.block[1]))] if self.block else [(n, 1), (n,), (1,), ()]
        scales = need(self.source, module + self.suffix, tuple(self._forms), *shapes)
        if scales.dtype in _E8M0:
            scales = replace(scales, dtype="BF16", data=POWERS[_powers(scales)])
        return float8_tensor(weight, scales, self.block)


def _powers(scales: StoredTensor) -> np.ndarray:
    """Scales as bytes (e8m0). AllSparkError if one is NaN."""
    if np.any(scales.values == NAN):
        wrong(scales, "holds scales that are NaN")
    return scales.values
