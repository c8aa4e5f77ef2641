"""ERNIE 4.5 (dense): Llama's network; the rotary embedding pairs adjacent features; one field for all biases."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def ernie(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias), pairs="interleaved")
        attended = graph.span_attention(qkv, layer)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", bias=bias))
    return finish(graph, x)


def _translate(fields: Fields) -> Fields:
    return translated(fields, attention_bias=fields.get("use_bias", bool, False))


ARCHITECTURES = {"Ernie4_5ForCausalLM": Architecture(ernie, "ernie4_5", "ERNIE 4.5 (dense)", head_dim=128,
                                                     has_bias_fields=True, rope_theta=5e5, tied=True,
                                                     translate=_translate)}
