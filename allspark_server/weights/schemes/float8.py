"""FP8 (e4m3) with a scale for each block of rows and columns (Qwen3-FP8, DeepSeek), for each row, or for the whole
matrix. Other programs also round activations to FP8; here they stay float32.
"""

from __future__ import annotations

from collections.abc import Iterable

from allspark_server.models.config import Fields
from allspark_server.weights.formats import SMALLEST_GROUP, ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedTensor, ScaleBlocks
from allspark_server.weights.safetensors import StoredTensor, aligned
from allspark_server.weights.schemes.scheme import SCALE_NAMES, check_finite, need
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


class BlockFloat8:
    """A checkpoint with weight [n, k] in e4m3, and weight_scale_inv with a scale for each block or weight_scale with a
    scale for each row or for all.
    """

    def __init__(self, source: Source, config: Fields):
        self.source, self.block = source, block_of(config, "weight_block_size")
        self.suffix = ".weight_scale_inv" if self.block else ".weight_scale"
        # One object for each type of scales, which compares fast: there are tens of thousands of experts.
        self._forms = {stored: WeightFormat("e4m3", self.block[1] if self.block else 0, ScaleLayout(name, "none"))
                       for stored, name in SCALE_NAMES.items()}

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return [name.removesuffix(self.suffix) for name in self.source.names() if name.endswith(self.suffix)]

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        return [module + suffix for suffix in (".weight", self.suffix, ".input_scale", ".input_scale_ub")]

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        return self._forms[need(self.source, module + self.suffix, tuple(SCALE_NAMES)).dtype]

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        n, k = shape
        weight = need(self.source, module + ".weight", ("F8_E4M3",), shape)
        shapes = [(-(-n // self.block[0]), -(-k // self.block[1]))] if self.block else [(n, 1), (n,), (1,), ()]
        scales = need(self.source, module + self.suffix, tuple(SCALE_NAMES), *shapes)
        return float8_tensor(weight, scales, self.block)
