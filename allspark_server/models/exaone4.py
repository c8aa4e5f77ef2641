"""EXAONE 4: norms only after attention and MLP, and one on each query and key head. In models with windows, the layers
without one have no rotary embedding.
"""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ModelConfig


def exaone_attention(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    """Attention with norms of query and key heads, with a rotary embedding in some layers."""
    qkv = qkv_projection(graph, x, prefix, bias=False)
    graph.head_norm(qkv, 0, f"{prefix}.q_norm.weight")
    graph.head_norm(qkv, 1, f"{prefix}.k_norm.weight")
    if layer not in graph.config.unrotated:
        graph.rope(qkv)
    return output_projection(graph, graph.span_attention(qkv, layer, window=graph.config.window(layer)), prefix)


def exaone4(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        y = exaone_attention(graph, x, f"{prefix}.self_attn", layer)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_attention_layernorm.weight"))
        y = gated_mlp(graph, x, f"{prefix}.mlp")
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_feedforward_layernorm.weight"))
    return finish(graph, x)


def without_pattern(fields: Fields) -> Fields:
    """Without windows, sliding_window_pattern means nothing."""
    if fields.values.get("sliding_window", 0) is None:
        return translated(fields, sliding_window_pattern=1)
    return fields


ARCHITECTURES = {"Exaone4ForCausalLM": Architecture(exaone4, "exaone4", "EXAONE 4", windows=True, window=4096,
                                                    window_pattern=4, nope_globals=True, translate=without_pattern)}
