"""What the models of the digest have in common: their sizes, their weights and their ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allspark_server.runtime.native import native_library
from allspark_server.runtime.sampler_digest import SAMPLINGS, fixed_values

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, SPAN = 96, 3, 1, 40, 160, 1100, 32
EXPERTS, TOP = 7, 3
RANK = 21
LONG = 1190  # tokens: more than one KV split of attention


def on_cpu() -> Any:
    """An empty executor of one thread."""
    return native_library().Executor(num_threads=1)


def weights_of(e: Any, weights: str, group: int,
               seeds: Iterator[int]) -> tuple[Callable[..., int], Callable[..., int]]:
    """Functions that add a matrix and a vector to an executor and fill them."""
    def matrix(rows: int, columns: int, stack: int = 1, dtype: str = weights) -> int:
        identity = e.add_matrix(rows, columns, dtype, group if dtype == weights else 0, stack)
        values = fixed_values((rows, columns), next(seeds))
        e.fill_matrix(identity, values * np.float32(2.5 / math.sqrt(columns)), "F32")
        return identity

    def vector(size: int, middle: float = 0.0) -> int:
        return e.add_vector(np.float32(middle) + fixed_values((size,), next(seeds)) * np.float32(0.25))

    return matrix, vector


def finished(e: Any, x: int, last: int, logits: int, embedding: int, cache: str = "float32") -> Any:
    """The executor, with the end of its model: logits of the rows with outputs, and their samples."""
    e.add_op("select_rows", [x], [last], [], {})
    e.add_op("linear", [last], [logits], [embedding], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(512, len(SAMPLINGS), 512, SPAN, 64, cache)
    return e
