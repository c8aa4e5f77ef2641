"""ChatGLM2, ChatGLM3 and GLM-4 as first published: GLM-4's network (glm.py) with other names of weights, and with
queries, keys and values as one tensor.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import OWN_CODE, Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.fields import MAX_LAYERS, MAX_POSITIONS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def chatglm(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config, "transformer.embedding.word_embeddings.weight")
    for layer in range(config.num_layers):
        prefix = f"transformer.encoder.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = sliced_qkv(graph, h, f"{prefix}.self_attention.query_key_value", bias=config.attention_bias)
        attended = graph.span_attention(graph.rope(qkv, pairs="interleaved"), layer)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attention", "dense"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", ("dense_h_to_4h", "dense_4h_to_h")))
    return finish(graph, x, "transformer.encoder.final_layernorm.weight", "transformer.output_layer.weight")


_ROTATED = 0.5  # part of a head's features


def _translate(fields: Fields) -> Fields:
    """ChatGLM2, ChatGLM3 and GLM-4: rope_ratio multiplies the rotary base."""
    if "inner_hidden_size" in fields.values:
        raise fields.error("inner_hidden_size", "belongs to the first ChatGLM, which is not supported: supported are "
                                                "ChatGLM2, ChatGLM3 and GLM-4")
    reject_other_values(fields, {
        "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "multi_query_attention": True,
        "apply_residual_connection_post_layernorm": False, "original_rope": True, "pre_seq_len": None,
        "quantization_bit": 0, "tie_word_embeddings": False, "interleaved_qkv": False})
    if fields.get("pre_seq_len", int):
        raise fields.error("pre_seq_len", f"is {fields.values['pre_seq_len']}: prefix tuning is not served")
    ratio = fields.need_positive("rope_ratio", float) if fields.get("rope_ratio", float) is not None else 1.0
    if ratio != 1 and "chatglm2" in fields.get("_name_or_path", str, "").lower():
        raise fields.error("rope_ratio", f"is {ratio}: ChatGLM2's code divides positions by it; only 1 is served")
    return translated(
        fields, intermediate_size=fields.need_positive("ffn_hidden_size"),
        num_hidden_layers=fields.need_positive("num_layers", most=MAX_LAYERS),
        num_key_value_heads=fields.need_positive("multi_query_group_num"),
        head_dim=fields.need_positive("kv_channels"), vocab_size=fields.need_positive("padded_vocab_size"),
        rms_norm_eps=fields.need_positive("layernorm_epsilon", float),
        max_position_embeddings=fields.need_positive("seq_length", most=MAX_POSITIONS),
        attention_bias=fields.get("add_qkv_bias", bool, False), rope_theta=10000.0 * ratio,
        partial_rotary_factor=_ROTATED)


_CHATGLM: dict[str, Any] = {"served": "ChatGLM2, ChatGLM3, GLM-4 (9B, as first published)", "checked": OWN_CODE,
                            "has_bias_fields": True, "partial_rotary": _ROTATED, "translate": _translate}

ARCHITECTURES = {
    "ChatGLMModel": Architecture(chatglm, "chatglm", **_CHATGLM),
    "ChatGLMForConditionalGeneration": Architecture(chatglm, "chatglm", **_CHATGLM),
}
