"""Formats of quantized checkpoints on the CUDA backend.

The backend has one layout of scales for integers, groups with a scale and an offset in bfloat16 (as InstantQuant), and
e4m3 with a float32 scale for each row, or for each 128 columns of a row; FP8 in blocks has the latter. 4-bit values and
symmetric 8-bit values stay quantized; their scales are rounded to bfloat16, as in other servers that compute in
bfloat16. So do MXFP4, NVFP4 and NF4, whose scales have no offsets; MXFP4 is exact. MXFP4 of experts stays as it is.
Other formats (other FP8, NVFP4 and NF4 of experts, permuted columns of a rank's slice, 8-bit zero points, whose offsets
are too large for bfloat16) are dequantized as on CPUs, to the bit, and rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from allspark_client.config import GROUPED, UNQUANTIZED
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.runtime.native import native_library
from allspark_server.weights.asgraph import from_float32, to_float32
from allspark_server.weights.common_form import plain_scales
from allspark_server.weights.formats import FLOAT8_BLOCK, MXFP4_BLOCK, SCALE_TYPES, ScaleLayout, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor, in_pieces

GPU_FORMATS = (*UNQUANTIZED, *GROUPED, "float8", "mxfp4")
SMALL_FLOATS = ("e2m1", "nf4")  # of 4 bits
E2M1_GROUPS, NF4_GROUP = (16, MXFP4_BLOCK), 64  # columns that share a scale; NF4: a multiple
SMALL_FLOAT_SCALES = ScaleLayout("bfloat16", "none")
HOPPER = 90  # the compute capability with float8 kernels
RECOVERED = "bfloat16"
HALF_OF_5_BITS = 16
RECOVERED_ELEMENTS = 1 << 18  # dequantized at a time: about a millisecond of work


def on_gpu(form: WeightFormat) -> bool:
    """Whether the CUDA backend computes with matrices of this format."""
    if form.dtype == "float8":
        return form.group_size in (0, FLOAT8_BLOCK)
    if form.dtype == "mxfp4":
        return form.group_size == MXFP4_BLOCK
    if form.dtype in SMALL_FLOATS:
        fits = form.group_size in E2M1_GROUPS if form.dtype == "e2m1" else form.group_size % NF4_GROUP == 0
        return form.group_size > 0 and fits and form.layout == SMALL_FLOAT_SCALES
    size, small = form.group_size, () if form.dtype in ("w8a8", "w4a8") else (16, 32)
    if form.layout not in (ScaleLayout(), ScaleLayout(permuted=form.dtype in ("int8", "int4"))):
        return False
    return form.dtype in GPU_FORMATS and (size in small or size % 64 == 0)


def gpu_form(form: WeightFormat, experts: bool, capability: int, firsts: Sequence[int] = (0,)) -> WeightFormat:
    """The format on GPUs of a matrix that is stored in the format `form`.

    experts: it is a stack of experts' weights. firsts: the columns at which ranks' slices begin. A requested format
    (w8a8) that is not possible is returned as it is; the backend then rejects it.
    """
    if on_gpu(form) and not (experts and (form.dtype in SMALL_FLOATS or form.layout.permuted)):
        return form
    if form.dtype == "e4m3" and form.group_size in (0, FLOAT8_BLOCK) and capability == HOPPER:
        whole = not form.group_size or not any(first % FLOAT8_BLOCK for first in firsts)
        return WeightFormat("float8", form.group_size) if whole else WeightFormat(RECOVERED)
    if form.is_mxfp4 and experts and not any(first % MXFP4_BLOCK for first in firsts):
        return WeightFormat("mxfp4", MXFP4_BLOCK)
    same = WeightFormat(form.dtype, form.group_size, ScaleLayout(permuted=form.layout.permuted))
    size = form.group_size
    groups = {gcd(size, first) if size else 0 for first in (0, *firsts)}  # as in formats.group_of_slice
    if form.dtype in SMALL_FLOATS and not experts and form.layout.zeros == "none":
        small = replace(form, layout=SMALL_FLOAT_SCALES)
        if all(on_gpu(replace(small, group_size=each)) for each in groups):
            return small
    # A slice of permuted columns has groups of unequal lengths.
    movable = not form.layout.permuted or not (experts or any(firsts))
    if _has_codes(form) and movable and all(on_gpu(replace(same, group_size=each)) for each in groups):
        return same
    return form if form.dtype in ("w8a8", "w4a8") else WeightFormat(RECOVERED)


def _has_codes(form: WeightFormat) -> bool:
    """Whether values can stay quantized with the scales and offsets of the CUDA backend."""
    layout = form.layout
    if layout.group_rows != 1:
        return False
    # 8-bit values with another center than 128 come from GGUF: 5-bit ones (with offsets) and 6-bit ones.
    return form.bits == 4 or layout.zeros == "none" or (layout.zeros == "offsets" and layout.center is not None)


def recoded(tensor: QuantizedTensor, own: WeightFormat, form: WeightFormat, columns: int) -> QuantizedTensor:
    """A matrix of the format `own` in the format `form` that gpu_form() returned for it. Its scales and zeros are
    uint16 [n, groups]: bfloat16, or for float8 the lower and the upper half of float32 scales. Small floats of 4 bits
    have no zeros.
    """
    def as_floats(found: QuantizedRows) -> QuantizedRows:
        bad = int(((found.quants & 0x7F) == 0x7F).sum())
        if bad:
            raise tensor.not_finite(bad, "values")
        scale = np.ascontiguousarray(_floats(found.scales, own)).view(np.uint32)
        return QuantizedRows(found.quants, scale.astype(np.uint16), (scale >> 16).astype(np.uint16))

    def as_integers(found: QuantizedRows) -> QuantizedRows:
        layout, middle = own.layout, 1 << (own.bits - 1)
        center = middle if layout.center is None else layout.center
        quants = found.quants
        if layout.super_group:
            scale, offset = plain_scales(found, own)
        else:
            scale = _floats(found.scales, own)
            offset = _floats(found.zeros, own) if layout.zeros == "offsets" else np.zeros_like(scale)
        scales = _bfloat16(scale)
        if layout.zeros != "offsets":  # offsets then follow the rounded scales: the value for zero stays near zero
            scale = to_float32(scales, "BF16")
        if layout.zeros == "points" and found.zeros is not None:
            offset = scale * (np.float32(middle) - found.zeros.astype(np.float32))
        elif own.bits == 4:
            offset = offset + scale * np.float32(middle - center)
        elif layout.zeros == "offsets":  # 5-bit values: a smaller offset loses less to rounding
            quants, offset = quants + np.uint8(middle - center - HALF_OF_5_BITS), offset + scale * HALF_OF_5_BITS
        elif center != middle:
            quants = quants + np.uint8(middle - center)
        return QuantizedRows(quants, scales, _bfloat16(offset))

    def rows(begin: int, end: int) -> QuantizedRows:
        found = tensor.plain_rows(begin, end, own, columns)
        if form.dtype in SMALL_FLOATS:
            return QuantizedRows(found.quants, _bfloat16(_floats(found.scales, own)))
        return as_floats(found) if form.dtype == "float8" else as_integers(found)

    return QuantizedTensor(tensor.name, tensor.file, rows)


def mxfp4_rows(tensor: QuantizedTensor, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [begin, end) of a matrix in MXFP4: values uint8 [n, columns / 2], scales uint8 [n, columns / 32], e8m0."""
    if tensor.mxfp4 is not None:
        return tensor.mxfp4(begin, end)
    found = tensor.rows(begin, end)  # serialized with scales in bfloat16
    scales = found.own_scales
    exponents = (scales >> 7).astype(np.uint8)
    bad = int((np.maximum(exponents.astype(np.uint16) << 7, 0x40) != scales).sum())
    if bad:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {tensor.name!r} in {tensor.file} is MXFP4, but "
                                                           f"{bad} of its scales are not powers of two")
    return found.quants, exponents


def recovered(tensor: QuantizedTensor, own: WeightFormat, begin: int, end: int,
              columns: int) -> Iterator[tuple[int, np.ndarray]]:
    """Dequantizes rows [begin, end) of a matrix: pieces of float32 [n, columns], each with the index of its first
    row.
    """
    layout, order = own.layout, {} if tensor.order is None else {"order": tensor.order.tolist()}

    def bits(half: np.ndarray | None) -> np.ndarray | None:
        return None if half is None else half.view(np.uint16)

    def some(begin: int, end: int) -> np.ndarray:
        rows = tensor.plain_rows(begin, end, own, columns)
        executor = native_library().Executor(num_threads=1)  # the CPU's, to dequantize with its bits
        matrix = executor.add_matrix(end - begin, columns, **own.native(), **order)
        bad = executor.fill_quantized(matrix, rows.quants, rows.scales, rows.zeros, own.bits, columns=columns,
                                      group_size=own.group_size, super_group=layout.super_group,
                                      super_scales=bits(rows.super_scales), super_offsets=bits(rows.super_offsets))
        if bad:
            raise tensor.not_finite(bad, "values")
        return executor.read_rows(matrix)

    return in_pieces(some, begin, end, columns, RECOVERED_ELEMENTS)


def _floats(values: np.ndarray | None, form: WeightFormat) -> np.ndarray:
    """Scales or offsets of the format's type as float32."""
    assert values is not None
    return to_float32(values, SCALE_TYPES[form.layout.scales])


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(from_float32(np.ascontiguousarray(values, np.float32), "BF16"))
