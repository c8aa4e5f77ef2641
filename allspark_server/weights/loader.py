"""Fills a rank's native weights, slice by slice, from the memory-mapped checkpoint.

The native library takes strided views of the mapping and packs them with all its threads, so nothing large is copied
here. Only vectors (norms, biases) are converted in Python.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Part, Weight
from allspark_server.weights.asgraph import to_float32
from allspark_server.weights.files import without_collections
from allspark_server.weights.formats import WeightFormat, not_numbers, stream_matrices
from allspark_server.weights.gpu_forms import mxfp4_rows, recoded, recovered
from allspark_server.weights.quantized import ColumnSlice, QuantizedTensor, slice_columns
from allspark_server.weights.safetensors import NUMPY_TYPES, StoredTensor, aligned
from allspark_server.weights.sources import Source

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class CodedRows(NamedTuple):
    """Rows of a quantized tensor as the file has them: values; their scales, None for blocks that include them; how
    rows share these (see ScaleBlocks.rows); offsets or zero points; and `packing` and `skipped` of QuantizedRows.
    """

    quants: np.ndarray
    scales: np.ndarray | None
    shared: tuple[int, int] = (1, 0)
    zeros: np.ndarray | None = None
    packing: str = "rows"
    skipped: int = 0


def stored_tensor(source: Source, weight: Weight, part: Part) -> StoredTensor:
    """The checkpoint's tensor of a part. AllSparkError if its type or shape is not what the graph expects."""
    try:
        tensor = source.get(part.tensor)
    except KeyError:
        hint = ""
        if part.tensor == "lm_head.weight":
            hint = " (config.json says that the head is not tied to the embedding: tie_word_embeddings)"
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{source.where()} has no tensor {part.tensor!r}{hint}") from None
    expected = (part.stored_rows, weight.columns) if weight.is_matrix else (part.stored_rows,)
    if part.expert is not None:  # the tensor may hold any number of experts
        expected = (max(tensor.shape[:1] + (part.expert + 1,)), *expected)
    if not weight.is_matrix and len(tensor.shape) > 1 and part.expert is None and (
            math.prod(tensor.shape) == part.stored_rows):  # a convolution's weights
        tensor = replace(tensor, shape=expected, data=None if tensor.data is None else tensor.values.reshape(-1))
    if tensor.shape != expected:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {part.tensor!r} in {tensor.file} has shape "
                                                           f"{list(tensor.shape)}: expected {list(expected)}")
    if tensor.dtype not in NUMPY_TYPES:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {part.tensor!r} in {tensor.file} has type "
                                                           f"{tensor.dtype}: expected one of {', '.join(NUMPY_TYPES)}")
    if part.expert is None:
        return tensor
    return replace(tensor, name=f"{tensor.name}[{part.expert}]", shape=expected[1:], data=tensor.values[part.expert])


def quantized_tensor(source: Source, weight: Weight, part: Part) -> QuantizedTensor:
    """The quantized tensor of a part. AllSparkError if it is missing or not what the graph expects."""
    try:
        return source.quantized(part.tensor, weight.stored_format, (part.stored_rows, weight.columns), part.expert)
    except KeyError as error:
        raise AllSparkError(
            AsStatus.ALLSPARK_PARAM_ERROR, f"{source.where()} has no tensor {error.args[0]!r}"
        ) from None


def column_slice(source: Source, weight: Weight, form: WeightFormat, rank: int, world: int) -> ColumnSlice:
    """The columns of a matrix in this format that a rank holds."""
    order = None
    if weight.stored is not None and form.layout.permuted:
        orders = [(part, quantized_tensor(source, weight, part)) for part in weight.parts]
        order = orders[0][1].order
        for part, tensor in orders:
            if (tensor.order is None) != (order is None) or (
                    tensor.order is not None and order is not None and not np.array_equal(tensor.order, order)):
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                    f"tensors {weight.parts[0].tensor!r} and {part.tensor!r} in {tensor.file} are "
                                    "computed as one matrix and must have their columns in the same order of groups")
    return slice_columns(form, order, *weight.column_range_of(rank, world), weight.columns)


@without_collections()
def unquantized_type(graph: Graph, source: Source, half: str = "float32") -> str:
    """The weight_dtype that "auto" means for a checkpoint, quantized or not. Checks that every tensor is present and
    has the right type and shape.

    bfloat16 matrices stay bfloat16. Other types become float32, which holds float16 exactly, with two exceptions on
    devices where float32 is slow (`half` is not "float32" there): matrices that are all float16 get the type `half`,
    and a mixture of float16 and bfloat16 becomes bfloat16, which has the range of both.
    """
    found, always_float = set(), stream_matrices(graph)
    for weight in graph.weights.values():
        for part in weight.parts:
            if weight.stored is not None:
                quantized_tensor(source, weight, part)
            elif (tensor := stored_tensor(source, weight, part)) and weight.is_matrix:
                found |= set() if weight.name in always_float else {tensor.dtype}
    if graph.quantization:
        return graph.quantization.unquantized
    if found == {"BF16"}:
        return "bfloat16"
    if found == {"F16"}:
        return half
    if found != {"BF16", "F16"} or half == "float32":
        return "float32"
    logger.info("weights in bfloat16 and float16: computed in bfloat16, unless weight_dtype says otherwise")
    return "bfloat16"


class Loader:
    """Loads one rank's part of a model into an executor."""

    def __init__(
        self,
        graph: Graph,
        source: Source,
        executor: Any,
        rank: int,
        world: int,
        formats: Mapping[str, WeightFormat],
        progress: Progress | None = None,
        loaded: Mapping[str, int] | None = None,
    ):
        """formats: of each matrix, by the weight's name. progress: called with (elements loaded, elements in all).
        loaded: ids of weights that the executor has already, by name.
        """
        self.loaded = loaded or {}
        self.graph, self.source, self.executor = graph, source, executor
        self.rank, self.world, self.formats, self.progress = rank, world, formats, progress
        self._digest = hashlib.blake2b(digest_size=16)
        self.done, self.total = 0, sum(w.elements_of(rank, world) for w in self._missing())

    @without_collections()
    def load(self) -> dict[str, int]:
        """Fills every weight; returns the executor's id for each weight's name."""
        return {**self.loaded, **{weight.name: self._matrix(weight) if weight.is_matrix else self._vector(weight)
                                  for weight in self._missing()}}

    def _missing(self) -> list[Weight]:
        return [weight for name, weight in self.graph.weights.items() if name not in self.loaded]

    def digest(self) -> str:
        """A digest of all bytes that load() has read. It is the same for each load by this rank of as many ranks."""
        return self._digest.hexdigest()

    def _matrix(self, weight: Weight) -> int:
        form, offset = self.formats[weight.name], 0
        columns = column_slice(self.source, weight, form, self.rank, self.world)
        first, last = columns.first, columns.last
        begin, end = weight.experts_of(self.rank, self.world) if weight.experts else (0, 1)
        order = {} if columns.order is None else {"order": columns.order.tolist()}
        identity = self.executor.add_matrix(weight.rows_of(self.rank, self.world), columns.inputs, experts=end - begin,
                                            **columns.native(), **order)
        together: list[tuple[StoredTensor, int, int]] = []  # filled in one call: an expert's rows are small
        coded: list[tuple[QuantizedTensor, CodedRows]] = []     # the same, from row `coded_at` on
        coded_at = 0
        description = f"{form}" if weight.stored is None or form.quantized else f"{weight.stored} {form}"
        takes_stored = self._takes_stored_rows(weight, columns.form)
        for part, (begin, end) in zip(weight.parts, weight.ranges_of(self.rank, self.world)):
            if begin == end:  # another rank has it
                continue
            begin, end = part.first + begin, part.first + end
            at, offset = offset, offset + end - begin
            if weight.stored is None:
                stored = stored_tensor(self.source, weight, part)
                self._digest.update(f"{stored.name} {stored.dtype} {begin} {end} {first} {last} ".encode())
                if together and together[0][0].dtype != stored.dtype:
                    self._fill(identity, together, at, first, form)
                    together = []
                together.append((stored, begin, end))
            else:
                self._digest.update(f"{part.tensor} {description} {begin} {end} {first} {last} ".encode())
                tensor = quantized_tensor(self.source, weight, part)
                rows = self._stored_rows(tensor, begin, end) if takes_stored else None
                if coded and (rows is None or rows.packing != coded[0][1].packing):
                    self._fill_coded(identity, weight, coded, coded_at, first)
                    coded = []
                if rows is None:
                    self._fill_quantized(identity, weight, tensor, columns, begin, end, at)
                else:
                    coded_at = coded_at if coded else at
                    coded.append((tensor, rows))
            self._advance((end - begin) * (last - first))
        if together:
            self._fill(identity, together, offset, first, form)
        if coded:
            self._fill_coded(identity, weight, coded, coded_at, first)
        self._digest.update(f"{self.executor.source_hash(identity)} ".encode())
        return identity

    def _takes_stored_rows(self, weight: Weight, form: WeightFormat) -> bool:
        """Whether a matrix in this format takes what _stored_rows returns: it has the format of the stored rows, by
        either recipe of products, or it is of floats and they are e4m3 with scales and nothing else.
        """
        stored = weight.stored
        if stored is None or not hasattr(self.executor, "fill_quantized_rows"):
            return False
        return stored == replace(form, exact=False) if form.quantized else (
            stored.dtype == "e4m3" and stored.layout.zeros == "none" and not stored.layout.super_group)

    def _stored_rows(self, tensor: QuantizedTensor, begin: int, end: int) -> CodedRows | None:
        """Rows of a quantized tensor that _fill_coded takes together with those of other tensors, if they are views of
        the file. None for others.
        """
        if tensor.blocks is not None:
            return CodedRows(*tensor.blocks.rows(begin, end))
        if tensor.mxfp4 is not None:
            return CodedRows(*tensor.mxfp4(begin, end))
        if not tensor.mapped or tensor.order is not None:
            return None
        rows = tensor.rows(begin, end)
        if rows.super_scales is not None:
            return None
        return CodedRows(rows.quants, rows.scales, (1, 0), rows.zeros, rows.packing, rows.skipped)

    def _fill_coded(self, identity: int, weight: Weight, pieces: list[tuple[QuantizedTensor, CodedRows]], offset: int,
                    column: int) -> None:
        """Fills rows of a matrix from `offset` on with rows of one packing from _stored_rows."""
        form, packing = weight.stored_format, pieces[0][1].packing
        quants, scales, shared, zeros, _, skipped = zip(*(rows for _, rows in pieces))
        scale_type = "e8m0" if pieces[0][0].mxfp4 is not None else form.layout.scales
        counts = self.executor.fill_quantized_rows(
            identity, quants, [] if scales[0] is None else scales, form.bits, weight.columns, form.group_size,
            scale_type, offset, column, shared, [] if zeros[0] is None else zeros, packing, skipped)
        for (tensor, _), bad in zip(pieces, counts):
            if bad:
                raise tensor.not_finite(bad, "values" if packing == "rows" else "scales")

    def _fill_quantized(self, identity: int, weight: Weight, tensor: QuantizedTensor, columns: ColumnSlice, begin: int,
                        end: int, offset: int) -> None:
        """Fills rows of a matrix from `offset` on with rows [begin, end) of a quantized tensor."""
        if not columns.form.quantized:
            for row, values in recovered(tensor, weight.stored_format, begin, end, weight.columns):
                self.executor.fill_rows(identity, [values], "F32", offset + row - begin, columns.first, 0)
            return
        form, gathered = weight.stored_format, columns.places is not None
        if columns.form.dtype == "mxfp4":
            bad = self.executor.fill_mx(identity, *mxfp4_rows(tensor, begin, end), row_offset=offset,
                                        column=columns.first)
            if bad:
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                    f"tensor {tensor.name!r} in {tensor.file} holds {bad} scales that are above 2 or "
                                    "NaN, which MXFP4 on GPUs does not have; use weight_dtype='bfloat16'")
            return
        if form.layout != columns.form.layout:  # the device has another layout
            tensor, form = recoded(tensor, form, columns.form, weight.columns), columns.form

        def bits(half: np.ndarray | None) -> np.ndarray | None:
            return None if half is None else half.view(np.uint16)

        for first, rows in tensor.pieces(begin, end, weight.columns):
            rows = columns.of(rows, weight.columns)
            bad = self.executor.fill_quantized(
                identity, rows.quants, rows.scales, rows.zeros, form.bits,
                columns=columns.gathered if gathered else weight.columns,
                group_size=columns.form.group_size, row_offset=offset + first - begin,
                column=0 if columns.order is not None else columns.first, super_group=form.layout.super_group,
                super_scales=bits(rows.super_scales), super_offsets=bits(rows.super_offsets),
                packing=rows.packing, skipped=rows.skipped)
            if bad and form.dtype == "e2m1":
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                    f"tensor {tensor.name!r} in {tensor.file} holds {bad} scales that are not below 4, "
                                    "which 4-bit floats on GPUs do not have; use weight_dtype='bfloat16'")
            if bad:
                raise tensor.not_finite(bad, "values" if rows.packing == "rows" else "scales")

    def _fill(self, identity: int, pieces: list[tuple[StoredTensor, int, int]], end: int, column: int,
              form: WeightFormat) -> None:
        """Fills rows of a matrix up to `end` with rows of tensors of one type, one after the other. It passes whole
        rows, because a slice along K is quantized with the ranges of the groups that it was cut from.
        """
        begin = end - sum(last - first for _, first, last in pieces)
        rows = [aligned(tensor.values[first:last]) for tensor, first, last in pieces]
        counts = self.executor.fill_rows(identity, rows, pieces[0][0].dtype, begin, column, form.group_size)
        for (tensor, *_), bad in zip(pieces, counts):
            if bad:
                self._warn(tensor, bad, form.dtype)

    def _vector(self, weight: Weight) -> int:
        if weight.values:
            begin, end = (0, len(weight.values)) if weight.values_split is None else weight.values_split.range_of(
                self.rank, self.world)
            return self.executor.add_vector(np.asarray(weight.values[begin:end], np.float32))
        pieces = []
        for part in weight.parts:
            tensor = stored_tensor(self.source, weight, part)
            begin, end = (part.first + row for row in part.range_of(self.rank, self.world))
            self._digest.update(f"{tensor.name} {tensor.dtype} {begin} {end} ".encode())
            self._digest.update(tensor.values[begin:end].tobytes())
            values = to_float32(tensor.values[begin:end], tensor.dtype)
            bad = values.size - int(np.isfinite(values).sum())
            if bad:
                self._warn(tensor, bad, "float32")
            pieces.append(np.zeros_like(values) if weight.is_zero_on(self.rank, self.world) else values)
            self._advance(end - begin)
        return self.executor.add_vector(np.concatenate(pieces))

    def _advance(self, elements: int) -> None:
        self.done += elements
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _warn(self, tensor: StoredTensor, bad: int, dtype: str) -> None:
        logger.warning("tensor %r in %s holds %d values that are %s; outputs will be wrong", tensor.name, tensor.file,
                       bad, not_numbers(dtype))
