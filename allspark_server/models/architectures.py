"""The architectures that are served: how config.json of each differs, and what it was checked against.

`ARCHITECTURES` is the registry: a new one is an entry here, and a model file (models/__init__.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allspark_client.errors import not_available
from allspark_server.models import translated
from allspark_server.models.fields import MAX_EXPERTS, MAX_POSITIONS, Fields
from allspark_server.models.network import PLAIN_ROPE_TYPES, ExpertConfig, RopeConfig


def _routed(fields: Fields, *, intermediate: str, normalized: bool, shared: int = 0,
            dense: tuple[int, ...] = ()) -> ExpertConfig:
    name = "num_experts" if fields.get("num_experts", int) is not None else "num_local_experts"
    count = fields.need_positive(name, most=MAX_EXPERTS)
    return ExpertConfig(count, fields.need_positive("num_experts_per_tok", most=count),
                        fields.need_positive(intermediate), normalized, shared, dense)


def _qwen3_experts(fields: Fields, layers: int, shared: int = 0) -> ExpertConfig:
    step, only = fields.get("decoder_sparse_step", int, 1), fields.get("mlp_only_layers", list, [])
    if step < 1:
        raise fields.error("decoder_sparse_step", f"is {step}: it must be positive")
    if not all(isinstance(layer, int) for layer in only):
        raise fields.error("mlp_only_layers", f"is {only!r}: expected numbers of layers")
    dense = tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)
    return _routed(fields, intermediate="moe_intermediate_size", normalized=fields.get("norm_topk_prob", bool, False),
                   shared=shared, dense=dense)


def _qwen2_experts(fields: Fields, layers: int) -> ExpertConfig:
    return _qwen3_experts(fields, layers, fields.need_positive("shared_expert_intermediate_size"))


def _mixtral_experts(fields: Fields, layers: int) -> ExpertConfig:
    return _routed(fields, intermediate="intermediate_size", normalized=True)


def _gemma(fields: Fields, caps: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """caps: of scores and logits, where config.json does not say."""
    if fields.get("use_bidirectional_attention", bool, False):
        raise not_available(f"Attention in both directions (use_bidirectional_attention of {fields.path})")
    scale = np.float32(fields.need_positive("hidden_size") ** 0.5)
    # The network was trained with the scale rounded to the weights' type.
    dtype = fields.get("dtype", str, fields.get("torch_dtype", str))
    if dtype == "bfloat16":
        bits = scale.view(np.uint32)
        scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    elif dtype == "float16":
        scale = np.float32(np.float16(scale))

    def cap(name: str, otherwise: float) -> float:
        """Null is none, unlike a field that is absent."""
        return otherwise if name not in fields.values else 0.0 if fields.get(name, float) is None else (
            fields.need_positive(name, float))

    name = "query_pre_attn_scalar"
    query = fields.need_positive(name, float) if name in fields.values else 256.0
    return {"embedding_scale": float(scale), "query_scale": query**-0.5,
            "score_cap": cap("attn_logit_softcapping", caps[0]), "logit_cap": cap("final_logit_softcapping", caps[1])}


def _gemma2(fields: Fields) -> dict[str, Any]:
    return _gemma(fields, (50.0, 30.0))


def _gemma3(fields: Fields) -> dict[str, Any]:
    if fields.get("attn_logit_softcapping", float) is not None:  # which transformers reads, and ignores
        raise fields.error("attn_logit_softcapping", f"is {fields.values['attn_logit_softcapping']}: Gemma 3 has none")
    return _gemma(fields)


def _qwen(fields: Fields) -> dict[str, Any]:
    """The length that it was trained for is seq_length."""
    length = fields.need_positive("seq_length", most=MAX_POSITIONS)
    more: dict[str, Any] = {"logn": length} if fields.get("use_logn_attn", bool, False) else {}
    if fields.get("use_dynamic_ntk", bool, False) and "rope_scaling" not in fields.values:
        more["rope"] = RopeConfig("dynamic", fields.need_positive("rotary_emb_base", float), original_max=length,
                                  growth="powers")
    return more


def _baichuan(fields: Fields) -> dict[str, Any]:
    """The rows of Baichuan 2's head are normalized; its config.json alone has z_loss_weight."""
    return {"alibi": fields.need("alibi", bool), "unit_head": "z_loss_weight" in fields.values}


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    numbers = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    return {"swiglu": tuple(fields.need_positive(name, float) if name in fields.values else otherwise
                            for name, otherwise in numbers.items())}


@dataclass(frozen=True)
class Architecture:
    """How an architecture's config.json differs: mostly defaults that transformers' config class has for absent fields.

    served: the families, in words. checked: what their logits were compared with.
    """

    model_type: str
    served: str
    checked: str = "transformers"
    kv_heads_required: bool = True
    head_dim: int | None = None           # None: hidden_size // num_attention_heads
    has_bias_fields: bool = False         # attention_bias and mlp_bias are read
    attention_bias: bool = False          # where it is absent
    activation: tuple[str, ...] = ("silu", "swish")  # names of the one it has
    windows: bool = False                 # sliding_window and layer_types are served, others refused
    window: int | None = None             # sliding_window where it is absent
    window_pattern: int | None = None     # without layer_types: every so many layers one has no window; None: no such
    rope_theta: float = RopeConfig.theta
    rope_types: tuple[str, ...] = PLAIN_ROPE_TYPES
    partial_rotary: float | None = None   # where it is absent; None: only 1 is served
    local_theta: float | None = None      # of a rotary embedding of their own for layers with a window, where it is
                                          # absent; 0: the others' theta; None: they have none of their own
    tied: bool = False                    # tie_word_embeddings where it is absent
    experts: Callable[[Fields, int], ExpertConfig] | None = None  # reads them, of a model of so many layers
    more: Callable[[Fields], dict[str, Any]] | None = None        # reads further fields of ModelConfig
    translate: Callable[[Fields], Fields] | None = None           # of a config.json with names of its own


_GEMMA = {"head_dim": 256, "has_bias_fields": True, "activation": ("gelu_pytorch_tanh",), "windows": True,
          "window": 4096, "tied": True}
_GLM = {"head_dim": 128, "has_bias_fields": True, "attention_bias": True, "partial_rotary": 0.5}
_CHATGLM = {"has_bias_fields": True, "partial_rotary": translated.CHATGLM_ROTATED, "translate": translated.chatglm}
_BAICHUAN = {"translate": translated.baichuan, "more": _baichuan}
_GPT_OSS = {"head_dim": 64, "has_bias_fields": True, "attention_bias": True, "windows": True, "window": 128,
            "window_pattern": 2, "rope_theta": 1.5e5, "translate": translated.gpt_oss}
_CHATGLMS = "ChatGLM2, ChatGLM3, GLM-4 (9B, as first published)"
_RENAMED = "a float64 reference; DashInfer 1.3.0; transformers' model of the same numbers, if any"

ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture("qwen2", "Qwen1.5, Qwen2, Qwen2.5"),
    "Qwen3ForCausalLM": Architecture("qwen3", "Qwen3", head_dim=128, has_bias_fields=True),
    "LlamaForCausalLM": Architecture("llama", "Llama 2, 3, 3.1, 3.2", kv_heads_required=False, has_bias_fields=True),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", experts=_qwen2_experts),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "Qwen3-MoE", has_bias_fields=True, experts=_qwen3_experts),
    "MixtralForCausalLM": Architecture("mixtral", "Mixtral", rope_theta=1e6, experts=_mixtral_experts),
    "GptOssForCausalLM": Architecture("gpt_oss", "gpt-oss", experts=_mixtral_experts, more=_gpt_oss, **_GPT_OSS),
    "MistralForCausalLM": Architecture("mistral", "Mistral", windows=True, window=4096),
    "MinistralForCausalLM": Architecture("ministral", "Ministral", windows=True, window=4096),
    "SmolLM3ForCausalLM": Architecture("smollm3", "SmolLM3", has_bias_fields=True, windows=True, rope_theta=2e6,
                                       tied=True),
    "Phi3ForCausalLM": Architecture("phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", kv_heads_required=False, windows=True,
                                    rope_types=("default", "longrope"), partial_rotary=1.0),
    "GlmForCausalLM": Architecture("glm", "GLM-4 (9B, as transformers has it)", **_GLM),
    "Glm4ForCausalLM": Architecture("glm4", "GLM-4-0414, GLM-Z1", **_GLM),
    "Gemma2ForCausalLM": Architecture("gemma2", "Gemma 2", window_pattern=2, more=_gemma2, **_GEMMA),
    "Gemma3ForCausalLM": Architecture("gemma3_text", "Gemma 3 (text)", window_pattern=6, rope_theta=1e6,
                                      local_theta=1e4, more=_gemma3, **_GEMMA),
    "Gemma3ForConditionalGeneration": Architecture("gemma3", "Gemma 3 (text of those that see)", window_pattern=6,
                                                   rope_theta=1e6, local_theta=1e4, more=_gemma3,
                                                   translate=translated.gemma3, **_GEMMA),
    "Olmo2ForCausalLM": Architecture("olmo2", "OLMo 2", kv_heads_required=False, has_bias_fields=True),
    "Olmo3ForCausalLM": Architecture("olmo3", "OLMo 3", kv_heads_required=False, has_bias_fields=True, windows=True,
                                     window=4096, window_pattern=4, local_theta=0.0),
    "QWenLMHeadModel": Architecture("qwen", "Qwen (the first)", _RENAMED, translate=translated.qwen, more=_qwen),
    "ChatGLMModel": Architecture("chatglm", _CHATGLMS, _RENAMED, **_CHATGLM),
    "ChatGLMForConditionalGeneration": Architecture("chatglm", _CHATGLMS, _RENAMED, **_CHATGLM),
    "BaiChuanForCausalLM": Architecture("baichuan", "Baichuan 7B", _RENAMED, **_BAICHUAN),
    "BaichuanForCausalLM": Architecture("baichuan", "Baichuan 13B, Baichuan 2", _RENAMED, **_BAICHUAN),
}


def known_architectures() -> str:
    return ", ".join(ARCHITECTURES)


def served_table() -> str:
    """What is served, in Markdown: the README has it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        rows.setdefault((architecture.served, architecture.checked), []).append(f"`{name}`")
    lines = ["| Family | config.json's `architectures` | Logits and greedy output checked against |",
             "| --- | --- | --- |"]
    lines += [f"| {served} | {', '.join(names)} | {checked} |" for (served, checked), names in rows.items()]
    return "\n".join(lines) + "\n"
