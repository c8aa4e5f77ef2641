"""The linear layers of a network that LoRA adapters can change, under the names that the checkpoint gives them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from allspark_server.models.graph import Graph, Part, Weight

_SUFFIX = ".weight"


@dataclass(frozen=True)
class Target:
    """A linear layer of the checkpoint. Its rows are `parts` of `weight`, one after the other; each part makes a block
    of the output.
    """

    module: str
    weight: Weight
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Output features of the whole layer."""
        return self.parts[0].stored_rows


def with_adapters(graph: Graph) -> tuple[Graph, list[Target]]:
    """The same network with an op for adapters after each linear layer that is a module of the checkpoint; returns it
    and the targets of these ops. Experts, an embedding that is also the head, and matrices whose parts are not blocks
    of their output (layers that the checkpoint stores interleaved) are not targets.
    """
    other, targets = copy.copy(graph), list[Target]()
    other.ops = []
    embeddings = {op.weights[0] for op in graph.ops if op.type == "embedding"}
    for op in graph.ops:
        other.append(op)
        if op.type != "linear" or op.weights[0] in embeddings:
            continue
        weight, block = graph.weights[op.weights[0]], 0
        y, x = graph.tensors[op.outputs[0]], graph.tensors[op.inputs[0]]
        if len(weight.parts) != len(y.blocks):
            continue
        while block < len(weight.parts):
            name = weight.parts[block].tensor
            parts = tuple(part for part in weight.parts[block:] if part.tensor == name)
            if name.endswith(_SUFFIX) and sum(part.rows for part in parts) == parts[0].stored_rows:
                other.lora(y, x, len(targets), block, len(parts))
                targets.append(Target(name.removesuffix(_SUFFIX), weight, parts))
            block += len(parts)
    return other, targets
