"""The serialized form of a model: NAME.asgraph (op list, a protobuf message, binary or text) and NAME.asparam
(weights).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from allspark_client._proto import asgraph_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_server.models.cache_groups import CacheGroup
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import ALL_ROWS, OUTPUT_ROWS, Block, Op, Part, Weight
from allspark_server.models.network import (
    EncoderConfig,
    ExpertConfig,
    ModelConfig,
    RopeConfig,
    VisionConfig,
    stored_fields,
)
from allspark_server.models.ops import Attribute
from allspark_server.models.registry import ARCHITECTURES
from allspark_server.weights.files import MAX_GRAPH_BYTES, read_file, replacing
from allspark_server.weights.formats import (
    MOST_CODES,
    OFFSET,
    ORDER,
    SCALE,
    SCALE_TYPES,
    SMALLEST_GROUP,
    STORED_DTYPES,
    SUPER_OFFSET,
    SUPER_SCALE,
    UNQUANTIZED_DTYPES,
    ScaleLayout,
    StoredQuantization,
    WeightFormat,
)
from allspark_server.weights.safetensors import StoredTensor, aligned, write_safetensors
from allspark_server.weights.shard import Split

if TYPE_CHECKING:
    from allspark_server.weights.checkpoint import OpenedModel
    from allspark_server.weights.quantized import QuantizedTensor
    from allspark_server.weights.sources import Source

VERSION, QUANTIZED_VERSION = 1, 2
PARAM_FORMAT = "asparam-1"
TOWER = "vision_tower."     # before the names of the tower's tensors in .asparam
TEXT_MARK = b"# allspark graph, text form\n"
STORED_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
PIECE_ELEMENTS = 1 << 22

logger = logging.getLogger(__name__)

Entry = tuple[str, str, tuple[int, ...]]    # name, type and shape of a tensor

# The native library's function: (data, its stored type, bits, group size) -> (q [n, row bytes], scales [n, groups],
# offsets [n, groups], number of values that are NaN or infinite).
Quantize = Callable[[np.ndarray, str, int, int], tuple[np.ndarray, np.ndarray, np.ndarray, int]]


# -- graph <-> message -------------------------------------------------------------------------------------------------
def to_message(graph: Graph, tower: Graph | None = None) -> pb.Graph:
    """The protobuf message that stores a graph. tower: that of the model's vision tower."""
    config = {name: getattr(graph.config, name) for name in stored_fields(ModelConfig)}
    rope, experts = config.pop("rope"), config.pop("experts")
    stored = {name: getattr(rope, name) for name in stored_fields(RopeConfig) if getattr(rope, name) is not None}
    message = pb.Graph(version=VERSION, config=pb.Config(rope=pb.Rope(**stored), **config))
    if experts is not None:
        stored = {name: getattr(experts, name) for name in stored_fields(ExpertConfig)}
        message.config.experts.CopyFrom(pb.Experts(**stored))
    if graph.config.vision is not None:
        vision = {name: getattr(graph.config.vision, name) for name in stored_fields(VisionConfig)}
        message.config.vision.CopyFrom(pb.Vision(**vision))
    if tower is not None:
        message.tower.CopyFrom(to_message(tower))
    if graph.quantization is not None:
        how, message.version = graph.quantization, QUANTIZED_VERSION
        message.quantization.CopyFrom(
            pb.Quantization(
                format=_format_message(how.format), quantize_head=how.quantize_head, unquantized=how.unquantized
            )
        )
    message.row_sets.extend(pb.RowSet(**vars(row_set)) for row_set in graph.row_sets.values())
    if graph.cache_groups != [CacheGroup()]:
        message.cache_groups.extend(pb.CacheGroup(**vars(group)) for group in graph.cache_groups)
    for tensor in graph.tensors.values():
        blocks = [pb.Block(width=b.width, split=_split_message(b.split)) for b in tensor.blocks]
        routed = tensor.rows if tensor.rows in graph.row_sets else ""
        message.tensors.add(name=tensor.name, blocks=blocks, logit_rows=tensor.logit_rows, rows=routed)
    for weight in graph.weights.values():
        parts = [pb.Part(tensor=p.tensor, rows=p.rows, split=_split_message(p.split), first=p.first, of=p.of,
                         expert=p.expert, unit=p.unit, units=_split_message(p.units)) for p in weight.parts]
        message.weights.add(name=weight.name, parts=parts, columns=weight.columns,
                            column_split=_split_message(weight.column_split),
                            first_rank_only=weight.first_rank_only, values=weight.values,
                            stored=_format_message(weight.stored), values_split=_split_message(weight.values_split),
                            experts=weight.experts)
    for op in graph.ops:
        attrs = {name: _attribute_message(value) for name, value in op.attrs.items()}
        message.ops.add(type=op.type, inputs=op.inputs, outputs=op.outputs, weights=op.weights, attrs=attrs)
    return message


def _split_message(split: Split | None) -> pb.Split | None:
    if split is None:
        return None
    return pb.Split(units=split.units, size=split.size, group=split.group, least=split.least,
                    unless=_split_message(split.unless))


def _attribute_message(value: Attribute) -> pb.Attr:
    if isinstance(value, str):
        return pb.Attr(choice=value)
    return pb.Attr(integer=value) if isinstance(value, int) else pb.Attr(number=value)


def _attribute(message: pb.Attr) -> Attribute:
    kind = message.WhichOneof("value")
    return 0.0 if kind is None else getattr(message, kind)


def _format_message(form: WeightFormat | None) -> pb.Format | None:
    if form is None:
        return None
    layout = None if form.layout == ScaleLayout() else pb.ScaleLayout(
        **{name: value for name, value in vars(form.layout).items() if value is not None})
    return pb.Format(dtype=form.dtype, group_size=form.group_size, layout=layout)


def graphs_of(message: pb.Graph) -> tuple[Graph, Graph | None]:
    """The graphs of a model and of its vision tower that a message stores. ValueError if they are not consistent."""
    graph = from_message(message)
    if graph.config.vision is not None:
        raise ValueError("it holds a vision tower without its model")
    if not message.HasField("tower"):
        return graph, None
    tower = from_message(message.tower)
    if tower.config.vision is None or message.tower.HasField("tower"):
        raise ValueError("its vision tower is not one")
    graph.config = dataclasses.replace(graph.config, tower=tower.config)
    return graph, tower


def from_message(message: pb.Graph) -> Graph:
    """The graph of a model, or of a vision tower, that a message stores. ValueError if it is not consistent."""
    if message.version not in (VERSION, QUANTIZED_VERSION):
        raise ValueError(
            f"its version is {message.version}: this build reads versions {VERSION} and {QUANTIZED_VERSION}"
        )
    fields = {name: getattr(message.config, name) for name in stored_fields(ModelConfig)}
    experts = message.config.experts
    fields["experts"] = None
    if message.config.HasField("experts"):
        values = {name: getattr(experts, name) for name in stored_fields(ExpertConfig)}
        fields["experts"] = ExpertConfig(**{**values, "dense_layers": tuple(experts.dense_layers)})
    rope = {name: getattr(message.config.rope, name) for name in stored_fields(RopeConfig)}
    if not message.config.rope.HasField("attention_factor"):
        rope["attention_factor"] = None
    if message.config.HasField("vision"):
        values = {name: getattr(message.config.vision, name) for name in stored_fields(VisionConfig)}
        fields["vision"] = VisionConfig(**{**values, "taps": tuple(values["taps"])})
        fields["encoder"] = EncoderConfig("mean")
    config = ModelConfig(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"]), "rope": RopeConfig(**rope)})
    if config.architecture not in ARCHITECTURES and config.vision is None:
        raise ValueError(f"its architecture is {config.architecture!r}: known are {', '.join(ARCHITECTURES)}")
    graph = Graph(config.checked())
    if message.HasField("quantization"):
        how = message.quantization
        if how.unquantized not in UNQUANTIZED_DTYPES:
            raise ValueError(f"its unquantized weights are of the unknown type {how.unquantized!r}")
        graph.quantization = StoredQuantization(_format_of(how.format), how.quantize_head, how.unquantized)
    ids = Split(config.vocab_size)  # graphs of earlier builds divide the vocabulary by ids

    def split_of(message: pb.Block | pb.Part, width: int) -> Split | None:
        if width == config.vocab_size and _stored_split(message, "split") in (ids, graph.vocab):
            return graph.vocab  # its last unit may extend past the end of the vocabulary
        return _split_of(message, width)

    for row_set in message.row_sets:
        graph.row_set(row_set.name, row_set.times, row_set.of)
    if message.cache_groups:
        graph.cache_groups = [CacheGroup(group.kind, group.window) for group in message.cache_groups]
        if graph.cache_groups != sorted(graph.cache_groups, key=lambda group: group.kind != "full"):
            raise ValueError("its cache groups of full attention do not come first")
    for t in message.tensors:
        blocks = tuple(Block(b.width, split_of(b, b.width)) for b in t.blocks)
        if not blocks or any(block.width < 1 for block in blocks):
            raise ValueError(f"buffer {t.name!r} has no columns")
        graph.tensor(t.name, blocks, t.rows or (OUTPUT_ROWS if t.logit_rows else ALL_ROWS))
    for w in message.weights:
        parts = tuple(_part_of(p, split_of) for p in w.parts)
        if w.columns < 0 or bool(parts) == bool(w.values) or (w.values and w.columns) or any(p.rows < 1 for p in parts):
            raise ValueError(f"weight {w.name!r} must have parts, or be a vector of values")
        if w.experts < 0 or (w.experts and (len(parts) % w.experts or not parts)):
            raise ValueError(f"weight {w.name!r} has {len(parts)} parts, of {w.experts} experts")
        column_split = _split_of(w, w.columns, "column_split")
        stored = _format_of(w.stored) if w.HasField("stored") else None
        if stored is not None and (graph.quantization is None or not w.columns):
            raise ValueError(f"weight {w.name!r} is quantized, but the model is not, or it is a vector")
        values_split = _split_of(w, len(w.values), "values_split")
        graph.weight(
            Weight(w.name, parts, w.columns, column_split, w.first_rank_only, tuple(w.values), stored, values_split,
                   w.experts)
        )
    for number, op in enumerate(message.ops):
        attrs = {name: _attribute(value) for name, value in sorted(op.attrs.items())}
        if op.type in ("keep_hidden", "kept_hidden"):   # these need a draft head beside the model
            raise ValueError(f"op {number} ({op.type}) of the model's graph is for draft heads, which files lack")
        try:
            graph.append(Op(op.type, tuple(op.inputs), tuple(op.outputs), tuple(op.weights), attrs))
        except ValueError as error:
            raise ValueError(f"op {number} ({op.type}) of the model's graph is not valid: {error}") from None
    return graph


def _part_of(message: pb.Part, split_of: Callable[[pb.Part, int], Split | None]) -> Part:
    """A part of a weight. ValueError unless its rows lie within the tensor."""
    expert, unit = (getattr(message, n) if message.HasField(n) else None for n in ("expert", "unit"))
    split, units = split_of(message, message.rows), _stored_split(message, "units")
    if unit is not None and (units is None or units.group != 1 or units.size != 1 or not 0 <= unit < units.units):
        raise ValueError(f"it holds a part of tensor {message.tensor!r} that is unit {unit} of {units}")
    part = Part(message.tensor, message.rows, split, message.first, message.of, expert, unit, units)
    if part.first < 0 or part.first + part.rows > part.stored_rows or (expert or 0) < 0:
        raise ValueError(
            f"it holds rows {part.first} to {part.first + part.rows} of tensor {part.tensor!r}, which has "
            f"{part.stored_rows}"
        )
    return part


def _format_of(message: pb.Format) -> WeightFormat:
    layout = message.layout if message.HasField("layout") else None
    fields = {f.name: getattr(layout, f.name) for f in dataclasses.fields(ScaleLayout)} if layout else {}
    if layout and not layout.HasField("center"):
        fields["center"] = None
    form = WeightFormat(message.dtype, message.group_size, ScaleLayout(**fields))
    if message.dtype not in STORED_DTYPES or not 0 <= message.group_size < 1 << 24 or \
            message.group_size % SMALLEST_GROUP:
        raise ValueError(f"it holds weights of the unknown format {message.dtype!r} in groups of {message.group_size}")
    if not _computable(form):
        raise ValueError(f"it holds weights of {message.dtype} with the unknown {form.layout}")
    return form


def _computable(form: WeightFormat) -> bool:
    """Whether the layout of the scales is one that kernels compute with."""
    layout, coded = form.layout, form.dtype not in ("int8", "int4", "w8a8", "w4a8")
    nested = layout.super_group > 0
    return (layout.scales in SCALE_TYPES and layout.zeros in ("none", "offsets", "points") and layout.group_rows == 1
            and (not nested or (layout.scales == "float16" and layout.zeros != "points" and form.group_size > 0
                                and layout.super_group < 1 << 24 and layout.super_group % form.group_size == 0))
            and layout.super_group >= 0 and layout.scale_bits == (8 if nested else 0)
            and (layout.center is None or (not coded and 0 <= layout.center < MOST_CODES[form.bits]))
            and not (coded and (layout.zeros != "none" or layout.permuted)))


def _split_of(message: Message, width: int, name: str = "split") -> Split | None:
    """The split of a dimension of `width` features; None if every rank has all of them."""
    split = _stored_split(message, name)
    if split is not None and (split.units < 1 or split.size < 1 or split.group < 1 or split.units % split.group
                              or split.width != width):
        raise ValueError(f"it holds a split of {split.units} units of {split.size} in groups of {split.group}, of a "
                         f"dimension of {width}")
    return split


def _stored_split(message: Message, name: str) -> Split | None:
    if not message.HasField(name):
        return None
    split = getattr(message, name)
    other = _stored_split(split, "unless")
    if split.least < 0 or (other is not None and (other.unless is not None or min(other.units, other.size) < 1)):
        raise ValueError(f"it holds an invalid split of {split.units} units")
    return Split(split.units, split.size, split.group, split.least, other)


# -- files -------------------------------------------------------------------------------------------------------------
def write_graph(graph: Graph, path: Path, *, text: bool = False, tower: Graph | None = None) -> None:
    """Writes an .asgraph file. tower: the graph of the model's vision tower. AllSparkError if that fails."""
    message = to_message(graph, tower)
    if text:
        data = TEXT_MARK + text_format.MessageToString(message).encode()
    else:
        data = message.SerializeToString(deterministic=True)
    with replacing(path) as file:
        file.write(data)


def read_graph(path: Path) -> Graph:
    """The graph of the model in an .asgraph file; see read_graphs."""
    return read_graphs(path)[0]


def read_graphs(path: Path) -> tuple[Graph, Graph | None]:
    """Reads an .asgraph file, binary or text: the graphs of the model and of its vision tower, None if it has none.

    AllSparkError if it is damaged or of another version.
    """
    data = read_file(path, MAX_GRAPH_BYTES)
    try:
        if data.startswith(TEXT_MARK):
            message = text_format.Parse(data.decode(), pb.Graph())
        else:
            message = pb.Graph.FromString(data)
        return graphs_of(message)
    except (DecodeError, text_format.ParseError, UnicodeDecodeError, ValueError) as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{path} is not a readable .asgraph file: {error}") from error


def write_params(
    graph: Graph, source: Source, path: Path, dtype: str = "auto", quantize: Quantize | None = None,
    tower: OpenedModel | None = None
) -> None:
    """Writes every tensor that the graph uses, whole, with its crc32.

    dtype: the type of tensors that are not quantized: "auto" (as stored) or a key of STORED_TYPES. quantize: quantizes
    the weights of a graph with quantized weights; None if they are quantized in the source. tower: the vision tower,
    whose tensors are written as its source has them.
    """
    wanted = None if dtype == "auto" else STORED_TYPES[dtype]
    written = list(_written(graph, source, wanted, quantize))
    if tower is not None:
        written += _written(tower.graph, tower.source, wanted, None, TOWER, [tower.row_end] if tower.row_end else [])
    # Tensors that are read in place must be aligned. Quantized ones have any number of bytes, so they come last.
    written.sort(key=lambda tensor: (tensor.form is not None, tensor.name))
    formats = {f"format:{tensor.name}": str(tensor.form) for tensor in written if tensor.form is not None}
    write_safetensors(path, [entry for tensor in written for entry in tensor.entries],
                      {"format": PARAM_FORMAT, **formats}, [data for tensor in written for data in tensor.data],
                      checksums=True)


@dataclasses.dataclass
class _Written:
    """A tensor that is written, or the tensors that a quantized one consists of: name, type and shape of each, and its
    pieces.
    """

    name: str
    form: WeightFormat | None
    entries: list[Entry]
    data: list[Iterator[np.ndarray]]


def _written(graph: Graph, source: Source, wanted: str | None, quantize: Quantize | None, prefix: str = "",
             more: Iterable[str] = ()) -> Iterator[_Written]:
    """What is written of the tensors of a graph, and of `more` that it does not name. prefix: of their names. wanted:
    the stored type of tensors that are not quantized, None for their own.
    """
    weights = {part.tensor: (weight, part) for weight in graph.weights.values() for part in weight.parts}
    for name in more:
        tensor = source.get(name)
        yield _Written(prefix + name, None, [(prefix + name, wanted or tensor.dtype, tensor.shape)],
                       [_pieces(tensor, wanted or tensor.dtype)])
    for name, (weight, part) in weights.items():
        form, own = weight.stored, prefix + name
        if form is not None and quantize is None:
            shape = part.stored_rows, weight.columns
            found, suffixes = source.quantized(name, form, shape), form.scale_tensors(weight.columns)
            entries: list[Entry] = [(own + suffix, kind, (shape[0], width))
                                    for suffix, (kind, width) in suffixes.items()]
            entries.append((own, "U8", (shape[0], form.row_bytes(shape[1]))))
            data = [_stored_pieces(found, form, shape, i) for i in (*_arrays_of(suffixes), 0)]
            if found.order is not None:
                entries.append((own + ORDER, "I32", (shape[1],)))
                data.append(iter([found.order]))
            yield _Written(own, form, entries, data)
            continue
        tensor = source.get(name)
        if form is None:
            yield _Written(own, None, [(own, wanted or tensor.dtype, tensor.shape)],
                           [_pieces(tensor, wanted or tensor.dtype)])
            continue
        if len(tensor.shape) not in (2, 3):
            raise not_available(f"Quantizing tensor {name!r} of shape {list(tensor.shape)}")
        rows, columns = tensor.shape[:-1], tensor.shape[-1]
        entries = [(own + suffix, kind, (*rows, width))
                   for suffix, (kind, width) in form.scale_tensors(columns).items()]
        entries.append((own, "U8", (*rows, form.row_bytes(columns))))
        assert quantize is not None  # otherwise the source has it quantized, see above
        yield _Written(own, form, entries, _quantized_pieces(tensor, form, quantize))


def _arrays_of(suffixes: Iterable[str]) -> list[int]:
    """The indices of these tensors in QuantizedRows.arrays()."""
    return [1 + (SCALE, OFFSET, SUPER_SCALE, SUPER_OFFSET).index(suffix) for suffix in suffixes]


def _stored_pieces(tensor: QuantizedTensor, form: WeightFormat, shape: tuple[int, int],
                   array: int) -> Iterator[np.ndarray]:
    """The pieces of one array of a matrix that is quantized in its source."""
    arrays = (rows.arrays()[array] for _, rows in tensor.pieces(0, *shape, plain=form))
    return (np.ascontiguousarray(found) for found in arrays if found is not None)


def _quantized_pieces(tensor: StoredTensor, form: WeightFormat, quantize: Quantize) -> list[Iterator[np.ndarray]]:
    """The pieces of scales, offsets and q of a tensor. It is quantized when the first of them is requested."""
    later: list[np.ndarray] = []

    def scales() -> Iterator[np.ndarray]:
        rows = aligned(np.ascontiguousarray(tensor.values.reshape(-1, tensor.shape[-1])))
        q, scale, offset, bad = quantize(rows, tensor.dtype, form.bits, form.group_size)
        if bad:
            logger.warning(
                "tensor %r in %s holds %d values that are NaN or infinite; outputs will be wrong",
                tensor.name,
                tensor.file,
                bad,
            )
        later.extend((q, offset))
        yield scale

    def rest() -> Iterator[np.ndarray]:
        yield later.pop()

    return [scales(), rest(), rest()]


def _pieces(tensor: StoredTensor, kind: str) -> Iterator[np.ndarray]:
    """The tensor's elements in contiguous pieces of the stored type `kind`."""
    flat = tensor.values.reshape(-1)
    for begin in range(0, flat.size, PIECE_ELEMENTS):
        piece = np.ascontiguousarray(flat[begin:begin + PIECE_ELEMENTS])
        yield piece if kind == tensor.dtype else from_float32(to_float32(piece, tensor.dtype), kind)


def to_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """F32, F16 or BF16 data as float32. The conversion is exact."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(data, np.float32)


def from_float32(data: np.ndarray, kind: str) -> np.ndarray:
    """float32 values as F32, F16 or BF16 (rounded to nearest, ties to even; NaN stays NaN)."""
    if kind == "BF16":
        bits = data.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)
    return data.astype(np.float16) if kind == "F16" else data
