"""Drafts from a text that the output of a request is expected to resemble."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np

from .speculation import DraftLengths

_TRIED, _LONGEST = 32, 16  # places that are compared, and tokens of each: as in native/batch/lookup.cpp


class PredictedLengths(DraftLengths):
    """The number of drafts from predictions: more than from other sources, since most of a prediction comes true."""

    def __init__(self, slots: int):
        super().__init__(slots, longest=16, first=8)


class PredictedText:
    """The ids of a prediction, with an index of their pairs. The samples of a request share it."""

    def __init__(self, ids: list[int]):
        self.ids = ids
        words = np.array(ids, np.int64)
        pairs = words[:-1] << 32 | words[1:]
        self._order = np.argsort(pairs, kind="stable")
        self._pairs = pairs[self._order].data  # bisect reads single entries, which arrays are slow at

    def after(self, history: list[int], near: int) -> int | None:
        """The index of the id that follows the last ids of `history`; None if the last two do not occur together.

        Of several places the one with the longest match wins, then the first one at or after `near`.
        """
        if len(history) < 2:
            return None
        pair = history[-2] << 32 | history[-1]
        begin = bisect_left(self._pairs, pair)
        if begin == len(self._pairs) or self._pairs[begin] != pair:
            return None
        end = bisect_right(self._pairs, pair, begin)
        places = (self._order[begin:end] + 2).tolist()  # in ascending order
        if len(places) > _TRIED:
            first = max(0, min(bisect_left(places, near) - _TRIED // 4, len(places) - _TRIED))
            places = places[first : first + _TRIED]
        return max(places, key=lambda place: (self._match(history, place), place >= near, -abs(place - near)))

    def _match(self, history: list[int], place: int) -> int:
        most = min(_LONGEST, place, len(history))
        return next((n for n in range(most) if self.ids[place - 1 - n] != history[-1 - n]), most)


class Prediction:
    """The place of a sequence's output in its predicted text.

    `accepted`, `rejected`: drafts from it that belong to the output, and that do not.
    """

    def __init__(self, text: PredictedText, prompt_len: int):
        self.accepted = self.rejected = 0
        self._text = text
        self._shift: int | None = prompt_len  # the position of the text's first id; None: the output does not follow it
        self._checked = prompt_len  # tokens of the sequence that were compared with the text
        self._near = 0  # where in the text the output last followed it
        self._behind = False  # whether planned steps have drafts that do not follow `_shift`

    def drafts(self, known_from: Callable[[int], list[int]], length: int, longest: int, planned: int, most: int
               ) -> list[int]:
        """Up to `most` drafts for the positions from `longest` on; none while the output does not follow the text.

        `known_from(begin)`: the sequence's known tokens from position `begin` on. `length`: their number. `longest`:
        the length after the `planned` steps whose results are unknown, if all their drafts are accepted, as is assumed
        of drafts of the same text.
        """
        ids = self._text.ids
        if new := known_from(self._checked):
            if self._shift is not None:
                at = self._checked - self._shift
                if ids[at : at + len(new)] != new:
                    self._shift, self._near = None, at
            self._checked = length
            if self._shift is None:
                place = self._text.after(known_from(max(0, length - _LONGEST)), self._near)
                if place is not None:
                    self._shift = length - place
                    self._behind = longest > length + planned
        self._behind = self._behind and longest > length + planned
        if self._shift is None or self._behind:
            return []
        begin = longest - self._shift
        return ids[begin : begin + most]

    def learn(self, drafted: int, accepted: int) -> None:
        """Learns how many of its drafts were accepted."""
        self.accepted += accepted
        self.rejected += drafted - accepted
