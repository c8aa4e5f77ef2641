"""The op list: a model as data, independent of the number of ranks.

A model file describes its network once with the builder methods of `Graph`, one for each op of the native library's
table (models/ops.py). `.asgraph` stores the graph, the profiler names its ops, and `runtime/lowering.py` turns it into
the ops of one rank.

Its elements are in models/graph_elements.py. Layers reuse buffers by name, so a graph needs about ten.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from allspark_server.models.cache_groups import CacheGroup, place_layers
from allspark_server.models.graph_elements import (
    ALL_ROWS,
    OUTPUT_ROWS,
    Block,
    Op,
    Part,
    RowSet,
    Tensor,
    Weight,
    in_groups,
)
from allspark_server.models.network import ExpertConfig, ModelConfig
from allspark_server.models.ops import Attribute, op_spec
from allspark_server.models.rotary import Rotary
from allspark_server.weights.formats import StoredQuantization, WeightFormat
from allspark_server.weights.shard import Split

# The least number of features in a rank's slice of an expert. Decode waits for the rank that reads the most weights. If
# every rank has a slice of each expert, all read equal amounts. If ranks hold whole experts, one rank may hold several
# of the chosen experts and another none. Slices are therefore preferred unless they would be narrower than this.
LEAST_EXPERT_SLICE = 64


class Graph:
    """Builds and holds the op list. The builder methods are named after the ops and return the output."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, Weight] = {}
        self.ops: list[Op] = []
        self.quantization: StoredQuantization | None = None
        self.row_sets: dict[str, RowSet] = {}
        #: groups of full attention come first. Layers of an encoder share one place: no later step reads it
        self.cache_groups, self._places = [CacheGroup()], [(0, 0)] * config.num_layers
        if config.encoder is None:
            without = next((layer for layer in range(config.num_layers) if not config.window(layer)), 0)
            sizes = math.prod(config.heads(without)), config.num_kv_heads * config.head_dim
            self.cache_groups, self._places = place_layers(
                config.windows, config.num_layers, config.spanless_layers, config.latent is not None,
                sizes if config.full_heads else (1, 1))
        for layer in config.reading_layers:
            self._places[layer] = self._places[config.kv_sources[layer]]

    # -- how the model's dimensions are divided among ranks ------------------------------------------------------------
    @property
    def experts(self) -> ExpertConfig:
        """The description of the experts; the model must have some."""
        if self.config.experts is None:
            raise ValueError(f"{self.config.architecture} has no experts")
        return self.config.experts

    @property
    def q_heads(self) -> Split:
        """The features of query heads."""
        return Split(self.config.num_heads, self.config.head_dim)

    @property
    def kv_heads(self) -> Split:
        """The features of KV heads; each goes to the ranks that have its query heads."""
        return Split(self.config.num_heads, self.config.head_dim, self.config.num_heads // self.config.num_kv_heads)

    @property
    def intermediate(self) -> Split:
        """Features of the MLP."""
        return in_groups(self.config.intermediate_size)

    @property
    def expert_features(self) -> Split:
        """Features of an expert, divided like `intermediate`, but not into slices narrower than LEAST_EXPERT_SLICE."""
        return in_groups(self.experts.intermediate_size, LEAST_EXPERT_SLICE)

    @property
    def whole_experts(self) -> Split:
        """Whole experts, divided among ranks where their features are not."""
        return Split(self.experts.count, unless=self.expert_features)

    @property
    def vocab(self) -> Split:
        """Rows of the vocabulary, in the sampler's chunks (chunk_of in native/sampling/sampler.h), so that sampling
        does not depend on the number of ranks. The last chunk may be short.
        """
        size = self.config.vocab_size
        unit = 1 if size <= 1024 else 16 if size <= 16384 else 256
        return Split(-(-size // unit), unit)

    @property
    def whole_texts(self) -> bool:
        """Whether rows attend to later ones, so that a step has all rows of a text."""
        return any(op.attrs.get("bidirectional") for op in self.ops)

    @property
    def generates(self) -> bool:
        """Whether it samples tokens."""
        return any(op.type == "sample" for op in self.ops)

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
        """The same model with one cache group that keeps every position; windows are then only masks."""
        if not any(group.kind == "sliding" for group in self.cache_groups):
            return self
        other, numbers = copy.copy(self), dict[tuple[Attribute, Attribute], int]()
        other.cache_groups, other.ops = [CacheGroup()], []
        for op in self.ops:
            if op.type == "span_attention":
                place = op.attrs.get("cache_group", 0), op.attrs["layer"]
                op = replace(op, attrs={**op.attrs, "layer": numbers.setdefault(place, len(numbers)), "cache_group": 0})
            other.ops.append(op)
        return other

    @property
    def selection(self) -> int:
        """The place of the op that selects OUTPUT_ROWS; 0: there is none."""
        return next((i for i, op in enumerate(self.ops) if op.type == "select_rows"), 0)

    def with_kept_hidden(self) -> Graph:
        """The same model, which keeps the normed hidden states of all rows for a draft head. Rows with outputs are
        selected from these.
        """
        other, place = copy.copy(self), self.selection
        select, norm = self.ops[place:place + 2]
        if norm.type != "rms_norm":
            raise ValueError(f"{self.config.architecture} has no final norm, so no draft head can follow it")
        kept = replace(self.tensors[select.inputs[0]], name="kept_states")
        other.tensors = {**self.tensors, kept.name: kept}
        return other.with_ops([
            *self.ops[:place], replace(norm, inputs=select.inputs, outputs=(kept.name,)),
            Op("keep_hidden", (kept.name,)), replace(select, inputs=(kept.name,), outputs=norm.outputs),
            *self.ops[place + 2:]])

    def with_ops(self, ops: list[Op]) -> Graph:
        """A copy with these ops, and only the buffers and weights that they name."""
        other = copy.copy(self)
        other.ops = ops
        buffers = {name for op in ops for name in (*op.inputs, *op.outputs)}
        weights = {name for op in ops for name in op.weights}
        other.tensors = {name: tensor for name, tensor in self.tensors.items() if name in buffers}
        other.weights = {name: weight for name, weight in self.weights.items() if name in weights}
        return other

    # -- buffers and weights -------------------------------------------------------------------------------------------
    def row_set(self, name: str, times: int, of: str = ALL_ROWS) -> str:
        """Declares the rows `name` that a router makes, `times` for each row of `of`; returns the name."""
        wanted = RowSet(name, of, times)
        if of not in (ALL_ROWS, OUTPUT_ROWS, *self.row_sets) or self.row_sets.setdefault(name, wanted) != wanted:
            raise ValueError(f"row set {name!r} is declared in two ways, or refers to unknown rows: {wanted}")
        return name

    def cache_group(self, kind: str, window: int = 0) -> int:
        """The number of the cache group of that kind; adds one if there is none."""
        wanted = CacheGroup(kind, window)
        if wanted not in self.cache_groups:
            self.cache_groups.append(wanted)
        return self.cache_groups.index(wanted)

    def tensor(self, name: str, blocks: tuple[Block, ...], rows: str = ALL_ROWS) -> Tensor:
        """The buffer `name`. Each use must give the same shape."""
        if rows not in (ALL_ROWS, OUTPUT_ROWS, *self.row_sets):
            raise ValueError(f"buffer {name!r} has unknown rows {rows!r}")
        wanted = Tensor(name, blocks, rows)
        found = self.tensors.setdefault(name, wanted)
        if found != wanted:
            raise ValueError(f"buffer {name!r} is used with two shapes: {found} and {wanted}")
        return found

    def weight(self, weight: Weight) -> Weight:
        """Registers a weight. Two ops may share one (a tied head); it is registered once."""
        found = self.weights.setdefault(weight.name, weight)
        if found != weight:
            raise ValueError(f"weight {weight.name!r} is used with two layouts: {found} and {weight}")
        return found

    def matrix(self, name: str, rows: int, columns: int, *, row_split: Split | None = None,
               column_split: Split | None = None) -> Weight:
        """The checkpoint's tensor `name` of shape [rows, columns]."""
        return self.weight(Weight(name, (Part(name, rows, row_split),), columns, column_split))

    def vector(self, name: str, width: int, split: Split | None = None) -> Weight:
        """The checkpoint's tensor `name` of `width` values."""
        return self.weight(Weight(name, (Part(name, width, split),)))

    def packed(self, prefix: str, names: tuple[str, ...], splits: tuple[Split, ...], columns: int,
               bias: bool) -> tuple[Weight, Weight | None]:
        """Column-parallel layers with the same input as one matrix (and bias): `prefix.NAME.weight`, stacked by
        rows.
        """
        joined = f"{prefix}.{'+'.join(names)}"

        def parts(suffix: str) -> tuple[Part, ...]:
            return tuple(Part(f"{prefix}.{name}.{suffix}", s.width, s) for name, s in zip(names, splits))

        weight = self.weight(Weight(f"{joined}.weight", parts("weight"), columns))
        return weight, self.weight(Weight(f"{joined}.bias", parts("bias"))) if bias else None

    # -- ops -----------------------------------------------------------------------------------------------------------
    def _op(self, type: str, inputs: Iterable[Tensor] = (), outputs: Iterable[Tensor] = (),
            weights: Iterable[Weight | None] = (), **attrs: Any) -> None:
        self.append(Op(type, tuple(t.name for t in inputs), tuple(t.name for t in outputs),
                       tuple(w.name for w in weights if w is not None), attrs))

    def op(self, type: str, *inputs: Tensor, weights: tuple[Weight | None, ...] = (), out: str = "",
           blocks: tuple[Block, ...] | None = None, **attrs: Any) -> Tensor:
        """Adds an op by its row of the op table and returns its output.

        The output is the first input where the op works in place, else the buffer `out` with `blocks` (None: the first
        input's) and the rows of the op's row rule.
        """
        spec = op_spec(type)
        y = inputs[0]
        if not spec.in_place:
            rows = {"as_input": y.rows, "all": ALL_ROWS, "selected": OUTPUT_ROWS}
            y = self.tensor(out, y.blocks if blocks is None else blocks,
                            self.row_sets[y.rows].of if spec.rows == "combined" else rows[spec.rows])
        self._op(type, inputs, (y,), weights, **attrs)
        return y

    def append(self, op: Op) -> None:
        """Appends an op. ValueError if it names an unknown buffer or weight, or does not fit the table of ops."""
        unknown = [n for n in (*op.inputs, *op.outputs) if n not in self.tensors]
        unknown += [n for n in op.weights if n not in self.weights]
        spec = op_spec(op.type)
        if unknown:
            raise ValueError(f"op {op.type} refers to {unknown[0]!r}, which the graph does not define")
        spec.check_graph(len(op.inputs), len(op.outputs), len(op.weights), op.attrs)
        self.ops.append(op)

    def rotary_table(self, rotary: Rotary, table: int = 0, **more: Any) -> None:
        """Table number `table` of cosines and sines for every position. These ops come before all others."""
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

    def embedding(self, weight: Weight, out: str = "x", **more: Any) -> Tensor:
        """Rows of the embedding. Ids of another rank's part of the vocabulary give zeros, so all_reduce follows."""
        x = self.tensor(out, (Block(weight.columns),))
        self._op("embedding", outputs=(x,), weights=(weight,), **more)
        return self.all_reduce(x)

    def given_rows(self, width: int) -> Tensor:
        """The rows that the plan gives: patches of images."""
        x = self.tensor("given", (Block(width),))
        self._op("given_rows", outputs=(x,))
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds the ranks' partial results, in place, in rank order."""
        return self.op("all_reduce", x)

    def rms_norm(self, x: Tensor, name: str, out: str = "normed", **more: Any) -> Tensor:
        """RMS norm of each row with the checkpoint's weight `name`, "" for none."""
        width = self.config.hidden_size
        weight = self.vector(name, width) if name else self.weight(Weight(f"ones.{width}", values=(1.0,) * width))
        return self.op("rms_norm", x, weights=(weight,), out=f"logit_{out}" if x.logit_rows else out,
                       **{"eps": self.config.rms_norm_eps, **more})

    def layer_norm(self, x: Tensor, prefix: str, out: str, *, bias: bool = True) -> Tensor:
        """Layer norm of each row with the checkpoint's `prefix`.weight and, if there is a bias, `prefix`.bias."""
        width = sum(block.width for block in x.blocks)
        weight = self.vector(f"{prefix}.weight", width)
        name = f"{prefix}.bias"
        added = self.weight(Weight(name, (Part(name, width),)) if bias else Weight(name, values=(0.0,) * width))
        return self.op("layer_norm", x, weights=(weight, added), out=out, eps=self.config.rms_norm_eps)

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None, out: str) -> Tensor:
        """`y = x W^T + b` in the buffer `out`, whose blocks are the weight's parts."""
        blocks = tuple(Block(part.rows, part.split) for part in weight.parts)
        return self.op("linear", x, weights=(weight, bias), out=out, blocks=blocks)

    def row_parallel_linear(self, x: Tensor, prefix: str, split: Split, bias: bool, out: str,
                            outputs: int = 0) -> Tensor:
        """A linear layer whose input is divided among ranks, and the all_reduce that makes its result whole."""
        return self.all_reduce(self.partial_linear(x, prefix, split, bias, out, outputs))

    def sliced(self, name: str, splits: tuple[Split, ...], columns: int, bias: bool) -> tuple[Weight, Weight | None]:
        """Column-parallel layers that the checkpoint stores as one tensor NAME.weight (and NAME.bias), one after the
        other by rows.
        """
        of = sum(split.width for split in splits)
        firsts = [sum(split.width for split in splits[:i]) for i in range(len(splits))]

        def parts(tensor: str) -> tuple[Part, ...]:
            return tuple(Part(tensor, s.width, s, first, of) for s, first in zip(splits, firsts))

        weight = self.weight(Weight(f"{name}.weight", parts(f"{name}.weight"), columns))
        return weight, self.weight(Weight(f"{name}.bias", parts(f"{name}.bias"))) if bias else None

    def partial_linear(self, x: Tensor, prefix: str, split: Split, bias: bool, out: str, outputs: int = 0) -> Tensor:
        """A linear layer whose input is divided among ranks: the caller must add up the ranks' results. outputs: 0 for
        the hidden size.
        """
        outputs = outputs or self.config.hidden_size
        weight = self.matrix(f"{prefix}.weight", outputs, split.width, column_split=split)
        name = f"{prefix}.bias"
        added = self.weight(Weight(name, (Part(name, outputs),), first_rank_only=True)) if bias else None
        return self.linear(x, weight, added, out)

    def lora(self, y: Tensor, x: Tensor, target: int, block: int = 0, blocks: int = 1) -> Tensor:
        """`y += B A x` with each row's adapter in `blocks` blocks of y, in place, after the linear layer that made
        y.
        """
        self._op("lora", (y, x), (y,), target=target, block=block, blocks=blocks)
        return y

    def expert_lora(self, y: Tensor, x: Tensor, target: int, experts: int, block: int) -> Tensor:
        """`y += B A x` with each entry's adapter and expert in a block of y, in place, after the `expert_linear` that
        made y. The experts have the targets from `target` on.
        """
        self._op("expert_lora", (y, x), (y,), target=target, experts=experts, block=block)
        return y

    def head_norm(self, qkv: Tensor, block: int, name: str = "", head_dim: int = 0, **more: Any) -> Tensor:
        """RMS norm of each head of a block (0: queries, 1: keys, 2: values) of the packed projection, in place.

        name: of its weight; "" for none. head_dim: 0 for the config's.
        """
        head_dim = head_dim or self.config.head_dim
        plain = Weight(f"ones.{head_dim}", values=(1.0,) * head_dim)
        weight = self.weight(Weight(name, (Part(name, head_dim),)) if name else plain)
        self._op("head_norm", (qkv,), (qkv,), (weight,), block=block, head_dim=head_dim,
                 **{"eps": self.config.rms_norm_eps, **more})
        return qkv

    def qk_square_sums(self, qkv: Tensor) -> Tensor:
        """Sums of squares over all query heads and over all key heads; each head is counted on one rank."""
        sums = self.tensor("square_sums", (Block(2),), qkv.rows)
        self._op("qk_square_sums", (qkv,), (sums,))
        return self.all_reduce(sums)

    def qk_norm(self, qkv: Tensor, q_name: str, k_name: str) -> Tensor:
        """RMS norm of a row's queries as one vector, and of its keys as another, in place."""
        queries, keys = qkv.blocks[:2]
        weights = [self.vector(name, block.width, block.split)
                   for name, block in ((q_name, queries), (k_name, keys))]
        self._op("qk_norm", (qkv, self.qk_square_sums(qkv)), (qkv,), weights, eps=self.config.rms_norm_eps,
                 q_width=queries.width, k_width=keys.width)
        return qkv

    def whole_norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm of each row, whose one block is divided among ranks, in place: qk_norm of queries without keys."""
        block, = x.blocks
        sums = self.tensor("square_sums", (Block(2),), x.rows)
        self._op("qk_square_sums", (x,), (sums,))
        weight = self.vector(name, block.width, block.split)
        return self.op("qk_norm", x, self.all_reduce(sums), weights=(weight,), eps=self.config.rms_norm_eps,
                       q_width=block.width)

    def rope(self, qkv: Tensor, **more: Any) -> Tensor:
        """Rotary embedding of query and key heads, in place. Feature i is paired with i + rotary_dim / 2 unless `pairs`
        says "interleaved".
        """
        dims = {"head_dim": self.config.head_dim, "rotary_dim": more.get("head_dim", self.config.rotary_dim)}
        self._op("rope", (qkv,), (qkv,), **{**dims, **more})
        return qkv

    def span_attention(self, qkv: Tensor, layer: int, *, sinks: Weight | None = None, slopes: Weight | None = None,
                       window: int = 0, out: str = "attended", **more: Any) -> Tensor:
        """Stores keys and values in the span cache and attends over the sequence's spans: causally, but for encoders.

        qkv: queries alone where the layer reads another one's keys and values. sinks, slopes: one value for each query
        head. window: number of last positions that a row sees, 0 for all.
        """
        queries, *kept = qkv.blocks
        head_dim = int(more.get("head_dim", self.config.head_dim))
        y = self.tensor(out, (queries,))
        group, number = self._places[layer]
        if group:
            more.setdefault("cache_group", group)
        if window:
            more["window"] = window
        if self.config.encoder is not None:
            more["bidirectional"] = 1
        if sinks is not None:
            more["sinks"] = 1
        if slopes is not None:
            more["alibi"] = 1
        keys = kept[0].width if kept else math.prod(self.config.heads(layer))
        chosen = {"layer": number, "head_dim": head_dim, "group": queries.width // keys, "scale": head_dim ** -0.5}
        self._op("span_attention", (qkv,), (y,), (sinks, slopes), **{**chosen, **more})
        return y

    def head_values(self, name: str, heads: Split, values: tuple[float, ...] = ()) -> Weight:
        """A vector with one value for each query head (attention's sinks or slopes): `values`, or the checkpoint's."""
        split = Split(heads.units)
        parts = () if values else (Part(name, heads.units, split),)
        return self.weight(Weight(name, parts, values=values, values_split=split if values else None))

    def silu_mul(self, gate_up: Tensor, out: str = "activated") -> Tensor:
        """silu(gate) * up of the packed projection."""
        return self.op("silu_mul", gate_up, out=out, blocks=gate_up.blocks[:1])

    def gelu_tanh_mul(self, gate_up: Tensor, out: str = "activated") -> Tensor:
        """gelu(gate) * up of the packed projection, with the tanh approximation of GELU."""
        return self.op("gelu_tanh_mul", gate_up, out=out, blocks=gate_up.blocks[:1])

    def gelu_mul(self, gate_up: Tensor, out: str = "activated") -> Tensor:
        """gelu(gate) * up of the packed projection."""
        return self.op("gelu_mul", gate_up, out=out, blocks=gate_up.blocks[:1])

    def activate(self, x: Tensor, function: str) -> Tensor:
        """An activation of each value, in place: see the table of ops."""
        return self.op("activate", x, function=function)

    def clamped_silu_mul(self, gate_up: Tensor, alpha: float, limit: float, out: str = "activated") -> Tensor:
        """gpt-oss' clamped product of the packed projection: see the table of ops."""
        return self.op("clamped_silu_mul", gate_up, out=out, blocks=gate_up.blocks[:1], alpha=alpha, limit=limit)

    def limited_silu_mul(self, gate_up: Tensor, limit: float, out: str = "activated") -> Tensor:
        """silu(gate) * up of the packed projection, with gate and up limited: see the table of ops."""
        return self.op("limited_silu_mul", gate_up, out=out, blocks=gate_up.blocks[:1], limit=limit)

    def relu_square(self, x: Tensor) -> Tensor:
        """`x = max(x, 0)^2`, value by value."""
        return self.op("relu_square", x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """`x += y`."""
        return self.op("add", x, y)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """`x *= factor`."""
        return self.op("scale", x, factor=factor)

    def scale_by(self, x: Tensor, name: str) -> Tensor:
        """`x *= w` with the checkpoint's tensor `name` of one value."""
        return self.op("scale", x, weights=(self.vector(name, 1),))

    def clamp(self, x: Tensor, low: str, high: str) -> Tensor:
        """Each value within the checkpoint's limits, tensors of one value each."""
        return self.op("clamp", x, weights=(self.vector(low, 1), self.vector(high, 1)))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`x = cap * tanh(x / cap)`."""
        return self.op("soft_cap", x, cap=cap)

    def multiply(self, x: Tensor, y: Tensor, offset: int = 0) -> Tensor:
        """`x *= y`, value by value, with the columns of y from `offset` on."""
        attrs: dict[str, Any] = {"offset": offset} if offset else {}
        return self.op("multiply", x, y, **attrs)

    def sigmoid_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        """`y *= sigmoid(gate)` with a gate for each value."""
        return self.op("sigmoid_gate", y, gate)

    def sigmoid_mul(self, y: Tensor, gate: Tensor) -> Tensor:
        """`y *= sigmoid(gate)` with one gate for each row."""
        return self.op("sigmoid_mul", y, gate)

    # -- latent attention ----------------------------------------------------------------------------------------------
    def head_linear(self, x: Tensor, name: str, heads: int, rows: int, columns: int, out: str,
                    block: int = 0) -> Tensor:
        """Each head of a block of x, of `columns` features, times its matrix: the checkpoint's tensor `name` has shape
        [heads, rows, columns].
        """
        units = Split(heads)
        parts = tuple(Part(name, rows, expert=head, unit=head, units=units) for head in range(heads))
        weight = self.weight(Weight(name, parts, columns, experts=heads))
        return self.op("head_linear", x, weights=(weight,), out=out, blocks=(Block(heads * rows, Split(heads, rows)),),
                       block=block)

    def latent_attention(self, absorbed: Tensor, queries: Tensor, kept: Tensor, layer: int, scale: float,
                         selected: Tensor | None = None, out: str = "recalled", **more: Any) -> Tensor:
        """Stores the rows `kept`, [latent | rotated key], in the cache and attends causally over the sequence's. There
        may be no rotated key.

        absorbed: queries times the keys' projection. queries: their rotated parts, in the first columns. selected: the
        positions that an indexer selects; None for all.
        """
        latent, *rope = kept.blocks
        inputs = (absorbed, queries, kept) if selected is None else (absorbed, queries, kept, selected)
        return self.op("latent_attention", *inputs, out=out, layer=self._places[layer][1], latent_dim=latent.width,
                       rope_dim=sum(block.width for block in rope), scale=scale, **more)

    def indexer(self, queries: Tensor, weights: Tensor, key: Tensor, selected: int, out: str = "seen") -> Tensor:
        """Stores the keys in the cache, after those of all layers, and returns the `selected` positions with the best
        scores.
        """
        before = sum(op.type == "indexer" for op in self.ops)
        return self.op("indexer", queries, weights, key, out=out, blocks=(Block(selected),),
                       layer=len(self._places) + before)

    def pooled_indexer(self, queries: Tensor, weights: Tensor, both: Tensor, bias: str, rate: int, selected: int,
                       out: str = "seen") -> Tensor:
        """Compresses the keys of each `rate` positions, of [keys | gates], and returns the positions of those with the
        best scores, `selected` positions in all, and the last ones, which are not compressed yet. The compressed keys
        lie in the cache after the layers' rows. bias: the name of the gates' bias.
        """
        before = sum(op.type == "compress" for op in self.ops)
        place = 0, len(self._places) + before
        self.compress(both, bias, rate, (self.cache_group("sliding", rate), before), place)
        return self.op("indexer", queries, weights, out=out, blocks=(Block(selected + rate - 1),), layer=place[1],
                       rate=rate, positions=1)

    # -- compressed positions ------------------------------------------------------------------------------------------
    def compress(self, x: Tensor, bias: str, rate: int, rows: tuple[int, int], entries: tuple[int, int],
                 norm: str = "", **more: Any) -> None:
        """Keeps entries of `rate` positions each, of [values | gates], see the table of ops. bias, norm: names of the
        gates' bias and of the norm's weight, "" if there is no norm. rows, entries: group and layer of the cache where
        rows and entries lie.
        """
        width = x.blocks[0].width
        dim = width // 2 if more.get("overlapping") else width
        weights = (self.vector(bias, rate * width), *((self.vector(norm, dim),) if norm else ()))
        self._op("compress", (x,), (), weights, rate=rate, eps=self.config.rms_norm_eps, rows_group=rows[0],
                 rows_layer=rows[1], cache_group=entries[0], layer=entries[1], **more)

    # -- layers with a state -------------------------------------------------------------------------------------------
    def causal_conv(self, x: Tensor, *prefixes: str, taps: int, bias: bool = False, activated: bool = True,
                    out: str = "convolved") -> Tensor:
        """Each channel's weighted sum over its last `taps` rows, then SiLU if `activated`. The checkpoint has
        PREFIX.weight, of shape [channels, 1, taps], and PREFIX.bias if there is a bias: one for all blocks, or one for
        each.
        """
        def vector(name: str, values: int) -> Weight:
            parts, first, of = [], 0, values * sum(block.width for block in x.blocks)
            for i, block in enumerate(x.blocks):
                size = values * block.width
                split = block.split and replace(block.split, size=values * block.split.size)
                parts.append(Part(f"{prefixes[0]}.{name}", size, split, first, of) if len(prefixes) == 1 else
                             Part(f"{prefixes[i]}.{name}", size, split))
                first += size
            return self.weight(Weight(f"{'+'.join(prefixes)}.{name}", tuple(parts)))

        weights = (vector("weight", taps), vector("bias", 1) if bias else None)
        return self.op("causal_conv", x, weights=weights, out=out, taps=taps, activated=int(activated))

    def gated_delta(self, x: Tensor, gates: Tensor, prefix: str, key_dim: int, value_dim: int,
                    out: str = "recalled", lower_bound: float = 0.0) -> Tensor:
        """The gated delta rule for [queries | keys | values] and [a | b], see the table of ops. The checkpoint has
        `prefix`.A_log and `prefix`.dt_bias. There is a decay for each value head or, if `a` is so wide, for each
        channel of its key. lower_bound: 0 if decays have none.
        """
        decays, heads = gates.blocks
        weights = tuple(self.vector(f"{prefix}.{name}", block.width, block.split)
                        for name, block in (("A_log", heads), ("dt_bias", decays)))
        more: dict[str, Any] = {"channels": 1} if decays.width != heads.width else {}
        if lower_bound:
            more["lower_bound"] = lower_bound
        return self.op("gated_delta", x, gates, weights=weights, out=out, blocks=x.blocks[2:], key_dim=key_dim,
                       value_dim=value_dim, **more)

    def ssd(self, x: Tensor, steps: Tensor, prefix: str, state_dim: int, head_dim: int, **limits: float) -> Tensor:
        """Mamba2's selective state space for [x | B | C] and dt, see the table of ops. The checkpoint has
        `prefix`.A_log, `prefix`.dt_bias and `prefix`.D.
        """
        heads = steps.blocks[0]
        weights = tuple(self.vector(name, heads.width, heads.split)
                        for name in (f"{prefix}.A_log", f"{prefix}.dt_bias", f"{prefix}.D"))
        return self.op("ssd", x, steps, weights=weights, out="recalled", blocks=x.blocks[:1], state_dim=state_dim,
                       head_dim=head_dim, **limits)

    def gated_rms_norm(self, y: Tensor, gates: Tensor, name: str, head_dim: int, gate: str = "silu") -> Tensor:
        """RMS norm of each head with the checkpoint's weight `name`, times the gates' silu or sigmoid, in place."""
        weight = self.vector(name, head_dim)
        return self.op("gated_rms_norm", y, gates, weights=(weight,), eps=self.config.rms_norm_eps, head_dim=head_dim,
                       gate=gate)

    # -- experts -------------------------------------------------------------------------------------------------------
    def router(self, logits: Tensor, rows: str, correction: Weight | None = None, expert_scales: Weight | None = None,
               table: Weight | None = None, **attrs: Any) -> Tensor:
        """Chooses experts for each row: makes the row set `rows` and returns the weights of its entries. table: of the
        experts of each token, which then are not chosen.
        """
        if table is not None:
            attrs["by_token"] = 1
        y = self.tensor("routed", (Block(1),), rows)
        if expert_scales is not None:
            attrs["expert_scales"] = 1
        self._op("router", (logits,), (y,), (table, correction, expert_scales), top_k=self.row_sets[rows].times,
                 **attrs)
        return y

    def expert_linear(self, x: Tensor, weight: Weight, bias: Weight | None, rows: str, out: str) -> Tensor:
        """`y = x W^T + b` with the weights of each entry's expert. `weight` is a stack of experts; the parts of one
        expert make the output's blocks.
        """
        each = weight.parts[:len(weight.parts) // weight.experts]
        blocks = tuple(Block(part.rows, part.split) for part in each)
        y = self.tensor(out, blocks, rows)
        self._op("expert_linear", (x,), (y,), (weight, bias))
        return y

    def combine_experts(self, y: Tensor, scores: Tensor, out: str) -> Tensor:
        """The weighted sum over each row's experts, added in ascending order of experts."""
        return self.op("combine_experts", y, scores, out=out)

    # -- draft heads ---------------------------------------------------------------------------------------------------
    def keep_hidden(self, x: Tensor) -> None:
        """Keeps the hidden states of all rows for a draft head."""
        self._op("keep_hidden", (x,))

    def kept_hidden(self) -> Tensor:
        """For each row, a hidden state that was kept."""
        x = self.tensor("given_states", (Block(self.config.hidden_size),))
        self._op("kept_hidden", outputs=(x,))
        return x

    def concat(self, *inputs: Tensor, out: str = "both") -> Tensor:
        """The columns of two or three tensors."""
        return self.op("concat", *inputs, out=out, blocks=tuple(block for x in inputs for block in x.blocks))

    # -- outputs -------------------------------------------------------------------------------------------------------
    def pool_rows(self, x: Tensor, pooling: str) -> Tensor:
        """One row for each text: "cls", its first one; "last"; or "mean"."""
        return self.op("pool_rows", x, out="pooled", pooling=pooling)

    def select_rows(self, x: Tensor) -> Tensor:
        """Selects OUTPUT_ROWS."""
        return self.op("select_rows", x, out="selected")

    def hidden_states(self, x: Tensor) -> None:
        """Returns hidden states to the requests that ask for them."""
        self._op("hidden_states", (x,))

    def sample(self, logits: Tensor) -> None:
        """Samples the next token of each row."""
        self._op("sample", (logits,), vocab_size=self.config.vocab_size)
