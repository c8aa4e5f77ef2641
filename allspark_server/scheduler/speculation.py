"""The number of draft tokens per sequence, adapted to how many are accepted."""

from __future__ import annotations

import numpy as np


class DraftLengths:
    """The number of drafts that each slot gets in a step. It grows while all drafts are accepted, shrinks otherwise,
    and becomes 0 after MISSES steps in a row without an accepted draft. Drafts are then tried again at growing
    intervals. The output of a sequence does not depend on it.

    shared: drafts come from a model, which all sequences have in common. If DOUBT steps with drafts in a row, of any
    sequences, bring no accepted one, it is not for these texts. Then new sequences begin without drafts, too, and all
    sequences try drafts in the same step, at intervals of LONGEST_DOUBT steps at most: a step with drafts takes
    several times as long as one without, because the host waits for each draft.
    """

    FIRST, PROBE = 4, 2  # drafts at first unless `first` says otherwise, and in a trial
    MISSES = 3  # steps in a row without an accepted draft, after which there are none
    PAUSE, LONGEST_PAUSE = 16, 512  # steps without drafts before the next trial: at first, and at most
    DOUBT, LONGEST_DOUBT = 8, 1024

    def __init__(self, slots: int, longest: int, first: int = FIRST, shared: bool = False):
        self._longest, self._first = longest, min(first, longest)
        self._drafts, self._misses, self._pause, self._next_pause = (np.zeros(slots, np.int64) for _ in range(4))
        self._shared = shared
        self._failed = 0  # steps with drafts in a row, of all sequences, without an accepted one
        self._quiet, self._doubt_pause = 0, self.PAUSE  # steps since the last trial of all, and until the next one

    def start(self, slot: int) -> None:
        """A new sequence has taken the slot."""
        self._drafts[slot] = self._first
        self._misses[slot] = self._pause[slot] = 0
        self._next_pause[slot] = self.PAUSE

    def choose(self, slots: np.ndarray) -> np.ndarray:
        """The drafts of each of these slots in the next step."""
        if self._shared and self._failed >= self.DOUBT:
            self._quiet += 1
            if self._quiet <= self._doubt_pause:
                return np.zeros(len(slots), np.int64)
            self._quiet, self._doubt_pause = 0, min(2 * self._doubt_pause, self.LONGEST_DOUBT)
            self._drafts[slots] = min(self.PROBE, self._longest)
            return self._drafts[slots]
        drafts = self._drafts[slots]
        off = slots[drafts == 0]
        if len(off):
            self._pause[off] -= 1
            self._drafts[off[self._pause[off] <= 0]] = min(self.PROBE, self._longest)
            drafts = self._drafts[slots]
        return drafts

    def learn(self, slots: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Learns how many of the drafts of each slot were accepted."""
        tried = drafts > 0
        slots, drafts, accepted = slots[tried], drafts[tried], accepted[tried]
        if accepted.any():
            self._failed, self._quiet, self._doubt_pause = 0, 0, self.PAUSE
        else:
            self._failed += len(slots) > 0
        grown = np.minimum(drafts + 2, self._longest)
        self._drafts[slots] = np.where(accepted == drafts, grown, np.maximum(accepted + 1, drafts // 2))
        self._misses[slots] = np.where(accepted > 0, 0, self._misses[slots] + 1)
        self._next_pause[slots[accepted > 0]] = self.PAUSE
        given_up = slots[self._misses[slots] >= self.MISSES]
        self._drafts[given_up] = 0
        self._pause[given_up] = self._next_pause[given_up]
        self._next_pause[given_up] = np.minimum(2 * self._next_pause[given_up], self.LONGEST_PAUSE)
