"""Checks whether a change is slower: measures two installations in turn on twelve cells, and the old one twice, to show
the noise.

    paired.py OLD_PYTHON NEW_PYTHON --model CKPT [--alternations 5] [--threads N] [--json FILE]

Runs `allspark bench static` of both interpreters' installations: old, new and old again, in a rotating order, so that a
drift of the machine affects all three. A cell's ratio is the median over the alternations of new / mean(old, old
again); its noise that of old / old again. A new build passes with a geometric mean of at least 0.98 (--least).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FORMATS = ("bfloat16", "int8", "w8a8", "int4:64")
CELLS = {"decode 1": "1x128x64", "decode 8": "8x128x32", "prefill 1024": "1x1024x1"}


def measure(python: str, options: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of each named cell from one run of `allspark bench static`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        line = [python, "-m", "allspark_launch", "bench", "static", "--model", options.model, "--rounds", "1",
                "--formats", ",".join(FORMATS), "--cell", ",".join(CELLS.values()), "--peer", "none", "--json",
                str(result), "--threads", str(options.threads)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=options.timeout)
        if done.returncode:
            raise SystemExit(f"{' '.join(line)}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        measured = json.loads(result.read_text())["results"]
    figures = {}
    for one in measured:
        for name, cell in CELLS.items():
            if cell == f"{one['batch']}x{one['prompt']}x{one['output']}":
                figures[f"{one['format']} {name}"] = one[name.split()[0]]["best"]
    return figures


def geometric(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="interpreter with the build before the change")
    parser.add_argument("new", help="interpreter with the build after the change")
    parser.add_argument("--model", required=True, help="checkpoint")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    parser.add_argument("--least", type=float, default=0.98, help="lowest mean that passes (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    builds = {"old": options.old, "new": options.new, "again": options.old}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
    for turn in range(options.alternations):
        names = list(builds)
        for name in names[turn % 3:] + names[:turn % 3]:
            figures[name].append(measure(builds[name], options))
            print(f"{turn + 1}/{options.alternations} {name}", file=sys.stderr, flush=True)
    changes, noises = [], []
    print(f"{'cell':24} {'old':>9} {'new':>9} {'new/old':>8} {'old/old':>8}")
    for cell in figures["old"][0]:
        old, new, again = ([run[cell] for run in figures[name]] for name in ("old", "new", "again"))
        changes.append(statistics.median(n * 2 / (o + a) for o, n, a in zip(old, new, again)))
        noises.append(statistics.median(o / a for o, a in zip(old, again)))
        print(f"{cell:24} {max(old + again):9.1f} {max(new):9.1f} {changes[-1]:8.3f} {noises[-1]:8.3f}")
    print(f"{'geometric mean':44} {geometric(changes):8.3f} {geometric(noises):8.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(geometric(changes) < options.least)


if __name__ == "__main__":
    main()
