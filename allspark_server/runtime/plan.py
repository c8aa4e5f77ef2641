"""The step plan: all that the scheduler tells the executors about one step, and its wire form.

A plan is a sequence of little-endian 32-bit words (floats bit for bit):

    magic, n_free, n_new, n_work
    n_free × slot
    n_new  × slot, n_history, sampling block, history ids
    n_work × slot, start, count, flags, n_append, n_spans, append ids, span ids

The native executor decodes it; `StepPlan.decode` exists for tests and for debugging.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

MAGIC = 0x41535031
FLAG_SAMPLE = 1

_DO_SAMPLE, _LOGPROBS, _SUPPRESS = 1, 2, 4
_SAMPLING = struct.Struct("<ififfffiiiIIiiii")
_HEADER = struct.Struct("<Iiii")


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

    def encode(self) -> bytes:
        """The sampling block of a new slot."""
        flags = self.do_sample * _DO_SAMPLE | self.logprobs * _LOGPROBS
        flags |= self.suppress_repetition_in_generation * _SUPPRESS
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
        return head + struct.pack(f"<{len(tail)}i", *tail)

    @staticmethod
    def decode(data: bytes, offset: int) -> tuple["SamplingParams", int]:
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
        params = SamplingParams(
            bool(words[0] & _DO_SAMPLE),
            bool(words[0] & _LOGPROBS),
            bool(words[0] & _SUPPRESS),
            *words[1:10],
            seed=words[10] | words[11] << 32,
            sample_index=words[12],
            prompt_len=words[13],
            eos=eos,
            bad_words=tuple(bad_words),
        )
        return params, offset


@dataclass
class NewSlot:
    """A sequence enters a slot: its whole history so far and its encoded `SamplingParams`."""

    slot: int
    history: list[int]
    sampling: bytes


@dataclass
class WorkItem:
    """Rows to compute for one slot, after `append` went to its history and `spans` to its span table."""

    slot: int
    start: int
    count: int
    sample: bool
    append: list[int] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)


@dataclass
class StepPlan:
    """One step: slots given back, slots taken, and the rows to compute, in this order."""

    free: list[int] = field(default_factory=list)
    new: list[NewSlot] = field(default_factory=list)
    work: list[WorkItem] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Positions that the step computes."""
        return sum(item.count for item in self.work)

    def encode(self) -> bytes:
        """The wire form."""
        parts = [
            _HEADER.pack(MAGIC, len(self.free), len(self.new), len(self.work)),
            struct.pack(f"<{len(self.free)}i", *self.free),
        ]
        for new in self.new:
            parts.append(struct.pack("<ii", new.slot, len(new.history)))
            parts.append(new.sampling)
            parts.append(struct.pack(f"<{len(new.history)}i", *new.history))
        words: list[int] = []
        for item in self.work:
            append, spans = item.append, item.spans
            words += (item.slot, item.start, item.count, FLAG_SAMPLE if item.sample else 0, len(append), len(spans))
            words += append
            words += spans
        parts.append(struct.pack(f"<{len(words)}i", *words))
        return b"".join(parts)

    @staticmethod
    def decode(data: bytes) -> "StepPlan":
        """The plan that `encode` wrote. Raises ValueError if `data` is not one."""
        try:
            magic, n_free, n_new, n_work = _HEADER.unpack_from(data, 0)
            if magic != MAGIC:
                raise ValueError(f"not a step plan: magic {magic:#x}, expected {MAGIC:#x}")
            offset = _HEADER.size
            plan = StepPlan(free=list(struct.unpack_from(f"<{n_free}i", data, offset)))
            offset += 4 * n_free
            for _ in range(n_new):
                slot, length = struct.unpack_from("<ii", data, offset)
                begin = offset + 8
                _, offset = SamplingParams.decode(data, begin)
                history = list(struct.unpack_from(f"<{length}i", data, offset))
                plan.new.append(NewSlot(slot, history, data[begin:offset]))
                offset += 4 * length
            for _ in range(n_work):
                slot, start, count, flags, n_append, n_spans = struct.unpack_from("<6i", data, offset)
                ids = struct.unpack_from(f"<{n_append + n_spans}i", data, offset + 24)
                offset += 24 + 4 * len(ids)
                sample = bool(flags & FLAG_SAMPLE)
                plan.work.append(WorkItem(slot, start, count, sample, list(ids[:n_append]), list(ids[n_append:])))
        except struct.error as error:
            raise ValueError(f"a step plan of {len(data)} bytes is cut short: {error}") from error
        if offset != len(data):
            raise ValueError(f"a step plan of {len(data)} bytes has {len(data) - offset} bytes too many")
        return plan
