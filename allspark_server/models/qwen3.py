"""Qwen3 (dense): an RMS norm on each query and key head; head_dim is independent of the hidden size."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, with_classifiers
from allspark_server.models.blocks import add_taps, begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def qwen3(config: ModelConfig) -> Graph:
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
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
        add_taps(graph, x, layer)
    return finish(graph, x)


ARCHITECTURES = with_classifiers({
    "Qwen3ForCausalLM": Architecture(qwen3, "qwen3", "Qwen3", head_dim=128, has_bias_fields=True),
}, "Qwen3")
