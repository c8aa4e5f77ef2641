"""Runs benchmarks in turn for several rounds and measures the machine's rates before each round; prints best and
median.

    compare.py --rounds 3 'old=OLD_VENV/bin/python benchmarks/bench_allspark.py CKPT' 'new=python
    benchmarks/bench_allspark.py CKPT'

Each command must print a line "RESULT name… {dictionary of numbers}", as bench_allspark.py does. A machine's speed can
drift by half from hour to hour: compare figures of one run only.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys

from allspark_server import _native


def run(command: str, timeout: float) -> dict[str, float]:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=timeout)
    found = re.findall(r"^RESULT [^{]*(\{.*\})\s*$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return ast.literal_eval(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="+", help="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        bandwidth, rate = _native.measure_roofline(threads=options.threads)
        ceilings = {"read GB/s": bandwidth / 1e9, "fp32 GFLOP/s": rate / 1e9}
        for name, result in [
            ("ceilings", ceilings),
            *((c.split("=", 1)[0], c.split("=", 1)[1]) for c in options.command),
        ]:
            result = result if isinstance(result, dict) else run(result, options.timeout)
            print(f"round {number + 1}: {name}: {json.dumps(result)}", file=sys.stderr, flush=True)
            for key, value in result.items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
    for name, result in figures.items():
        row = "  ".join(f"{key} {max(values):.1f} ({statistics.median(values):.1f})" for key, values in result.items())
        print(f"{name:24} {row}")
    print("best of all rounds (median)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
