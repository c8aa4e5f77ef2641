"""Hunyuan, dense and with experts: Llama's network; query and key heads are normalized after the rotary embedding,
whose base a fixed factor (NTK alpha) stretches.
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
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ExpertConfig, ModelConfig


def hunyuan(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        graph.head_norm(qkv, 0, f"{prefix}.self_attn.query_layernorm.weight")
        graph.head_norm(qkv, 1, f"{prefix}.self_attn.key_layernorm.weight")
        attended = graph.span_attention(qkv, layer)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        if config.experts is None:
            graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
        else:
            y = routed_experts(graph, h, f"{prefix}.mlp", router="gate.wg")
            graph.add(x, graph.all_reduce(graph.add(y, shared_expert(graph, h, f"{prefix}.mlp", "shared_mlp"))))
    return finish(graph, x)


def _translate(fields: Fields) -> Fields:
    """Scaling of type "dynamic" with an alpha is a larger base, whatever the length."""
    reject_other_values(fields, {"use_qk_norm": True, "use_cla": False})
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    values = fields.get(name, dict, {})
    rope = Fields(values, fields.path, f"{name}.")
    kind = rope.get("rope_type", str) or rope.get("type", str)
    if kind != "dynamic" or not rope.get("alpha", float):
        return fields
    heads = fields.need_positive("num_attention_heads")
    dim = fields.get("head_dim", int) or fields.need_positive("hidden_size") // heads
    if dim < 4:
        raise fields.error("head_dim", f"is {dim}: with an alpha of rope_scaling it must be at least 4")
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 1e4))
    scaled: dict[str, Any] = {"rope_theta": theta * rope.need_positive("alpha", float) ** (dim / (dim - 2))}
    return translated(fields, rope_scaling=None, rope_parameters=scaled)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    """Sizes are numbers, or lists with the same number for each layer."""
    for name in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        value = fields.values.get(name)
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise fields.error(name, f"is {value!r}: only layers of the same size are served")
            fields = translated(fields, **{name: value[0]})
    reject_other_values(fields, {"num_shared_expert": 1, "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True,
                                 "moe_intermediate_size": fields.values.get("intermediate_size")})
    topk = "moe_topk" if "moe_topk" in fields.values else "num_experts_per_tok"
    return routed(fields, intermediate="intermediate_size", normalized=True, per_token=topk,
                  shared=fields.need_positive("intermediate_size"))


_COMMON: dict[str, Any] = {"kv_heads_required": False, "has_bias_fields": True, "translate": _translate}

ARCHITECTURES = {
    "HunYuanDenseV1ForCausalLM": Architecture(hunyuan, "hunyuan_v1_dense", "Hunyuan (dense)", **_COMMON),
    "HunYuanMoEV1ForCausalLM": Architecture(hunyuan, "hunyuan_v1_moe", "Hunyuan with experts", experts=_experts,
                                            **_COMMON),
}
