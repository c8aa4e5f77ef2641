"""Qwen3-Next, Qwen3.5 and Qwen3.6: three of four layers have the gated delta rule behind a convolution; the others have
attention with a gate. Norms multiply by 1 + w. With experts, each layer has a shared one with a gate.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, text_part, translated
from allspark_server.models.blocks import (
    begin,
    finish,
    gated_mlp,
    gated_shared_expert,
    linear_of_parts,
    of_each_head,
    output_projection,
    routed_experts,
)
from allspark_server.models.draft_heads import mtp_head
from allspark_server.models.expert_fields import qwen_experts
from allspark_server.models.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor
from allspark_server.models.network import DeltaConfig, ExpertConfig, ModelConfig
from allspark_server.models.vision import qwen_tower
from allspark_server.weights.shard import Split


def _attention(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    config = graph.config
    queries, keys, bias = Block(graph.q_heads.width, graph.q_heads), graph.kv_heads, config.attention_bias
    q = [of_each_head(f"{prefix}.q_proj.weight", config.num_heads, (config.head_dim,) * 2, i) for i in (0, 1)]
    kv = tuple(Part(f"{prefix}.{name}.weight", keys.width, keys) for name in ("k_proj", "v_proj"))
    qkv = linear_of_parts(graph, x, f"{prefix}.q_proj+k_proj+v_proj", q[0] + kv,
                          (queries,) + 2 * (Block(keys.width, keys),), "qkv", bias)
    gate = linear_of_parts(graph, x, f"{prefix}.gate", q[1], (queries,), "attention_gate", bias)
    graph.head_norm(qkv, 0, f"{prefix}.q_norm.weight", unit_offset=1)
    graph.head_norm(qkv, 1, f"{prefix}.k_norm.weight", unit_offset=1)
    attended = graph.sigmoid_gate(graph.span_attention(graph.rope(qkv), layer), gate)
    return output_projection(graph, attended, prefix, bias=bias)


def _delta(graph: Graph, x: Tensor, prefix: str, delta: DeltaConfig, interleaved: bool) -> Tensor:
    """interleaved: the checkpoint has one tensor of queries, keys, values and output gates, and one of b and a, ordered
    by key head; otherwise four tensors.
    """
    values = Split(delta.key_heads, delta.group * delta.value_dim)
    splits = (Split(delta.key_heads, delta.key_dim),) * 2 + (values,)
    heads, hidden = Split(delta.key_heads, delta.group), graph.config.hidden_size
    if interleaved:
        sizes = tuple(split.size for split in splits) + (values.size,)
        rows = [of_each_head(f"{prefix}.in_proj_qkvz.weight", delta.key_heads, sizes, i) for i in range(4)]
        gates = [of_each_head(f"{prefix}.in_proj_ba.weight", delta.key_heads, (delta.group,) * 2, i) for i in (1, 0)]
        blocks = tuple(Block(split.width, split) for split in splits)
        qkv = linear_of_parts(graph, x, f"{prefix}.qkv", rows[0] + rows[1] + rows[2], blocks, "qkv_of_state")
        z = linear_of_parts(graph, x, f"{prefix}.z", rows[3], (Block(values.width, values),), "output_gate")
        ab = linear_of_parts(graph, x, f"{prefix}.a+b", gates[0] + gates[1], 2 * (Block(heads.width, heads),),
                             "state_gates")
    else:
        qkv = graph.linear(x, graph.sliced(f"{prefix}.in_proj_qkv", splits, hidden, False)[0], None, "qkv_of_state")
        z = graph.linear(x, graph.matrix(f"{prefix}.in_proj_z.weight", values.width, hidden, row_split=values), None,
                         "output_gate")
        both = graph.packed(prefix, ("in_proj_a", "in_proj_b"), (heads, heads), hidden, False)[0]
        ab = graph.linear(x, both, None, "state_gates")
    mixed = graph.causal_conv(qkv, f"{prefix}.conv1d", taps=delta.taps)
    y = graph.gated_delta(mixed, ab, prefix, delta.key_dim, delta.value_dim)
    y = graph.gated_rms_norm(y, z, f"{prefix}.norm.weight", delta.value_dim)
    return graph.row_parallel_linear(y, f"{prefix}.out_proj", values, False, out="branch")


def _layer(graph: Graph, x: Tensor, prefix: str, layer: int, interleaved: bool = False) -> None:
    config = graph.config
    h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight", unit_offset=1)
    if config.delta is not None and layer in config.delta.layers:
        graph.add(x, _delta(graph, h, f"{prefix}.linear_attn", config.delta, interleaved))
    else:
        graph.add(x, _attention(graph, h, f"{prefix}.self_attn", layer))
    h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight", unit_offset=1)
    if config.experts is None or layer in config.experts.dense_layers:
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
    else:
        y = routed_experts(graph, h, f"{prefix}.mlp")
        graph.add(x, graph.all_reduce(graph.add(y, gated_shared_expert(graph, h, f"{prefix}.mlp"))))


def _qwen3_next(config: ModelConfig, interleaved: bool) -> Graph:
    graph, x = begin(config)
    for layer in range(config.num_layers):
        _layer(graph, x, f"model.layers.{layer}", layer, interleaved)
    return finish(graph, x, unit_offset=1)


def qwen3_next(config: ModelConfig) -> Graph:
    """Builds Qwen3-Next's network."""
    return _qwen3_next(config, interleaved=True)


def qwen3_5(config: ModelConfig) -> Graph:
    """Builds the network of Qwen3.5 and Qwen3.6."""
    return _qwen3_next(config, interleaved=False)


def _more(fields: Fields) -> dict[str, Any]:
    """The layers with the gated delta rule: layer_types, or every layer but each full_attention_interval-th."""
    count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    interval = fields.get("full_attention_interval", int, 4)
    if interval < 1:
        raise fields.error("full_attention_interval", f"is {interval}: it must be positive")
    types = fields.get("layer_types", list) or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if len(types) != count or set(types) - {"linear_attention", "full_attention"} or "full_attention" not in types:
        raise fields.error("layer_types", f"must hold linear_attention or full_attention, which at least one layer "
                                          f"has, for each of {count} layers")

    def size(name: str, default: int, most: int) -> int:
        return fields.need_positive(name, most=most) if name in fields.values else default

    keys, values = size("linear_num_key_heads", 16, 1 << 16), size("linear_num_value_heads", 32, 1 << 16)
    if values % keys:
        raise fields.error("linear_num_value_heads", f"is {values}: linear_num_key_heads ({keys}) must divide it")
    layers = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    return {"delta": DeltaConfig(layers, keys, values, size("linear_key_head_dim", 128, MAX_HEAD_DIM),
                                 size("linear_value_head_dim", 128, MAX_HEAD_DIM),
                                 size("linear_conv_kernel_dim", 4, 64))}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    if "norm_topk_prob" not in fields.values:
        fields = translated(fields, norm_topk_prob=True)
    return qwen_experts(fields, layers, fields.need_positive("shared_expert_intermediate_size"))


def _text(fields: Fields) -> Fields:
    """The text part of a multimodal checkpoint."""
    return _sized(text_part(fields))


def _sized(fields: Fields) -> Fields:
    """Qwen3.5 with experts has no dense layers, and no size of them."""
    if "intermediate_size" in fields.values or "moe_intermediate_size" not in fields.values:
        return fields
    return Fields({**fields.values, "intermediate_size": fields.values["moe_intermediate_size"]}, fields.path,
                  fields.prefix)


_COMMON: dict[str, Any] = {"head_dim": 256, "has_bias_fields": True, "partial_rotary": 0.25, "more": _more,
                           "layer_types": False, "draft_head": mtp_head(_layer)}
_SEES: dict[str, Any] = {"translate": _text, "stored_as": "text_part",
                         "tower": lambda fields: qwen_tower(fields, "Qwen3.5", "qwen3")}

ARCHITECTURES = {
    "Qwen3NextForCausalLM": Architecture(qwen3_next, "qwen3_next", "Qwen3-Next", experts=_experts, **_COMMON),
    "Qwen3_5ForCausalLM": Architecture(qwen3_5, "qwen3_5_text", "Qwen3.5, Qwen3.6", **_COMMON),
    "Qwen3_5ForConditionalGeneration": Architecture(qwen3_5, "qwen3_5", "Qwen3.5, Qwen3.6 that see", **_SEES,
                                                    **_COMMON),
    "Qwen3_5MoeForCausalLM": Architecture(qwen3_5, "qwen3_5_moe_text", "Qwen3.5 and Qwen3.6 with experts",
                                          experts=_experts, translate=_sized, **_COMMON),
    "Qwen3_5MoeForConditionalGeneration": Architecture(qwen3_5, "qwen3_5_moe",
                                                       "Qwen3.5 and Qwen3.6 with experts that see",
                                                       experts=_experts, **_SEES, **_COMMON),
}
