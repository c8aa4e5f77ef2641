"""Results of a run: figures and rooflines of every round, with the best and the median."""
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .measure import Cell, Timing
from .roofline import Bound, Machine, Workload

SCHEMA = 1


@dataclass
class Series:
    """One figure in every round, in tokens/s, and the machine's roofline around it."""

    rounds: list[float] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The highest."""
        return max(self.rounds)

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.rounds)


@dataclass
class Row:
    """One engine with one weight format. status: "measured", "not available yet" or "failed", the latter two with a
    reason. weight_bytes: of the packed weights of all ranks. token_bytes: of one token in the cache.
    """

    engine: str
    format: str
    status: str = "measured"
    reason: str = ""
    weight_bytes: float = 0.0
    token_bytes: float = 0.0
    integer: bool = False               # GEMMs of 8-bit integers
    matches: tuple[str, ...] = ()       # of a peer: our formats that it compares with
    prefill: dict[Cell, Series] = field(default_factory=dict)
    decode: dict[Cell, Series] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.engine} {self.format}".strip()

    def add(self, cell: Cell, timing: Timing, machine: Machine) -> None:
        """Adds a timing. `machine`: the roofline that was measured around it."""
        for series, rate in ((self.prefill, timing.prefill), (self.decode, timing.decode)):
            if rate is not None:
                own = series.setdefault(cell, Series())
                own.rounds.append(rate)
                own.machines.append(machine)


@dataclass
class Run:
    """All results of a run of `allspark bench static`."""

    settings: dict
    machine: dict
    workload: Workload
    cells: list[Cell]
    rooflines: list[Machine] = field(default_factory=list)       # every measurement
    rows: list[Row] = field(default_factory=list)

    def best_machine(self) -> Machine:
        """The highest rates of all measurements."""
        return self._machine(max)

    def median_machine(self) -> Machine:
        """The median rates."""
        return self._machine(statistics.median)

    def _machine(self, choose: Callable[[list[float]], float]) -> Machine:
        fields = ("read", "fp32", "int8", "bf16")
        if not self.rooflines:      # no format could be loaded
            return Machine(0.0, 0.0)
        return Machine(*(choose([getattr(c, field) for c in self.rooflines]) for field in fields))

    def bound(self, kind: str, row: Row, cell: Cell, machine: Machine) -> Bound:
        """The roofline's bound of one figure. kind: "decode" or "prefill"."""
        if kind == "prefill":
            return self.workload.prefill(machine, cell.batch, cell.prompt, row.weight_bytes, row.integer)
        context = cell.prompt + cell.output / 2
        return self.workload.decode(machine, cell.batch, context, row.weight_bytes, row.token_bytes,
                                    row.integer)

    def figure(self, kind: str, row: Row, cell: Cell) -> dict | None:
        """Best and median, and the best and median part of the roofline that was measured around each round. None if
        the figure was not measured.
        """
        series = getattr(row, kind).get(cell)
        if series is None:
            return None
        bounds = [self.bound(kind, row, cell, machine) for machine in series.machines]
        parts = [rate / bound.tokens_per_second for rate, bound in zip(series.rounds, bounds)]
        best = bounds[series.rounds.index(series.best)]
        return {
            "best": series.best,
            "median": series.median,
            "rounds": series.rounds,
            "ceiling": best.tokens_per_second,
            "ceilings": [bound.tokens_per_second for bound in bounds],
            "bound_by": best.by,
            "fraction": max(parts),
            "median_fraction": statistics.median(parts),
        }

    def to_dict(self) -> dict:
        """For JSON: rates in tokens/s, bytes/s and operations/s."""
        results = []
        for row in self.rows:
            entry: dict[str, Any] = {"engine": row.engine, "format": row.format, "status": row.status}
            if row.status != "measured":
                results.append({**entry, "reason": row.reason})
                continue
            entry.update(integer=row.integer, weight_bytes=row.weight_bytes, cache_bytes_per_token=row.token_bytes)
            if row.matches:
                entry["compares_with"] = list(row.matches)
            results += [{**entry, "batch": cell.batch, "prompt": cell.prompt, "output": cell.output,
                         "prefill": self.figure("prefill", row, cell), "decode": self.figure("decode", row, cell)}
                        for cell in self.cells if cell in row.prefill]
        return {"schema": SCHEMA, "benchmark": "static", "machine": self.machine, "settings": self.settings,
                "model": {**vars(self.workload)}, "ceilings": [vars(c) for c in self.rooflines], "results": results}
