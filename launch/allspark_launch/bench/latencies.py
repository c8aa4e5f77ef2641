"""Figures of requests: percentiles, throughput, goodput; as a table, as JSON and as a plot."""
from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .load import Point
from .targets import Answer

PERCENTILES = (50, 90, 99)
#: the latencies of a request, in ms
METRICS = {"ttft": "time to first token", "itl": "between tokens", "tpot": "per token after the first",
           "e2e": "end to end"}
SCHEMA = 1


@dataclass(frozen=True)
class Target:
    """The highest value of each metric that a request may have, in ms. For `itl` its own 99th percentile counts."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parses "ttft=200,itl=50". Raises ValueError."""
        limits = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                if name not in METRICS or float(value) <= 0:
                    raise ValueError
                limits[name] = float(value)
            except ValueError:
                raise ValueError(f"{part!r} must be NAME=MILLISECONDS, NAME one of {', '.join(METRICS)}") from None
        return cls(limits)

    def met_by(self, answer: Answer) -> bool:
        """Whether a request's latencies are within the limits."""
        if answer.error:
            return False
        latencies = {name: measured(answer, name) for name in self.limits}
        return all(not values or np.percentile(values, 99) <= self.limits[name] for name, values in latencies.items())


def measured(answer: Answer, metric: str) -> list[float]:
    """One request's values of a metric, in ms. Latencies count from when the request was due, not when it was sent."""
    events = answer.events
    if not events:
        return []
    first, last = events[0][0], events[-1][0]
    if metric == "ttft":
        return [1e3 * (first - answer.due)]
    if metric == "e2e":
        return [1e3 * (answer.ended - answer.due)]
    if metric == "tpot":
        more = answer.output_tokens - events[0][1]
        return [1e3 * (last - first) / more] if more > 0 else []
    return [1e3 * (after[0] - before[0]) for before, after in itertools.pairwise(events)]


@dataclass
class Figures:
    """The figures of one target at one load. `rounds` has one entry per round."""

    target: str
    point: Point
    rounds: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def add(self, answers: Sequence[Answer], seconds: float, slo: Target) -> None:
        """Adds the answers of a round."""
        good = [answer for answer in answers if not answer.error]
        for answer in answers:
            if answer.error:
                self.errors[answer.error] = self.errors.get(answer.error, 0) + 1
        seconds = max(seconds, 1e-9)
        figures: dict[str, Any] = {
            "requests": len(good), "failed": len(answers) - len(good), "seconds": seconds,
            "requests_per_second": len(good) / seconds,
            "output_tokens": sum(a.output_tokens for a in good), "prompt_tokens": sum(a.prompt_tokens for a in good),
            "cached_tokens": sum(a.cached_tokens for a in good),
            "late_ms": max((1e3 * (a.sent - a.due) for a in answers), default=0.0),
        }
        figures["output_tokens_per_second"] = figures["output_tokens"] / seconds
        figures["goodput"] = sum(slo.met_by(a) for a in good) / seconds if slo.limits else None
        for metric in METRICS:
            values = [value for answer in good for value in measured(answer, metric)]
            figures[metric] = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if values else {}
            if values:
                figures[metric] |= {"mean": float(np.mean(values)), "max": float(max(values))}
        self.rounds.append(figures)

    def median(self, *path: str) -> float | None:
        """The median of the rounds; None if no round has the figure."""
        values = []
        for figures in self.rounds:
            value: Any = figures
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                values.append(value)
        return statistics.median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = ("requests_per_second", "output_tokens_per_second", "goodput")
        summary: dict[str, Any] = {name: self.median(name) for name in rates}
        summary |= {metric: {p: self.median(metric, p) for p in (*(f"p{q}" for q in PERCENTILES), "mean", "max")}
                    for metric in METRICS}
        return {"target": self.target, "clients": self.point.clients or None, "rate": self.point.rate or None,
                "median": summary, "rounds": self.rounds, "errors": self.errors}


def table(results: list[Figures], slo: Target) -> str:
    """A line for each target and load: the median of its rounds."""
    width = max([len(f.target) for f in results] + [len("target")])
    goodput = f"{'goodput/s':>11}" if slo.limits else ""
    heads = "".join(f"{name + ' ms':>24}" for name in ("ttft", "itl", "e2e"))
    lines = [f"{'target':<{width}} {'load':>12}{'requests':>10}{'failed':>8}{'tokens/s':>10}{'req/s':>8}{goodput}"
             + heads,
             f"{'':<{width}} {'':>12}{'':>10}{'':>8}{'':>10}{'':>8}{'' if not goodput else ' ' * 11}"
             + f"{'p50':>8}{'p90':>8}{'p99':>8}" * 3]
    for figures in results:
        line = (f"{figures.target:<{width}} {figures.point!s:>12}"
                f"{sum(r['requests'] for r in figures.rounds):>10}{sum(r['failed'] for r in figures.rounds):>8}"
                f"{figures.median('output_tokens_per_second') or 0:>10.1f}"
                f"{figures.median('requests_per_second') or 0:>8.2f}")
        if slo.limits:
            line += f"{figures.median('goodput') or 0:>11.2f}"
        for metric in ("ttft", "itl", "e2e"):
            for p in PERCENTILES:
                value = figures.median(metric, f"p{p}")
                line += f"{'-':>8}" if value is None else f"{value:>8.1f}" if value < 1e4 else f"{value:>8.0f}"
        lines.append(line)
    for figures in results:
        for error, count in figures.errors.items():
            lines.append(f"{figures.target}, {figures.point}: {count} x {error}")
        cached, prompt = (sum(r[name] for r in figures.rounds) for name in ("cached_tokens", "prompt_tokens"))
        if cached:
            lines.append(f"{figures.target}, {figures.point}: {cached} of {prompt} prompt tokens came from the prefix "
                         "cache")
        late = max((r["late_ms"] for r in figures.rounds), default=0.0)
        if late > 50:
            lines.append(f"{figures.target}, {figures.point}: requests were sent up to {late:.0f} ms late: this "
                         "process cannot keep up with the load")
    return "\n".join(lines)


def plot(results: list[Figures], path: Path) -> bool:
    """Plots latencies and throughput over the load, a line per target. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    panels = [("ttft", "time to first token, ms"), ("itl", "between tokens, ms"), ("e2e", "end to end, ms"),
              ("output_tokens_per_second", "output tokens/s")]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    names = list(dict.fromkeys(f.target for f in results))
    for axis, (metric, title) in zip(axes.flat, panels):
        for number, name in enumerate(names):
            points = sorted((f for f in results if f.target == name), key=lambda f: f.point.load)
            for percentile, style in ((("p50", "-"), ("p99", "--")) if metric in METRICS else (("", "-"),)):
                path_of = (metric, percentile) if percentile else (metric,)
                values = [(f.point.load, value) for f in points if (value := f.median(*path_of)) is not None]
                axis.plot([x for x, _ in values], [y for _, y in values], style, marker="o", color=f"C{number}",
                          label=f"{name} {percentile}".strip())
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.set_xlabel("clients" if results and results[0].point.clients else "sessions a second")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
