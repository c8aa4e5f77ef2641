"""The op list: a model as data, independent of the number of ranks.

A model file describes its network once with the builder methods of `Graph`, one for each op of the native library's
table (models/ops.py). The graph is what `.asgraph` stores, what the profiler names and what `runtime/lowering.py` turns into one rank's ops.

Activations are buffers of shape [rows, width], fp32. A buffer's columns are a list of blocks, each replicated on every
rank or divided by a `Split`; buffers are reused by name from layer to layer, so a graph needs about ten.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Mapping

from allspark_server.models.config import ModelConfig
from allspark_server.models.ops import Attribute, op_spec
from allspark_server.models.rotary import Rotary
from allspark_server.weights.formats import StoredQuantization, WeightFormat
from allspark_server.weights.shard import Split

def _range(size: int, split: Split | None, rank: int, world: int) -> tuple[int, int]:
    """A rank's part of `size` features; the last unit of a split may reach past them."""
    begin, end = (0, size) if split is None else split.range_of(rank, world)
    return begin, min(end, size)


@dataclass(frozen=True)
class Block:
    """Consecutive columns of an activation: `width` of the whole model, divided by `split` when there is one."""

    width: int
    split: Split | None = None

    def range_of(self, rank: int, world: int) -> tuple[int, int]:
        return _range(self.width, self.split, rank, world)

    def width_of(self, rank: int, world: int) -> int:
        begin, end = self.range_of(rank, world)
        return end - begin


@dataclass(frozen=True)
class Tensor:
    """An activation buffer [rows, sum of the blocks' widths], fp32; `logit_rows`: only the rows that sample."""

    name: str
    blocks: tuple[Block, ...]
    logit_rows: bool = False

    def width_of(self, rank: int, world: int) -> int:
        return sum(block.width_of(rank, world) for block in self.blocks)


@dataclass(frozen=True)
class Part:
    """`rows` rows of a weight: one whole tensor of the checkpoint, its rows divided by `split` when there is one."""

    tensor: str
    rows: int
    split: Split | None = None

    def range_of(self, rank: int, world: int) -> tuple[int, int]:
        return _range(self.rows, self.split, rank, world)


@dataclass(frozen=True)
class Weight:
    """A weight of the executor: tensors of the checkpoint stacked by rows, or constants computed from the config.

    columns: in_features of a matrix, 0 for a vector. column_split: how in_features are divided (row-parallel layers).
    first_rank_only: zeros on the other ranks (the bias of a row-parallel layer, which all_reduce adds up). stored: the
    format of a matrix that is serialized quantized.
    """

    name: str
    parts: tuple[Part, ...] = ()
    columns: int = 0
    column_split: Split | None = None
    first_rank_only: bool = False
    values: tuple[float, ...] = ()
    stored: WeightFormat | None = None

    @property
    def is_matrix(self) -> bool:
        return self.columns > 0

    def rows_of(self, rank: int, world: int) -> int:
        if self.values:
            return len(self.values)
        return sum(end - begin for begin, end in (part.range_of(rank, world) for part in self.parts))

    def column_range_of(self, rank: int, world: int) -> tuple[int, int]:
        return (0, self.columns) if self.column_split is None else self.column_split.range_of(rank, world)

    def elements_of(self, rank: int, world: int) -> int:
        begin, end = self.column_range_of(rank, world)
        return self.rows_of(rank, world) * (end - begin if self.is_matrix else 1)


@dataclass(frozen=True)
class Op:
    """One operation. inputs, outputs and weights are names; attrs hold values of the whole model, not of a rank."""

    type: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    attrs: dict[str, Attribute] = field(default_factory=dict)


class Graph:
    """Builder and container of the op list. The builder methods are named after the ops and return the output."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, Weight] = {}
        self.ops: list[Op] = []
        self.quantization: StoredQuantization | None = None

    # -- the ways this model's dimensions are divided ------------------------------------------------------------------
    @property
    def q_heads(self) -> Split:
        return Split(self.config.num_heads, self.config.head_dim)

    @property
    def kv_heads(self) -> Split:
        return Split(self.config.num_heads, self.config.head_dim, self.config.num_heads // self.config.num_kv_heads)

    @property
    def intermediate(self) -> Split:
        """In whole groups of quantized weights, where the size allows that: down_proj is cut along K."""
        unit = gcd(self.config.intermediate_size, 32)
        return Split(self.config.intermediate_size // unit, unit)

    @property
    def vocab(self) -> Split:
        """In the sampler's chunks (native/sampling/sampler.h, chunk_of), so that draws do not depend on the number of
        ranks. The last one may be short."""
        size = self.config.vocab_size
        unit = 1 if size <= 1024 else 16 if size <= 16384 else 256
        return Split(-(-size // unit), unit)

    def quantized(self, formats: Mapping[str, WeightFormat], how: StoredQuantization) -> Graph:
        """The same model with its weights stored in these formats."""
        other = copy.copy(self)
        other.weights = {
            name: replace(weight, stored=formats[name]) if weight.is_matrix and formats[name].quantized else weight
            for name, weight in self.weights.items()
        }
        other.quantization = how
        return other

    # -- buffers and weights -------------------------------------------------------------------------------------------
    def tensor(self, name: str, blocks: tuple[Block, ...], logit_rows: bool = False) -> Tensor:
        """The buffer called `name`; the same one each time, so its shape must be the same each time."""
        wanted = Tensor(name, blocks, logit_rows)
        found = self.tensors.setdefault(name, wanted)
        if found != wanted:
            raise ValueError(f"buffer {name!r} is used with two shapes: {found} and {wanted}")
        return found

    def weight(self, weight: Weight) -> Weight:
        """Registers a weight; one that two ops share (a tied head) is registered once."""
        found = self.weights.setdefault(weight.name, weight)
        if found != weight:
            raise ValueError(f"weight {weight.name!r} is used with two layouts: {found} and {weight}")
        return found

    def matrix(self, name: str, rows: int, columns: int, *, row_split: Split | None = None,
               column_split: Split | None = None) -> Weight:
        """The checkpoint's tensor `name` of shape [rows, columns]."""
        return self.weight(Weight(name, (Part(name, rows, row_split),), columns, column_split))

    def packed(self, prefix: str, names: tuple[str, ...], splits: tuple[Split, ...], columns: int,
               bias: bool) -> tuple[Weight, Weight | None]:
        """Column-parallel layers over one input as one matrix (and bias): rows of `prefix.NAME.weight`, stacked."""
        joined = f"{prefix}.{'+'.join(names)}"

        def parts(suffix: str) -> tuple[Part, ...]:
            return tuple(Part(f"{prefix}.{name}.{suffix}", s.width, s) for name, s in zip(names, splits))

        weight = self.weight(Weight(f"{joined}.weight", parts("weight"), columns))
        return weight, self.weight(Weight(f"{joined}.bias", parts("bias"))) if bias else None

    # -- ops -----------------------------------------------------------------------------------------------------------
    def _op(self, type: str, inputs=(), outputs=(), weights=(), **attrs: Attribute) -> None:
        self.append(Op(type, tuple(t.name for t in inputs), tuple(t.name for t in outputs),
                       tuple(w.name for w in weights if w is not None), attrs))

    def append(self, op: Op) -> None:
        """Adds an op to the list; ValueError when it names what is not there, or is not as the table of ops has it."""
        unknown = [n for n in (*op.inputs, *op.outputs) if n not in self.tensors]
        unknown += [n for n in op.weights if n not in self.weights]
        spec = op_spec(op.type)
        if unknown:
            raise ValueError(f"op {op.type} refers to {unknown[0]!r}, which the graph does not define")
        spec.check_graph(len(op.inputs), len(op.outputs), len(op.weights), op.attrs)
        self.ops.append(op)

    def rotary_table(self, rotary: Rotary) -> None:
        """Cosines and sines of every position; once, first."""
        frequencies = self.weight(Weight("rotary.inv_freq", values=tuple(float(f) for f in rotary.inv_freq)))
        self._op("rotary_table", weights=(frequencies,), attention_factor=rotary.attention_factor,
                 dynamic=int(rotary.dynamic), base=rotary.base, factor=rotary.factor,
                 original_max=rotary.original_max, rotary_dim=rotary.dim)

    def embedding(self, weight: Weight) -> Tensor:
        """Rows of the embedding; ids of another rank's part of the vocabulary give zeros, so all_reduce follows."""
        x = self.tensor("x", (Block(self.config.hidden_size),))
        self._op("embedding", outputs=(x,), weights=(weight,))
        return self.all_reduce(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds the ranks' partial results, in place, in rank order."""
        self._op("all_reduce", (x,), (x,))
        return x

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weight(Weight(name, (Part(name, self.config.hidden_size),)))
        y = self.tensor("logit_normed" if x.logit_rows else "normed", x.blocks, x.logit_rows)
        self._op("rms_norm", (x,), (y,), (weight,), eps=self.config.rms_norm_eps)
        return y

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None, out: str) -> Tensor:
        """y = x W^T + b into the buffer `out`, whose columns are the weight's parts."""
        blocks = tuple(Block(part.rows, part.split) for part in weight.parts)
        y = self.tensor(out, blocks, x.logit_rows)
        self._op("linear", (x,), (y,), (weight, bias))
        return y

    def row_parallel_linear(self, x: Tensor, prefix: str, split: Split, bias: bool, out: str) -> Tensor:
        """A linear layer whose input is divided among ranks, and the all_reduce that makes its result whole."""
        hidden = self.config.hidden_size
        weight = self.matrix(f"{prefix}.weight", hidden, split.width, column_split=split)
        name = f"{prefix}.bias"
        added = self.weight(Weight(name, (Part(name, hidden),), first_rank_only=True)) if bias else None
        return self.all_reduce(self.linear(x, weight, added, out))

    def head_norm(self, qkv: Tensor, block: int, name: str) -> Tensor:
        """RMS norm of each head of one block (0: queries, 1: keys) of the packed projection, in place."""
        head_dim = self.config.head_dim
        weight = self.weight(Weight(name, (Part(name, head_dim),)))
        self._op("head_norm", (qkv,), (qkv,), (weight,), block=block, head_dim=head_dim, eps=self.config.rms_norm_eps)
        return qkv

    def rope(self, qkv: Tensor) -> Tensor:
        """Rotates query and key heads (the two halves of a head are the pairs), in place."""
        self._op("rope", (qkv,), (qkv,), head_dim=self.config.head_dim, rotary_dim=self.config.head_dim)
        return qkv

    def span_attention(self, qkv: Tensor, layer: int) -> Tensor:
        """Stores keys and values in the span cache and attends causally over the sequence's spans."""
        config = self.config
        y = self.tensor("attended", (Block(self.q_heads.width, self.q_heads),))
        self._op("span_attention", (qkv,), (y,), layer=layer, head_dim=config.head_dim,
                 group=config.num_heads // config.num_kv_heads, scale=config.head_dim ** -0.5)
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of the packed projection."""
        y = self.tensor("activated", gate_up.blocks[:1])
        self._op("silu_mul", (gate_up,), (y,))
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x += y."""
        self._op("add", (x, y), (x,))
        return x

    def select_rows(self, x: Tensor) -> Tensor:
        """The rows after which a token is sampled."""
        y = self.tensor("selected", x.blocks, logit_rows=True)
        self._op("select_rows", (x,), (y,))
        return y

    def sample(self, logits: Tensor) -> None:
        self._op("sample", (logits,), vocab_size=self.config.vocab_size)
