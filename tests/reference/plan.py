"""Reads step plans of version 2 from their words, independently of runtime/plan.py and the native parser.

Of sampling blocks (native/sampling/sampler.h) it needs the end and the prompt's length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MAGIC = 0x41535032
SAMPLE, LOOKUP, GIVEN, MODEL, HIDDEN, PROMPT = 1, 2, 4, 8, 16, 32
BLOCK_WORDS = 16  # of a sampling block, before its lists
EXTENDED = 8  # flag of a sampling block: behind its lists min_p, n_biases, n_biases x {id, float}
# Sections: {slot, position, n, width, floats}; {slot, n, delta, n x 3 parts}; {n saved, copies x {span, host span,
# key}}; {slot, ends}; {from, to}; {slot, begins and ends}.
EMBEDDINGS, POSITIONS, COPIES, SEGMENTS, PART, IMAGES = 1, 2, 3, 5, 6, 7


@dataclass
class Sampling:
    """A sampling block: its words, which the native sampler takes."""

    words: np.ndarray
    prompt_len: int


@dataclass
class New:
    slot: int
    cached: int
    sampling: Sampling
    history: list[int]


@dataclass
class Work:
    slot: int
    rows: int
    outputs: int
    drafts: int
    flags: int
    adapter: int
    mask: int
    known: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)


@dataclass
class Plan:
    free: list[int]
    new: list[New]
    work: list[Work]
    sections: list[tuple[int, np.ndarray]]


class _Words:
    def __init__(self, data: bytes):
        if len(data) % 4:
            raise ValueError(f"a step plan of {len(data)} bytes")
        self.left = np.frombuffer(data, "<i4")

    def take(self, n: int) -> np.ndarray:
        if not 0 <= n <= len(self.left):
            raise ValueError(f"step plan: {n} words wanted, {len(self.left)} are left")
        taken, self.left = self.left[:n], self.left[n:]
        return taken


def _sampling(words: _Words) -> Sampling:
    block = [words.take(BLOCK_WORDS)]
    flags, prompt_len, n_eos, n_bad_words = block[0][[0, 13, 14, 15]].tolist()
    block.append(words.take(n_eos))
    for _ in range(n_bad_words):
        length = words.take(1)
        block += [length, words.take(length[0])]
    if flags & EXTENDED:
        counts = words.take(2)
        block += [counts, words.take(2 * counts[1])]
    return Sampling(np.concatenate(block).astype(np.int32), prompt_len)


def read_plan(data: bytes) -> Plan:
    """The plan in `data`; raises ValueError for anything else."""
    words = _Words(data)
    magic, n_free, n_new, n_work, n_groups, n_sections = words.take(6).tolist()
    if magic != MAGIC:
        raise ValueError(f"not a step plan of version 2: {magic:#x}")
    plan = Plan(words.take(n_free).tolist(), [], [], [])
    for _ in range(n_new):
        slot, cached, n_history = words.take(3).tolist()
        sampling = _sampling(words)
        plan.new.append(New(slot, cached, sampling, words.take(n_history).tolist()))
    columns = words.take((8 + n_groups) * n_work).reshape(8 + n_groups, n_work)
    plan.work = [Work(*column[:7]) for column in columns.T.tolist()]
    for work, n in zip(plan.work, columns[7]):
        work.known = words.take(n).tolist()
    for group in range(n_groups):
        for work, n in zip(plan.work, columns[8 + group]):
            work.spans.append(words.take(n).tolist())
    for _ in range(n_sections):
        kind, n = words.take(2).tolist()
        plan.sections.append((kind, words.take(n)))
    if len(words.left):
        raise ValueError(f"step plan: {len(words.left)} words are left over")
    return plan
