"""gpt-oss: biases everywhere, a sink for each head, every other layer with a window, experts with a clamped product."""

from __future__ import annotations

from allspark_server.models.blocks import begin, finish, output_projection, qkv_projection, routed_experts
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def gpt_oss(config: ModelConfig) -> Graph:
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix, bias = f"model.layers.{layer}", config.attention_bias
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        sinks = graph.head_values(f"{prefix}.self_attn.sinks", graph.q_heads)
        attended = graph.span_attention(qkv, layer, sinks=sinks, window=config.window(layer))
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, graph.all_reduce(routed_experts(graph, h, f"{prefix}.mlp", router="router", bias=True)))
    return finish(graph, x)
