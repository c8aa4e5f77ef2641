"""Behind the last op whose rows depend on one another, only rows with outputs are computed.

Later rows read a prompt's row through the caches, which layers fill up to their attention, convolution or state. What
follows in the last layer (its output projection and its MLP or experts) matters for rows with outputs alone: of a
prompt, the last one. A row's values do not depend on which rows are computed beside it, so bits stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import ALL_ROWS, OUTPUT_ROWS, Op
from allspark_server.models.ops import op_spec

#: ops that compute each row, or each of its experts' entries, by itself
_ROW_BY_ROW = {
    "activate", "add", "all_reduce", "clamp", "clamped_silu_mul", "combine_experts", "concat", "expert_linear",
    "expert_lora", "gated_rms_norm", "gelu_mul", "gelu_tanh_mul", "head_norm", "layer_norm",
    "limited_silu_mul", "linear", "lora", "merge_streams", "mix_streams", "multiply", "qk_norm", "qk_square_sums",
    "relu_square", "rms_norm", "router", "scale", "sigmoid_gate", "sigmoid_mul", "silu_mul", "soft_cap",
    "stream_weights",
}


def with_early_selection(graph: Graph) -> Graph:
    """The same model, which selects OUTPUT_ROWS before the last layer's products where it can."""
    begin = end = graph.selection
    while begin and graph.ops[begin - 1].type in _ROW_BY_ROW:
        begin -= 1
    if not any(op.type in ("linear", "expert_linear") for op in graph.ops[begin:end]):
        return graph
    other = copy.copy(graph)
    other.tensors, other.row_sets = dict(graph.tensors), dict(graph.row_sets)
    selected: dict[str, str] = {}   # the buffer of selected rows for each buffer of all rows

    def select(name: str) -> str:
        tensor = graph.tensors[name]
        rows = OUTPUT_ROWS
        if formed := graph.row_sets.get(tensor.rows):
            rows = other.row_set(f"{formed.name}_of_outputs", formed.times, OUTPUT_ROWS)
        selected[name] = other.tensor(f"selected_{name}", tensor.blocks, rows).name
        return selected[name]

    selections, ops = list[Op](), list[Op]()    # all selections come first, so that ops are fused as in other layers
    for op in graph.ops[begin:end]:
        for name in op.inputs:
            if name not in selected:
                if graph.tensors[name].rows != ALL_ROWS:    # experts were chosen before
                    return graph
                selections.append(Op("select_rows", (name,), (select(name),)))
        inputs = tuple(selected[name] for name in op.inputs)
        outputs = inputs[:1] if op_spec(op.type).in_place else tuple(
            selected.get(name) or select(name) for name in op.outputs)
        ops.append(replace(op, inputs=inputs, outputs=outputs))
    (stream,), (result,) = graph.ops[end].inputs, graph.ops[end].outputs
    last = selected[stream]     # the last op computes it

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(last if name == result else name for name in names)

    return other.with_ops(graph.ops[:begin] + selections + ops + [
        replace(op, inputs=renamed(op.inputs), outputs=renamed(op.outputs)) for op in graph.ops[end + 1:]])
