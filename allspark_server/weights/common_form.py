"""A common format for tensors that were quantized in different formats and are computed as one matrix (queries, keys
and values; an embedding that is also the head). Values stay the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from allspark_server.weights.formats import ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor, pack_quants, unpack_quants

_NESTED = ScaleLayout("float16", "offsets", super_group=0, scale_bits=8)


def common_form(forms: Sequence[WeightFormat]) -> WeightFormat | None:
    """A format that represents matrices of all these formats exactly; None if there is none."""
    if all(f is forms[0] for f in forms) or len(set(forms)) == 1:
        return forms[0]
    if any(f.dtype not in ("int8", "int4") or f.layout.permuted or not f.group_size for f in forms):
        return None
    size = gcd(*(f.group_size for f in forms))
    supers = {f.layout.super_group for f in forms}
    if len(supers) == 1 and supers != {0}:
        return WeightFormat("int8", size, replace(_NESTED, super_group=supers.pop()))
    if any(f.layout.scales != "float16" for f in forms):  # products of other scales do not fit float32 exactly
        return None
    return WeightFormat("int8", size, ScaleLayout("float32", "offsets"))


def converted(tensor: QuantizedTensor, own: WeightFormat, form: WeightFormat, columns: int) -> QuantizedTensor:
    """The same matrix, stored in the format `own`, in the format `form` that common_form() returned."""
    if own is form or (replace(own, dtype=form.dtype) == form and own.bits == form.bits):
        return tensor
    layout = own.layout
    center = layout.center if layout.center is not None else 1 << (own.bits - 1)
    repeat = own.group_size // form.group_size
    groups = form.groups(columns)

    def wide(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.repeat(array, repeat, axis=1)[:, :groups])

    def rows(begin: int, end: int) -> QuantizedRows:
        found = tensor.plain_rows(begin, end, own, columns)
        quants = unpack_quants(found.quants, own.bits, columns) + np.uint8(128 - center)
        scales, zeros = found.own_scales, found.zeros
        if form.layout.super_group:
            if zeros is None:
                zeros = np.zeros_like(scales)
            above, super_scales = found.super_offsets, found.super_scales
            assert super_scales is not None
            return QuantizedRows(quants, wide(scales), wide(zeros), super_scales,
                                 np.zeros_like(super_scales) if above is None else above)
        scale, offset = plain_scales(found, own)
        if layout.zeros == "points" and zeros is not None:
            offset = scale * (np.float32(center) - zeros.astype(np.float32))
        return QuantizedRows(pack_quants(quants, 8), wide(scale), wide(offset))

    return QuantizedTensor(tensor.name, tensor.file, rows, tensor.order)


def plain_scales(rows: QuantizedRows, form: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of each group as float32 [n, groups], from float16 or nested ones; offsets are 0 if absent."""
    layout = form.layout
    scale = rows.own_scales.astype(np.float32)
    has = layout.zeros == "offsets"
    offset = rows.zeros.astype(np.float32) if has and rows.zeros is not None else np.zeros_like(scale)
    if layout.super_group and rows.super_scales is not None:
        above = np.arange(scale.shape[1]) * form.group_size // layout.super_group
        scale = scale * rows.super_scales.astype(np.float32)[:, above]
        if has and rows.super_offsets is not None:
            offset = offset * rows.super_offsets.astype(np.float32)[:, above]
    return scale, offset
