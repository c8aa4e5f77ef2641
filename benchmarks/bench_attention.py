"""Measures the attention kernel alone, in and out of cache, as fractions of the machine's rates.

    bench_attention.py [--threads 1] [--rows 7] [--dim 64] [--heads 2] [--tokens 400000] [--span 32]

For each type of cache: bytes/s over the measured read bandwidth, and operations/s (2 multiply-adds per token, value and
row) over the measured fp32 FMA rate, which bfloat16 and integer products may exceed. `rows` is query heads per KV head;
7 rows of 64 with 2 KV heads are Qwen2.5-0.5B's.
"""

from __future__ import annotations

import argparse

from allspark_server import _native


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("threads", 1), ("rows", 7), ("dim", 64), ("heads", 2), ("tokens", 400000), ("span", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    cpus = list(range(o.threads))
    print(_native.isa())
    for dtype in ("float32", "bfloat16", "int8", "uint4"):
        bandwidth, rate = _native.measure_roofline(cpus, o.threads, 3, 256)
        for place, tokens, repeats in (("in cache", 512, 100), ("out of cache", o.tokens, 5)):
            seconds, size = _native.kernels.attend_seconds(
                o.rows, o.dim, o.span, dtype, tokens, o.heads, cpus, o.threads, repeats
            )
            operations = 4 * o.rows * o.dim * tokens * o.heads / seconds
            print(
                f"{dtype:9} {place:12} {size / 1e6:6.1f} MB  {size / seconds / 1e9:5.1f} GB/s, "
                f"{size / seconds / bandwidth:.2f} of read; "
                f"{operations / 1e9:4.0f} Gop/s, {operations / rate:.2f} of FMA",
                flush=True,
            )


if __name__ == "__main__":
    main()
