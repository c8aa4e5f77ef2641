"""DeepSeek-V4: one KV head whose keys are its values, attention over a window and over compressed positions, an output
projection in groups of heads, four residual streams, and experts in every layer (docs/decisions/deepseek-v4.md).
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values, translated
from allspark_server.models.blocks import (
    LOCAL,
    begin,
    finish,
    linear_of_parts,
    merged_streams,
    residual_streams,
    routed_experts,
    shared_expert,
)
from allspark_server.models.cache_groups import place_rows
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor, Weight
from allspark_server.models.network import (
    CompressedConfig,
    ExpertConfig,
    IndexerConfig,
    ModelConfig,
    RopeConfig,
    StreamConfig,
)
from allspark_server.weights.shard import Split

_NAMES = ("w1", "w3", "w2")  # of gate, up and down
_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

Places = dict[tuple[int, str], tuple[int, int]]


def deepseek_v4(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config, "embed.weight")
    places = _places(graph)
    x = residual_streams(graph, x)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        for part, norm in (("attn", "attn_norm"), ("ffn", "ffn_norm")):
            weights, h = merged_streams(graph, x, f"{prefix}.hc_{part}")
            h = graph.rms_norm(h, f"{prefix}.{norm}.weight")
            y = (_attention(graph, h, f"{prefix}.attn", layer, places) if part == "attn" else
                 _experts(graph, h, f"{prefix}.ffn", layer))
            graph.op("mix_streams", x, y, weights)
    return finish(graph, merged_streams(graph, x, "hc_head")[1], "norm.weight", "head.weight", embedding="embed.weight")


def _places(graph: Graph) -> Places:
    """Where rows of the cache lie: each layer's keys, and of layers with entries these and the rows that they are made
    of; and the same for an indexer. Sizes are bytes of a position in bfloat16.
    """
    config, compressed = graph.config, graph.config.compressed
    assert compressed is not None
    rows: dict[tuple[int, str], tuple[int, float]] = {}
    for layer, rate in enumerate(compressed.rates):
        rows[layer, "kept"] = compressed.window, 2 * config.head_dim
        parts = 2 if layer in compressed.overlapping else 1
        dims = {"compressor": config.head_dim} if rate else {}
        if parts == 2 and compressed.indexer is not None:
            dims["indexer"] = compressed.indexer.dim
        for name, dim in dims.items():
            rows[layer, f"{name} rows"] = parts * rate, 8 * parts * dim
            rows[layer, name] = 0, 2 * dim / rate
    graph.cache_groups, places = place_rows(rows)
    return places


def _attention(graph: Graph, x: Tensor, prefix: str, layer: int, places: Places) -> Tensor:
    """Attention with its output projection."""
    config, compressed = graph.config, graph.config.compressed
    assert compressed is not None
    dim, heads, rate = config.head_dim, config.num_heads, compressed.rates[layer]
    groups = Split(compressed.groups, heads // compressed.groups * dim)
    table: dict[str, Any] = {} if rate else {"table": LOCAL}

    def matrix(name: str, outputs: int, inputs: int, split: Split | None = None) -> Weight:
        return graph.matrix(f"{prefix}.{name}.weight", outputs, inputs, row_split=split)

    def rotated(y: Tensor, head_dim: int, **more: Any) -> Tensor:
        return graph.rope(y, head_dim=head_dim, rotary_dim=compressed.rope_dim, skip=head_dim - compressed.rope_dim,
                          block=0, blocks=1, pairs="interleaved", **table, **more)

    latent = graph.linear(x, matrix("wq_a", compressed.query_dim, config.hidden_size), None, out="query_latent")
    latent = graph.op("rms_norm", latent, out="query_normed", eps=config.rms_norm_eps,
                      weights=(graph.vector(f"{prefix}.q_norm.weight", compressed.query_dim),))
    queries = graph.linear(latent, matrix("wq_b", heads * dim, compressed.query_dim, groups), None, out="queries")
    rotated(graph.head_norm(queries, 0, head_dim=dim), dim)
    kept = graph.linear(x, matrix("wkv", dim, config.hidden_size), None, out="kept")
    rotated(graph.head_norm(kept, 0, f"{prefix}.kv_norm.weight", dim), dim)

    def compress(name: str, width: int, kind: str) -> None:
        both = linear_of_parts(graph, x, f"{name}.wkv+wgate", tuple(
            Part(f"{name}.{part}.weight", width) for part in ("wkv", "wgate")), (Block(width), Block(width)),
                               f"{kind}_{width}")
        more = {"overlapping": 1} if layer in compressed.overlapping else {}
        graph.compress(both, f"{name}.ape", rate, places[layer, f"{kind} rows"], places[layer, kind],
                       f"{name}.norm.weight", rotary_dim=compressed.rope_dim, **more)

    seen, more = [queries, kept], dict[str, Any]()
    if rate:
        compress(f"{prefix}.compressor", dim * (2 if layer in compressed.overlapping else 1), "compressor")
        more = {"rate": rate, "entry_group": places[layer, "compressor"][0],
                "entry_layer": places[layer, "compressor"][1]}
    if layer in compressed.overlapping:
        indexer, own = compressed.indexer, f"{prefix}.indexer"
        assert indexer is not None
        compress(f"{own}.compressor", 2 * indexer.dim, "indexer")
        asked = graph.linear(latent, matrix("indexer.wq_b", indexer.heads * indexer.dim, compressed.query_dim), None,
                             out="index_queries")
        rotated(asked, indexer.dim)
        weights = graph.linear(x, matrix("indexer.weights_proj", indexer.heads, config.hidden_size), None,
                               out="index_weights")
        group, number = places[layer, "indexer"]
        seen.append(graph.op("indexer", asked, weights, out="seen", blocks=(Block(indexer.selected),), layer=number,
                             cache_group=group, rate=rate))
    sinks = graph.vector(f"{prefix}.attn_sink", heads, Split(compressed.groups, heads // compressed.groups))
    group, number = places[layer, "kept"]
    attended = graph.op("compressed_attention", *seen, weights=(sinks,), out="attended", layer=number,
                        cache_group=group, window=compressed.window, scale=dim ** -0.5, **more)
    rotated(attended, dim, inverse=1)
    units = Split(compressed.groups)
    name, size = f"{prefix}.wo_a.weight", compressed.group_dim
    parts = tuple(Part(name, size, None, group * size, compressed.groups * size, unit=group, units=units)
                  for group in range(compressed.groups))
    inner = Split(compressed.groups, size)
    projected = graph.op("head_linear", attended, out="projected", blocks=(Block(inner.width, inner),), block=0,
                         weights=(graph.weight(Weight(name, parts, groups.size, experts=compressed.groups)),))
    return graph.row_parallel_linear(projected, f"{prefix}.wo_b", inner, False, "branch")


def _experts(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    listed = layer in graph.experts.by_token
    y = routed_experts(graph, x, prefix, _NAMES, correction="" if listed else "gate.bias",
                       table="gate.tid2eid" if listed else "")
    return graph.all_reduce(graph.add(y, shared_expert(graph, x, prefix, "shared_experts", _NAMES)))


# -- config.json -------------------------------------------------------------------------------------------------------
_SERVED = {"attention_bias": False, "mlp_bias": False, "n_shared_experts": 1, "norm_topk_prob": True,
           "scoring_func": "sqrtsoftplus", "num_key_value_heads": 1, "n_group": 1, "topk_group": 1}


def _translate(fields: Fields) -> Fields:
    """The same config.json with the rotary embedding of layers with entries as the only one."""
    reject_other_values(fields, _SERVED)
    given, theta = fields.get("rope_parameters", dict, {}), fields.get("rope_theta", float, 10000.0)
    if isinstance(given.get("compress"), dict):
        rope = dict(given["compress"])
        main = fields.inner("rope_parameters").inner("main", {})
        reject_other_values(main, {"rope_type": "default"})
        theta = main.get("rope_theta", float, theta)
    else:
        rope = {**given, **fields.get("rope_scaling", dict, {})}
        rope["rope_theta"] = fields.get("compress_rope_theta", float, 160000.0)
    if theta <= 0:
        raise fields.error("rope_theta", f"is {theta}: it must be positive")
    if rope.get("rope_type", rope.get("type")) == "yarn":
        rope.setdefault("attention_factor", 1.0)
    rope["partial_rotary_factor"] = _rotary_part(fields)
    return translated(fields, rope_parameters=rope, rope_scaling=None, rope_theta=theta, num_key_value_heads=1,
                      intermediate_size=fields.need_positive("moe_intermediate_size"))


def _rotary_part(fields: Fields) -> float:
    dim = fields.get("qk_rope_head_dim", int)
    return fields.get("partial_rotary_factor", float, 0.125) if dim is None else dim / fields.need_positive("head_dim")


def _compressed(fields: Fields) -> dict[str, Any]:
    layers, heads = fields.need_positive("num_hidden_layers", most=MAX_LAYERS), fields.need("num_attention_heads", int)
    dim = fields.need_positive("head_dim", most=MAX_HEAD_DIM)
    rope_dim = int(dim * _rotary_part(fields))
    rates, overlapping = _rates(fields, layers)
    groups = fields.need_positive("o_groups")
    if heads % groups:
        raise fields.error("o_groups", f"is {groups}: it must divide num_attention_heads ({heads})")
    indexer = None
    if overlapping:
        index_heads, index_dim, selected = (fields.need_positive(f"index_{name}", most=most) for name, most in (
            ("n_heads", MAX_SIZE), ("head_dim", MAX_HEAD_DIM), ("topk", MAX_SIZE)))
        if index_dim < rope_dim:
            raise fields.error("index_head_dim", f"is {index_dim}: it must be at least the rotated features "
                                                 f"({rope_dim})")
        indexer = IndexerConfig(index_heads, index_dim, selected, interleaved=True)
    return {
        "compressed": CompressedConfig(
            fields.need_positive("sliding_window", most=MAX_POSITIONS), rates, overlapping,
            fields.need_positive("q_lora_rank", most=MAX_SIZE), rope_dim, groups, fields.need_positive("o_lora_rank"),
            indexer),
        "streams": StreamConfig(fields.need_positive("hc_mult", most=64),
                                fields.need_positive("hc_sinkhorn_iters", most=1000),
                                fields.need_positive("hc_eps", float)),
        "local_rope": RopeConfig(theta=fields.get("rope_theta", float, 10000.0), dim=rope_dim),
        "swiglu_limit": fields.need_positive("swiglu_limit", float)}


def _rates(fields: Fields, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each layer how many positions an entry is of, and the layers whose entries overlap."""
    rates = {_SLIDING: 0, _SPARSE: 4, _HEAVY: 128, **fields.get("compress_rates", dict, {})}
    for name, field in ((_SPARSE, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        rates[name] = fields.get(field, int, rates[name])
        if type(rates[name]) is not int or not 2 <= rates[name] <= 1 << 16:
            raise fields.error("compress_rates", f"has {rates[name]!r} for {name}: expected 2 to {1 << 16}")
    kinds = fields.get("layer_types", list)
    if kinds is None and (ratios := fields.get("compress_ratios", list)) is not None:
        known = {"0": _SLIDING, "4": _SPARSE, "128": _HEAVY}
        kinds = [known.get(str(ratio)) for ratio in ratios]
    if kinds is None:
        kinds = [_HEAVY] * 2 + [_SPARSE if i % 2 else _HEAVY for i in range(max(0, layers - 2))]
    kinds = kinds[:layers]
    if len(kinds) < layers or any(kind not in (_SLIDING, _SPARSE, _HEAVY) for kind in kinds):
        raise fields.error("layer_types", f"must hold {_SLIDING}, {_SPARSE} or {_HEAVY} for each of {layers} layers "
                                          "(or compress_ratios 0, 4 or 128)")
    return (tuple(0 if kind == _SLIDING else rates[kind] for kind in kinds),
            tuple(layer for layer, kind in enumerate(kinds) if kind == _SPARSE))


def _routed(fields: Fields, layers: int) -> ExpertConfig:
    kinds, first = fields.get("mlp_layer_types", list), fields.get("num_hash_layers", int, 3)
    if kinds is None and first < 0:
        raise fields.error("num_hash_layers", f"is {first}: it must not be negative")
    if kinds is None:
        by_token = tuple(range(min(layers, first)))
    elif len(kinds) < layers or any(kind not in ("hash_moe", "moe") for kind in kinds):
        raise fields.error("mlp_layer_types", f"must hold 'hash_moe' or 'moe' for each of {layers} layers")
    else:
        by_token = tuple(layer for layer, kind in enumerate(kinds[:layers]) if kind == "hash_moe")
    return routed(fields, intermediate="moe_intermediate_size", number="n_routed_experts", normalized=True,
                  shared=fields.need_positive("moe_intermediate_size"), scores="sqrt_softplus", by_token=by_token,
                  scale=fields.get("routed_scaling_factor", float, 1.5))


ARCHITECTURES = {
    "DeepseekV4ForCausalLM": Architecture(
        deepseek_v4, "deepseek_v4", "DeepSeek-V4", layer_types=False, rope_types=("default", "yarn"),
        partial_rotary=0.125, experts=_routed, more=_compressed, translate=_translate, unused=("mtp.",),
        stored_as="deepseek_names"),
}
