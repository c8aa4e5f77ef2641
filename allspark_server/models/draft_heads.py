"""Draft heads that checkpoints bring (multi-token prediction, arXiv 2412.19437, section 2.2): one or several more
layers, which draft the tokens after the next one from the model's hidden states. Layer i makes draft i from the states
of the layer before it, and the last layer makes all further drafts from its own. Each layer is a network of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from allspark_server.models.blocks import begin, finish
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import ModelConfig

#: adds a layer to a graph: the residual stream, the prefix of the names of its tensors, its number
Layer = Callable[[Graph, Tensor, str, int], None]


@dataclass(frozen=True)
class DraftHead:
    """A family's draft head.

    prefix: of the names of a layer's tensors, with {index} for its index in the head and {number} for that plus the
    number of the model's layers. mark: the name of a tensor that every such layer has, without the prefix. output: the
    same of an output matrix of its own, "" if it has none. shared: prefix of the names of tensors that all layers
    share, "" if there are none. build: makes a layer's graph from its config, the prefix and the name of the output
    matrix.
    """

    prefix: str
    mark: str
    output: str
    shared: str
    build: Callable[[ModelConfig, str, str], Graph]


def head_config(config: ModelConfig, stacked: bool) -> ModelConfig:
    """The config of a draft head's layer, with experts if the model has some. stacked: see ExpertConfig."""
    experts = config.experts and replace(config.experts, dense_layers=(), stacked=stacked)
    return replace(config, num_layers=1, experts=experts, delta=None, streams=None)


def _merged(graph: Graph, x: Tensor, embedding_norm: str, hidden_norm: str, projection: str,
            unit_offset: int = 0, hidden_first: bool = False) -> Tensor:
    """The projection of a row's embedding and hidden state, both normed. hidden_first: their order is the other one."""
    size = graph.config.hidden_size
    more: dict[str, Any] = {"unit_offset": unit_offset} if unit_offset else {}
    parts = (graph.rms_norm(x, embedding_norm, **more),
             graph.rms_norm(graph.kept_hidden(), hidden_norm, out="given_normed", **more))
    both = graph.concat(*(reversed(parts) if hidden_first else parts))
    return graph.linear(both, graph.matrix(projection, size, 2 * size), None, out="merged")


def next_n_head(layer: Layer, rotary: bool = True, normed: bool = False) -> DraftHead:
    """DeepSeek's and GLM's, stored as further layers. The next layer takes the hidden state before the norm, or after
    it if `normed`. rotary: it has a rotary embedding.
    """
    def build(config: ModelConfig, prefix: str, output: str) -> Graph:
        graph, x = begin(config, rotary=rotary)
        x = _merged(graph, x, f"{prefix}.enorm.weight", f"{prefix}.hnorm.weight", f"{prefix}.eh_proj.weight")
        layer(graph, x, prefix, 0)
        if not normed:
            graph.keep_hidden(x)
        # It reads positions that the model's windows may have left behind.
        graph = finish(graph, x, f"{prefix}.shared_head.norm.weight", output).with_whole_histories()
        return graph.with_kept_hidden() if normed else graph

    return DraftHead("model.layers.{number}", "eh_proj.weight", "shared_head.head.weight", "", build)


def mtp_head(layer: Layer) -> DraftHead:
    """Qwen's, whose norms multiply by 1 + w. The next layer takes the hidden state after the norm; all share the norms
    and the projection.
    """
    def build(config: ModelConfig, prefix: str, output: str) -> Graph:
        graph, x = begin(config)
        x = _merged(graph, x, f"{shared}pre_fc_norm_embedding.weight", f"{shared}pre_fc_norm_hidden.weight",
                    f"{shared}fc.weight", 1)
        layer(graph, x, prefix, 0)
        return finish(graph, x, f"{shared}norm.weight", output, unit_offset=1).with_kept_hidden()

    shared = "mtp."
    return DraftHead("mtp.layers.{index}", "input_layernorm.weight", "", shared, build)


def mimo_head(layer: Layer) -> DraftHead:
    """MiMo's, whose projection takes the hidden state before the embedding. The next layer takes the hidden state after
    the norm.
    """
    def build(config: ModelConfig, prefix: str, output: str) -> Graph:
        graph, x = begin(config)
        x = _merged(graph, x, f"{prefix}.token_layernorm.weight", f"{prefix}.hidden_layernorm.weight",
                    f"{prefix}.input_proj.weight", hidden_first=True)
        layer(graph, x, prefix, 0)
        return finish(graph, x, f"{prefix}.final_layernorm.weight", output).with_kept_hidden()

    return DraftHead("model.mtp_layers.{index}", "input_proj.weight", "", "", build)
