"""AFMoE (Arcee's Trinity): a gate for each value of attention, norms before and after attention and MLP, windows and a
rotary embedding in most layers and neither in the others; a few dense layers, then experts behind a sigmoid router with
a correction, and shared ones.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values, translated
from allspark_server.models.blocks import (
    begin,
    finish,
    gated_mlp,
    output_projection,
    qkv_projection,
    routed_experts,
    shared_expert,
)
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import MAX_EXPERTS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ExpertConfig, ModelConfig


def _attention(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    config = graph.config
    qkv = qkv_projection(graph, x, prefix, bias=config.attention_bias)
    graph.head_norm(qkv, 0, f"{prefix}.q_norm.weight")
    graph.head_norm(qkv, 1, f"{prefix}.k_norm.weight")
    if layer not in config.unrotated:
        graph.rope(qkv)
    attended = graph.span_attention(qkv, layer, window=config.window(layer))
    weight, _ = graph.packed(prefix, ("gate_proj",), (graph.q_heads,), config.hidden_size, False)
    graph.sigmoid_gate(attended, graph.linear(x, weight, None, out="attention_gate"))
    return output_projection(graph, attended, prefix, bias=config.attention_bias)


def _mlp(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    if layer in graph.experts.dense_layers:
        return gated_mlp(graph, x, prefix)
    y = routed_experts(graph, x, prefix, router="router.gate", correction="expert_bias")
    if graph.experts.shared_size:
        graph.add(y, shared_expert(graph, x, prefix, "shared_experts"))
    return graph.all_reduce(y)


def afmoe(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        y = _attention(graph, graph.rms_norm(x, f"{prefix}.input_layernorm.weight"), f"{prefix}.self_attn", layer)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_attention_layernorm.weight", "branch_normed"))
        y = _mlp(graph, graph.rms_norm(x, f"{prefix}.pre_mlp_layernorm.weight"), f"{prefix}.mlp", layer)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_mlp_layernorm.weight", "branch_normed"))
    return finish(graph, x)


def _translate(fields: Fields) -> Fields:
    reject_other_values(fields, {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1,
                                 "num_expert_groups": 1, "num_limited_groups": 1})
    if fields.values.get("sliding_window", 1024) is None:
        raise fields.error("sliding_window", "is null: expected int")
    every = "global_attn_every_n_layers"
    return translated(fields, sliding_window_pattern=fields.need_positive(every) if every in fields.values else 4)


def _more(fields: Fields) -> dict[str, Any]:
    scaled = fields.get("mup_enabled", bool, False)
    return {"embedding_scale": fields.need_positive("hidden_size") ** 0.5} if scaled else {}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    dense, shared = fields.get("num_dense_layers", int, 1), fields.get("num_shared_experts", int, 2)
    for name, value, most in (("num_dense_layers", dense, layers), ("num_shared_experts", shared, MAX_EXPERTS)):
        if not 0 <= value <= most:
            raise fields.error(name, f"is {value}: it must be from 0 to {most}")
    scale = fields.need_positive("route_scale", float) if "route_scale" in fields.values else 1.0
    return routed(fields, intermediate="moe_intermediate_size", normalized=True, scores="sigmoid", scale=scale,
                  shared=shared * fields.need_positive("moe_intermediate_size"), dense=tuple(range(dense)))


ARCHITECTURES = {"AfmoeForCausalLM": Architecture(afmoe, "afmoe", "Arcee (Trinity)", kv_heads_required=False,
                                                  head_dim=128, has_bias_fields=True, windows=True, window=1024,
                                                  window_pattern=4, nope_globals=True, experts=_experts, more=_more,
                                                  translate=_translate)}
