"""A model's serialized form: NAME.asgraph (op list, a protobuf message, binary or text), NAME.asparam (weights)."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from allspark_client._proto import asgraph_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.config import ARCHITECTURES, ModelConfig, RopeConfig
from allspark_server.models.graph import OP_TYPES, Block, Graph, Op, Part, Weight
from allspark_server.weights.safetensors import StoredTensor, write_safetensors
from allspark_server.weights.shard import Split

if TYPE_CHECKING:
    from allspark_server.weights.checkpoint import Source

VERSION = 1
PARAM_FORMAT = "asparam-1"
TEXT_MARK = b"# allspark graph, text form\n"
STORED_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
PIECE_ELEMENTS = 1 << 22


# -- graph <-> message -------------------------------------------------------------------------------------------------
def to_message(graph: Graph) -> pb.Graph:
    config = dataclasses.asdict(graph.config)
    rope = {name: value for name, value in config.pop("rope").items() if value is not None}
    message = pb.Graph(version=VERSION, config=pb.Config(rope=pb.Rope(**rope), **config))
    for tensor in graph.tensors.values():
        blocks = [pb.Block(width=b.width, split=_split_message(b.split)) for b in tensor.blocks]
        message.tensors.add(name=tensor.name, blocks=blocks, logit_rows=tensor.logit_rows)
    for weight in graph.weights.values():
        parts = [pb.Part(tensor=p.tensor, rows=p.rows, split=_split_message(p.split)) for p in weight.parts]
        message.weights.add(name=weight.name, parts=parts, columns=weight.columns,
                            column_split=_split_message(weight.column_split),
                            first_rank_only=weight.first_rank_only, values=weight.values)
    for op in graph.ops:
        attrs = {name: pb.Attr(integer=value) if isinstance(value, int) else pb.Attr(number=value)
                 for name, value in op.attrs.items()}
        message.ops.add(type=op.type, inputs=op.inputs, outputs=op.outputs, weights=op.weights, attrs=attrs)
    return message


def _split_message(split: Split | None) -> pb.Split | None:
    return None if split is None else pb.Split(units=split.units, size=split.size, group=split.group)


def from_message(message: pb.Graph) -> Graph:
    """Rebuilds a graph; ValueError when it is not consistent."""
    if message.version != VERSION:
        raise ValueError(f"its version is {message.version}: this build reads version {VERSION}")
    fields = {f.name: getattr(message.config, f.name) for f in dataclasses.fields(ModelConfig)}
    rope = {f.name: getattr(message.config.rope, f.name) for f in dataclasses.fields(RopeConfig)}
    if not message.config.rope.HasField("attention_factor"):
        rope["attention_factor"] = None
    config = ModelConfig(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"]), "rope": RopeConfig(**rope)})
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"its architecture is {config.architecture!r}: known are {', '.join(ARCHITECTURES)}")
    graph = Graph(config)
    for t in message.tensors:
        graph.tensor(t.name, tuple(Block(b.width, _split_of(b)) for b in t.blocks), t.logit_rows)
    for w in message.weights:
        parts = tuple(Part(p.tensor, p.rows, _split_of(p)) for p in w.parts)
        column_split = _split_of(w, "column_split")
        graph.weight(Weight(w.name, parts, w.columns, column_split, w.first_rank_only, tuple(w.values)))
    for op in message.ops:
        if op.type not in OP_TYPES:
            raise ValueError(f"it holds the unknown op {op.type!r}")
        unknown = [n for n in (*op.inputs, *op.outputs) if n not in graph.tensors]
        unknown += [n for n in op.weights if n not in graph.weights]
        if unknown:
            raise ValueError(f"op {op.type} refers to {unknown[0]!r}, which it does not define")
        attrs = {n: a.integer if a.WhichOneof("value") == "integer" else a.number for n, a in sorted(op.attrs.items())}
        graph.ops.append(Op(op.type, tuple(op.inputs), tuple(op.outputs), tuple(op.weights), attrs))
    return graph


def _split_of(message, name: str = "split") -> Split | None:
    if not message.HasField(name):
        return None
    split = getattr(message, name)
    if split.units < 1 or split.size < 1 or split.group < 1 or split.units % split.group:
        raise ValueError(f"it holds a split of {split.units} units of {split.size} in groups of {split.group}")
    return Split(split.units, split.size, split.group)


# -- files -------------------------------------------------------------------------------------------------------------
def write_graph(graph: Graph, path: Path, *, text: bool = False) -> None:
    message = to_message(graph)
    if text:
        data = TEXT_MARK + text_format.MessageToString(message).encode()
    else:
        data = message.SerializeToString(deterministic=True)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"cannot write {path}: {error}") from error


def read_graph(path: Path) -> Graph:
    """Reads an .asgraph file, binary or text; AllSparkError when it is damaged or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"cannot read {path}: {error}") from error
    try:
        if data.startswith(TEXT_MARK):
            message = text_format.Parse(data.decode(), pb.Graph())
        else:
            message = pb.Graph.FromString(data)
        return from_message(message)
    except (DecodeError, text_format.ParseError, UnicodeDecodeError, ValueError) as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{path} is not a readable .asgraph file: {error}") from error


def write_params(graph: Graph, source: Source, path: Path, dtype: str = "auto") -> None:
    """Writes each tensor that the graph uses, whole, with its crc32. dtype: "auto" (as stored) or of STORED_TYPES."""
    wanted = None if dtype == "auto" else STORED_TYPES[dtype]
    names = sorted({part.tensor for weight in graph.weights.values() for part in weight.parts})
    tensors = [source.get(name) for name in names]
    kinds = [(t.name, wanted or t.dtype, t.shape) for t in tensors]
    # Checksums stand in the header, before the data, so the tensors are gone through twice.
    metadata = {"format": PARAM_FORMAT}
    for tensor, (name, kind, _) in zip(tensors, kinds):
        crc = 0
        for piece in _pieces(tensor, kind):
            crc = zlib.crc32(piece, crc)
        metadata[f"crc32:{name}"] = f"{crc:08x}"
    write_safetensors(path, kinds, metadata, (_pieces(t, kind) for t, (_, kind, _) in zip(tensors, kinds)))


def _pieces(tensor: StoredTensor, kind: str) -> Iterator[np.ndarray]:
    """The tensor's elements as contiguous pieces of stored type `kind`."""
    flat = tensor.data.reshape(-1)
    for begin in range(0, flat.size, PIECE_ELEMENTS):
        piece = flat[begin:begin + PIECE_ELEMENTS]
        yield piece if kind == tensor.dtype else from_float32(to_float32(piece, tensor.dtype), kind)


def to_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """F32, F16 or BF16 data as float32, exactly."""
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
