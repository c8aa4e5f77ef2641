"""Bamba: most layers have Mamba2's state space, the others attention with half of each head rotated; each has a gated
MLP.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.mamba import expanded_mamba, mamba_mixer
from allspark_server.models.network import ModelConfig


def bamba(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        if config.mamba is not None and layer in config.mamba.layers:
            y = mamba_mixer(graph, h, f"{prefix}.mamba", config.mamba)
        else:
            qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
            y = output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn", bias=bias)
        graph.add(x, y)
        h = graph.rms_norm(x, f"{prefix}.pre_ff_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.feed_forward", bias=config.mlp_bias))
    return finish(graph, x, "model.final_layernorm.weight")


def _more(fields: Fields) -> dict[str, Any]:
    count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    attention = fields.need("attn_layer_indices", list)
    if not attention or not all(isinstance(i, int) and 0 <= i < count for i in attention):
        raise fields.error("attn_layer_indices", f"is {attention!r}: expected numbers of layers, at least one, from 0 "
                                                 f"to {count - 1}")
    layers = tuple(i for i in range(count) if i not in attention)
    return {"mamba": expanded_mamba(fields, layers) if layers else None}


ARCHITECTURES = {"BambaForCausalLM": Architecture(bamba, "bamba", "Bamba", kv_heads_required=False,
                                                  has_bias_fields=True, partial_rotary=0.5, layer_types=False,
                                                  more=_more)}
