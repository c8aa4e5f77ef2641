"""The formats of a model's matrices: which are quantized, and how."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from allspark_client.config import GROUP_SIZES, UNQUANTIZED, AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus, nearest_name

if TYPE_CHECKING:
    from allspark_server.models.graph import Graph
    from allspark_server.models.graph_elements import Weight

SMALLEST_GROUP = 8  # the smallest group along K that the kernels support
# Suffixes of the tensors that belong to a quantized tensor, after its name.
SCALE, OFFSET, SUPER_SCALE, SUPER_OFFSET, ORDER = ".scale", ".offset", ".super_scale", ".super_offset", ".order"

MXFP4_BLOCK = 32  # columns that share a scale
FLOAT8_BLOCK = 128  # the same of FP8 in blocks, on GPUs
UNQUANTIZED_DTYPES = ("float32", "bfloat16")  # types of unquantized weights in a quantized model
SMALL_FLOATS = ("e4m3", "nf4", "e2m1")  # formats of quantized checkpoints that weight_dtype cannot request
STORED_DTYPES = ("int8", "int4", "w8a8", "w4a8", *SMALL_FLOATS)
SCALE_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # scales of quantized checkpoints
NESTED_TYPE = "I8"  # of nested scales
MOST_CODES = {8: 256, 4: 16}
#: formats whose products sum integers exactly within a group, and what the native library calls them
EXACT = {"int8": "int8", "int4": "int4", "w8a8": "w8a8", "w4a8": "w4a8", "e2m1": "e2m1a16"}
LONGEST_EXACT = 1024  # columns of a group whose sums with 16-bit activations are the same on every instruction set


@dataclass(frozen=True)
class ScaleLayout:
    """The layout of the scales of a matrix's groups: see native/program/scale_layout.h, which has the same fields.

    center: None means 2^(bits - 1).
    """

    scales: str = "bfloat16"
    zeros: str = "offsets"
    group_rows: int = 1
    permuted: bool = False
    super_group: int = 0
    scale_bits: int = 0
    center: int | None = None

    def changed(self) -> dict[str, object]:
        """The fields that differ from those of InstantQuant."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class WeightFormat:
    """The format of a matrix: weight_dtype (except "auto") and weight_group_size as in AsModelConfig; for a matrix of a
    quantized checkpoint also the layout of its scales. exact: products follow the recipe of experts in mixed groups,
    the same on every device (docs/decisions/hybrid.md).
    """

    dtype: str
    group_size: int = 0
    layout: ScaleLayout = ScaleLayout()
    exact: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the matrix is quantized."""
        return self.dtype not in UNQUANTIZED

    @property
    def is_mxfp4(self) -> bool:
        """Whether a checkpoint's matrix is in MXFP4; on GPUs the format is called "mxfp4"."""
        return (self.dtype, self.group_size, self.layout) == ("e2m1", MXFP4_BLOCK, ScaleLayout("bfloat16", "none"))

    @property
    def may_be_recovered(self) -> bool:
        """Whether weight_dtype="bfloat16" dequantizes a checkpoint's matrix."""
        return self.dtype in ("e4m3", "e2m1")

    @property
    def bits(self) -> int:
        """Bits of a quantized value."""
        return 8 if self.dtype in ("int8", "w8a8", "e4m3", "float8") else 4

    def groups(self, columns: int) -> int:
        """The number of groups in a row of `columns` values."""
        return -(-columns // self.group_size) if self.group_size else 1

    def super_groups(self, columns: int) -> int:
        """The number of super-groups (of nested scales) in a row of `columns` values."""
        return -(-columns // self.layout.super_group)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a serialized row of `columns` quantized values; 4-bit values are stored two to a byte."""
        return columns if self.bits == 8 else -(-columns // 2)

    def scale_tensors(self, columns: int) -> dict[str, tuple[str, int]]:
        """The tensors that are serialized with a matrix whose rows have `columns` values: stored type and row length by
        name suffix.
        """
        layout, found = self.layout, dict[str, tuple[str, int]]()
        kind = NESTED_TYPE if layout.super_group else SCALE_TYPES[layout.scales]
        found[SCALE] = kind, self.groups(columns)
        if layout.zeros != "none":
            found[OFFSET] = "U8" if layout.zeros == "points" else kind, self.groups(columns)
        if layout.super_group:
            found[SUPER_SCALE] = "F16", self.super_groups(columns)
            if layout.zeros == "offsets":
                found[SUPER_OFFSET] = "F16", self.super_groups(columns)
        return found

    def native(self, first: int = 0) -> dict[str, Any]:
        """Arguments of the native library's functions for a rank's slice of K that begins at column `first`. A matrix
        with permuted columns must first be laid out in its own order.
        """
        layout = self.layout
        if layout.super_group:
            layout = replace(layout, super_group=group_of_slice(layout.super_group, first))
        changed = {name: value for name, value in layout.changed().items() if name != "permuted"}
        dtype, size = self.dtype, group_of_slice(self.group_size, first)
        if self.exact:
            if dtype not in ("w8a8", "w4a8") and not 0 < size <= LONGEST_EXACT:  # several groups with the same scale
                size = gcd(size, LONGEST_EXACT)
            dtype = EXACT[dtype]
        return {"dtype": dtype, "group_size": size, **changed}

    def __str__(self) -> str:
        text = f"{self.dtype}:{self.group_size}" if self.group_size else self.dtype
        more = ["exact"] if self.exact else []
        return "/".join([text, *(f"{name}={value}" for name, value in self.layout.changed().items()), *more])


def not_numbers(dtype: str) -> str:
    """A description, for messages, of the values that a matrix of this type cannot hold."""
    return "NaN or infinite" + (", or beyond the range of float16" if dtype == "float16" else "")


def exact(form: WeightFormat) -> WeightFormat:
    """The format of routed experts in a mixed group that are stored in the format `form`: by the exact recipe, if the
    format has one.
    """
    return replace(form, exact=True) if form.dtype in EXACT else form


def activated(form: WeightFormat) -> WeightFormat:
    """The same values with 8-bit activations, if they are integers."""
    return replace(form, dtype={"int8": "w8a8", "int4": "w4a8"}.get(form.dtype, form.dtype))


def group_of_slice(group_size: int, first: int) -> int:
    """The group size of a rank's slice of K that begins at column `first`, which may lie inside a group.

    Each group of the slice is a part of one group of the whole row and has its scale. AllSparkError if the parts would
    be smaller than SMALLEST_GROUP.
    """
    if group_size == 0 or first == 0:
        return group_size
    common = gcd(group_size, first)
    if common < SMALLEST_GROUP:
        raise AllSparkError(
            AsStatus.ALLSPARK_PARAM_ERROR,
            f"weight_group_size={group_size} is not possible with this number of ranks: a rank's slice of a matrix "
            f"begins at input feature {first}, inside a group and not at a multiple of {SMALLEST_GROUP}; use "
            "weight_group_size=0 or another number of ranks",
        )
    return common


def stream_matrices(graph: Graph) -> set[str]:
    """Names of the matrices of the weights of residual streams, which checkpoints store in float32."""
    logits = {op.inputs[0] for op in graph.ops if op.type == "stream_weights"}
    return {op.weights[0] for op in graph.ops if op.type == "linear" and op.outputs[0] in logits}


def routing_weights(graph: Graph) -> set[str]:
    """Names of the matrices of routers, of gates of shared experts and of the weights of residual streams. They are
    small and stay float32, because a difference in the last bit can route a token to another expert.
    """
    logits = {op.inputs[0] for op in graph.ops if op.type == "router"}
    logits |= {op.inputs[1] for op in graph.ops if op.type == "sigmoid_mul"}
    return stream_matrices(graph) | {
        op.weights[0] for op in graph.ops if op.type == "linear" and op.outputs[0] in logits}


@dataclass(frozen=True)
class Quantization:
    """The requested formats of a model's matrices. tensors: formats by patterns of tensor names, of which the first
    match counts; None: not quantized.
    """

    format: WeightFormat
    quantize_head: bool = True
    tensors: Mapping[str, WeightFormat | None] = field(default_factory=dict)

    def formats(self, graph: Graph, unquantized: str) -> dict[str, WeightFormat]:
        """The format of each matrix of the graph. unquantized: the type of matrices that are not quantized."""
        plain = WeightFormat(unquantized)
        head = {name for op in graph.ops if op.type == "embedding" for name in op.weights}
        head |= {
            op.weights[0] for op in graph.ops if op.type == "linear" and graph.tensors[op.outputs[0]].name == "logits"
        }
        routing, matched = routing_weights(graph), set()
        found: dict[str, WeightFormat] = {}
        for weight in graph.weights.values():
            if not weight.is_matrix:
                continue
            default = plain if self.format.quantized and not self.quantize_head and weight.name in head else self.format
            if weight.name in routing:
                default = WeightFormat("float32")
            chosen = {}
            for part in weight.parts:
                pattern = next((p for p in self.tensors if fnmatch.fnmatchcase(part.tensor, p)), None)
                matched.add(pattern)
                chosen[part.tensor] = default if pattern is None else self.tensors[pattern] or plain
            if len(set(chosen.values())) > 1:
                raise ValueError("these tensors are computed as one matrix and must have one format: "
                                 + ", ".join(f"{name} ({form})" for name, form in chosen.items()))
            found[weight.name] = next(iter(chosen.values()))
        for pattern in self.tensors:
            if pattern not in matched:
                raise ValueError(f"the pattern {pattern!r} matches no matrix that earlier patterns do not match")
        return found


def wanted_formats(graph: Graph, config: AsModelConfig, unquantized: str) -> dict[str, WeightFormat]:
    """The format of each matrix of an opened model: as the config requests; for a model that is stored in quantized
    form, as it is stored. AllSparkError if the config requests another format than the stored one.
    """
    if graph.quantization is None:
        if config.weight_dtype == "mxfp4":
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "weight_dtype='mxfp4': the model is not stored in "
                                                               "MXFP4; use weight_dtype='auto' or another format")
        dtype = unquantized if config.weight_dtype == "auto" else config.weight_dtype
        form = WeightFormat(dtype, config.weight_group_size)
        return Quantization(form, config.quantize_head).formats(graph, unquantized)
    stored = graph.quantization.format
    wanted, quantized = WeightFormat(config.weight_dtype, config.weight_group_size), activated(stored)
    foreign = graph.quantization.is_foreign  # then 8-bit activations may be requested as well
    by_bytes = foreign and wanted.dtype == quantized.dtype and wanted.group_size in (0, stored.group_size)
    as_stored = (config.weight_dtype == "auto" or (stored.is_mxfp4 and config.weight_dtype == "mxfp4")
                 or (stored.may_be_recovered and config.weight_dtype == "bfloat16"))
    if not as_stored and not by_bytes and replace(stored, layout=ScaleLayout()) != wanted:
        raise AllSparkError(
            AsStatus.ALLSPARK_PARAM_ERROR,
            f"weight_dtype={config.weight_dtype!r} with weight_group_size={config.weight_group_size}: the model "
            + (f"is quantized, as {stored}; use weight_dtype='auto'" if foreign else
               f"was serialized as {stored}; use weight_dtype='auto', or serialize it again")
            + (f" or {quantized.dtype!r}" if foreign and quantized != stored else "")
            + (" or 'bfloat16', which dequantizes it" if stored.may_be_recovered else ""),
        )
    if graph.quantization.quantize_head and not config.quantize_head:
        raise AllSparkError(
            AsStatus.ALLSPARK_PARAM_ERROR,
            "quantize_head=False: the model was serialized with its embedding and "
            "head quantized; serialize it again",
        )
    routing = routing_weights(graph)

    def format_of(weight: Weight) -> WeightFormat:
        if weight.stored is None:
            return WeightFormat("float32" if weight.name in routing else unquantized)
        if weight.stored.may_be_recovered and config.weight_dtype == "bfloat16":
            return WeightFormat("bfloat16")
        return activated(weight.stored) if by_bytes else weight.stored

    return {weight.name: format_of(weight) for weight in graph.weights.values() if weight.is_matrix}


@dataclass(frozen=True)
class StoredQuantization:
    """How a stored model is quantized: the format of most matrices (each also stores its own), whether embedding and
    head are quantized, and the type of unquantized weights that "auto" chose for the original checkpoint.
    """

    format: WeightFormat
    quantize_head: bool
    unquantized: str

    @property
    def is_foreign(self) -> bool:
        """Whether the checkpoint was quantized by another program."""
        return self.format.layout != ScaleLayout()


# -- customized_quant_config -------------------------------------------------------------------------------------------
METHOD = "instant_quant"
WEIGHT_FORMATS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}
COMPUTE_METHODS = ("weight_only", "activate_quant")
KEYS = ("quant_method", "weight_format", "compute_method", "activate_format", "group_size", "quantize_head", "tensors")


def quantization_of(weight_only_quant: bool, customized: Mapping[str, Any] | None) -> Quantization:
    """The quantization that serialize_to_path's arguments request when enable_quant is set.

    customized has DashInfer's keys: {"quant_method": "instant_quant", "weight_format": "int8" | "uint4",
    "compute_method": "weight_only" | "activate_quant", "group_size": 64}; also "quantize_head": bool and "tensors":
    {pattern of tensor names: None (not quantized) or {"weight_format", "compute_method", "group_size"}, each with the
    value above as its default}. ValueError or TypeError names the key that is wrong.
    """
    values = dict(customized or {})
    _check_keys("customized_quant_config", values, KEYS)
    if values.get("quant_method", METHOD) != METHOD:
        raise ValueError(
            f"customized_quant_config: quant_method={values['quant_method']!r} is not offered; allowed: {METHOD!r}"
        )
    if values.get("activate_format", "int8") != "int8":
        raise ValueError(
            f"customized_quant_config: activate_format={values['activate_format']!r} is not offered; allowed: 'int8'"
        )
    head = values.get("quantize_head", True)
    if not isinstance(head, bool):
        raise TypeError(f"customized_quant_config: quantize_head={head!r}: expected a bool")
    # As in DashInfer: with a configuration, weights alone are quantized unless it says activate_quant.
    weight_only = weight_only_quant or bool(customized)
    default = _format("customized_quant_config", values, {"weight_format": "int8", "group_size": 0,
                                                          "compute_method": COMPUTE_METHODS[0 if weight_only else 1]})
    if weight_only_quant and default.dtype.startswith("w"):
        raise ValueError("customized_quant_config: compute_method='activate_quant' contradicts weight_only_quant=True")
    given = values.get("tensors", {})
    if not isinstance(given, Mapping):
        raise TypeError(f"customized_quant_config: tensors={given!r}: expected a dict of patterns")
    tensors: dict[str, WeightFormat | None] = {}
    for pattern, form in given.items():
        where = f"customized_quant_config: tensors[{pattern!r}]"
        if form is None:
            tensors[pattern] = None
            continue
        if not isinstance(form, Mapping):
            raise TypeError(f"{where} is {form!r}: expected None or a dict")
        _check_keys(where, form, ("weight_format", "compute_method", "group_size"))
        tensors[pattern] = _format(where, form, {
            "weight_format": "int8" if default.bits == 8 else "int4", "group_size": default.group_size,
            "compute_method": COMPUTE_METHODS[default.dtype.startswith("w")]})
    return Quantization(default, head, tensors)


def _check_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}; allowed: {', '.join(known)}{nearest_name(str(key), known)}")


def _format(where: str, values: Mapping[str, Any], defaults: dict[str, Any]) -> WeightFormat:
    chosen = {key: values.get(key, default) for key, default in defaults.items()}
    for key, allowed in (("weight_format", tuple(WEIGHT_FORMATS)), ("compute_method", COMPUTE_METHODS),
                         ("group_size", GROUP_SIZES)):
        if chosen[key] not in allowed or isinstance(chosen[key], bool):
            raise ValueError(f"{where}: {key}={chosen[key]!r} is not known; allowed: {', '.join(map(repr, allowed))}")
    bits = WEIGHT_FORMATS[chosen["weight_format"]]
    weight_only = chosen["compute_method"] == COMPUTE_METHODS[0]
    return WeightFormat(f"int{bits}" if weight_only else f"w{bits}a8", chosen["group_size"])
