"""`allspark bench static`: weight formats x batch x prompt x output, each in tokens/s and as a part of the roofline."""
from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from allspark_client import AbstractEngine, AllSparkError
from allspark_client.config import AsModelConfig

from ..group.background import background_group, shipped_model
from ..machine.gpus import ORDER
from ..machine.placement import place
from ..machine.topology import read_topology
from ..options import set_fields
from ..progress import Progress
from . import peers as peer_runs
from .arguments import list_of
from .measure import FORMATS, Cell, Format, Timing, time_cell
from .report import plot, tables
from .results import Row, Run
from .roofline import Machine, Workload

MODEL = "bench"
DEFAULT_FORMATS = ("float32", "bfloat16", "int8", "int4:64", "w8a8", "w4a8:64")
INTEGER_FORMATS = ("w8a8", "w4a8")      # activations are quantized, products are of integers
DEFAULT_CELLS = ("1x128x64", "4x128x64", "8x128x64", "1x1024x1")
PEER_CACHE_BYTES = 2        # of a cached value: the peers' default

DESCRIPTION = """\
Measures a model's speed for every weight format in every cell of a grid, beside the roofline of this machine.

A cell is BATCH requests at once, with PROMPT random tokens each, OUTPUT tokens out, greedy:
  prefill   all prompt tokens / time until the last request has its first token
  decode    tokens / time, from then until the first request ends: all sequences together
The roofline is measured with the same number of threads before and after every figure, and the higher one counts. The
memory bandwidth of a shared machine may change by half within a minute, so a figure's part of the roofline says more
than the figure:
  decode    the longer of: bytes that a step reads (packed weights, states and cache; of routed experts those that
            its sequences touch if they choose independently) / rate of reading memory; operations of the step / rate
            of multiply-adds
  prefill   operations (matrices, attention, head) / rate of multiply-adds: in fp32, or in 8-bit integers for the
            matrices of w8a8 and w4a8 and of peers that quantize activations
A model that fits the CPU's caches may exceed the roofline. GEMMs of bfloat16 pairs, tiles and integers may exceed the
fp32 rate. Compare figures of one run only."""

EPILOG = """\
examples:
  allspark bench static --rounds 1                                 the model that ships, in a minute
  allspark bench static --model DIR --formats bfloat16,int8,w4a8:64 --threads 2
  allspark bench static --model DIR --ranks 2 --batch 1,8,32 --prompt 128,1024 --output 64 --json out.json
  allspark bench static --model DIR --cell 1x8000x16 --plot out.png
  allspark bench static --model DIR --gpus 0,1 --formats bfloat16 --batch 1,8,32 --output 64
  allspark bench static --model DIR --peer llama_cpp=/venvs/llama/bin/python --work-dir /tmp/peers

On GPUs (--gpus) the roofline is the rate of reading their memory and the rate of a large bfloat16 GEMM by this
backend's own kernel, all GPUs together. The format float16 is for GPUs only.

Peers run on the same cells, each in a process of its own, by the adapters in benchmarks/peers. A format that this build
does not have is listed as such."""


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} must be a number, at least 1")
    return int(text)


def add_static(modes: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `static` to the modes of `allspark bench` (argparse's subparsers)."""
    p = modes.add_parser("static", help="weight formats x batch x prompt x output, without other load",
                         description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(handler=run_static)
    g = p.add_argument_group("what is measured")
    g.add_argument("--model", metavar="DIR", help="Hugging Face directory or NAME.asgraph (default: the shipped model)")
    g.add_argument("--formats", type=list_of(Format.parse), metavar="LIST",
                   default=[Format.parse(f) for f in DEFAULT_FORMATS],
                   help=f"of auto, {', '.join(FORMATS)}, with :GROUP for group-wise scales "
                        f"(default {','.join(DEFAULT_FORMATS)})")
    g.add_argument("--batch", type=list_of(_positive), metavar="LIST", help="the grid's batch sizes")
    g.add_argument("--prompt", type=list_of(_positive), metavar="LIST", help="the grid's prompt lengths")
    g.add_argument("--output", type=list_of(_positive), metavar="LIST",
                   help="the grid's output lengths; of these three, those that are not given are 1, 128, 64")
    g.add_argument("--cell", type=list_of(Cell.parse), metavar="BxPxO", action="extend", default=[],
                   help="single cells, instead of the grid or in addition; repeatable "
                        f"(default: {' '.join(DEFAULT_CELLS)})")
    g.add_argument("--rounds", type=int, default=3, metavar="N",
                   help="rounds of all measurements in turn (default %(default)s)")
    g.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of AsModelConfig")
    g = p.add_argument_group("where")
    g.add_argument("--ranks", type=int, default=0, metavar="N",
                   help="a group of N ranks (default: Engine, in this process)")
    g.add_argument("--threads", type=int, default=0, metavar="N",
                   help="threads of each rank (default: every physical core)")
    g.add_argument("--gpus", type=list_of(int), default=[], metavar="LIST",
                   help="a group with one rank per GPU; the roofline is that of these GPUs, and only peers that use "
                        "GPUs run")
    g = p.add_argument_group("peers")
    g.add_argument("--peer", action="append", default=[], metavar="NAME[=PYTHON]",
                   help="an engine to compare with, and the Python interpreter that has it; repeatable; none: no peers "
                        "(default: those that this interpreter can import)")
    g.add_argument("--peers-dir", type=Path, default=peer_runs.ADAPTERS, metavar="DIR", help="where the adapters are")
    g.add_argument("--work-dir", type=Path, metavar="DIR",
                   help="directory for models that peers convert (default: a temporary one)")
    g.add_argument("--peer-timeout", type=float, default=900, metavar="S",
                   help="the most seconds of a peer in a round (default %(default)g)")
    g = p.add_argument_group("output")
    g.add_argument("--json", type=Path, metavar="FILE", help="write all figures of all rounds")
    g.add_argument("--plot", type=Path, metavar="FILE",
                   help="bars and rooflines (.png, .svg or .pdf; needs matplotlib)")


def cells_from(options: argparse.Namespace, positions: int) -> list[Cell]:
    """The grid and the single cells. The default cells are no longer than the model's context."""
    cells = list(options.cell)
    if options.batch or options.prompt or options.output:
        cells += [Cell(*sizes) for sizes in itertools.product(options.batch or [1], options.prompt or [128],
                                                              options.output or [64])]
    if not cells:
        cells = [Cell.parse(text) for text in DEFAULT_CELLS]
        cells = [Cell(c.batch, max(1, min(c.prompt, positions - c.output)), c.output) for c in cells]
    return list(dict.fromkeys(cells))


def run_static(options: argparse.Namespace) -> int:
    """Runs the command. 1 if no figure was measured."""
    if options.rounds < 1:
        raise ValueError(f"--rounds {options.rounds} must be at least 1")
    if options.ranks < 0 or options.threads < 0:
        raise ValueError("--ranks and --threads must not be negative")
    if options.gpus and options.ranks not in (0, len(options.gpus)):
        raise ValueError(f"--ranks {options.ranks}: there is one rank for each of --gpus")
    checkpoint = Path(options.model).expanduser().resolve() if options.model else shipped_model()
    if not checkpoint.exists():
        raise ValueError(f"--model {options.model}: there is no such file or directory")
    if "ALLSPARK_LOG" not in os.environ:
        logging.getLogger().setLevel(logging.WARNING)       # without a message for each load
    run, peers, cpus, threads = prepare(options, checkpoint)
    with contextlib.ExitStack() as stack:
        work = options.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allspark-bench-")))
        engine = stack.enter_context(_engine(options))
        progress = Progress(options.rounds * (len(options.formats) + len(peers)) * len(run.cells))
        stack.callback(progress.close)
        meter = Meter(run, cpus, threads, options.gpus)
        for _ in range(options.rounds):
            for row, form in zip(run.rows, options.formats):
                if row.status == "measured":
                    measure_format(engine, row, form, checkpoint, run.cells, options, progress, meter)
                else:
                    progress.advance(len(run.cells))
            for peer in peers:
                measure_peer(run, peer, checkpoint, work, threads, options, progress, meter)
    print(f"{checkpoint.name}: {run.workload.architecture}, {run.workload.stored_weights / 1e6:.1f} M weights; "
          f"{run.settings['engine']}, " + (run.machine["gpus"] or
                                           f"{threads} threads, {run.machine['isa']}, {run.machine['cpu']}"))
    print(tables(run))
    if options.json:
        options.json.write_text(json.dumps(run.to_dict(), indent=1) + "\n", encoding="utf-8")
    if options.plot and not plot(run, options.plot):
        print(f"{options.plot} was not drawn: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    return 0 if any(row.prefill for row in run.rows) else 1


def prepare(options: argparse.Namespace, checkpoint: Path) -> tuple[Run, list[peer_runs.Peer], list[int], int]:
    """The empty run, the peers, the CPUs of all compute threads (empty: not pinned), and the number of threads."""
    from allspark_server.runtime.memory import physical_cores
    from allspark_server.runtime.native import native_library
    cpus: list[int] = []
    if options.ranks:
        placement = place(read_topology(), options.ranks, None, options.threads)
        cpus = [cpu for rank in placement.ranks for cpu in rank.cpus]
    threads = len(cpus) or options.threads or physical_cores([])
    workload = Workload.of(checkpoint)
    peers = peer_runs.choose(options.peer, options.peers_dir, options.gpus)
    ranks = len(options.gpus) or options.ranks
    settings = {"model": str(checkpoint), "engine": f"{ranks} ranks" if ranks else "Engine",
                "ranks": max(1, ranks), "rounds": options.rounds, "formats": [str(f) for f in options.formats],
                "set": options.set, "peers": [{"name": p.name, "version": p.version} for p in peers]}
    machine = {"cpu": _cpu_name(), "isa": native_library().isa(), "threads": threads, "platform": platform.platform(),
               "gpus": _gpu_names(options.gpus),
               "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    run = Run(settings, machine, workload, cells_from(options, workload.positions))
    run.rows = [Row("allspark", str(form), integer=form.dtype in INTEGER_FORMATS) for form in options.formats]
    return run, peers, sorted(set(cpus)) if len(set(cpus)) == threads else [], threads


def _cpu_name() -> str:
    import cpuinfo
    return cpuinfo.get_cpu_info().get("brand_raw") or platform.machine()


def _gpu_names(gpus: list[int]) -> str:
    known = {gpu.index: gpu.model for gpu in read_topology().gpus} if gpus else {}
    return ", ".join(f"GPU {gpu}" + (f" ({known[gpu]})" if known.get(gpu) else "") for gpu in gpus)


class Meter:
    """Measures the roofline of all threads together, or of all GPUs, before and after a timing."""

    def __init__(self, run: Run, cpus: list[int], threads: int, gpus: list[int]):
        from allspark_server.runtime.native import cuda_library, native_library
        self._native, self._run, self._cpus, self._threads = native_library(), run, cpus, threads
        self._gpus, self._cuda = gpus, cuda_library() if gpus else None
        if gpus:
            os.environ |= ORDER

    def now(self) -> Machine:
        """Measures the roofline."""
        self._run.rooflines.append(self._measure())
        return self._run.rooflines[-1]

    def _measure(self) -> Machine:
        if self._cuda is not None:
            read, bf16 = map(sum, zip(*(self._cuda.measure_roofline(gpu) for gpu in self._gpus)))
            return Machine(read, bf16, bf16=bf16)
        read, fp32 = self._native.measure_roofline(self._cpus, self._threads, 2)
        return Machine(read, fp32, self._native.measure_integer_rate(self._cpus, self._threads, 2),
                       self._native.measure_tile_roofline(self._cpus, self._threads, 2)[0])

    def around(self, before: Machine) -> Machine:
        """The higher of each rate: before and now."""
        now = self.now()
        return Machine(max(before.read, now.read), max(before.fp32, now.fp32), max(before.int8, now.int8),
                       max(before.bf16, now.bf16))


@contextlib.contextmanager
def _engine(options: argparse.Namespace) -> Iterator[AbstractEngine]:
    """An Engine, or a client of a group started for this run."""
    if not options.ranks and not options.gpus:
        from allspark_server import Engine
        with Engine() as engine:
            yield engine
        return
    from allspark_client import ClientEngine
    words = ["--gpus", ",".join(map(str, options.gpus))] if options.gpus else ["--ranks", str(options.ranks)]
    words += (["--threads", str(options.threads)] if options.threads else [])
    with background_group(words) as group, ClientEngine(group.addresses[0]) as engine:
        yield engine


def _config(options: argparse.Namespace, form: Format, checkpoint: Path, cells: list[Cell]) -> AsModelConfig:
    fields: dict[str, object] = {"model_name": MODEL, "model_path": str(checkpoint), "weight_dtype": form.dtype,
              "weight_group_size": form.group, "engine_max_length": max(c.prompt + c.output for c in cells),
              "engine_max_batch": max(c.batch for c in cells), "enable_prefix_cache": False}
    if options.gpus:
        fields["compute_unit"] = f"CUDA:{','.join(map(str, options.gpus))}"
    elif not options.ranks:
        fields["num_threads"] = options.threads
    fields |= set_fields(options.set)
    return AsModelConfig.from_dict(fields).validate()


def measure_format(engine: AbstractEngine, row: Row, form: Format, checkpoint: Path, cells: list[Cell],
                   options: argparse.Namespace, progress: Progress, meter: Meter) -> None:
    """One round of one format: loads it, runs every cell, frees it. Notes a failure in the row."""
    import numpy as np
    config = _config(options, form, checkpoint, cells)
    progress.show(f"loading {form}")
    try:
        engine.install_model(config)
    except AllSparkError as error:
        unavailable = "not available yet" in str(error)
        row.status, row.reason = "not available yet" if unavailable else "failed", str(error)
        progress.advance(len(cells))
        return
    try:
        engine.start_model(MODEL)
        info = engine.get_model_info(MODEL)
        # info is of rank 0; other ranks differ by a head at most.
        row.weight_bytes = float(info.weight_bytes * info.ranks)
        groups = len(info.cache_windows)
        row.token_bytes = info.cache_bytes * info.ranks * groups / (info.num_spans * info.span_size)
        rng = np.random.default_rng(0)
        time_cell(engine, MODEL, Cell(1, min(16, config.engine_max_length - 2), 2), info.vocab_size, rng)
        for cell in cells:
            progress.show(f"{row.name} {cell}")
            before = meter.now()
            timing = time_cell(engine, MODEL, cell, info.vocab_size, rng)
            row.add(cell, timing, meter.around(before))
            progress.advance()
    except AllSparkError as error:
        row.status, row.reason = "failed", str(error)
    finally:
        engine.release_model(MODEL)


def stored_type(checkpoint: Path, gpus: list[int]) -> str:
    """The type that peers use for a checkpoint as it is stored ("auto"). float16 is computed as such on GPUs only."""
    config = checkpoint / "config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    stored = fields.get("dtype") or fields.get("torch_dtype")
    return "float16" if gpus and stored == "float16" else "bfloat16"


def measure_peer(run: Run, peer: peer_runs.Peer, checkpoint: Path, work: Path, threads: int,
                 options: argparse.Namespace, progress: Progress, meter: Meter) -> None:
    """One round of one peer, all its formats. The roofline is measured before it starts and after it ends."""
    progress.show(peer.name)
    timed: list[tuple[Row, Cell, Timing]] = []

    def note(result: peer_runs.PeerResult) -> None:
        row = next((r for r in run.rows if (r.engine, r.format) == (peer.name, result.format)), None)
        if row is None:
            row = Row(peer.name, result.format, matches=result.matches,
                      weight_bytes=run.workload.stored_weights * result.weight_bits / 8,
                      token_bytes=float(PEER_CACHE_BYTES * run.workload.cache_values), integer=result.integer)
            run.rows.append(row)
        if result.error:
            row.status, row.reason = "failed", result.error
        elif result.cell and result.timing:
            timed.append((row, result.cell, result.timing))
            progress.show(f"{row.name} {result.cell}")

    stored = stored_type(checkpoint, options.gpus)
    formats = [Format(stored) if f.dtype == "auto" else f for f in options.formats]
    before = meter.now()
    peer_runs.run_peer(peer, checkpoint, work, threads, formats, run.cells, options.peer_timeout, note, options.gpus)
    machine = meter.around(before)
    for row, cell, timing in timed:
        row.add(cell, timing, machine)
    progress.advance(len(run.cells))

