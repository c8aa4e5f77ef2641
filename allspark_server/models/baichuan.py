"""Baichuan and Baichuan 2: Llama's network with queries, keys and values as one tensor; 13B with ALiBi (Press et al.,
2022) instead of rotary embedding. The rows of Baichuan 2's head are normalized (weights/checkpoint.py).
"""

from __future__ import annotations

from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Powers of 2 ** (-8 / n) for the largest power of two n that is no more than `heads`; the heads beyond have every
    other one of those for 2 n.
    """
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return tuple(slopes + [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)])


def baichuan(config: ModelConfig) -> Graph:
    graph, x = begin(config)
    slopes = None
    if config.alibi:
        slopes = graph.head_values("alibi.slopes", graph.q_heads, alibi_slopes(config.num_heads))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = sliced_qkv(graph, h, f"{prefix}.self_attn.W_pack")
        if not config.alibi:
            graph.rope(qkv)
        attended = graph.span_attention(qkv, layer, slopes=slopes)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
    return finish(graph, x)
