"""compressed-tensors (llm-compressor: SmoothQuant, GPTQ, AWQ and rounding): 8-bit integers, 4-bit or 8-bit integers
packed into words, FP8, and FP4 with 8-bit scales (MXFP4, NVFP4).

A checkpoint may have several groups of settings. A module belongs to the first group that fits its tensors. Scales of
activations are not read: 8-bit integer activations get a scale for each token (w8a8, w4a8), all others stay float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from allspark_client.errors import not_available
from allspark_server.models.config import Fields
from allspark_server.weights.formats import ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor, reordered, unpack_quants
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.schemes.float8 import block_of, float8_tensor
from allspark_server.weights.schemes.scheme import (
    SCALE_NAMES,
    check_finite,
    choice,
    column_order,
    group_size,
    groups_of,
    need,
    wrong,
)
from allspark_server.weights.sources import Source

logger = logging.getLogger(__name__)

PACKED, INTEGERS, FLOATS, MXFP4, NVFP4 = "pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized", \
    "nvfp4-pack-quantized"
FORMATS = (PACKED, INTEGERS, FLOATS, MXFP4, NVFP4)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_COMPONENTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
               "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale",
               "output_zero_point", "k_scale", "v_scale")


@dataclass(frozen=True)
class _Group:
    """Settings of some modules. block: (rows, columns) that share a scale. group: columns that share one, 0 for all.
    activations: they are 8-bit integers.
    """

    format: str
    bits: int
    group: int
    block: tuple[int, int] | None
    activations: bool


class CompressedTensors:
    """A checkpoint with weight_packed or weight, weight_scale and the further tensors of its format."""

    def __init__(self, source: Source, config: Fields):
        self.source = source
        self._names = set(source.names())
        sparsity = config.get("sparsity_config", dict, {})
        if sparsity.get("format", "dense") != "dense":
            raise not_available(f"sparsity_config of format {sparsity['format']!r} ({config.path})")
        status = config.get("quantization_status", str, "compressed")
        if status != "compressed":
            raise config.error("quantization_status", f"is {status!r}: expected 'compressed'")
        groups = config.need("config_groups", dict)
        if not groups or len(groups) > 64:
            raise config.error("config_groups", f"holds {len(groups)} groups: expected 1 to 64")
        self.groups = []
        for name, values in groups.items():
            if not isinstance(values, dict):
                raise config.error(f"config_groups.{name}", f"is {values!r}: expected an object")
            fields = Fields(values, config.path, f"quantization_config.config_groups.{name}.")
            self.groups.append(self._group(fields, config))
        if config.get("kv_cache_scheme", dict):
            logger.warning("%s: kv_cache_scheme is ignored; set cache_mode to quantize the KV cache", config.path)

    def _group(self, fields: Fields, config: Fields) -> _Group:
        weights = fields.inner("weights")
        kind, bits = choice(weights, "type", ("int", "float"), "int"), weights.need("num_bits", int)
        default = fields.get("format", str) or config.get("format", str)
        if default in (None, "mixed-precision", "naive-quantized"):
            default = FLOATS if kind == "float" else INTEGERS
        if default not in FORMATS:
            raise not_available(f"Format {default!r} of compressed-tensors ({fields.path}; known are "
                                f"{', '.join(FORMATS)})")
        allowed = {PACKED: (4, 8), INTEGERS: (8,), FLOATS: (8,), MXFP4: (4,), NVFP4: (4,)}[default]
        if bits not in allowed or kind != ("int" if default in (PACKED, INTEGERS) else "float"):
            raise weights.error("num_bits", f"is {bits}, type {kind!r}: {default} has {' or '.join(map(str, allowed))} "
                                            f"of type {'int' if default in (PACKED, INTEGERS) else 'float'}")
        strategy = choice(weights, "strategy", STRATEGIES,
                          "tensor" if weights.get("group_size", int) is None else "group")
        grouped = strategy in ("group", "tensor_group")
        size = group_size(weights, "group_size", none=None) if grouped else 0
        block = block_of(weights, "block_structure") if strategy == "block" else None
        if strategy == "block" and (block is None or default != FLOATS):
            raise weights.error("block_structure", f"is {block}: blocks are for {FLOATS}, as [rows, columns]")
        inputs = fields.get("input_activations", dict)
        activations = Fields(inputs or {}, fields.path, fields.prefix + "input_activations.")
        quantized = default in (PACKED, INTEGERS) and inputs is not None
        if quantized and (activations.need("num_bits", int) != 8 or
                          choice(activations, "type", ("int", "float"), "int") != "int"):
            raise activations.error("num_bits", f"is {activations.values['num_bits']}, type "
                                                f"{activations.values.get('type', 'int')!r}: expected 8 bits, 'int'")
        return _Group(default, bits, size, block, quantized)

    def modules(self) -> Iterable[str]:
        """See `Scheme.modules`."""
        return [name.removesuffix(".weight_scale") for name in self._names if name.endswith(".weight_scale")]

    def parts(self, module: str) -> Iterable[str]:
        """See `Scheme.parts`."""
        return [f"{module}.{name}" for name in _COMPONENTS]

    def _stored(self, module: str) -> tuple[_Group, StoredTensor]:
        """The settings of a module, and the tensor with its values."""
        packed = f"{module}.weight_packed" in self._names
        weight = need(self.source, f"{module}.weight{'_packed' if packed else ''}", ("I32", "U8", "I8", "F8_E4M3"))
        two = f"{module}.weight_global_scale" in self._names
        kinds = {"I32": (PACKED,), "U8": (NVFP4,) if two else (MXFP4,), "I8": (INTEGERS,), "F8_E4M3": (FLOATS,)}
        fitting = [group for group in self.groups if group.format in kinds[weight.dtype]]
        if len(weight.shape) != 2 or not weight.shape[1]:
            wrong(weight, f"has shape {list(weight.shape)}: expected a matrix")
        if len(fitting) > 1 and weight.dtype == "I32":
            columns = self._columns(module)
            fitting = [g for g in fitting if -(-columns * g.bits // 32) == weight.shape[1]] or fitting
        if len(fitting) > 1:
            scale = self.source.get(f"{module}.weight_scale")
            columns = weight.shape[1] if weight.dtype in ("I8", "F8_E4M3") else self._columns(module)
            fitting = [g for g in fitting if scale.shape[-1:] == (groups_of(columns, g.group),)] or fitting
        if not fitting:
            known = ", ".join(dict.fromkeys(group.format for group in self.groups))
            wrong(weight, f"has type {weight.dtype}, which fits none of quantization_config's groups ({known})")
        return fitting[0], weight

    def _columns(self, module: str) -> int:
        shape = need(self.source, f"{module}.weight_shape", ("I64", "I32"), (2,))
        return int(shape.values[1])

    def form(self, module: str) -> WeightFormat:
        """See `Scheme.form`."""
        group, _ = self._stored(module)
        kinds = {MXFP4: ("U8", "F8_E8M0"), NVFP4: ("F8_E4M3",)}.get(group.format, tuple(SCALE_NAMES))
        scales = need(self.source, f"{module}.weight_scale", kinds)
        if group.format in (MXFP4, NVFP4):
            return WeightFormat("e2m1", group.group, ScaleLayout("float32", "none"))
        scale_type = SCALE_NAMES[scales.dtype]
        if group.format == FLOATS:
            return WeightFormat("e4m3", group.block[1] if group.block else group.group, ScaleLayout(scale_type, "none"))
        points = "points" if f"{module}.weight_zero_point" in self._names and self._points_matter(module) else "none"
        dtype = ("w" if group.activations else "int") + str(group.bits) + ("a8" if group.activations else "")
        permuted = self._order(module, group) is not None
        return WeightFormat(dtype, group.group, ScaleLayout(scale_type, points, permuted=permuted))

    def _points_matter(self, module: str) -> bool:
        """Whether any zero point, as a signed integer, differs from 0."""
        points = need(self.source, f"{module}.weight_zero_point", ("I8", "I32"))
        middle = 0 if points.dtype == "I8" else np.int32(np.uint32(0x88888888)) if \
            self._stored(module)[0].bits == 4 else np.int32(np.uint32(0x80808080))
        return bool(np.any(points.values != middle))

    def _order(self, module: str, group: _Group, columns: int | None = None) -> np.ndarray | None:
        name = f"{module}.weight_g_idx"
        if name not in self._names or np.all(need(self.source, name, ("I32",)).values == -1):
            return None
        return column_order(self.source, name, group.group, columns)

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """See `Scheme.tensor`."""
        group, weight = self._stored(module)
        n, k = shape
        if group.format in (MXFP4, NVFP4):
            return self._float4(module, group, weight, shape)
        if group.format == PACKED:
            need(self.source, weight.name, ("I32",), (n, -(-k * group.bits // 32)))
            if self._columns(module) != k:
                wrong(self.source.get(f"{module}.weight_shape"), f"names {self._columns(module)} columns: expected {k}")
        else:
            need(self.source, weight.name, (weight.dtype,), shape)
        scale_shapes: list[tuple[int, ...]]
        if group.block:
            scale_shapes = [(-(-n // group.block[0]), -(-k // group.block[1]))]
        elif group.group:
            scale_shapes = [(n, groups_of(k, group.group))]
        else:
            scale_shapes = [(n, 1), (n,), (1,), ()]
        scales = need(self.source, f"{module}.weight_scale", tuple(SCALE_NAMES), *scale_shapes)
        check_finite(scales)
        if group.format == FLOATS:
            return float8_tensor(weight, scales, group.block or ((1, group.group) if group.group else None))
        order = self._order(module, group, k)
        each = scales.values.reshape(len(scales.values) if scales.shape else 1, -1)
        each = np.broadcast_to(each, (n, each.shape[1]))
        points = self._points(module, group, n, each.shape[1]) if form.layout.zeros == "points" else None

        def rows(begin: int, end: int) -> QuantizedRows:
            found = QuantizedRows(weight.values[begin:end].view(np.uint8)[:, :form.row_bytes(k)], each[begin:end],
                                  None if points is None else points[begin:end],
                                  packing="signed" if group.format == INTEGERS else "rows")
            return found if order is None else reordered(found.plain(form, k), form, order)

        return QuantizedTensor(weight.name, weight.file, rows, order, mapped=order is None)

    def _points(self, module: str, group: _Group, n: int, groups: int) -> np.ndarray:
        """Zero points as unsigned integers [n, groups]; packed words hold those of adjacent rows."""
        per_word, name = 32 // group.bits, f"{module}.weight_zero_point"
        found = need(self.source, name, ("I8", "I32"), (n, groups), (n,), (1,), (-(-n // per_word), groups))
        if found.dtype == "I8":
            signed = found.values.reshape(len(found.values), -1).astype(np.int16)
            least, most = int(np.min(signed)), int(np.max(signed))
            if group.bits == 4 and (least < -8 or most > 7):
                wrong(found, f"holds {least} to {most}: expected -8 to 7")
            return np.broadcast_to(signed + (1 << group.bits - 1), (n, groups)).astype(np.uint8)
        words = np.ascontiguousarray(found.values.T).view(np.uint8)
        return np.ascontiguousarray(unpack_quants(words, group.bits, n).T)

    def _float4(self, module: str, group: _Group, weight: StoredTensor, shape: tuple[int, int]) -> QuantizedTensor:
        n, k = shape
        need(self.source, weight.name, ("U8",), (n, -(-k // 2)))
        scales = need(self.source, f"{module}.weight_scale", ("U8", "F8_E8M0", "F8_E4M3"),
                      (n, groups_of(k, group.group)))
        if group.format == MXFP4:
            if np.any(scales.values == 255):
                wrong(scales, "holds scales that are NaN")
            table = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127)
        else:
            overall = need(self.source, f"{module}.weight_global_scale", ("F32",), (1,), ())
            check_finite(overall)
            if np.any((scales.values & 0x7F) == 0x7F) or not overall.values.reshape(-1)[0]:
                wrong(scales, "holds scales that are NaN, or its global scale is 0")
            table = e4m3_values() / overall.values.reshape(-1)[0]

        def rows(begin: int, end: int) -> QuantizedRows:
            return QuantizedRows(weight.values[begin:end], table.take(scales.values[begin:end]))

        def stored_rows(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            return weight.values[begin:end], scales.values[begin:end]

        return QuantizedTensor(weight.name, weight.file, rows, mapped=True,
                               mxfp4=stored_rows if group.format == MXFP4 else None)


def e4m3_values() -> np.ndarray:
    """The value of each FP8 (e4m3) byte: float32 [256]."""
    octets = np.arange(256)
    exponent, fraction = octets >> 3 & 15, octets & 7
    values = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    values = np.where((octets & 0x7F) == 0x7F, np.nan, values)
    return np.where(octets & 0x80, -values, values).astype(np.float32)
