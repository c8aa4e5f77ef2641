"""The first Qwen: queries, keys and values as one tensor with biases; beyond the length that it was trained for, a
rotary base that grows with the prompt, and queries with the logarithm of their position.
"""

from __future__ import annotations

from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def qwen(config: ModelConfig) -> Graph:
    graph, x = begin(config, "transformer.wte.weight")
    for layer in range(config.num_layers):
        prefix = f"transformer.h.{layer}"
        h = graph.rms_norm(x, f"{prefix}.ln_1.weight")
        qkv = graph.rope(sliced_qkv(graph, h, f"{prefix}.attn.c_attn", bias=True))
        attended = graph.span_attention(qkv, layer, **({"logn": config.logn} if config.logn else {}))
        graph.add(x, output_projection(graph, attended, f"{prefix}.attn", "c_proj"))
        h = graph.rms_norm(x, f"{prefix}.ln_2.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", ("w2", "w1", "c_proj")))
    return finish(graph, x, "transformer.ln_f.weight")
