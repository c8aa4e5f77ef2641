"""Applies the results of completed steps to their sequences."""

from __future__ import annotations

import numpy as np

from ..runtime.plan import Flag, WorkTable
from .prompt_outputs import PromptOutputReader
from .sequence import TOKEN_BYTES, FinishReason, State
from .state import SchedulerState
from .step import Outcome, Step, StepResult

_GIVEN = int(Flag.GIVEN)


class Completion(SchedulerState):
    """Takes the tokens of completed steps. Tokens of sequences that have ended meanwhile are discarded."""

    def complete(self, step: Step, result: StepResult) -> Outcome:
        """Takes the result of the oldest planned step that is not completed."""
        table, counters = self._slots, self.counters
        reader, prompt_rows, computed = PromptOutputReader(step, result), [], []
        for index in range(step.decoding, len(step.sequences)):
            sequence, slot = step.sequences[index], int(step.work.columns[WorkTable.SLOT, index])
            here = sequence.slot == slot and bool(table.epoch[slot] == step.epochs[index])
            if sequence.prompt_outputs is not None and (found := reader.take(index, sequence, sequence.computed, here)):
                prompt_rows.append(found)
            if here:
                sequence.computed += int(step.work.columns[WorkTable.ROWS, index])
                self._advance(sequence)
                if not sequence.generates and sequence.computed == len(sequence.tokens):
                    computed.append(sequence)
                    self._leave(sequence, State.ENDED)
        counts, tokens = result.counts, result.tokens
        several = len(tokens) != len(counts)
        sampled, epochs, slots = step.sequences, step.epochs, step.work.columns[WorkTable.SLOT]
        if len(step.sampling) != len(sampled):
            sampled = [sampled[i] for i in step.sampling.tolist()]
            epochs, slots = epochs[step.sampling], slots[step.sampling]
        first = np.cumsum(counts) - counts if several else np.arange(len(counts))
        outcome = Outcome(sampled, first, counts.copy(), prompt_rows=prompt_rows, computed=computed)
        alive = table.epoch[slots] == epochs
        live = slots[alive]
        table.pending[live] -= 1
        table.certain[live] = table.length[live]
        if self._drafts is not None or step.masked or step.predicted:
            drafts = step.work.columns[WorkTable.DRAFTS, step.sampling]
            table.longest[live] -= (drafts + 1 - counts)[alive]
            if self._drafts is not None:
                own = alive & (step.work.columns[WorkTable.FLAGS, step.sampling] & _GIVEN == 0)
                # ranks may have found fewer drafts
                self._drafts.learn(slots[own], result.drafted[own], counts[own] - 1)
            counters.drafted_tokens += int(result.drafted.sum())
            counters.accepted_tokens += len(tokens) - len(counts)
        plain = alive & ~table.check_each[slots]
        if result.status.any():
            plain[np.repeat(np.arange(len(counts)), counts)[result.status != 0]] = False
        if not several and plain.all():
            self._take_each(outcome, None, slots, tokens)
        else:
            self._take_plain(outcome, plain.nonzero()[0], counts, slots, tokens)
            for index in (~plain).nonzero()[0].tolist():
                part = slice(int(first[index]), int(first[index] + counts[index]))
                self._take(outcome, index, tokens[part].tolist(), result.status[part].tolist(), bool(alive[index]))
        if step.predicted:
            self._learn_predicted(step, result, outcome, alive)
        counters.computed_rows += step.rows + len(tokens) - len(counts)
        counters.generated_tokens += int(outcome.kept.sum())
        if step.copies is not None:
            counters.saved_spans += len(step.copies.saved)
            counters.restored_spans += len(step.copies.restored)
        counters.steps += 1
        return outcome

    def _learn_predicted(self, step: Step, result: StepResult, outcome: Outcome, alive: np.ndarray) -> None:
        """Notes how many drafts of predictions were accepted, and of these how many belong to the outputs."""
        flags, slots = step.work.columns[WorkTable.FLAGS, step.sampling], step.work.columns[WorkTable.SLOT]
        masks = step.work.columns[WorkTable.MASK, step.sampling]
        given = ((flags & _GIVEN != 0) & (masks == 0)).nonzero()[0]
        accepted = np.minimum(result.counts[given] - 1, outcome.kept[given])
        for index, drafted, kept in zip(given.tolist(), result.drafted[given].tolist(), accepted.tolist()):
            prediction = outcome.sequences[index].prediction
            if prediction is not None:
                prediction.learn(drafted, kept)
        live = given[alive[given]]
        self._predicted.learn(slots[step.sampling][live], result.drafted[live], result.counts[live] - 1)

    def _take_plain(
        self, outcome: Outcome, indices: np.ndarray, counts: np.ndarray, slots: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Takes all tokens of many running sequences, round by round: the first token of each, then the second of each
        that has one.
        """
        turn = 0
        while len(indices):
            ended = self._take_each(outcome, indices, slots[indices], tokens[outcome.first[indices] + turn])
            turn += 1
            if ended.any():
                gone = indices[ended]
                outcome.kept[gone] = turn
                self.counters.discarded_rows += int((counts[gone] - turn).sum())
                indices = indices[~ended]
            indices = indices[counts[indices] > turn]

    def _take_each(
        self, outcome: Outcome, indices: np.ndarray | None, slots: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Takes one token for each of many running sequences: those at `indices`, or all that sampled if None. Returns
        a bool array: whether the token ended its sequence.
        """
        table = self._slots
        at = table.tail_length[slots]
        table.tail[slots, at] = tokens
        table.tail_length[slots] = at + 1
        length = table.length[slots] + 1
        table.length[slots] = length
        eos = (table.eos[slots] == tokens[:, None]).any(axis=1)
        ended = eos | (length >= table.limit[slots])
        full = (length > table.span_end[slots]) | (at + 1 == table.TAIL)
        for k in (ended | full).nonzero()[0].tolist():
            index = k if indices is None else int(indices[k])
            sequence = outcome.sequences[index]
            if full[k]:
                table.settle(sequence)
                self._advance(sequence)
            if ended[k] and not eos[k] and length[k] < sequence.stop.max_length:
                self._leave(sequence, State.WAITING)  # to be recomputed
            elif ended[k]:
                outcome.ended.append((index, FinishReason.STOP if eos[k] else FinishReason.LENGTH))
                self._leave(sequence, State.ENDED)
        return ended

    def _take(self, outcome: Outcome, index: int, tokens: list[int], status: list[int], alive: bool) -> None:
        """Takes the tokens of one sequence in any state. `alive`: it still has the slot in which it sampled them."""
        sequence = outcome.sequences[index]
        if not alive:
            sequence.in_flight -= 1
        if sequence.state is State.ENDED:
            outcome.kept[index] = 0
            self.counters.discarded_rows += len(tokens)
            return
        if alive:
            self._slots.settle(sequence)
        reason, kept = None, 0
        while reason is None and kept < len(tokens) and status[kept] == 0:
            sequence.tokens.append(tokens[kept])
            kept += 1
            reason = sequence.stop.check(sequence.tokens, sequence.prompt_len)
        outcome.kept[index] = kept
        self.counters.discarded_rows += len(tokens) - kept
        if reason is None and kept < len(tokens):
            outcome.failed.append(index)
        if alive:
            self._slots.length[sequence.slot] += kept
            sequence.computed = len(sequence.tokens) - 1
            self._advance(sequence)
        else:
            self.queue.note_growth(sequence, kept * TOKEN_BYTES)
        if reason is not None:
            outcome.ended.append((index, reason))
        if reason is not None or kept < len(tokens):
            self.cancel(sequence)
        elif alive and len(sequence.tokens) >= self._slots.limit[sequence.slot]:
            self._leave(sequence, State.WAITING)  # to be recomputed
