"""Reads step plans of version 2, from the words alone: neither runtime/plan.py nor the native parser has a part in it.

What is wider here than what plan.py writes: fields behind a sampling block (EXTENDED), and sections.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

MAGIC = 0x41535032
DRAW, LOOKUP, GIVEN, MODEL, HIDDEN, PROMPT = 1, 2, 4, 8, 16, 32
BLOCK_WORDS = 16  # of a sampling block, before its lists
EXTENDED = 8  # flag of a sampling block: behind its lists {n_fields, n_fields x {kind, n_words, words}}
MIN_P, LOGIT_BIAS = 1, 2  # {float}; {id, float} each
EMBEDDINGS, POSITIONS = 1, 2  # sections: {slot, position, n, width, floats}; {slot, n, delta, n x 3 parts}


@dataclass
class Sampling:
    """A sampling block: `words` as the native sampler takes them, and what this backend does itself."""

    words: np.ndarray
    prompt_len: int
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)


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


def _floats(words: np.ndarray) -> list[float]:
    return words.view("<f4").astype(float).tolist()


def _sampling(words: _Words) -> Sampling:
    head = words.take(BLOCK_WORDS).copy()
    lists = [words.take(head[14])]
    for _ in range(head[15]):
        length = words.take(1)
        lists += [length, words.take(length[0])]
    extended, head[0] = head[0] & EXTENDED, head[0] & ~EXTENDED
    sampling = Sampling(np.concatenate([head, *lists]).astype(np.int32), int(head[13]))
    for _ in range(words.take(1)[0] if extended else 0):
        kind, n = words.take(2)
        found = words.take(n)
        if kind == MIN_P:
            sampling = replace(sampling, min_p=_floats(found)[0])
        elif kind == LOGIT_BIAS:
            sampling = replace(sampling, logit_bias=dict(zip(found[::2].tolist(), _floats(found[1::2].copy()))))
        else:
            raise ValueError(f"step plan: a sampling block has the unknown field {kind}")
    return sampling


def read_plan(data: bytes) -> Plan:
    """The plan in `data`; ValueError when it is not one."""
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
