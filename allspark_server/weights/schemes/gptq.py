"""GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ): integers of 4 or 8 bits packed into 32-bit words, with a scale and a
zero point for each group of rows of the transposed matrix.

GPTQ: a word holds adjacent k with the first in the lowest bits, so the transposed matrix has the layout of
QuantizedRows. The first version of the format stores zero points minus one. It subtracted from whole words, so the
correction is added to whole words. g_idx (act-order) is the group of each column.
AWQ: a word holds one k of eight adjacent rows, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from allspark_server.models.config import Fields
from allspark_server.weights.formats import ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor, reordered, unpack_quants
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.schemes.scheme import (
    SCALE_NAMES,
    check_finite,
    choice,
    column_order,
    group_size,
    groups_of,
    need,
)
from allspark_server.weights.sources import Source

_DTYPES = {4: "int4", 8: "int8"}
_ONES = {4: 0x11111111, 8: 0x01010101}


def _modules(source: Source) -> list[str]:
    return [name.removesuffix(".qweight") for name in source.names() if name.endswith(".qweight")]


class Gptq:
    """A checkpoint with qweight [k * bits / 32, n], qzeros [groups, n * bits / 32], scales [groups, n] and g_idx
    [k].
    """

    def __init__(self, source: Source, config: Fields):
        self.source = source
        self.bits = choice(config, "bits", _DTYPES)
        self.group_size = group_size(config, "group_size")
        version = choice(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        choice(config, "pack_dtype", ("int32",), "int32")
        if config.get("dynamic", dict):
            raise config.error("dynamic", "gives modules different formats: only one format for all is supported")
        self.less = _ONES[self.bits] if version == "gptq" else 0

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return _modules(self.source)

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        return [f"{module}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")]

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        zeros = need(self.source, f"{module}.qzeros", ("I32",))
        # Most checkpoints are symmetric: every zero point is the middle of the range.
        middle = np.uint32((1 << self.bits - 1) * _ONES[self.bits] - self.less & 0xFFFFFFFF)
        symmetric = bool((zeros.values.view(np.uint32) == middle).all())
        scales = need(self.source, f"{module}.scales", tuple(SCALE_NAMES))
        layout = ScaleLayout(SCALE_NAMES[scales.dtype], "none" if symmetric else "points",
                             permuted=self._order(module) is not None)
        return WeightFormat(_DTYPES[self.bits], self.group_size, layout)

    def _order(self, module: str, columns: int | None = None) -> np.ndarray | None:
        name = f"{module}.g_idx"
        if name not in self.source.names():
            return None
        return column_order(self.source, name, self.group_size, columns)

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        n, k = shape
        per_word, groups = 32 // self.bits, groups_of(k, self.group_size)
        weight = need(self.source, f"{module}.qweight", ("I32",), (-(-k // per_word), n))
        zeros = need(self.source, f"{module}.qzeros", ("I32",), (groups, -(-n // per_word)))
        scales = need(self.source, f"{module}.scales", tuple(SCALE_NAMES), (groups, n))
        check_finite(scales)
        order = self._order(module, k)

        def rows(begin: int, end: int) -> QuantizedRows:
            points = None if form.layout.zeros == "none" else self._points(zeros, n)[:, begin:end].T
            found = QuantizedRows(weight.values[:, begin:end], scales.values[:, begin:end].T, points, packing="words")
            return found if order is None else reordered(found.plain(form, k), form, order)

        return QuantizedTensor(weight.name, weight.file, rows, order, mapped=order is None)

    def _points(self, zeros: StoredTensor, n: int) -> np.ndarray:
        words = zeros.values.view(np.uint32) + np.uint32(self.less)
        return unpack_quants(words.view(np.uint8), self.bits, n)


class Awq:
    """A checkpoint with qweight [k, n / 8], qzeros [groups, n / 8] and scales [groups, n]."""

    def __init__(self, source: Source, config: Fields):
        self.source = source
        choice(config, "bits" if "bits" in config.values else "w_bit", (4,))
        self.group_size = group_size(config, "group_size" if "group_size" in config.values else "q_group_size")
        version = config.get("version", str, "gemm").lower()
        if version != "gemm":
            raise config.error("version", f"is {version!r}: allowed is 'gemm'")

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return _modules(self.source)

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        return [f"{module}.{name}" for name in ("qweight", "qzeros", "scales")]

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        scales = need(self.source, f"{module}.scales", tuple(SCALE_NAMES))
        return WeightFormat("int4", self.group_size, ScaleLayout(SCALE_NAMES[scales.dtype], "points"))

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        n, k = shape
        groups, words = groups_of(k, self.group_size), -(-n // 8)
        weight = need(self.source, f"{module}.qweight", ("I32",), (k, words))
        zeros = need(self.source, f"{module}.qzeros", ("I32",), (groups, words))
        scales = need(self.source, f"{module}.scales", tuple(SCALE_NAMES), (groups, n))
        check_finite(scales)

        def rows(begin: int, end: int) -> QuantizedRows:
            return QuantizedRows(weight.values[:, begin // 8:-(-end // 8)], scales.values[:, begin:end].T,
                                 _octets(zeros.values)[:, begin:end].T, packing="octets", skipped=begin % 8)

        return QuantizedTensor(weight.name, weight.file, rows, mapped=True)


def _octets(words: np.ndarray) -> np.ndarray:
    """The values of AWQ's words in the order of rows: uint8 [groups, n]."""
    x: np.ndarray = words.view(np.uint32)
    t = (x ^ x >> 8) & 0x0000FF00  # swaps the inner bytes; below, the inner values of each half
    x = x ^ t ^ t << 8
    t = (x ^ x >> 4) & 0x00F000F0
    return unpack_quants((x ^ t ^ t << 4).view(np.uint8), 4, 8 * words.shape[1])
