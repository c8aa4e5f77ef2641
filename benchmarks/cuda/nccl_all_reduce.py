"""NCCL's all-reduce of [rows, 3584] in a graph of 56, for comparison with all_reduce.cu. Needs torch and 2 GPUs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CALLS = 56


def rank(r: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(r)
    dist.init_process_group("nccl", rank=r, world_size=2)
    for rows in (1, 8, 32, 128, 256, 1024):
        line = []
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.ones(rows, 3584, dtype=dtype, device="cuda")
            dist.all_reduce(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    dist.all_reduce(x)
            best = 1e9
            for _ in range(8):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                dist.barrier()
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                best = min(best, begin.elapsed_time(end) * 1e3 / CALLS)
            line.append(f"{best:8.2f}")
        if r == 0:
            print(f"nccl {rows:5d} rows: bf16, fp32 us", *line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
