"""GLM-4.5, 4.6 and 4.7: a rotary embedding for half of each head, optional norms of query and key heads, a few dense
layers, then experts behind a sigmoid router with a correction and groups, and a shared expert.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, mlp_or_experts, output_projection, qkv_projection
from allspark_server.models.draft_heads import next_n_head
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ModelConfig


def _layer(graph: Graph, x: Tensor, prefix: str, layer: int) -> None:
    h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
    qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=graph.config.attention_bias)
    if graph.config.head_norms:
        graph.head_norm(qkv, 0, f"{prefix}.self_attn.q_norm.weight")
        graph.head_norm(qkv, 1, f"{prefix}.self_attn.k_norm.weight")
    attended = graph.span_attention(graph.rope(qkv), layer)
    graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn"))
    h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
    graph.add(x, mlp_or_experts(graph, h, f"{prefix}.mlp", layer, correction="gate.e_score_correction_bias"))


def glm4_moe(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        _layer(graph, x, f"model.layers.{layer}", layer)
    return finish(graph, x)


def _more(fields: Fields) -> dict[str, Any]:
    return {"head_norms": fields.get("use_qk_norm", bool, False)}


ARCHITECTURES = {"Glm4MoeForCausalLM": Architecture(glm4_moe, "glm4_moe", "GLM-4.5, 4.6, 4.7", has_bias_fields=True,
                                                    partial_rotary=0.5, experts=grouped_experts, more=_more,
                                                    draft_head=next_n_head(_layer))}
