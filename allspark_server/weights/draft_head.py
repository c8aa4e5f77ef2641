"""Finds the layers of the draft head in a checkpoint (models/draft_heads.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.draft_heads import DraftHead, head_config
from allspark_server.models.registry import ARCHITECTURES
from allspark_server.weights.checkpoint import OpenedModel, quantized_graph
from allspark_server.weights.sources import Source

SAMPLED_ROWS = 64  # rows by which two output matrices are compared: no output depends on the answer


def _head_of(model: OpenedModel) -> DraftHead | None:
    """How the model's family stores draft heads; None if it has none."""
    architecture = ARCHITECTURES.get(model.graph.config.architecture)
    return architecture.draft_head if architecture else None


def find_layers(model: OpenedModel) -> list[str]:
    """The prefixes of the names of tensors of the draft head's layers in the model's checkpoint; [] if it has none."""
    head, first = _head_of(model), model.graph.config.num_layers
    if head is None:
        return []
    names = set(model.source.names())
    prefixes = (head.prefix.format(index=index, number=first + index) for index in itertools.count())
    return list(itertools.takewhile(lambda prefix: f"{prefix}.{head.mark}" in names, prefixes))


def is_of_head(model: OpenedModel, prefixes: list[str], name: str) -> bool:
    """Whether a tensor of the checkpoint belongs to its draft head. prefixes: of find_layers()."""
    head = _head_of(model)
    return head is not None and name.startswith(
        (*(f"{prefix}." for prefix in prefixes), *([head.shared] if head.shared and prefixes else [])))


def open_layer(model: OpenedModel, name: str, index: int) -> OpenedModel:
    """A layer of the draft head of a model, as a model of its own. name: the model's, for errors."""
    head, prefixes, config, source = _head_of(model), find_layers(model), model.graph.config, model.source
    if head is None or not prefixes:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"speculation='mtp' of model {name!r}: {source.where()} has no draft head that is served "
                            f"for {config.architecture}; use speculation='prompt_lookup' or 'draft'")
    prefix = prefixes[index]
    config = head_config(config, any(n.startswith(f"{prefix}.") and n.endswith(".experts.gate_up_proj")
                                     for n in source.names()))
    output, shared = f"{prefix}.{head.output}", "lm_head.weight"
    if config.tie_word_embeddings:
        shared = "model.embed_tokens.weight"
    if not head.output or output not in source.names() or _alike(source, output, shared):
        output = shared
    else:
        config = replace(config, tie_word_embeddings=False)
    try:
        graph = quantized_graph(head.build(config, prefix, output), source)
    except ValueError as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"layer {index} of the draft head in {source.where()} describes no network: "
                            f"{error}") from None
    return OpenedModel(graph, source, None)


def _alike(source: Source, name: str, other: str) -> bool:
    """Whether two unquantized matrices have the same type and shape, and the same values in some rows."""
    if other not in source.names() or source.form(name) or source.form(other):
        return False
    a, b = source.get(name), source.get(other)
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not all(a.shape) or a.data is None or b.data is None:
        return False
    rows = np.linspace(0, a.shape[0] - 1, SAMPLED_ROWS, dtype=np.int64)
    return all(np.array_equal(a.values[row], b.values[row]) for row in rows)
