"""Arcee (AFM): Llama's network, with MLPs without a gate; their activation is max(x, 0)^2."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, output_projection, plain_mlp, qkv_projection
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def arcee(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        y = plain_mlp(graph, h, f"{prefix}.mlp", graph.intermediate, bias=config.mlp_bias)
        graph.add(x, graph.all_reduce(y))
    return finish(graph, x)


ARCHITECTURES = {"ArceeForCausalLM": Architecture(arcee, "arcee", "Arcee (AFM)", kv_heads_required=False,
                                                  has_bias_fields=True, activation=("relu2",))}
