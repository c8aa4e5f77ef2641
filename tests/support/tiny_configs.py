"""Configurations of tiny models with awkward sizes of all families, which support/checkpoints.py writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.gemma4 import FIELDS, VOCAB


@dataclass(frozen=True)
class Spec:
    """A checkpoint: architecture family, fields of config.json, stored type, the size of a shard (None: one file), and
    the name of another architecture with the same network, which transformers does not write.
    """

    family: str
    fields: dict[str, Any] = field(hash=False)
    dtype: str = "float32"
    shard: str | None = None
    architecture: str = ""


def _rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def _sizes(hidden: int, heads: int, kv_heads: int, intermediate: int, layers: int = 3, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "vocab_size": VOCAB,
            "max_position_embeddings": 2048, **more}


CONFIGS = {
    "qwen2-gqa-tied": Spec("qwen2", _sizes(112, 14, 2, 151, tie_word_embeddings=True) | _rope("default", 1e6)),
    "qwen2-mha": Spec("qwen2", _sizes(72, 6, 6, 197, rms_norm_eps=1e-5)),
    "qwen2-yarn": Spec("qwen2", _sizes(168, 14, 2, 223, max_position_embeddings=1024) | _rope(
        "yarn", 1e6, factor=4.0, original_max_position_embeddings=256)),
    "qwen3-tied": Spec("qwen3", _sizes(72, 14, 2, 151, head_dim=24, tie_word_embeddings=True) | _rope("default", 1e6)),
    "qwen3-dynamic-bias": Spec("qwen3", _sizes(88, 6, 3, 131, head_dim=20, attention_bias=True,
                                               max_position_embeddings=128) | _rope("dynamic", 1e4, factor=2.0)),
    "llama-biases": Spec("llama", _sizes(96, 8, 8, 157, attention_bias=True, mlp_bias=True)),
    "llama-linear": Spec("llama", _sizes(96, 8, 4, 163) | _rope("linear", 1e4, factor=3.0)),
    "llama-dynamic": Spec("llama", _sizes(112, 14, 2, 149, max_position_embeddings=200) | _rope(
        "dynamic", 1e4, factor=4.0)),
    "llama3": Spec("llama", _sizes(144, 12, 4, 251, tie_word_embeddings=True, max_position_embeddings=4096) | _rope(
        "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)),
    "llama-yarn-mscale": Spec("llama", _sizes(128, 4, 1, 139, max_position_embeddings=1024) | _rope(
        "yarn", 1e4, factor=8.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=0.4,
        beta_fast=24.0, beta_slow=2.0, truncate=False)),
    "mistral-window": Spec("mistral", _sizes(104, 6, 2, 137, head_dim=18, sliding_window=150) | _rope("default", 1e6)),
    "mistral": Spec("mistral", _sizes(96, 8, 4, 163, sliding_window=None)),
    "ministral": Spec("ministral", _sizes(88, 6, 3, 131, head_dim=20, sliding_window=61, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]) | _rope("default", 1e5)),
    "smollm3": Spec("smollm3", _sizes(96, 6, 2, 141, layers=5, tie_word_embeddings=True, no_rope_layer_interval=2,
                                      pad_token_id=0)),
    "smollm3-window-biases": Spec("smollm3", _sizes(72, 6, 6, 157, attention_bias=True, mlp_bias=True,
                                                    tie_word_embeddings=False, use_sliding_window=True,
                                                    sliding_window=33, no_rope_layers=[1, 0, 0], pad_token_id=0)),
    "cwm": Spec("cwm", _sizes(96, 6, 2, 141, layers=5, head_dim=20, sliding_window=61) | _rope(
        "llama3", 1e6, factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)),
    "cwm-mha": Spec("cwm", _sizes(72, 6, 6, 131, head_dim=18, sliding_window=33, tie_word_embeddings=True, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]) | _rope(
            "yarn", 1e4, factor=4.0, original_max_position_embeddings=512)),
    "internlm3": Spec("internlm3", _sizes(112, 14, 2, 149, head_dim=20, max_position_embeddings=200) | _rope(
        "dynamic", 1e5, factor=6.0), architecture="InternLM3ForCausalLM"),
    "internlm3-biases": Spec("internlm3", _sizes(96, 6, 6, 157, head_dim=18, attention_bias=True, mlp_bias=True),
                             architecture="InternLM3ForCausalLM"),
    "mimo": Spec("qwen2", _sizes(72, 14, 2, 151, head_dim=20) | _rope("default", 6.4e5),
                 architecture="MiMoForCausalLM"),
    "mimo-mha": Spec("qwen2", _sizes(96, 6, 6, 131, max_position_embeddings=1024) | _rope(
        "yarn", 1e6, factor=4.0, original_max_position_embeddings=256), architecture="MiMoForCausalLM"),
}
"""Most are stored as float32, a few as other types."""

STORED = {
    "qwen2-bf16": Spec("qwen2", CONFIGS["qwen2-gqa-tied"].fields, "bfloat16"),
    "qwen3-bf16-sharded": Spec("qwen3", CONFIGS["qwen3-tied"].fields, "bfloat16", "100KB"),
    "llama-bf16": Spec("llama", CONFIGS["llama3"].fields, "bfloat16"),
    # Head sizes for which the CUDA backend uses tensor cores in attention; the same in float16 below.
    "llama-bf16-heads-of-64": Spec("llama", _sizes(144, 6, 2, 251, head_dim=64, attention_bias=True), "bfloat16"),
    "llama-fp16-sharded": Spec("llama", CONFIGS["llama-linear"].fields, "float16", "200KB"),
    "llama-fp16-heads-of-64": Spec("llama", _sizes(144, 6, 2, 251, head_dim=64, attention_bias=True), "float16"),
}

EXPERTS = {
    # 10 experts in slices of features on 2 and 3 ranks (9, 8 and 8 units of 8), whole ones on 4.
    "qwen3-moe": Spec("qwen3_moe", _sizes(72, 8, 4, 151, head_dim=20, moe_intermediate_size=200, num_experts=10,
                                          num_experts_per_tok=3, norm_topk_prob=True) | _rope("default", 1e6)),
    # Dense layers among the others, whole experts on several ranks.
    "qwen3-moe-mixed": Spec("qwen3_moe", _sizes(96, 6, 3, 131, 5, head_dim=16, moe_intermediate_size=37, num_experts=7,
                                                num_experts_per_tok=2, norm_topk_prob=False, mlp_only_layers=[4],
                                                decoder_sparse_step=2, attention_bias=True)),
    "qwen2-moe": Spec("qwen2_moe", _sizes(112, 14, 2, 151, moe_intermediate_size=48, num_experts=9,
                                          shared_expert_intermediate_size=131, num_experts_per_tok=4)
                      | _rope("default", 1e6)),
    "qwen2-moe-normalized": Spec("qwen2_moe", _sizes(72, 6, 6, 97, 4, moe_intermediate_size=192, num_experts=5,
                                                     shared_expert_intermediate_size=97, num_experts_per_tok=5,
                                                     norm_topk_prob=True, decoder_sparse_step=3, qkv_bias=False,
                                                     tie_word_embeddings=True)),
    "mixtral": Spec("mixtral", _sizes(96, 8, 4, 257, num_local_experts=6, num_experts_per_tok=2)),
    "mixtral-many": Spec("mixtral", _sizes(80, 4, 1, 56, 2, head_dim=24, num_local_experts=33,
                                           num_experts_per_tok=1) | _rope("default", 1e5)),
    # A dense layer, groups of experts, a shared expert of two parts; slices of 176 features.
    "glm4-moe": Spec("glm4_moe", _sizes(72, 14, 2, 151, 4, head_dim=20, moe_intermediate_size=176, n_routed_experts=12,
                                        num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
                                        routed_scaling_factor=1.7, use_qk_norm=True, num_nextn_predict_layers=0)
                     | _rope("default", 1e5, partial_rotary_factor=0.5)),
    # One group, no norms of heads; whole experts on several ranks.
    "glm4-moe-plain": Spec("glm4_moe", _sizes(96, 6, 3, 131, head_dim=16, moe_intermediate_size=37, n_routed_experts=7,
                                              num_experts_per_tok=2, first_k_dense_replace=2, norm_topk_prob=False,
                                              attention_bias=True, tie_word_embeddings=True,
                                              num_nextn_predict_layers=0) | _rope("default", 1e4)),
    "minimax-m2": Spec("minimax_m2", _sizes(72, 14, 2, 136, head_dim=20, num_local_experts=10, num_experts_per_tok=3,
                                            rotary_dim=12) | _rope("default", 5e6, partial_rotary_factor=0.6)),
    "minimax-m2-plain": Spec("minimax_m2", _sizes(90, 6, 6, 41, head_dim=18, num_local_experts=5,
                                                  num_experts_per_tok=5, tie_word_embeddings=True)),
    # A dense layer before and one after those with experts, shared experts of two parts; slices of 176 features.
    "ernie-moe": Spec("ernie4_5_moe", _sizes(72, 14, 2, 151, 4, head_dim=20, moe_intermediate_size=176, pad_token_id=0,
                                             moe_num_experts=10, moe_k=3, moe_layer_end_index=2)
                      | _rope("default", 5e5)),
    # Experts in every second layer, none shared; whole experts on several ranks.
    "ernie-moe-plain": Spec("ernie4_5_moe", _sizes(96, 6, 3, 131, head_dim=16, moe_intermediate_size=37, moe_k=2,
                                                   moe_num_experts=7, moe_num_shared_experts=0, pad_token_id=0,
                                                   moe_layer_start_index=0, moe_layer_interval=2,
                                                   tie_word_embeddings=False)),
    "olmoe": Spec("olmoe", _sizes(112, 14, 2, 200, num_experts=10, num_experts_per_tok=3, norm_topk_prob=True)
                  | _rope("default", 1e5)),
    "olmoe-plain": Spec("olmoe", _sizes(96, 6, 3, 37, num_experts=7, num_experts_per_tok=2, attention_bias=True,
                                        tie_word_embeddings=True)),
    "granite-moe": Spec("granitemoe", _sizes(112, 14, 2, 200, num_local_experts=10, num_experts_per_tok=3,
                                             embedding_multiplier=0.3, attention_multiplier=0.2,
                                             residual_multiplier=0.4, logits_scaling=3.0, tie_word_embeddings=True,
                                             pad_token_id=0) | _rope("default", 1e6)),
    "granite-moe-plain": Spec("granitemoe", _sizes(72, 6, 6, 37, num_local_experts=7, num_experts_per_tok=7,
                                                   attention_bias=True, pad_token_id=0)),
    # As glm4-moe, with windows on the last layers.
    "dots1": Spec("dots1", _sizes(72, 14, 2, 151, 4, head_dim=20, moe_intermediate_size=176, n_routed_experts=12,
                                  num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
                                  first_k_dense_replace=1, routed_scaling_factor=1.7, norm_topk_prob=True,
                                  sliding_window=61, max_window_layers=2) | _rope("default", 1e5)),
    "dots1-plain": Spec("dots1", _sizes(96, 6, 3, 131, head_dim=16, moe_intermediate_size=37, n_routed_experts=7,
                                        num_experts_per_tok=2, n_shared_experts=1, attention_bias=True,
                                        sliding_window=None, tie_word_embeddings=True)),
    # Three layers with a window and rotary embedding to one without both; a dense layer, groups of experts.
    "exaone-moe": Spec("exaone_moe", _sizes(112, 14, 2, 151, 5, moe_intermediate_size=176, num_experts=12,
                                            num_experts_per_tok=3, n_group=4, topk_group=2, sliding_window=61)
                       | _rope("default", 1e6)),
    "exaone-moe-plain": Spec("exaone_moe", _sizes(72, 6, 6, 131, head_dim=18, moe_intermediate_size=37, num_experts=7,
                                                  num_experts_per_tok=2, sliding_window=33, norm_topk_prob=False,
                                                  routed_scaling_factor=1.3, num_shared_experts=2,
                                                  layer_types=["full_attention", "sliding_attention", "full_attention"],
                                                  mlp_layer_types=["sparse", "dense", "sparse"])),
    "afmoe": Spec("afmoe", _sizes(72, 14, 2, 151, 5, head_dim=20, moe_intermediate_size=176, num_experts=10,
                                  num_experts_per_tok=3, num_shared_experts=1, route_scale=1.7, mup_enabled=True,
                                  sliding_window=61) | _rope("default", 1e5)),
    "afmoe-plain": Spec("afmoe", _sizes(96, 6, 3, 131, head_dim=16, moe_intermediate_size=37, num_experts=7,
                                        num_experts_per_tok=2, num_shared_experts=2, num_dense_layers=0,
                                        attention_bias=True, tie_word_embeddings=True, sliding_window=33, layer_types=[
                                            "full_attention", "sliding_attention", "full_attention"])),
    "hunyuan-moe": Spec("hunyuan_v1_moe", _sizes(72, 14, 2, 200, head_dim=20, num_experts=10, moe_topk=3,
                                                 tie_word_embeddings=True, pad_token_id=0)
                        | _rope("dynamic", 1e4, alpha=50.0, factor=1.0)),
    "hunyuan-moe-plain": Spec("hunyuan_v1_moe", _sizes(96, 6, 3, 37, head_dim=16, num_experts=7, moe_topk=2,
                                                       attention_bias=True, pad_token_id=0)),
}
"""Models with experts, stored as float32."""

_SINKS = {"pad_token_id": 0, "sliding_window": 61, "swiglu_limit": 1.5}

GPT_OSS = {
    # 10 experts in slices of features on 2 and 3 ranks, whole ones on 4.
    "gpt-oss": Spec("gpt_oss", _sizes(72, 14, 2, 200, 4, head_dim=20, num_local_experts=10, num_experts_per_tok=3,
                                      **_SINKS) | _rope("yarn", 1.5e5, factor=8.0, truncate=False,
                                                        original_max_position_embeddings=256)),
    # Whole experts on several ranks.
    "gpt-oss-plain": Spec("gpt_oss", _sizes(90, 6, 3, 37, head_dim=18, num_local_experts=7, num_experts_per_tok=7,
                                            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                                            attention_bias=False, tie_word_embeddings=True, swiglu_alpha=0.8,
                                            **_SINKS) | _rope("default", 1e5)),
    "gpt-oss-bf16": Spec("gpt_oss", _sizes(72, 6, 2, 72, 2, head_dim=20, num_local_experts=5, num_experts_per_tok=2,
                                           **_SINKS), "bfloat16", "100KB"),
    # Whole blocks of MXFP4: slices on 2 ranks, whole experts on 3.
    "gpt-oss-blocks": Spec("gpt_oss", _sizes(96, 6, 3, 160, head_dim=18, num_local_experts=6, num_experts_per_tok=4,
                                             **_SINKS)),
}
"""gpt-oss, stored as float32 unless the name says otherwise."""

_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256,
             "partial_rotary_factor": 0.75, "short_factor": [1.0 + 0.07 * i for i in range(9)],
             "long_factor": [1.0 + 0.9 * i for i in range(9)]}

DENSE = {
    "phi3-longrope": Spec("phi3", _sizes(144, 6, 2, 151, tie_word_embeddings=True, pad_token_id=0,
                                         original_max_position_embeddings=256) | {"rope_parameters": _LONGROPE}),
    "phi3-window": Spec("phi3", _sizes(72, 6, 6, 137, sliding_window=61, pad_token_id=0)),
    "glm": Spec("glm", _sizes(72, 6, 2, 151, head_dim=20, pad_token_id=0)),
    "glm-plain": Spec("glm", _sizes(96, 8, 8, 131, head_dim=12, attention_bias=False, tie_word_embeddings=True,
                                    pad_token_id=0) | _rope("default", 1e5, partial_rotary_factor=1.0)),
    "glm4": Spec("glm4", _sizes(72, 14, 2, 151, head_dim=20, pad_token_id=0)),
    "glm4-yarn": Spec("glm4", _sizes(88, 6, 3, 131, head_dim=24, pad_token_id=0) | _rope(
        "yarn", 1e4, factor=4.0, original_max_position_embeddings=512, partial_rotary_factor=0.5)),
    "gemma2": Spec("gemma2", _sizes(84, 6, 2, 151, 4, head_dim=18, sliding_window=61, query_pre_attn_scalar=23,
                                    attn_logit_softcapping=3.0, final_logit_softcapping=3.0, tie_word_embeddings=False,
                                    pad_token_id=0)),
    "gemma2-uncapped": Spec("gemma2", _sizes(72, 4, 4, 131, head_dim=24, sliding_window=33, query_pre_attn_scalar=24,
                                             attn_logit_softcapping=None, final_logit_softcapping=4.0, layer_types=[
                                                 "full_attention", "full_attention", "sliding_attention"],
                                             attention_bias=True, pad_token_id=0)),
    "gemma3": Spec("gemma3_text", _sizes(84, 14, 2, 151, 7, head_dim=20, sliding_window=61, query_pre_attn_scalar=31,
                                         pad_token_id=0) | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "gemma3-capped": Spec("gemma3_text", _sizes(72, 6, 3, 131, head_dim=18, sliding_window=33, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"], final_logit_softcapping=7.0,
        attention_bias=True, tie_word_embeddings=False, pad_token_id=0)),
    "olmo2": Spec("olmo2", _sizes(112, 14, 2, 151, pad_token_id=0)),
    "olmo2-mha": Spec("olmo2", _sizes(72, 6, 6, 131, attention_bias=True, tie_word_embeddings=True, pad_token_id=0)
                      | _rope("default", 5e5)),
    "olmo3": Spec("olmo3", _sizes(96, 6, 2, 151, 4, sliding_window=61, pad_token_id=0) | {"rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5,
                           "original_max_position_embeddings": 256},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    "olmo3-mha": Spec("olmo3", _sizes(72, 6, 6, 131, sliding_window=33, layer_types=[
        "full_attention", "sliding_attention", "full_attention"], pad_token_id=0)),
    "seed-oss": Spec("seed_oss", _sizes(112, 14, 2, 151, head_dim=20, attention_out_bias=True, pad_token_id=0)
                     | _rope("default", 1e7)),
    "seed-oss-plain": Spec("seed_oss", _sizes(72, 6, 6, 131, head_dim=18, attention_bias=False, mlp_bias=True,
                                              tie_word_embeddings=True, pad_token_id=0)),
    "granite": Spec("granite", _sizes(112, 14, 2, 151, embedding_multiplier=0.3, attention_multiplier=0.2,
                                      residual_multiplier=0.4, logits_scaling=3.0, tie_word_embeddings=True,
                                      pad_token_id=0) | _rope("default", 1e6)),
    "granite-biases": Spec("granite", _sizes(72, 6, 3, 131, attention_bias=True, mlp_bias=True, pad_token_id=0)
                           | _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=512)),
    "ernie": Spec("ernie4_5", _sizes(72, 14, 2, 151, head_dim=20, pad_token_id=0) | _rope("default", 5e5)),
    "ernie-biases": Spec("ernie4_5", _sizes(88, 6, 3, 131, head_dim=24, use_bias=True, tie_word_embeddings=False,
                                            pad_token_id=0)),
    "hunyuan": Spec("hunyuan_v1_dense", _sizes(72, 14, 2, 151, head_dim=20, tie_word_embeddings=True, pad_token_id=0)
                    | _rope("dynamic", 1e4, alpha=50.0, factor=1.0)),
    "hunyuan-biases": Spec("hunyuan_v1_dense", _sizes(72, 6, 6, 131, head_dim=18, attention_bias=True, pad_token_id=0)),
    # Three layers with a window and rotary embedding to one without both.
    "exaone4": Spec("exaone4", _sizes(112, 14, 2, 151, 5, sliding_window=61) | _rope(
        "llama3", 1e6, factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)),
    "exaone4-mha": Spec("exaone4", _sizes(72, 6, 6, 131, head_dim=18, sliding_window=None, tie_word_embeddings=True,
                                          layer_types=["full_attention"] * 3)),
    "arcee": Spec("arcee", _sizes(112, 14, 2, 151, head_dim=20) | _rope(
        "yarn", 1e4, factor=4.0, original_max_position_embeddings=512)),
    "arcee-biases": Spec("arcee", _sizes(96, 6, 3, 131, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
}
"""Dense families whose networks are not Llama's, stored as float32."""

_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 20, "linear_value_head_dim": 12, "pad_token_id": 0}

_LATENT = {"head_dim": 8, "qk_rope_head_dim": 8, "pad_token_id": 0}

RECURRENT = {
    # A dense layer, experts in slices of features on 2 and 3 ranks; two value heads to a key head.
    "qwen3-next": Spec("qwen3_next", _sizes(72, 14, 2, 151, 5, head_dim=20, moe_intermediate_size=200, num_experts=10,
                                            num_experts_per_tok=3, shared_expert_intermediate_size=131,
                                            mlp_only_layers=[3], linear_num_key_heads=5, linear_num_value_heads=10,
                                            **_DELTA) | _rope("default", 1e6, partial_rotary_factor=0.4)),
    # Whole experts, key heads that serve one value head, biases, attention in every second layer.
    "qwen3-next-plain": Spec("qwen3_next", _sizes(96, 6, 3, 131, 4, head_dim=16, moe_intermediate_size=37,
                                                  num_experts=7, num_experts_per_tok=2, norm_topk_prob=False,
                                                  shared_expert_intermediate_size=97, attention_bias=True,
                                                  layer_types=["linear_attention", "full_attention"] * 2,
                                                  tie_word_embeddings=True, linear_num_key_heads=4,
                                                  linear_num_value_heads=4, **{**_DELTA, "linear_conv_kernel_dim": 3})
                             | _rope("default", 1e4, partial_rotary_factor=0.5)),
    "qwen3-5": Spec("qwen3_5_text", _sizes(72, 14, 2, 151, 4, head_dim=20, linear_num_key_heads=4,
                                           linear_num_value_heads=12, **_DELTA)
                    | _rope("default", 1e6, partial_rotary_factor=0.4, mrope_section=[2, 1, 1])),
    "qwen3-5-moe": Spec("qwen3_5_moe_text", _sizes(90, 6, 6, 41, 3, head_dim=18, moe_intermediate_size=41,
                                                   num_experts=5, num_experts_per_tok=5,
                                                   shared_expert_intermediate_size=33, tie_word_embeddings=True,
                                                   layer_types=["full_attention", "linear_attention",
                                                                "linear_attention"],
                                                   linear_num_key_heads=6, linear_num_value_heads=6, **_DELTA)
                        | _rope("default", 1e5, partial_rotary_factor=1 / 3, mrope_section=[1, 1, 1])),
    "lfm2": Spec("lfm2", _sizes(72, 14, 2, 151, 4, block_multiple_of=20, pad_token_id=0, head_dim=20,
                                layer_types=["conv", "conv", "full_attention", "conv"]) | _rope("default", 1e6)),
    # Biases, another number of taps, no tied embedding.
    "lfm2-biases": Spec("lfm2", _sizes(88, 6, 3, 131, 3, head_dim=24, conv_bias=True, conv_L_cache=5,
                                       full_attn_idxs=[0, 2], block_auto_adjust_ff_dim=False,
                                       tie_word_embeddings=False, pad_token_id=0)
                        | _rope("default", 1e4)),
    # A dense layer, experts in slices of features on 2 and 3 ranks.
    "lfm2-moe": Spec("lfm2_moe", _sizes(72, 6, 2, 151, 4, moe_intermediate_size=200, num_experts=10,
                                        num_experts_per_tok=3, num_dense_layers=1, pad_token_id=0,
                                        layer_types=["conv", "full_attention", "conv", "conv"])
                     | _rope("default", 1e6)),
    "lfm2-moe-plain": Spec("lfm2_moe", _sizes(88, 6, 6, 131, 3, head_dim=18, moe_intermediate_size=37, num_experts=7,
                                              num_experts_per_tok=2, num_dense_layers=0, use_expert_bias=False,
                                              norm_topk_prob=False, routed_scaling_factor=1.5, conv_bias=True,
                                              tie_word_embeddings=False, pad_token_id=0,
                                              layer_types=["full_attention", "conv", "conv"]) | _rope("default", 1e4)),
    # One group of B and C: ranks have heads, and norms go over all ranks. Experts in slices of features.
    "granite-hybrid": Spec("granitemoehybrid", _sizes(72, 6, 2, 200, 3, shared_intermediate_size=131,
                                                      num_local_experts=10, num_experts_per_tok=3, mamba_n_heads=12,
                                                      mamba_d_state=20, layer_types=["mamba", "attention", "mamba"],
                                                      embedding_multiplier=0.3, attention_multiplier=0.2,
                                                      residual_multiplier=0.4, logits_scaling=3.0, pad_token_id=0,
                                                      tie_word_embeddings=True)),
    # Without experts, with rotary embedding, biases and several groups.
    "granite-hybrid-dense": Spec("granitemoehybrid", _sizes(88, 4, 4, 131, 3, shared_intermediate_size=141,
                                                            num_local_experts=0, mamba_n_heads=8, mamba_n_groups=4,
                                                            mamba_d_state=33, mamba_d_conv=3, mamba_proj_bias=True,
                                                            position_embedding_type="rope", mamba_conv_bias=False,
                                                            layer_types=["attention", "mamba", "mamba"],
                                                            attention_bias=True, pad_token_id=0)
                                 | _rope("default", 1e4)),
    # Ranks have whole groups of B and C; experts in slices of features on 2 and 3 ranks.
    "nemotron-h": Spec("nemotron_h", _sizes(72, 14, 2, 151, head_dim=20, mamba_num_heads=10, mamba_head_dim=12,
                                            n_groups=5, ssm_state_size=20, time_step_min=1e-30, n_routed_experts=10,
                                            num_experts_per_tok=3, moe_intermediate_size=200, use_bias=True, n_group=2,
                                            moe_shared_expert_intermediate_size=131, routed_scaling_factor=1.7,
                                            hybrid_override_pattern="M*E-M", pad_token_id=0)),
    # No experts' norm, experts that compute a latent vector, a convolution without bias.
    "nemotron-h-latent": Spec("nemotron_h", _sizes(88, 6, 3, 131, head_dim=24, mamba_num_heads=4, mamba_head_dim=33,
                                                   n_groups=4, ssm_state_size=7, conv_kernel=3, time_step_min=1e-30,
                                                   n_routed_experts=7, num_experts_per_tok=2, moe_intermediate_size=37,
                                                   moe_shared_expert_intermediate_size=97, moe_latent_size=40,
                                                   norm_topk_prob=False, use_conv_bias=False, mlp_bias=False,
                                                   hybrid_override_pattern="*MEM", pad_token_id=0)),
    # One group of B and C.
    "bamba": Spec("bamba", _sizes(72, 6, 2, 151, 4, mamba_n_heads=12, mamba_d_state=20, attn_layer_indices=[1, 3],
                                  pad_token_id=0) | _rope("default", 1e5)),
    # Ranks have whole groups; biases, another number of taps.
    "bamba-biases": Spec("bamba", _sizes(88, 4, 4, 131, 3, head_dim=24, mamba_n_heads=8, mamba_n_groups=4,
                                         mamba_d_state=33, mamba_d_conv=3, mamba_proj_bias=True, mamba_conv_bias=False,
                                         attn_layer_indices=[0], attention_bias=True, mlp_bias=True,
                                         tie_word_embeddings=True, pad_token_id=0) | _rope("default", 1e4)),
    # Attention and a state space in each layer, all factors, no norm.
    "falcon-h1": Spec("falcon_h1", _sizes(72, 14, 2, 151, head_dim=20, mamba_d_ssm=96, mamba_n_heads=12,
                                          mamba_d_state=20, embedding_multiplier=1.7, lm_head_multiplier=0.4,
                                          mlp_multipliers=[0.7, 1.3], key_multiplier=0.6, attention_in_multiplier=1.2,
                                          attention_out_multiplier=0.8, ssm_multipliers=[0.9, 1.4, 0.7, 1.2, 0.8],
                                          ssm_in_multiplier=1.3, ssm_out_multiplier=0.6, pad_token_id=0)
                      | _rope("default", 1e11)),
    # Norms before the gate, one group, factors of 1, biases of attention.
    "falcon-h1-norm": Spec("falcon_h1", _sizes(88, 4, 4, 131, mamba_d_ssm=None, mamba_n_heads=8, mamba_d_state=33,
                                               mamba_d_conv=3, mamba_rms_norm=True, mamba_conv_bias=False,
                                               attention_bias=True, tie_word_embeddings=True, pad_token_id=0)
                           | _rope("default", 1e4)),
    # Norms after the gate, whole groups, a state as large as that of published models.
    "falcon-h1-groups": Spec("falcon_h1", _sizes(96, 6, 3, 131, 2, mamba_d_ssm=80, mamba_n_heads=8, mamba_n_groups=4,
                                                 mamba_d_state=256, mamba_rms_norm=True, mamba_norm_before_gate=False,
                                                 ssm_multipliers=[0.9, 1.4, 0.7, 1.2, 0.8], pad_token_id=0)
                             | _rope("default", 1e4)),
    # Decays of channels beside latent attention; groups of experts, heads of fewer channels than a vector has lanes.
    "kimi-linear": Spec("kimi_linear", _sizes(72, 7, 7, 151, 4, moe_intermediate_size=176, num_local_experts=8,
                                              num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
                                              kv_lora_rank=24, qk_nope_head_dim=12, v_head_dim=20, linear_num_heads=5,
                                              linear_head_dim=20, linear_conv_kernel_dim=4,
                                              layer_types=["linear_attention", "full_attention"] * 2, **_LATENT)),
    # Queries of a latent, layers as published, whole experts, all layers but the first with experts.
    "kimi-linear-plain": Spec("kimi_linear", _sizes(80, 6, 6, 41, 5, moe_intermediate_size=37, num_local_experts=5,
                                                    num_experts_per_tok=5, norm_topk_prob=False, q_lora_rank=17,
                                                    kv_lora_rank=33, qk_nope_head_dim=5, v_head_dim=6,
                                                    attention_bias=True, linear_num_heads=4,
                                                    linear_head_dim=33, linear_conv_kernel_dim=3,
                                                    mlp_layer_types=["dense"] * 2 + ["sparse"] * 3, **_LATENT)),
    # Bounded decays; pools of 4 positions; streams; limits; groups of experts.
    "glm5-next": Spec("glm5_next", _sizes(72, 7, 7, 151, 4, moe_intermediate_size=176, n_routed_experts=8,
                                          num_experts_per_tok=3, n_group=4, topk_group=2, q_lora_rank=40,
                                          kv_lora_rank=24, qk_nope_head_dim=12, v_head_dim=20, linear_num_heads=5,
                                          linear_head_dim=20, layer_types=["linear_attention", "indexed_attention"] * 2,
                                          mlp_layer_types=["dense"] + ["sparse"] * 3, index_topk=64, index_kpool=4,
                                          index_n_heads=19, index_head_dim=24, swiglu_limit=0.8, pad_token_id=0)),
    # A layer that shares a selection, of more than a block, by pools of a prime number; eight streams; more heads than
    # a tile of attention has rows; biases; whole experts.
    "glm5-next-wide": Spec("glm5_next", _sizes(80, 19, 19, 41, 4, moe_intermediate_size=37, n_routed_experts=5,
                                               num_experts_per_tok=2, norm_topk_prob=False, attention_bias=True,
                                               n_shared_experts=2, q_lora_rank=17, kv_lora_rank=33, qk_nope_head_dim=5,
                                               v_head_dim=6, linear_num_heads=4, linear_head_dim=33,
                                               linear_conv_kernel_dim=3, linear_lower_bound=-1.5,
                                               layer_types=["linear_attention", *["indexed_attention"] * 2,
                                                            "linear_attention"],
                                               indexer_types=["full", "full", "shared", "full"],
                                               mlp_layer_types=["sparse"] * 4, index_topk=150, index_kpool=3,
                                               index_n_heads=12, index_head_dim=37, hc_mult=8, hc_sinkhorn_iters=3,
                                               rms_norm_eps=1e-6, tie_word_embeddings=True, pad_token_id=0)),
}
"""Layers with a state beside attention, stored as float32."""

LATENT = {
    # Queries without a latent, a softmax router without groups, two shared experts, YaRN with mscale.
    "deepseek-v2": Spec("deepseek_v2", _sizes(72, 8, 8, 151, 3, moe_intermediate_size=176, n_routed_experts=6,
                                              num_experts_per_tok=3, first_k_dense_replace=1, n_shared_experts=2,
                                              q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12, v_head_dim=20,
                                              routed_scaling_factor=1.3, n_group=1, topk_group=1, **_LATENT)
                        | _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=64, mscale=0.707,
                                mscale_all_dim=0.9, beta_fast=32, beta_slow=1)),
    # Groups that count as much as their best expert; a latent that is no multiple of 4.
    "deepseek-v2-groups": Spec("deepseek_v2", _sizes(96, 4, 4, 131, 2, moe_intermediate_size=37, n_routed_experts=12,
                                                     num_experts_per_tok=3, n_group=4, topk_group=2,
                                                     topk_method="group_limited_greedy", q_lora_rank=33,
                                                     kv_lora_rank=34, qk_nope_head_dim=6, v_head_dim=9,
                                                     attention_bias=True, **_LATENT) | _rope("default", 1e4)),
    "deepseek-v3": Spec("deepseek_v3", _sizes(72, 7, 7, 151, 3, moe_intermediate_size=176, n_routed_experts=8,
                                              num_experts_per_tok=3, first_k_dense_replace=1, n_shared_experts=1,
                                              q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=12, v_head_dim=20,
                                              n_group=4, topk_group=2, routed_scaling_factor=2.5, **_LATENT)
                        | _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=64, mscale=1.0,
                                mscale_all_dim=1.0, beta_fast=32, beta_slow=1)),
    # More heads than a tile of attention has rows; rotated halves instead of pairs.
    "deepseek-v3-heads": Spec("deepseek_v3", _sizes(80, 19, 19, 97, 2, moe_intermediate_size=37, n_routed_experts=5,
                                                    num_experts_per_tok=2, first_k_dense_replace=0, n_group=1,
                                                    topk_group=1, q_lora_rank=None, kv_lora_rank=33,
                                                    qk_nope_head_dim=5, v_head_dim=6, rope_interleave=False,
                                                    norm_topk_prob=False, tie_word_embeddings=True, **_LATENT)
                              | _rope("default", 1e5)),
    "glm4-moe-lite": Spec("glm4_moe_lite", _sizes(72, 5, 5, 151, 3, moe_intermediate_size=176, n_routed_experts=6,
                                                  num_experts_per_tok=2, n_shared_experts=1, q_lora_rank=24,
                                                  kv_lora_rank=48, qk_nope_head_dim=20, v_head_dim=28,
                                                  routed_scaling_factor=1.8, **_LATENT) | _rope("default", 1e6)),
    "glm4-moe-lite-plain": Spec("glm4_moe_lite", _sizes(96, 4, 4, 41, 2, moe_intermediate_size=41, n_routed_experts=4,
                                                        num_experts_per_tok=4, q_lora_rank=17, kv_lora_rank=16,
                                                        qk_nope_head_dim=16, v_head_dim=16,
                                                        mlp_layer_types=["dense", "sparse"], **_LATENT)
                                | _rope("default", 1e4)),
    # An indexer in every layer, with more heads than a tile of attention has rows.
    "deepseek-v32": Spec("deepseek_v32", _sizes(72, 7, 7, 151, 3, moe_intermediate_size=176, n_routed_experts=8,
                                                num_experts_per_tok=3, first_k_dense_replace=1, n_shared_experts=1,
                                                q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=12, v_head_dim=20,
                                                n_group=4, topk_group=2, routed_scaling_factor=2.5, index_n_heads=19,
                                                index_head_dim=24, index_topk=50, **_LATENT)
                         | _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=64, mscale=1.0,
                                 mscale_all_dim=1.0, beta_fast=32, beta_slow=1)),
    # A layer with the selection of the one before it; two tiles of heads, two blocks of selected positions.
    "glm-moe-dsa": Spec("glm_moe_dsa", _sizes(80, 19, 19, 97, 3, moe_intermediate_size=37, n_routed_experts=5,
                                              num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
                                              q_lora_rank=17, kv_lora_rank=33, qk_nope_head_dim=5, v_head_dim=6,
                                              indexer_types=["full", "shared", "full"], index_n_heads=12,
                                              index_head_dim=37, index_topk=130, **_LATENT) | _rope("default", 1e5)),
}
"""Latent attention, stored as float32."""

_KINDS = {"s": "sliding_attention", "c": "compressed_sparse_attention", "h": "heavily_compressed_attention"}


def _compressed(hidden: int, heads: int, kinds: str, rates: tuple[int, int], routers: str, **more: Any
                ) -> dict[str, Any]:
    """kinds, routers: a letter for each layer; routers that look up a token's experts are "h"."""
    fields = _sizes(hidden, heads, 1, more["moe_intermediate_size"], len(kinds))
    del fields["intermediate_size"]
    return {**fields, "layer_types": [_KINDS[kind] for kind in kinds],
            "compress_rates": {_KINDS["c"]: rates[0], _KINDS["h"]: rates[1]},
            "mlp_layer_types": [{"h": "hash_moe", "m": "moe"}[kind] for kind in routers], **more}


COMPRESSED = {
    # Entries of all kinds; ranks have 2 and 1 of 3 groups of heads, and slices of experts.
    "deepseek-v4": Spec("deepseek_v4", _compressed(
        72, 6, "schch", (4, 10), "hhmmm", head_dim=20, qk_rope_head_dim=8, moe_intermediate_size=176,
        n_routed_experts=8, num_experts_per_tok=3, q_lora_rank=40, o_groups=3, o_lora_rank=12, sliding_window=19,
        index_n_heads=19, index_head_dim=24, index_topk=21, hc_mult=4, swiglu_limit=0.8,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
                         "beta_slow": 1})),
    # Windows, and selected entries, of more than a block; two tiles of heads; entries of a prime number of positions.
    "deepseek-v4-wide": Spec("deepseek_v4", _compressed(
        80, 20, "csh", (3, 37), "mhm", head_dim=18, qk_rope_head_dim=6, moe_intermediate_size=37, n_routed_experts=5,
        num_experts_per_tok=2, q_lora_rank=17, o_groups=5, o_lora_rank=7, sliding_window=150, index_n_heads=12,
        index_head_dim=37, index_topk=140, hc_mult=3, hc_sinkhorn_iters=3, routed_scaling_factor=2.5)),
}
"""Attention over compressed positions, stored as float32."""

GEMMA4 = {name: Spec("gemma4_text", fields) for name, fields in FIELDS.items()}

INDEXED = ("deepseek-v32", "glm-moe-dsa")
