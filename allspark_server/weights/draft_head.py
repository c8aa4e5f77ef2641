"""Finds the draft head in a checkpoint (models/draft_heads.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.draft_heads import DraftHead, head_config
from allspark_server.models.registry import ARCHITECTURES
from allspark_server.weights.checkpoint import OpenedModel, Source, quantized_graph

SAMPLED_ROWS = 64  # rows by which two output matrices are compared: no output depends on the answer


def find_head(model: OpenedModel) -> tuple[DraftHead, str] | None:
    """The draft head in the model's checkpoint and the prefix of the names of its tensors; None if none is found."""
    config = model.graph.config
    architecture = ARCHITECTURES.get(config.architecture)
    head = architecture.draft_head if architecture else None
    prefix = head.prefix.format(layers=config.num_layers) if head else ""
    return (head, prefix) if head and f"{prefix}.{head.mark}" in model.source.names() else None


def open_head(model: OpenedModel, name: str) -> OpenedModel:
    """The draft head of a model, as a model of its own. name: the model's, for errors."""
    found, config, source = find_head(model), model.graph.config, model.source
    if found is None:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"speculation='mtp' of model {name!r}: {source.where()} has no draft head that is served "
                            f"for {config.architecture}; use speculation='prompt_lookup' or 'draft'")
    head, prefix = found
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
                            f"the draft head in {source.where()} describes no network: {error}") from None
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
