"""GLM-4: the rotary embedding pairs adjacent features of the first half of a head; queries, keys and values have
biases. GLM-4-0414 (`glm4`) also norms the outputs of attention and MLP before they are added.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ModelConfig


def glm(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config)

    def add(y: Tensor, norm: str) -> None:
        normed = config.architecture == "Glm4ForCausalLM"
        graph.add(x, graph.rms_norm(y, f"{prefix}.{norm}.weight", out="branch_normed") if normed else y)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=config.attention_bias)
        attended = graph.span_attention(graph.rope(qkv, pairs="interleaved"), layer)
        add(output_projection(graph, attended, f"{prefix}.self_attn"), "post_self_attn_layernorm")
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        add(gated_mlp(graph, h, f"{prefix}.mlp", ("gate_up_proj", "down_proj")), "post_mlp_layernorm")
    return finish(graph, x)


_GLM: dict[str, Any] = {"head_dim": 128, "has_bias_fields": True, "attention_bias": True, "partial_rotary": 0.5}

ARCHITECTURES = {
    "GlmForCausalLM": Architecture(glm, "glm", "GLM-4 (9B, as transformers has it)", **_GLM),
    "Glm4ForCausalLM": Architecture(glm, "glm4", "GLM-4-0414, GLM-Z1", **_GLM),
}
