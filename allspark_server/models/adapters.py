"""The linear layers of a network that LoRA adapters can change, under the names that the checkpoint gives them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Op, Part, Weight

_SUFFIX = ".weight"
# Names of a layer's experts in transformers 5 and before, for families where these differ.
_RENAMED = ("mlp", "block_sparse_moe")


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a parameter with the weights of all of a layer's experts that belong to a target.

    names: what the module that holds it may be called. parameter: its name there. first, step: the target's rows are
    first, first + step, ... of `rows`.
    """

    names: tuple[str, ...]
    parameter: str
    expert: int
    experts: int
    rows: int
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class Target:
    """A linear layer of the checkpoint. Its rows are `parts` of `weight`, one after the other; each part makes a block
    of the output.

    module: its name. aliases: other names that an expert's layer has. of_experts: where transformers 5 has an expert's
    layer; None for other layers.
    """

    module: str
    weight: Weight
    parts: tuple[Part, ...]
    aliases: tuple[str, ...] = ()
    of_experts: ExpertRows | None = None

    @property
    def rows(self) -> int:
        """Output features of the whole layer."""
        return self.parts[0].stored_rows if self.of_experts is None else self.parts[0].rows

    def row_of(self, part: Part) -> int:
        """The layer's first row that belongs to a part."""
        return part.first if self.of_experts is None else 0


def with_adapters(graph: Graph) -> tuple[Graph, list[Target]]:
    """The same network with an op for adapters after each linear layer that is a module of the checkpoint; returns it
    and the targets of these ops. An embedding that is also the head, and matrices whose parts are not blocks of their
    output (layers that the checkpoint stores interleaved) are not targets.
    """
    other, targets = copy.copy(graph), list[Target]()
    other.ops = []
    embeddings = {op.weights[0] for op in graph.ops if op.type == "embedding"}
    for op in graph.ops:
        other.append(op)
        if op.type == "expert_linear":
            y, x = graph.tensors[op.outputs[0]], graph.tensors[op.inputs[0]]
            for block, found in enumerate(_of_experts(graph, op)):
                other.expert_lora(y, x, len(targets), len(found), block)
                targets += found
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


def _of_experts(graph: Graph, op: Op) -> Iterator[list[Target]]:
    """For each block of an expert_linear's output, the targets of its experts in order."""
    weight = graph.weights[op.weights[0]]
    holder, _, last = weight.name.rpartition(".")       # see routed_experts()
    kinds = last.split("+")
    names = tuple(dict.fromkeys([holder, *(holder.replace(f".{a}.", f".{b}.")
                                           for a, b in (_RENAMED, _RENAMED[::-1]))]))
    for block, kind in enumerate(kinds):
        found = []
        for expert in range(weight.experts):
            part = weight.parts[expert * len(kinds) + block]
            modules = [f"{name}.{expert}.{kind}" for name in names]
            interleaved = graph.config.swiglu is not None and len(kinds) > 1    # as gpt-oss stores gate and up
            rows = ExpertRows(names, "gate_up_proj" if len(kinds) > 1 else "down_proj", expert, weight.experts,
                              len(kinds) * part.rows, block if interleaved else block * part.rows,
                              len(kinds) if interleaved else 1)
            found.append(Target(modules[0], weight, (part,), tuple(modules[1:]), rows))
        yield found
