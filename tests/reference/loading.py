"""Loads models into the reference backend: graph, lowering and shards without kernels."""

from __future__ import annotations

import numpy as np

from allspark_server import _native
from allspark_server.runtime.lowering import add_ops
from allspark_server.weights.asgraph import to_float32
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.loader import Loader
from reference.backend import Runner, compile
from reference.batch import Limits
from reference.toy import SAMPLE, item, plan, spans_for, start


def unquantized(graph) -> dict[str, WeightFormat]:
    """The formats of a model all of whose matrices are float32."""
    return {weight.name: WeightFormat("float32") for weight in graph.weights.values() if weight.is_matrix}


class Loaded:
    """What a rank's executor is built from: its program, and the values of its weights by id."""

    def __init__(self):
        self.program, self.weights = _native.Program(), {}
        self.add_tensor, self.add_op = self.program.add_tensor, self.program.add_op
        self.add_cache_group, self.add_row_set = self.program.add_cache_group, self.program.add_row_set

    def add_matrix(self, out_features: int, in_features: int, dtype: str, group_size: int = 0,
                   experts: int = 1) -> int:
        identity = self.program.add_matrix(out_features, in_features, dtype, group_size)
        self.weights[identity] = np.full((out_features, in_features), np.nan)
        return identity

    def fill_matrix(self, identity: int, array: np.ndarray, source: str, row_offset: int = 0, column: int = 0,
                    group_size: int = 0) -> int:
        assert array.ndim == 2
        matrix = self.weights[identity]
        rows = slice(row_offset, row_offset + len(array))
        assert rows.stop <= len(matrix) and column + matrix.shape[1] <= array.shape[1]
        matrix[rows] = to_float32(np.ascontiguousarray(array[:, column:column + matrix.shape[1]]), source)
        return int((~np.isfinite(matrix[rows])).sum())

    def fill_rows(self, identity: int, arrays, source: str, row_offset: int = 0, column: int = 0,
                  group_size: int = 0) -> list[int]:
        bad = []
        for array in arrays:
            bad.append(self.fill_matrix(identity, array, source, row_offset, column, group_size))
            row_offset += len(array)
        return bad

    def source_hash(self, identity: int) -> int:
        return 0

    def add_vector(self, values: np.ndarray) -> int:
        assert values.dtype == np.float32 and values.ndim == 1
        identity = self.program.add_vector(len(values))
        self.weights[identity] = values.astype(np.float64)
        return identity


def loaded(model, rank: int = 0, world: int = 1) -> Loaded:
    """One rank's part of an opened model."""
    target = Loaded()
    weights = Loader(model.graph, model.source, target, rank, world, unquantized(model.graph)).load()
    add_ops(model.graph, target, weights, rank, world)
    return target


def runner_of(ranks: list[Loaded], **limits) -> Runner:
    limits = {"num_spans": (64,) * len(ranks[0].program.cache_groups), **limits}
    return compile([rank.program for rank in ranks], [rank.weights for rank in ranks], Limits(**limits))


def model_runner(directory, world: int = 1) -> Runner:
    model = open_model(str(directory))
    return runner_of([loaded(model, rank, world) for rank in range(world)], max_rows=1024)


def logits_after(runner: Runner, prompt) -> np.ndarray:
    """Logits after a prompt's last token: [vocabulary]."""
    spans, groups = spans_for(len(prompt)), len(runner.slots.limits.num_spans)
    work = item(0, len(prompt), SAMPLE, spans=spans, other_spans=[spans] * (groups - 1))
    logits = runner.step(plan([work], [start(0, prompt)])).logits[0]
    runner.step(plan([], free=[0]))
    return logits
