"""The cells of the grid, and timing one of them on an engine."""
from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np

from allspark_client import AbstractEngine

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "w8a8", "w4a8")


@dataclass(frozen=True)
class Format:
    """A weight format: AsModelConfig's weight_dtype and weight_group_size (0: per output channel)."""

    dtype: str
    group: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}:{self.group}" if self.group else self.dtype

    @classmethod
    def parse(cls, text: str) -> Format:
        """Parses "int4:64", for example. Raises ValueError."""
        dtype, colon, group = text.partition(":")
        if dtype not in (*FORMATS, "auto") or (colon and not group.isdigit()):
            raise ValueError(f"weight format {text!r} must be auto or one of {', '.join(FORMATS)}, with :GROUP for "
                             "scales of groups, such as int4:64")
        return cls(dtype, int(group or 0))


@dataclass(frozen=True, order=True)
class Cell:
    """`batch` requests at once, with `prompt` random tokens and `output` output tokens each."""

    batch: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}x{self.output}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Parses "8x128x64": batch, prompt, output. Raises ValueError."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        if not match or "0" in match.groups():
            raise ValueError(f"{text!r} must be BATCHxPROMPTxOUTPUT, all at least 1, such as 8x128x64")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True)
class Timing:
    """Tokens/s of a cell. prefill: of all prompts, until the last request has its first token. decode: of all sequences
    together, from then until the first one ends; None if that takes no time.
    """

    prefill: float
    decode: float | None


def time_cell(engine: AbstractEngine, name: str, cell: Cell, vocab_size: int, rng: np.random.Generator) -> Timing:
    """Runs the cell once, greedily, on a started model."""
    config = {"top_k": 1, "max_length": cell.prompt + cell.output, "early_stopping": False}
    prompts = rng.integers(min(10, vocab_size - 1), vocab_size, (cell.batch, cell.prompt))
    begin = time.perf_counter()
    requests = [engine.start_request(name, {"input_ids": prompt}, config)[1:] for prompt in prompts]
    try:
        for _, queue in requests:
            queue.Get()
        first = time.perf_counter()
        before = [queue.GeneratedLength() for _, queue in requests]
        leader = requests[before.index(max(before))][1]
        for _ in leader:
            pass
        end = time.perf_counter()
        decoded = sum(queue.GeneratedLength() for _, queue in requests) - sum(before)
        for _, queue in requests:
            for _ in queue:
                pass
    finally:
        for handle, _ in requests:
            engine.release_request(name, handle)
    decode = decoded / (end - first) if cell.output > 1 and decoded >= cell.batch else None
    return Timing(cell.batch * cell.prompt / (first - begin), decode)
