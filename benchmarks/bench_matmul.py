"""Measures the GEMM of one weight matrix, as fractions of the machine's rates; formats are measured in turn.

    bench_matmul.py [--out N] [--in K] [--copies 24] [--threads 2] [--rows 1 2 4 8 16 256] [--formats w4a8:64 ...]

Each run multiplies `copies` matrices in turn, so that they are read from memory, as those of a model. For each format
and number of rows it prints the best of --repeats: bytes/s over the measured read bandwidth, and operations/s over the
measured fp32 FMA rate (integer formats can exceed 1).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from allspark_server import _native


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=int, default=4864)
    parser.add_argument("--in", type=int, default=896, dest="inner")
    parser.add_argument("--copies", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", nargs="+",
                        default=["bfloat16:0", "int8:0", "int8:64", "w8a8:0", "int4:64", "w4a8:64"])
    options = parser.parse_args()
    n, k = options.out, options.inner
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(n, k)).astype(np.float32)
    cpus = list(range(options.threads))
    models = []
    for name in options.formats:
        dtype, group = name.split(":")
        executor = _native.Executor(cpus=cpus, num_threads=options.threads)
        began = time.perf_counter()
        handles = [executor.add_matrix(n, k, dtype, int(group)) for _ in range(options.copies)]
        for handle in handles:
            executor.fill_matrix(handle, weights, "F32")
        seconds = time.perf_counter() - began
        print(f"{name:12} packed at {weights.nbytes * options.copies / seconds / 1e9:.1f} GB/s of float32 source")
        models.append((name, executor, handles, _native.matrix_bytes(n, k, dtype, int(group)) * options.copies))
    best: dict[tuple[str, int], float] = {}
    bandwidth = rate = 0.0
    for _ in range(options.repeats):
        measured = _native.measure_roofline(cpus, options.threads, 1, 256)
        bandwidth, rate = max(bandwidth, measured[0]), max(rate, measured[1])
        for rows in options.rows:
            x = rng.normal(size=(rows, k)).astype(np.float32)
            for name, executor, handles, _ in models:
                began = time.perf_counter()
                for handle in handles:
                    executor.multiply(handle, x, n)
                seconds = time.perf_counter() - began
                best[name, rows] = min(best.get((name, rows), seconds), seconds)
    print(f"{_native.isa()}: read {bandwidth / 1e9:.1f} GB/s, fp32 {rate / 1e9:.0f} Gop/s; "
          "bytes ratio | operations ratio")
    for rows in options.rows:
        cells = (f"{name} {size / best[name, rows] / bandwidth:.2f}|"
                 f"{2 * n * k * rows * options.copies / best[name, rows] / rate:.2f}" for name, _, _, size in models)
        print(f"{rows:4} rows  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
