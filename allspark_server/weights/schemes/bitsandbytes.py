"""bitsandbytes: NF4 (Dettmers et al., 2023) in blocks of adjacent values, whose scales may themselves be quantized, and
LLM.int8() (Dettmers et al., 2022).

Of LLM.int8(), only the weights' quantization is used here. bitsandbytes multiplies outlier columns in float16. Here
all activations have at least 16 bits, so outliers need no special treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from allspark_client.errors import not_available
from allspark_server.models.config import Fields
from allspark_server.weights.files import parse_json
from allspark_server.weights.formats import SMALLEST_GROUP, ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor
from allspark_server.weights.schemes.scheme import check_finite, need, wrong
from allspark_server.weights.sources import Source

STATE, SCALES = ".weight.quant_state.bitsandbytes__nf4", ".SCB"
_PARTS = (".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", STATE,
          SCALES, ".weight_format")
# The values of NF4 that the kernels use. A checkpoint with another table is rejected.
_NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                 -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                 1.0], np.float32)


class BitsAndBytes:
    """A checkpoint with NF4's tensors for each weight, or with SCB, a scale for each row of int8."""

    def __init__(self, source: Source, config: Fields):
        self.source = source
        fp4 = [name for name in source.names() if name.endswith("bitsandbytes__fp4")]
        if fp4:
            raise not_available(f"bnb_4bit_quant_type 'fp4' ({fp4[0]}; known is 'nf4')")

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return [name.removesuffix(suffix) for name in self.source.names() for suffix in (STATE, SCALES)
                if name.endswith(suffix)]

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        return [module + suffix for suffix in _PARTS]

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        if module + SCALES in self.source.names():
            return WeightFormat("int8", 0, ScaleLayout("float32", "none"))
        return WeightFormat("nf4", self._state(module)["blocksize"], ScaleLayout("float32", "none"))

    def _state(self, module: str) -> dict[str, Any]:
        """The parameters with which a matrix was quantized to NF4."""
        tensor = need(self.source, module + STATE, ("U8",))
        try:
            state = parse_json(tensor.values.tobytes())
        except ValueError as error:
            wrong(tensor, f"is not valid JSON: {error}")
        sizes = [state.get(name) for name in ("blocksize", "nested_blocksize")] if isinstance(state, dict) else []
        if not sizes or type(sizes[0]) is not int or sizes[0] < SMALLEST_GROUP or sizes[0] % SMALLEST_GROUP or \
                not (sizes[1] is None or (type(sizes[1]) is int and sizes[1] > 0)):
            wrong(tensor, f"holds {state!r:.200}: expected an object with a blocksize that is a multiple of "
                          f"{SMALLEST_GROUP}")
        return state

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        n, k = shape
        if form.dtype == "int8":
            weight = need(self.source, module + ".weight", ("I8",), shape)
            scales = need(self.source, module + SCALES, ("F32",), (n,))
            check_finite(scales)
            each = scales.values.reshape(n, 1) / np.float32(127)
            return QuantizedTensor(weight.name, weight.file, lambda begin, end: QuantizedRows(
                weight.values[begin:end].view(np.uint8), each[begin:end], packing="signed"), mapped=True)
        weight = need(self.source, module + ".weight", ("U8",), (n * k // 2, 1))
        if k % form.group_size:
            wrong(weight, f"has rows of {k} values in blocks of {form.group_size}: a block may not reach past a row")
        table = need(self.source, module + ".weight.quant_map", ("F32",), (16,))
        if not np.array_equal(table.values, _NF4):
            wrong(table, "is not NF4's table of values")
        largest = self._largest(module, n * k // form.group_size)
        quants = weight.values.reshape(n, k // 2)

        def rows(begin: int, end: int) -> QuantizedRows:
            return QuantizedRows(quants[begin:end], largest().reshape(n, -1)[begin:end], packing="swapped")

        return QuantizedTensor(weight.name, weight.file, rows, mapped=True)

    def _largest(self, module: str, count: int) -> Callable[[], np.ndarray]:
        """A function that computes the scale (largest magnitude) of each block in float32 as bitsandbytes does. The
        tensors that it reads are checked at once.
        """
        state, name = self._state(module), module + ".weight.absmax"
        size = state.get("nested_blocksize")
        if size is None:
            scales = need(self.source, name, ("F32",), (count,))
            check_finite(scales)
            return lambda: scales.values
        nested = need(self.source, name, ("U8",), (count,))
        table = need(self.source, module + ".weight.nested_quant_map", ("F32",), (256,))
        above = need(self.source, module + ".weight.nested_absmax", ("F32",), (-(-count // size),))
        offset = state.get("nested_offset")
        if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not abs(offset) < 1e30:
            wrong(self.source.get(module + STATE), f"has nested_offset {offset!r}: expected a number")
        check_finite(table)
        check_finite(above)
        return lambda: table.values[nested.values] * np.repeat(above.values, size)[:count] + np.float32(offset)
