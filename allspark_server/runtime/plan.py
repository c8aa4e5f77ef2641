"""The step plan: the scheduler's complete description of one step for the ranks, and its wire form, version 2.

A plan is a sequence of little-endian 32-bit words. Floats are stored as their bits.

    header    magic ("ASP2"), n_free, n_new, n_work, n_groups (of the cache), n_sections
    free      n_free x slot
    new       n_new x { slot, cached, n_history, sampling block, history ids }
    work      columns of n_work words each: slot, rows, outputs, drafts, flags, adapter, mask, n_known, then n_spans of
              each group; then the known ids of all items, then the span ids of all items, group by group
    sections  n_sections x { kind, n_words, words }

Kinds of sections that the CPU backend knows:

    ROWS      slot, position, n, width, then n x width floats: rows that the program takes as they are for positions
              [position, position + n), which the step computes: embeddings of an image, or patches of one
    POSITIONS slot, n, delta, then n x { time, height, width }: the rotary positions of a new slot's first n positions;
              those of position p behind them are p + delta
    COPIES    n_saved, then copies { span, span of the host cache, 4 words of the key }. The first n_saved copies save
              spans to the host cache; the others restore spans from it. They are made in this order before any row is
              computed. Targets of saves must differ from each other, and so must targets of restores. A key identifies
              a span's content: a restored span must have been saved with the same key
    STATES    n_saved, n_spans, then copies of recurrent states { slot, position, n_spans x span }. The first n_saved
              copies save slots' states to spans, before the slots are given to others; the rest load them from spans.
              They are made in this order, after COPIES and before any row is computed
    SEGMENTS  slot, then ends: where the segments of a new slot's positions end, for attention within segments
    PART      from, to: only this part of the program is run, in 1/65536 of an op: an op may be divided by its rows. The
              plans of the parts behind the first one have no more than this section, and no other step of the model
              comes between them
    IMAGES    slot, then begin and end of each image of a new slot whose rows see each other. No chunk ends within one

The ranks' native code reads this form. `StepPlan` is the form that tests and tools make and read.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .native import native_library

#: The most drafts in one step: their rows have logits, which take memory.
MAX_STEP_DRAFTS = 64
#: The most prompt rows in one step with log probabilities or hidden states: they have logits too.
MAX_STEP_PROBES = 32

MAGIC = 0x41535032

ROWS, POSITIONS, COPIES, STATES, SEGMENTS, PART, IMAGES = range(1, 8)  # kinds of sections

OP_POSITIONS = 1 << 16      #: of an op, between which a part of a step may end

_DO_SAMPLE, _LOGPROBS, _SUPPRESS, _EXTENDED = 1, 2, 4, 8
_SAMPLING = struct.Struct("<ififfffiiiIIiiii")
_HEADER = struct.Struct("<Iiiiii")
_COLUMNS = 8  # columns of the work table before the numbers of spans
_MAX_GROUPS = 64
_FEW = 64   # ids that Python packs faster than it finds the native library


class Flag(enum.IntFlag):
    """What a step computes for an item. At most one of LOOKUP, GIVEN and MODEL may be set, and only with SAMPLE."""

    SAMPLE = 1  # sample a token after the last row, which is the history's last, and append it to the history
    LOOKUP = 2  # the ranks find drafts by prompt lookup
    GIVEN = 4  # the last `drafts` of the known ids are drafts, not history
    MODEL = 8  # drafts come from the draft model
    HIDDEN = 16  # return the hidden states of the output rows
    PROMPT = 32  # output rows before the last return the log probability of the next id


SAMPLE = int(Flag.SAMPLE)  # a plain int, which is faster: a step has up to thousands of items


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are sampled. Encoded once and sent when the sequence gets its slot.

    prompt_len: separates prompt ids from generated ids for the penalties, and is the length that dynamic rotary scaling
    uses. eos: banned while the sequence has fewer than `min_length` tokens (prompt and output).
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
        """The block that starts at byte `offset`, and the offset of its end. Raises struct.error if it is cut short."""
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
    """A sequence that enters a slot.

    history: all of its token ids so far. cached: how many of them the cache already holds, a multiple of the span size.
    sampling: its encoded `SamplingParams`.
    """

    slot: int
    history: Sequence[int]
    sampling: bytes
    cached: int = 0


@dataclass
class WorkItem:
    """Rows to compute for one slot, from its first position that is not in the cache.

    known: ids that are first appended to the slot's history; with GIVEN, the last `drafts` of them are drafts instead.
    spans: appended to its span table of the first cache group; other_spans: to its tables of the other groups, with -1
    for a span that is before the group's attention window. The tables must hold start + rows + drafts positions.
    drafts: the most additional rows for draft tokens. outputs: the number of last rows with outputs; -1: 1 with SAMPLE,
    else 0. adapter: -1 for none. mask: 0 for none, else 1 + its index among the masks in shared memory.
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
            self.outputs = self.flags & SAMPLE


@dataclass
class WorkTable:
    """Work items as int32 arrays, so that a step of a thousand items is encoded quickly.

    columns: [8 + groups, items] in the order of the wire form; `SLOT` and so on are the columns' indices. known: the
    known ids of all items, flat. spans: for each cache group, the span ids of all items, flat.
    """

    SLOT, ROWS, OUTPUTS, DRAFTS, FLAGS, ADAPTER, MASK, N_KNOWN, N_SPANS = range(_COLUMNS + 1)

    columns: np.ndarray
    known: np.ndarray
    spans: list[np.ndarray]

    @staticmethod
    def of(items: Iterable[WorkItem], groups: int = 1) -> WorkTable:
        """The table of these items, which must have equal numbers of cache groups.

        groups: that number if there are no items.
        """
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
    """One step: slots to free, new slots, the rows to compute, and sections that only some backends know.

    groups: the number of cache groups, used if there is no work.
    """

    free: list[int] = field(default_factory=list)
    new: list[NewSlot] = field(default_factory=list)
    work: list[WorkItem] = field(default_factory=list)
    sections: list[tuple[int, list[int]]] = field(default_factory=list)  # (kind, words)
    groups: int = field(default=1, compare=False)

    @property
    def rows(self) -> int:
        """The most positions that the step computes."""
        return sum(item.rows + item.drafts for item in self.work)

    def encode(self) -> bytes:
        """The wire form."""
        return encode_plan(self.free, self.new, WorkTable.of(self.work, self.groups), self.sections)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        """The plan that was encoded. Raises ValueError if `data` is not a valid plan."""
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
    free: Sequence[int], new: Sequence[NewSlot], work: WorkTable,
    sections: Sequence[tuple[int, Sequence[int] | np.ndarray]] = ()
) -> bytes:
    """The wire form of a plan whose work items are arrays. Sections may be arrays of 32-bit integers, too."""
    groups = len(work.columns) - _COLUMNS
    parts = [_HEADER.pack(MAGIC, len(free), len(new), work.columns.shape[1], groups, len(sections)), _ids(free)]
    for one in new:
        parts += (struct.pack("<iii", one.slot, one.cached, len(one.history)), one.sampling, _ids(one.history))
    parts += (work.columns.tobytes(), work.known.tobytes(), *(spans.tobytes() for spans in work.spans))
    for kind, section in sections:
        parts += (struct.pack("<ii", kind, len(section)), _ids(section))
    return b"".join(parts)


def rows_section(slot: int, position: int, rows: np.ndarray) -> tuple[int, np.ndarray]:
    """A section that gives rows, float32 [n, width], for a slot's positions from `position` on."""
    head = np.array([slot, position, *rows.shape], np.int32)
    return ROWS, np.concatenate([head, np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.int32)])


def positions_section(slot: int, places: np.ndarray, delta: int) -> tuple[int, np.ndarray]:
    """A section with the rotary positions, int32 [n, 3], of a slot's first n positions."""
    return POSITIONS, np.concatenate([np.array([slot, len(places), delta], np.int32), places.reshape(-1)])


def part_of_step(begin: int, end: int) -> bytes:
    """The plan of a part behind the first one of a step."""
    return encode_plan([], [], WorkTable.of([]), [(PART, [begin, end])])


def _ids(values: Sequence[int] | np.ndarray) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype("<i4", copy=False).tobytes()
    if isinstance(values, list) and len(values) > _FEW:
        packed: bytes = native_library().id_bytes(values)
        return packed
    return struct.pack(f"<{len(values)}i", *values)


def _split(flat: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    """`flat` divided into lists of these lengths."""
    ids, ends = flat.tolist(), np.cumsum(counts).tolist()
    return [ids[begin:end] for begin, end in zip([0, *ends], ends)]


class _Words:
    """Reads a plan's words in order. Raises ValueError if they end too soon."""

    def __init__(self, data: bytes):
        if len(data) % 4:
            raise ValueError(f"a step plan has {len(data)} bytes, which is not a multiple of 4")
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
