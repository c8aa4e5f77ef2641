"""Seed-OSS: Llama's network; attention's output projection has a bias of its own choice."""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def seed_oss(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=config.attention_bias))
        attended = graph.span_attention(qkv, layer)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=config.output_bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", bias=config.mlp_bias))
    return finish(graph, x)


def _more(fields: Fields) -> dict[str, Any]:
    return {"output_bias": fields.get("attention_out_bias", bool, False)}


ARCHITECTURES = {"SeedOssForCausalLM": Architecture(seed_oss, "seed_oss", "Seed-OSS", head_dim=128,
                                                    has_bias_fields=True, attention_bias=True, more=_more)}
