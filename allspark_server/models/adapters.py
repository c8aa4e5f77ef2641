"""What of a network adapters (LoRA) may be for: its linear layers, as the checkpoint names them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from allspark_server.models.graph import Graph, Part, Weight

_SUFFIX = ".weight"


@dataclass(frozen=True)
class Target:
    """A linear layer of the checkpoint: `parts`, one after the other, are all of its rows; as many `blocks` of the
    columns that `weight` makes.
    """

    module: str
    weight: Weight
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Out features of the whole layer."""
        return self.parts[0].stored_rows


def with_adapters(graph: Graph) -> tuple[Graph, list[Target]]:
    """The same network with an op for adapters behind each linear layer that the checkpoint has as a module, and what
    the ops' targets are. Layers of experts have none, nor has an embedding that is the head too.
    """
    other, targets = copy.copy(graph), []
    other.ops = []
    embeddings = {op.weights[0] for op in graph.ops if op.type == "embedding"}
    for op in graph.ops:
        other.append(op)
        if op.type != "linear" or op.weights[0] in embeddings:
            continue
        weight, block = graph.weights[op.weights[0]], 0
        y, x = graph.tensors[op.outputs[0]], graph.tensors[op.inputs[0]]
        while block < len(weight.parts):
            name = weight.parts[block].tensor
            parts = tuple(part for part in weight.parts[block:] if part.tensor == name)
            if name.endswith(_SUFFIX) and sum(part.rows for part in parts) == parts[0].stored_rows:
                other.lora(y, x, len(targets), block, len(parts))
                targets.append(Target(name.removesuffix(_SUFFIX), weight, parts))
            block += len(parts)
    return other, targets
