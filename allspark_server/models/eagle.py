"""EAGLE-3 heads (arXiv 2503.01840): a draft head that was trained for a model by others, in a directory of its own.

It takes what three layers of the model see, low, middle and high, joined by one matrix, and, for further drafts, its
own residual stream. Its vocabulary may be a part of the model's.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.blocks import begin, gated_mlp, output_projection
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Op, Part, Weight
from allspark_server.models.network import ModelConfig

PREFIX = "eagle."  # of the names of the head's tensors, beside those of the model
JOINS = tuple(f"{PREFIX}fc.{i}.weight" for i in range(3))  # the columns of `fc` for each of the three layers
COLUMNS = f"{PREFIX}columns"  # for each token of the model, its row of the head's output matrix; -1: none
LAYER = re.compile(r"\.(?:layers|h|blocks)\.([0-9]+)\.")


@dataclass(frozen=True)
class EagleHead:
    """A head as its config.json describes it.

    config: of the head's layer, with the model's vocabulary. drafted: tokens of its output matrix; mapped: whether
    these are others than the model's, in its order. embedding: whether it has one of its own. normed_residual: whether
    the residual stream begins with the normed hidden state. layers: of the model, before which the residual stream is
    taken; the number of layers stands for the end.
    """

    config: ModelConfig
    drafted: int
    embedding: bool
    mapped: bool
    normed_residual: bool
    layers: tuple[int, int, int]


def eagle_graph(head: EagleHead) -> Graph:
    """The head's network."""
    config, layer = head.config, f"{PREFIX}midlayer"
    size, bias = config.hidden_size, config.attention_bias
    graph, x = begin(config, f"{PREFIX}embed_tokens.weight" if head.embedding else "model.embed_tokens.weight")
    state = graph.kept_hidden()
    normed = graph.rms_norm(state, f"{layer}.hidden_norm.weight", out="given_normed")
    both = graph.concat(graph.rms_norm(x, f"{layer}.input_layernorm.weight"), normed)
    weight, added = graph.packed(f"{layer}.self_attn", ("q_proj", "k_proj", "v_proj"),
                                 (graph.q_heads, graph.kv_heads, graph.kv_heads), 2 * size, bias)
    qkv = graph.linear(both, weight, added, out="qkv")
    attended = graph.span_attention(graph.rope(qkv), 0)
    stream = normed if head.normed_residual else state
    graph.add(stream, output_projection(graph, attended, f"{layer}.self_attn", bias=bias))
    h = graph.rms_norm(stream, f"{layer}.post_attention_layernorm.weight")
    graph.add(stream, gated_mlp(graph, h, f"{layer}.mlp", bias=config.mlp_bias))
    graph.keep_hidden(stream)
    last = graph.rms_norm(graph.select_rows(stream), f"{PREFIX}norm.weight")
    graph.hidden_states(last)
    if not head.mapped:
        output = graph.matrix(f"{PREFIX}lm_head.weight", head.drafted, size, row_split=graph.vocab)
        graph.sample(graph.linear(last, output, None, out="logits"))
        return graph
    # Each rank has all rows: the part that its share of the model's vocabulary needs may be of any size.
    output = graph.matrix(f"{PREFIX}lm_head.weight", head.drafted, size)
    columns = graph.vector(COLUMNS, config.vocab_size, graph.vocab)
    graph.sample(graph.op("spread_columns", graph.linear(last, output, None, out="drafted_logits"), weights=(columns,),
                          out="logits", blocks=(Block(config.vocab_size, graph.vocab),)))
    return graph


def with_joined_layers(graph: Graph, layers: tuple[int, ...]) -> Graph:
    """The same model, which keeps for an EAGLE-3 head the sum of its matrices' products with the residual stream before
    these layers. ValueError if a layer is not found, AllSparkError if there are several streams.
    """
    if graph.config.streams is not None:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"an EAGLE-3 head is not served for "
                            f"{graph.config.architecture}: it has several residual streams")
    size, select = graph.config.hidden_size, graph.selection
    first = {graph.config.num_layers: select}
    for place, op in enumerate(graph.ops):
        for found in filter(None, map(LAYER.search, op.weights)):
            first.setdefault(int(found[1]), place)
    missing = [layer for layer in layers if layer not in first]
    if missing:
        raise ValueError(f"{graph.config.architecture} has no layer {missing[0]}")
    stream = graph.tensors[graph.ops[select].inputs[0]]
    other = copy.copy(graph)
    sums, part = (replace(stream, name=name) for name in ("kept_states", "kept_part"))
    other.tensors = {**graph.tensors, sums.name: sums, part.name: part}
    other.weights = {**graph.weights, **{name: Weight(name, (Part(name, size),), size) for name in JOINS}}
    more: dict[int, list[Op]] = {}
    order = sorted(range(len(layers)), key=lambda i: first[layers[i]])
    for n, i in enumerate(order):
        ops = more.setdefault(first[layers[i]], [])
        ops.append(Op("linear", (stream.name,), (part.name if n else sums.name,), (JOINS[i],)))
        if n:
            ops.append(Op("add", (sums.name, part.name), (sums.name,)))
    more.setdefault(select, []).append(Op("keep_hidden", (sums.name,)))
    other.ops = [op for place, each in enumerate(graph.ops) for op in (*more.get(place, ()), each)]
    return other
