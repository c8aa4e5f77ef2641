"""The first Qwen: queries, keys and values as one tensor with biases. Beyond the length of its training, the rotary
base grows with the prompt (dynamic NTK) and queries are scaled by the logarithm of their position (LogN).
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import OWN_CODE, Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.fields import MAX_POSITIONS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig, RopeConfig


def qwen(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config, "transformer.wte.weight")
    for layer in range(config.num_layers):
        prefix = f"transformer.h.{layer}"
        h = graph.rms_norm(x, f"{prefix}.ln_1.weight")
        qkv = graph.rope(sliced_qkv(graph, h, f"{prefix}.attn.c_attn", bias=True))
        logn: dict[str, Any] = {"logn": config.logn} if config.logn else {}
        attended = graph.span_attention(qkv, layer, **logn)
        graph.add(x, output_projection(graph, attended, f"{prefix}.attn", "c_proj"))
        h = graph.rms_norm(x, f"{prefix}.ln_2.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", ("w2", "w1", "c_proj")))
    return finish(graph, x, "transformer.ln_f.weight")


def _qwen(fields: Fields) -> dict[str, Any]:
    """seq_length is the length of the training."""
    length = fields.need_positive("seq_length", most=MAX_POSITIONS)
    more: dict[str, Any] = {"logn": length} if fields.get("use_logn_attn", bool, False) else {}
    if fields.get("use_dynamic_ntk", bool, False) and "rope_scaling" not in fields.values:
        more["rope"] = RopeConfig("dynamic", fields.need_positive("rotary_emb_base", float), original_max=length,
                                  growth="powers")
    return more


def _translate(fields: Fields) -> Fields:
    """Gate and up have half of intermediate_size each."""
    reject_other_values(fields, {"no_bias": True, "scale_attn_weights": True, "rotary_pct": 1.0,
                                 "tie_word_embeddings": False, "use_cache_quantization": False})
    inner = fields.need_positive("intermediate_size")
    if inner % 2:
        raise fields.error("intermediate_size", f"is {inner}: it must be even")
    return translated(
        fields, intermediate_size=inner // 2, num_key_value_heads=fields.need_positive("num_attention_heads"),
        head_dim=fields.need_positive("kv_channels"), rms_norm_eps=fields.need_positive("layer_norm_epsilon", float),
        rope_theta=fields.need_positive("rotary_emb_base", float))


ARCHITECTURES = {"QWenLMHeadModel": Architecture(qwen, "qwen", "Qwen (the first)", OWN_CODE, translate=_translate,
                                                 more=_qwen)}
