"""Parts of networks that model files share. Names are those of transformers' checkpoints."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor, Weight
from allspark_server.models.network import ExpertConfig, IndexerConfig, LatentConfig, ModelConfig, RopeConfig
from allspark_server.models.rotary import rotary_of, yarn_mscale
from allspark_server.weights.shard import Split

LOCAL = 1  # the number of the rotary table of layers with a window, if they have one of their own


EMBEDDING = "model.embed_tokens.weight"


def begin(config: ModelConfig, name: str = EMBEDDING, rotary: bool = True) -> tuple[Graph, Tensor]:
    """A new graph with the rotary tables, if it has some, and the token embedding; returns the graph and the residual
    stream.
    """
    graph = Graph(config)
    if rotary and not config.alibi:
        head_dim = config.full_heads.head_dim if config.full_heads else config.head_dim
        graph.rotary_table(rotary_of(config.rope, head_dim), **_sections(config.rope))
    if config.local_rope is not None:
        graph.rotary_table(rotary_of(config.local_rope, config.head_dim), LOCAL)
    embedding = graph.matrix(name, config.vocab_size, config.hidden_size, row_split=graph.vocab)
    scaled: dict[str, Any] = {} if config.embedding_scale == 1 else {"scale": config.embedding_scale}
    return graph, graph.embedding(embedding, **scaled)


def _sections(rope: RopeConfig) -> dict[str, Any]:
    """The attributes of a rotary table whose pairs turn with parts of a position."""
    if not rope.sections:
        return {}
    interleaved = {"interleaved_sections": 1} if rope.interleaved else {}
    return {**dict(zip(("temporal", "height", "width"), rope.sections)), **interleaved}


def add_taps(graph: Graph, x: Tensor, layer: int) -> None:
    """Adds the outputs of a layer of the vision tower to the rows of images, behind one of the first layers
    (DeepStack, arXiv 2406.04334).
    """
    tower = graph.config.tower
    if tower is not None and tower.vision is not None and layer < len(tower.vision.taps):
        graph.op("add_given", x, offset=graph.config.hidden_size * (layer + 1))


def of_each_head(name: str, heads: int, sizes: tuple[int, ...], index: int) -> tuple[Part, ...]:
    """Of a tensor whose rows are, for each head, parts of these sizes: part `index` of every head."""
    each, units = sum(sizes), Split(heads)
    return tuple(Part(name, sizes[index], None, head * each + sum(sizes[:index]), heads * each, unit=head, units=units)
                 for head in range(heads))


def linear_of_parts(graph: Graph, x: Tensor, name: str, parts: tuple[Part, ...], blocks: tuple[Block, ...], out: str,
                    bias: bool = False) -> Tensor:
    """A linear layer with rows of several tensors NAME.weight (and NAME.bias)."""
    weight = graph.weight(Weight(f"{name}.weight", parts, sum(block.width for block in x.blocks)))
    biases = tuple(replace(part, tensor=part.tensor.removesuffix("weight") + "bias") for part in parts)
    added = graph.weight(Weight(f"{name}.bias", biases)) if bias else None
    return graph.op("linear", x, weights=(weight, added), out=out, blocks=blocks)


def qkv_projection(graph: Graph, x: Tensor, prefix: str, *, bias: bool) -> Tensor:
    """Queries, keys and values from one packed matrix: columns [query heads | key heads | value heads]."""
    weight, added = graph.packed(prefix, ("q_proj", "k_proj", "v_proj"),
                                 (graph.q_heads, graph.kv_heads, graph.kv_heads), graph.config.hidden_size, bias)
    return graph.linear(x, weight, added, out="qkv")


def sliced_qkv(graph: Graph, x: Tensor, name: str, *, bias: bool = False) -> Tensor:
    """As `qkv_projection`, for a checkpoint that stores them as one matrix."""
    weight, added = graph.sliced(name, (graph.q_heads, graph.kv_heads, graph.kv_heads), graph.config.hidden_size, bias)
    return graph.linear(x, weight, added, out="qkv")


def output_projection(graph: Graph, attended: Tensor, prefix: str, name: str = "o_proj", *,
                      bias: bool = False) -> Tensor:
    """Attention's output projection, summed over ranks."""
    return graph.row_parallel_linear(attended, f"{prefix}.{name}", graph.q_heads, bias, out="branch")


def gated_mlp(graph: Graph, x: Tensor, prefix: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), *,
              bias: bool = False, activation: str = "silu", wide: bool = False) -> Tensor:
    """down(activation(gate(x)) * up(x)), with gate and up packed into one matrix.

    names: of gate, up and down; or, if the checkpoint stores gate and up as one matrix, of that matrix and down.
    activation: "silu", "gelu", or "gelu_tanh" for its approximation. wide: it has twice the intermediate size.
    """
    inner = replace(graph.intermediate, units=2 * graph.intermediate.units) if wide else graph.intermediate
    halves, out = (inner, inner), "wide_" if wide else ""
    if len(names) == 2:
        weight, added = graph.sliced(f"{prefix}.{names[0]}", halves, graph.config.hidden_size, bias)
    else:
        weight, added = graph.packed(prefix, names[:2], halves, graph.config.hidden_size, bias)
    gate_up = graph.linear(x, weight, added, out=f"{out}gate_up")
    activated = gated(graph, gate_up, activation, f"{out}activated")
    return graph.row_parallel_linear(activated, f"{prefix}.{names[-1]}", inner, bias, out="branch")


def gated(graph: Graph, gate_up: Tensor, activation: str, out: str) -> Tensor:
    """activation(gate) * up of the packed projection."""
    if graph.config.swiglu_limit:
        return graph.limited_silu_mul(gate_up, graph.config.swiglu_limit, out)
    return {"silu": graph.silu_mul, "gelu": graph.gelu_mul, "gelu_tanh": graph.gelu_tanh_mul}[activation](gate_up, out)


def plain_mlp(graph: Graph, x: Tensor, prefix: str, inner: Split, *, bias: bool = False, out: str = "branch",
              between: str = "activated") -> Tensor:
    """down(max(up(x), 0)^2): the caller must add up the ranks' results."""
    weight, added = graph.packed(prefix, ("up_proj",), (inner,), graph.config.hidden_size, bias)
    activated = graph.relu_square(graph.linear(x, weight, added, out=between))
    return graph.partial_linear(activated, f"{prefix}.down_proj", inner, bias, out=out)


def routed_experts(graph: Graph, x: Tensor, prefix: str,
                   names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), *, router: str = "gate",
                   bias: bool = False, correction: str = "", correction_row: int | None = None,
                   source: Tensor | None = None, out: str = "branch", scales: str = "", activation: str = "silu",
                   table: str = "",
                   stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")) -> Tensor:
    """The weighted sum of the experts (gated MLPs) that the router chooses for each row.

    Each rank computes its experts, or its features of each expert: the caller must add up the ranks' results.
    names: of an expert's gate, up and down; of up and down only, if max(up, 0)^2 takes the place of the gated product.
    source: what experts compute, x by default. router: its name. bias: the router and the experts have biases.
    correction: the name of the vector that is added to scores for the choice of experts, "" if there is none.
    correction_row: the checkpoint's tensor has two dimensions, and the vector is this row of it. scales: the name of
    the vector that the experts' weights are multiplied with, "" if there is none. activation: as in gated_mlp. table:
    the name of the experts of each token, if the router does not choose them; "" if it does. stacks: names of the
    tensors of all experts, if the checkpoint stores them stacked.
    """
    config, source = graph.experts, x if source is None else source
    hidden = source.blocks[0].width
    inner, whole, count = graph.expert_features, graph.whole_experts, config.count
    rows = graph.row_set("routed", config.per_token)

    def part(expert: int, kind: str, size: int, split: Split | None, value: str = "weight") -> Part:
        if not config.stacked:
            return Part(f"{prefix}.experts.{expert}.{kind}.{value}", size, split, unit=expert, units=whole)
        if kind == names[-1]:
            return Part(f"{prefix}.{stacks[1]}", size, split, 0, 0, expert, expert, whole)
        return Part(f"{prefix}.{stacks[0]}", size, split, size * names.index(kind), 2 * size, expert, expert, whole)

    def gate_up(value: str) -> tuple[Part, ...]:
        return tuple(part(expert, kind, inner.width, inner, value) for expert in range(count) for kind in names[:-1])

    def down(value: str) -> tuple[Part, ...]:
        return tuple(part(expert, names[-1], hidden, None, value) for expert in range(count))

    def added(name: str, parts: tuple[Part, ...], first_rank_only: bool = False) -> Weight | None:
        return graph.weight(Weight(f"{name}.bias", parts, first_rank_only=first_rank_only)) if bias else None

    gate = f"{prefix}.{router}"
    weight = graph.matrix(f"{gate}.weight", count, graph.config.hidden_size)
    logits = graph.linear(x, weight, added(gate, (Part(f"{gate}.bias", count),)), out="router_logits")

    def vector(name: str, row: int | None = None) -> Weight | None:
        full = f"{prefix}.{name}"
        return graph.weight(Weight(full, (Part(full, count, expert=row),))) if name else None

    chosen = {name: getattr(config, name) for name in ("scores", "scale", "groups", "top_groups", "group_scores")
              if getattr(config, name) != getattr(ExpertConfig, name)}
    listed = graph.vector(f"{prefix}.{table}", graph.config.vocab_size * config.per_token) if table else None
    scores = graph.router(logits, rows, vector(correction, correction_row), vector(scales), listed,
                          normalized=int(config.normalized), **chosen)
    name = f"{prefix}.experts.{'+'.join(names[:-1])}"
    stack = graph.weight(Weight(name, gate_up("weight"), hidden, experts=count))
    both = graph.expert_linear(source, stack, added(name, gate_up("bias")), rows, out="expert_gate_up")
    if len(names) == 2:
        activated = graph.relu_square(both)
    elif graph.config.swiglu is None:
        activated = gated(graph, both, activation, "expert_activated")
    else:
        activated = graph.clamped_silu_mul(both, *graph.config.swiglu, out="expert_activated")
    name = f"{prefix}.experts.{names[-1]}"
    stack = graph.weight(Weight(name, down("weight"), inner.width, inner, experts=count))
    y = graph.expert_linear(activated, stack, added(name, down("bias"), first_rank_only=True), rows, out="expert_out")
    return graph.combine_experts(y, scores, out=out)


def shared_expert(graph: Graph, x: Tensor, prefix: str, name: str = "shared_expert",
                  names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensor:
    """A gated MLP for every row: the caller must add up the ranks' results. names: of gate, up and down."""
    size = graph.experts.shared_size
    unit = gcd(size, 32)
    inner = Split(size // unit, unit)
    weight, _ = graph.packed(f"{prefix}.{name}", names[:2], (inner, inner), graph.config.hidden_size, False)
    activated = gated(graph, graph.linear(x, weight, None, out="shared_gate_up"), "silu", "shared_activated")
    return graph.partial_linear(activated, f"{prefix}.{name}.{names[2]}", inner, False, out="shared")


def mlp_or_experts(graph: Graph, x: Tensor, prefix: str, layer: int, *, correction: str,
                   correction_row: int | None = None) -> Tensor:
    """What a layer's MLP adds to its rows: a gated MLP in dense layers, otherwise routed experts, and a shared one if
    there is one, added up over ranks. correction, correction_row: of the router, see routed_experts.
    """
    if layer in graph.experts.dense_layers:
        return gated_mlp(graph, x, prefix)
    y = routed_experts(graph, x, prefix, correction=correction, correction_row=correction_row)
    if graph.experts.shared_size:
        graph.add(y, shared_expert(graph, x, prefix, "shared_experts"))
    return graph.all_reduce(y)


def gated_shared_expert(graph: Graph, x: Tensor, prefix: str) -> Tensor:
    """`shared_expert`, times the sigmoid of the row's gate."""
    y = shared_expert(graph, x, prefix)
    gate = graph.matrix(f"{prefix}.shared_expert_gate.weight", 1, graph.config.hidden_size)
    return graph.sigmoid_mul(y, graph.linear(x, gate, None, out="shared_gate"))


def _selected(graph: Graph, x: Tensor, source: Tensor, prefix: str, latent: LatentConfig,
              indexer: IndexerConfig) -> Tensor:
    """The positions that an indexer selects, the same on every rank. source: the queries' latent."""
    def project(rows: Tensor, name: str, width: int, columns: int, out: str) -> Tensor:
        return graph.linear(rows, graph.matrix(f"{prefix}.{name}.weight", width, columns), None, out=out)

    def vector(name: str) -> Weight:
        return graph.vector(f"{prefix}.{name}", indexer.dim)

    heads, dim, hidden = indexer.heads, indexer.dim, graph.config.hidden_size
    queries = project(source, "wq_b", heads * dim, latent.query_dim, "index_queries")
    key = graph.op("layer_norm", project(x, "wk", dim, hidden, "index_key"), out="index_key_normed", eps=1e-6,
                   weights=(vector("k_norm.weight"), vector("k_norm.bias")))
    pairs: dict[str, Any] = {"pairs": "interleaved"} if indexer.interleaved else {}
    for rows in (queries, key) if latent.rotated else ():
        graph.rope(rows, head_dim=dim, rotary_dim=latent.rope_dim, block=0, blocks=1, **pairs)
    weights = project(x, "weights_proj", heads, hidden, "index_weights")
    # A factor of the scores would change no selection.
    if not indexer.pool:
        return graph.indexer(queries, weights, key, indexer.selected)
    gates = graph.linear(x, graph.matrix(f"{prefix}.index_kpool_compress_gate", dim, hidden), None, out="index_gates")
    return graph.pooled_indexer(queries, weights, graph.concat(key, gates, out="index_rows"),
                                f"{prefix}.index_kpool_compress_ape", indexer.pool, indexer.selected)


def latent_attention(graph: Graph, x: Tensor, prefix: str, layer: int, latent: LatentConfig) -> Tensor:
    """Latent attention with its output projection, in the absorbed form: queries are multiplied by the keys'
    projection of the latent, and weighted sums of latents by that of the values (docs/decisions/latent.md).
    """
    config, heads, eps = graph.config, graph.config.num_heads, latent.eps
    pairs: dict[str, Any] = {"pairs": "interleaved"} if latent.interleaved else {}

    def down(name: str, sizes: tuple[int, ...], out: str) -> Tensor:
        tensor = f"{prefix}.{name}.weight"
        parts = tuple(Part(tensor, n, None, sum(sizes[:i]), sum(sizes)) for i, n in enumerate(sizes) if n)
        return linear_of_parts(graph, x, f"{prefix}.{name}", parts, tuple(Block(n) for n in sizes if n), out,
                               config.attention_bias)

    def normed(name: str, width: int) -> Weight:
        return graph.vector(f"{prefix}.{name}.weight", width)

    source, name = x, "q_proj"
    if latent.query_dim:
        source = graph.op("rms_norm", down("q_a_proj", (latent.query_dim,), "query_latent"), out="query_normed",
                          weights=(normed("q_a_layernorm", latent.query_dim),), eps=eps)
        name = "q_b_proj"
    sizes = (latent.nope_dim, latent.rope_dim)
    parts = [of_each_head(f"{prefix}.{name}.weight", heads, sizes, i) for i in (1, 0) if sizes[i]]  # rotated ones first
    queries = linear_of_parts(graph, source, f"{prefix}.{name}", sum(parts, ()),
                              tuple(Block(heads * n, Split(heads, n)) for n in reversed(sizes) if n), "queries")
    selected = None
    if (indexer := latent.indexer) is not None:
        selected = graph.tensors["seen"] if layer in indexer.shared else _selected(
            graph, x, source, f"{prefix}.indexer", latent, indexer)
    kept = down("kv_a_proj_with_mqa", (latent.latent_dim, latent.rope_dim), "kept")
    graph.op("head_norm", kept, weights=(normed("kv_a_layernorm", latent.latent_dim),), block=0,
             head_dim=latent.latent_dim, eps=eps)
    for rows, block in ((queries, 0), (kept, 1)) if latent.rotated else ():
        graph.rope(rows, head_dim=latent.rope_dim, block=block, blocks=1, **pairs)
    scale = sum(sizes) ** -0.5
    if config.rope.mscale_all_dim:
        scale *= yarn_mscale(config.rope, config.rope.mscale_all_dim) ** 2
    absorbed = graph.head_linear(queries, f"{prefix}.kv_b_proj.keys", heads, latent.latent_dim, latent.nope_dim,
                                 "absorbed", block=len(parts) - 1)
    more: dict[str, Any] = {"rate": latent.indexer.pool} if latent.indexer and latent.indexer.pool else {}
    recalled = graph.latent_attention(absorbed, queries, kept, layer, scale, selected, **more)
    attended = graph.head_linear(recalled, f"{prefix}.kv_b_proj.values", heads, latent.value_dim, latent.latent_dim,
                                 "attended")
    return graph.row_parallel_linear(attended, f"{prefix}.o_proj", Split(heads, latent.value_dim),
                                     config.attention_bias, "branch")


def residual_streams(graph: Graph, x: Tensor) -> Tensor:
    """The residual streams before the first layer: as many copies of the embedding (mHC, arXiv 2512.24880)."""
    streams = graph.config.streams
    assert streams is not None
    found = x
    while (have := len(found.blocks)) < streams.count:
        more = min(2, streams.count - have)
        found = graph.concat(found, *[x] * more, out="streams" if have + more == streams.count else f"streams_{have}")
    return found


def merged_streams(graph: Graph, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The weights of the streams before a part of a layer, or behind the last one, and the streams' weighted sum."""
    config, streams = graph.config, graph.config.streams
    assert streams is not None
    behind, count = name == "hc_head", streams.count
    outputs, width = count if behind else (2 + count) * count, count * config.hidden_size
    ones = graph.weight(Weight(f"ones.{width}", values=(1.0,) * width))
    normed = graph.op("rms_norm", x, weights=(ones,), out="streams_normed", eps=config.rms_norm_eps)
    weights = graph.linear(normed, graph.matrix(f"{name}_fn", outputs, width), None,
                           out="head_weights" if behind else "stream_weights")
    graph.op("stream_weights", weights, weights=(graph.vector(f"{name}_scale", 1 if behind else 3),
                                                 graph.vector(f"{name}_base", outputs)),
             streams=count, iterations=streams.iterations, eps=streams.eps)
    return weights, graph.op("merge_streams", x, weights, out="merged", blocks=(Block(config.hidden_size),))


def dense(graph: Graph, x: Tensor, prefix: str, outputs: int, out: str, *, bias: bool = True,
          activation: str = "") -> Tensor:
    """A linear layer that every rank computes, and its activation."""
    inputs = sum(block.width for block in x.blocks)
    name = f"{prefix}.bias"
    added = graph.vector(name, outputs) if bias else None
    y = graph.linear(x, graph.matrix(f"{prefix}.weight", outputs, inputs), added, out=out)
    return graph.activate(y, activation) if activation else y


def classify(graph: Graph, x: Tensor, prefix: str, *, bias: bool = True) -> Graph:
    """Ends a classifier with the logits of its labels."""
    graph.hidden_states(dense(graph, x, prefix, graph.config.labels, "scores", bias=bias))
    return graph


def embed(graph: Graph, x: Tensor) -> Graph:
    """Ends an embedder: pooling, and the dense layers after it."""
    encoder = graph.config.encoder
    assert encoder is not None
    pooled = graph.pool_rows(x, encoder.pooling)
    for layer in encoder.dense:
        pooled = dense(graph, pooled, f"{layer.name}.linear", layer.outputs, f"dense.{layer.name}", bias=layer.bias,
                       activation=layer.activation)
    graph.hidden_states(pooled)
    return graph


def finish(graph: Graph, x: Tensor, norm: str = "model.norm.weight", head: str = "lm_head.weight",
           unit_offset: int = 0, embedding: str = EMBEDDING) -> Graph:
    """Final norm, head (the embedding itself when tied) and sampling, for OUTPUT_ROWS.

    unit_offset: 1 if the norm multiplies by 1 + w instead of w.
    """
    config = graph.config
    offset: dict[str, Any] = {"unit_offset": unit_offset} if unit_offset else {}
    normed = graph.rms_norm(graph.select_rows(x), norm, **offset)
    if config.labels:
        return classify(graph, normed, "score", bias=False)
    name = embedding if config.tie_word_embeddings else head
    if config.compared:
        parts = tuple(Part(name, 1, None, token, config.vocab_size) for token in config.compared)
        two = graph.weight(Weight(f"{name}.compared", parts, config.hidden_size))
        scores = graph.linear(normed, two, None, out="scores")
        if config.logit_scale != 1:
            graph.scale(scores, config.logit_scale)
        graph.hidden_states(graph.soft_cap(scores, config.logit_cap) if config.logit_cap else scores)
        return graph
    weight = graph.matrix(name, config.vocab_size, config.hidden_size, row_split=graph.vocab)
    graph.hidden_states(normed)
    logits = graph.linear(normed, weight, None, out="logits")
    if config.logit_scale != 1:
        graph.scale(logits, config.logit_scale)
    graph.sample(graph.soft_cap(logits, config.logit_cap) if config.logit_cap else logits)
    return graph
