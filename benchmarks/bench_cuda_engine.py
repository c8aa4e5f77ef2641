"""Compares the speed of served requests on a GPU with that of the native steps that they consist of.

`python bench_cuda_engine.py [0.5b|7b] [draws=1,32,256] [engine=1,32] [sampled=1,32] [format=int4:64]`

draws: a step of that many rows with several kinds of sampling against greedy; native steps (bench_cuda.py),
interleaved. engine, sampled: tokens/s of that many requests through Engine, greedy or with top_p, on a random
checkpoint of the same shape, against native steps; start-up time, and time to the first token. format: type of weights
with a group size.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_cuda import SHAPES, SPAN, Model, format_of

from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

# The benchmark's logits are nearly flat: at temperature 1 a nucleus holds most of the vocabulary, at 0.05 few tokens.
WAYS = {
    "top_p 0.9, few": dict(top_p=0.9, temperature=0.05),
    "top_p 0.9, most": dict(top_p=0.9),
    "top_k 50": dict(top_k=50),
    "no filter": dict(),
    "penalties": dict(top_p=0.9, temperature=0.05, repetition_penalty=1.1, presence_penalty=0.5),
    "logprobs 5": dict(top_p=0.9, temperature=0.05, logprobs=True, top_logprobs=5),
}
PROMPT, TOKENS, SKIPPED = 128, 400, 40
ONE = 0, 1, "", "bfloat16", "bfloat16"  # rank, of bfloat16 (bench_cuda.Model)


class Sampled(Model):
    """The same steps with any sampling parameters."""

    way: dict = {}

    def begin(self, slots: int, length: int, way: dict) -> None:
        new, work = [], []
        for s in range(slots):
            block = SamplingParams(**{"do_sample": True, **way}, seed=s, prompt_len=length - 1).encode()
            new.append(NewSlot(s, [(7 * i + s) % 1000 for i in range(length)], block, length // SPAN * SPAN))
            work.append(WorkItem(s, length - length // SPAN * SPAN, SAMPLE,
                                 spans=list(range(s * self.spans, (s + 1) * self.spans))))
        self.e.step(StepPlan(new=new, work=work).encode())

    def steps(self, slots: int, count: int) -> float:
        plan, seconds = StepPlan(work=[WorkItem(s, 1, SAMPLE) for s in range(slots)]).encode(), []
        for _ in range(count):
            began = time.perf_counter()
            self.e.step(plan)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[3:])


def draws(name: str, batches: list[int]) -> None:
    model = Sampled(name, 2048, max(batches), 512, *ONE)
    for batch in batches:
        found: dict[str, list[float]] = {}
        for _ in range(3):
            for way, fields in {"greedy": dict(do_sample=False), **WAYS}.items():
                model.begin(batch, 129, fields)
                found.setdefault(way, []).append(model.steps(batch, 16))
                model.free(batch)
        greedy = min(found["greedy"])
        print(f"{name}, {batch} rows: greedy {1e3 * greedy:.3f} ms; " + "; ".join(
            f"{way} {100 * (min(seconds) / greedy - 1):+.1f} %" for way, seconds in found.items() if way != "greedy"),
            flush=True)


def write_checkpoint(directory: Path, name: str) -> None:
    """Writes random weights of a shape in Qwen2's format."""
    hidden, layers, heads, kv, dim, inner, vocab = SHAPES[name]
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
              "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
              "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    sizes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden),
             "model.norm.weight": (hidden,)}
    for layer in range(layers):
        for part, size in {
                "self_attn.q_proj.weight": (heads * dim, hidden), "self_attn.q_proj.bias": (heads * dim,),
                "self_attn.k_proj.weight": (kv * dim, hidden), "self_attn.k_proj.bias": (kv * dim,),
                "self_attn.v_proj.weight": (kv * dim, hidden), "self_attn.v_proj.bias": (kv * dim,),
                "self_attn.o_proj.weight": (hidden, heads * dim), "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner),
                "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}.items():
            sizes[f"model.layers.{layer}.{part}"] = size
    header, at = {}, 0
    for tensor, size in sizes.items():
        bytes_ = 2 * int(np.prod(size))
        header[tensor] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, at + bytes_]}
        at += bytes_
    text = json.dumps(header).encode()
    noise = (np.random.default_rng(0).normal(size=1 << 22) * 0.02).astype(np.float32).view(np.uint32) >> 16
    noise = noise.astype(np.uint16)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, (tensor, size) in enumerate(sizes.items()):
            count = int(np.prod(size))
            if tensor.endswith("norm.weight"):
                file.write(np.full(count, 0x3F80, np.uint16).tobytes())
                continue
            first = (i * 1234567) % len(noise)
            while count:
                piece = noise[first:first + count]
                file.write(piece.tobytes())
                count, first = count - len(piece), 0


def engine(name: str, asked: list[tuple[int, dict]], form: str) -> None:
    from allspark_client import AsModelConfig
    from allspark_server import Engine

    rates, (dtype, group) = [], format_of(form)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), name)
        found, began = Engine(), time.perf_counter()
        found.install_model(AsModelConfig(
            model_name="m", model_path=folder, compute_unit="CUDA:0", engine_max_length=PROMPT + TOKENS + 16,
            weight_dtype=dtype, weight_group_size=group,
            engine_max_batch=max(batch for batch, _ in asked), cache_memory=8 << 30))
        found.start_model("m")
        print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        for batch, fields in [(1, {"do_sample": False, "max_new_tokens": 1}), *asked]:
            config = {"max_new_tokens": TOKENS, "eos_token_id": -1, **fields}
            began = time.perf_counter()
            queues = [found.start_request("m", {"input_ids": [(7 * i + s) % 1000 for i in range(PROMPT)]}, config)[2]
                      for s in range(batch)]
            count, since, first = 0, 0.0, 0.0
            for i, queue in enumerate(queues):
                for elements in queue:
                    if i:
                        continue
                    count += len(elements.ids_from_generate)
                    now = time.perf_counter()
                    first = first or now - began
                    if count >= SKIPPED and not since:
                        since, skipped = now, count
                    last = now
            if config["max_new_tokens"] == 1:
                print(f"first token of all after {1e3 * first:.0f} ms", flush=True)
                continue
            rates.append(batch * (count - skipped) / (last - since))
            print(f"engine, {batch} of {fields}: {rates[-1]:,.0f} tokens/s, first token after {1e3 * first:.1f} ms",
                  flush=True)
        found.close()
    model = Sampled(name, 2048, max(batch for batch, _ in asked), PROMPT + TOKENS + 16, *ONE[:3], form, ONE[4])
    for (batch, fields), rate in zip(asked, rates):
        model.begin(batch, PROMPT + TOKENS // 2, fields)
        native = batch / model.steps(batch, 60)
        model.free(batch)
        print(f"{batch} of {fields}: native {native:,.0f} tokens/s, engine {rate / native:.3f} of it", flush=True)


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments and arguments[0] in SHAPES else "0.5b"
    given = dict(a.split("=") for a in arguments if "=" in a)
    form = given.pop("format", "bfloat16")
    lists = {key: [int(n) for n in value.split(",")] for key, value in given.items()}
    if "draws" in lists:
        draws(name, lists["draws"])
    asked = [(batch, {"do_sample": False}) for batch in lists.get("engine", [])]
    asked += [(batch, {"do_sample": True, "top_k": 0, "top_p": 0.9, "temperature": 0.05, "seed": 1})
              for batch in lists.get("sampled", [])]
    if asked:
        engine(name, asked, form)


if __name__ == "__main__":
    main(sys.argv[1:])
