"""Slots, and the rows of a step that a plan makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reference.plan import (
    COPIES,
    EMBEDDINGS,
    GIVEN,
    HIDDEN,
    IMAGES,
    LOOKUP,
    MODEL,
    POSITIONS,
    PROMPT,
    SAMPLE,
    SEGMENTS,
    Plan,
    Sampling,
)

LOOKED_AT, LONGEST = 32, 16  # of prompt lookup: the latest places, and ids of a match


@dataclass(frozen=True)
class Limits:
    """Limits on what plans may ask for, and the number of spans of each cache group."""

    max_rows: int = 256
    max_slots: int = 8
    max_length: int = 1024
    span_size: int = 16
    num_spans: tuple[int, ...] = (64,)


@dataclass
class Slot:
    sampling: Sampling
    history: list[int]
    cached: int
    spans: list[list[int]]
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)  # by position
    positions: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), int))  # the first ones' parts
    segments: list[int] = field(default_factory=list)  # where they end
    images: list[int] = field(default_factory=list)  # where each begins and ends
    begun: int = 0  # tokens of the history that it began with
    delta: int = 0  # what later ones' parts are ahead of the position

    def parts(self, position: int) -> np.ndarray:
        if position < len(self.positions):
            return self.positions[position]
        return np.full(3, position + self.delta)


@dataclass
class Row:
    slot: int
    position: int
    token: int
    adapter: int


@dataclass
class Item:
    """Outputs [output, output + outputs + drafts) belong to adjacent rows: first those of `rows`, then those of
    drafts.
    """

    slot: int
    start: int
    rows: int
    output: int
    outputs: int
    drafts: list[int]
    flags: int
    mask: int

    @property
    def end(self) -> int:
        return self.start + self.rows


@dataclass
class Copy:
    """Offloads a span to the host cache, or restores it; a restored span must have been saved under the same key."""

    span: int
    host: int
    key: tuple[int, ...]


@dataclass
class Batch:
    saved: list[Copy] = field(default_factory=list)
    restored: list[Copy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)


def look_up(history: list[int], most: int) -> list[int]:
    """The tokens that follow the longest match of the history's last ids, among the latest places of its last two."""
    last = len(history) - 1
    places = [p for p in range(1, last) if history[p - 1:p + 1] == history[-2:]][-LOOKED_AT:]
    best, found = 1, -1
    for p in reversed(places):
        match = 0
        while match < LONGEST and match <= p and history[p - match] == history[last - match]:
            match += 1
        if match > best:
            best, found = match, p
    if found < 0:
        return []
    grown = list(history)
    for i in range(most):
        grown.append(grown[found + 1 + i])
    return grown[len(history):]


class Slots:
    def __init__(self, limits: Limits):
        self.limits, self.live = limits, {}  # slot number -> Slot

    def begin(self, plan: Plan) -> Batch:
        """Updates the slots; raises ValueError for items that do not follow from them."""
        limits = self.limits
        for slot in plan.free:
            if self.live.pop(slot, None) is None:
                raise ValueError(f"step plan: slot {slot} is free already")
        for new in plan.new:
            if new.slot in self.live or not 0 <= new.slot < limits.max_slots:
                raise ValueError(f"step plan: slot {new.slot} is taken, or not there")
            if new.cached % limits.span_size or not 0 <= new.cached < len(new.history):
                raise ValueError(f"step plan: {new.cached} cached positions of {len(new.history)}")
            self.live[new.slot] = Slot(new.sampling, new.history, new.cached, [[] for _ in limits.num_spans],
                                       begun=len(new.history))
        batch = Batch()
        for kind, words in plan.sections:
            if kind == COPIES:
                copies = [Copy(span, host, tuple(key)) for span, host, *key in words[1:].reshape(-1, 6).tolist()]
                batch.saved, batch.restored = copies[:words[0]], copies[words[0]:]
            else:
                self._section(kind, words)
        for work in plan.work:
            self._item(batch, work)
        if len(batch.rows) > limits.max_rows:
            raise ValueError(f"step plan: {len(batch.rows)} rows, at most {limits.max_rows} fit")
        return batch

    def _section(self, kind: int, words: np.ndarray) -> None:
        if kind == EMBEDDINGS:
            slot, first, n, width = words[:4].tolist()
            rows = words[4:].view("<f4").astype(float).reshape(n, width)
            self.live[slot].embeddings.update(zip(range(first, first + n), rows))
        elif kind == POSITIONS:
            slot, n, delta = words[:3].tolist()
            self.live[slot].positions, self.live[slot].delta = words[3:].reshape(n, 3), delta
        elif kind == SEGMENTS:
            self.live[words[0]].segments = words[1:].tolist()
        elif kind == IMAGES:
            self.live[words[0]].images = words[1:].tolist()
        else:
            raise ValueError(f"step plan: a section of the unknown kind {kind}")

    def _item(self, batch: Batch, work) -> None:
        if work.slot not in self.live:
            raise ValueError(f"step plan: slot {work.slot} holds no sequence")
        slot, limits = self.live[work.slot], self.limits
        if work.flags & ~(SAMPLE | LOOKUP | GIVEN | MODEL | HIDDEN | PROMPT) or work.flags & MODEL:
            raise ValueError(f"step plan: flags {work.flags} are not known, or ask for a draft model")
        given = work.known[len(work.known) - work.drafts:] if work.flags & GIVEN else []
        slot.history += work.known[:len(work.known) - len(given)]
        for table, ids, number in zip(slot.spans, work.spans, limits.num_spans):
            if any(not -1 <= i < number for i in ids):  # -1: a window has left the positions behind
                raise ValueError(f"step plan: spans {ids} of {number}")
            table += ids
        start, end = slot.cached, slot.cached + work.rows
        if work.rows < 1 or end > len(slot.history) or (work.flags & SAMPLE and end != len(slot.history)):
            raise ValueError(f"step plan: positions {start}...{end} of {len(slot.history)} tokens")
        if not 0 <= work.outputs <= work.rows or (work.flags & SAMPLE and not work.outputs):
            raise ValueError(f"step plan: {work.outputs} outputs of {work.rows} rows")
        room = min([limits.max_length, *(len(table) * limits.span_size for table in slot.spans)])
        if end > room:
            raise ValueError(f"step plan: positions up to {end}, of which spans hold {room}")
        drafts = given if work.flags & GIVEN else look_up(slot.history, work.drafts) if work.flags & LOOKUP else []
        drafts = drafts[:max(0, min(work.drafts, room - end))]
        first = len(batch.rows)
        tokens = [*slot.history[start:end], *drafts]
        batch.rows += [Row(work.slot, start + i, token, work.adapter) for i, token in enumerate(tokens)]
        item = Item(work.slot, start, work.rows, len(batch.outputs), work.outputs, drafts, work.flags, work.mask)
        outputs = work.outputs + len(drafts)
        batch.outputs += range(first + len(tokens) - outputs, first + len(tokens))
        batch.items.append(item)
        slot.cached = end

    def accept(self, item: Item, tokens: list[int]) -> int:
        """Takes over the samples after the last row and after each draft; returns how many tokens count."""
        slot, kept = self.live[item.slot], 0
        while kept < len(item.drafts) and tokens[kept] == item.drafts[kept]:
            kept += 1
        slot.history += [max(token, 0) for token in tokens[:kept + 1]]
        slot.cached += kept
        return kept + 1
