"""K-EXAONE: EXAONE 4's attention with norms before attention and MLP, a few dense layers, then experts behind a sigmoid
router with a correction and groups, and a shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import begin, finish, mlp_or_experts
from allspark_server.models.exaone4 import exaone_attention, without_pattern
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ExpertConfig, ModelConfig


def exaone_moe(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        graph.add(x, exaone_attention(graph, h, f"{prefix}.self_attn", layer))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, mlp_or_experts(graph, h, f"{prefix}.mlp", layer, correction="e_score_correction_bias"))
    return finish(graph, x)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    values: dict[str, Any] = {new: fields.values[old] for new, old in names.items() if old in fields.values}
    if "num_local_experts" in fields.values:
        values["n_routed_experts"] = fields.values["num_local_experts"]
    found = grouped_experts(translated(fields, **{"routed_scaling_factor": 2.5, **fields.values, **values}), layers)
    kinds = fields.get("mlp_layer_types", list)
    if kinds is None:
        dense = fields.get("first_k_dense_replace", int, 1)
        return replace(found, dense_layers=tuple(range(min(dense, layers))))
    if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.error("mlp_layer_types", f"must hold dense or sparse for each of {layers} layers")
    return replace(found, dense_layers=tuple(i for i, kind in enumerate(kinds) if kind == "dense"))


ARCHITECTURES = {"ExaoneMoeForCausalLM": Architecture(exaone_moe, "exaone_moe", "K-EXAONE", windows=True, window=4096,
                                                      window_pattern=4, nope_globals=True, experts=_experts,
                                                      translate=without_pattern)}
