"""From the graph, which describes the whole model, to one rank's program."""

from __future__ import annotations

from typing import Any

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.graph import ALL_ROWS, OUTPUT_ROWS, Graph, Op
from allspark_server.models.ops import Attribute
from allspark_server.runtime.native import native_library


def check_ranks(graph: Graph, world: int) -> None:
    """Every rank needs work; raises AllSparkError when the model has less than `world` of something it divides."""
    wanted = [("query heads", graph.config.num_heads), ("units of its vocabulary", graph.vocab.units)]
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
    """The op's attributes for one rank: columns and heads counted in the rank's own buffers."""
    attrs = dict(op.attrs)
    blocks = graph.tensors[op.inputs[0]].blocks if op.inputs else ()
    widths = [block.width_of(rank, world) for block in blocks]
    head_dim = int(attrs.get("head_dim", 1))
    if op.type == "embedding":
        attrs["vocab_begin"] = graph.weights[op.weights[0]].parts[0].range_of(rank, world)[0]
    elif op.type == "head_norm":
        block = int(attrs.pop("block"))
        attrs["offset"], attrs["heads"] = sum(widths[:block]), widths[block] // head_dim
    elif op.type == "qk_square_sums":  # a KV head that two ranks hold counts on the first of them
        begin, end = blocks[1].range_of(rank, world)
        first = max(begin, blocks[1].range_of(rank - 1, world)[1]) if rank else begin
        attrs["q_columns"], attrs["k_offset"], attrs["k_columns"] = widths[0], widths[0] + first - begin, end - first
    elif op.type == "qk_norm":
        attrs["q_columns"], attrs["k_columns"] = widths[:2]
    elif op.type == "rope":
        attrs["offset"], attrs["heads"] = 0, (widths[0] + widths[1]) // head_dim
    elif op.type == "span_attention":
        attrs["q_heads"], attrs["kv_heads"] = widths[0] // head_dim, widths[1] // head_dim
        attrs["q_head_begin"] = blocks[0].range_of(rank, world)[0] // head_dim
        attrs["kv_begin"] = blocks[1].range_of(rank, world)[0] // head_dim
    elif op.type == "lora":
        block, count = int(attrs.pop("block", 0)), int(attrs.pop("blocks", 1))
        attrs["offset"], attrs["columns"] = sum(widths[:block]), sum(widths[block:block + count])
    elif op.type == "expert_linear":
        begin, end = graph.weights[op.weights[0]].experts_of(rank, world)
        attrs["experts"], attrs["expert_begin"] = end - begin, begin
    elif op.type == "sample":
        attrs["vocab_begin"] = blocks[0].range_of(rank, world)[0]
    return attrs


def add_ops(graph: Graph, program: Any, weights: dict[str, int], rank: int, world: int) -> None:
    """Declares the rank's activation buffers and ops in a program; weights: its id for each weight's name."""
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
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"the model's graph cannot be: {error}") from error
    for number, op in enumerate(graph.ops):
        try:
            program.add_op(op.type, [tensors[n] for n in op.inputs], [tensors[n] for n in op.outputs],
                            [weights[n] for n in op.weights], local_attrs(graph, op, rank, world))
        except (LookupError, ArithmeticError, TypeError, ValueError) as error:  # an .asgraph may hold any ops
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"op {number} ({op.type}) of the model's graph cannot be: {error}") from error
