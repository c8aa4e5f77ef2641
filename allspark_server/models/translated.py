"""config.json of families that transformers does not have, in the terms of those that it has.

Their checkpoints bring code of their own, which is never run: what it does is described here and in the model files. A
setting that would make it do something else is refused.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.fields import MAX_LAYERS, MAX_POSITIONS, Fields

CHATGLM_ROTATED = 0.5  # of a head's features


def _refuse(fields: Fields, served: dict[str, Any]) -> None:
    """Raises AllSparkError for a field that is there with another value than the served one."""
    for name, value in served.items():
        found = fields.values.get(name, value)
        if found != value and found is not None:
            raise fields.error(name, f"is {found!r}: only {value!r} is served")


def _translated(fields: Fields, **values: Any) -> Fields:
    return Fields({**fields.values, **values}, fields.path)


def gemma3(fields: Fields) -> Fields:
    """The text part of a Gemma 3 with a vision tower: its text_config holds what differs from the defaults."""
    values = fields.need("text_config", dict)
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
                "max_position_embeddings": 131_072}
    outer = {name: fields.values[name] for name in ("dtype", "torch_dtype", "eos_token_id", "quantization_config",
                                                    "tie_word_embeddings") if name in fields.values}
    return Fields({**defaults, **outer, **values}, fields.path, "text_config.")


def gpt_oss(fields: Fields) -> Fields:
    """Without a rotary embedding it has transformers' default, which is the published models'."""
    if fields.get("rope_parameters", dict) or fields.get("rope_scaling", dict):
        return fields
    return _translated(fields, rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                             "truncate": False, "original_max_position_embeddings": 4096})


def qwen(fields: Fields) -> Fields:
    """The first Qwen: gate and up have half of intermediate_size each."""
    _refuse(fields, {"no_bias": True, "scale_attn_weights": True, "rotary_pct": 1.0, "tie_word_embeddings": False,
                     "use_cache_quantization": False})
    inner = fields.need_positive("intermediate_size")
    if inner % 2:
        raise fields.error("intermediate_size", f"is {inner}: it must be even")
    return _translated(
        fields, intermediate_size=inner // 2, num_key_value_heads=fields.need_positive("num_attention_heads"),
        head_dim=fields.need_positive("kv_channels"), rms_norm_eps=fields.need_positive("layer_norm_epsilon", float),
        rope_theta=fields.need_positive("rotary_emb_base", float))


def chatglm(fields: Fields) -> Fields:
    """ChatGLM2, ChatGLM3 and GLM-4: rope_ratio multiplies the rotary base."""
    if "inner_hidden_size" in fields.values:
        raise fields.error("inner_hidden_size", "is of the first ChatGLM, which is not supported: ChatGLM2, ChatGLM3 "
                                                "and GLM-4 are")
    _refuse(fields, {"add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "multi_query_attention": True,
                     "apply_residual_connection_post_layernorm": False, "original_rope": True, "pre_seq_len": None,
                     "quantization_bit": 0, "tie_word_embeddings": False, "interleaved_qkv": False})
    if fields.get("pre_seq_len", int):
        raise fields.error("pre_seq_len", f"is {fields.values['pre_seq_len']}: prefix tuning is not served")
    ratio = fields.need_positive("rope_ratio", float) if fields.get("rope_ratio", float) is not None else 1.0
    if ratio != 1 and "chatglm2" in fields.get("_name_or_path", str, "").lower():
        raise fields.error("rope_ratio", f"is {ratio}: of ChatGLM2, whose code divides positions by it, only 1 is "
                                         "served")
    return _translated(
        fields, intermediate_size=fields.need_positive("ffn_hidden_size"),
        num_hidden_layers=fields.need_positive("num_layers", most=MAX_LAYERS),
        num_key_value_heads=fields.need_positive("multi_query_group_num"),
        head_dim=fields.need_positive("kv_channels"), vocab_size=fields.need_positive("padded_vocab_size"),
        rms_norm_eps=fields.need_positive("layernorm_epsilon", float),
        max_position_embeddings=fields.need_positive("seq_length", most=MAX_POSITIONS),
        attention_bias=fields.get("add_qkv_bias", bool, False), rope_theta=10000.0 * ratio,
        partial_rotary_factor=CHATGLM_ROTATED)


def baichuan(fields: Fields) -> Fields:
    """7B, and 13B with ALiBi instead of rotary embedding, whose config.json has model_max_length alone."""
    _refuse(fields, {"tie_word_embeddings": False})
    alibi = "max_position_embeddings" not in fields.values
    length = "model_max_length" if alibi else "max_position_embeddings"
    return _translated(fields, num_key_value_heads=fields.need_positive("num_attention_heads"), alibi=alibi,
                       max_position_embeddings=fields.need_positive(length, most=MAX_POSITIONS))
