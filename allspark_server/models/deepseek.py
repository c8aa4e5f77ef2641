"""DeepSeek-V2, V3, R1, V3.1 and V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5: latent attention, a few dense layers, then
experts behind a router with groups, and a shared expert. In V3.2 and GLM-5 an indexer selects the positions that
attention sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allspark_server.models.architecture import Architecture, text_part, translated
from allspark_server.models.blocks import begin, finish, latent_attention, mlp_or_experts
from allspark_server.models.draft_heads import next_n_head
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import MAX_HEAD_DIM, MAX_SIZE, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ExpertConfig, IndexerConfig, LatentConfig, ModelConfig


def _layer(graph: Graph, x: Tensor, prefix: str, layer: int) -> None:
    latent = graph.config.latent
    assert latent is not None
    correction = "gate.e_score_correction_bias" if graph.experts.scores == "sigmoid" else ""
    h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
    graph.add(x, latent_attention(graph, h, f"{prefix}.self_attn", layer, latent))
    h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
    graph.add(x, mlp_or_experts(graph, h, f"{prefix}.mlp", layer, correction=correction))


def deepseek(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        _layer(graph, x, f"model.layers.{layer}", layer)
    return finish(graph, x)


def latent_heads(fields: Fields) -> Fields:
    """The size of a head is that of its rotated part, or any if there is none; every head reads the one row that the
    cache keeps.
    """
    plain = fields.values.get("qk_rope_head_dim") == 0
    values = {"num_key_value_heads": fields.need_positive("num_attention_heads"),
              "head_dim": 2 if plain else fields.need_positive("qk_rope_head_dim", most=MAX_HEAD_DIM)}
    kinds = fields.get("mlp_layer_types", list, [])
    if kinds:
        dense = [kind == "dense" for kind in kinds]
        if sorted(dense, reverse=True) != dense or len(dense) != fields.need_positive("num_hidden_layers"):
            raise fields.error("mlp_layer_types", "must hold 'dense' or 'sparse' for each layer, dense ones first")
        values["first_k_dense_replace"] = sum(dense)
    return translated(fields, **values)


def latent_sizes(fields: Fields, rotated: bool = True) -> dict[str, Any]:
    """The sizes of latent attention. rotated: see LatentConfig."""
    latent, nope, value = (fields.need_positive(name, most=MAX_SIZE) for name in (
        "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    plain = not rotated and fields.values.get("qk_rope_head_dim") == 0
    rope = 0 if plain else fields.need_positive("qk_rope_head_dim", most=MAX_SIZE)
    query = fields.need_positive("q_lora_rank", most=MAX_SIZE) if fields.get("q_lora_rank", int) is not None else 0
    return {"latent": LatentConfig(latent, nope, rope, value, query, fields.get("rope_interleave", bool, True),
                                   rotated=rotated)}


def index_sizes(fields: Fields) -> tuple[int, int, int]:
    """An indexer's heads, their features, and how many positions it selects."""
    heads, dim, selected = (fields.need_positive(f"index_{name}", most=most) for name, most in (
        ("n_heads", MAX_SIZE), ("head_dim", MAX_HEAD_DIM), ("topk", MAX_SIZE)))
    return heads, dim, selected


def shared_selections(fields: Fields) -> tuple[int, ...]:
    """The layers without an indexer, which use the selection of the layer before them (GLM-5.2)."""
    layers = fields.need_positive("num_hidden_layers")
    kinds, pattern = fields.get("indexer_types", list, []), fields.values.get("index_topk_pattern")
    if not kinds and isinstance(pattern, (str, list)):
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if not kinds:
        step, offset = max(1, fields.get("index_topk_freq", int, 1)), fields.get("index_skip_topk_offset", int, 2)
        kinds = ["shared" if max(layer - offset + 1, 0) % step else "full" for layer in range(layers)]
    if len(kinds) != layers or any(kind not in ("full", "shared") for kind in kinds) or kinds[0] != "full":
        raise fields.error("indexer_types", "must hold 'full' or 'shared' for each layer, and begin with 'full'")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


def _sparse(interleaved: bool) -> Callable[[Fields], dict[str, Any]]:
    """Latent attention with an indexer. interleaved: the default of indexer_rope_interleave."""
    def read(fields: Fields) -> dict[str, Any]:
        latent: LatentConfig = latent_sizes(fields)["latent"]
        if not latent.query_dim:
            raise fields.error("q_lora_rank", "is missing: an indexer needs the queries' latent")
        heads, dim, selected = index_sizes(fields)
        if dim < latent.rope_dim:
            raise fields.error("index_head_dim", f"is {dim}: it must be at least qk_rope_head_dim ({latent.rope_dim})")
        indexer = IndexerConfig(heads, dim, selected, fields.get("indexer_rope_interleave", bool, interleaved),
                                shared_selections(fields))
        return {"latent": replace(latent, indexer=indexer)}

    return read


def _softmax_experts(fields: Fields, layers: int) -> ExpertConfig:
    """DeepSeek-V2's: weights are probabilities, and a group counts as much as its best expert."""
    if fields.get("topk_method", str, "greedy") == "greedy":
        fields = translated(fields, n_group=1, topk_group=1)
    dense = fields.get("first_k_dense_replace", int, 0)
    experts = grouped_experts(translated(fields, first_k_dense_replace=dense, norm_topk_prob=False), layers)
    return replace(experts, scores="softmax", group_scores="largest")


_COMMON: dict[str, Any] = {"kv_heads_required": False, "has_bias_fields": True, "translate": latent_heads,
                           "more": latent_sizes, "draft_head": next_n_head(_layer)}

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture(deepseek, "deepseek_v2", "DeepSeek-V2", experts=_softmax_experts, **_COMMON),
    "DeepseekV3ForCausalLM": Architecture(deepseek, "deepseek_v3", "DeepSeek-V3, R1, V3.1, Kimi-K2",
                                          experts=grouped_experts, **_COMMON),
    "Glm4MoeLiteForCausalLM": Architecture(deepseek, "glm4_moe_lite", "GLM-4.7-Flash", experts=grouped_experts,
                                           **_COMMON),
    "DeepseekV32ForCausalLM": Architecture(deepseek, "deepseek_v32", "DeepSeek-V3.2", experts=grouped_experts,
                                           layer_types=False, **{**_COMMON, "more": _sparse(interleaved=False)}),
    "GlmMoeDsaForCausalLM": Architecture(deepseek, "glm_moe_dsa", "GLM-5", experts=grouped_experts,
                                         layer_types=False, **{**_COMMON, "more": _sparse(interleaved=True)}),
    "KimiK25ForConditionalGeneration": Architecture(
        deepseek, "kimi_k25", "Kimi-K2.5, K2.6, K2.7 (text part)", experts=grouped_experts, stored_as="text_part",
        **{**_COMMON, "translate": lambda fields: latent_heads(text_part(fields))}),
}
