"""Measures cuBLASLt's e4m3 GEMM with a scale per row and column (torch._scaled_mm) at Qwen2.5-7B's shapes.

`python scaled_mm.py [rows,rows...]` prints microseconds and TFLOP/s, with and without fast accumulation.
"""

from __future__ import annotations

import sys

import torch

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}


def seconds(run, times: int) -> float:
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(times):
            run(i)
    best = 1e9
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / times * 1e-3)
    return best


def main(rows_of: list[int]) -> None:
    for rows in rows_of:
        for fast in (True, False):
            line, total, work = [], 0.0, 0.0
            for name, (n, k) in SHAPES.items():
                copies = max(1, min(8, int(2e8 / (n * k)) + 1))
                w = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t() for _ in range(copies)]
                x = torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn)
                of_rows, of_columns = torch.ones(rows, 1, device="cuda"), torch.ones(1, n, device="cuda")

                def run(i):
                    torch._scaled_mm(x, w[i % len(w)], scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16,
                                     use_fast_accum=fast)

                operations = 2.0 * rows * n * k
                t = seconds(run, max(3, min(60, int(8e-3 / max(operations / 1e15, n * k / 4e12)))))
                line.append(f"{name} {t * 1e6:.1f} ({operations / t / 1e12:.0f})")
                total, work = total + t, work + operations
            print(f"{rows} rows, {'fast' if fast else 'exact'}: {', '.join(line)}; {total * 1e6:.1f} us a layer, "
                  f"{work / total / 1e12:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main([int(r) for r in (sys.argv[1] if len(sys.argv) > 1 else "128,256,1024,8192").split(",")])
