"""Runs compiled programs of all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from allspark_server import _native
from allspark_server.weights.formats import ScaleLayout
from reference.batch import Batch, Limits, Slots
from reference.encodings import Stored
from reference.ops import OPS
from reference.plan import HIDDEN, PROMPT, SAMPLE, read_plan

# Of an adapter: by target, the matrices A [rank, in] and B [out, rank], B times its scale.
Adapter = Mapping[int, tuple[np.ndarray, np.ndarray]]


@dataclass
class StepResult:
    """What a step gives, as the native StepResult has it: flat over the tokens drawn, in order of the items.

    logits: [output rows, vocabulary], of rejected drafts too. hidden: [rows, width], of the output rows of items with
    HIDDEN. prompt_logprobs: of the output rows of items with PROMPT that draw nothing.
    """

    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    def finished(self) -> StepResult:
        return StepResult(**{name: np.array(values) for name, values in vars(self).items()})


class Rank:
    """One rank's part of a program and what it keeps."""

    def __init__(self, program, weights: Mapping[int, np.ndarray], limits: Limits, number: int):
        self.program, self.limits, self.number = program, limits, number
        self.ops, self.tensors, self.row_sets = program.ops, program.tensors, program.row_sets
        self.weights = {i: self._decoded(i, w) for i, w in weights.items()}
        for i, (n, k, *_) in enumerate(program.weights):
            if self.weights[i].shape != ((n, k) if k else (n,)):
                raise ValueError(f"weight {i} is of shape {self.weights[i].shape}, expected {n} x {k}")
        for kind, _ in program.cache_groups:
            if kind not in ("full", "sliding", "latent"):
                raise ValueError(f"the reference backend does not have cache groups of kind {kind}")
        self.adapters: list[Adapter] = []
        self.states: dict[int, dict[int, list[np.ndarray]]] = {}  # of layers with a state: inputs by op and slot
        self._caches: dict[tuple[int, int], np.ndarray] = {}
        self._host: dict[int, tuple[tuple[int, ...], dict]] = {}  # the host cache: key and values by span
        self.values: dict[int, np.ndarray] = {}
        self.tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.frequencies: dict[int, np.ndarray] = {}  # by the number of their rotary table
        self.entries: dict[int, list[tuple[int, int]]] = {}  # of a routed row set: (expert, row), ascending

    def _decoded(self, number: int, weight) -> np.ndarray:
        if not isinstance(weight, Stored):
            return np.asarray(weight, float)
        _, _, form, group = self.program.weights[number]
        declared = vars(ScaleLayout()) | {"center": -1} | weight.layout.changed()
        if (form, group, self.program.scale_layout(number)) != (weight.format, weight.group, declared):
            raise ValueError(f"weight {number} is declared as {form}, groups of {group}, and is {weight.format}")
        return weight.decode()

    def copy(self, batch: Batch) -> None:
        """Copies a span of any group to the host cache, or back."""
        for one in batch.saved:
            self._host[one.host] = one.key, {which: cache[one.span].copy() for which, cache in self._caches.items()}
        for one in batch.restored:
            key, values = self._host[one.host]
            if key != one.key:
                raise ValueError(f"step plan: span {one.host} of the host cache is not what was saved there")
            for which, cache in self._caches.items():
                cache[one.span] = values.get(which, np.nan)

    def begin(self, slots: Slots, batch: Batch) -> None:
        self.slots, self.batch = slots.live, batch
        self.values, self.tables, self.frequencies, self.entries = {}, {}, {}, {}

    def rows_of(self, tensor: int) -> int:
        return self.tensors[tensor][1]

    def count(self, row_set: int) -> int:
        """Rows that a set has in this step."""
        if row_set == _native.ALL_ROWS:
            return len(self.batch.rows)
        return len(self.batch.outputs) if row_set == _native.OUTPUT_ROWS else len(self.entries[row_set])

    def cache(self, group: int, layer: int, kv_heads: int, head_dim: int) -> np.ndarray:
        """[spans, span size, keys and values, heads, head_dim]: of a layer, NaN where nothing was written."""
        shape = (self.limits.num_spans[group], self.limits.span_size, 2, kv_heads, head_dim)
        return self._caches.setdefault((group, layer), np.full(shape, np.nan))

    def run(self, number: int) -> None:
        op = self.ops[number]
        inputs, weights = [self.values[t] for t in op["inputs"]], [self.weights[w] for w in op["weights"]]
        with np.errstate(invalid="ignore"):  # NaN go on to where a row's status tells of them
            result = OPS[op["name"]](self, op, inputs, weights)
        if result is not None:
            width, row_set, _ = self.tensors[op["outputs"][0]]
            assert result.shape == (self.count(row_set), width), (op, result.shape)
            self.values[op["outputs"][0]] = result


class Runner:
    """A compiled program: of every rank, in rank order."""

    def __init__(self, ranks: Sequence[Rank], limits: Limits):
        self.ranks, self.slots = ranks, Slots(limits)
        names = {tuple(op["name"] for op in rank.ops) for rank in ranks}
        if len(names) > 1:
            raise ValueError("ranks run different ops")

    def set_adapter(self, adapters: Sequence[Sequence[Adapter]]) -> None:
        """Of each rank its adapters, which plans name by their index."""
        for rank, own in zip(self.ranks, adapters):
            rank.adapters = list(own)

    def step(self, plan: bytes, masks: Callable[[], np.ndarray] | np.ndarray | None = None) -> StepResult:
        """masks: uint32 [masks, words], or what gives them when they are needed; an item's mask is 1 + index, and its
        further outputs have the ones that follow.
        """
        batch = self.slots.begin(read_plan(plan))
        result = StepResult()
        for rank in self.ranks:
            rank.copy(batch)
            rank.begin(self.slots, batch)
        if not batch.rows:
            return result.finished()
        for number, op in enumerate(self.ranks[0].ops):
            if op["name"] == "all_reduce":
                self._all_reduce(number)
            elif op["name"] == "hidden_states":
                hidden = self._inputs(number)[0]
                for item in batch.items:
                    if item.flags & HIDDEN:
                        result.hidden += list(hidden[item.output:item.output + item.outputs])
            elif op["name"] == "sample":
                self._sample(self._inputs(number), batch, masks() if callable(masks) else masks, result)
            else:
                for rank in self.ranks:
                    rank.run(number)
        return result.finished()

    def _inputs(self, number: int) -> list[np.ndarray]:
        return [rank.values[rank.ops[number]["inputs"][0]] for rank in self.ranks]

    def _all_reduce(self, number: int) -> None:
        parts = self._inputs(number)
        total = parts[0]
        for part in parts[1:]:  # in rank order
            total = total + part
        for rank in self.ranks:
            rank.values[rank.ops[number]["inputs"][0]] = total.copy()

    def _sample(self, logits: list[np.ndarray], batch: Batch, masks: np.ndarray | None, result: StepResult) -> None:
        result.logits = list(np.concatenate(logits, axis=1))
        for item in batch.items:
            sampling, history = self.slots.live[item.slot].sampling, self.slots.live[item.slot].history
            inside = item.outputs - 1 if item.flags & SAMPLE else item.outputs
            if item.flags & PROMPT:
                for i in range(inside):
                    row = result.logits[item.output + i]
                    follows = history[item.end - item.outputs + i + 1]
                    result.prompt_logprobs.append((row - np.logaddexp.reduce(row))[follows])
            if not item.flags & SAMPLE:
                continue
            drawn = []
            for i in range(1 + len(item.drafts)):
                parts = [part[item.output + item.outputs - 1 + i] for part in logits]
                mask = masks[item.mask - 1 + i] if item.mask else None
                drawn.append(draw(parts, sampling, [*history, *item.drafts[:i]], mask))
            count = self.slots.accept(item, [each["token"] for each in drawn])
            result.counts.append(count)
            for each in drawn[:count]:
                result.tokens.append(each["token"])
                result.status.append(int(bool(each["status"])))
                result.logprobs.append(each["logprob"])
                result.top_ids.append(each["top_ids"])
                result.top_logprobs.append(each["top_logprobs"])


def draw(parts: list[np.ndarray], sampling, history: list[int], mask: np.ndarray | None) -> dict:
    """A draw by the library's own sampler, of the ranks' logits."""
    shards = [part.astype(np.float32) for part in parts]
    return _native.sample_once(shards, sampling.words, np.array(history, np.int32), mask)


def compile(programs, weights, limits: Limits) -> Runner:
    """A runner of the ranks' programs; weights: of each rank, by id, as arrays (encodings.py decodes stored ones)."""
    return Runner([Rank(p, w, limits, i) for i, (p, w) in enumerate(zip(programs, weights))], limits)
