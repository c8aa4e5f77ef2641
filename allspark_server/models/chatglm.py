"""ChatGLM2, ChatGLM3 and GLM-4 as it was first published: GLM-4's network (glm.py) under other names, with queries,
keys and values as one tensor.
"""

from __future__ import annotations

from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, sliced_qkv
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig


def chatglm(config: ModelConfig) -> Graph:
    graph, x = begin(config, "transformer.embedding.word_embeddings.weight")
    for layer in range(config.num_layers):
        prefix = f"transformer.encoder.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        qkv = sliced_qkv(graph, h, f"{prefix}.self_attention.query_key_value", bias=config.attention_bias)
        attended = graph.span_attention(graph.rope(qkv, pairs="interleaved"), layer)
        graph.add(x, output_projection(graph, attended, f"{prefix}.self_attention", "dense"))
        h = graph.rms_norm(x, f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, gated_mlp(graph, h, f"{prefix}.mlp", ("dense_h_to_4h", "dense_4h_to_h")))
    return finish(graph, x, "transformer.encoder.final_layernorm.weight", "transformer.output_layer.weight")
