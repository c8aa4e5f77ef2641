"""OLMo 2: norms only after attention and MLP; one norm over all queries and one over all keys. OLMo 3 has windows on
most layers; these layers have a rotary embedding without scaling.
"""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.blocks import LOCAL, begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def olmo2(config: ModelConfig) -> Graph:
    """Builds the network."""
    bias = config.attention_bias
    graph, x = begin(config)
    for layer in range(config.num_layers):
        prefix, window = f"model.layers.{layer}", config.window(layer)
        attention = f"{prefix}.self_attn"
        qkv = qkv_projection(graph, x, attention, bias=bias)
        graph.qk_norm(qkv, f"{attention}.q_norm.weight", f"{attention}.k_norm.weight")
        graph.rope(qkv, **({"table": LOCAL} if window and config.local_rope is not None else {}))
        attended = graph.span_attention(qkv, layer, window=window)
        y = output_projection(graph, attended, attention, bias=bias)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_attention_layernorm.weight"))
        y = gated_mlp(graph, x, f"{prefix}.mlp")
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_feedforward_layernorm.weight"))
    return finish(graph, x)


ARCHITECTURES = {
    "Olmo2ForCausalLM": Architecture(olmo2, "olmo2", "OLMo 2", kv_heads_required=False, has_bias_fields=True),
    "Olmo3ForCausalLM": Architecture(olmo2, "olmo3", "OLMo 3", kv_heads_required=False, has_bias_fields=True,
                                     windows=True, window=4096, window_pattern=4, local_theta=0.0),
}
