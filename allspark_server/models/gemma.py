"""Gemma 2 and 3 (text): norms that multiply by 1 + w before and after attention and MLP, GELU, a scaled embedding, and
windows on most layers. Gemma 2 caps scores and logits. Gemma 3 norms each query and key head; its layers with a window
have their own rotary embedding. EmbeddingGemma is a Gemma 3 whose rows attend in both directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allspark_client.errors import not_available
from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import LOCAL, begin, embed, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import EncoderConfig, ModelConfig
from allspark_server.models.sentence_modules import read_modules
from allspark_server.models.vision import siglip_tower


def gemma(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)

    def norm(y: Tensor, name: str, out: str = "normed") -> Tensor:
        return graph.rms_norm(y, f"{prefix}.{name}.weight", out, unit_offset=1)

    for layer in range(config.num_layers):
        prefix, window, bias = f"model.layers.{layer}", config.window(layer), config.attention_bias
        scores: dict[str, Any] = {"scale": config.query_scale}
        scores |= {"soft_cap": config.score_cap} if config.score_cap else {}
        qkv = qkv_projection(graph, norm(x, "input_layernorm"), f"{prefix}.self_attn", bias=bias)
        if config.local_rope is not None:
            graph.head_norm(qkv, 0, f"{prefix}.self_attn.q_norm.weight", unit_offset=1)
            graph.head_norm(qkv, 1, f"{prefix}.self_attn.k_norm.weight", unit_offset=1)
        graph.rope(qkv, **({"table": LOCAL} if window and config.local_rope is not None else {}))
        if config.tower is not None:    # rows of an image see each other
            scores["images"] = 1
        attended = graph.span_attention(qkv, layer, window=window, **scores)
        y = output_projection(graph, attended, f"{prefix}.self_attn", bias=bias)
        graph.add(x, norm(y, "post_attention_layernorm", "branch_normed"))
        y = gated_mlp(graph, norm(x, "pre_feedforward_layernorm"), f"{prefix}.mlp", activation="gelu_tanh")
        graph.add(x, norm(y, "post_feedforward_layernorm", "branch_normed"))
    if config.encoder is None:
        return finish(graph, x, unit_offset=1)
    return embed(graph, graph.rms_norm(x, "model.norm.weight", unit_offset=1))


def embedding_scale(fields: Fields, size: int) -> float:
    """The square root of the size of an embedding, rounded to the type of the weights as in training."""
    scale = np.float32(size**0.5)
    dtype = fields.get("dtype", str, fields.get("torch_dtype", str))
    if dtype == "bfloat16":
        bits = scale.view(np.uint32)
        scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return float(np.float16(scale)) if dtype == "float16" else float(scale)


def _gemma(fields: Fields, caps: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 share. caps: defaults for the soft caps of scores and logits."""
    def cap(name: str, otherwise: float) -> float:
        """A null field means no cap; an absent one means the default."""
        return otherwise if name not in fields.values else 0.0 if fields.get(name, float) is None else (
            fields.need_positive(name, float))

    name = "query_pre_attn_scalar"
    query = fields.need_positive(name, float) if name in fields.values else 256.0
    return {"embedding_scale": embedding_scale(fields, fields.need_positive("hidden_size")), "query_scale": query**-0.5,
            "score_cap": cap("attn_logit_softcapping", caps[0]), "logit_cap": cap("final_logit_softcapping", caps[1])}


def _refuse_both_directions(fields: Fields) -> None:
    if fields.get("use_bidirectional_attention", bool, False):
        raise not_available(f"Attention in both directions (use_bidirectional_attention of {fields.path}) for models "
                            "that generate; Gemma3TextModel has it")


def _gemma2(fields: Fields) -> dict[str, Any]:
    _refuse_both_directions(fields)
    return _gemma(fields, (50.0, 30.0))


def _gemma3(fields: Fields) -> dict[str, Any]:
    _refuse_both_directions(fields)
    return _gemma3_fields(fields)


def _gemma3_fields(fields: Fields) -> dict[str, Any]:
    if fields.get("attn_logit_softcapping", float) is not None:  # transformers reads it and ignores it
        raise fields.error("attn_logit_softcapping", f"is {fields.values['attn_logit_softcapping']}: Gemma 3 has none")
    return _gemma(fields)


def _embedding_gemma(fields: Fields) -> dict[str, Any]:
    if not fields.get("use_bidirectional_attention", bool, False):
        raise fields.error("use_bidirectional_attention", "is false: Gemma3TextModel is served as an embedder, which "
                                                          "attends in both directions; Gemma3ForCausalLM generates")
    modules = read_modules(fields.path.parent)
    return {**_gemma3_fields(fields), "encoder": EncoderConfig(modules.pooling or "mean", modules.dense)}


def _halved_window(fields: Fields) -> Fields:
    """Rows see half of the window before them and half after them: sliding_window // 2 positions on each side."""
    width = fields.get("sliding_window", int, 4096)
    return translated(fields, sliding_window=width // 2 + 1)


def _translate(fields: Fields) -> Fields:
    """The text part of a multimodal Gemma 3: text_config holds the fields that differ from the defaults."""
    values = fields.need("text_config", dict)
    defaults: dict[str, Any] = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
                                "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072}
    names = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
    outer = {name: fields.values[name] for name in names if name in fields.values}
    return Fields({**defaults, **outer, **values}, fields.path, "text_config.")


_GEMMA: dict[str, Any] = {"head_dim": 256, "has_bias_fields": True, "activation": ("gelu_pytorch_tanh",),
                          "windows": True, "window": 4096, "tied": True}
_GEMMA3: dict[str, Any] = {"window_pattern": 6, "rope_theta": 1e6, "local_theta": 1e4, "more": _gemma3, **_GEMMA}

ARCHITECTURES = {
    "Gemma2ForCausalLM": Architecture(gemma, "gemma2", "Gemma 2", window_pattern=2, more=_gemma2, **_GEMMA),
    "Gemma3ForCausalLM": Architecture(gemma, "gemma3_text", "Gemma 3 (text)", **_GEMMA3),
    "Gemma3ForConditionalGeneration": Architecture(gemma, "gemma3", "Gemma 3 that sees", translate=_translate,
                                                   tower=siglip_tower, stored_as="text_part", **_GEMMA3),
    "Gemma3TextModel": Architecture(gemma, "gemma3_text", "EmbeddingGemma", translate=_halved_window,
                                    stored_as="prefixed_model", **{**_GEMMA3, "more": _embedding_gemma}),
}
