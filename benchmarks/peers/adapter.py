"""What all adapters share: the command line that launch/allspark_launch/bench/peers.py uses, and timing.

An adapter runs under an interpreter of its own, so nothing of this project is imported here.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Cell:
    """`batch` sequences at once, with `prompt` random tokens and `output` new tokens each."""

    batch: int
    prompt: int
    output: int

    @property
    def length(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class PeerFormat:
    """One of the peer's weight formats: its name there, bits stored per weight, and our formats that it compares with.

    `integer`: activations are quantized to 8 bits, and products are of integers.
    """

    name: str
    bits: float
    matches: tuple[str, ...]
    integer: bool = False


@dataclass(frozen=True)
class Job:
    """What to measure: a Hugging Face directory, a folder for converted files, threads, cells, and the number of
    GPUs.
    """

    checkpoint: Path
    work: Path
    threads: int
    cells: tuple[Cell, ...]
    gpus: int = 0

    @property
    def config(self) -> dict:
        return json.loads((self.checkpoint / "config.json").read_text())


class Model(Protocol):
    """A loaded model. `weight_bits`, if present, replaces its PeerFormat's."""

    def time(self, cell: Cell) -> tuple[float, float | None]:
        """(prefill, decode) in tokens/s, as `allspark bench static --help` defines them."""


class Stepper:
    """A Model whose caller decides when a step runs."""

    def prefill(self, batch: int, prompt: int) -> None:
        """Forgets everything, then computes `batch` prompts to the logits after their last tokens."""
        raise AssertionError("to be overridden")

    def step(self) -> None:
        """One more token for every sequence."""
        raise AssertionError("to be overridden")

    def time(self, cell: Cell) -> tuple[float, float | None]:
        begin = time.perf_counter()
        self.prefill(cell.batch, cell.prompt)
        first = time.perf_counter()
        for _ in range(cell.output - 1):
            self.step()
        seconds = time.perf_counter() - first
        decode = cell.batch * (cell.output - 1) / seconds if cell.output > 1 else None
        return cell.batch * cell.prompt / (first - begin), decode


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:     # the version of the package that contains it
        return False


def _version(module: str, distribution: str) -> str:
    """"name version" of a distribution, or of the one that contains the module, because builds of a package differ in
    name.
    """
    distribution = distribution.partition("[")[0]
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or distribution


def main(packages: dict[str, str], formats: list[PeerFormat],
         load: Callable[[Job, PeerFormat], AbstractContextManager[Model]], on_gpus: bool = False) -> None:
    """Runs an adapter.

    `packages` maps modules to distributions; load(job, format) returns the model for a with block. With `on_gpus` it
    computes on GPUs and sees only those that it is to use.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--formats", default="")
    parser.add_argument("--cells", default="")
    parser.add_argument("--gpus", default="")
    options = parser.parse_args()
    if bool(options.gpus) != on_gpus:
        sys.exit(f"{Path(sys.argv[0]).name} computes on {'GPUs' if on_gpus else 'CPUs'}")
    if on_gpus:
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": options.gpus}
    missing = {module: name for module, name in packages.items() if not _importable(module)}
    if missing:
        sys.exit(
            f"missing: {', '.join(missing)}; {shlex.join([sys.executable, '-m', 'pip', 'install', *missing.values()])} "
            f"({Path(sys.argv[0]).name} begins with what it needs)"
        )
    if options.probe:
        print(", ".join(_version(module, name) for module, name in packages.items()))
        return
    if options.checkpoint is None or options.work is None:
        parser.error("--checkpoint and --work are needed")
    options.work.mkdir(parents=True, exist_ok=True)
    cells = tuple(Cell(*map(int, text.split("x"))) for text in options.cells.split(",") if text)
    job = Job(options.checkpoint, options.work, options.threads, cells, len(options.gpus.split(",")) if on_gpus else 0)
    wanted = options.formats.split(",")
    for form in formats:
        if set(form.matches) & set(wanted):
            _measure(job, form, load)


def _measure(job: Job, form: PeerFormat, load) -> None:
    record = {"format": form.name, "weight_bits": form.bits, "integer": form.integer, "for": list(form.matches)}
    try:
        with load(job, form) as model:
            record["weight_bits"] = getattr(model, "weight_bits", form.bits)
            model.time(Cell(1, min(16, job.cells[0].prompt), 2))
            for cell in job.cells:
                prefill, decode = model.time(cell)
                result = {**record, "cell": f"{cell.batch}x{cell.prompt}x{cell.output}", "prefill": prefill,
                          "decode": decode}
                print("RESULT " + json.dumps(result), flush=True)
    except Exception as error:      # one format's failure is reported; the others are measured
        print("RESULT " + json.dumps({**record, "error": describe(error)}), flush=True)


def describe(error: BaseException) -> str:
    """The error, and the one at the bottom of its chain, which lazy imports hide."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    texts = [f"{type(e).__name__}: {e}"[:500] for e in ([error] if cause is error else [error, cause])]
    return ", caused by ".join(texts)
