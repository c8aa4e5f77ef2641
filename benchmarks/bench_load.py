"""Measures loading and quantizing a checkpoint, relative to copying its file and writing the same number of bytes.

    bench_load.py CHECKPOINT [--formats int8,w8a8,int4:64,…] [--threads N] [--rounds N]

Two measurements run in turn, with the same number of threads. Each maps the file and allocates its memory itself. The
first copies the file (memcpy) through a buffer that fits the caches and writes (memset) as many bytes as the format's
matrices have. The second loads the checkpoint. The file is in the page cache. Prints elapsed seconds and CPU seconds of
the best round.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from allspark_server import _native
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.formats import Quantization, WeightFormat
from allspark_server.weights.loader import Loader, unquantized_type

LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
LIBC.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
PIECE = 256 << 10


def read_and_write(path: Path, result_bytes: int, threads: int) -> None:
    """The least work that loading can do: reads the file and writes as many bytes into fresh huge pages."""
    with open(path, "rb") as file, ThreadPoolExecutor(threads) as pool:
        source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        target = mmap.mmap(-1, result_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # of shared memory small pages
        target.madvise(mmap.MADV_HUGEPAGE)
        begin, into = np.frombuffer(source, np.uint8).ctypes.data, np.frombuffer(target, np.uint8).ctypes.data

        def work(index: int) -> None:
            buffer = ctypes.create_string_buffer(PIECE)
            first, last = (len(source) * i // threads for i in (index, index + 1))
            for at in range(first, last, PIECE):
                LIBC.memcpy(buffer, begin + at, min(PIECE, last - at))
            first, last = (result_bytes * i // threads for i in (index, index + 1))
            for at in range(first, last, PIECE):
                LIBC.memset(into + at, 1, min(PIECE, last - at))

        list(pool.map(work, range(threads)))


def load(checkpoint: Path, form: WeightFormat, threads: int) -> int:
    """Loads the weights as a rank does; returns their bytes."""
    model = open_model(str(checkpoint))
    formats = Quantization(form).formats(model.graph, unquantized_type(model.graph, model.source))
    executor = _native.Executor(num_threads=threads)
    Loader(model.graph, model.source, executor, 0, 1, formats).load()
    return executor.weight_bytes()


def timed(work: Callable[[], object]) -> np.ndarray:
    """(seconds, CPU seconds) of a call."""
    began, spent = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - began, time.process_time() - spent])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face directory with one model.safetensors")
    parser.add_argument("--formats", default="int8,w8a8,int4:64,w4a8:64", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    file = options.checkpoint / "model.safetensors"
    print(
        f"{'format':<10}{'bytes read, written':>22}{'read and write: s, CPU':>26}"
        f"{'load: s, CPU':>18}{'ratio':>8}{'of CPU':>8}"
    )
    for text in options.formats.split(","):
        dtype, _, group = text.partition(":")
        form = WeightFormat(dtype, int(group or 0))
        size = load(options.checkpoint, form, options.threads)      # also brings the file into the page cache
        times = np.array(
            [
                [
                    timed(lambda: read_and_write(file, size, options.threads)),
                    timed(lambda: load(options.checkpoint, form, options.threads)),
                ]
                for _ in range(options.rounds)
            ]
        )
        (least, least_cpu), (took, took_cpu) = times.min(axis=0)
        sizes = f"{file.stat().st_size / 1e6:,.0f} MB, {size / 1e6:,.0f} MB"
        print(
            f"{text:<10}{sizes:>22}{f'{least:.3f}, {least_cpu:.3f}':>26}"
            f"{f'{took:.3f}, {took_cpu:.3f}':>18}{took / least:>8.2f}{took_cpu / least_cpu:>8.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
