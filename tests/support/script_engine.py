"""An engine whose model repeats the last message of the prompt, for tests of how the HTTP server presents answers."""

from __future__ import annotations

import codecs

from support.fake_engine import FakeEngine
from support.fake_group import FakeGroup

BEGIN, END, EOS = 1, 2, 999


def next_byte(history: list[int]) -> int:
    """The next byte of the text between the last marks; at its end, the end of sequence."""
    end = len(history) - 1 - history[::-1].index(END)
    begin = end - 1 - history[:end][::-1].index(BEGIN)
    script, at = history[begin + 1:end], len(history) - 1 - end
    return script[at] if at < len(script) else EOS


class _Detokenizer:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Tokenizer:
    """One id per byte."""

    sources: dict[str, str] = {}
    marks: dict[str, int] = {}

    def __init__(self, sees_images: bool = False):
        self._sees_images = sees_images

    @property
    def templates(self):
        return self

    def longest_text(self, tokens: int) -> None:
        return None

    def source(self, tools: bool) -> str:
        return "{% for part in message.content %}" if self._sees_images else ""

    def render(self, messages, tools, **kwargs) -> str:
        script = messages[-1]["content"]
        if isinstance(script, list):
            script = "".join(part.get("text", "<image>") for part in script)
        return f"{messages[:-1]}{tools}{kwargs}{chr(BEGIN)}{script}{chr(END)}{kwargs.get('opened', '')}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, ids) -> list[bytes]:
        return [bytes([i]) if i < 256 else b"" for i in ids]

    def detokenizer(self, keep=(), skip_special_tokens=True) -> _Detokenizer:
        return _Detokenizer()


class ScriptEngine(FakeEngine):
    """An engine with a model "m" of a chat format. A step takes `interval` seconds."""

    def __init__(self, chat_format: str, interval: float = 0.0, sees_images: bool = False):
        self._chat_format = chat_format
        super().__init__(group=FakeGroup(delay=interval, token=next_byte), sees_images=sees_images)

    def _publish(self, config, model) -> None:
        super()._publish(config, model)
        model.input.tokenizer, model.info.chat_format = _Tokenizer(self.sees_images), self._chat_format
