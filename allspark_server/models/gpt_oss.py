"""gpt-oss: biases everywhere, an attention sink for each head, a window on every other layer, experts with a clamped
activation.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import begin, finish, output_projection, qkv_projection, routed_experts
from allspark_server.models.expert_fields import mixtral_experts
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def gpt_oss(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix, bias = f"model.layers.{layer}", config.attention_bias
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        sinks = graph.head_values(f"{prefix}.self_attn.sinks", graph.q_heads)
        attended = graph.span_attention(qkv, layer, sinks=sinks, window=config.window(layer))
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, graph.all_reduce(routed_experts(graph, h, f"{prefix}.mlp", router="router", bias=True)))
    return finish(graph, x)


def _translate(fields: Fields) -> Fields:
    """A config.json without a rotary embedding means transformers' default, which is that of the published models."""
    if fields.get("rope_parameters", dict) or fields.get("rope_scaling", dict):
        return fields
    return translated(fields, rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                             "truncate": False, "original_max_position_embeddings": 4096})


def _swiglu(fields: Fields) -> dict[str, Any]:
    numbers = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    return {"swiglu": tuple(fields.need_positive(name, float) if name in fields.values else otherwise
                            for name, otherwise in numbers.items())}


ARCHITECTURES = {
    "GptOssForCausalLM": Architecture(
        gpt_oss, "gpt_oss", "gpt-oss", head_dim=64, has_bias_fields=True, attention_bias=True, windows=True, window=128,
        window_pattern=2, rope_theta=1.5e5, experts=mixtral_experts, more=_swiglu, translate=_translate,
        stored_as="interleaved_experts"),
}
