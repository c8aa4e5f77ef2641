"""Baichuan and Baichuan 2: Llama's network with queries, keys and values as one tensor; 13B with ALiBi (Press et al.,
2022) instead of rotary embedding. Loading normalizes the rows of Baichuan 2's head (weights/views.py).
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import OWN_CODE, Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.fields import MAX_POSITIONS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head (Press et al., 2022): powers of 2 ** (-8 / n), where n is the largest power of two up to
    `heads`. Heads beyond n take every other slope of 2 n heads.
    """
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return tuple(slopes + [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)])


def baichuan(config: ModelConfig) -> Graph:
    """Builds the network."""
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
    """Baichuan 2 is the version with normalized rows in its head; only its config.json has z_loss_weight."""
    return {"alibi": fields.need("alibi", bool), "unit_head": "z_loss_weight" in fields.values}


def _translate(fields: Fields) -> Fields:
    """13B, which has ALiBi instead of rotary embedding, is the version whose config.json has only model_max_length."""
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
