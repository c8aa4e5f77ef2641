"""The highest speed of a model that the machine allows: memory bandwidth limits decoding (arithmetic does in large
batches), and arithmetic limits prefill.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allspark_server.models.graph import Graph
    from allspark_server.models.graph_elements import Op


@dataclass(frozen=True)
class Machine:
    """Measured rates of all threads together: bytes/s read from memory; multiplications and additions/s in fp32, of
    8-bit integers with 32-bit sums, and of bfloat16 in tiles. 0: not measured or not available.
    """

    read: float
    fp32: float
    int8: float = 0.0
    bf16: float = 0.0

    @property
    def floats(self) -> float:
        """The rate of GEMMs with activations that are not quantized. Tiles compute in bfloat16, also with weights of 8
        or 4 bits.
        """
        return max(self.fp32, self.bf16)


@dataclass(frozen=True)
class Bound:
    """The highest possible speed in tokens/s, and what limits it: "memory" or "compute"."""

    tokens_per_second: float
    by: str


@dataclass(frozen=True)
class Workload:
    """A model's shapes, over all ranks.

    layer_weights: elements of the matrices that every row is multiplied by.
    head_weights: elements of those that only sampled rows are multiplied by.
    stored_weights: elements of all matrices, including an embedding that is not the head.
    attention: operations for each pair of a row and a token that it sees.
    expert_weights: elements of all routed experts, of which a row is multiplied by the part `chosen`.
    float_weights: elements of layer_weights that are float32 in every format, such as routers.
    state_bytes: that a decode step of a sequence reads of recurrent states, with half of a chunk's recent rows.
    """

    architecture: str
    layer_weights: int
    head_weights: int
    stored_weights: int
    attention: int
    cache_values: int       # keys and values of one token, all layers
    positions: int          # the context length that the model was made for
    expert_weights: int = 0
    chosen: float = 0.0
    float_weights: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, checkpoint: Path) -> Workload:
        """The shapes of a Hugging Face directory or NAME.asgraph. Raises what open_model raises."""
        from allspark_server.weights.checkpoint import open_model
        from allspark_server.weights.formats import routing_weights
        graph = open_model(str(checkpoint), "").graph
        net, routing = graph.config, routing_weights(graph)
        experts = [graph.weights[op.weights[0]] for op in graph.ops if op.type == "expert_linear"]
        attending = sum("attention" in op.type for op in graph.ops)
        linear = [(graph.weights[op.weights[0]], graph.tensors[op.inputs[0]].logit_rows)
                  for op in graph.ops if op.type == "linear"]
        return cls(net.architecture,
                   sum(w.elements_of(0, 1) for w, is_head in linear if not is_head),
                   sum(w.elements_of(0, 1) for w, is_head in linear if is_head),
                   sum(w.elements_of(0, 1) for w in graph.weights.values() if w.is_matrix),
                   4 * attending * net.num_heads * net.head_dim,
                   2 * attending * net.num_kv_heads * net.head_dim,
                   net.max_position_embeddings,
                   sum(weight.elements_of(0, 1) for weight in experts),
                   net.experts.per_token / net.experts.count if net.experts else 0.0,
                   sum(graph.weights[name].elements_of(0, 1) for name in routing),
                   sum(_state_bytes(graph, op) for op in graph.ops))

    @property
    def row_weights(self) -> float:
        """Elements of the matrices that a row is multiplied by in all layers, its experts' among them."""
        return self.layer_weights + self.chosen * self.expert_weights

    def decode(self, machine: Machine, batch: int, context: float, weight_bytes: float, token_bytes: float,
               integer: bool = False) -> Bound:
        """A step gives each of `batch` sequences a token. context: average tokens of a sequence. weight_bytes: of all
        packed matrices. token_bytes: of one token in the cache. integer: activations are quantized too. Sequences
        choose experts independently.
        """
        touched = self.expert_weights * (1 - (1 - self.chosen) ** batch)
        packed = self.layer_weights - self.float_weights + self.head_weights + touched
        weight = max(0.0, weight_bytes - 4 * self.float_weights) / (self.stored_weights - self.float_weights)
        read = min(weight_bytes, weight * packed + 4 * self.float_weights)
        read += batch * (context * token_bytes + self.state_bytes)
        products = batch * 2 * (self.row_weights + self.head_weights)
        return _bound(machine, batch, read, products, batch * self.attention * context, integer)

    def prefill(self, machine: Machine, batch: int, prompt: int, weight_bytes: float, integer: bool = False) -> Bound:
        """Processing `batch` prompts up to their first tokens."""
        products = batch * 2 * (prompt * self.row_weights + self.head_weights)
        attention = batch * self.attention * prompt * (prompt + 1) / 2
        return _bound(machine, batch * prompt, weight_bytes, products, attention, integer)


def _state_bytes(graph: Graph, op: Op) -> int:
    """Bytes of the state of an op, and of half of the 64 rows since its last multiple."""
    if op.type not in ("gated_delta", "ssd"):
        return 0
    from allspark_server.runtime.device import delta_heads
    key_heads, values, key_dim, value_dim = delta_heads(graph, op, 0, 1)
    return 4 * (values * key_dim + 32 * (key_heads * key_dim + 2 * values // value_dim + values))


def _bound(machine: Machine, tokens: int, read: float, products: float, attention: float, integer: bool) -> Bound:
    """`integer`: GEMMs are of integers. Attention never is."""
    rate = machine.int8 if integer and machine.int8 else machine.floats
    memory, compute = read / machine.read, products / rate + attention / machine.floats
    return Bound(tokens / max(memory, compute), "memory" if memory >= compute else "compute")
