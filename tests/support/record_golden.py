"""Records the results of small fixed models and of the kernels in tests/native/golden.json, for each instruction set.

    python tests/support/record_golden.py [ISA ...]   add or replace instruction sets (default: all of this machine)

tests/native/test_golden.py compares with this file. Record again only in a commit that is meant to change bits, and say
so in its message.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parents[1] / "native" / "golden.json"
TOKENS = 6
WORLDS = (1, 2)
VOCAB = 16_500
_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
          "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 256,
          "rms_norm_eps": 1e-6, "eos_token_id": 2, "bos_token_id": 1, "hidden_act": "silu",
          "tie_word_embeddings": True, "torch_dtype": "float32"}
MODELS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6},
    "qwen2-yarn": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "head_dim": 16,
                   "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "llama-dynamic": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 1e4,
                      "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 100},
}


def write_model(name: str, directory: Path) -> Path:
    """Writes a checkpoint of fixed weights, which do not depend on the version of any library."""
    from allspark_server.runtime.sampler_digest import fixed_values
    from allspark_server.weights.safetensors import write_safetensors

    config = {**_SIZES, **MODELS[name]}
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for part, rows, columns in (("q", heads, hidden), ("k", kv_heads, hidden), ("v", kv_heads, hidden),
                                    ("o", hidden, heads)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, columns)
            if config["model_type"] == "qwen2" and part != "o":
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        shapes |= {f"{prefix}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}.{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}

    def values(seed: int, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        found = fixed_values(shape, seed)
        if "norm" in tensor:
            return np.float32(1) + found * np.float32(0.25)
        return found * np.float32(0.2 if "embed" in tensor else 0.5 if len(shape) == 1 else 2.5 / math.sqrt(shape[1]))

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", [(tensor, "F32", shape) for tensor, shape in shapes.items()],
                      {"format": "pt"}, ([values(i, *item)] for i, item in enumerate(shapes.items())))
    return directory


def run_case(directory: Path, world: int, fields: dict) -> str:
    """Ids of a greedy and a sampled sequence, and a digest of their logprob bits."""
    from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
    from support.driver import Driver

    prompts = [[(11 * i + 5) % VOCAB for i in range(133)], [(977 * i + 7) % VOCAB for i in range(40)]]
    draws = [SamplingParams(do_sample=False, logprobs=True, top_logprobs=3, prompt_len=133),
             SamplingParams(seed=2**40 + 5, temperature=1.5, logprobs=True, repetition_penalty=1.1, prompt_len=40)]
    digest, ids = hashlib.sha256(), [[], []]
    with Driver(directory, world, engine_max_length=256, cache_memory=4 << 20, **fields) as driver:
        size = driver.info.span_size
        spans = [list(range(-(-(len(p) + TOKENS) // size))) for p in prompts]
        spans[1] = [len(spans[0]) + s for s in spans[1]]
        plan = StepPlan(new=[NewSlot(i, p, draws[i].encode()) for i, p in enumerate(prompts)],
                        work=[WorkItem(i, len(p), SAMPLE, spans=spans[i]) for i, p in enumerate(prompts)])
        for _ in range(TOKENS):
            data = plan.encode()
            result = driver._each(lambda runner: runner.step(data))[0]
            for i in range(2):
                ids[i].append(int(result.tokens[i]))
            for array in (result.logprobs, result.top_ids, result.top_logprobs):
                digest.update(np.ascontiguousarray(array).tobytes())
            plan = StepPlan(work=[WorkItem(i, 1, SAMPLE) for i in range(2)])
    return " ".join([",".join(map(str, ids[0])), ",".join(map(str, ids[1])), digest.hexdigest()[:16]])


def cases() -> dict[str, tuple[str, int, dict]]:
    """Cases by name: model, ranks, configuration."""
    from allspark_client.types import AsCacheMode
    from allspark_server.runtime.digest import WEIGHTS

    caches = {"float32": {"cache_dtype": "float32"}, "bfloat16": {"cache_dtype": "bfloat16"},
              "int8": {"cache_mode": AsCacheMode.AsCacheQuantI8}, "uint4": {"cache_mode": AsCacheMode.AsCacheQuantU4}}
    found = {f"qwen3 {weights} {cache} {world}":
             ("qwen3", world, {"weight_dtype": weights, "weight_group_size": group, **fields})
             for weights, group in WEIGHTS for cache, fields in caches.items() for world in WORLDS}
    found |= {f"{model} bfloat16 bfloat16 {world}": (model, world, {"weight_dtype": "bfloat16", **caches["bfloat16"]})
              for model in MODELS if model != "qwen3" for world in WORLDS}
    return found


def run_all() -> dict[str, str]:
    """Runs every case on the instruction set in use."""
    from allspark_server.runtime.digest import result_digests

    with tempfile.TemporaryDirectory() as folder:
        directories = {model: write_model(model, Path(folder) / model) for model in MODELS}
        found = {name: run_case(directories[model], world, fields) for name, (model, world, fields) in cases().items()}
    return {**{f"kernels {name}": digest for name, digest in result_digests().items()}, **found}


def record(level: str, found: dict[str, str]) -> None:
    levels = json.loads(FILE.read_text()) if FILE.exists() else {}
    levels[level] = found
    FILE.write_text(json.dumps(dict(sorted(levels.items())), indent=1) + "\n")


def run_level(level: str) -> dict[str, str]:
    """Runs every case on an instruction set, in a separate process."""
    done = subprocess.run([sys.executable, __file__, "--print"], env={**os.environ, "ALLSPARK_ISA": level}, text=True,
                          capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{level}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(run_all()))
        return
    from allspark_server import _native

    for level in sys.argv[1:] or _native.isas():
        record(level, run_level(level))
        print(f"{level}: recorded in {FILE}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
