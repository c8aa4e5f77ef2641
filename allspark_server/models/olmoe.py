"""OLMoE: one norm over all queries and one over all keys, and experts in every layer."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, reject_other_values
from allspark_server.models.blocks import begin, finish, output_projection, qkv_projection, routed_experts
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ExpertConfig, ModelConfig


def olmoe(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = qkv_projection(graph, h, attention, bias=bias)
        graph.qk_norm(qkv, f"{attention}.q_norm.weight", f"{attention}.k_norm.weight")
        attended = graph.span_attention(graph.rope(qkv), layer)
        graph.add(x, output_projection(graph, attended, attention, bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, graph.all_reduce(routed_experts(graph, h, f"{prefix}.mlp")))
    return finish(graph, x)


def _translate(fields: Fields) -> Fields:
    reject_other_values(fields, {"clip_qkv": None})
    return fields


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return routed(fields, intermediate="intermediate_size", normalized=fields.get("norm_topk_prob", bool, False))


ARCHITECTURES = {"OlmoeForCausalLM": Architecture(olmoe, "olmoe", "OLMoE", kv_heads_required=False,
                                                  has_bias_fields=True, experts=_experts, translate=_translate)}
