"""Toy programs for the reference backend's tests, and plans for them."""

from __future__ import annotations

import struct

import numpy as np

from allspark_server import _native
from allspark_server.runtime.plan import NewSlot, SamplingParams, StepPlan, WorkItem
from reference.backend import Runner, StepResult, compile
from reference.batch import Limits
from reference.plan import EMBEDDINGS, HIDDEN, POSITIONS, SAMPLE

ALL, OUTPUTS = _native.ALL_ROWS, _native.OUTPUT_ROWS


class Toy:
    """A program of one rank under construction, with random weights."""

    def __init__(self, seed: int = 0, groups=(("full", 0),)):
        self.program, self.weights, self.rng = _native.Program(), {}, np.random.default_rng(seed)
        self.cache_groups, self.groups = groups, len(groups)
        for kind, window in groups:
            self.program.add_cache_group(kind, window)

    def matrix(self, n: int, k: int, values=None) -> int:
        handle = self.program.add_matrix(n, k, "float32")
        self.weights[handle] = self.rng.normal(size=(n, k)) * k**-0.5 if values is None else np.asarray(values)
        return handle

    def vector(self, values) -> int:
        """A vector of these values, or of this many random ones."""
        values = self.rng.normal(size=values) if isinstance(values, int) else np.asarray(values, float)
        handle = self.program.add_vector(len(values))
        self.weights[handle] = values
        return handle

    def op(self, name: str, inputs, out=None, weights=(), rows: int | None = None, **attributes):
        """Adds an op. `out` is the output's width; `rows` its row set, by default the first input's."""
        if out is not None:
            out = self.program.add_tensor(out, self.program.tensors[inputs[0]][1] if rows is None else rows)
        self.program.add_op(name, list(inputs), [] if out is None else [out], list(weights), attributes)
        return inputs[0] if out is None and inputs else out

    def embedding(self, vocab: int, width: int, values=None, **attributes) -> int:
        return self.op("embedding", (), width, (self.matrix(vocab, width, values),), ALL, vocab_begin=0, **attributes)

    def rotary(self, dim: int, base: float = 10000.0, **attributes) -> np.ndarray:
        """Adds a rotary table; returns its frequencies."""
        frequencies = (base ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
        self.op("rotary_table", (), None, (self.vector(frequencies),), rotary_dim=dim, **attributes)
        return frequencies.astype(float)

    def attention(self, qkv: int, q_heads: int, kv_heads: int, dim: int, weights=(), **attributes) -> int:
        return self.op("span_attention", (qkv,), q_heads * dim, weights, q_heads=q_heads, kv_heads=kv_heads,
                       head_dim=dim, group=q_heads // kv_heads, **{"layer": 0, "scale": dim**-0.5, **attributes})

    def finish(self, x: int) -> None:
        """Ends the program with `x` [rows, vocabulary] as logits."""
        vocab = self.program.tensors[x][0]
        self.op("sample", (self.op("select_rows", (x,), vocab, rows=OUTPUTS),), vocab_begin=0, vocab_size=vocab)

    def emit(self, x: int) -> None:
        """Ends the program with `x` [rows, any width] as output."""
        self.op("hidden_states", (self.op("select_rows", (x,), self.program.tensors[x][0], rows=OUTPUTS),))

    def runner(self, **limits) -> Runner:
        limits = Limits(**{"num_spans": (64,) * self.groups, **limits})
        return compile([self.program], [self.weights], limits)

    def emitted(self, tokens=None, embeddings=None, prompt_len: int = 0, positions=None) -> np.ndarray:
        """Output of a new runner for each position of one prompt of tokens or embeddings [positions, width]."""
        sections, tokens = [], list(range(len(embeddings))) if tokens is None else list(tokens)
        if embeddings is not None:
            sections.append(embedded(0, 0, embeddings))
        if positions is not None:
            sections.append((POSITIONS, [0, len(positions), 0, *np.ravel(positions).tolist()]))
        step = self.runner().step(plan(
            [item(0, len(tokens), HIDDEN, outputs=len(tokens), spans=spans_for(len(tokens)),
                  other_spans=[spans_for(len(tokens))] * (self.groups - 1))],
            [start(0, tokens, prompt_len=prompt_len)], sections=sections))
        return step.hidden


def start(slot: int, history, cached: int = 0, extra: bytes = b"", **sampling) -> NewSlot:
    """A new slot of a plan; `extra` are fields behind the sampling block, see fields()."""
    block = SamplingParams(**{"do_sample": False, "prompt_len": len(history), "logprobs": True, **sampling}).encode()
    if extra:
        block = struct.pack("<i", struct.unpack_from("<i", block)[0] | 8) + block[4:] + extra
    return NewSlot(slot, [int(i) for i in history], block, cached)


def fields(min_p: float = 0.0, logit_bias=None) -> bytes:
    """Fields behind a sampling block, which only some requests have."""
    bias = b"".join(struct.pack("<if", *pair) for pair in (logit_bias or {}).items())
    return struct.pack("<fi", min_p, len(logit_bias or {})) + bias


def item(slot: int, rows: int, flags: int = SAMPLE, **more) -> WorkItem:
    return WorkItem(slot, rows, flags, **more)


def plan(work, new=(), free=(), sections=()) -> bytes:
    return StepPlan(free=list(free), new=list(new), work=list(work), sections=list(sections)).encode()


def embedded(slot: int, first: int, rows) -> tuple[int, list[int]]:
    """A section that gives rows [n, width] for a slot's positions."""
    rows = np.asarray(rows, "<f4")
    return EMBEDDINGS, [slot, first, len(rows), rows.shape[1], *rows.ravel().view("<i4").tolist()]


def spans_for(positions: int, first: int = 0, size: int = 16) -> list[int]:
    return list(range(first, first + -(-positions // size)))


def generate(runner: Runner, prompt, n: int, *, chunk: int = 1 << 20, drafts: int = 0, flags: int = 0, guess=None,
             slot: int = 0, first_span: int = 0, new: NewSlot | None = None, adapter: int = -1,
             **sampling) -> tuple[list[int], StepResult, int]:
    """`n` tokens of one sequence, all results joined, and the number of steps. guess(tokens) gives drafts."""
    groups, size = len(runner.slots.limits.num_spans), runner.slots.limits.span_size
    entering, tokens, results, computed, spans = [new or start(slot, prompt, **sampling)], [], [], 0, 0
    while len(tokens) < n:
        length = len(prompt) + len(tokens)
        rows = min(chunk, length - computed)
        last = computed + rows == length
        known = list(guess(tokens)) if guess and last else []
        wanted = len(known) or drafts if last else 0
        needed = -(-(computed + rows + wanted) // size)
        fresh = list(range(first_span + spans, first_span + max(spans, needed)))
        step = runner.step(plan([item(slot, rows, SAMPLE | flags if last else 0, known=known, drafts=wanted,
                                      spans=fresh, adapter=adapter, other_spans=[fresh] * (groups - 1))], entering))
        entering, spans = [], max(spans, needed)
        step.logits = step.logits[:len(step.tokens)]  # without rejected drafts
        results.append(step)
        tokens += step.tokens.tolist()
        computed = len(prompt) + len(tokens) - 1 if last else computed + rows
    runner.step(plan([], free=[slot]))
    joined = {name: np.concatenate([vars(r)[name] for r in results if len(vars(r)[name])] or [np.zeros(0)])
              for name in vars(results[0])}
    return tokens[:n], StepResult(**joined), len(results)
