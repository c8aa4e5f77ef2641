"""Pieces that the model files share. Names follow the checkpoints of transformers."""

from __future__ import annotations

from allspark_server.models.config import ModelConfig
from allspark_server.models.graph import Graph, Tensor
from allspark_server.models.rotary import rotary_of


def begin(config: ModelConfig) -> tuple[Graph, Tensor]:
    """An empty graph with the rotary table and the token embedding, and the residual stream."""
    graph = Graph(config)
    graph.rotary_table(rotary_of(config))
    embedding = graph.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size, row_split=graph.vocab)
    return graph, graph.embedding(embedding)


def qkv_projection(graph: Graph, x: Tensor, prefix: str, *, bias: bool) -> Tensor:
    """Queries, keys and values by one packed matrix: columns [query heads | key heads | value heads]."""
    weight, added = graph.packed(prefix, ("q_proj", "k_proj", "v_proj"),
                                 (graph.q_heads, graph.kv_heads, graph.kv_heads), graph.config.hidden_size, bias)
    return graph.linear(x, weight, added, out="qkv")


def output_projection(graph: Graph, attended: Tensor, prefix: str, *, bias: bool = False) -> Tensor:
    return graph.row_parallel_linear(attended, f"{prefix}.o_proj", graph.q_heads, bias, out="branch")


def gated_mlp(graph: Graph, x: Tensor, prefix: str, *, bias: bool = False) -> Tensor:
    """down(silu(gate(x)) * up(x)), gate and up packed into one matrix."""
    weight, added = graph.packed(prefix, ("gate_proj", "up_proj"), (graph.intermediate, graph.intermediate),
                                 graph.config.hidden_size, bias)
    activated = graph.silu_mul(graph.linear(x, weight, added, out="gate_up"))
    return graph.row_parallel_linear(activated, f"{prefix}.down_proj", graph.intermediate, bias, out="branch")


def finish(graph: Graph, x: Tensor) -> Graph:
    """Final norm, head (the embedding itself when tied) and sampling, for the rows that sample."""
    config = graph.config
    normed = graph.rms_norm(graph.select_rows(x), "model.norm.weight")
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    head = graph.matrix(name, config.vocab_size, config.hidden_size, row_split=graph.vocab)
    graph.hidden_states(normed)
    graph.sample(graph.linear(normed, head, None, out="logits"))
    return graph
