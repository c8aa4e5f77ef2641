"""Granite 3 (dense): Llama's network with factors for the embedding, attention's scores, what a layer adds to the
residual stream, and the logits.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph, Tensor
from allspark_server.models.network import ModelConfig


def granite(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)

    def add(y: Tensor) -> None:
        graph.add(x, y if config.residual_scale == 1 else graph.scale(y, config.residual_scale))

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        attended = graph.span_attention(qkv, layer, scale=config.query_scale)
        add(output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        add(gated_mlp(graph, h, f"{prefix}.mlp", bias=config.mlp_bias))
    return finish(graph, x)


def factors(fields: Fields) -> dict[str, Any]:
    """The factors, of which absent ones are 1."""
    def factor(name: str) -> float:
        return fields.need_positive(name, float) if name in fields.values else 1.0

    return {"embedding_scale": factor("embedding_multiplier"), "query_scale": factor("attention_multiplier"),
            "residual_scale": factor("residual_multiplier"), "logit_scale": 1 / factor("logits_scaling")}


ARCHITECTURES = {"GraniteForCausalLM": Architecture(granite, "granite", "Granite 3 (dense)",
                                                    kv_heads_required=False, has_bias_fields=True, more=factors)}
