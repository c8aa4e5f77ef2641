"""One format for matrices that were quantized in several and are computed as one (queries, keys and values; an
embedding that is the head as well): values stay what they are, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from allspark_server.weights.formats import ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor, pack_codes, unpack_codes

_NESTED = ScaleLayout("float16", "offsets", super_group=0, scale_bits=8)


def common_form(forms: Sequence[WeightFormat]) -> WeightFormat | None:
    """A format that holds matrices of all of these exactly; None when there is none."""
    if len(set(forms)) == 1:
        return forms[0]
    if any(f.dtype not in ("int8", "int4") or f.layout.permuted or not f.group_size for f in forms):
        return None
    size = gcd(*(f.group_size for f in forms))
    supers = {f.layout.super_group for f in forms}
    if len(supers) == 1 and supers != {0}:
        return WeightFormat("int8", size, replace(_NESTED, super_group=supers.pop()))
    if any(f.layout.scales != "float16" for f in forms):  # products of others need more than float32 has
        return None
    return WeightFormat("int8", size, ScaleLayout("float32", "offsets"))


def converted(tensor: QuantizedTensor, own: WeightFormat, form: WeightFormat, columns: int) -> QuantizedTensor:
    """The same matrix in a format that common_form() gave for it and others."""
    if replace(own, dtype=form.dtype) == form and own.bits == form.bits:
        return tensor
    layout = own.layout
    center = layout.center if layout.center is not None else 1 << (own.bits - 1)
    repeat = own.group_size // form.group_size
    groups = form.groups(columns)

    def wide(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.repeat(array, repeat, axis=1)[:, :groups])

    def rows(begin: int, end: int) -> QuantizedRows:
        found = tensor.plain_rows(begin, end, own, columns)
        codes = unpack_codes(found.codes, own.bits, columns) + np.uint8(128 - center)
        scales, zeros = found.scales, found.zeros
        if form.layout.super_group:
            if zeros is None:
                zeros = np.zeros_like(scales)
            above = found.super_offsets
            return QuantizedRows(codes, wide(scales), wide(zeros), found.super_scales,
                                 np.zeros_like(found.super_scales) if above is None else above)
        scale, offset = plain_scales(found, own)
        if layout.zeros == "points":
            offset = scale * (np.float32(center) - zeros.astype(np.float32))
        return QuantizedRows(pack_codes(codes, 8), wide(scale), wide(offset))

    return QuantizedTensor(tensor.name, tensor.file, rows, tensor.order)


def plain_scales(rows: QuantizedRows, form: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """A row's scales and offsets as float32, of float16 or nested ones; zeros where there are no offsets."""
    layout = form.layout
    scale = rows.scales.astype(np.float32)
    has = layout.zeros == "offsets"
    offset = rows.zeros.astype(np.float32) if has else np.zeros_like(scale)
    if layout.super_group:
        above = np.arange(scale.shape[1]) * form.group_size // layout.super_group
        scale = scale * rows.super_scales.astype(np.float32)[:, above]
        if has:
            offset = offset * rows.super_offsets.astype(np.float32)[:, above]
    return scale, offset
