"""Gemma 2 and 3 (text): norms by 1 + w before and after attention and MLP, GELU, a scaled embedding, windows on most
layers. Gemma 2 caps scores and logits; Gemma 3 norms each query and key head, and layers with a window have a rotary
embedding of their own.
"""

from __future__ import annotations

from allspark_server.models.blocks import LOCAL, begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.graph import Graph, Tensor
from allspark_server.models.network import ModelConfig


def gemma(config: ModelConfig) -> Graph:
    graph, x = begin(config)

    def norm(y: Tensor, name: str, out: str = "normed") -> Tensor:
        return graph.rms_norm(y, f"{prefix}.{name}.weight", out, unit_offset=1)

    for layer in range(config.num_layers):
        prefix, window, bias = f"model.layers.{layer}", config.window(layer), config.attention_bias
        scores = {"scale": config.query_scale} | ({"soft_cap": config.score_cap} if config.score_cap else {})
        qkv = qkv_projection(graph, norm(x, "input_layernorm"), f"{prefix}.self_attn", bias=bias)
        if config.local_rope is not None:
            graph.head_norm(qkv, 0, f"{prefix}.self_attn.q_norm.weight", unit_offset=1)
            graph.head_norm(qkv, 1, f"{prefix}.self_attn.k_norm.weight", unit_offset=1)
        graph.rope(qkv, **({"table": LOCAL} if window and config.local_rope is not None else {}))
        attended = graph.span_attention(qkv, layer, window=window, **scores)
        y = output_projection(graph, attended, f"{prefix}.self_attn", bias=bias)
        graph.add(x, norm(y, "post_attention_layernorm", "branch_normed"))
        y = gated_mlp(graph, norm(x, "pre_feedforward_layernorm"), f"{prefix}.mlp", gelu=True)
        graph.add(x, norm(y, "post_feedforward_layernorm", "branch_normed"))
    return finish(graph, x, unit_offset=1)
