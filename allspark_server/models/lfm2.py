"""LFM2: most layers have a short convolution between two gates of each value; the others have attention with norms of
query and key heads. With experts: a few dense layers, then experts behind a sigmoid router with a correction.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import (
    begin,
    finish,
    gated_mlp,
    linear_of_parts,
    output_projection,
    qkv_projection,
    routed_experts,
)
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor
from allspark_server.models.network import ConvConfig, ExpertConfig, ModelConfig
from allspark_server.weights.shard import Split

_MLP = ("w1", "w3", "w2")


def _short_convolution(graph: Graph, x: Tensor, prefix: str, conv: ConvConfig) -> Tensor:
    """out(c * convolution(b * x)), with b, c and x from one matrix."""
    hidden = graph.config.hidden_size
    unit = gcd(hidden, 32)
    channels = Split(hidden // unit, unit)

    def third(index: int, out: str) -> Tensor:
        rows = (Part(f"{prefix}.in_proj.weight", hidden, channels, index * hidden, 3 * hidden),)
        return linear_of_parts(graph, x, f"{prefix}.{out}", rows, (Block(hidden, channels),), out, conv.bias)

    b, c, values = third(0, "conv_gate_in"), third(1, "conv_gate_out"), third(2, "conv_values")
    y = graph.causal_conv(graph.multiply(values, b), f"{prefix}.conv", taps=conv.taps, bias=conv.bias, activated=False)
    return graph.row_parallel_linear(graph.multiply(y, c), f"{prefix}.out_proj", channels, conv.bias, out="branch")


def lfm2(config: ModelConfig) -> Graph:
    """Builds the network."""
    assert config.conv is not None
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.operator_norm.weight")
        if layer in config.conv.layers:
            graph.add(x, _short_convolution(graph, h, f"{prefix}.conv", config.conv))
        else:
            attention = f"{prefix}.self_attn"
            qkv = qkv_projection(graph, h, attention, bias=False)
            graph.head_norm(qkv, 0, f"{attention}.q_layernorm.weight")
            graph.head_norm(qkv, 1, f"{attention}.k_layernorm.weight")
            graph.add(x, output_projection(graph, graph.span_attention(graph.rope(qkv), layer), attention, "out_proj"))
        h = graph.rms_norm(x, f"{prefix}.ffn_norm.weight")
        if config.experts is None or layer in config.experts.dense_layers:
            graph.add(x, gated_mlp(graph, h, f"{prefix}.feed_forward", _MLP))
        else:
            y = routed_experts(graph, h, f"{prefix}.feed_forward", _MLP,
                               correction="expert_bias" if config.experts.corrected else "")
            graph.add(x, graph.all_reduce(y))
    return finish(graph, x, "model.embedding_norm.weight")


def _fields(fields: Fields) -> Fields:
    """The same fields under the names that other families have; the intermediate size as transformers computes it."""
    values: dict[str, Any] = {"rms_norm_eps": fields.get("norm_eps", float, 1e-5)}
    if "tie_embedding" in fields.values:
        values["tie_word_embeddings"] = fields.values["tie_embedding"]
    size = "block_ff_dim" if "block_ff_dim" in fields.values else "intermediate_size"
    values["intermediate_size"] = inner = fields.need_positive(size)
    if "moe_intermediate_size" not in fields.values and fields.get("block_auto_adjust_ff_dim", bool, True):
        multiple = fields.get("block_multiple_of", int, 256)
        if multiple < 1:
            raise fields.error("block_multiple_of", f"is {multiple}: it must be positive")
        inner = int(fields.get("block_ffn_dim_multiplier", float, 1.0) * int(2 * inner / 3))
        values["intermediate_size"] = -(-inner // multiple) * multiple
    return translated(fields, **values)


def _more(fields: Fields) -> dict[str, Any]:
    count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    attention = fields.get("full_attn_idxs", list) or list(range(count))
    types = fields.get("layer_types", list) or [
        "full_attention" if i in attention else "conv" for i in range(count)]
    if len(types) != count or set(types) - {"conv", "full_attention"} or "full_attention" not in types:
        raise fields.error("layer_types", f"must hold conv or full_attention, which at least one layer has, for each "
                                          f"of {count} layers")
    taps = fields.need_positive("conv_L_cache", most=64) if "conv_L_cache" in fields.values else 3
    layers = tuple(i for i, kind in enumerate(types) if kind == "conv")
    return {"conv": ConvConfig(layers, taps, fields.get("conv_bias", bool, False))}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    dense = fields.get("num_dense_layers", int, 2)
    if dense < 0:
        raise fields.error("num_dense_layers", f"is {dense}: it must not be negative")
    return routed(fields, intermediate="moe_intermediate_size", normalized=fields.get("norm_topk_prob", bool, True),
                  dense=tuple(range(min(dense, layers))), scores="sigmoid",
                  corrected=fields.get("use_expert_bias", bool, True),
                  scale=fields.get("routed_scaling_factor", float, 1.0))


_COMMON: dict[str, Any] = {"rope_theta": 1e6, "tied": True, "layer_types": False, "translate": _fields, "more": _more}

ARCHITECTURES = {
    "Lfm2ForCausalLM": Architecture(lfm2, "lfm2", "LFM2", **_COMMON),
    "Lfm2MoeForCausalLM": Architecture(lfm2, "lfm2_moe", "LFM2 with experts", experts=_experts, **_COMMON),
}
