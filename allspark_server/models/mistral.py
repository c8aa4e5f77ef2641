"""Mistral and Ministral: Llama without biases, with a sliding window on all layers, some or none."""

from __future__ import annotations

from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.config import ModelConfig
from allspark_server.models.graph import Graph


def mistral(config: ModelConfig) -> Graph:
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=False))
        attended = graph.span_attention(qkv, layer, window=config.window(layer))
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
    return finish(graph, x)
