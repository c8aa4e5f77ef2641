"""Measures the layouts of a pool member, one after the other, under the load that it is optimized for."""
from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from allspark_client import AllSparkError, ClientEngine
from allspark_client.config import AsModelConfig

from ..group.background import BackgroundGroup, background_group
from ..options import GroupOptions
from ..progress import Progress
from . import latencies
from .latencies import Figures, Target as Slo
from .load import Limits, Point, drive
from .targets import Group
from .workload import Arrivals, Shape, distribution, sessions

PROMPT, OUTPUT = 256, 64        # tokens, if the model's context is long enough
TIE = 0.03                      # a smaller relative difference counts as equal


@dataclass(frozen=True)
class Times:
    """Times of a measurement, in seconds. start: until a layout's groups serve. round: in which requests are sent.
    patience: for requests in progress at the end of a round.
    """

    start: float = 1800.0
    round: float = 10.0
    rounds: int = 3
    patience: float = 300.0


@dataclass
class Measured:
    """The figures of a layout, or the reason why it was left out."""

    layout: str
    groups: int
    figures: Figures | None = None
    reason: str = ""

    def score(self, purpose: str) -> float:
        """Higher is better: output tokens/s, or requests per second of one client."""
        assert self.figures is not None
        if purpose == "throughput":
            return self.figures.median("output_tokens_per_second") or 0.0
        return 1e3 / (self.figures.median("e2e", "p50") or math.inf)

    def to_dict(self) -> dict:
        """For JSON."""
        return {"layout": self.layout, "groups": self.groups, "left_out": self.reason,
                "figures": self.figures.to_dict()["median"] if self.figures else None}


def measure(layouts: dict[str, list[GroupOptions]], purpose: str, say: Callable[[str], None],
            times: Times = Times()) -> list[Measured]:
    """Starts, measures and ends the groups of each layout. A layout that does not start (for example for lack of
    memory) or answers no request is left out, with the reason. `say` gets lines of progress.
    """
    point = _point(layouts, purpose)
    measured = []
    for layout, groups in layouts.items():
        name = f"{layout}, {len(groups)} group{'s' * (len(groups) > 1)}"
        say(f"{name}: starting")
        try:
            measured.append(Measured(layout, len(groups), _measure(name, groups, point, say, times)))
        except (RuntimeError, OSError, AllSparkError) as error:
            measured.append(Measured(layout, len(groups), reason=str(error) or type(error).__name__))
            say(f"{name}: left out: {measured[-1].reason}")
    return measured


def table(measured: list[Measured]) -> str:
    """The figures as text."""
    figures = [m.figures for m in measured if m.figures]
    return latencies.table(figures, Slo({})) if figures else ""


def choose(measured: list[Measured], purpose: str) -> tuple[str, str]:
    """The best layout and the reason; of two equal ones the first. Raises RuntimeError if none was measured."""
    usable = [m for m in measured if m.figures]
    if not usable:
        raise RuntimeError("no layout could be measured: " + "; ".join(f"{m.layout}: {m.reason}" for m in measured))
    best = usable[0]
    for other in usable[1:]:
        if other.score(purpose) > best.score(purpose) * (1 + TIE):
            best = other
    left = [m for m in measured if m is not best]
    if not all(m.figures for m in left):
        return best.layout, "; ".join(f"{m.layout} was left out: {m.reason}" for m in left)
    unit = "output tokens/s" if purpose == "throughput" else "ms per request of one client"
    figure = (lambda m: m.score(purpose)) if purpose == "throughput" else (lambda m: 1e3 / m.score(purpose))
    against = ", ".join(f"{figure(m):.1f} of {m.layout}" for m in left)
    even = any(abs(m.score(purpose) / best.score(purpose) - 1) <= TIE for m in left)
    return best.layout, f"{figure(best):.1f} {unit}, against {against}" + (": practically equal" if even else "")


def _point(layouts: dict[str, list[GroupOptions]], purpose: str) -> Point:
    """The same load for all layouts: one client, or as many as the largest number of groups computes at once."""
    if purpose == "latency":
        return Point(clients=1)
    most = max(layouts.values(), key=len)
    model = most[0].models[0]
    batch = model.get("engine_max_batch") if isinstance(model, dict) else None
    return Point(clients=len(most) * (batch or AsModelConfig("m", "").engine_max_batch))


def _measure(name: str, groups: list[GroupOptions], point: Point, say: Callable[[str], None], times: Times) -> Figures:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        addresses = _start(groups, stack, times.start)
        say(f"{name}: serves after {time.monotonic() - began:.0f} s; {times.rounds} rounds of {times.round:g} s with "
            f"{point}")
        with ClientEngine(addresses[0]) as engine:
            model = engine.list_models()[0].name
            longest = engine.get_model_info(model).max_length
        output = max(1, min(OUTPUT, longest // 4))
        shape = Shape(distribution(str(max(1, min(PROMPT, longest // 2)))), distribution(str(output)),
                      distribution("1"))
        figures = asyncio.run(_drive(Group(name, ",".join(addresses), model, 0.0), point, shape, times))
    if not any(r["requests"] for r in figures.rounds):
        raise RuntimeError(f"no request was answered: {next(iter(figures.errors), 'none ended in time')}")
    return figures


def _start(groups: list[GroupOptions], stack: contextlib.ExitStack, limit: float) -> list[str]:
    """Starts groups in parallel, until `stack` is closed; returns their addresses."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    show = _show if sys.stderr.isatty() else None

    def start(number: int) -> tuple[contextlib.AbstractContextManager[BackgroundGroup], BackgroundGroup]:
        path = folder / f"{number}.json"
        path.write_text(json.dumps(groups[number].changed()), encoding="utf-8")
        group = background_group(["--config", str(path)], timeout=limit, on_progress=show)
        return group, group.__enter__()

    with ThreadPoolExecutor(len(groups)) as pool:
        running = [pool.submit(start, number) for number in range(len(groups))]
        addresses, errors = [], []
        for future in running:
            try:
                group, started = future.result()
            except (RuntimeError, OSError) as error:
                errors.append(error)
            else:
                stack.push(group.__exit__)
                addresses += started.addresses
    if errors:
        raise errors[0]
    return addresses


def _show(name: str, part: float) -> None:
    sys.stderr.write("\r\033[K" + (f"loading {name} {100 * part:3.0f} %" if part < 1 else ""))
    sys.stderr.flush()


async def _drive(target: Group, point: Point, shape: Shape, times: Times) -> Figures:
    figures, progress = Figures(target.name, point), Progress(times.rounds)
    patience = Limits(1, 0, 0, times.patience)
    try:
        await target.open()
        for number in range(times.rounds + 1):          # the first warms it up
            progress.show(target.name)
            limits = Limits(sys.maxsize, times.round, 0, times.patience) if number else patience
            seed = [0, number]
            run = await drive(target, point if number else Point(clients=1), Arrivals("poisson"),
                              sessions(shape, seed, target.vocab_size), seed, limits, False, lambda: None)
            if number:
                figures.add(run.answers, run.seconds, Slo({}))
                progress.advance()
    finally:
        progress.close()
        await target.close()
    return figures
