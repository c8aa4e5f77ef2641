"""Mixtral: Llama's attention, experts in every layer."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, output_projection, qkv_projection, routed_experts
from allspark_server.models.expert_fields import mixtral_experts
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def mixtral(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    moe = "mlp" if graph.experts.stacked else "block_sparse_moe"
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=False))
        graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        experts = routed_experts(graph, h, f"{prefix}.{moe}", ("w1", "w3", "w2"))
        graph.add(x, graph.all_reduce(experts))
    return finish(graph, x)


ARCHITECTURES = {"MixtralForCausalLM": Architecture(mixtral, "mixtral", "Mixtral", window_always=True, rope_theta=1e6,
                                                    experts=mixtral_experts)}
