"""The highest speed of a model that the machine allows: memory bandwidth limits decoding (arithmetic does in large
batches), and arithmetic limits prefill.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    """

    architecture: str
    layer_weights: int
    head_weights: int
    stored_weights: int
    attention: int
    cache_values: int       # keys and values of one token, all layers
    positions: int          # the context length that the model was made for

    @classmethod
    def of(cls, checkpoint: Path) -> Workload:
        """The shapes of a Hugging Face directory or NAME.asgraph. Raises what open_model raises."""
        from allspark_server.weights.checkpoint import open_model
        graph = open_model(str(checkpoint), "").graph
        net = graph.config
        linear = [(graph.weights[op.weights[0]], graph.tensors[op.inputs[0]].logit_rows)
                  for op in graph.ops if op.type == "linear"]
        return cls(net.architecture,
                   sum(w.elements_of(0, 1) for w, is_head in linear if not is_head),
                   sum(w.elements_of(0, 1) for w, is_head in linear if is_head),
                   sum(w.elements_of(0, 1) for w in graph.weights.values() if w.is_matrix),
                   4 * net.num_layers * net.num_heads * net.head_dim,
                   2 * net.num_layers * net.num_kv_heads * net.head_dim,
                   net.max_position_embeddings)

    def decode(self, machine: Machine, batch: int, context: float, weight_bytes: float, token_bytes: float,
               integer: bool = False) -> Bound:
        """A step gives each of `batch` sequences a token. context: average tokens of a sequence. weight_bytes: of all
        packed matrices. token_bytes: of one token in the cache. integer: activations are quantized too.
        """
        weights = self.layer_weights + self.head_weights
        read = weight_bytes * min(1.0, weights / self.stored_weights) + batch * context * token_bytes
        return _bound(machine, batch, read, batch * 2 * weights, batch * self.attention * context, integer)

    def prefill(self, machine: Machine, batch: int, prompt: int, weight_bytes: float, integer: bool = False) -> Bound:
        """Processing `batch` prompts up to their first tokens."""
        products = batch * 2 * (prompt * self.layer_weights + self.head_weights)
        attention = batch * self.attention * prompt * (prompt + 1) / 2
        return _bound(machine, batch * prompt, weight_bytes, products, attention, integer)


def _bound(machine: Machine, tokens: int, read: float, products: float, attention: float, integer: bool) -> Bound:
    """`integer`: GEMMs are of integers. Attention never is."""
    rate = machine.int8 if integer and machine.int8 else machine.floats
    memory, compute = read / machine.read, products / rate + attention / machine.floats
    return Bound(tokens / max(memory, compute), "memory" if memory >= compute else "compute")
