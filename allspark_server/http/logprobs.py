"""Log probabilities in OpenAI's forms for chats and for completions."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from allspark_client.types import GeneratedElements

from .pieces import json_list, quoted

#: what other servers write for -inf, which JSON does not have
_LEAST = -9999.0


def finite(logprob: float) -> float:
    """A log probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else _LEAST


def number(logprob: float) -> str:
    """`finite` as JSON."""
    return repr(logprob) if math.isfinite(logprob) else repr(_LEAST)


def token_text(data: bytes) -> str:
    """A token's text; for a part of a character, its bytes in the form of OpenAI's completions."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenTexts:
    """The bytes of tokens by id, and the parts of JSON that log probabilities need of them, each made once.

    The parts raise KeyError for a token whose bytes are not known.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, bytes] = {}
        #: questions for blocks of `bytes` that have no answer yet
        self.asked: dict[int, asyncio.Future[None]] = {}
        #: whether the whole vocabulary is known or asked for
        self.reading = False
        #: `token_text` as JSON, and the number of characters that the token has by itself
        self.completion: dict[int, tuple[str, int]] = _Made(
            lambda i: (quoted(token_text(self.bytes[i])), len(self.bytes[i].decode(errors="ignore"))))
        #: what stands before and behind the log probability in an entry of a chat
        self.chat: dict[int, tuple[str, str]] = _Made(lambda i: (
            f'{{"token": {quoted(self.bytes[i].decode(errors="replace"))}, "logprob": ',
            f', "bytes": {json.dumps(list(self.bytes[i]))}'))


class _Made(dict[int, Any]):
    """Makes its values when they are asked for."""

    def __init__(self, make: Callable[[int], Any]):
        super().__init__()
        self._make = make

    def __missing__(self, key: int) -> Any:
        value = self[key] = self._make(key)
        return value


def chat_logprobs_json(elements: GeneratedElements, texts: TokenTexts, top: int) -> str:
    """The field `logprobs` of a chat's chunk, as json.dumps would write the entries of `chat_logprobs`."""
    known, entries = texts.chat, []
    for i, logprob, pairs in zip(elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list):
        others = []
        for other, value in pairs[:top]:
            begin, end = known[other]
            others.append(f"{begin}{number(value)}{end}}}")
        begin, end = known[i]
        entries.append(f'{begin}{number(logprob)}{end}, "top_logprobs": [{", ".join(others)}]}}')
    return f'{{"content": [{", ".join(entries)}], "refusal": null}}'


def chat_logprobs(elements: GeneratedElements, tokens: dict[int, bytes], top: int) -> Iterator[dict[str, Any]]:
    """The field `content` of a chat's logprobs: an entry per token, with `top` alternatives."""
    for i, logprob, pairs in zip(elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list):
        yield {
            **_chat_entry(tokens[i], logprob),
            "top_logprobs": [_chat_entry(tokens[other], value) for other, value in pairs[:top]],
        }


def _chat_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def prompt_logprobs(given: Sequence[Sequence[tuple[int, float]]], top: int, tokens: dict[int, bytes]) -> Iterator[str]:
    """The field `prompt_logprobs` in vLLM's form: null for the first token of the prompt, then for each token an object
    by id, of itself and of the `top` most likely ones. `rank` is null for a token that is not among these.
    """
    def entry(pairs: Sequence[tuple[int, float]]) -> dict[str, Any]:
        ranks = {i: rank for rank, (i, _) in enumerate(pairs[1:], 1)}
        return {str(i): {"logprob": finite(value), "rank": ranks.get(i), "decoded_token": token_text(tokens[i])}
                for i, value in pairs[:1 + top]}

    return json_list(itertools.chain([None], map(entry, given)), 16)


class ItemLogprobs:
    """Finds the log probabilities of an answer's parts, which its text is parsed into."""

    def __init__(self, markers: Sequence[str]):
        """`markers`: special tokens, which are in no part."""
        self._markers = frozenset(marker.encode() for marker in markers)
        #: entries that are in no part yet, and the bytes of each that are left
        self._waiting: list[tuple[dict[str, Any], bytes]] = []

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add entries of `chat_logprobs`, in their order."""
        for entry in entries:
            data = bytes(entry["bytes"])
            # 0xff is in no text
            self._waiting.append((entry, b"\xff" * len(data) if data in self._markers else data))

    def take(self, text: str) -> list[dict[str, Any]]:
        """The entries of the tokens of `text`, the next part. Entries before it, such as marks, are dropped."""
        data = text.encode(errors="replace")
        begin = b"".join(left for _, left in self._waiting).find(data)
        if begin < 0:       # the text is not what the tokens say, as for bytes that are no character
            found, self._waiting = [entry for entry, _ in self._waiting], []
            return found
        end, at, taken, found = begin + len(data), 0, 0, []
        while at < end:
            entry, left = self._waiting[taken]
            at, taken = at + len(left), taken + 1
            if at > begin:
                found.append(entry)
        self._waiting = self._waiting[taken:]
        if at > end:        # the last token is in the next part, too
            self._waiting.insert(0, (entry, left[end - at:]))
        return found


class CompletionLogprobs:
    """Makes the field `logprobs` of a completion's choice, whose text begins at `offset`."""

    def __init__(self, top: int, offset: int = 0):
        self._top, self._offset = top, offset

    def of(self, ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[list[tuple[int, float]]],
           tokens: dict[int, bytes], text: str | None = None) -> dict[str, Any]:
        """The field for the next tokens. A logprob is None for the first token of a prompt, which has no context.

        `text`: the text of all tokens, which may lack some: those that a tokenizer puts before a prompt.
        """
        texts: list[str] = []
        offsets: list[int] = []
        best: list[dict[str, float] | None] = []
        for i, logprob, pairs in zip(ids, logprobs, tops):
            data = tokens[i]
            texts.append(token_text(data))
            offsets.append(self._offset)
            plain = data.decode(errors="ignore")
            if text is None or text.startswith(plain, self._offset):
                self._offset += len(plain)
            if logprob is None:
                best.append(None)
                continue
            entry = {token_text(tokens[other]): finite(value) for other, value in pairs[:self._top]}
            entry.setdefault(texts[-1], finite(logprob))    # OpenAI always includes the token itself
            best.append(entry)
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else finite(value) for value in logprobs],
            "top_logprobs": best if self._top else None,
            "text_offset": offsets,
        }

    def json(self, elements: GeneratedElements, known: TokenTexts) -> str:
        """As json.dumps would write `of` for new tokens. KeyError, before anything has changed, if some are unknown."""
        completion, count = known.completion, self._top
        offset, texts, numbers, offsets, best = self._offset, [], [], [], []
        for i, logprob, pairs in zip(elements.ids_from_generate, elements.token_logprobs_list,
                                     elements.log_probs_list):
            text, length = completion[i]
            own = number(logprob)
            texts.append(text)
            numbers.append(own)
            offsets.append(str(offset))
            offset += length
            if count:
                entry = {completion[other][0]: number(value) for other, value in pairs[:count]}
                entry.setdefault(text, own)
                best.append("{" + ", ".join([f"{key}: {value}" for key, value in entry.items()]) + "}")
        self._offset = offset
        top = f'[{", ".join(best)}]' if count else "null"
        return (f'{{"tokens": [{", ".join(texts)}], '
                f'"token_logprobs": [{", ".join(numbers)}], '
                f'"top_logprobs": {top}, "text_offset": [{", ".join(offsets)}]}}')


_AT_ONCE = 64    # tokens of a piece


def logprobs_in_pieces(before: list[dict[str, Any]], maker: CompletionLogprobs, elements: GeneratedElements,
                       tokens: dict[int, bytes]) -> Iterator[str]:
    """The field for the tokens of `elements`, after the tokens of `before`, as JSON in pieces."""
    parts = list(before)
    ids, logprobs, tops = elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list
    for at in range(0, max(len(ids), 1), _AT_ONCE):
        end = at + _AT_ONCE
        parts.append(maker.of(ids[at:end], logprobs[at:end], tops[at:end], tokens))
        yield ""    # others' turn
    comma = "{"
    for key in parts[0]:
        yield f'{comma}"{key}": '
        comma = ", "
        values = [part[key] for part in parts]
        if values[0] is None:
            yield "null"
        else:
            yield from json_list(itertools.chain.from_iterable(values), _AT_ONCE)
    yield "}"
