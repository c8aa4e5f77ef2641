"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, routed experts, and a shared expert with a gate."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import (
    begin,
    finish,
    gated_mlp,
    gated_shared_expert,
    output_projection,
    qkv_projection,
    routed_experts,
)
from allspark_server.models.expert_fields import qwen_experts
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ExpertConfig, ModelConfig


def qwen2_moe(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=config.attention_bias))
        graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        if layer in graph.experts.dense_layers:
            graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
        else:
            y = routed_experts(graph, h, f"{prefix}.mlp")
            graph.add(x, graph.all_reduce(graph.add(y, gated_shared_expert(graph, h, f"{prefix}.mlp"))))
    return finish(graph, x)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return qwen_experts(fields, layers, fields.need_positive("shared_expert_intermediate_size"))


ARCHITECTURES = {"Qwen2MoeForCausalLM": Architecture(qwen2_moe, "qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE",
                                                     qkv_bias_field=True, experts=_experts)}
