"""Qwen1.5, Qwen2 and Qwen2.5: biases on queries, keys and values; grouped-query or multi-head attention."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, with_classifiers
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ModelConfig


def qwen2_layer(graph: Graph, x: Tensor, prefix: str, layer: int) -> None:
    """Adds a layer whose tensors' names begin with the prefix."""
    h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
    qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=True))
    graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn"))
    h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
    graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))


def qwen2(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        qwen2_layer(graph, x, f"model.layers.{layer}", layer)
    return finish(graph, x)


ARCHITECTURES = with_classifiers({"Qwen2ForCausalLM": Architecture(qwen2, "qwen2", "Qwen1.5, Qwen2, Qwen2.5")}, "Qwen2")
