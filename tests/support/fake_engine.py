"""An engine over a group without a model, for tests of service and client.

Its output depends on token ids alone. Tests can make it slow, ignore cancellations or refuse requests.
"""

from __future__ import annotations

import os
import time

from allspark_client import AllSparkError, AsFileInfo, AsModelConfig
from allspark_server.engine.engine import Engine
from support.fake_group import FakeGroup, next_token


def token_after(history: list[int]) -> int:
    """The token after a history; never the end of sequence.

    A prompt that begins with 999 fails after three tokens. One that begins with 998 ends the process after as many
    tokens as its second id says.
    """
    if history[0] == 998 and len(history) >= 2 + history[1]:
        os._exit(9)
    if history[0] == 999 and len(history) == 4:
        return -1
    return next_token(history, 900)


def expected(prompt: list[int], count: int, sample: int = 0) -> list[int]:
    """The tokens that the engine generates for a prompt."""
    history = list(prompt)
    for _ in range(count):
        history.append((token_after(history) + 7 * sample) % 1000)
    return history[len(prompt):]


class _Tokenizer:
    """One id per byte. A token's text is "<id>" and the engine's padding."""

    def __init__(self, engine: FakeEngine):
        self._engine = engine

    @property
    def templates(self):
        return self

    def longest_text(self, tokens: int) -> None:
        return None

    def source(self, tools: bool) -> str:
        return "{% for part in message.content %}" if self._engine.sees_images else ""

    def render(self, messages, tools) -> str:
        return str(messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte + self._engine.text_offset for byte in text.encode()]

    def detokenizer(self, keep=(), skip_special_tokens=True) -> _Tokenizer:
        return self

    def push(self, ids: list[int]) -> str:
        return "".join(f"<{i}>{self._engine.padding}" for i in ids)

    def finish(self) -> str:
        return ""


class _Images:
    """Takes images whose rows nothing needs: prompts stay as they are."""

    together = False

    def read(self, ids: list[int], images: list, most_tokens: int, scope: str, encode) -> tuple[list[int], None]:
        return ids, None

    def close(self) -> None:
        pass


class FakeEngine(Engine):
    """An engine whose model "m" is started. A step takes `interval` seconds; the samples of a request differ."""

    def __init__(self, interval: float = 0.005, fingerprint: str = "fp", padding: str = "",
                 group: FakeGroup | None = None, sees_images: bool = False, image_fingerprint: str = ""):
        super().__init__(group=group or FakeGroup(delay=interval, token=token_after, samples_differ=True))
        self._fingerprint, self.padding, self.sees_images = fingerprint, padding, sees_images
        self._image_fingerprint = image_fingerprint
        self.text_offset = 0  # added to every id, so that a restarted engine tokenizes a text differently
        self.submitted: list = []  # specs
        self.submit_seconds = 0.0
        self.refusal: AllSparkError | None = None  # raised by submit() for every request
        self.deaf = False  # ignores cancellations
        self.serve("m")

    def serve(self, name: str) -> None:
        """Installs and starts a model unless that was done before."""
        if name not in self._models:
            self.install_model(AsModelConfig(name, "/none"))
        self.start_model(name)

    @property
    def interval(self) -> float:
        return self._group.delay

    @interval.setter
    def interval(self, seconds: float) -> None:
        self._group.delay = seconds

    @property
    def steps(self) -> int:
        return self._group.steps

    @property
    def live(self) -> list:
        """Requests that are running or waiting."""
        return [request for model in list(self._models.values()) for request in list(model.live)]

    @property
    def handles(self) -> list[int]:
        """Handles of all requests that the engine still knows."""
        return list(self._requests)

    def submit(self, spec, sink, dependency=None):
        time.sleep(self.submit_seconds)
        if self.refusal is not None:
            raise self.refusal
        if spec.input_ids is not None and spec.input_ids[:1] == [666]:
            raise RuntimeError("a defect")
        handle = super().submit(spec, sink, dependency)
        self.submitted.append(spec)
        return handle

    def cancel(self, handle) -> None:
        if not self.deaf:
            super().cancel(handle)

    def get_file_information(self, graph, params) -> AsFileInfo:
        return AsFileInfo(str(graph), str(params), "0")

    def close(self) -> None:
        self._group.hurry()
        super().close()

    def _publish(self, config, model) -> None:
        model.fingerprint, model.input.tokenizer = self._fingerprint, _Tokenizer(self)
        model.info.sees_images, model.image_fingerprint = self.sees_images, self._image_fingerprint
        model.input.images = _Images() if self.sees_images else None
        super()._publish(config, model)


