"""ERNIE 4.5 with experts: the dense network's attention, and in a range of layers experts behind a softmax router whose
correction takes part in the choice only, beside shared experts that are stored as one.
"""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, reject_other_values
from allspark_server.models.blocks import begin, finish, mlp_or_experts, output_projection, qkv_projection
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import MAX_EXPERTS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ExpertConfig, ModelConfig


def ernie_moe(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=False), pairs="interleaved")
        graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, mlp_or_experts(graph, h, f"{prefix}.mlp", layer,
                                    correction="moe_statics.e_score_correction_bias", correction_row=0))
    return finish(graph, x)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    reject_other_values(fields, {"use_bias": False, "moe_norm_min": 1e-12})
    interval, first, last = (fields.get(f"moe_layer_{name}", int, default)
                             for name, default in (("interval", 1), ("start_index", 1), ("end_index", -1)))
    if interval < 1:
        raise fields.error("moe_layer_interval", f"is {interval}: it must be positive")
    last = layers - 1 if last == -1 else last
    dense = tuple(layer for layer in range(layers) if (layer + 1) % interval or not first <= layer <= last)
    shared = fields.get("moe_num_shared_experts", int, 2)
    if not 0 <= shared <= MAX_EXPERTS:
        raise fields.error("moe_num_shared_experts", f"is {shared}: it must be from 0 to {MAX_EXPERTS}")
    size = fields.need_positive("moe_intermediate_size")
    return routed(fields, intermediate="moe_intermediate_size", number="moe_num_experts", per_token="moe_k",
                  normalized=True, shared=shared * size, dense=dense)


ARCHITECTURES = {"Ernie4_5_MoeForCausalLM": Architecture(ernie_moe, "ernie4_5_moe", "ERNIE 4.5 (with experts)",
                                                         rope_theta=5e5, tied=True, experts=_experts)}
