"""Llama 2, 3, 3.1 and 3.2: optional biases on all four attention projections and on the MLP. Mistral and Ministral also
have a sliding window on all layers, some or none; CWM has it on most. In SmolLM3 every fourth layer has no rotary
embedding.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, translated, with_classifiers
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def llama(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias)
        if layer not in config.unrotated:
            graph.rope(qkv)
        attended = graph.span_attention(qkv, layer, window=config.window(layer))
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attn", bias=bias))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", bias=config.mlp_bias))
    return finish(graph, x)


def _cwm(fields: Fields) -> Fields:
    """Defaults are the published model's, as in transformers: the first of four layers sees all positions, and the
    rotary embedding is scaled.
    """
    values: dict[str, Any] = {}
    if fields.get("layer_types", list) is None:
        count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
        values["layer_types"] = ["sliding_attention" if i % 4 else "full_attention" for i in range(count)]
    if not (fields.get("rope_parameters", dict) or fields.get("rope_scaling", dict)):
        values["rope_scaling"] = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return translated(fields, **values)


def _internlm3(fields: Fields) -> Fields:
    """The names of its bias fields; transformers serves the same cases."""
    biases = {name: fields.get(name, bool, False) for name in ("qkv_bias", "bias")}
    if biases["qkv_bias"] != biases["bias"]:
        raise fields.error("qkv_bias", f"is {biases['qkv_bias']} with bias={biases['bias']}: they must be equal")
    old = {"attention_bias": biases["bias"], "mlp_bias": biases["bias"]}
    return translated(fields, **{**old, **fields.values})


ARCHITECTURES = with_classifiers({
    "LlamaForCausalLM": Architecture(llama, "llama", "Llama 2, 3, 3.1, 3.2", kv_heads_required=False,
                                     has_bias_fields=True),
    "MistralForCausalLM": Architecture(llama, "mistral", "Mistral", windows=True, window=4096, layer_types=False),
    "MinistralForCausalLM": Architecture(llama, "ministral", "Ministral", windows=True, window=4096),
    "SmolLM3ForCausalLM": Architecture(llama, "smollm3", "SmolLM3", has_bias_fields=True, windows=True,
                                       nope_layers=True, rope_theta=2e6, tied=True),
    "InternLM3ForCausalLM": Architecture(llama, "internlm3", "InternLM3", kv_heads_required=False, head_dim=128,
                                         has_bias_fields=True, translate=_internlm3),
    "CwmForCausalLM": Architecture(llama, "cwm", "CWM", windows=True, window=8192, rope_theta=1e6, translate=_cwm),
}, "Llama", "Mistral")
