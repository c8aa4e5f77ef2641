"""MiniMax-M2: one norm over all queries and one over all keys, a rotary embedding for a part of each head, and in every
layer experts behind a sigmoid router with a correction.
"""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, output_projection, qkv_projection, routed_experts
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ExpertConfig, ModelConfig


def minimax(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    experts = "mlp" if graph.experts.stacked else "block_sparse_moe"
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = qkv_projection(graph, h, attention, bias=False)
        graph.qk_norm(qkv, f"{attention}.q_norm.weight", f"{attention}.k_norm.weight")
        graph.add(x, output_projection(graph, graph.span_attention(graph.rope(qkv), layer), attention))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        y = routed_experts(graph, h, f"{prefix}.{experts}", ("w1", "w3", "w2"), correction="e_score_correction_bias")
        graph.add(x, graph.all_reduce(y))
    return finish(graph, x)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return routed(fields, intermediate="intermediate_size", normalized=True, scores="sigmoid")


def _translate(fields: Fields) -> Fields:
    """rotary_dim counts the features that partial_rotary_factor gives as a part."""
    reject_other_values(fields, {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
                                 "use_routing_bias": True, "shared_intermediate_size": 0})
    if set(fields.get("attn_type_list", list, [1])) != {1}:
        raise fields.error("attn_type_list", "must hold 1 for each layer: only full attention is served")
    size = fields.get("rotary_dim", int)
    if size is None:
        return fields
    return translated(fields, partial_rotary_factor=size / (fields.get("head_dim", int) or 128))


ARCHITECTURES = {"MiniMaxM2ForCausalLM": Architecture(minimax, "minimax_m2", "MiniMax-M2", head_dim=128, rope_theta=5e6,
                                                      partial_rotary=1.0, experts=_experts, translate=_translate)}
