"""From the graph, which describes the whole model, to one rank's program."""

from __future__ import annotations

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.graph import Graph, Op
from allspark_server.models.ops import Attribute


def check_ranks(graph: Graph, world: int) -> None:
    """Every rank needs work; raises AllSparkError when the model has less than `world` of something it divides."""
    config = graph.config
    for name, units in (("query heads", config.num_heads), ("units of intermediate features", graph.intermediate.units),
                        ("units of its vocabulary", graph.vocab.units)):
        if units < world:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"the model cannot be divided among {world} ranks: it has {units} {name}")


def local_attrs(graph: Graph, op: Op, rank: int, world: int) -> dict[str, Attribute]:
    """The op's attributes for one rank: columns and heads counted in the rank's own buffers."""
    attrs = dict(op.attrs)
    blocks = graph.tensors[op.inputs[0]].blocks if op.inputs else ()
    widths = [block.width_of(rank, world) for block in blocks]
    head_dim = graph.config.head_dim
    if op.type == "embedding":
        attrs["vocab_begin"] = graph.weights[op.weights[0]].parts[0].range_of(rank, world)[0]
    elif op.type == "head_norm":
        block = int(attrs.pop("block"))
        attrs["offset"], attrs["heads"] = sum(widths[:block]), widths[block] // head_dim
    elif op.type == "rope":
        attrs["offset"], attrs["heads"] = 0, (widths[0] + widths[1]) // head_dim
    elif op.type == "span_attention":
        attrs["q_heads"], attrs["kv_heads"] = widths[0] // head_dim, widths[1] // head_dim
        attrs["q_head_begin"] = blocks[0].range_of(rank, world)[0] // head_dim
        attrs["kv_begin"] = blocks[1].range_of(rank, world)[0] // head_dim
    elif op.type == "sample":
        attrs["vocab_begin"] = blocks[0].range_of(rank, world)[0]
    return attrs


def add_ops(graph: Graph, program, weights: dict[str, int], rank: int, world: int) -> None:
    """Declares the rank's activation buffers and ops in a program; weights: its id for each weight's name."""
    tensors = {name: program.add_tensor(tensor.width_of(rank, world), tensor.logit_rows)
               for name, tensor in graph.tensors.items()}
    for number, op in enumerate(graph.ops):
        try:
            program.add_op(op.type, [tensors[n] for n in op.inputs], [tensors[n] for n in op.outputs],
                            [weights[n] for n in op.weights], local_attrs(graph, op, rank, world))
        except (LookupError, ArithmeticError, TypeError, ValueError) as error:  # an .asgraph may hold any ops
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"op {number} ({op.type}) of the model's graph cannot be: {error}") from error
