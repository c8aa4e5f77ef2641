"""Fields of tiny Gemma 4 models with awkward sizes, for support/tiny_configs.py."""

from __future__ import annotations

from typing import Any

VOCAB = 1031  # prime: no number of ranks divides it
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _sizes(hidden: int, heads: int, kv_heads: int, intermediate: int, layers: int, window: int,
           **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "sliding_window": window,
            "vocab_size": VOCAB, "max_position_embeddings": 2048, "pad_token_id": 0,
            "hidden_size_per_layer_input": 0, **more}


FIELDS: dict[str, dict[str, Any]] = {
    # As the 31B model: values are keys in layers without a window, whose heads are larger and fewer.
    "gemma4": _sizes(84, 14, 7, 151, 6, 61, head_dim=20, global_head_dim=36, num_global_key_value_heads=2,
                     attention_k_eq_v=True, final_logit_softcapping=3.0),
    # Smaller heads without a window, of which as many as with one; biases, another order, a head of its own.
    "gemma4-biases": _sizes(72, 6, 3, 131, 4, 33, head_dim=24, global_head_dim=18, attention_bias=True,
                            layer_types=[_FULL, _SLIDING, _SLIDING, _FULL], tie_word_embeddings=False,
                            rope_parameters={_FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.4,
                                                     "rope_theta": 1e5, "factor": 2.0},
                                             _SLIDING: {"rope_type": "default", "rope_theta": 5e3}}),
    # As the 26B model. Experts in slices of features on 2 and 3 ranks, whole ones on 4.
    "gemma4-moe": _sizes(72, 8, 4, 151, 4, 61, head_dim=20, global_head_dim=28, num_global_key_value_heads=2,
                         attention_k_eq_v=True, enable_moe_block=True, num_experts=10, top_k_experts=3,
                         moe_intermediate_size=200, layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL]),
    # Whole experts on several ranks.
    "gemma4-moe-plain": _sizes(90, 6, 6, 37, 3, 33, head_dim=18, global_head_dim=18, enable_moe_block=True,
                               num_experts=7, top_k_experts=7, moe_intermediate_size=37,
                               layer_types=[_FULL, _SLIDING, _FULL]),
    # As the E2B model: embeddings for every layer, and layers that read others' keys and have wider MLPs.
    "gemma4-small": _sizes(72, 8, 1, 151, 9, 61, head_dim=20, global_head_dim=36, num_kv_shared_layers=5,
                           hidden_size_per_layer_input=24, vocab_size_per_layer_input=VOCAB, use_double_wide_mlp=True,
                           layer_types=[_SLIDING, _SLIDING, _FULL] * 3, final_logit_softcapping=3.0),
    # Several KV heads, of which ranks have copies; a table with another number of tokens.
    "gemma4-small-plain": _sizes(88, 6, 2, 131, 5, 33, head_dim=24, global_head_dim=16, num_kv_shared_layers=2,
                                 hidden_size_per_layer_input=18, vocab_size_per_layer_input=1100,
                                 layer_types=[_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL]),
}
