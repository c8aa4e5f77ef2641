"""dots.llm1: a norm on each query and key head, a few dense layers, then experts behind a sigmoid router with a
correction and groups, and shared experts. Layers from max_window_layers on may have a window.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, translated
from allspark_server.models.blocks import begin, finish, mlp_or_experts, output_projection, qkv_projection
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def dots1(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias)
        graph.head_norm(qkv, 0, f"{prefix}.self_attn.q_norm.weight")
        graph.head_norm(qkv, 1, f"{prefix}.self_attn.k_norm.weight")
        attended = graph.span_attention(graph.rope(qkv), layer, window=config.window(layer))
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, mlp_or_experts(graph, h, f"{prefix}.mlp", layer, correction="gate.e_score_correction_bias"))
    return finish(graph, x)


def _translate(fields: Fields) -> Fields:
    """The defaults that differ from those of families with such experts; layer_types where it is absent."""
    defaults: dict[str, Any] = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0}
    if fields.get("layer_types", list) is None:
        count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
        first = fields.get("max_window_layers", int, 62)
        windows = fields.values.get("sliding_window", 4096) is not None
        defaults["layer_types"] = ["sliding_attention" if windows and i >= first else "full_attention"
                                   for i in range(count)]
    return translated(fields, **{name: value for name, value in defaults.items() if fields.values.get(name) is None})


ARCHITECTURES = {"Dots1ForCausalLM": Architecture(dots1, "dots1", "dots.llm1", kv_heads_required=False,
                                                  has_bias_fields=True, windows=True, window=4096,
                                                  experts=grouped_experts, translate=_translate)}
