"""Runs targets. Time is limited for each input, memory for the process. A file names the block in progress, so that it
is known after a crash.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

from fuzz.bodies import Bodies
from fuzz.target import Target
from fuzz.targets import TARGETS

BLOCK = 250  # inputs that share what start() made; a block is the smallest thing that can be run again
REARM = 2.0  # seconds between settings of the watchdog, and so the largest delay of noticing a hang


class Findings:
    """Inputs that caused a finding, each written to a file of its own. Similar ones are shown only once."""

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, dict[str, int]()

    def add(self, target: Target, seed: int, block: int, number: int, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        key = f"{target.name}: {type(error).__name__} in {where.filename}:{where.lineno}"
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] > 1:
            return
        path = self.folder / f"{target.name}-{seed}-{block}-{number}"
        path.write_bytes(target.data)
        traceback.print_exception(error)
        print(
            f"FOUND {key}\n  input: {path}\n"
            f"  again: python -m fuzz --target {target.name} --seed {seed} --block {block}",
            flush=True,
        )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(
    kind: type[Target],
    seed: int,
    blocks: range,
    folder: Path,
    findings: Findings,
    *,
    count: int | None = None,
    limit: float = 10.0,
    max_rss: float = 4096.0,
    progress: float = 60.0,
) -> tuple[int, int]:
    """Returns (inputs, accepted inputs). `limit` is the seconds that an input may take, `max_rss` the MiB of the
    process.
    """
    target = kind(folder / kind.name)
    done = accepted = 0
    armed = began = told = time.monotonic()
    current = os.open(findings.folder / f"current-{kind.name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for block in blocks:
        rng = Random(f"{seed} {kind.name} {block}")
        os.pwrite(current, f"--target {kind.name} --seed {seed} --block {block:<12}\n".encode(), 0)
        target.start(rng)
        for number in range(BLOCK if count is None else min(BLOCK, count - done)):
            now = time.monotonic()
            if now - armed > REARM or not (block or number):
                faulthandler.dump_traceback_later(limit + REARM, exit=True)
                armed = now
            try:
                accepted += target.one(rng)
            except Exception as error:
                findings.add(target, seed, block, number, error)
            done += 1
        if peak_mib() > max_rss:
            findings.add(target, seed, block, 0, MemoryError(f"the process has taken {peak_mib():.0f} MiB"))
            break
        if now - told > progress:
            told = now
            print(
                f"{kind.name}: {done} inputs, {done / (now - began):.0f}/s, {accepted} accepted, {peak_mib():.0f} MiB",
                flush=True,
            )
        if count is not None and done >= count:
            break
    target.finish()
    faulthandler.cancel_dump_traceback_later()
    os.close(current)
    seconds = time.monotonic() - began
    print(
        f"{kind.name}: {done} inputs in {seconds:.0f} s ({done / max(seconds, 1e-9):.0f}/s), {accepted} accepted, "
        f"peak {peak_mib():.0f} MiB",
        flush=True,
    )
    return done, accepted


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=[kind.name for kind in TARGETS], help="all by default")
    parser.add_argument("--count", type=int, default=10_000, help="inputs of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block", type=int, help="only this block")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "fuzz", help="where findings are written"
    )
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that an input may take")
    parser.add_argument("--max-rss", type=float, default=4096.0, help="MiB that the process may take")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sanitizer = os.environ.pop("LD_PRELOAD", None)  # with it the process that renders templates starts slowly
    os.environ["RUST_BACKTRACE"] = "0"
    options.out.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in TARGETS if not options.target or kind.name in options.target]
    if sanitizer and not options.target:
        kinds.remove(Bodies)  # its group is a process of its own, which the sanitizer is not in
    share = sum(kind.share for kind in kinds)
    findings, total = Findings(options.out), 0
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    print(f"the block in progress is named in {options.out}/current-TARGET", flush=True)
    try:
        for kind in kinds:
            blocks = itertools.count() if options.block is None else (options.block,)
            total += run(
                kind,
                options.seed,
                blocks,
                folder,
                findings,
                limit=options.limit,
                max_rss=options.max_rss,
                count=round(options.count * kind.share / share) if options.block is None else None,
            )[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{total} inputs, {len(findings.seen)} findings, peak {peak_mib():.0f} MiB")
    for key, times in findings.seen.items():
        print(f"  {times} times {key}")
    return 1 if findings.seen else 0


if __name__ == "__main__":
    sys.exit(main())
