"""The parts of a graph in a mixed group: the model without its routed experts, and the experts alone.

The model's part sends each layer's rows with their choices of experts (dispatch_rows) and adds the sums that the ranks
of experts return (returned_sums), as late as the first op that needs them: a shared expert is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allspark_server.models.cache_groups import CacheGroup
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import ALL_ROWS, OUTPUT_ROWS, Op


def model_part(graph: Graph, sends: bool = True) -> Graph:
    """What a rank of the model computes. sends: it is the first of them, which exchanges messages with ranks of
    experts; others take zeros for their sums, which the sum over the model's ranks adds to the first one's. They have
    the same ops, because ranks exchange rows as their readers store them. ValueError if the graph has no routed
    experts, or routes rows other than those of a step or its outputs.
    """
    ops: list[Op] = []
    elsewhere: dict[str, Any] = {} if sends else {"elsewhere": True}
    awaited = ""    # the buffer of sums that were not received yet
    layers = iter(list(_layers(graph)))
    layer = next(layers)
    sent = 0
    for number, op in enumerate(graph.ops):
        if awaited and (awaited in op.inputs or awaited in op.outputs):
            ops.append(Op("returned_sums", (), (awaited,), attrs=elsewhere))
            awaited = ""
        if number in layer.numbers:
            if number == layer.numbers[0]:
                ops.append(Op("dispatch_rows", (layer.source, layer.routed), attrs={"layer": sent, **elsewhere}))
                sent += 1
            if op.type == "combine_experts":
                awaited = layer.sums
                layer = next(layers, layer)
        else:
            ops.append(op)
    return graph.with_ops(ops)


def experts_part(graph: Graph, entries: bool = False, either: bool = False) -> Graph:
    """What the ranks of experts compute. entries: they return a row's entries, not their sum, because the model's rank
    computes other entries of the row; either: if a message asks for them. ValueError as model_part().
    """
    ops: list[Op] = []
    for i, layer in enumerate(_layers(graph)):
        *products, combine = (graph.ops[number] for number in layer.numbers)
        ops += [Op("dispatched_rows", (), (layer.source,), attrs={"layer": i}),
                Op("dispatched_choices", (layer.source,), (layer.routed,), attrs={"experts": layer.experts}), *products]
        returned = (layer.sums, *combine.inputs[:1]) if either else (layer.sums,)
        ops += [Op("return_sums", combine.inputs[:1])] if entries else [combine, Op("return_sums", returned)]
    part = graph.with_ops(ops)
    part.cache_groups = [CacheGroup()]
    return part


def expert_ops(graph: Graph) -> list[list[Op]]:
    """The ops of the routed experts of each layer, up to the sum of each row's experts. ValueError as model_part()."""
    return [[graph.ops[number] for number in layer.numbers] for layer in _layers(graph)]


def message_sizes(graph: Graph, entries: bool = False) -> tuple[int, int, int]:
    """Of the largest message between the model's rank and those of experts: the width of a row, the number of its
    experts, and the width of its sum, or of its entries.
    """
    def width(name: str) -> int:
        return sum(block.width for block in graph.tensors[name].blocks)

    layers = list(_layers(graph))
    top = max(graph.row_sets[graph.tensors[layer.routed].rows].times for layer in layers)
    return (max(width(layer.source) for layer in layers), top,
            max(width(layer.sums) for layer in layers) * (top if entries else 1))


class _Layer:
    """A layer's routed experts: the buffers of their rows, of the weights of the router's entries and of the sums, the
    number of experts, and the numbers of their ops in the graph.
    """

    def __init__(self, graph: Graph, router: Op, numbers: list[int]):
        linear, combine = graph.ops[numbers[0]], graph.ops[numbers[-1]]
        (self.source,), (self.routed,), (self.sums,) = linear.inputs, router.outputs, combine.outputs
        self.numbers = numbers
        self.experts = sum(block.width for block in graph.tensors[router.inputs[0]].blocks)
        if any(graph.tensors[name].rows not in (ALL_ROWS, OUTPUT_ROWS) for name in (self.source, self.sums)):
            raise ValueError(f"{graph.config.architecture} routes other rows than those of a step or its outputs")


def _layers(graph: Graph) -> Iterator[_Layer]:
    """The layers with routed experts."""
    router: Op | None = None
    numbers: list[int] = []
    found = False
    for number, op in enumerate(graph.ops):
        if op.type == "router":
            router = op
        elif op.type == "combine_experts" or any(graph.tensors[name].rows in graph.row_sets for name in op.outputs):
            numbers.append(number)
            if op.type == "combine_experts":
                assert router is not None
                yield _Layer(graph, router, numbers)
                found, numbers = True, []
    if not found:
        raise ValueError(f"{graph.config.architecture} has no routed experts")
