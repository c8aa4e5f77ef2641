"""Compiled grammars, and the place of each sequence in its grammar."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from allspark_client.types import VocabType

from ..tokenizer.vocabularies import tokenizer_json
from .checker import Checker, TooCostly, new_matcher, read_tokenizer
from .reasoning import ReasoningBudget
from .vocabulary import tokenizer_of_vocab, without_marks

if TYPE_CHECKING:
    from ..scheduler import Masked

logger = logging.getLogger(__name__)

CACHED_GRAMMARS, CACHED_BYTES = 256, 512 << 20
CACHED_VOCABULARIES = 2  # cached in addition to that of the checkpoint
MAX_FORCED = 16  # the most forced tokens (drafts) of one sequence at a time


class MatcherError(Exception):
    """A sequence cannot continue in its grammar: a token that it does not allow, or one of llguidance's limits."""


class Matcher:
    """The place of one sequence in its grammar. Not thread-safe, unlike the grammar itself."""

    def __init__(self, inner: LLMatcher, tokenizer: LLTokenizer, end_ids: frozenset[int]):
        """`end_ids`: ids that end the sequence. They are allowed only where the grammar may end."""
        #: llguidance's matcher, for its batched calls
        self.inner = inner
        self._end = tokenizer.eos_token
        self._end_ids = end_ids
        # Ids whose bits in llguidance's masks are wrong for this request.
        own = frozenset(tokenizer.eos_tokens)
        self._patched = () if end_ids == own else tuple((i, i in end_ids) for i in sorted(end_ids | own))

    def is_end(self, token: int) -> bool:
        """Whether this id ends the sequence."""
        return token in self._end_ids

    def accept(self, ids: Iterable[int]) -> None:
        """Takes further ids of the sequence; MatcherError if the grammar does not allow them. An end id may be
        repeated.
        """
        ended, consumed = self.inner.is_stopped(), []
        for i in ids:
            is_end = i in self._end_ids
            if not (is_end and ended):
                consumed.append(self._end if is_end else i)
            ended = ended or is_end
        if consumed and not self.inner.consume_tokens(consumed):
            raise self.refusal()

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of the next token into a uint32 row: bit i % 32 of word i / 32 is 1 if id i is allowed."""
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.patch(row)
        error = self.error()
        if error is not None:
            raise error

    def patch(self, row: np.ndarray) -> None:
        """Replaces the tokenizer's end-of-sequence ids by the request's, in a mask of the current state that llguidance
        has written. After an error the mask allows only the end.
        """
        if self._patched:
            may_stop = self.inner.is_accepting() or self.inner.is_error()
            for i, is_end in self._patched:
                bit = np.uint32(1 << i % 32)
                if is_end and may_stop:
                    row[i // 32] |= bit
                else:
                    row[i // 32] &= ~bit

    @property
    def patches(self) -> bool:
        """Whether masks that llguidance writes need `patch`."""
        return bool(self._patched)

    def forced(self) -> list[int]:
        """The ids that follow now where the grammar allows only one text, tokenized as usual; the end is not included.
        They are drafts: masks may allow other ids for the same text.
        """
        return self.inner.compute_ff_tokens()

    @property
    def may_stop(self) -> bool:
        """Whether the sequence satisfies the grammar so far."""
        return self.inner.is_accepting()

    @property
    def must_stop(self) -> bool:
        """Whether only the end can follow."""
        return self.inner.is_stopped()

    def fork(self) -> Matcher:
        """A copy in the same state."""
        copy = object.__new__(Matcher)
        copy.__dict__ = dict(self.__dict__, inner=self.inner.deep_copy())
        return copy

    def refusal(self) -> MatcherError:
        """Why it did not take an id."""
        return self.error() or MatcherError("nothing may follow the end")

    def error(self) -> MatcherError | None:
        """The error, if there is one. An error is permanent."""
        if not self.inner.is_error():
            return None
        return MatcherError(self.inner.get_error().splitlines()[0][:300])


class Guidance:
    """The place of a sequence in its grammar and its reasoning, as the scheduler and the masks' thread see it."""

    def __init__(self, matcher: Matcher | None, length: int, budget: ReasoningBudget | None = None):
        """`matcher`: None without a grammar. `length`: tokens of the sequence, prompt and output. `budget`: of its
        reasoning, None without a limit.
        """
        self._matcher, self._length, self.budget = matcher, length, budget
        self._failed = False
        self._forced = length, [] if matcher is None else matcher.forced()[:MAX_FORCED]
        # On the engine's thread: the planned samples whose tokens are not known yet, and the masks that depend on them;
        # None for a sample without a mask.
        self.pending = 0
        self.deferred: deque[Masked | None] = deque()

    @property
    def first_masked(self) -> int:
        """The least length after which a token needs a mask; it never decreases. Any thread."""
        return self.budget.first_masked if self._matcher is None and self.budget is not None else 0

    def forced_after(self, length: int) -> list[int]:
        """The forced ids after the first `length` tokens of the sequence, for use as drafts. Any thread."""
        known, ids = self._forced
        return ids[length - known :] if length >= known else []

    # The masks' thread.

    def takes_single(self, ids: list[int]) -> LLMatcher | None:
        """What must take the only one of these ids, before `advance` is told whether it did; or None."""
        matcher = self._matcher
        if len(ids) != 1 or matcher is None or self.budget is not None or self._failed or matcher.is_end(ids[0]):
            return None
        return matcher.inner

    def advance(self, ids: list[int], accepted: bool | None = None) -> None:
        """Advances the matcher by sampled ids. Raises MatcherError at the first ids that the grammar does not allow.
        `accepted`: whether the matcher took them, if it has been asked already (`takes_single`).
        """
        self._length += len(ids)
        if self.budget is not None:
            self.budget.accept(ids)
        if self._matcher is not None and not self._failed:
            try:
                if accepted is None:
                    self._matcher.accept(ids)
                elif not accepted:
                    raise self._matcher.refusal()
                self._forced = self._length, self._matcher.forced()[:MAX_FORCED]
                if error := self._matcher.error():
                    raise error
            except MatcherError:
                self._failed = True  # its masks now allow only the end
                raise

    @property
    def matcher(self) -> Matcher | None:
        """The matcher of the sequence."""
        return self._matcher


@dataclass(frozen=True)
class Grammar:
    """A compiled response_format."""

    _beginning: LLMatcher
    _tokenizer: LLTokenizer

    def matcher(self, end_ids: Iterable[int], ids: Iterable[int] = ()) -> Matcher:
        """The matcher of a sequence that has generated `ids` already."""
        matcher = Matcher(self._beginning.deep_copy(), self._tokenizer, frozenset(end_ids))
        matcher.accept(ids)
        return matcher


class Guide:
    """Compiles the response_formats of a model's requests. Safe to use from several threads."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Iterable[int]):
        """`tokenizer`: the text of tokenizer.json. `vocab_size`: the model's, which may be larger by padding."""
        self._vocab_size, self._eos_ids = vocab_size, list(eos_ids)
        self._parts = functools.cache(lambda: self._prepared(tokenizer))
        self._checker = Checker(self._parts)
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._tokenizers: OrderedDict[bytes, LLTokenizer] = OrderedDict()
        self._grammars: OrderedDict[tuple[str, bytes, str | None, str], Future[tuple[Grammar, int]]] = OrderedDict()

    def _prepared(self, tokenizer: str) -> tuple[str, int, list[int]]:
        """The arguments of llguidance's tokenizer."""
        text, size = without_marks(tokenizer)
        # llguidance needs an end-of-sequence id; matchers replace it by those of the request.
        eos_ids = [i for i in self._eos_ids if 0 <= i < size]
        return text, self._vocab_size, eos_ids or [min(size, self._vocab_size) - 1]

    @classmethod
    def from_dir(cls, path: str, vocab_size: int, eos_ids: Iterable[int]) -> Guide:
        """A guide for the tokenizer in a directory."""
        return cls(tokenizer_json(path).decode(), vocab_size, eos_ids)

    def start(self) -> None:
        """Starts to read the tokenizer, here and in the checker's process, so that the first request does not wait for
        it. Returns at once.
        """
        def run() -> None:
            try:
                self._checker.start()
                self._tokenizer(None, None)
            except (ValueError, OSError) as error:
                if not self._checker.closed:
                    logger.warning("guided output is not available: %s", error)

        threading.Thread(target=run, name="allspark-guide", daemon=True).start()

    def close(self) -> None:
        """Ends the checker's process."""
        self._checker.close()

    def compile(
        self, response_format: dict[str, Any], vocab: dict[str, int] | None = None,
        vocab_type: VocabType | None = None, field: str | None = None, scope: str = "", patience: float = 1,
    ) -> Grammar:
        """The grammar of a response_format, over `vocab` or the checkpoint's vocabulary. `field`: the name of the field
        for errors, if not response_format. `scope`: a grammar is shared only within it, since the time that it takes
        tells whether it is known. `patience`: multiplies the limits of the time that it may take. ValueError
        says what is wrong. That a grammar is wrong is remembered; that it took too long is not.
        """
        digest = b"" if vocab is None else _digest(vocab, vocab_type)
        key = (json.dumps(response_format), digest, field, scope)
        with self._lock:
            known = self._grammars.get(key)
            entry = known if known is not None else self._grammars.setdefault(key, Future())
            self._grammars.move_to_end(key)
        if known is None:
            try:
                entry.set_result(self._compile(response_format, digest, vocab, vocab_type, field, patience))
            except BaseException as error:
                if not isinstance(error, ValueError) or isinstance(error, TooCostly):
                    with self._lock:
                        self._grammars.pop(key, None)
                entry.set_exception(error)  # a wrong grammar stays: the next request with it fails at once
            self._shrink()
        try:
            return entry.result()[0]
        except TooCostly:
            if known is None or patience == 1:
                raise
        return self.compile(response_format, vocab, vocab_type, field, scope, patience)  # the other had less patience

    def guidances(
        self, response_format: dict[str, Any], end_ids: Iterable[int], prompt_len: int, histories: list[list[int]],
        vocab: dict[str, int] | None = None, vocab_type: VocabType | None = None, field: str | None = None,
        scope: str = "", patience: float = 1,
    ) -> list[Guidance]:
        """The places of a request's samples, which have generated `histories` already; arguments as `compile` has them.
        ValueError if a history does not follow the grammar.
        """
        grammar = self.compile(response_format, vocab, vocab_type, field, scope, patience)
        try:
            if any(histories):
                matchers = [grammar.matcher(end_ids, generated) for generated in histories]
            else:
                first = grammar.matcher(end_ids)
                matchers = [first.fork() for _ in histories]
        except MatcherError as error:
            raise ValueError(f"generated does not follow the {field or 'response_format'}: {error}") from error
        return [Guidance(matcher, prompt_len + len(generated)) for matcher, generated in zip(matchers, histories)]

    def _compile(
        self, response_format: dict[str, Any], digest: bytes, vocab: dict[str, int] | None,
        vocab_type: VocabType | None, field: str | None, patience: float,
    ) -> tuple[Grammar, int]:
        name = field or "response_format." + _FIELDS.get(response_format["type"], "type")
        try:
            text, size = self._checker.check(response_format, patience)
            tokenizer = self._tokenizer(vocab, vocab_type, digest)
            return Grammar(new_matcher(tokenizer, text), tokenizer), size + len(text)
        except ValueError as error:
            raise (TooCostly if isinstance(error, TooCostly) else ValueError)(f"{name}: {error}") from None

    def _tokenizer(
        self, vocab: dict[str, int] | None, vocab_type: VocabType | None, digest: bytes = b""
    ) -> LLTokenizer:
        with self._reading:
            tokenizer = self._tokenizers.get(digest)
            if tokenizer is None:
                if vocab is None:
                    tokenizer = read_tokenizer(*self._parts())
                else:
                    tokenizer = tokenizer_of_vocab(vocab, vocab_type, *self._parts()[1:])
                self._tokenizers[digest] = tokenizer
                while len(self._tokenizers) > 1 + CACHED_VOCABULARIES:
                    del self._tokenizers[next(key for key in self._tokenizers if key)]
            return tokenizer

    def _shrink(self) -> None:
        """Removes the least recently used grammars."""
        with self._lock:
            done = [(key, entry) for key, entry in self._grammars.items() if entry.done()]
            sizes = [entry.result()[1] if entry.exception() is None else len(key[0]) for key, entry in done]
            total = sum(sizes)
            for (key, _), size in zip(done[:-1], sizes):
                if len(self._grammars) <= CACHED_GRAMMARS and total <= CACHED_BYTES:
                    break
                del self._grammars[key]
                total -= size


_FIELDS = {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}


def _digest(vocab: dict[str, int], vocab_type: VocabType | None) -> bytes:
    text = json.dumps([vocab_type, sorted(vocab.items())])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
