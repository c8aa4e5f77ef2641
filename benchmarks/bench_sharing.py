"""Measures how much requests delay each other, and how much work shared prefixes save, on a real model.

    bench_sharing.py CHECKPOINT [--threads 1] [--dtype w8a8] [--rounds 3] [--only prompts prefixes chats]

If the checkpoint has no tokenizer, the tokenizer of the shipped model is used.

prompts: the time between tokens of 8 streams while a prompt of 4,000 tokens arrives, relative to the median without it;
and for how many steps a prompt of 50,000 tokens (200,000 characters of text, which the engine tokenizes) delays the
streams and a short prompt that arrives after it.

prefixes: time to the first token of a prompt with a new prefix of 2,000 tokens, and relative to it, of one with the
same prefix in the cache, and of one whose prefix is restored from the host cache (in memory, or in a file, also after a
restart).

chats: rows computed for each new token in 32 chats of 6 turns, in a closed loop, with the same system prompt.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import allspark_server
from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.request import RequestSpec
from allspark_server.engine.engine import Engine


class Times:
    """A request's output sink. Records when tokens came, and after how many steps."""

    def __init__(self, engine: Bench):
        self.engine, self.began = engine, time.perf_counter()
        self.first_step = engine.steps
        self.at: list[float] = []
        self.steps: list[int] = []
        self.tokens: list[int] = []
        self.cached = 0
        self.ended = threading.Event()

    def on_token(self, handle, sample, token, logprob, top, text, cached, *_) -> None:
        self.at.append(time.perf_counter())
        self.steps.append(self.engine.steps)
        self.tokens.append(token)
        self.cached = cached

    def on_status(self, *_) -> None:
        pass

    def on_finish(self, handle, status, error, *_) -> None:
        if error is not None:
            print(error)
        self.ended.set()

    def __getattr__(self, name):  # the other events of a sink
        return lambda *_, **__: None

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.at[0] - self.began

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.at)


class Bench:
    """An engine with one model."""

    def __init__(self, options, **fields):
        self.engine = Engine()
        fields = {"engine_max_length": 8192, "engine_max_batch": 16, "weight_dtype": options.dtype, **fields}
        self.engine.install_model(AsModelConfig("m", str(options.checkpoint), num_threads=options.threads, **fields))
        self.engine.start_model("m")
        self.model = self.engine._models["m"]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_) -> None:
        self.engine.close()

    @property
    def steps(self) -> int:
        return self.model.scheduler.counters.steps

    def start(self, prompt: list[int], count: int, tenant: str = "") -> Times:
        times = Times(self)
        config = GenerateConfig(seed=1, eos_token_id=-1, max_new_tokens=count)
        self.engine.submit(RequestSpec("m", input_ids=prompt, config=config, tenant=tenant), times)
        return times

    def run(self, prompt: list[int], count: int = 1) -> Times:
        times = self.start(prompt, count)
        times.ended.wait()
        return times


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1500, length).tolist()


def prompts(options) -> None:
    median = beside_streams(options, 0.0)
    beside_streams(options, 1e3 * options.target * median)
    behind_long_prompt(options, 0.0)
    behind_long_prompt(options, 1e3 * options.target * median)


def last_gaps(streams: list[Times], count: int) -> np.ndarray:
    """Seconds between the streams' last tokens, once each has enough of them."""
    while min(len(stream.at) for stream in streams) < 2 * count:
        time.sleep(0.01)
    return np.concatenate([stream.gaps[-count:] for stream in streams])


def beside_streams(options, target: float) -> float:
    with Bench(options, target_token_latency=target) as bench:
        for turn in range(options.rounds):
            streams = [bench.start(prompt_of(16, 10 * turn + i), 8000) for i in range(8)]
            before = last_gaps(streams, 40)
            alone = float(np.median(before))
            long = bench.start(prompt_of(4000, 1000 + turn), 1)
            long.ended.wait()
            during = np.concatenate([np.diff([t for t in stream.at if t > long.began]) for stream in streams])
            median, p99 = np.median(during) / alone, np.percentile(during, 99) / alone
            noise = np.percentile(before, 99) / alone
            print(f"target {target:.0f} ms: 4,000 tokens beside 8 streams: between tokens {1e3 * alone:.1f} ms without "
                  f"it (p99 {noise:.2f} times that); with it, of that median {median:.2f}, p99 {p99:.2f}, most "
                  f"{during.max() / alone:.2f}; "
                  f"{4000 / long.first:.0f} tokens/s", flush=True)
            for handle in list(bench.engine._requests):
                bench.engine.release(handle)
            while bench.model.scheduler.running:
                time.sleep(0.01)
    return alone


def behind_long_prompt(options, target: float) -> None:
    stories = "Once upon a time there was a brave fox named Mia, who lived in a wood. " * 3000
    text = stories[:200_000]
    with Bench(options, engine_max_length=131072, cache_memory=2 << 30, target_token_latency=target) as bench:
        streams = [bench.start(prompt_of(16, i), 100_000) for i in range(4)]
        for turn in range(options.rounds):
            alone = float(np.median(last_gaps(streams, 30)))
            long, spec = Times(bench), RequestSpec("m", text=text + str(turn), config=GenerateConfig(seed=1))
            began = time.perf_counter()
            handle = bench.engine.submit(spec, long)
            submitted = time.perf_counter()
            while bench.steps < long.first_step + 6:
                time.sleep(0.002)
            short = bench.run(prompt_of(40, 77 + turn))
            most = max(max(np.diff([t for t in stream.at if began < t])) for stream in streams)
            print(f"target {target:.0f} ms: {len(spec.input_ids)} tokens of text, submitted in "
                  f"{submitted - began:.2f} s: "
                  f"longest pause of 4 streams {most / alone:.1f} steps of theirs without it; "
                  f"a short prompt behind it: first token after {short.steps[0] - short.first_step} steps", flush=True)
            bench.engine.release(handle)


def prefixes(options) -> None:
    with tempfile.TemporaryDirectory() as directory:
        spans = dict(cache_memory=options.cache << 20, host_cache_memory=4 * options.cache << 20)
        kinds = {"memory": spans, "file": {**spans, "host_cache_dir": directory}}
        for kind, fields in kinds.items():
            shared_prompts = []
            with Bench(options, **fields) as bench:
                bench.run(prompt_of(300, 5))
                for turn in range(options.rounds):
                    shared = prompt_of(2000, 100 + turn)
                    first = bench.run(shared + prompt_of(16, 200 + turn))
                    second = bench.run(shared + prompt_of(16, 300 + turn))
                    for filler in range(-(-bench.model.info.num_spans * 32 // 4000)):
                        bench.run(prompt_of(4000, 400 + 10 * turn + filler))
                    before = bench.model.scheduler.counters.restored_tokens
                    third = bench.run(shared + prompt_of(16, 500 + turn))
                    restored = bench.model.scheduler.counters.restored_tokens - before
                    parts = [f"{100 * times.first / first.first:.1f} %" for times in (second, third)]
                    print(f"{kind}: first {first.first:.2f} s; sharing 2,000 tokens {parts[0]} of it; with {restored} "
                          f"tokens from the host cache {parts[1]}", flush=True)
                    shared_prompts.append((shared, first.first))
            if kind == "file":
                with Bench(options, **fields) as bench:
                    bench.run(prompt_of(300, 5))
                    for turn, (shared, first) in enumerate(shared_prompts):
                        before = bench.model.scheduler.counters.restored_tokens
                        times = bench.run(shared + prompt_of(16, 600 + turn))
                        restored = bench.model.scheduler.counters.restored_tokens - before
                        print(f"after a restart: with {restored} tokens from the file "
                              f"{100 * times.first / first:.1f} %", flush=True)


def chats(options) -> None:
    with Bench(options, engine_max_batch=32, engine_max_length=4096) as bench:
        new = 0
        system = prompt_of(300, 9)
        lock = threading.Lock()
        rng = np.random.default_rng(3)
        sizes = rng.integers(40, 160, (32, 6)), rng.integers(20, 60, (32, 6))

        def chat(number: int) -> None:
            nonlocal new
            history = list(system)
            for turn in range(6):
                question, answer = int(sizes[0][number, turn]), int(sizes[1][number, turn])
                history += prompt_of(question, 1000 * number + turn)
                times = bench.start(history, answer)
                times.ended.wait()
                history += times.tokens
                with lock:
                    new += question + len(times.tokens)

        threads = [threading.Thread(target=chat, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = bench.model.scheduler.counters.computed_rows
        print(f"32 chats of 6 turns: {rows} rows for {new + len(system)} new tokens, {rows / (new + len(system)):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="w8a8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=float, default=1.5, help="target_token_latency, of the median time between "
                                                                  "tokens without a prompt (default: %(default)s)")
    parser.add_argument("--cache", type=int, default=96, help="MiB of the KV cache, for prefixes")
    parser.add_argument("--only", nargs="*", default=["prompts", "prefixes", "chats"])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shipped = Path(allspark_server.__file__).parent / "assets" / "fable"
        for path in (*shipped.glob("tokenizer*"), *chosen.checkpoint.absolute().iterdir()):
            target = Path(folder, path.name)
            target.unlink(missing_ok=True)
            target.symlink_to(path)
        chosen.checkpoint = folder
        for name in chosen.only:
            globals()[name](chosen)
