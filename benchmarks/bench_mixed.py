"""Measures a served mixed group: routed experts on CPUs, the rest of the model on GPUs (or on CPUs).

    bench_mixed.py [gpt-oss-120b|30b-a3b] [--layers 12] [--gpus 0] [--threads 14] [--weight-dtype auto]
                   [--requests 1,4,16] [--prompts 2048,8192] [--streaming 0,-1] [--step-tokens 0] [--skew 0]
                   [--hot 0] [--expert-ranks 0] [--tokens 200] [--profile] [--folder /dev/shm]

The checkpoint has the model's shape with fewer layers, and random weights. `allspark serve --experts-on cpu` serves it;
ClientEngine asks.

Decode: so many greedy requests of --tokens tokens that begin together; tokens/s of all from when each has its second
token, the median of three runs. Their ceiling: bytes of the experts that a step's rows choose, if each row chooses
independently, over the bandwidth at which the threads of the experts' ranks read just before each run, since others may
use the machine's memory, too. A whole model's tokens/s are those of its layers at the time that a layer takes here,
with what is not in layers counted once.

Prompts: tokens/s of one request for one token, the median of the last three of six (what ranks compute of a step that
they share follows from their times in those before), beside the ceiling of sending the experts' weights of all layers
but the last, which computes one row, to the GPU over PCIe once for each step of a prompt (of --step-tokens tokens; 0:
the whole longest prompt), at the rate that torch measures from pinned memory. --streaming: values of
expert_streaming_rows, each of which is served and measured: 0: CPUs compute the experts of prompts, -1: the GPU does,
from a number of rows that is chosen. --requests "": no decoding.

--skew 1: the routers of gpt-oss choose experts about by Zipf's law with this exponent, and tokens are sampled. --hot:
gigabytes of hot experts on the GPU for the whole model, of which the measured layers have their part; each is served.
--expert-ranks: how many ranks hold a slice of every expert, which divide the threads evenly (of --threads each, if
that is given); 0: one for each node. Several numbers, such as 1,2,1,2: groups that are served in turn.
--profile: prints the time of each op after decoding and after the last prompts, of both sides, and the last line of
that, both sides of a layer, after decoding with each number of requests; steps take longer then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import bench_gpt_oss
import numpy as np

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group
from allspark_launch.pool.members import Member, Target

SKIPPED, RUNS = 2, 3


@dataclass(frozen=True)
class Shape:
    """A mixture of experts. bits: of an expert's weight, with scales, in the format that is served."""

    layers: int
    hidden: int
    inner: int
    experts: int
    top: int
    weight_dtype: str
    bits: float
    group_size: int = 0

    def layer_bytes(self, rows: int) -> float:
        """Bytes of a layer's experts that a step of so many rows reads."""
        touched = self.experts * (1 - (1 - self.top / self.experts) ** rows)
        return touched * 3 * self.hidden * self.inner * self.bits / 8


SHAPES = {"gpt-oss-120b": Shape(36, 2880, 2880, 128, 4, "auto", 4.25),
          "30b-a3b": Shape(48, 2048, 768, 128, 8, "int4", 4.5, 64)}


def write_qwen3_moe(directory: Path, shape: Shape, layers: int) -> int:
    """Writes a checkpoint in bfloat16; returns its bytes."""
    heads, kv_heads, dim, vocab = 32, 4, 128, 151936
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, shape.hidden),
                                         "lm_head.weight": (vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, size in {"input_layernorm": (shape.hidden,), "post_attention_layernorm": (shape.hidden,),
                           "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
                           "self_attn.q_proj": (heads * dim, shape.hidden),
                           "self_attn.k_proj": (kv_heads * dim, shape.hidden),
                           "self_attn.v_proj": (kv_heads * dim, shape.hidden),
                           "self_attn.o_proj": (shape.hidden, heads * dim),
                           "mlp.gate": (shape.experts, shape.hidden)}.items():
            sizes[f"{prefix}{name}.weight"] = size
        for expert in range(shape.experts):
            for name, size in (("gate_proj", (shape.inner, shape.hidden)), ("up_proj", (shape.inner, shape.hidden)),
                               ("down_proj", (shape.hidden, shape.inner))):
                sizes[f"{prefix}mlp.experts.{expert}.{name}.weight"] = size
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": layers,
        "hidden_size": shape.hidden, "intermediate_size": 6144, "moe_intermediate_size": shape.inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocab,
        "num_experts": shape.experts, "num_experts_per_tok": shape.top, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
        "eos_token_id": 151645, "torch_dtype": "bfloat16"}))
    return bench_gpt_oss.write_tensors(directory / "model.safetensors",
                                       {name: ("BF16", size) for name, size in sizes.items()})


def skew_routers(path: Path, exponent: float) -> None:
    """Changes the biases of a checkpoint's routers, whose logits vary by 0.02 sqrt(width) otherwise, so that the
    experts that are chosen follow Zipf's law, in another order in each layer.
    """
    rng = np.random.default_rng(2)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        for name, entry in json.loads(file.read(size)).items():
            if name.endswith("router.bias"):
                experts, spread = entry["shape"][0], 0.02 * bench_gpt_oss.HIDDEN ** 0.5
                # The largest sums of log(p) and Gumbel variables, whose deviation is pi / sqrt(6), follow p. These are
                # normal variables, with lighter tails: with 0.65, the first 20 and 79 of 128 experts are chosen as
                # often (0.63 and 0.92 of all choices).
                values = -0.65 * exponent * np.log(1 + rng.permutation(experts)) * spread * 6 ** 0.5 / np.pi
                file.seek(8 + size + entry["data_offsets"][0])
                file.write((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())


def expert_uses(address: str) -> str:
    """How many of the chosen experts were on the GPU so far, for people; "" without hot experts."""
    from allspark_client._proto import allspark_pb2 as pb
    with Member(Target("a", address)) as member:
        text = member._call("GetMetrics", pb.MetricsRequest(), pb.Metrics).text
    found = [float(line.split()[-1]) for hot in ("yes", "no") for line in text.splitlines()
             if line.startswith("allspark_rank_expert_uses_total") and f'hot="{hot}"' in line]
    return f", {found[0] / sum(found):.2f} of all chosen experts so far were on the GPU" if found else ""


def asked(engine: ClientEngine, requests: int, prompt: int, tokens: int, rng: np.random.Generator,
          sampled: bool = False) -> list[float]:
    """Seconds from the beginning at which each token of all requests came, in order of requests."""
    config = {"max_new_tokens": tokens, "early_stopping": False, "do_sample": sampled, "seed": 3}
    prompts, came, handles = rng.integers(300, 100000, (requests, prompt)).tolist(), [], []
    began = time.perf_counter()
    for ids in prompts:
        _, handle, queue = engine.start_request("m", {"input_ids": ids}, config)
        handles.append((handle, queue))
    for handle, queue in handles:
        while (elements := queue.Get()) is not None:
            came += [time.perf_counter() - began] * len(elements.ids_from_generate)
        engine.release_request("m", handle)
    return came


def decode(engine: ClientEngine, requests: int, tokens: int, rng: np.random.Generator, sampled: bool) -> float:
    """Seconds of a step, between the second and the last tokens of the first request."""
    came = asked(engine, requests, 32, tokens, rng, sampled)[:tokens]
    return (came[-1] - came[SKIPPED - 1]) / (tokens - SKIPPED)


def read_bandwidth(cpus: list[int]) -> float:
    """Bytes/s at which a thread on each of these CPUs reads, together. Measuring pins the caller: a process of its own
    does it, so that the group may use all CPUs.
    """
    words = ("import sys; from allspark_server import _native; cpus = [int(cpu) for cpu in sys.argv[1:]]; "
             "print(_native.measure_roofline(cpus, len(cpus), 5, 1024)[0])")
    return float(subprocess.run([sys.executable, "-c", words, *map(str, cpus)], check=True, capture_output=True,
                                text=True).stdout)


def copy_bandwidth(gpu: int) -> float:
    """Bytes/s from pinned host memory to a GPU, the best of ten copies of 256 MiB; in a process of its own."""
    words = ("import sys, time, torch; device = f'cuda:{sys.argv[1]}'; "
             "host = torch.zeros(1 << 28, dtype=torch.uint8).pin_memory(); there = host.to(device); best = 9.\n"
             "for _ in range(10):\n"
             " torch.cuda.synchronize(); began = time.perf_counter(); there.copy_(host, non_blocking=True)\n"
             " torch.cuda.synchronize(); best = min(best, time.perf_counter() - began)\n"
             "print(host.numel() / best)")
    return float(subprocess.run([sys.executable, "-c", words, str(gpu)], check=True, capture_output=True,
                                text=True).stdout)


def measured(shape: Shape, given: argparse.Namespace, fields: dict, ranks: int, pcie: float) -> None:
    """Serves a model with these fields, and measures it. ranks: of experts; 0: one for each node."""
    rng = np.random.default_rng(1)
    options: dict = {"models": [fields], "experts_on": "cpu"}
    gpus = [int(gpu) for gpu in given.gpus.split(",") if gpu]
    if gpus:
        options["gpus"] = gpus
    cpus = sorted(os.sched_getaffinity(0))
    threads = given.threads or (max(len(cpus) - 2, ranks) // ranks if ranks else 0)
    if threads:
        options["cpus_per_rank"] = threads
    if ranks:
        options["ranks"] = max(len(gpus), 1) + ranks
    of_experts = cpus[:threads * max(ranks, 1) or max(len(cpus) - 2, 1)]
    file = Path(fields["model_path"]) / "group.json"
    file.write_text(json.dumps(options))
    began = time.perf_counter()
    with (background_group(["--config", str(file)], verbose=True) as group,
          ClientEngine(group.addresses[0]) as engine):
        print(f"{ranks or 'all nodes'} ranks of experts, {len(of_experts)} threads, expert_streaming_rows="
              f"{fields['expert_streaming_rows']}, hot_expert_memory={fields['hot_expert_memory']}: ready after "
              f"{time.perf_counter() - began:.1f} s", flush=True)
        asked(engine, 1, 32, 8, rng)
        if fields["hot_expert_memory"]:     # until experts have moved
            asked(engine, 4, 32, 2 * given.tokens, rng, True)
        for requests in (int(n) for n in given.requests.split(",") if n):
            if given.profile:
                engine.get_op_profiling_info("m")   # waits from now on
            runs = []   # seconds of a step, and bytes/s that were read before
            for _ in range(RUNS):
                bandwidth = read_bandwidth(of_experts)
                runs.append((decode(engine, requests, given.tokens, rng, given.skew > 0), bandwidth))
            step = statistics.median(seconds for seconds, _ in runs)
            size = given.layers * shape.layer_bytes(requests)
            reached = statistics.median(size / seconds / bandwidth for seconds, bandwidth in runs)
            whole = shape.layers / given.layers * step
            print(f"{requests:4d} requests: step {1e3 * step:.2f} ms, {requests / step:.0f} tokens/s, {reached:.2f} of "
                  f"the ceiling ({size / step / 1e9:.0f} GB/s of experts); whole model at most {1e3 * whole:.1f} ms, "
                  f"{requests / whole:.1f} tokens/s; runs: "
                  + ", ".join(f"{1e3 * seconds:.2f} ms at {read / 1e9:.0f} GB/s" for seconds, read in runs)
                  + expert_uses(group.addresses[0]), flush=True)
            if given.profile:
                print(engine.get_op_profiling_info("m").splitlines()[-1], flush=True)
        measure_prompts(engine, shape, given, fields, pcie, rng)


def measure_prompts(engine: ClientEngine, shape: Shape, given: argparse.Namespace, fields: dict, pcie: float,
                    rng: np.random.Generator) -> None:
    if given.profile:
        asked(engine, 1, 32, given.tokens, rng)
        print(engine.get_op_profiling_info("m"), flush=True)
    for length in (int(n) for n in given.prompts.split(",") if n):
        times = [asked(engine, 1, length, 1, rng)[0] for _ in range(6)]
        seconds = statistics.median(times[3:])
        steps = -(-length // fields["max_step_tokens"])
        sent = steps * (given.layers - 1) * shape.layer_bytes(1 << 20) / pcie
        print(f"prompt {length}: {1e3 * seconds:.0f} ms, {length / seconds:.0f} tokens/s, whole model "
              f"{length / seconds * (given.layers - 1) / (shape.layers - 1):.0f}; weights over PCIe {1e3 * sent:.0f} "
              f"ms, {sent / seconds:.2f} of that rate; all six: "
              f"{', '.join(f'{1e3 * each:.0f}' for each in times)} ms", flush=True)
    if given.profile and given.prompts:
        engine.get_op_profiling_info("m")   # from now on
        asked(engine, 1, length, 1, rng)
        print(engine.get_op_profiling_info("m"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--gpus", default="0", help='one rank of the model on each; "": one on CPUs')
    parser.add_argument("--threads", type=int, default=0, help="of each rank (default: the launcher's choice)")
    parser.add_argument("--weight-dtype", default="")
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--prompts", default="2048,8192")
    parser.add_argument("--streaming", default="0,-1")
    parser.add_argument("--step-tokens", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--hot", default="0")
    parser.add_argument("--expert-ranks", default="0")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", default="/dev/shm")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    pcie = copy_bandwidth(int(given.gpus.split(",")[0])) if given.gpus else 50e9
    numbers = [int(n) for n in given.requests.split(",") if n]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        began = time.perf_counter()
        size = (bench_gpt_oss.write_checkpoint(Path(folder), given.layers, shape.experts)
                if shape.weight_dtype == "auto" else write_qwen3_moe(Path(folder), shape, given.layers))
        print(f"{given.shape}, {given.layers} of {shape.layers} layers: {size / 1e9:.1f} GB, written in "
              f"{time.perf_counter() - began:.0f} s; PCIe brings {pcie / 1e9:.1f} GB/s", flush=True)
        lengths = [int(n) for n in given.prompts.split(",") if n]
        fields = {"model_name": "m", "model_path": folder, "weight_dtype": given.weight_dtype or shape.weight_dtype,
                  "weight_group_size": shape.group_size, "engine_max_batch": max(numbers, default=1),
                  "engine_max_length": 9000, "enable_prefix_cache": False, "cache_memory": 4 << 30,
                  "max_step_tokens": given.step_tokens or max(lengths, default=2048)}
        if given.skew:
            skew_routers(Path(folder) / "model.safetensors", given.skew)
        for ranks, streaming, hot in itertools.product(*(values.split(",") for values in (
                given.expert_ranks, given.streaming, given.hot))):
            memory = int(float(hot) * 1e9 * given.layers / shape.layers)
            measured(shape, given, {**fields, "expert_streaming_rows": int(streaming), "hot_expert_memory": memory},
                     int(ranks), pcie)


if __name__ == "__main__":
    main()
