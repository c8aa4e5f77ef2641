"""Compiled grammars, and where each sequence is in its grammar."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from allspark_client.types import VocabType

from ..tokenizer.vocabularies import tokenizer_json
from .checker import Checker, new_matcher, read_tokenizer
from .vocabulary import tokenizer_of_vocab, without_marks

logger = logging.getLogger(__name__)

CACHED_GRAMMARS, CACHED_BYTES = 256, 512 << 20
CACHED_VOCABULARIES = 2  # beside the checkpoint's


class MatcherError(Exception):
    """A sequence can go on in its grammar no more: a token that it does not allow, or a limit of llguidance's."""


class Matcher:
    """Where one sequence is in its grammar. Not thread-safe, but several threads may each have one of one grammar."""

    def __init__(self, inner: LLMatcher, tokenizer: LLTokenizer, end_ids: frozenset[int]):
        """end_ids: those that end the sequence; they are allowed where the grammar may end, and nowhere else."""
        #: llguidance's own, for its calls that take several at once
        self.inner = inner
        self._end = tokenizer.eos_token
        self._end_ids = end_ids
        # Ids whose bits of llguidance's masks are not what they are for this request.
        own = frozenset(tokenizer.eos_tokens)
        self._patched = () if end_ids == own else tuple((i, i in end_ids) for i in sorted(end_ids | own))

    def accept(self, ids: Iterable[int]) -> None:
        """Further ids of the sequence, sampled or received; MatcherError if they do not fit. The end may come again and
        again.
        """
        ended, consumed = self.inner.is_stopped(), []
        for i in ids:
            is_end = i in self._end_ids
            if not (is_end and ended):
                consumed.append(self._end if is_end else i)
            ended = ended or is_end
        if consumed and not self.inner.consume_tokens(consumed):
            raise self.error() or MatcherError("nothing may follow the end")

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of the next token into a uint32 row: bit i % 32 of word i / 32 is 1 if id i is allowed."""
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.patch(row)
        error = self.error()
        if error is not None:
            raise error

    def patch(self, row: np.ndarray) -> None:
        """Puts the request's end-of-sequence ids in the place of the tokenizer's, in a mask of the present state that
        llguidance has written. After an error, the end is all that is allowed.
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
        """The ids that follow now if the text that the grammar leaves no choice for is tokenized as usual. They are
        drafts: masks may allow other ids for the same text. The end is none of them.
        """
        return self.inner.compute_ff_tokens()

    @property
    def may_stop(self) -> bool:
        """Whether what there is satisfies the grammar."""
        return self.inner.is_accepting()

    @property
    def must_stop(self) -> bool:
        """Whether nothing but the end can follow."""
        return self.inner.is_stopped()

    def fork(self) -> Matcher:
        """Another one in the same state."""
        copy = object.__new__(Matcher)
        copy.__dict__ = dict(self.__dict__, inner=self.inner.deep_copy())
        return copy

    def error(self) -> MatcherError | None:
        """What is wrong, if anything is: it stays so."""
        if not self.inner.is_error():
            return None
        return MatcherError(self.inner.get_error().splitlines()[0][:300])


@dataclass(frozen=True)
class Grammar:
    """A compiled response_format."""

    _beginning: LLMatcher
    _tokenizer: LLTokenizer

    def matcher(self, end_ids: Iterable[int], ids: Iterable[int] = ()) -> Matcher:
        """A sequence's, after ids that it has generated already."""
        matcher = Matcher(self._beginning.deep_copy(), self._tokenizer, frozenset(end_ids))
        matcher.accept(ids)
        return matcher


class Guide:
    """Compiles the response_formats of a model's requests. Safe to use from several threads."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Iterable[int]):
        """tokenizer: the text of its tokenizer.json. vocab_size: of the model, which may be padded."""
        self._vocab_size, self._eos_ids = vocab_size, list(eos_ids)
        self._parts = functools.cache(lambda: self._prepared(tokenizer))
        self._checker = Checker(self._parts)
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._tokenizers: OrderedDict[bytes, LLTokenizer] = OrderedDict()
        self._grammars: OrderedDict[tuple[str, bytes, str | None], Future[tuple[Grammar, int]]] = OrderedDict()

    def _prepared(self, tokenizer: str) -> tuple[str, int, list[int]]:
        """What llguidance's tokenizer is made of."""
        text, size = without_marks(tokenizer)
        # It needs an id to tell of the end; matchers put a request's own in its place.
        eos_ids = [i for i in self._eos_ids if 0 <= i < size]
        return text, self._vocab_size, eos_ids or [min(size, self._vocab_size) - 1]

    @classmethod
    def from_dir(cls, path: str, vocab_size: int, eos_ids: Iterable[int]) -> Guide:
        """Of the tokenizer in a directory."""
        return cls(tokenizer_json(path).decode(), vocab_size, eos_ids)

    def start(self) -> None:
        """Reads the tokenizer, here and in the checker's process, so that the first request need not wait for it.
        Returns at once.
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
        vocab_type: VocabType | None = None, field: str | None = None,
    ) -> Grammar:
        """The grammar of a response_format, over the checkpoint's vocabulary or the one given. ValueError names what is
        wrong with it, after a second at the most. field: what the caller has given, if not response_format.
        """
        digest = b"" if vocab is None else _digest(vocab, vocab_type)
        key = (json.dumps(response_format), digest, field)
        with self._lock:
            entry = self._grammars.get(key)
            mine = entry is None
            if mine:
                entry = self._grammars[key] = Future()
            self._grammars.move_to_end(key)
        if mine:
            try:
                entry.set_result(self._compile(response_format, digest, vocab, vocab_type, field))
            except ValueError as error:
                entry.set_exception(error)  # the next who tries it need not wait
            except BaseException as error:
                with self._lock:
                    self._grammars.pop(key, None)
                entry.set_exception(error)
            self._shrink()
        return entry.result()[0]

    def _compile(
        self, response_format: dict[str, Any], digest: bytes, vocab: dict[str, int] | None,
        vocab_type: VocabType | None, field: str | None,
    ) -> tuple[Grammar, int]:
        name = field or "response_format." + _FIELDS.get(response_format["type"], "type")
        try:
            text, size = self._checker.check(response_format)
            tokenizer = self._tokenizer(vocab, vocab_type, digest)
            return Grammar(new_matcher(tokenizer, text), tokenizer), size + len(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

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
        """Forgets the grammars that were not used for longest."""
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
