"""The step plan: all that the scheduler tells the ranks about one step, and its wire form, version 2.

A plan is a sequence of little-endian 32-bit words (floats bit for bit):

    header    magic ("ASP2"), n_free, n_new, n_work, n_groups (of the cache), n_sections
    free      n_free x slot
    new       n_new x { slot, cached, n_history, sampling block, history ids }
    work      columns of n_work words each: slot, rows, outputs, drafts, flags, adapter, mask, n_known, then n_spans of
              each group; then the known ids of all items, then the span ids of all items, group by group
    sections  n_sections x { kind, n_words, words }

Kinds of sections that the CPU backend knows:

    COPIES    n_saved, then copies { span, span of the host cache, 4 words of the key }: n_saved that go there, then
              those that come back, in this order and before any row is computed. None of the former may share its
              target with another, nor any of the latter. A key says what a span holds: it must be what was saved there

The ranks' native code reads it; `StepPlan` is the form that tests and tools make and read.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

#: Drafts in one step at most: their rows have logits, which take memory.
MAX_STEP_DRAFTS = 64
#: Rows of prompts in one step at most whose log probabilities or hidden states are wanted: they have logits, too.
MAX_STEP_PROBES = 32

MAGIC = 0x41535032

COPIES = 3  # a kind of section

_DO_SAMPLE, _LOGPROBS, _SUPPRESS, _EXTENDED = 1, 2, 4, 8
_SAMPLING = struct.Struct("<ififfffiiiIIiiii")
_HEADER = struct.Struct("<Iiiiii")
_COLUMNS = 8  # of the work table, before those of the spans
_MAX_GROUPS = 64


class Flag(enum.IntFlag):
    """What is wanted of an item's rows. At most one of LOOKUP, GIVEN and MODEL, and these only with DRAW."""

    DRAW = 1  # a token is drawn after the last row, which is the history's last, and appended to the history
    LOOKUP = 2  # drafts are made on the ranks by prompt lookup
    GIVEN = 4  # the last `drafts` of the known ids are drafts, not history
    MODEL = 8  # drafts come from the draft model
    HIDDEN = 16  # the hidden states of the output rows are wanted
    PROMPT = 32  # output rows before the last give the log probability of the id that follows


DRAW = int(Flag.DRAW)  # a plain int: items are made by the thousand


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are drawn. Encoded once, sent when the sequence gets its slot.

    `prompt_len` tells generated ids from prompt ids for the penalties, and fixes the length that dynamic rotary scaling
    goes by. `eos` is banned while fewer than `min_length` tokens (prompt and output) are there.
    """

    do_sample: bool = True
    logprobs: bool = False
    suppress_repetition_in_generation: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    top_logprobs: int = 0
    seed: int = 0
    sample_index: int = 0
    prompt_len: int = 0
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def encode(self) -> bytes:
        """The sampling block of a new slot."""
        flags = self.do_sample * _DO_SAMPLE | self.logprobs * _LOGPROBS
        flags |= self.suppress_repetition_in_generation * _SUPPRESS
        extended = self.min_p > 0 or self.logit_bias
        flags |= bool(extended) * _EXTENDED
        head = _SAMPLING.pack(
            flags,
            self.temperature,
            self.top_k,
            self.top_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.no_repeat_ngram_size,
            self.min_length,
            self.top_logprobs,
            self.seed & 0xFFFFFFFF,
            (self.seed >> 32) & 0xFFFFFFFF,
            self.sample_index,
            self.prompt_len,
            len(self.eos),
            len(self.bad_words),
        )
        tail = list(self.eos)
        for word in self.bad_words:
            tail.append(len(word))
            tail.extend(word)
        block = head + struct.pack(f"<{len(tail)}i", *tail)
        if extended:
            block += struct.pack("<fi", self.min_p, len(self.logit_bias))
            block += b"".join(struct.pack("<if", token, bias) for token, bias in self.logit_bias)
        return block

    @staticmethod
    def decode(data: bytes, offset: int) -> tuple[SamplingParams, int]:
        """The block that begins at byte `offset`, and the offset behind it."""
        words = _SAMPLING.unpack_from(data, offset)
        offset += _SAMPLING.size
        eos = struct.unpack_from(f"<{words[14]}i", data, offset)
        offset += 4 * len(eos)
        bad_words = []
        for _ in range(words[15]):
            (length,) = struct.unpack_from("<i", data, offset)
            bad_words.append(struct.unpack_from(f"<{length}i", data, offset + 4))
            offset += 4 + 4 * length
        min_p, biases = 0.0, []
        if words[0] & _EXTENDED:
            min_p, count = struct.unpack_from("<fi", data, offset)
            biases = [struct.unpack_from("<if", data, offset + 8 + 8 * i) for i in range(count)]
            offset += 8 + 8 * max(count, 0)
        params = SamplingParams(
            bool(words[0] & _DO_SAMPLE),
            bool(words[0] & _LOGPROBS),
            bool(words[0] & _SUPPRESS),
            *words[1:10],  # type: ignore[misc]  # the fields up to seed
            seed=words[10] | words[11] << 32,
            sample_index=words[12],
            prompt_len=words[13],
            eos=eos,
            bad_words=tuple(bad_words),
            min_p=min_p,
            logit_bias=tuple(biases),
        )
        return params, offset


@dataclass
class NewSlot:
    """A sequence enters a slot: its whole history so far, how many positions of it the cache holds already (a multiple
    of the span size), and its encoded `SamplingParams`.
    """

    slot: int
    history: Sequence[int]
    sampling: bytes
    cached: int = 0


@dataclass
class WorkItem:
    """Rows to compute for one slot, from its first position on that is not in the cache.

    `known` goes to its history first (with GIVEN, but for the last `drafts`), `spans` to its span table of the first
    cache group, `other_spans` to those of the others (-1 for a span that the group's window has left behind); they must
    hold start + rows + drafts positions. `outputs` of the last rows have outputs: 1 with DRAW unless said otherwise. Up
    to `drafts` more rows hold draft tokens. `adapter` is -1 for none, `mask` 0 for none, else 1 + its index in the
    window's area of masks.
    """

    slot: int
    rows: int
    flags: int = 0
    known: list[int] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    drafts: int = 0
    outputs: int = -1
    adapter: int = -1
    mask: int = 0
    other_spans: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.outputs < 0:
            self.outputs = self.flags & DRAW


@dataclass
class WorkTable:
    """Work items as arrays, all int32: what a step of a thousand items is encoded from at once.

    `columns`: [8 + groups, items] in the order of the wire form (see `WorkTable.ROWS` and so on for the columns'
    indices); `known`: the known ids of all items, flat; `spans`: for each cache group, the span ids of all items, flat.
    """

    SLOT, ROWS, OUTPUTS, DRAFTS, FLAGS, ADAPTER, MASK, N_KNOWN, N_SPANS = range(_COLUMNS + 1)

    columns: np.ndarray
    known: np.ndarray
    spans: list[np.ndarray]

    @staticmethod
    def of(items: Iterable[WorkItem], groups: int = 1) -> WorkTable:
        """The table of some items. All must have the same number of cache groups; `groups`: if there are none."""
        items = list(items)
        groups = 1 + max((len(item.other_spans) for item in items), default=groups - 1)
        spans = [[item.spans, *item.other_spans] for item in items]
        columns = [(item.slot, item.rows, item.outputs, item.drafts, item.flags, item.adapter, item.mask,
                    len(item.known), *map(len, of_groups)) for item, of_groups in zip(items, spans)]
        table = np.array(columns, np.int32).reshape(len(items), _COLUMNS + groups)
        known = np.array([token for item in items for token in item.known], np.int32)
        flat = [np.array([span for of_groups in spans for span in of_groups[group]], np.int32)
                for group in range(groups)]
        return WorkTable(np.ascontiguousarray(table.T), known, flat)

    def items(self) -> list[WorkItem]:
        """The items of the table."""
        known = _split(self.known, self.columns[self.N_KNOWN])
        spans = [_split(ids, counts) for ids, counts in zip(self.spans, self.columns[self.N_SPANS:])]
        return [WorkItem(slot, rows, flags, known[i], spans[0][i], drafts, outputs, adapter, mask,
                         [group[i] for group in spans[1:]])
                for i, (slot, rows, outputs, drafts, flags, adapter, mask)
                in enumerate(self.columns[:self.N_KNOWN].T.tolist())]


@dataclass
class StepPlan:
    """One step: slots given back, slots taken, the rows to compute, and sections of what only some backends know.
    `groups`: of the cache, if there are no rows that say it.
    """

    free: list[int] = field(default_factory=list)
    new: list[NewSlot] = field(default_factory=list)
    work: list[WorkItem] = field(default_factory=list)
    sections: list[tuple[int, list[int]]] = field(default_factory=list)  # (kind, words)
    groups: int = field(default=1, compare=False)

    @property
    def rows(self) -> int:
        """Positions that the step computes at most."""
        return sum(item.rows + item.drafts for item in self.work)

    def encode(self) -> bytes:
        """The wire form."""
        return encode_plan(self.free, self.new, WorkTable.of(self.work, self.groups), self.sections)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        """The plan that was encoded. Raises ValueError if `data` is not one."""
        words = _Words(data)
        magic, n_free, n_new, n_work, n_groups, n_sections = words.header()
        if magic != MAGIC:
            raise ValueError(f"not a step plan of version 2: magic {magic:#x}, expected {MAGIC:#x}")
        if not 1 <= n_groups <= _MAX_GROUPS:
            raise ValueError(f"a step plan of {n_groups} cache groups; allowed: 1 to {_MAX_GROUPS}")
        if min(n_new, n_sections) < 0:
            raise ValueError(f"a step plan of {n_new} new slots and {n_sections} sections; at least 0")
        plan = StepPlan(free=words.take(n_free).tolist())
        for _ in range(n_new):
            slot, cached, length = words.take(3).tolist()
            sampling = words.sampling()
            plan.new.append(NewSlot(slot, words.take(length).tolist(), sampling, cached))
        columns = words.take((_COLUMNS + n_groups) * n_work).reshape(_COLUMNS + n_groups, n_work)
        if (columns[WorkTable.N_KNOWN:] < 0).any():
            raise ValueError("an item of a step plan has a negative number of ids")
        known, *spans = (words.take(int(counts.sum(dtype=np.int64))) for counts in columns[WorkTable.N_KNOWN:])
        plan.work = WorkTable(columns, known, spans).items()
        for _ in range(n_sections):
            kind, count = words.take(2).tolist()
            plan.sections.append((kind, words.take(count).tolist()))
        words.end()
        return plan


def encode_plan(
    free: Sequence[int], new: Sequence[NewSlot], work: WorkTable, sections: Sequence[tuple[int, Sequence[int]]] = ()
) -> bytes:
    """The wire form of a plan whose work is in arrays."""
    groups = len(work.columns) - _COLUMNS
    parts = [_HEADER.pack(MAGIC, len(free), len(new), work.columns.shape[1], groups, len(sections)), _ids(free)]
    for one in new:
        parts += (struct.pack("<iii", one.slot, one.cached, len(one.history)), one.sampling, _ids(one.history))
    parts += (work.columns.tobytes(), work.known.tobytes(), *(spans.tobytes() for spans in work.spans))
    for kind, section in sections:
        parts += (struct.pack("<ii", kind, len(section)), _ids(section))
    return b"".join(parts)


def _ids(values: Sequence[int]) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype("<i4", copy=False).tobytes()
    return struct.pack(f"<{len(values)}i", *values)


def _split(flat: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    """`flat` cut into lists of so many each."""
    ids, ends = flat.tolist(), np.cumsum(counts).tolist()
    return [ids[begin:end] for begin, end in zip([0, *ends], ends)]


class _Words:
    """Reads a plan's words in turn; ValueError where they end too soon."""

    def __init__(self, data: bytes):
        if len(data) % 4:
            raise ValueError(f"a step plan of {len(data)} bytes is not one of whole words")
        self._data, self._words, self._at = data, np.frombuffer(data, "<i4"), 0

    def header(self) -> tuple[int, ...]:
        self.take(_HEADER.size // 4)
        return _HEADER.unpack_from(self._data)

    def take(self, count: int) -> np.ndarray:
        if not 0 <= count <= len(self._words) - self._at:
            raise ValueError(f"a step plan of {len(self._words)} words is cut short at word {self._at}: {count} follow")
        self._at += count
        return self._words[self._at - count:self._at]

    def sampling(self) -> bytes:
        begin = 4 * self._at
        try:
            _, end = SamplingParams.decode(self._data, begin)
        except struct.error as error:
            raise ValueError(f"a sampling block of a step plan is cut short: {error}") from error
        if end < begin:
            raise ValueError("a sampling block of a step plan has a negative length")
        self._at = end // 4
        return self._data[begin:end]

    def end(self) -> None:
        if self._at != len(self._words):
            raise ValueError(f"a step plan of {len(self._words)} words has {len(self._words) - self._at} too many")
