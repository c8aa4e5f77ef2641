"""Streaming detokenization: a tokenizer's decoder (tokenizer.json) as a chain of steps that work on a stream.

The text of a stream is the same as that of all its ids decoded at once.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tokenizers

from .stop_strings import StopMatcher, StopStrings

_BYTE_RUN_LIMIT = 64  # longest run of byte-fallback bytes that is held back; longer runs emit their complete characters


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turns errors of the package `tokenizers` into ValueErrors that begin with `what`."""
    try:
        yield
    except BaseException as error:
        raise named(error, what) from error


def named(error: BaseException, what: str) -> BaseException:
    """An error of the package `tokenizers` as a ValueError that begins with `what`; other errors as they are.

    `tokenizers` raises bare Exceptions. A checkpoint's file can make its Rust code panic, which is not an Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return ValueError(f"{what}: {error}")


def through(steps: Sequence[Step], tokens: list[str]) -> list[str]:
    """The output of `steps`, applied in order to tokens."""
    for step in steps:
        tokens = [text for token in tokens for text in step.feed(token)]
    return tokens


def chain(decoder: dict | None) -> list[Step] | None:
    """The steps of a tokenizer.json's decoder; None if one of them is unknown."""
    if decoder is None:
        return [_Spaced()]
    listed = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    steps: list[Step] = []
    fused = False
    for entry in listed:
        kind = entry.get("type")
        if kind == "ByteLevel" and not fused:
            steps.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback" and not fused:
            steps.append(_ByteFallback())
        elif kind == "Fuse":
            fused = True
        elif (
            kind == "Replace"
            and "String" in entry.get("pattern", {})
            and (not fused or len(entry["pattern"]["String"]) == 1)
        ):
            steps.append(_Replace(entry["pattern"]["String"], entry["content"]))
        elif kind == "Metaspace" and not fused:
            steps.append(_Metaspace(entry["replacement"], _prepends(entry)))
        elif kind == "Strip" and fused and entry["stop"] == 0:
            steps.append(_StripStart(entry["content"], entry["start"]))
        elif kind == "Strip" and not fused:
            steps.append(_Strip(entry["content"], entry["start"], entry["stop"]))
        else:
            return None
    return steps


def token_bytes(decoder: dict | None, token: str) -> bytes:
    """The bytes of one token in the middle of a text, which may be a part of a character."""
    listed = decoder.get("decoders", []) if decoder is not None and decoder.get("type") == "Sequence" else [decoder]
    for entry in filter(None, listed):
        kind = entry.get("type")
        if kind == "ByteLevel":
            try:
                return bytes([BYTE_CHARACTERS[c] for c in token])
            except KeyError:  # an added token, spelled in plain text
                return token.encode()
        if kind == "ByteFallback" and (byte := _ByteFallback._byte(token)) is not None:
            return bytes([byte])
        if kind == "Replace" and "String" in entry.get("pattern", {}):
            token = token.replace(entry["pattern"]["String"], entry["content"])
        elif kind == "Metaspace":
            token = token.replace(entry["replacement"], " ")
    return token.encode()


def _prepends(entry: dict) -> bool:
    if "prepend_scheme" in entry:
        return entry["prepend_scheme"] != "never"
    return entry.get("add_prefix_space", True)


def is_mark(content: str) -> bool:
    """Whether an added token of this text counts as a special token even if it is not declared as one."""
    return content.startswith("<") and content.endswith(">")


class Step(abc.ABC):
    """One step of a decoder: text in, text out, in the same order."""

    @abc.abstractmethod
    def feed(self, token: str) -> list[str]:
        """Takes the next token; returns the texts that are certain now."""

    def finish(self) -> list[str]:
        """Returns what was held back, and resets the step."""
        return []


class _First(Step):
    """A step that treats the first token differently."""

    def __init__(self) -> None:
        self.first = True

    def finish(self) -> list[str]:
        self.first = True
        return []


class _Spaced(_First):
    """Without a decoder: tokens with spaces between them."""

    def feed(self, token: str) -> list[str]:
        text = token if self.first else " " + token
        self.first = False
        return [text]


class _Metaspace(_First):
    def __init__(self, replacement: str, prepended: bool):
        super().__init__()
        self.replacement = replacement
        self.prepended = prepended

    def feed(self, token: str) -> list[str]:
        text = token.replace(self.replacement, "" if self.first and self.prepended else " ")
        self.first = False
        return [text]


class _Replace(Step):
    def __init__(self, pattern: str, content: str):
        self.pattern = pattern
        self.content = content

    def feed(self, token: str) -> list[str]:
        return [token.replace(self.pattern, self.content)]


class _Strip(Step):
    """Removes `content` up to `start` times from the start of every token, and up to `stop` times from its end."""

    def __init__(self, content: str, start: int, stop: int):
        self.content = content
        self.start = start
        self.stop = stop

    def feed(self, token: str) -> list[str]:
        begin, end = 0, len(token)
        while begin < min(self.start, end) and token[begin] == self.content:
            begin += 1
        while end > begin and len(token) - end < self.stop and token[end - 1] == self.content:
            end -= 1
        return [token[begin:end]]


class _StripStart(Step):
    """Removes `content` up to `start` times from the beginning of the whole text."""

    def __init__(self, content: str, start: int):
        self.content = content
        self.start = start
        self.left = start

    def feed(self, token: str) -> list[str]:
        at = 0
        while self.left and at < len(token):
            if token[at] != self.content:
                self.left = 0
                break
            at += 1
            self.left -= 1
        return [token[at:]]

    def finish(self) -> list[str]:
        self.left = self.start
        return []


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies use for bytes: printable Latin-1 as it is, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {**{chr(byte): byte for byte in plain}, **{chr(0x100 + i): byte for i, byte in enumerate(other)}}


BYTE_CHARACTERS = _byte_characters()


class _ByteLevel(Step):
    """Tokens stand for bytes. Characters come out once they are complete, invalid bytes as U+FFFD."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: str) -> list[str]:
        return [self.decoder.decode(self.bytes_of(token))]

    @staticmethod
    def bytes_of(token: str) -> bytes:
        """The bytes that a token stands for."""
        try:
            return bytes([BYTE_CHARACTERS[c] for c in token])
        except KeyError:  # an added token, spelled in plain text
            return token.encode()

    def finish(self) -> list[str]:
        text = self.decoder.decode(b"", final=True)
        self.decoder.reset()
        return [text]


class _ByteFallback(Step):
    """Tokens <0x00>…<0xFF> stand for bytes. A run of them is text if it is valid UTF-8 as a whole; otherwise each byte
    becomes U+FFFD.

    So a run is held back until it ends. A long run, as in a script that the vocabulary lacks, emits its complete
    characters every 64 bytes.
    """

    def __init__(self) -> None:
        self.run = bytearray()

    def feed(self, token: str) -> list[str]:
        byte = self._byte(token)
        if byte is None:
            return [*self.finish(), token]
        self.run.append(byte)
        if len(self.run) < _BYTE_RUN_LIMIT:
            return []
        whole = len(self.run) - self._incomplete()
        return self._decode(whole)

    def finish(self) -> list[str]:
        return self._decode(len(self.run)) if self.run else []

    def _decode(self, count: int) -> list[str]:
        data = bytes(self.run[:count])
        del self.run[:count]
        try:
            return [data.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(data)

    def _incomplete(self) -> int:
        """How many bytes at the run's end may be the beginning of a character."""
        for back in range(1, 4):
            byte = self.run[-back]
            if byte >= 0xC0:
                length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                return back if back < length else 0
            if byte < 0x80:
                break
        return 0

    @staticmethod
    def _byte(token: str) -> int | None:
        if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None


class Window:
    """For decoders without a streaming form: decodes the last few ids again with every new id.

    This is exact if a token's text depends on few tokens before it and on none after it. Ids to be skipped must not
    be fed.
    """

    KEEP = 8  # ids kept as context
    LIMIT = 64  # ids in the window at which text is emitted even if it ends in U+FFFD

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.ids: list[int] = []
        self.emitted = ""  # text of the window that was returned

    def feed(self, token_id: int) -> str:
        """Takes the next id; returns the text that is certain now."""
        self.ids.append(token_id)
        text = self._decode(self.ids)
        if text.endswith("\ufffd") and len(self.ids) < self.LIMIT:
            return ""
        piece = text[len(self.emitted) :]
        self.emitted = text
        if len(self.ids) >= 2 * self.KEEP:
            self.ids = self.ids[-self.KEEP :]
            self.emitted = self._decode(self.ids)
        return piece

    def finish(self) -> str:
        """Returns the text that was held back, and resets the window."""
        text = self._decode(self.ids)
        piece = text[len(self.emitted) :]
        self.ids, self.emitted = [], ""
        return piece

    def _decode(self, ids: list[int]) -> str:
        with named_errors("the tokenizer's decoder failed"):
            return self.backend.decode(ids, skip_special_tokens=False)


class ByteTokens(dict[int, "tuple[str, bytes, str | None] | None"]):
    """The tokens of a tokenizer whose decoder is ByteLevel alone, by id, each looked up once: the token, its bytes, and
    their text if they are whole characters. None for ids without a token.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self._backend = backend

    def __missing__(self, i: int) -> tuple[str, bytes, str | None] | None:
        token = self._backend.id_to_token(int(i)) if i >= 0 else None
        if token is None:
            return None
        data = _ByteLevel.bytes_of(token)
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode()
        entry = self[i] = token, data, text
        return entry


class StreamDetokenizer:
    """The text of a sequence of ids, returned as soon as later ids cannot change it.

    The returned texts, joined, are Tokenizer.decode of all ids. A text never ends within a character and is never taken
    back. Each id takes constant time. Not thread-safe: use one for each sequence.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None, special_texts: frozenset[str],
        known: ByteTokens, keep: Iterable[str] = (), skip_special_tokens: bool = True,
    ):
        """`decoder`: of tokenizer.json. `known`: what all detokenizers of `backend` share. `keep`: special tokens that
        are not skipped.
        """
        self._backend = backend
        self._special = special_texts.difference(keep) if skip_special_tokens else frozenset()
        steps = chain(decoder)
        self._chain = steps or []
        self._window = Window(backend) if steps is None else None
        self._known = known
        #: if the chain is ByteLevel alone: what is left of a character
        self._bytes = None
        if len(self._chain) == 1 and isinstance(self._chain[0], _ByteLevel):
            self._bytes = self._chain[0].decoder

    def push(self, ids: Iterable[int]) -> str:
        """Takes further ids; returns the text that they complete."""
        out: list[str] = []
        if self._bytes is not None:
            for i in ids:
                entry = self._known[i]
                if entry is not None and entry[0] not in self._special:
                    _, data, text = entry
                    out.append(self._bytes.decode(data) if text is None or self._bytes.buffer else text)
            return "".join(out)
        for i in ids:
            token = self._backend.id_to_token(int(i)) if i >= 0 else None
            if token is None or token in self._special:
                continue
            if self._window is not None:
                out.append(self._window.feed(int(i)))
            else:
                out.extend(through(self._chain, [token]))
        return "".join(out)

    def finish(self) -> str:
        """Ends the sequence; returns what was held back, half a character as U+FFFD. The object can then be reused."""
        if self._window is not None:
            return self._window.finish()
        out: list[str] = []
        for at, step in enumerate(self._chain):
            out.extend(through(self._chain[at + 1 :], step.finish()))
        return "".join(out)


class OutputText:
    """The text of one sample as its tokens arrive, up to a stop string. The token that completes the stop string is the
    sample's last one.
    """

    def __init__(self, detokenizer: StreamDetokenizer, stops: StopStrings | None, wanted: bool,
                 hidden: frozenset[int] = frozenset()):
        """`wanted`: return the text; otherwise only look for stop strings in it. `hidden`: ids without text."""
        self._detokenizer, self._hidden = detokenizer, hidden
        self._matcher = None if stops is None else StopMatcher(stops)
        self._wanted = wanted

    @property
    def found(self) -> str | None:
        """The stop string that has ended the text, if any."""
        return None if self._matcher is None else self._matcher.found

    def push(self, ids: Iterable[int], last: bool = False) -> str | None:
        """Takes further ids; returns the text that is certain now, None unless it is wanted. `last`: no more follow."""
        text = self._detokenizer.push([i for i in ids if i not in self._hidden] if self._hidden else ids)
        matcher = self._matcher
        if matcher is not None:
            text = matcher.push(text)
        if last and self.found is None:
            rest = self._detokenizer.finish()
            if matcher is not None:
                rest = matcher.push(rest)
                rest += matcher.finish()
            text += rest
        return text if self._wanted else None
