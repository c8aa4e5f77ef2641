"""Hunyuan (dense): Llama's network; query and key heads are normalized after the rotary embedding, whose base a fixed
factor (NTK alpha) stretches.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


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
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
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


ARCHITECTURES = {"HunYuanDenseV1ForCausalLM": Architecture(hunyuan, "hunyuan_v1_dense", "Hunyuan (dense)",
                                                           kv_heads_required=False, has_bias_fields=True,
                                                           translate=_translate)}
