"""Other engines on the same cells, each by a small adapter script that runs in the interpreter with its packages.

An adapter is `peer_NAME.py` in benchmarks/peers (or --peers-dir). It is run as
    PYTHON peer_NAME.py --probe [--gpus 0,1]                      exits with 0 and prints its version, if its packages
    exist PYTHON peer_NAME.py --checkpoint DIR --work DIR --threads N --formats bfloat16,int8 --cells 1x128x64,… [--gpus
    0,1]
and prints a line `RESULT {JSON}` for each format and cell: format, weight_bits (bits stored for each weight), integer
(whether activations are quantized), for (the formats of ours that it compares with), cell, prefill and decode in
tokens/s (null: not measured); or format and error.
"""
from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .measure import Cell, Format, Timing

logger = logging.getLogger(__name__)

ADAPTERS = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
MARK = "RESULT "
PROBE_SECONDS = 60


@dataclass
class Peer:
    """An adapter and the interpreter that runs it."""

    name: str
    script: Path
    python: str
    version: str = ""
    label: str = field(default="", compare=False)

    def probe(self, gpus: Sequence[int] = ()) -> bool:
        """Whether the adapter can run: its packages can be imported, and it supports these GPUs, or CPUs. Sets
        `version`, or the reason as `label`.
        """
        try:
            done = subprocess.run([self.python, str(self.script), "--probe", *_on(gpus)], capture_output=True,
                                  text=True, timeout=PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"--peer {self.name}={self.python}: {error}") from None
        self.version = done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else ""
        if done.returncode:
            self.label = (done.stderr.strip().splitlines() or ["not importable"])[-1]
        return done.returncode == 0


@dataclass(frozen=True)
class PeerResult:
    """An adapter's result for one of its formats in one cell."""

    peer: str
    format: str
    weight_bits: float
    matches: tuple[str, ...]
    cell: Cell | None
    timing: Timing | None
    error: str = ""
    integer: bool = False


def adapters(folder: Path) -> dict[str, Path]:
    """The adapters in a directory, by name."""
    return {path.stem.removeprefix("peer_"): path for path in sorted(folder.glob("peer_*.py"))}


def _on(gpus: Sequence[int]) -> list[str]:
    return ["--gpus", ",".join(map(str, gpus))] if gpus else []


def choose(wanted: list[str], folder: Path = ADAPTERS, gpus: Sequence[int] = ()) -> list[Peer]:
    """The peers to run. `wanted`: NAME or NAME=PYTHON; "none"; or nothing: every adapter whose packages this
    interpreter has. Raises ValueError for a peer that is not known or cannot run.
    """
    known = adapters(folder)
    if wanted == ["none"]:
        return []
    if not wanted:
        return [peer for name, script in known.items() if (peer := Peer(name, script, sys.executable)).probe(gpus)]
    chosen = []
    for text in wanted:
        name, _, python = text.partition("=")
        if name not in known:
            raise ValueError(f"--peer {text}: {folder} has no adapter of that name; known: "
                             f"{', '.join(known) or 'none'} (and: none)")
        peer = Peer(name, known[name], python or sys.executable)
        if not peer.probe(gpus):
            raise ValueError(f"--peer {text}: it cannot be run by {peer.python}: {peer.label}")
        chosen.append(peer)
    return chosen


def run_peer(peer: Peer, checkpoint: Path, work: Path, threads: int, formats: list[Format], cells: list[Cell],
             timeout: float, on_result: Callable[[PeerResult], None], gpus: Sequence[int] = ()) -> None:
    """Runs the adapter once over all cells. Calls on_result with each result. A failure of the adapter becomes a result
    with `error` and without a cell.
    """
    (work / peer.name).mkdir(parents=True, exist_ok=True)
    words = [peer.python, str(peer.script), "--checkpoint", str(checkpoint), "--work", str(work / peer.name),
             "--threads", str(threads), "--formats", ",".join(dict.fromkeys(f.dtype for f in formats)),
             "--cells", ",".join(map(str, cells)), *_on(gpus)]
    log = work / peer.name / "stderr.txt"
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(["timeout", str(timeout), *words], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    on_result(_parse(peer.name, json.loads(line[len(MARK):])))
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code:
        reason = f"no end within {timeout:g} s" if code == 124 else f"exit status {code}"
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        on_result(PeerResult(peer.name, "", 0, (), None, None, ": ".join([reason, *last])))


def _parse(peer: str, record: dict) -> PeerResult:
    timing = None if "error" in record else Timing(record["prefill"], record["decode"])
    cell = Cell.parse(record["cell"]) if record.get("cell") else None
    return PeerResult(peer, record["format"], record.get("weight_bits", 0.0), tuple(record.get("for", ())), cell,
                      timing, record.get("error", ""), record.get("integer", False))
