"""Gemma 4: Gemma 3's layers with plain norms, and a factor for each layer's result.

Layers without a window have heads of their own size and number, values that are their keys before norm and rotation,
and a rotary embedding of a part of each head's pairs. Values are normed. The last layers may read keys and values of
earlier ones, and have wider MLPs. Small models have embeddings for every layer; the model with experts has them beside
each dense MLP. Rows of an image see each other in layers with a window, if at all; for every layer they have the
embeddings of padding.
"""

from __future__ import annotations

from typing import Any

from allspark_client.errors import not_available
from allspark_server.models.architecture import Architecture, text_part
from allspark_server.models.blocks import LOCAL, begin, finish, gated_mlp, routed_experts
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields
from allspark_server.models.gemma import embedding_scale
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ExpertConfig, FullHeads, LayerEmbeddings, ModelConfig
from allspark_server.models.rope_fields import FULL, SLIDING
from allspark_server.models.vision import gemma4_tower
from allspark_server.weights.shard import Split

_TABLE = "model.embed_tokens_per_layer.weight"


def gemma4(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    embeddings = _layer_embeddings(graph, x) if config.layer_embeddings else None
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        y = _attention(graph, h, f"{prefix}.self_attn", layer)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_attention_layernorm.weight", "branch_normed"))
        h = graph.rms_norm(x, f"{prefix}.pre_feedforward_layernorm.weight")
        y = gated_mlp(graph, h, f"{prefix}.mlp", activation="gelu_tanh", wide=layer in config.wide_layers)
        if config.experts is not None:
            y = graph.rms_norm(y, f"{prefix}.post_feedforward_layernorm_1.weight", "dense_normed")
            graph.add(y, _experts(graph, x, prefix))
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_feedforward_layernorm.weight", "branch_normed"))
        if embeddings is not None:
            y = _embedded(graph, x, embeddings, prefix, layer)
            graph.add(x, graph.rms_norm(y, f"{prefix}.post_per_layer_input_norm.weight", "branch_normed"))
        graph.scale_by(x, f"{prefix}.layer_scalar")
    return finish(graph, x)


def _attention(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    """Attention with its output projection."""
    config, window = graph.config, graph.config.window(layer)
    kv_heads, dim = config.heads(layer)
    queries = Split(config.num_heads, dim)
    keys = Split(config.num_heads, dim, config.num_heads // kv_heads)
    kind = "" if window or config.full_heads is None else "full_"

    def project(names: tuple[str, ...], out: str) -> Tensor:
        splits = tuple(queries if name == "q_proj" else keys for name in names)
        return graph.linear(x, *graph.packed(prefix, names, splits, config.hidden_size, config.attention_bias), out=out)

    reads = layer in config.reading_layers
    if reads:
        qkv = project(("q_proj",), f"{kind}queries")
    elif kind and config.full_heads is not None and config.full_heads.keys_as_values:
        kept = project(("k_proj",), "full_keys")
        qkv = graph.concat(project(("q_proj",), "full_queries"), kept, kept, out="full_qkv")
    else:
        qkv = project(("q_proj", "k_proj", "v_proj"), f"{kind}qkv")
    graph.head_norm(qkv, 0, f"{prefix}.q_norm.weight", dim)
    if not reads:
        graph.head_norm(qkv, 1, f"{prefix}.k_norm.weight", dim)
        graph.head_norm(qkv, 2, head_dim=dim)
    blocks: dict[str, Any] = {"blocks": 1} if reads else {}
    tower = config.tower and config.tower.vision
    images: dict[str, Any] = {"images": 1} if tower and tower.together and window else {}
    graph.rope(qkv, head_dim=dim, **blocks, **({"table": LOCAL} if window else {}))
    attended = graph.span_attention(qkv, layer, window=window, head_dim=dim, scale=1.0, out=f"{kind}attended",
                                    **images)
    return graph.row_parallel_linear(attended, f"{prefix}.o_proj", queries, config.attention_bias, out="branch")


def _experts(graph: Graph, x: Tensor, prefix: str) -> Tensor:
    """What the layer's experts add, normed. x: the rows before the MLP's norm."""
    routing = graph.rms_norm(x, f"{prefix}.router.scale", "routing_normed")
    graph.scale(routing, graph.config.hidden_size**-0.5)
    source = graph.rms_norm(x, f"{prefix}.pre_feedforward_layernorm_2.weight", "normed")
    y = routed_experts(graph, routing, prefix, router="router.proj", source=source, scales="router.per_expert_scale",
                       activation="gelu_tanh")
    return graph.rms_norm(graph.all_reduce(y), f"{prefix}.post_feedforward_layernorm_2.weight", "experts_normed")


def _layer_embeddings(graph: Graph, x: Tensor) -> Tensor:
    """What every layer adds to its rows: the token's own embeddings, and a projection of the residual stream x."""
    config, sizes = graph.config, graph.config.layer_embeddings
    assert sizes is not None
    width = config.num_layers * sizes.dim
    rows = graph.vocab if sizes.vocab_size == config.vocab_size else Split(sizes.vocab_size)
    table = graph.matrix(_TABLE, sizes.vocab_size, width, row_split=rows)
    given: dict[str, Any] = {} if config.tower is None else {"given_id": sizes.padding}
    own = graph.embedding(table, out="token_embeddings", scale=sizes.scale, **given)
    weight = graph.matrix("model.per_layer_model_projection.weight", width, config.hidden_size)
    y = graph.linear(x, weight, None, out="layer_embeddings")
    # The norm of x hidden_size^-0.5 is that of x with eps hidden_size.
    graph.head_norm(y, 0, "model.per_layer_projection_norm.weight", sizes.dim,
                    eps=config.rms_norm_eps * config.hidden_size)
    return graph.scale(graph.add(y, own), 2**-0.5)


def _embedded(graph: Graph, x: Tensor, embeddings: Tensor, prefix: str, layer: int) -> Tensor:
    """What a layer's embeddings add, multiplied with a gate."""
    config, sizes = graph.config, graph.config.layer_embeddings
    assert sizes is not None
    gate = graph.matrix(f"{prefix}.per_layer_input_gate.weight", sizes.dim, config.hidden_size)
    y = graph.activate(graph.linear(x, gate, None, out="layer_gate"), "gelu_tanh")
    graph.multiply(y, embeddings, layer * sizes.dim)
    weight = graph.matrix(f"{prefix}.per_layer_projection.weight", config.hidden_size, sizes.dim)
    return graph.linear(y, weight, None, out="branch")


# -- config.json -------------------------------------------------------------------------------------------------------
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
    "sliding_window": 512, "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256}
_UNIFIED = {**_DEFAULTS, "max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
_ROPE = {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
         SLIDING: {"rope_type": "default", "rope_theta": 1e4}}


def _translate(fields: Fields, defaults: dict[str, Any] = _DEFAULTS) -> Fields:
    """The same config.json with defaults for absent fields, and the kind of each layer. The last one has no window."""
    if "text_config" in fields.values:
        outer = ("dtype", "torch_dtype")
        dtype: dict[str, Any] = {name: fields.values[name] for name in outer if name in fields.values}
        fields = text_part(fields)
        fields = Fields({**dtype, **fields.values}, fields.path, fields.prefix)
    given = {name: value for name, value in fields.values.items() if value is not None}
    fields = Fields({**defaults, "rope_parameters": _ROPE, **given}, fields.path, fields.prefix)
    layers = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    kinds = fields.get("layer_types", list, [SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)])
    return Fields({**fields.values, "layer_types": [*kinds[:-1], FULL]}, fields.path, fields.prefix)


def _translate_unified(fields: Fields) -> Fields:
    return _translate(fields, _UNIFIED)


def _gemma4(fields: Fields) -> dict[str, Any]:
    if fields.get("use_bidirectional_attention", str) == "all":
        raise not_available(f"Attention in both directions (use_bidirectional_attention of {fields.path}) for models "
                            "that generate")
    sources, cap = _kv_sources(fields), fields.get("final_logit_softcapping", float)
    reading = tuple(layer for layer, source in enumerate(sources) if source != layer)
    found: dict[str, Any] = {
        "embedding_scale": embedding_scale(fields, fields.need_positive("hidden_size")),
        "logit_cap": 0.0 if cap is None else fields.need_positive("final_logit_softcapping", float),
        "full_heads": _full_heads(fields), "kv_sources": sources if reading else (),
        "wide_layers": reading if fields.get("use_double_wide_mlp", bool, False) else ()}
    if fields.get("hidden_size_per_layer_input", int):
        dim = fields.need_positive("hidden_size_per_layer_input", most=MAX_HEAD_DIM)
        size, padding = fields.need_positive("vocab_size_per_layer_input"), fields.get("pad_token_id", int, 0)
        if not 0 <= padding < size:
            raise fields.error("pad_token_id", f"is {padding}: it must be from 0 to {size - 1}")
        found["layer_embeddings"] = LayerEmbeddings(size, dim, embedding_scale(fields, dim), padding)
    return found


def _full_heads(fields: Fields) -> FullHeads:
    """The heads of layers without a window: from fields of their own, or from `per_layer_config` (transformers 5)."""
    kinds, shared = fields.need("layer_types", list), fields.get("attention_k_eq_v", bool, False)
    heads, kv_heads = fields.need_positive("num_attention_heads"), fields.need_positive("num_key_value_heads")
    name = "num_global_key_value_heads"
    plain = {"head_dim": fields.get("global_head_dim", int, 512),
             "num_key_value_heads": fields.get(name, int, kv_heads) if shared else kv_heads}
    layers = fields.get("per_layer_config", dict)
    if layers is not None:  # what differs from the fields outside
        name, plain = "per_layer_config", {"head_dim": fields.get("head_dim", int, 256),
                                           "num_key_value_heads": kv_heads}
        given = {int(layer): each for layer, each in layers.items() if layer.isdecimal()}
        full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
        own = [given.pop(layer, {}) for layer in full]
        if given or len(layers) > len(full) or any(each != own[0] or not isinstance(each, dict) for each in own):
            raise fields.error(name, "must hold the same fields for each layer of full_attention, and no other layer")
        plain |= own[0]
    each = Fields(plain, fields.path, fields.prefix)
    found = FullHeads(each.need_positive("num_key_value_heads", most=heads),
                      each.need_positive("head_dim", most=MAX_HEAD_DIM), shared)
    if heads % found.kv_heads or found.head_dim % 2 or plain.keys() != {"head_dim", "num_key_value_heads"}:
        raise fields.error(name, f"gives layers of full_attention {plain}: expected an even head_dim and a "
                                 f"num_key_value_heads that divides num_attention_heads ({heads})")
    return found


def _kv_sources(fields: Fields) -> tuple[int, ...]:
    """For each layer, the layer whose keys and values it reads: the last num_kv_shared_layers read those of the last
    layer of their kind before them.
    """
    kinds, shared = fields.need("layer_types", list), fields.get("num_kv_shared_layers", int, 0)
    first = len(kinds) - shared
    if not 0 < first <= len(kinds):
        raise fields.error("num_kv_shared_layers", f"is {shared}: it must be from 0 to {len(kinds) - 1}")
    missing = [kind for kind in kinds[first:] if kind not in kinds[:first]]
    if missing:
        raise fields.error("num_kv_shared_layers", f"is {shared}: no layer of {missing[0]} is left whose keys and "
                                                   "values the others could read")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return (*range(first), *(last[kind] for kind in kinds[first:]))


def _routed(fields: Fields, layers: int) -> ExpertConfig | None:
    if not fields.get("enable_moe_block", bool, False):
        return None
    return routed(fields, intermediate="moe_intermediate_size", number="num_experts", per_token="top_k_experts",
                  normalized=True)


_GEMMA4: dict[str, Any] = {
    "head_dim": 256, "has_bias_fields": True, "activation": ("gelu_pytorch_tanh",), "windows": True, "tied": True,
    "rope_theta": 1e6, "local_theta": 1e4, "rope_types": ("default", "proportional"), "experts": _routed,
    "more": _gemma4, "translate": _translate}
_UNIFIED4 = {**_GEMMA4, "translate": _translate_unified}

ARCHITECTURES = {
    "Gemma4ForCausalLM": Architecture(gemma4, "gemma4_text", "Gemma 4 (text)", **_GEMMA4),
    "Gemma4UnifiedForCausalLM": Architecture(gemma4, "gemma4_unified_text", "Gemma 4 (text)", **_UNIFIED4),
    "Gemma4ForConditionalGeneration": Architecture(gemma4, "gemma4", "Gemma 4 that sees", tower=gemma4_tower,
                                                   stored_as="text_part", **_GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": Architecture(
        gemma4, "gemma4_unified", "Gemma 4 (text part of the unified models)", stored_as="text_part", **_UNIFIED4,
        no_images_reason="of Gemma 4's unified models, which see without a vision tower, only the text is served"),
}
