"""Granite 4: Granite's factors; most layers have Mamba2's state space in place of attention, which has no rotary
embedding then. Each layer has a gated MLP, and experts beside it if there are some.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, output_projection, qkv_projection, routed_experts
from allspark_server.models.expert_fields import routed
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.granite import STACKS, factors
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.mamba import expanded_mamba, mamba_mixer
from allspark_server.models.network import ExpertConfig, ModelConfig


def _mlp(graph: Graph, x: Tensor, prefix: str) -> Tensor:
    inner = graph.intermediate
    weight, _ = graph.sliced(f"{prefix}.shared_mlp.input_linear", (inner, inner), graph.config.hidden_size, False)
    activated = graph.silu_mul(graph.linear(x, weight, None, out="gate_up"))
    y = graph.partial_linear(activated, f"{prefix}.shared_mlp.output_linear", inner, False, out="branch")
    if graph.config.experts is not None:
        experts = f"{prefix}.block_sparse_moe"
        graph.add(y, routed_experts(graph, x, experts, router="router.layer", stacks=STACKS, out="expert_sums"))
    return graph.all_reduce(y)


def granite_hybrid(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config, rotary=not config.unrotated)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        if config.mamba is not None and layer in config.mamba.layers:
            y = mamba_mixer(graph, h, f"{prefix}.mamba", config.mamba)
        else:
            qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=config.attention_bias)
            qkv = qkv if config.unrotated else graph.rope(qkv)
            y = output_projection(graph, graph.span_attention(qkv, layer, scale=config.query_scale),
                                  f"{prefix}.self_attn", bias=config.attention_bias)
        graph.add(x, graph.scale(y, config.residual_scale))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, graph.scale(_mlp(graph, h, prefix), config.residual_scale))
    return finish(graph, x)


def _fields(fields: Fields) -> Fields:
    """The MLP's size under the name that other families have, and the experts' under another one."""
    return translated(fields, intermediate_size=fields.get("shared_intermediate_size", int, 1024),
                      moe_intermediate_size=fields.get("intermediate_size", int))


def _more(fields: Fields) -> dict[str, Any]:
    reject_other_values(fields, {"normalization_function": "rmsnorm"})
    count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    aliases = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [aliases.get(kind, kind) for kind in fields.need("layer_types", list)]
    if len(kinds) != count or set(kinds) - {"mamba", "attention"} or "attention" not in kinds:
        raise fields.error("layer_types", f"must hold mamba or attention, which at least one layer has, for each of "
                                          f"{count} layers")
    positions = fields.get("position_embedding_type", str, "nope")
    if positions not in ("nope", "rope"):
        raise fields.error("position_embedding_type", f"is {positions!r}: expected rope or nope")
    more: dict[str, Any] = {**factors(fields), "unrotated": tuple(range(count)) if positions == "nope" else ()}
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "mamba")
    if layers:
        more["mamba"] = expanded_mamba(fields, layers)
    return more


def _experts(fields: Fields, layers: int) -> ExpertConfig | None:
    if not fields.get("num_local_experts", int, 8):
        return None
    return routed(fields, intermediate="moe_intermediate_size", normalized=True, number="num_local_experts",
                  stacked=True)


ARCHITECTURES = {"GraniteMoeHybridForCausalLM": Architecture(
    granite_hybrid, "granitemoehybrid", "Granite 4", kv_heads_required=False, has_bias_fields=True, layer_types=False,
    experts=_experts, more=_more, translate=_fields)}
