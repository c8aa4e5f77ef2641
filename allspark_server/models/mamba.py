"""Layers with Mamba2's selective state space, which families mix with attention: the mixer, and its fields."""

from __future__ import annotations

import math
from typing import Any

from allspark_server.models.blocks import linear_of_parts
from allspark_server.models.fields import MAX_HEAD_DIM, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor
from allspark_server.models.network import MambaConfig
from allspark_server.weights.shard import Split


def mamba_mixer(graph: Graph, x: Tensor, prefix: str, mamba: MambaConfig) -> Tensor:
    """Projections [gate | x | B | C | dt], the convolution of x, B and C, the state space, and its gated norm. Ranks
    have whole groups of B and C with their heads; or heads, if there is one group.
    """
    groups, units = mamba.groups, mamba.heads if mamba.groups == 1 else mamba.groups
    inner, heads = Split(units, mamba.inner // units), Split(units, mamba.heads // units)
    shared = Block(groups * mamba.state_dim, Split(groups, mamba.state_dim) if groups > 1 else None)
    blocks = (Block(inner.width, inner), Block(inner.width, inner), shared, shared, Block(heads.width, heads))
    of = sum(block.width for block in blocks)

    def projected(out: str, first: int, end: int) -> Tensor:
        begins = [sum(block.width for block in blocks[:i]) for i in range(first, end)]
        parts = tuple(Part(f"{prefix}.in_proj.weight", block.width, block.split, begin, of)
                      for block, begin in zip(blocks[first:end], begins))
        return linear_of_parts(graph, x, f"{prefix}.in_proj.{out}", parts, blocks[first:end], out, mamba.bias)

    def scaled(out: str, index: int) -> Tensor:
        y = projected(out, index, index + 1)
        return graph.scale(y, mamba.factors[index]) if mamba.factors else y

    gate = scaled("output_gate", 0)
    if mamba.factors:
        both = graph.op("concat", scaled("mixed_x", 1), scaled("mixed_b", 2), out="mixed_xb", blocks=blocks[1:3])
        mixed = graph.op("concat", both, scaled("mixed_c", 3), out="mixed", blocks=blocks[1:4])
    else:
        mixed = projected("mixed", 1, 4)
    steps = scaled("steps", 4)
    mixed = graph.causal_conv(mixed, f"{prefix}.conv1d", taps=mamba.taps, bias=mamba.conv_bias)
    limits = {name: limit for name, limit in (("least_step", mamba.least_step), ("most_step", mamba.most_step))
              if limit is not None}
    y = graph.ssd(mixed, steps, prefix, mamba.state_dim, mamba.head_dim, **limits)
    norm = f"{prefix}.norm.weight"
    if mamba.norm == "values":
        graph.whole_norm(y, norm)
    if groups == 1 or mamba.norm != "products":
        graph.sigmoid_gate(graph.multiply(y, gate), gate)
    if groups == 1 and mamba.norm == "products":  # a norm over the heads of all ranks
        graph.whole_norm(y, norm)
    elif mamba.norm == "products":
        weight = graph.vector(norm, mamba.inner, inner)
        graph.op("gated_rms_norm", y, gate, weights=(weight,), eps=graph.config.rms_norm_eps, head_dim=inner.size,
                 gate="silu", gate_first=1)
    return graph.row_parallel_linear(y, f"{prefix}.out_proj", inner, mamba.bias, out="branch")


def mamba_config(fields: Fields, layers: tuple[int, ...], names: dict[str, str], **defaults: Any) -> MambaConfig:
    """Reads the layers' sizes. names: of the fields `heads`, `head_dim`, `groups`, `state_dim`, `taps`, `conv_bias`,
    `bias` and `limits`; defaults: of those that have one.
    """
    def size(name: str, most: int = 1 << 16) -> int:
        if names[name] in fields.values or name not in defaults:
            return fields.need_positive(names[name], most=most)
        return int(defaults[name])

    heads, groups = size("heads"), size("groups")
    if heads % groups:
        raise fields.error(names["heads"], f"is {heads}: {names['groups']} ({groups}) must divide it")
    least, most = _limits(fields, names["limits"])
    return MambaConfig(layers, heads, size("head_dim", MAX_HEAD_DIM), groups, size("state_dim", MAX_HEAD_DIM),
                       size("taps", 64), fields.get(names["conv_bias"], bool, True),
                       fields.get(names["bias"], bool, False), least, most)


_EXPANDED = {"heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups",
             "state_dim": "mamba_d_state", "taps": "mamba_d_conv", "conv_bias": "mamba_conv_bias",
             "bias": "mamba_proj_bias", "limits": "time_step_limit"}


def expanded_mamba(fields: Fields, layers: tuple[int, ...], inner: int = 0) -> MambaConfig:
    """Reads sizes under the names that begin with mamba_. inner: the features of all heads, 0: as mamba_expand says;
    they give the size of a head where mamba_d_head is "auto".
    """
    inner = inner or fields.get("mamba_expand", int, 2) * fields.need_positive("hidden_size")
    heads = fields.need_positive("mamba_n_heads", most=1 << 16)
    if fields.values.get("mamba_d_head", "auto") in ("auto", None):
        fields = Fields({**fields.values, "mamba_d_head": inner // heads}, fields.path)
    return mamba_config(fields, layers, _EXPANDED, groups=1, state_dim=256, taps=4)


def _limits(fields: Fields, name: str) -> tuple[float | None, float | None]:
    """The limits of dt; None for one that does not limit it. transformers stores infinity in a form of its own."""
    found = fields.get(name, list, [0.0, math.inf])
    numbers = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in found]
    if len(numbers) != 2 or not all(isinstance(n, int | float) for n in numbers) or not 0 <= numbers[0] <= numbers[1]:
        raise fields.error(name, f"is {found!r}: expected the least and the largest step")
    return float(numbers[0]) or None, None if math.isinf(numbers[1]) else float(numbers[1])
