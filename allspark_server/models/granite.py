"""Granite 3, dense and with experts: Llama's network with factors for the embedding, attention's scores, what a layer
adds to the residual stream, and the logits.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection, routed_experts
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ExpertConfig, ModelConfig

#: tensors of all experts of a layer
STACKS = ("input_linear.weight", "output_linear.weight")


def granite(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)

    def add(y: Tensor) -> None:
        graph.add(x, y if config.residual_scale == 1 else graph.scale(y, config.residual_scale))

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        attended = graph.span_attention(qkv, layer, scale=config.query_scale)
        add(output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        if config.experts is None:
            add(gated_mlp(graph, h, f"{prefix}.mlp", bias=config.mlp_bias))
        else:
            y = routed_experts(graph, h, f"{prefix}.block_sparse_moe", router="router.layer", stacks=STACKS)
            add(graph.all_reduce(y))
    return finish(graph, x)


def factors(fields: Fields) -> dict[str, Any]:
    """The factors, of which absent ones are 1."""
    def factor(name: str) -> float:
        return fields.need_positive(name, float) if name in fields.values else 1.0

    return {"embedding_scale": factor("embedding_multiplier"), "query_scale": factor("attention_multiplier"),
            "residual_scale": factor("residual_multiplier"), "logit_scale": 1 / factor("logits_scaling")}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return routed(fields, intermediate="intermediate_size", normalized=True, number="num_local_experts", stacked=True)


_COMMON: dict[str, Any] = {"kv_heads_required": False, "has_bias_fields": True, "more": factors}

ARCHITECTURES = {
    "GraniteForCausalLM": Architecture(granite, "granite", "Granite 3 (dense)", **_COMMON),
    "GraniteMoeForCausalLM": Architecture(granite, "granitemoe", "Granite 3 with experts", experts=_experts, **_COMMON),
}
