"""The op list: a model as data, independent of the number of ranks.

A model file describes its network once with the builder methods of `Graph`, one for each op of the native library's
table (models/ops.py). The graph is what `.asgraph` stores, what the profiler names and what `runtime/lowering.py` turns
into one rank's ops.

Activations are buffers of shape [rows, width], fp32. A buffer's columns are a list of blocks, each replicated on every
rank or divided by a `Split`; buffers are reused by name from layer to layer, so a graph needs about ten.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd

from allspark_server.models.cache_groups import CacheGroup, place_layers
from allspark_server.models.network import ModelConfig
from allspark_server.models.ops import Attribute, op_spec
from allspark_server.models.rotary import Rotary
from allspark_server.weights.formats import StoredQuantization, WeightFormat
from allspark_server.weights.shard import Split

ALL_ROWS, OUTPUT_ROWS = "all", "outputs"
# Features. Decode waits for the rank that has most to read: slices of every chosen expert are equal parts, of whole
# experts one rank may have several and another none.
LEAST_EXPERT_SLICE = 64


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
class RowSet:
    """Rows that a router forms within the step: `times` entries for each row of the set `of`."""

    name: str
    of: str
    times: int


@dataclass(frozen=True)
class Tensor:
    """An activation buffer [rows, sum of the blocks' widths], fp32. rows: ALL_ROWS, OUTPUT_ROWS (those that sample, or
    whose hidden states or log probabilities are wanted), or a row set's name.
    """

    name: str
    blocks: tuple[Block, ...]
    rows: str = ALL_ROWS

    @property
    def logit_rows(self) -> bool:
        return self.rows == OUTPUT_ROWS

    def width_of(self, rank: int, world: int) -> int:
        return sum(block.width_of(rank, world) for block in self.blocks)


@dataclass(frozen=True)
class Part:
    """`rows` rows of a weight, divided by `split` when there is one: rows [first, first + rows) of a tensor of the
    checkpoint that has `of` rows (0: just these), or of number `expert` in a tensor of three dimensions.

    unit: of `units`; ranks that hold it have the part, the others none of it (whole experts).
    """

    tensor: str
    rows: int
    split: Split | None = None
    first: int = 0
    of: int = 0
    expert: int | None = None
    unit: int | None = None
    units: Split | None = None

    def range_of(self, rank: int, world: int) -> tuple[int, int]:
        """The rank's rows, of this part's."""
        if self.unit is not None:
            begin, end = self.units.units_of(rank, world)
            if not begin <= self.unit < end:
                return 0, 0
        return _range(self.rows, self.split, rank, world)

    @property
    def stored_rows(self) -> int:
        """Of the checkpoint's tensor."""
        return self.of or self.rows

    @property
    def whole(self) -> bool:
        """Whether it is a whole tensor of the checkpoint."""
        return self.first == 0 and self.stored_rows == self.rows and self.expert is None


@dataclass(frozen=True)
class Weight:
    """A weight of the executor: tensors of the checkpoint stacked by rows, or constants computed from the config.

    columns: in_features of a matrix, 0 for a vector. column_split: how in_features are divided (row-parallel layers).
    first_rank_only: zeros on the other ranks (the bias of a row-parallel layer, which all_reduce adds up), unless they
    have whole experts' parts.
    values_split: how constants are divided. stored: the format of a matrix that is serialized quantized. experts: how
    many have equal shares of the parts, one after the other; 0: it is no stack of experts' weights.
    """

    name: str
    parts: tuple[Part, ...] = ()
    columns: int = 0
    column_split: Split | None = None
    first_rank_only: bool = False
    values: tuple[float, ...] = ()
    stored: WeightFormat | None = None
    values_split: Split | None = None
    experts: int = 0

    @property
    def is_matrix(self) -> bool:
        return self.columns > 0

    def rows_of(self, rank: int, world: int) -> int:
        if self.values:
            begin, end = _range(len(self.values), self.values_split, rank, world)
            return end - begin
        return sum(end - begin for begin, end in (part.range_of(rank, world) for part in self.parts))

    def experts_of(self, rank: int, world: int) -> tuple[int, int]:
        """The half-open range of a stack's experts that the rank holds."""
        units = self.parts[0].units
        return (0, self.experts) if units is None else units.units_of(rank, world)

    def is_zero_on(self, rank: int, world: int) -> bool:
        """Whether a vector's values count on another rank alone."""
        units = self.parts[0].units
        return self.first_rank_only and rank > 0 and not (units is not None and units.divides(world))

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
        self.row_sets: dict[str, RowSet] = {}
        #: those of full attention come first
        self.cache_groups, self._places = place_layers(config.windows, config.num_layers)

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
    def expert_features(self) -> Split:
        """Each expert's features are divided as `intermediate` is, down to slices that are worth a product."""
        size = self.config.experts.intermediate_size
        unit = gcd(size, 32)
        return Split(size // unit, unit, least=LEAST_EXPERT_SLICE)

    @property
    def whole_experts(self) -> Split:
        """Experts are divided where their features are not."""
        return Split(self.config.experts.count, unless=self.expert_features)

    @property
    def vocab(self) -> Split:
        """In the sampler's chunks (native/sampling/sampler.h, chunk_of), so that draws do not depend on the number of
        ranks. The last one may be short.
        """
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

    def with_whole_histories(self) -> Graph:
        """The same model with one cache group, which keeps every position: windows are masks then."""
        other, layer = copy.copy(self), 0
        other.cache_groups, other.ops = [CacheGroup()], []
        for op in self.ops:
            if op.type == "span_attention":
                op = replace(op, attrs={**op.attrs, "layer": layer, "cache_group": 0})
                layer += 1
            other.ops.append(op)
        return other

    # -- buffers and weights -------------------------------------------------------------------------------------------
    def row_set(self, name: str, times: int, of: str = ALL_ROWS) -> str:
        """The rows called `name`, which routers form; returns the name."""
        wanted = RowSet(name, of, times)
        if of not in (ALL_ROWS, OUTPUT_ROWS, *self.row_sets) or self.row_sets.setdefault(name, wanted) != wanted:
            raise ValueError(f"row set {name!r} is used in two ways, or is of rows that are not there: {wanted}")
        return name

    def cache_group(self, kind: str, window: int = 0) -> int:
        """The number of a cache group of that kind, which is added if there is none."""
        wanted = CacheGroup(kind, window)
        if wanted not in self.cache_groups:
            self.cache_groups.append(wanted)
        return self.cache_groups.index(wanted)

    def tensor(self, name: str, blocks: tuple[Block, ...], rows: str = ALL_ROWS) -> Tensor:
        """The buffer called `name`; the same one each time, so its shape must be the same each time."""
        if rows not in (ALL_ROWS, OUTPUT_ROWS, *self.row_sets):
            raise ValueError(f"buffer {name!r} has the rows {rows!r}, which are not there")
        wanted = Tensor(name, blocks, rows)
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

    def rotary_table(self, rotary: Rotary, table: int = 0, **more: Attribute) -> None:
        """Cosines and sines of every position; one for each number, first."""
        name = f"rotary.{table}.inv_freq" if table else "rotary.inv_freq"
        frequencies = self.weight(Weight(name, values=tuple(float(f) for f in rotary.inv_freq)))
        long = None
        if table:
            more["table"] = table
        if rotary.growth != "linear":
            more["growth"] = rotary.growth
        if rotary.long_inv_freq is not None:
            more["long_table"] = 1
            long = self.weight(Weight(f"{name}.long", values=tuple(float(f) for f in rotary.long_inv_freq)))
        self._op("rotary_table", weights=(frequencies, long), attention_factor=rotary.attention_factor,
                 dynamic=int(rotary.dynamic), base=rotary.base, factor=rotary.factor,
                 original_max=rotary.original_max, rotary_dim=rotary.dim, **more)

    def embedding(self, weight: Weight, **more: Attribute) -> Tensor:
        """Rows of the embedding; ids of another rank's part of the vocabulary give zeros, so all_reduce follows."""
        x = self.tensor("x", (Block(self.config.hidden_size),))
        self._op("embedding", outputs=(x,), weights=(weight,), **more)
        return self.all_reduce(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds the ranks' partial results, in place, in rank order."""
        self._op("all_reduce", (x,), (x,))
        return x

    def rms_norm(self, x: Tensor, name: str, out: str = "normed", **more: Attribute) -> Tensor:
        weight = self.weight(Weight(name, (Part(name, self.config.hidden_size),)))
        y = self.tensor(f"logit_{out}" if x.logit_rows else out, x.blocks, x.rows)
        self._op("rms_norm", (x,), (y,), (weight,), eps=self.config.rms_norm_eps, **more)
        return y

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None, out: str) -> Tensor:
        """Y = x W^T + b into the buffer `out`, whose columns are the weight's parts."""
        blocks = tuple(Block(part.rows, part.split) for part in weight.parts)
        y = self.tensor(out, blocks, x.rows)
        self._op("linear", (x,), (y,), (weight, bias))
        return y

    def row_parallel_linear(self, x: Tensor, prefix: str, split: Split, bias: bool, out: str) -> Tensor:
        """A linear layer whose input is divided among ranks, and the all_reduce that makes its result whole."""
        return self.all_reduce(self.partial_linear(x, prefix, split, bias, out))

    def sliced(self, name: str, splits: tuple[Split, ...], columns: int, bias: bool) -> tuple[Weight, Weight | None]:
        """Column-parallel layers that the checkpoint holds as one, NAME.weight (and NAME.bias): its rows are these, one
        after the other.
        """
        of = sum(split.width for split in splits)
        firsts = [sum(split.width for split in splits[:i]) for i in range(len(splits))]

        def parts(tensor: str) -> tuple[Part, ...]:
            return tuple(Part(tensor, s.width, s, first, of) for s, first in zip(splits, firsts))

        weight = self.weight(Weight(f"{name}.weight", parts(f"{name}.weight"), columns))
        return weight, self.weight(Weight(f"{name}.bias", parts(f"{name}.bias"))) if bias else None

    def partial_linear(self, x: Tensor, prefix: str, split: Split, bias: bool, out: str) -> Tensor:
        """A linear layer whose input is divided among ranks: each has a part of its result, which are to be added."""
        hidden = self.config.hidden_size
        weight = self.matrix(f"{prefix}.weight", hidden, split.width, column_split=split)
        name = f"{prefix}.bias"
        added = self.weight(Weight(name, (Part(name, hidden),), first_rank_only=True)) if bias else None
        return self.linear(x, weight, added, out)

    def lora(self, y: Tensor, x: Tensor, target: int, block: int = 0, blocks: int = 1) -> Tensor:
        """Y += B A x of each row's adapter in some blocks of y, in place; it follows the linear layer that made y."""
        self._op("lora", (y, x), (y,), target=target, block=block, blocks=blocks)
        return y

    def head_norm(self, qkv: Tensor, block: int, name: str, **more: Attribute) -> Tensor:
        """RMS norm of each head of one block (0: queries, 1: keys) of the packed projection, in place."""
        head_dim = self.config.head_dim
        weight = self.weight(Weight(name, (Part(name, head_dim),)))
        self._op("head_norm", (qkv,), (qkv,), (weight,), block=block, head_dim=head_dim, eps=self.config.rms_norm_eps,
                 **more)
        return qkv

    def qk_square_sums(self, qkv: Tensor) -> Tensor:
        """Of all query heads, and of all key heads, the sum of their values' squares, each head counted on one rank."""
        sums = self.tensor("square_sums", (Block(2),), qkv.rows)
        self._op("qk_square_sums", (qkv,), (sums,))
        return self.all_reduce(sums)

    def qk_norm(self, qkv: Tensor, q_name: str, k_name: str) -> Tensor:
        """RMS norm of all queries as one vector, and of all keys, in place."""
        queries, keys = qkv.blocks[:2]
        weights = [self.weight(Weight(name, (Part(name, block.width, block.split),)))
                   for name, block in ((q_name, queries), (k_name, keys))]
        self._op("qk_norm", (qkv, self.qk_square_sums(qkv)), (qkv,), weights, eps=self.config.rms_norm_eps,
                 q_width=queries.width, k_width=keys.width)
        return qkv

    def rope(self, qkv: Tensor, **more: Attribute) -> Tensor:
        """Rotates query and key heads (the two halves of a head's rotated features are the pairs), in place."""
        dims = {"head_dim": self.config.head_dim, "rotary_dim": more.get("head_dim", self.config.rotary_dim)}
        self._op("rope", (qkv,), (qkv,), **{**dims, **more})
        return qkv

    def span_attention(self, qkv: Tensor, layer: int, *, sinks: Weight | None = None, slopes: Weight | None = None,
                       window: int = 0, out: str = "attended", **more: Attribute) -> Tensor:
        """Stores keys and values in the span cache and attends causally over the sequence's spans. sinks, slopes: a
        value of each query head. window: the last positions that are seen, 0 for all.
        """
        queries, keys = qkv.blocks[:2]
        head_dim = more.get("head_dim", self.config.head_dim)
        y = self.tensor(out, (queries,))
        group, number = self._places[layer]
        if group:
            more.setdefault("cache_group", group)
        if window:
            more["window"] = window
        if sinks is not None:
            more["sinks"] = 1
        if slopes is not None:
            more["alibi"] = 1
        chosen = {"layer": number, "head_dim": head_dim, "group": queries.width // keys.width,
                  "scale": head_dim ** -0.5}
        self._op("span_attention", (qkv,), (y,), (sinks, slopes), **{**chosen, **more})
        return y

    def head_values(self, name: str, heads: Split, values: tuple[float, ...] = ()) -> Weight:
        """A vector with a value of each query head, from the checkpoint or these: attention's sinks and slopes."""
        split = Split(heads.units)
        parts = () if values else (Part(name, heads.units, split),)
        return self.weight(Weight(name, parts, values=values, values_split=split if values else None))

    def silu_mul(self, gate_up: Tensor, out: str = "activated") -> Tensor:
        """silu(gate) * up of the packed projection."""
        return self._gated("silu_mul", gate_up, out)

    def gelu_tanh_mul(self, gate_up: Tensor, out: str = "activated") -> Tensor:
        """gelu(gate) * up of the packed projection, by the approximation with tanh."""
        return self._gated("gelu_tanh_mul", gate_up, out)

    def clamped_silu_mul(self, gate_up: Tensor, alpha: float, limit: float, out: str = "activated") -> Tensor:
        """gpt-oss' product of the packed projection: see the table of ops."""
        return self._gated("clamped_silu_mul", gate_up, out, alpha=alpha, limit=limit)

    def _gated(self, type: str, gate_up: Tensor, out: str, **attrs: Attribute) -> Tensor:
        y = self.tensor(out, gate_up.blocks[:1], gate_up.rows)
        self._op(type, (gate_up,), (y,), **attrs)
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """X += y."""
        self._op("add", (x, y), (x,))
        return x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """X *= factor."""
        self._op("scale", (x,), (x,), factor=factor)
        return x

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Cap * tanh(x / cap), in place."""
        self._op("soft_cap", (x,), (x,), cap=cap)
        return x

    def sigmoid_mul(self, y: Tensor, gate: Tensor) -> Tensor:
        """Y *= sigmoid(gate), a gate for each row."""
        self._op("sigmoid_mul", (y, gate), (y,))
        return y

    # -- experts -------------------------------------------------------------------------------------------------------
    def router(self, logits: Tensor, rows: str, correction: Weight | None = None, **attrs: Attribute) -> Tensor:
        """Forms the row set `rows` and returns its entries' weights."""
        y = self.tensor("routed", (Block(1),), rows)
        self._op("router", (logits,), (y,), (correction,), top_k=self.row_sets[rows].times, **attrs)
        return y

    def expert_linear(self, x: Tensor, weight: Weight, bias: Weight | None, rows: str, out: str) -> Tensor:
        """Y = x W^T + b of each entry's expert, of a stack of experts' weights: one's parts make the output's
        blocks.
        """
        each = weight.parts[:len(weight.parts) // weight.experts]
        blocks = tuple(Block(part.rows, part.split) for part in each)
        y = self.tensor(out, blocks, rows)
        self._op("expert_linear", (x,), (y,), (weight, bias))
        return y

    def combine_experts(self, y: Tensor, scores: Tensor, out: str) -> Tensor:
        """The weighted sum of each row's experts, in ascending order of experts."""
        x = self.tensor(out, y.blocks, self.row_sets[y.rows].of)
        self._op("combine_experts", (y, scores), (x,))
        return x

    # -- outputs -------------------------------------------------------------------------------------------------------
    def select_rows(self, x: Tensor) -> Tensor:
        """The rows with outputs."""
        y = self.tensor("selected", x.blocks, OUTPUT_ROWS)
        self._op("select_rows", (x,), (y,))
        return y

    def hidden_states(self, x: Tensor) -> None:
        """Hands rows with outputs out, to requests that want them."""
        self._op("hidden_states", (x,))

    def sample(self, logits: Tensor) -> None:
        self._op("sample", (logits,), vocab_size=self.config.vocab_size)
