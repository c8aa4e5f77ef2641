"""Decodes files of images in processes that have limits of time and memory (decode_program.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..limited_process import LimitedProcess, ProcessPool

# It is not imported: it changes settings of Pillow.
PROGRAM = str(Path(__file__).with_name("decode_program.py"))
SECONDS, MEMORY_BYTES = 2.0, 500 << 20  # limits of one image: CPU time to decode and resize it, and memory


class Decoder:
    """Decodes and resizes images in a few processes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._pool = ProcessPool(PROGRAM, SECONDS, MEMORY_BYTES, "images are being decoded")

    def decode(self, content: bytes, size: Callable[[int, int], tuple[int, int]], resample: int) -> np.ndarray:
        """An image in the size that it is wanted in, uint8 [height, width, 3] (RGB), upright.

        `content`: a PNG, JPEG, WebP or GIF file, of which the first frame counts. `size`: the (height, width) in pixels
        that an image of a height and a width is resized to. `resample`: the filter by its number in Pillow.

        ValueError if the file is wrong or exceeds a limit, and what `size` raises; its text continues the image's name.
        AllSparkError if all processes are busy for long, or get no processor.
        """
        with self._pool.process() as process:
            (width, height), _ = _ask(process, content)
            try:
                height, width = size(height, width)
            except BaseException:
                _ask(process, b"[]", continues=True)  # the process forgets the image
                raise
            _, pixels = _ask(process, json.dumps([width, height, resample]).encode(), continues=True)
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)

    def start(self) -> None:
        """Starts a process if none runs, so that the first request does not wait for it."""
        self._pool.start()

    def close(self) -> None:
        """Ends the idle processes."""
        self._pool.close()


def _ask(process: LimitedProcess, request: bytes, continues: bool = False) -> tuple[Any, memoryview]:
    """The line of JSON at the beginning of an answer, and what follows it."""
    answer = process.ask([request], continues)
    length = bytes(answer[:2000]).index(b"\n")
    head = json.loads(bytes(answer[:length]))
    if isinstance(head, str):
        raise ValueError(head)
    return head, answer[length + 1:]
