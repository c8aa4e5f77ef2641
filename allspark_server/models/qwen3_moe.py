"""Qwen3 with experts (Qwen3-30B-A3B): Qwen3's attention; layers without experts are Qwen3's."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import (
    add_taps,
    begin,
    finish,
    gated_mlp,
    output_projection,
    qkv_projection,
    routed_experts,
)
from allspark_server.models.expert_fields import qwen_experts
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def qwen3_moe(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias)
        graph.head_norm(qkv, 0, f"{prefix}.self_attn.q_norm.weight")
        graph.head_norm(qkv, 1, f"{prefix}.self_attn.k_norm.weight")
        attended = graph.span_attention(graph.rope(qkv), layer)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        if layer in graph.experts.dense_layers:
            graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
        else:
            graph.add(x, graph.all_reduce(routed_experts(graph, h, f"{prefix}.mlp")))
        add_taps(graph, x, layer)
    return finish(graph, x)


ARCHITECTURES = {"Qwen3MoeForCausalLM": Architecture(qwen3_moe, "qwen3_moe", "Qwen3-MoE", has_bias_fields=True,
                                                     experts=qwen_experts)}
