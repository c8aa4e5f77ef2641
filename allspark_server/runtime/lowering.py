"""Turns the graph of the whole model into one rank's program."""

from __future__ import annotations

from typing import Any

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import ALL_ROWS, OUTPUT_ROWS, Op
from allspark_server.models.ops import Attribute, op_spec
from allspark_server.runtime.native import native_library


def check_ranks(graph: Graph, world: int, experts: bool = False) -> None:
    """Raises AllSparkError if the model has fewer than `world` units of something that is divided among ranks. experts:
    the graph is that of a mixed group's ranks of experts.
    """
    wanted = [] if experts else [("query heads", graph.config.num_heads)]
    if graph.config.vision is None and not experts:
        wanted.append(("units of its vocabulary", graph.vocab.units))
    kinds = {"gated_delta": "key heads of layers with a state", "ssd": "groups of heads of layers with a state",
             "causal_conv": "units of channels of a convolution",
             "compressed_attention": "groups of heads of the output projection"}
    splits = [(name, graph.tensors[op.inputs[0]].blocks[0].split) for kind, name in kinds.items() for op in graph.ops
              if op.type == kind]
    wanted += [(name, split.units if split else 1) for name, split in splits]
    weights = list(graph.weights.values())
    wanted += [("units of intermediate features", weight.column_split.units) for weight in weights
               if weight.column_split is not None and weight.column_split.divides(world)]
    wanted += [("experts", weight.experts) for weight in weights
               if weight.experts and weight.parts[0].units is not None and weight.parts[0].units.divides(world)]
    for name, units in wanted:
        if units < world:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"the model cannot be divided among {world} ranks: it has {units} {name}")


def local_attrs(graph: Graph, op: Op, rank: int, world: int) -> dict[str, Attribute]:
    """The op's attributes for one rank, by the rules of the op table, for the columns and heads of its buffers."""
    spec = op_spec(op.type)
    blocks = graph.tensors[op.inputs[0]].blocks if op.inputs else ()
    widths = [block.width_of(rank, world) for block in blocks]
    attrs = {name: value for name, value in op.attrs.items() if spec.attributes[name].scope != "graph"}

    def value(rule: str, first: int, count: int) -> int:
        if rule not in ("weight_begin", "experts", "expert_begin") and first + count > len(blocks):
            raise IndexError(f"blocks {first} to {first + count - 1} of {len(blocks)}")
        columns, head_dim = sum(widths[first:first + count]), int(op.attrs.get("head_dim", 1))
        if rule in ("begin", "head_begin"):
            begin = blocks[first].range_of(rank, world)[0]
            return begin if rule == "begin" else begin // head_dim
        if rule in ("own_offset", "own_width"):  # if two ranks hold a KV head, only the first counts it
            begin = blocks[first].range_of(rank, world)[0]
            shared = max(0, blocks[first].range_of(rank - 1, world)[1] - begin) if rank else 0
            return sum(widths[:first]) + shared if rule == "own_offset" else columns - shared
        if rule == "weight_begin":
            return graph.weights[op.weights[0]].parts[0].range_of(rank, world)[0]
        if rule in ("experts", "expert_begin"):
            begin, end = graph.weights[op.weights[0]].experts_of(rank, world)
            return begin if rule == "expert_begin" else end - begin
        return {"offset": sum(widths[:first]), "width": columns, "heads": columns // head_dim}[rule]

    for a in spec.attributes.values():
        if a.scope == "rank":
            first, count = int(op.attrs.get("block", a.block)), int(op.attrs.get("blocks", a.blocks))
            if a.required or first < len(blocks):  # not keys, where there are none
                attrs[a.name] = value(a.rule, first, count)
    return attrs


def add_ops(graph: Graph, program: Any, weights: dict[str, int], rank: int, world: int) -> None:
    """Declares the rank's activation buffers and ops in a program. weights: the program's id for each weight's name.

    Raises AllSparkError if the program rejects one of them.
    """
    native = native_library()
    rows = {ALL_ROWS: native.ALL_ROWS, OUTPUT_ROWS: native.OUTPUT_ROWS}
    try:
        for group in graph.cache_groups:
            program.add_cache_group(group.kind, group.window)
        for row_set in graph.row_sets.values():
            rows[row_set.name] = program.add_row_set(rows[row_set.of], row_set.times)
        tensors = {name: program.add_tensor(tensor.width_of(rank, world), rows[tensor.rows])
                   for name, tensor in graph.tensors.items()}
    except ValueError as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"the model's graph is not valid: {error}") from error
    for number, op in enumerate(graph.ops):
        try:
            program.add_op(op.type, [tensors[n] for n in op.inputs], [tensors[n] for n in op.outputs],
                            [weights[n] for n in op.weights], local_attrs(graph, op, rank, world))
        except (LookupError, ArithmeticError, TypeError, ValueError) as error:  # an .asgraph may contain any ops
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"op {number} ({op.type}) of the model's graph is not valid: {error}") from error
