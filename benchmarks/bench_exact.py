"""Measures the products of one expert's matrices, as stored by ordinary groups and by the exact recipe of mixed groups.

    bench_exact.py [--out 2880] [--in 2880] [--copies 24] [--threads 2] [--rows 1 4 16] [--repeats 7]

Each run multiplies `copies` matrices in turn, so that they are read from memory. For each format and number of rows it
prints the least time of a matrix and the bytes/s over the read bandwidth (the best, measured between the runs).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from allspark_server import _native
from allspark_server.weights.formats import ScaleLayout, WeightFormat, exact

FORMATS = {"MXFP4": WeightFormat("e2m1", 32, ScaleLayout("bfloat16", "none")),
           "NVFP4": WeightFormat("e2m1", 16, ScaleLayout("float32", "none")),
           "int4:32": WeightFormat("int4", 32, ScaleLayout("float16", "none")),
           "w4a8:32": WeightFormat("w4a8", 32, ScaleLayout("float16", "none"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=int, default=2880)
    parser.add_argument("--in", type=int, default=2880, dest="inner")
    parser.add_argument("--copies", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    n, k, rng, cpus = options.out, options.inner, np.random.default_rng(0), list(range(options.threads))
    models = {}
    for name, form in FORMATS.items():
        for each in (form, exact(form)):
            if each.native() == form.native() and each.exact:   # it is exact as it is
                continue
            executor = _native.Executor(cpus=cpus, num_threads=options.threads)
            scales = rng.normal(size=(n, form.groups(k))).astype(np.float32)
            stored = (scales.view(np.uint32) >> 16).astype(np.uint16) if form.layout.scales == "bfloat16" else \
                scales.astype(form.layout.scales)
            handles = [executor.add_matrix(n, k, **each.native()) for _ in range(options.copies)]
            quants = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
            for handle in handles:
                executor.fill_quantized(handle, quants, stored, None, 4, k, form.group_size)
            size = _native.matrix_bytes(n, k, **each.native())
            models[name + (", exact" if each.exact else "")] = executor, handles, size
    best: dict[tuple[str, int], float] = {}
    bandwidth = 0.0
    for _ in range(options.repeats):
        bandwidth = max(bandwidth, _native.measure_roofline(cpus, options.threads, 1, 256)[0])
        for rows in options.rows:
            x = rng.normal(size=(rows, k)).astype(np.float32)
            for name, (executor, handles, _) in models.items():
                began = time.perf_counter()
                for handle in handles:
                    executor.multiply(handle, x, n)
                seconds = (time.perf_counter() - began) / len(handles)
                best[name, rows] = min(best.get((name, rows), seconds), seconds)
    print(f"{_native.isa()}, {options.threads} threads: read {bandwidth / 1e9:.1f} GB/s; us a matrix | of bandwidth")
    for name, (_, _, size) in models.items():
        cells = (f"{rows:3} rows {best[name, rows] * 1e6:7.0f}|{size / best[name, rows] / bandwidth:.2f}"
                 for rows in options.rows)
        print(f"{name:14} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
