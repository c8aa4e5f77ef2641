"""The workload of `allspark bench serving`: sessions of requests, their lengths, their arrivals. The same seed gives
the same workload for every target.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LengthSampler = Callable[[np.random.Generator], int]
#: words of text prompts: about one token each in most vocabularies
WORDS = ("time year people way day man thing woman life child world school state family student group country "
         "problem hand part place case week company system program question work government number night point home "
         "water room mother area money story fact month lot right study book eye job word business issue side kind "
         "head house").split()


def distribution(text: str) -> LengthSampler:
    """Returns a function that samples lengths of at least 1 from a distribution: "128", "uniform:64:256",
    "normal:MEAN:SD", "lognormal:MEDIAN:SIGMA", "exp:MEAN" or "choice:16:16:512". Raises ValueError.
    """
    kind, *parameters = text.split(":")
    try:
        if not parameters:
            kind, parameters = "choice", [kind]
        values = [float(p) for p in parameters]
        samplers: dict[str, Callable[[np.random.Generator], float]] = {
            "uniform": lambda rng: float(rng.integers(int(values[0]), int(values[1]) + 1)),
            "normal": lambda rng: rng.normal(values[0], values[1]),
            "lognormal": lambda rng: rng.lognormal(np.log(values[0]), values[1]),
            "exp": lambda rng: rng.exponential(values[0]),
            "choice": lambda rng: values[rng.integers(len(values))],
        }
        sampler = samplers[kind]
        if not all(value >= 0 for value in values):
            raise ValueError("a length is negative")
        sampler(np.random.default_rng(0))
    except (ValueError, KeyError, IndexError, FloatingPointError) as error:
        raise ValueError(f"{text!r} is no distribution of lengths ({error}): a number, uniform:LOW:HIGH, "
                         "normal:MEAN:SD, lognormal:MEDIAN:SIGMA, exp:MEAN or choice:A:B:…") from None
    return lambda rng: max(1, round(float(sampler(rng))))


@dataclass(frozen=True)
class Turn:
    """One request: new prompt tokens, as ids or as words of text, and the number of output tokens."""

    ids: list[int]
    output: int
    schema: dict | None = None      # JSON schema that the answer must match

    @property
    def text(self) -> str:
        """The prompt as words."""
        return " ".join(WORDS[i % len(WORDS)] for i in self.ids)


@dataclass(frozen=True)
class Session:
    """The turns of one user, one after the other. `arrival`: seconds after the start of the run (open loop)."""

    turns: list[Turn]
    arrival: float = 0.0


@dataclass
class Shape:
    """The shape of sessions. `prefixes`: the number of shared prefixes, of `prefix` tokens each. `guided`: the
    fraction of requests whose answers must match `schema`.
    """

    prompt: LengthSampler
    output: LengthSampler
    turns: LengthSampler
    prefix: int = 0
    prefixes: int = 1
    schema: dict | None = None
    guided: float = 1.0
    trace: list[tuple[float, int, int]] = field(default_factory=list)      # (arrival, prompt, output)


def sessions(shape: Shape, seed: list[int], vocab_size: int) -> Iterator[Session]:
    """Yields sessions without end, or those of a trace. Prefixes depend only on the first number of the seed, so
    warm-up and rounds share them, as users share a system prompt.
    """
    rng, common = np.random.default_rng(seed), np.random.default_rng(seed[0])
    low = min(10, vocab_size - 1)       # the first ids are often special tokens
    prefixes = [common.integers(low, vocab_size, shape.prefix).tolist() for _ in range(shape.prefixes)]

    def turn(first: bool, prompt: int, output: int) -> Turn:
        ids = rng.integers(low, vocab_size, prompt).tolist()
        if first and shape.prefix:
            ids = prefixes[rng.integers(len(prefixes))] + ids
        guided = shape.schema is not None and rng.random() < shape.guided
        return Turn(ids, output, shape.schema if guided else None)

    if shape.trace:
        for arrival, prompt, output in shape.trace:
            yield Session([turn(True, prompt, output)], arrival)
        return
    while True:
        yield Session([turn(i == 0, shape.prompt(rng), shape.output(rng)) for i in range(shape.turns(rng))])


@dataclass(frozen=True)
class Arrivals:
    """How sessions arrive at an average rate: "poisson", "constant", "burst:N" (N at once), or "gamma:SHAPE" (burstier
    than Poisson below 1, more regular above).
    """

    kind: str
    parameter: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Parses such a text. Raises ValueError."""
        kind, _, parameter = text.partition(":")
        try:
            arrivals = cls(kind, float(parameter or 1))
            plain = kind in ("poisson", "constant")
            if (kind not in ("poisson", "constant", "burst", "gamma") or (parameter and plain)
                    or arrivals.parameter <= 0 or (kind == "burst" and arrivals.parameter % 1)):
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} must be poisson, constant, burst:N or gamma:SHAPE") from None
        return arrivals

    def times(self, rate: float, seed: list[int]) -> Iterator[float]:
        """Yields arrival times in seconds after the start, `rate` per second on average."""
        rng, now, count = random.Random(repr(seed)), 0.0, 0
        while True:
            yield now
            count += 1
            if self.kind == "burst":
                if count % int(self.parameter) == 0:
                    now += self.parameter / rate
            elif self.kind == "constant":
                now += 1 / rate
            else:
                now += rng.gammavariate(self.parameter, 1 / (rate * self.parameter))


def read_trace(path: Path, most: int) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, output tokens) of a trace: JSON lines with `timestamp` (ms) or `arrival` (s), and
    `input_length` or `prompt`, `output_length` or `output`. ValueError names the line with an error.
    """
    trace = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry: dict[str, Any] = json.loads(line)
                arrival = entry["arrival"] if "arrival" in entry else entry["timestamp"] / 1000
                prompt = int(entry["input_length"] if "input_length" in entry else entry["prompt"])
                output = int(entry["output_length"] if "output_length" in entry else entry["output"])
                if arrival < 0 or prompt < 1 or output < 1:
                    raise ValueError("arrival and lengths must be positive")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}; a line is such as "
                                 '{"timestamp": 27482, "input_length": 6955, "output_length": 52}') from None
            trace.append((float(arrival), prompt, output))
            if len(trace) == most:
                break
    if not trace:
        raise ValueError(f"{path} has no requests")
    first = min(arrival for arrival, _, _ in trace)
    return sorted((arrival - first, prompt, output) for arrival, prompt, output in trace)
