"""Builds a step while it is planned."""

from __future__ import annotations

import numpy as np

from ..cache import Copies, StateCopies
from ..runtime.plan import MAX_STEP_PROBES, SAMPLE, Flag, NewSlot, WorkTable
from .sequence import Sequence
from .slots import SlotTable
from .step import Masked, Step

NO_SLOTS = np.zeros(0, np.int64)
_GIVEN, _DRAFTING = int(Flag.GIVEN), int(Flag.LOOKUP | Flag.GIVEN | Flag.MODEL)


class StepBuilder:
    """The part of a step that is planned so far."""

    def __init__(self, groups: int) -> None:
        """`groups`: the number of cache groups."""
        self.sequences: list[Sequence] = []  # sequences in decode
        self.slots = self.drafts = NO_SLOTS  # of `sequences`
        self.span_counts: np.ndarray | None = None  # new spans of each of `sequences` in each group, if any
        self.spans: list[list[int]] = [[] for _ in range(groups)]  # new spans of each group
        # prefill chunks: sequence, rows, flags, outputs and new spans
        self.chunks: list[tuple[Sequence, int, int, int, list[list[int]]]] = []
        self.output_rows_left = MAX_STEP_PROBES  # prompt rows that may still get outputs
        self.new: list[NewSlot] = []
        self.sections: list[tuple[int, np.ndarray]] = []  # of the plan, for images
        self.admitted: list[Sequence] = []
        self.rows = self.context = 0
        self.given: dict[int, list[int]] = {}  # drafts that grammars force or predictions hold, by slot
        self.guided = False  # whether any sequence samples under masks
        self.predicted = False  # whether any drafts come from a prediction

    def add_chunk(self, sequence: Sequence, count: int) -> tuple[int, int]:
        """Adds up to `count` more rows of a prompt. Returns their number and their flags: SAMPLE if they end the
        prompt of a sequence that generates tokens.
        """
        wanted, flags, outputs = sequence.prompt_outputs, 0, 0
        if sequence.outputs_every_row:
            count = outputs = min(count, sequence.prompt_len - sequence.planned, self.output_rows_left)
        if count <= 0:
            return 0, 0
        if outputs and wanted is not None:
            self.output_rows_left -= count
            flags = wanted.flags
        elif wanted is not None and wanted.received < sequence.planned + count == sequence.prompt_len:
            flags, outputs = wanted.flags, 1
        if sequence.generates and sequence.planned + count == len(sequence.tokens):
            flags, outputs = flags | SAMPLE, max(outputs, 1)
        if sequence.images is not None:
            self.sections += sequence.images.rows(sequence.slot, sequence.planned, sequence.planned + count)
        self.chunks.append((sequence, count, flags, outputs, sequence.take_unsent()))
        self.rows += count
        self.context += count * (2 * sequence.planned + count - 1) // 2
        sequence.planned += count
        return count, flags

    def step(
        self, free: list[int], slots: SlotTable, draft_kind: int, copies: Copies | None, masks: int,
        states: StateCopies | None,
    ) -> Step:
        """The planned step. `masks`: the first mask row that it may use."""
        n, chunks = len(self.slots), self.chunks
        columns = np.zeros((WorkTable.N_SPANS + len(self.spans), n + len(chunks)), np.int32)
        columns[WorkTable.SLOT, :n] = self.slots
        columns[WorkTable.ROWS, :n] = columns[WorkTable.OUTPUTS, :n] = 1
        columns[WorkTable.FLAGS, :n] = SAMPLE
        columns[WorkTable.ADAPTER, :n] = slots.adapter[self.slots]
        if draft_kind or self.given:
            columns[WorkTable.DRAFTS, :n] = self.drafts
            columns[WorkTable.FLAGS, :n] |= np.where(self.drafts > 0, draft_kind, 0)
        if self.span_counts is not None:
            columns[WorkTable.N_SPANS :, :n] = self.span_counts
        sequences, spans = self.sequences, self.spans
        sampling = np.arange(n)
        if chunks:
            sequences, spans = sequences + [sequence for sequence, *_ in chunks], [list(each) for each in spans]
            for index, (sequence, rows, flags, outputs, new_spans) in enumerate(chunks, n):
                columns[:, index] = (sequence.slot, rows, outputs, 0, flags, sequence.adapter, 0, 0,
                                     *map(len, new_spans))
                for each, new in zip(spans, new_spans):
                    each += new
            sampling = np.flatnonzero(columns[WorkTable.FLAGS] & SAMPLE)
        given = self._give(columns, n) if self.given else {}
        masked = self._mask(columns, sequences, sampling, slots, masks, given) if self.guided else []
        known = np.array([token for drafts in given.values() for token in drafts], np.int32)
        table = WorkTable(columns, known, [np.array(each, np.int32) for each in spans])
        return Step(free, self.new, table, sequences, slots.epoch[columns[WorkTable.SLOT]], n, sampling, self.admitted,
                    self.rows, self.context, copies, masked, states, self.predicted, self.sections)

    def _give(self, columns: np.ndarray, decoding: int) -> dict[int, list[int]]:
        """Assigns given drafts to the first `decoding` items, no more than are planned. Returns them by item."""
        planned = columns[WorkTable.DRAFTS, :decoding].tolist()
        given = {index: drafts[: planned[index]]
                 for index, slot in enumerate(self.slots.tolist())
                 if planned[index] and (drafts := self.given.get(slot))}
        places = list(given)
        columns[WorkTable.N_KNOWN, places] = [len(drafts) for drafts in given.values()]
        columns[WorkTable.FLAGS, places] &= ~_DRAFTING
        columns[WorkTable.FLAGS, places] |= _GIVEN
        return given

    def _mask(
        self, columns: np.ndarray, sequences: list[Sequence], sampling: np.ndarray, slots: SlotTable, row: int,
        given: dict[int, list[int]],
    ) -> list[Masked]:
        """Assigns mask rows, from `row` on, to constrained sequences. `given`: drafts by item. Returns the step's
        masked samples.
        """
        masked: list[Masked] = []
        places, rows = [], []   # columns with masks, and their first rows
        lengths = (slots.longest[columns[WorkTable.SLOT]] - 1).tolist()
        for sample, index in enumerate(sampling.tolist()):  # runs for each row of a step, under the GIL
            sequence = sequences[index]
            guidance = sequence.guidance
            if guidance is None:
                continue
            if guidance.first_masked > lengths[index]:
                masked.append(Masked(sequence, guidance, sample, -1, []))
                continue
            drafts = given.get(index, [])
            places.append(index)
            rows.append(row)
            masked.append(Masked(sequence, guidance, sample, row, drafts))
            row += 1 + len(drafts)
        columns[WorkTable.MASK, places] = np.array(rows, np.int32) + 1
        return masked
