"""What a model gives for a text, for its description: pooling and prompts of embedders, labels of classifiers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.sentence_modules import read_modules
from allspark_server.weights.files import read_json


def text_outputs(graph: Graph, directory: str | None) -> dict[str, Any]:
    """The fields of ModelInfo that say it. directory: of the tokenizer and the checkpoint's JSON files."""
    modules = read_modules(directory)
    found: dict[str, Any] = {"only_pools": not graph.generates, "whole_texts": graph.whole_texts,
                             "prompts": modules.prompts, "default_prompt": modules.default_prompt}
    last = next((op for op in graph.ops if op.type == "hidden_states"), None)
    if last is None:
        return found
    made = next((op for op in graph.ops if op.type == "pool_rows"), None)
    found["pooling"] = str(made.attrs["pooling"]) if made else modules.pooling or "last"
    width = graph.tensors[last.inputs[0]].width_of(0, 1)
    if graph.generates or last.inputs[0] != "scores":
        return {**found, "embedding_size": width}
    if modules.compared:
        return {**found, "labels": ["relevant"], "score_function": "odds" if len(modules.compared) > 1 else "sigmoid"}
    return {**found, **_labels(directory, width)}


def _labels(directory: str | None, count: int) -> dict[str, Any]:
    """The names of a classifier's labels, and the function that makes scores of its logits."""
    path = Path(directory or "", "config.json")
    fields = Fields(read_json(path) if directory and os.path.lexists(path) else {}, path)
    names = fields.get("id2label", dict, {})
    labels = [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)]
    own = fields.get("sentence_transformers", dict, {})
    activation = own.get("activation_fn") or fields.get("sbert_ce_default_activation_function", str, "")
    function = "sigmoid" if count == 1 or fields.get("problem_type", str) == "multi_label_classification" else "softmax"
    return {"labels": labels, "score_function": "identity" if str(activation).endswith("Identity") else function}
