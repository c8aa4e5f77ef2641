"""MXFP4 (OCP Microscaling Formats 1.0) as in gpt-oss's checkpoints: e2m1 values in blocks of 32, each block with a
power of two as its scale.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from allspark_server.models.config import Fields
from allspark_server.weights.formats import MXFP4_BLOCK as BLOCK, ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.schemes.scheme import need, wrong
from allspark_server.weights.sources import Source
from allspark_server.weights.views import InterleavedExperts

FORM = WeightFormat("e2m1", BLOCK, ScaleLayout("bfloat16", "none"))
NAN = 255  # as a scale (e8m0)
# The scale of each byte, 2^(byte - 127), as bits of bfloat16. The smallest is subnormal.
POWERS = np.maximum(np.arange(256, dtype=np.uint16) << 7, 0x40)


def mxfp4_tensor(stored: StoredTensor, quants: np.ndarray, powers: np.ndarray) -> QuantizedTensor:
    """A matrix of e2m1 values, two in a byte, whose scales are powers of two as bytes (e8m0). stored: names them."""
    def rows(begin: int, end: int) -> QuantizedRows:
        return QuantizedRows(quants[begin:end], POWERS[powers[begin:end]])

    def stored_rows(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        return quants[begin:end], powers[begin:end]

    return QuantizedTensor(stored.name, stored.file, rows, mapped=True, mxfp4=stored_rows)


class Mxfp4:
    """A checkpoint with `experts.gate_up_proj_blocks` [experts, outputs, blocks, 16] and `_scales` [experts, outputs,
    blocks], in which even rows are gate's and odd rows up's, and the same for down_proj. Modules are
    `experts.E.gate_proj` and so on.
    """

    def __init__(self, source: Source, config: Fields):
        self.source = source
        self.experts: dict[str, tuple[str, int, slice]] = {}  # by module: the stored name, the expert, its rows
        for kind, (stored, first, step) in InterleavedExperts.KINDS.items():
            for name in source.names():
                if not name.endswith(f".experts.{stored}_blocks"):
                    continue
                blocks, prefix = need(source, name, ("U8",)), name.removesuffix(f".{stored}_blocks")
                if len(blocks.shape) != 4:
                    wrong(blocks, f"has shape {list(blocks.shape)}: expected [experts, rows, blocks, {BLOCK // 2}]")
                for expert in range(blocks.shape[0]):
                    self.experts[f"{prefix}.{expert}.{kind}"] = f"{prefix}.{stored}", expert, slice(first, None, step)

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return self.experts

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        stored, *_ = self.experts[module]
        return f"{stored}_blocks", f"{stored}_scales"

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        return FORM

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        stored, expert, of = self.experts[module]
        n, k = shape
        blocks, scales = need(self.source, f"{stored}_blocks", ("U8",)), need(self.source, f"{stored}_scales", ("U8",))
        whole = blocks.shape[0], n * (of.step or 1), -(-k // BLOCK)
        if k % BLOCK or blocks.shape != (*whole, BLOCK // 2):
            wrong(blocks, f"has shape {list(blocks.shape)}: expected {[*whole, BLOCK // 2]}, rows of {k} values in "
                          f"whole blocks of {BLOCK}")
        if scales.shape != whole:
            wrong(scales, f"has shape {list(scales.shape)}: expected {list(whole)}")
        quants, powers = blocks.values[expert, of].reshape(n, k // 2), scales.values[expert, of]
        if (powers == NAN).any():
            wrong(scales, f"holds scales of expert {expert} that are NaN")

        return mxfp4_tensor(blocks, quants, powers)
