"""Measures Qwen3.6-35B-A3B's shape on CPUs, beside llama.cpp on the same shape, in turn.

    bench_qwen.py FOLDER [--layers 4] [--threads 2] [--rounds 3] [--formats w8a8,w4a8:64] [--peer PYTHON] [--json FILE]

The model has random weights, few layers and as small a part of the vocabulary (see qwen36.py). The checkpoint, and for
a peer GGUF files in q8_0 and q4_0, are written to FOLDER unless they are there. `allspark bench static` measures both:
decoding of 1 and 8 sequences and a prompt of 1,024 tokens, in tokens/s and as a part of the roofline around a figure.
For decoding that is the bytes of a step (dense weights, the experts that its rows choose if they choose independently,
states, keys and values) over the read bandwidth.

PYTHON is an interpreter with the packages of peers/peer_llama_cpp.py; llama.cpp has the architecture as "qwen35moe".
Prints the ratios of both engines' medians at the end: w8a8 to q8_0, w4a8 to q4_0. --profile prints where the time of
each cell goes instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from qwen36 import Shape, write_checkpoint, write_gguf

from allspark_client import AsModelConfig
from allspark_launch.bench.measure import Cell, Format, time_cell
from allspark_launch.cli import main as allspark
from allspark_server import Engine

CELLS = "1x16x64,8x16x64,1x1024x1"
PAIRS = {"w8a8": "q8_0", "w4a8": "q4_0"}


def ratios(results: list[dict]) -> list[str]:
    """A line for each cell and format of ours, with that of llama.cpp's counterpart."""
    def of(row: dict, kind: str) -> tuple:
        return row["batch"], row["prompt"], kind

    measured = [row for row in results if row["status"] == "measured"]
    peers = {(row["format"], *of(row, kind)): row[kind] for row in measured for kind in ("decode", "prefill")
             if row["engine"] != "allspark" and row[kind]}
    lines = []
    for row in measured:
        kind = "decode" if row["output"] > 1 else "prefill"
        if row["engine"] != "allspark" or not row[kind]:
            continue
        peer = peers.get((PAIRS.get(row["format"].partition(":")[0]), *of(row, kind)))
        beside = f", {row[kind]['median'] / peer['median']:.2f} x llama.cpp" if peer else ""
        lines.append(f"{row['format']:<8} {kind:<8} {row['batch']} x {row['prompt']}: {row[kind]['median']:.1f} "
                     f"tokens/s, {row[kind]['median_fraction']:.2f} of the roofline ({row[kind]['bound_by']}){beside}")
    return lines


def profile(checkpoint: Path, form: Format, cell: Cell, threads: int) -> None:
    """Prints the time of each op in a cell."""
    with Engine() as engine:
        engine.install_model(AsModelConfig(
            model_name="m", model_path=str(checkpoint), weight_dtype=form.dtype, weight_group_size=form.group,
            num_threads=threads, engine_max_length=cell.prompt + cell.output, engine_max_batch=cell.batch,
            enable_prefix_cache=False))
        engine.start_model("m")
        vocab = engine.get_model_info("m").vocab_size
        time_cell(engine, "m", cell, vocab, np.random.default_rng(0))   # the first steps of a process are slow
        engine.get_op_profiling_info("m")
        timing = time_cell(engine, "m", cell, vocab, np.random.default_rng(0))
        print(f"\n{form}, {cell}: {timing}\n{engine.get_op_profiling_info('m')}", flush=True)


def main() -> int:
    """Reads the command line; returns 1 if nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="of 40; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", default="w8a8,w4a8:64", help="default %(default)s")
    parser.add_argument("--cells", default=CELLS, help="sequences x prompt x output; default %(default)s")
    parser.add_argument("--peer", metavar="PYTHON", help="measure llama.cpp too")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write all figures of all rounds")
    options = parser.parse_args()
    checkpoint, work = options.folder / f"qwen36-{options.layers}", options.folder / f"peers-{options.layers}"
    shape, file = Shape(options.layers), options.json or options.folder / "figures.json"
    if not (checkpoint / "model.safetensors").exists():
        print(f"{write_checkpoint(checkpoint, shape) / 1e9:.1f} GB are written", flush=True)
    if options.profile:
        for form in map(Format.parse, options.formats.split(",")):
            for cell in map(Cell.parse, options.cells.split(",")):
                profile(checkpoint, form, cell, options.threads)
        return 0
    words = ["bench", "static", "--model", str(checkpoint), "--formats", options.formats, "--cell", options.cells,
             "--threads", str(options.threads), "--rounds", str(options.rounds), "--json", str(file)]
    if options.peer:
        (work / "llama_cpp").mkdir(parents=True, exist_ok=True)
        for form in options.formats.split(","):
            kind = PAIRS[form.partition(":")[0]]
            if not (target := work / "llama_cpp" / f"{kind}.gguf").exists():
                write_gguf(partial := target.with_suffix(".partial"), shape, kind.upper())
                partial.rename(target)
        words += ["--peer", f"llama_cpp={options.peer}", "--work-dir", str(work)]
    code = allspark([*words, *(["--peer", "none"] if not options.peer else [])])
    if not code:
        print("\n".join(["", *ratios(json.loads(file.read_text())["results"])]))
    return code


if __name__ == "__main__":
    sys.exit(main())
