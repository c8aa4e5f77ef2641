"""Handing the KV cache of a prompt to another group on the same host: its rate, and that of copying the same bytes.

The spans lie in the host cache files of one group and go to those of another, as `allspark_server/engine/handover.py`
copies them: checksums are compared, two threads copy. The ceiling is a copy of the same bytes by as many threads
without checksums, span by span and in one piece for each thread; the faster one counts. Measurements alternate, and
medians are given.

    python benchmarks/bench_handover.py [--tokens 16000] [--span-bytes 1835008] [--directory /dev/shm]

The default is the cache of Qwen2.5-7B in bfloat16: 28 layers, 4 KV heads of 128, spans of 32 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from allspark_server.runtime.host_cache import HostCacheFile, SpanRecords
from allspark_server.runtime.native import native_library

THREADS, BATCH = 2, 16      # of allspark_server/engine/handover.py


def records(directory: Path, spans: int, size: int) -> tuple[HostCacheFile, SpanRecords]:
    """An empty host cache file, and its records."""
    owner = HostCacheFile(str(directory), "m", 0, 1)
    stride = -(-size // 64) * 64
    owner.prepare({"span": [0, size], "spans": spans}, -(-spans * 32 // 4096) * 4096 + spans * stride)
    return owner, SpanRecords(owner.path, writable=True)


def in_threads(pool: ThreadPoolExecutor, count: int, batch: int, copy: Callable[[int], None]) -> float:
    """Seconds in which two threads call `copy` for 0 … count-1."""
    def part(begin: int) -> None:
        for index in range(begin, min(begin + batch, count)):
            copy(index)

    began = time.perf_counter()
    for done in [pool.submit(part, begin) for begin in range(0, count, batch)]:
        done.result()
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--span-size", type=int, default=32, help="tokens of a span")
    parser.add_argument("--span-bytes", type=int, default=28 * 2 * 4 * 128 * 2 * 32)
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--repeats", type=int, default=15)
    a = parser.parse_args()
    spans, size = a.tokens // a.span_size, a.span_bytes
    with tempfile.TemporaryDirectory(dir=a.directory) as folder, ThreadPoolExecutor(THREADS) as pool:
        (_, source), (_, target) = (records(Path(folder, name), spans, size) for name in ("source", "target"))
        keys = [(span + 1).to_bytes(16, "little") for span in range(spans)]
        generator = np.random.default_rng(0)
        for span, key in enumerate(keys):
            content = bytearray(generator.bytes(size))
            assert source.write(span, key, content, native_library().span_checksum(content))

        def hand_over(span: int) -> None:
            checksum = source.checksum(span, keys[span])
            assert checksum is not None and target.write(span, keys[span], source.content(span), checksum)

        arrays = [[np.frombuffer(each.content(span), np.uint8) for span in range(spans)] for each in (target, source)]

        def copy(span: int) -> None:
            np.copyto(arrays[0][span], arrays[1][span])

        wholes = [[np.array_split(np.frombuffer(each._view[each._begin:], np.uint8), THREADS)[part]
                   for each in (target, source)] for part in range(THREADS)]
        times: dict[str, list[float]] = {"hand over": [], "by spans": [], "whole": []}
        for _ in range(a.repeats):
            times["by spans"].append(in_threads(pool, spans, BATCH, copy))
            times["whole"].append(in_threads(pool, THREADS, 1, lambda part: np.copyto(*wholes[part])))
            times["hand over"].append(in_threads(pool, spans, BATCH, hand_over))
        total = spans * size
        rates = {f"{name}_GB_s": round(total / statistics.median(taken) / 1e9, 2) for name, taken in times.items()}
        parts = sorted(min(*copies) / taken for taken, *copies in zip(*times.values()))
        print(json.dumps({"tokens": a.tokens, "bytes": total, "threads": THREADS, "cpus": os.cpu_count(), **rates,
                          "of_the_copy": round(statistics.median(parts), 3),
                          "least": round(parts[0], 3), "most": round(parts[-1], 3)}))


if __name__ == "__main__":
    main()
