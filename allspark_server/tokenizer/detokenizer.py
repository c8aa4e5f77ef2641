"""A tokenizer's decoder (tokenizer.json) as a chain of stream transformers with the same result as decoding at once."""

from __future__ import annotations

import abc
import codecs
import contextlib
from collections.abc import Iterator, Sequence

import tokenizers

_BYTE_RUN_LIMIT = 64  # bytes of a run of byte-fallback tokens that are held back before complete characters go out


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Errors of `tokenizers` as ValueErrors that begin with `what`. It raises bare Exceptions, and what a checkpoint's
    file makes its Rust code panic about is no Exception at all.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error


def through(steps: Sequence[Step], tokens: list[str]) -> list[str]:
    """What `steps`, one after the other, make of tokens."""
    for step in steps:
        tokens = [text for token in tokens for text in step.feed(token)]
    return tokens


def chain(decoder: dict | None) -> list[Step] | None:
    """The steps of a tokenizer.json's decoder as stream transformers with the same result; None if one is unknown."""
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
    """What one token stands for in the middle of a text, in bytes: what no text of it alone could show."""
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
    """Whether an added token of this text is taken for a special one even if it does not say so."""
    return content.startswith("<") and content.endswith(">")


class Step(abc.ABC):
    """One step of a decoder: text in, text out, in the same order."""

    @abc.abstractmethod
    def feed(self, token: str) -> list[str]:
        """What this step makes of the next token, as far as it is certain."""

    def finish(self) -> list[str]:
        """What was held back; the step is then as new."""
        return []


class _First(Step):
    """A step that treats the first token in its own way."""

    def __init__(self):
        self.first = True

    def finish(self) -> list[str]:
        self.first = True
        return []


class _Spaced(_First):
    """No decoder at all: tokens with spaces between."""

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
    """Cuts up to `start` and `stop` times `content` off the ends of every token."""

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
    """Cuts up to `start` times `content` off the beginning of the whole text."""

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
    """The characters that byte-level vocabularies are spelled in: printable Latin-1, other bytes from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {**{chr(byte): byte for byte in plain}, **{chr(0x100 + i): byte for i, byte in enumerate(other)}}


BYTE_CHARACTERS = _byte_characters()


class _ByteLevel(Step):
    """Tokens spelled in bytes; text comes out as its characters are complete, invalid bytes as U+FFFD."""

    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: str) -> list[str]:
        try:
            data = bytes([BYTE_CHARACTERS[c] for c in token])
        except KeyError:  # an added token, spelled in plain text
            data = token.encode()
        return [self.decoder.decode(data)]

    def finish(self) -> list[str]:
        text = self.decoder.decode(b"", final=True)
        self.decoder.reset()
        return [text]


class _ByteFallback(Step):
    """Tokens <0x00>…<0xFF> stand for bytes. A run of them is text if it is valid UTF-8 as a whole; else each byte
    is U+FFFD.

    So a run waits for its end. A long one (a script that the vocabulary lacks) gives its complete characters every 64
    bytes.
    """

    def __init__(self):
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
        """Bytes at the run's end that may be the beginning of a character."""
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
    """For decoders without a streaming form: decodes the last few ids again with every new one.

    Exact where a token's text depends on few tokens before it and on none behind it. Ids to be skipped must not
    come here.
    """

    KEEP = 8  # ids that stay as context
    LIMIT = 64  # ids after which text goes out even if it ends in U+FFFD

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.ids: list[int] = []
        self.given = ""  # text of the window that went out

    def feed(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self._decode(self.ids)
        if text.endswith("\ufffd") and len(self.ids) < self.LIMIT:
            return ""
        piece = text[len(self.given) :]
        self.given = text
        if len(self.ids) >= 2 * self.KEEP:
            self.ids = self.ids[-self.KEEP :]
            self.given = self._decode(self.ids)
        return piece

    def finish(self) -> str:
        text = self._decode(self.ids)
        piece = text[len(self.given) :]
        self.ids, self.given = [], ""
        return piece

    def _decode(self, ids: list[int]) -> str:
        with named_errors("the tokenizer's decoder failed"):
            return self.backend.decode(ids, skip_special_tokens=False)
