"""GLM-5.3-Flash: three of four layers have the gated delta rule with a bounded decay for each channel (KDA), the others
latent attention without rotary embedding to pools of positions that an indexer selects. All have residual streams as
DeepSeek-V4's (mHC), whose mean is the last layer's output. Dense layers, then experts as in DeepSeek-V3, with limits.
The draft head's layer has latent attention and experts, and one residual stream.

Sources: transformers' `modeling_glm5_next.py` (5.24.0), to which the tests compare; unslothai/llama.cpp#116 for the
bound; fields of published config.json in NVIDIA-NeMo/Megatron-Bridge#6137; the draft head in ROCm/ATOM's
`glm5_next_mtp.py` and vLLM's `glm5next` (docs/decisions/glm-5-next.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values, text_part
from allspark_server.models.blocks import (
    begin,
    finish,
    latent_attention,
    merged_streams,
    mlp_or_experts,
    residual_streams,
)
from allspark_server.models.deepseek import index_sizes, latent_heads, latent_layer, latent_sizes, shared_selections
from allspark_server.models.draft_heads import next_n_head
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block
from allspark_server.models.kimi_linear import delta_sizes, kimi_delta
from allspark_server.models.network import DeltaConfig, IndexerConfig, ModelConfig, StreamConfig

_SERVED = {"mla_use_nope": True, "qk_rope_head_dim": 0, "mhc": True, "index_kpool_compress": True,
           "index_kpool_always_select_tail": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
           "moe_router_dtype": "float32", "moe_layer_freq": 1, "rope_scaling": None, "rope_parameters": None}
_DEFAULTS = {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "linear_lower_bound": -5.0,
             "linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "qk_rope_head_dim": 0,
             "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 16,
             "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0}  # transformers'


def glm5_next(config: ModelConfig) -> Graph:
    """Builds the network."""
    assert config.delta is not None and config.latent is not None
    graph, x = begin(config, rotary=False)
    x = residual_streams(graph, x)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        weights, h = merged_streams(graph, x, f"{prefix}.hc_attn")
        h, own = graph.rms_norm(h, f"{prefix}.input_layernorm.weight"), f"{prefix}.self_attn"
        y = (kimi_delta(graph, h, own, config.delta) if layer in config.delta.layers else
             latent_attention(graph, h, own, layer, config.latent))
        graph.op("mix_streams", x, y, weights)
        weights, h = merged_streams(graph, x, f"{prefix}.hc_ffn")
        h = graph.rms_norm(h, f"{prefix}.post_attention_layernorm.weight")
        y = mlp_or_experts(graph, h, f"{prefix}.mlp", layer, correction="gate.e_score_correction_bias")
        graph.op("mix_streams", x, y, weights)
    return finish(graph, graph.op("merge_streams", x, out="merged", blocks=(Block(config.hidden_size),)))


def _fields(fields: Fields) -> Fields:
    """The text's fields, with transformers' defaults, and those of linear_attn_config among them."""
    fields = text_part(fields)
    given = Fields({**_DEFAULTS, **fields.values}, fields.path, fields.prefix)
    reject_other_values(given, _SERVED)
    return latent_heads(given)


def _layers(fields: Fields) -> tuple[int, ...]:
    """The layers with the gated delta rule. linear_attn_config counts from 0, and must agree with layer_types."""
    count, own = fields.need_positive("num_hidden_layers", most=MAX_LAYERS), fields.inner("linear_attn_config", {})
    types = fields.get("layer_types", list)
    if types is None:
        types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(count)]
    known = {"linear_attention", "full_attention", "indexed_attention", "deepseek_sparse_attention"}
    layers = [layer for layer, kind in enumerate(types) if kind == "linear_attention"]
    others = [layer for layer in range(count) if layer not in layers]
    if len(types) != count or any(kind not in known for kind in types) or not others:
        raise fields.error("layer_types", f"must hold linear_attention or deepseek_sparse_attention, which at least "
                                          f"one layer has, for each of {count} layers")
    for name, wanted in (("kda_layers", layers), ("full_attn_layers", others)):
        if own.get(name, list, wanted) != wanted:
            raise own.error(name, f"is {own.values[name]!r}: layer_types has {wanted}")
    return tuple(layers)


def _more(fields: Fields) -> dict[str, Any]:
    layers, own = _layers(fields), fields.inner("linear_attn_config", {})
    heads, dim, taps = delta_sizes(fields, own, "gate_lower_bound", "safe_gate")
    reject_other_values(own, {"safe_gate": True})
    bound = own.get("gate_lower_bound", float, fields.get("linear_lower_bound", float, 0.0))
    if bound > 0 or (bound == 0 and own.get("safe_gate", bool, False)):
        raise fields.error("linear_lower_bound", f"is {bound}: it must be negative")
    index_heads, index_dim, selected = index_sizes(fields)
    pool, shared = fields.need_positive("index_kpool", most=1 << 16), shared_selections(fields)
    if pool < 2 or selected % pool:
        raise fields.error("index_kpool", f"is {pool}: it must be at least 2 and divide index_topk ({selected})")
    shared = tuple(layer for layer in shared if layer not in layers)
    if without := [layer for layer in shared if layer - 1 in (*layers, *shared)]:
        raise fields.error("indexer_types", f"is 'shared' for layer {without[0]}, but the layer before has no indexer")
    latent = latent_sizes(fields, rotated=False)["latent"]
    if not latent.query_dim:
        raise fields.error("q_lora_rank", "is missing: an indexer needs the queries' latent")
    return {"delta": DeltaConfig(layers, heads, heads, dim, dim, taps, bound),
            "latent": replace(latent, eps=fields.need_positive("rms_norm_eps", float), indexer=IndexerConfig(
                index_heads, index_dim, selected, False, shared, pool)),
            "streams": StreamConfig(*(fields.need_positive(name, kind, most) for name, kind, most in (
                ("hc_mult", int, 64), ("hc_sinkhorn_iters", int, 1000), ("hc_eps", float, 1)))),
            "swiglu_limit": fields.need_positive("swiglu_limit", float)}


ARCHITECTURES = {"Glm5NextForConditionalGeneration": Architecture(
    glm5_next, "glm5_next", "GLM-5.3-Flash (text part)", kv_heads_required=False, has_bias_fields=True,
    layer_types=False, experts=grouped_experts, more=_more, translate=_fields, stored_as="text_part",
    draft_head=next_n_head(latent_layer, rotary=False, normed=True),
    no_images_reason="its vision tower is not served")}
