"""Ends reasoning that has used up its budget, by masks that allow only the tokens that end it.

A sequence needs masks only from the first position on at which the budget may be used up, until its reasoning has
ended. Elsewhere it is sampled as if it had no budget, so reasoning that ends earlier has the same bits.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..chat import ReasoningMarks

_NEVER = 1 << 62
_MOST_BYTES = 4     # of a character in UTF-8
_CACHED_BYTES = 1 << 16     # ids whose bytes are kept


@dataclass(frozen=True)
class ReasoningTokens:
    """A family's marks of reasoning in a model's vocabulary.

    `end_ids`: the ids of each mark that ends reasoning. `newline_ids`: those of a newline before it, if the family
    writes one. `token_bytes`: the bytes of an id. `others`: a mask of the ids that may follow `marks.again` once the
    budget is used up, without those that begin `marks.word`; None if the family has no such word.
    """

    marks: ReasoningMarks
    end_ids: dict[bytes, list[int]]
    newline_ids: list[int]
    token_bytes: Callable[[int], bytes]
    others: np.ndarray | None = None

    @classmethod
    def of(
        cls, marks: ReasoningMarks, vocab_size: int, encode: Callable[[str], list[int]],
        token_bytes: Callable[[Iterable[int]], list[bytes]],
    ) -> ReasoningTokens:
        """`encode`: the ids of a text, without special tokens around it. `token_bytes`: the bytes of each id."""
        others = None
        if marks.word:
            word = marks.word.encode()
            others = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
            for i, text in enumerate(token_bytes(range(vocab_size))):
                if text and (text.startswith(word) or word.startswith(text)):
                    others[i // 32] &= ~np.uint32(1 << i % 32)
        return cls(marks, {end.encode(): encode(end) for _, end in marks.pairs}, encode("\n") if marks.newline else [],
                   functools.lru_cache(_CACHED_BYTES)(lambda i: token_bytes([i])[0]), others)


class _Phase(enum.Enum):
    BEFORE = "before"       # no reasoning has begun, or none again
    WITHIN = "within"
    ENDING = "ending"       # the tokens that end it are forced
    AFTER = "after"         # none can begin any more


class ReasoningBudget:
    """The reasoning of one sequence, and how many tokens of it are left. Not thread-safe."""

    def __init__(self, tokens: ReasoningTokens, budget: int, length: int, opened: str | None, closed: bool):
        """`budget`: the most tokens between the marks. `length`: that of the prompt. `opened`: the mark that ends the
        reasoning which the prompt has begun; None if it has begun none. `closed`: whether the answer has no reasoning.
        """
        self._tokens, self._left, self._length = tokens, budget, length
        self._phase = _Phase.AFTER if closed else _Phase.BEFORE
        self._end = b""             # the mark that ends the reasoning
        self._tail = b""            # the last bytes; where a mark may begin, all of them
        self._forced: list[int] = []
        if not closed and opened is not None:
            self._enter(opened.encode())
        self._look()

    @property
    def first_masked(self) -> int:
        """The least length after which a token may need a mask; it never decreases. Any thread."""
        return self._first_masked

    def accept(self, ids: Iterable[int]) -> None:
        """Takes further ids of the sequence."""
        for i in ids:
            self._length += 1
            if self._phase is not _Phase.AFTER:
                self._take(i, self._tokens.token_bytes(i))
        self._look()

    def restrict(self, row: np.ndarray) -> None:
        """Removes from the mask of the next token what the budget does not allow, unless nothing would be left: a
        grammar may allow no end here.
        """
        if self._phase is _Phase.ENDING:
            word, bit = self._forced[0] // 32, np.uint32(1 << self._forced[0] % 32)
            if row[word] & bit:
                row[:] = 0
                row[word] = bit
        elif self._phase is _Phase.BEFORE and self._left <= 0 and self._tokens.others is not None \
                and self._tail.endswith(self._tokens.marks.again.encode()):
            kept = row & self._tokens.others
            if kept.any():
                row[:] = kept

    def fork(self) -> ReasoningBudget:
        """A copy in the same state."""
        copy = object.__new__(ReasoningBudget)
        copy.__dict__ = dict(self.__dict__, _forced=list(self._forced))
        return copy

    def _take(self, i: int, text: bytes) -> None:
        self._tail += text
        if self._phase is _Phase.ENDING:
            if i == self._forced.pop(0):
                if not self._forced:
                    self._leave()
                return
            self._phase = _Phase.WITHIN     # a grammar did not allow the end: try again
        if self._phase is _Phase.BEFORE:
            self._search()
            return
        self._left -= 1
        self._tail = self._tail[-len(self._end) - len(text) - _MOST_BYTES:]
        if self._end in self._tail:
            self._leave()
        elif self._left <= 0 and _is_whole(self._tail):
            newline = [] if self._tail.endswith(b"\n") else self._tokens.newline_ids
            self._phase, self._forced = _Phase.ENDING, newline + self._tokens.end_ids[self._end]

    def _search(self) -> None:
        """Looks for a mark that begins reasoning."""
        marks = self._tokens.marks
        pairs = [(begin.encode(), end.encode()) for begin, end in marks.pairs]
        if marks.anywhere:
            found = next((end for begin, end in pairs if begin in self._tail), None)
            over = marks.last.encode() in self._tail
            self._tail = self._tail[-max(len(begin) for begin, _ in pairs) - len(marks.last):]
        else:
            start = self._tail.lstrip()
            found = next((end for begin, end in pairs if start.startswith(begin)), None)
            over = bool(start) and not any(begin.startswith(start) for begin, _ in pairs)
        if found is not None:
            self._enter(found)
        elif over:
            self._phase = _Phase.AFTER

    def _enter(self, end: bytes) -> None:
        self._phase, self._end, self._tail = _Phase.WITHIN, end, b""
        if self._left <= 0:
            self._phase, self._forced = _Phase.ENDING, list(self._tokens.end_ids[end])

    def _leave(self) -> None:
        self._phase, self._tail = _Phase.BEFORE if self._tokens.marks.anywhere else _Phase.AFTER, b""

    def _look(self) -> None:
        over = self._phase is _Phase.AFTER
        self._first_masked = _NEVER if over else self._length + max(self._left, 0)


def _is_whole(text: bytes) -> bool:
    """Whether the text does not end within a character."""
    for count, byte in enumerate(reversed(text[-_MOST_BYTES:]), 1):
        if byte & 0xC0 != 0x80:
            return count >= (1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
