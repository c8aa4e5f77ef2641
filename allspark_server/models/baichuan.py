"""Baichuan and Baichuan 2: Llama's network with queries, keys and values as one tensor; 13B with ALiBi (Press et al.,
2022) instead of rotary embedding. The rows of Baichuan 2's head are normalized (weights/checkpoint.py).
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import OWN_CODE, Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.fields import MAX_POSITIONS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Powers of 2 ** (-8 / n) for the largest power of two n that is no more than `heads`; the heads beyond have every
    other one of those for 2 n.
    """
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return tuple(slopes + [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)])


def baichuan(config: ModelConfig) -> Graph:
    graph, x = begin(config)
    slopes = None
    if config.alibi:
        slopes = graph.head_values("alibi.slopes", graph.q_heads, alibi_slopes(config.num_heads))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = sliced_qkv(graph, h, f"{prefix}.self_attn.W_pack")
        if not config.alibi:
            graph.rope(qkv)
        attended = graph.span_attention(qkv, layer, slopes=slopes)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp"))
    return finish(graph, x)


def _baichuan(fields: Fields) -> dict[str, Any]:
    """The rows of Baichuan 2's head are normalized; its config.json alone has z_loss_weight."""
    return {"alibi": fields.need("alibi", bool), "unit_head": "z_loss_weight" in fields.values}


def _translate(fields: Fields) -> Fields:
    """7B, and 13B with ALiBi instead of rotary embedding, whose config.json has model_max_length alone."""
    reject_other_values(fields, {"tie_word_embeddings": False})
    alibi = "max_position_embeddings" not in fields.values
    length = "model_max_length" if alibi else "max_position_embeddings"
    return translated(fields, num_key_value_heads=fields.need_positive("num_attention_heads"), alibi=alibi,
                       max_position_embeddings=fields.need_positive(length, most=MAX_POSITIONS))


_BAICHUAN: dict[str, Any] = {"checked": OWN_CODE, "translate": _translate, "more": _baichuan}

ARCHITECTURES = {
    "BaiChuanForCausalLM": Architecture(baichuan, "baichuan", "Baichuan 7B", **_BAICHUAN),
    "BaichuanForCausalLM": Architecture(baichuan, "baichuan", "Baichuan 13B, Baichuan 2", **_BAICHUAN),
}
