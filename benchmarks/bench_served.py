"""Measures a model of a real shape with random weights as it is served over HTTP: output tokens/s, first tokens, gaps.

    bench_served.py [7b|llama-70b|gemma-4-31b|gpt-oss-20b|gpt-oss-120b] [--compute-unit CUDA:0,1] [--layers N]
                    [--weight-dtype auto]
                    [--prompt 512] [--tokens 256] [--clients 1,32,256] [--modes greedy,sampled,logprobs,schema]
                    [--rounds 2] [--workers 4] [--fields '{"cache_memory": …}'] [--folder /dev/shm]
                    [--timeline kernel_trace.so] [--record-after 4,1]

The checkpoint has the model's shape, or fewer layers of it, and a tokenizer made up for its vocabulary. A group and
HTTP workers serve it. Clients stream in a closed loop from processes of their own: each sends its next request when the
one before has ended, `--rounds` in all. Prompts are random ids; no prefix cache; ends of text are ignored. (One
process, as in `allspark bench serving`, cannot read as many tokens as two GPUs make.)

sampled: temperature 0.7, top_p 0.9. logprobs: 5 of each token. schema: an array of integers.

--timeline records half a second of the GPUs' kernels in each load and prints steps by kind (timeline.py;
cuda/kernel_trace.cpp says how its library is built). --record-after: seconds from the clients' first request to the
recording, one for each number of clients; the last serves for the rest. A single client sends --rounds requests then,
too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench_gpt_oss
import timeline

from allspark_launch.group.background import background_group
from allspark_launch.group.http_server import HttpOptions, http_server

PROCESSES = 4   # of clients
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
MODES = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.7, "top_p": 0.9},
         "logprobs": {"temperature": 0, "logprobs": 5},
         "schema": {"temperature": 0, "structured_outputs": {"json": SCHEMA}}}
COMMON = {"torch_dtype": "bfloat16", "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6}
SHAPES = {
    "7b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
           "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False},
    "llama-70b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
                  "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
                  "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072,
                  "rope_theta": 5e5, "tie_word_embeddings": False},
    "gemma-4-31b": {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 5376,
                    "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
                    "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
                    "intermediate_size": 21504, "vocab_size": 262144, "sliding_window": 1024,
                    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144,
                    "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                    "tie_word_embeddings": True}}
GPT_OSS = {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)}   # layers, experts; in MXFP4


def vocab_of(shape: str) -> int:
    """Tokens of a shape's vocabulary."""
    return bench_gpt_oss.VOCAB if shape in GPT_OSS else int(SHAPES[shape]["vocab_size"])


def write_checkpoint(folder: Path, shape: str, layers: int) -> int:
    """Writes config, tokenizer and random tensors in bfloat16 or MXFP4; returns their bytes."""
    _write_tokenizer(folder, vocab_of(shape))
    if shape in GPT_OSS:
        return bench_gpt_oss.write_checkpoint(folder, layers or GPT_OSS[shape][0], GPT_OSS[shape][1])
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    config = SHAPES[shape] | COMMON | {"num_hidden_layers": layers or SHAPES[shape]["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = AutoConfig.from_pretrained(folder)
    found.save_pretrained(folder)   # with the fields that its class derives
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"architectures": config["architectures"]}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    tensors = {name: ("BF16", tuple(value.shape)) for name, value in model.state_dict().items() if name not in tied}
    return bench_gpt_oss.write_tensors(folder / "model.safetensors", tensors)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Tokens of one byte, and words that no text has."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]   # the table of byte-level BPE (GPT-2)
    hidden = iter(range(256, 1000))
    names = ["<s>", "<pad>", "</s>"] + [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
    names += [f"ð{number}" for number in range(len(names), vocab)]
    special = [{"id": i, "content": names[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False} for i in range(3)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": special, "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"}))


def nothing() -> None:
    """What is called before a load that is not recorded."""


# -- clients -----------------------------------------------------------------------------------------------------------
async def stream(address: str, body: dict, found: dict) -> None:
    """One request: adds its times to `found`."""
    host, _, port = address.rpartition(":")
    data = json.dumps(body).encode()
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                 + str(len(data)).encode() + b"\r\n\r\n" + data)
    first = True
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                raise RuntimeError((line + await reader.read(4000)).decode())
            continue
        if line.startswith(b"data: [DONE]"):
            break
        now = time.perf_counter()
        if b'"usage":{' in line:
            found["tokens"] += json.loads(line[6:])["usage"]["completion_tokens"]
        elif first:
            first = False
            found["firsts"].append(now - began)
        else:
            found["gaps"].append(now - last)
        last = now
    writer.close()


async def clients(given: dict) -> dict:
    """So many clients in a closed loop; what they met, and when they began and ended (the clock is the machine's)."""
    found: dict = {"tokens": 0, "firsts": [], "gaps": [], "began": time.perf_counter()}
    rng = random.Random(given["seed"])

    async def client() -> None:
        for _ in range(given["rounds"]):
            body = {"model": "m", "prompt": [rng.randrange(300, given["vocab"]) for _ in range(given["prompt"])],
                    "max_tokens": given["tokens"], "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}, **MODES[given["mode"]]}
            await stream(given["address"], body, found)
    await asyncio.gather(*(client() for _ in range(given["clients"])))
    return found | {"ended": time.perf_counter()}


def load(address: str, mode: str, count: int, options: argparse.Namespace, vocab: int,
         begin: Callable[[], object] = nothing) -> str:
    """Runs all clients, after calling `begin`; a line with the figures."""
    shares = [count // PROCESSES + (i < count % PROCESSES) for i in range(PROCESSES)]
    given = {"address": address, "mode": mode, "rounds": options.rounds, "prompt": options.prompt,
             "tokens": options.tokens, "vocab": vocab}
    running = [subprocess.Popen([sys.executable, __file__, "--as-clients", json.dumps(given | {"clients": share,
                                                                                              "seed": i})],
                                stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
               for i, share in enumerate(shares) if share]
    for process in running:
        process.stdout.readline()   # it has imported everything
    begin()
    for process in running:
        process.stdin.close()
    parts = [json.loads(process.stdout.read()) for process in running]
    seconds = max(part["ended"] for part in parts) - min(part["began"] for part in parts)
    firsts, gaps = (sorted(value for part in parts for value in part[key]) for key in ("firsts", "gaps"))

    def part(values: list[float], q: float) -> float:
        return 1e3 * values[min(int(q * len(values)), len(values) - 1)] if values else 0.0
    tokens = sum(each["tokens"] for each in parts)
    return (f"{mode} x {count}: {tokens / seconds:,.0f} tokens/s, {tokens} in {seconds:.2f} s; first p50 "
            f"{part(firsts, 0.5):.0f} p99 {part(firsts, 0.99):.0f} ms; gaps p50 {part(gaps, 0.5):.2f} p99 "
            f"{part(gaps, 0.99):.1f} longest {part(gaps, 1):.0f} ms")


def main() -> None:
    """Reads the command line, serves, and prints a line for each mode and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=[*SHAPES, *GPT_OSS], default="7b")
    parser.add_argument("--compute-unit", default="CUDA:0")
    parser.add_argument("--layers", type=int, default=0, help="default: the model's")
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--clients", default="1,32,256")
    parser.add_argument("--modes", default="greedy,sampled,logprobs,schema")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a client (a single one: one)")
    parser.add_argument("--workers", type=int, default=4, help="of the HTTP server")
    parser.add_argument("--fields", type=json.loads, default={}, help="more fields of the model's configuration")
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--timeline", type=Path, help="the recorder's library")
    parser.add_argument("--record-after", type=lambda text: [float(part) for part in text.split(",")], default=[4.0])
    parser.add_argument("--as-clients", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_clients:
        print("ready", flush=True)
        sys.stdin.read()
        print(json.dumps(asyncio.run(clients(options.as_clients))))
        return
    counts = [int(n) for n in options.clients.split(",")]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        size = write_checkpoint(Path(folder), options.shape, options.layers)
        print(f"{options.shape}, {options.layers or 'all'} layers: {size / 1e9:.1f} GB, written in "
              f"{time.perf_counter() - began:.0f} s", flush=True)
        fields = {"model_name": "m", "model_path": folder, "weight_dtype": options.weight_dtype,
                  "engine_max_batch": min(max(counts), 512), "enable_prefix_cache": False,
                  "engine_max_length": options.prompt + options.tokens + 64, **options.fields}
        file = Path(folder) / "group.json"
        group: dict = {"models": [fields]}
        kind, _, ids = options.compute_unit.partition(":")
        if kind == "CUDA":
            group["gpus"] = [int(number) for number in ids.split(",")]
        file.write_text(json.dumps(group))
        if options.timeline:
            timeline.enable(options.timeline, Path(folder))
        began = time.perf_counter()
        with (background_group(["--config", str(file)], verbose=True) as running,
              http_server(HttpOptions(address="127.0.0.1:0", workers=options.workers, insecure=True,
                                      pool=list(running.addresses))) as served):
            vocab = vocab_of(options.shape)
            load(served.address, "greedy", 8, argparse.Namespace(rounds=1, prompt=16, tokens=8), vocab)
            print(f"ready and warm after {time.perf_counter() - began:.1f} s", flush=True)
            for number, count in enumerate(counts):
                own = argparse.Namespace(**vars(options))
                own.rounds = options.rounds if count > 1 or options.timeline else 1
                after = options.record_after[min(number, len(options.record_after) - 1)]
                for mode in options.modes.split(","):
                    name = f"{mode}-{count}"
                    begin = partial(timeline.record_after, Path(folder), name, after) if options.timeline else nothing
                    print(load(served.address, mode, count, own, vocab, begin), flush=True)
                    if options.timeline:
                        print("\n".join(timeline.report(Path(folder), name)), flush=True)


if __name__ == "__main__":
    main()
