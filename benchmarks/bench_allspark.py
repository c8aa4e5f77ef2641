"""Measures decode and prefill speed on a checkpoint directory, in the same way as the peers' scripts.

    bench_allspark.py CHECKPOINT [--ranks N] [--threads N] [--batch 1 4 8] [--weight-dtype auto|int4:64] [--json]

--ranks 0 (default) is an Engine in this process with --threads threads; --ranks N a ClientEngine and a group of N
ranks. Prompts have 128 random tokens and answers 64, greedy. Prefill is the time to the first token of a prompt of
1,024 (--prefill). --context N measures decode at batch 1 after a prompt of N, with 32 tokens out, instead of the
batches.

Beside each figure, "NAME/ceiling" is its fraction of the roofline, measured right before and after (the higher counts):
for decode, bytes of weights and cache per step over the read bandwidth; for prefill, operations of matrices and
attention over the fp32 multiply-add rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import numpy as np

from allspark_client import AbstractEngine, AsModelConfig, ClientEngine
from allspark_launch.bench.roofline import Machine, Workload
from allspark_server import _native


def generate(
    engine: AbstractEngine, rng: np.random.Generator, batch: int, prompt: int, output: int
) -> tuple[float, float]:
    """(seconds to the last first token, decode tokens/s after that) of `batch` requests at once."""
    config = {"top_k": 1, "max_length": prompt + output, "early_stopping": False}
    begin = time.perf_counter()
    requests = [
        engine.start_request("m", {"input_ids": rng.integers(10, 3000, prompt)}, config)[1:] for _ in range(batch)
    ]
    counted = 0
    for _, queue in requests:
        counted -= len(queue.Get().ids_from_generate)
    first = time.perf_counter()
    for _, queue in requests:
        for _elements in queue:
            pass
        counted += queue.GeneratedLength()
    seconds = time.perf_counter() - first
    for handle, _ in requests:
        engine.release_request("m", handle)
    return first - begin, counted / seconds if output > 1 else 0.0


class Best:
    """The best figure of each name, and its best fraction of the roofline."""

    def __init__(self, threads: int):
        self.figures: dict[str, float] = {}
        self._cpus = list(range(threads))

    def ceilings(self) -> Machine:
        return Machine(*_native.measure_roofline(self._cpus, len(self._cpus), 2))

    def note(self, name: str, before: Machine, rate: float, bound) -> None:
        """Records a figure; `bound` computes its roofline, in tokens/s, from a Machine."""
        after = self.ceilings()
        ceiling = bound(Machine(max(before.read, after.read), max(before.fp32, after.fp32)))
        for key, value in ((name, rate), (f"{name}/ceiling", rate / ceiling)):
            self.figures[key] = max(self.figures.get(key, 0), value)


def measure(engine: AbstractEngine, options: argparse.Namespace, threads: int) -> dict[str, float]:
    kind, _, group = options.weight_dtype.partition(":")
    longest = max(2048, options.prefill + 8, options.context + 64)
    engine.install_model(
        AsModelConfig(
            model_name="m",
            model_path=options.checkpoint,
            engine_max_length=longest,
            engine_max_batch=max(options.batch),
            num_threads=options.threads,
            weight_dtype=kind,
            weight_group_size=int(group or 0),
            enable_prefix_cache=False,
        )
    )
    engine.start_model("m")
    info, load = engine.get_model_info("m"), Workload.of(options.checkpoint)
    weight_bytes, token_bytes = info.weight_bytes * info.ranks, info.cache_bytes * info.ranks / (
        info.num_spans * info.span_size
    )
    rng, best = np.random.default_rng(0), Best(threads)
    generate(engine, rng, 1, 16, 4)
    cells = [(1, options.context, 32)] if options.context else [(batch, 128, 64) for batch in options.batch]
    for _ in range(options.repeats):
        for batch, prompt, output in cells:
            before = best.ceilings()
            rate = generate(engine, rng, batch, prompt, output)[1]
            best.note(f"decode_b{batch}", before, rate, lambda machine: load.decode(
                machine, batch, prompt + output / 2, weight_bytes, token_bytes).tokens_per_second)
        if not options.context:
            before = best.ceilings()
            rate = options.prefill / generate(engine, rng, 1, options.prefill, 1)[0]
            best.note(f"prefill_{options.prefill}", before, rate, lambda machine: load.prefill(
                machine, 1, options.prefill, weight_bytes).tokens_per_second)
    engine.release_model("m")
    return {k: round(v, 2) for k, v in best.figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of each rank; 0: what it is given")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--weight-dtype", default="auto", help="with a group size after a colon, such as int4:64")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--context", type=int, default=0)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.ranks:
            from allspark_launch.group.background import background_group

            group = stack.enter_context(background_group(["--ranks", str(options.ranks)], timeout=60.0))
            engine: AbstractEngine = stack.enter_context(ClientEngine(group.addresses[0]))
            name = f"allspark {options.ranks} ranks"
        else:
            from allspark_server import Engine

            engine = stack.enter_context(Engine())
            name = "allspark one process"
        result = measure(engine, options, max(1, options.ranks) * (options.threads or 1))
    print(f"RESULT {name} {options.weight_dtype} {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
