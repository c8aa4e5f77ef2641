"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's network with q, k, v as one tensor and gate, up as another. Some use
LongRoPE, a sliding window on all layers, or a rotary embedding of a part of a head's features.
"""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def phi3(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(sliced_qkv(graph, h, f"{prefix}.self_attn.qkv_proj"))
        attended = graph.span_attention(qkv, layer, window=config.window(layer))
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", ("gate_up_proj", "down_proj")))
    return finish(graph, x)


ARCHITECTURES = {"Phi3ForCausalLM": Architecture(
    phi3, "phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", kv_heads_required=False, windows=True, layer_types=False,
    rope_types=("default", "longrope"), partial_rotary=1.0)}
