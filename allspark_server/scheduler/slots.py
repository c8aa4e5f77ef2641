"""The slots as arrays, so that a step of a thousand sequences is planned and completed in a few operations."""

from __future__ import annotations

import numpy as np

from .sequence import NO_ADAPTER, Sequence

_NEVER = np.iinfo(np.int64).max


class SlotTable:
    """One entry for each slot; int64 unless said otherwise.

    `epoch`: the number of sequences that have left the slot; it tells late results of an earlier sequence from
    those of the current one. `length`: known tokens of the sequence. `longest`: the length after all planned steps
    if all drafts are accepted. `pending`: results still to come. `capacity`: positions in the sequence's spans.
    `limit`: its maximum length, or the length at which it must be recomputed. `guided` (bool): its tokens are
    sampled under masks. `predicted` (bool): it has a prediction, and no masks. `span_end`: the length at which the
    next span is full; a full span may enter the prefix cache, and sliding windows may move. `certain`: positions
    that the last completed step computed, its drafts not counted. `check_each` (bool): its tokens must be checked
    one by one. `adapter`: the LoRA adapter of its rows.

    The last tokens of a sequence stay in `tail` [slots, TAIL], `tail_length` of them, until they are needed.
    """

    TAIL = 64
    EOS = 8  # end-of-sequence ids of one sequence that are compared at once

    def __init__(self, slots: int, span_size: int, track_full_spans: bool, recompute_beyond: int = 0):
        """`track_full_spans`: the scheduler must know when a span is full. `recompute_beyond`: see Limits."""
        self._span_size, self._track_full_spans, self._recompute_beyond = span_size, track_full_spans, recompute_beyond
        self.epoch, self.length, self.longest, self.pending = (np.zeros(slots, np.int64) for _ in range(4))
        self.capacity, self.limit, self.span_end, self.tail_length = (np.zeros(slots, np.int64) for _ in range(4))
        self.certain = np.zeros(slots, np.int64)
        self.any_guided = self.any_predicted = False  # whether any sequence ever was
        self.check_each, self.guided, self.predicted = (np.zeros(slots, bool) for _ in range(3))
        self.adapter = np.full(slots, NO_ADAPTER, np.int64)
        self.eos = np.full((slots, self.EOS), -1, np.int32)
        self.tail = np.zeros((slots, self.TAIL), np.int32)

    def start(self, sequence: Sequence) -> None:
        """A sequence has taken its slot, with its spans and without planned rows."""
        slot, stop = sequence.slot, sequence.stop
        self.length[slot] = self.longest[slot] = len(sequence.tokens)
        self.pending[slot] = self.tail_length[slot] = 0
        recompute_at = self._recompute_beyond + 1 if len(sequence.tokens) <= self._recompute_beyond else stop.max_length
        self.limit[slot] = min(recompute_at, stop.max_length)
        self.check_each[slot] = bool(stop.stop_words) or len(stop.eos) > self.EOS
        self.adapter[slot] = sequence.adapter
        self.guided[slot] = sequence.guidance is not None
        self.any_guided = self.any_guided or bool(self.guided[slot])
        self.predicted[slot] = sequence.prediction is not None and sequence.guidance is None
        self.any_predicted = self.any_predicted or bool(self.predicted[slot])
        self.eos[slot] = -1
        if len(stop.eos) <= self.EOS:
            self.eos[slot, : len(stop.eos)] = list(stop.eos)
        self.note_spans(sequence)
        self.note_computed(sequence)

    def note_spans(self, sequence: Sequence) -> None:
        """The sequence's spans have changed."""
        self.capacity[sequence.slot] = sequence.covered * self._span_size

    def note_computed(self, sequence: Sequence) -> None:
        """More of its positions are computed, and its full spans are in the prefix cache."""
        full = sequence.computed // self._span_size
        self.span_end[sequence.slot] = (full + 1) * self._span_size if self._track_full_spans else _NEVER

    def known_from(self, sequence: Sequence, begin: int) -> list[int]:
        """The sequence's known tokens from position `begin` on."""
        settled = len(sequence.tokens)
        tail = self.tail[sequence.slot, max(0, begin - settled) : int(self.tail_length[sequence.slot])].tolist()
        return sequence.tokens[begin:] + tail if begin < settled else tail

    def settle(self, sequence: Sequence) -> None:
        """Moves the sequence's tail to its tokens."""
        slot = sequence.slot
        count = int(self.tail_length[slot])
        if count:
            sequence.tokens += self.tail[slot, :count].tolist()
            sequence.computed = len(sequence.tokens) - 1
            self.tail_length[slot] = 0
