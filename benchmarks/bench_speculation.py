"""Measures the speedup of speculative decoding at batch 1. Both are measured in turn.

    bench_speculation.py FOLDER [--threads 2] [--formats bfloat16 w8a8] [--tokens 256] [--rounds 3]
    bench_speculation.py FOLDER --unit CUDA:0 --only head --shape 5b

Writes checkpoints of Qwen2.5-0.5B's shape into FOLDER unless they exist, with --shape 5b a larger one with a head:

    successor   layers that add zero (`o` and `down` are zero), and an untied head that maps each token to its
                successor; so the answer is known, and a prompt can contain any share of its pairs of consecutive tokens
    large       24 layers, of which 1 to 4 are random and the others add zero
    draft       layers 1 to 4 of `large`, which predict the same tokens
    head-SHAPE-N  `successor` with dense layers of GLM-4.5 and a draft head that is right after N % of the tokens

Prompt lookup is measured with 80 % of the answer's pairs of consecutive tokens in the prompt, and with none.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import numpy as np

from allspark_client.config import AsModelConfig
from allspark_server import Engine
from allspark_server.weights.asgraph import from_float32
from allspark_server.weights.safetensors import write_safetensors

VOCAB, HIDDEN, INNER, LAYERS, KEPT = 151936, 896, 4864, 24, 4
#: of head-N: hidden size, intermediate size, layers, query heads, KV heads, their size
SHAPES = {"0.5b": (896, 4864, 24, 14, 2, 64), "5b": (4096, 12288, 24, 32, 8, 128)}
RUN, GAP = 20, 5  # lengths of alternate parts of the answer: in the prompt, not in the prompt


def successor(token: int) -> int:
    """A permutation of the vocabulary without short cycles."""
    return (token * 5 + 12347) % VOCAB


def write_with_head(folder: Path, right: int, shape: str) -> None:
    """Writes the checkpoint head-N, N = right."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, dense, layers, heads, kv_heads, head_dim = SHAPES[shape]
    inner = dense // 4  # of an expert; two of eight are chosen, and two are shared
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", hidden_size=hidden, intermediate_size=dense,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        vocab_size=VOCAB,
        max_position_embeddings=32768, rms_norm_eps=1e-6, eos_token_id=VOCAB - 1, rope_theta=1e6, hidden_act="silu",
        first_k_dense_replace=layers, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=inner,
        n_shared_experts=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        tie_word_embeddings=False, torch_dtype="bfloat16")))
    rng = np.random.default_rng(0)
    names, data = [], []

    def add(name: str, values: np.ndarray) -> None:
        names.append((name, "BF16", values.shape))
        data.append([from_float32(np.ascontiguousarray(values, np.float32), "BF16")])

    @functools.cache
    def made(zero: bool, *shape: int) -> list:
        """Weights of a layer, which adds nothing: those of a shape may be equal."""
        values = np.zeros(shape) if zero else rng.standard_normal(shape, np.float32) * 0.02
        return [from_float32(np.ascontiguousarray(values, np.float32), "BF16")]

    embedding = rng.standard_normal((VOCAB, hidden), np.float32) * 0.02
    output, order = np.empty_like(embedding), np.array([successor(t) for t in range(VOCAB)])
    output[order] = embedding
    add("model.embed_tokens.weight", embedding)
    add("lm_head.weight", output)
    add("model.norm.weight", np.ones(hidden))
    wrong = np.flatnonzero(rng.random(VOCAB) >= right / 100)  # the head predicts another token after these
    output[order[wrong]] = embedding[np.roll(wrong, 1)]
    own = f"model.layers.{layers}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        add(f"{own}{name}.weight", np.ones(hidden))
    add(own + "eh_proj.weight", np.eye(hidden, 2 * hidden))
    add(own + "shared_head.head.weight", output)
    add(own + "mlp.gate.weight", rng.standard_normal((8, hidden), np.float32) * 0.02)
    add(own + "mlp.gate.e_score_correction_bias", np.zeros(8))
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        add(prefix + "input_layernorm.weight", np.ones(hidden))
        add(prefix + "post_attention_layernorm.weight", np.ones(hidden))
        queries, keys = heads * head_dim, kv_heads * head_dim
        shapes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
                  "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
        parts = [(".", dense)] if layer < layers else [
            (".shared_experts.", 2 * inner), *((f".experts.{e}.", inner) for e in range(8))]
        for part, size in parts:
            shapes |= {f"mlp{part}gate_proj": (size, hidden), f"mlp{part}up_proj": (size, hidden),
                       f"mlp{part}down_proj": (hidden, size)}
        for name, size in shapes.items():
            zero = name.endswith(("o_proj", "down_proj"))
            names.append((f"{prefix}{name}.weight", "BF16", size))
            data.append(made(zero, *size))
    write_safetensors(folder / "model.safetensors", names, {"format": "pt"}, data)


def write(folder: Path, layers: int, head: bool, zero_from: int) -> None:
    """Writes a checkpoint whose layers from `zero_from` on add zero. `head`: untied, and maps tokens to successors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=HIDDEN, intermediate_size=INNER,
                  num_hidden_layers=layers, num_attention_heads=14, num_key_value_heads=2, vocab_size=VOCAB,
                  max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-6, eos_token_id=VOCAB - 1,
                  tie_word_embeddings=not head, torch_dtype="bfloat16", hidden_act="silu")
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    names, data = [], []

    def add(name: str, values: np.ndarray) -> None:
        names.append((name, "BF16", values.shape))
        data.append([from_float32(np.ascontiguousarray(values, np.float32), "BF16")])

    embedding = rng.standard_normal((VOCAB, HIDDEN), np.float32)
    add("model.embed_tokens.weight", embedding * 0.02)
    if head:
        rows = np.empty_like(embedding)
        rows[[successor(t) for t in range(VOCAB)]] = embedding
        add("lm_head.weight", rows * 0.02)
    add("model.norm.weight", np.ones(HIDDEN))
    shapes = {"self_attn.q_proj": (896, HIDDEN), "self_attn.k_proj": (128, HIDDEN), "self_attn.v_proj": (128, HIDDEN),
              "self_attn.o_proj": (HIDDEN, 896), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
              "mlp.down_proj": (HIDDEN, INNER)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        add(prefix + "input_layernorm.weight", np.ones(HIDDEN))
        add(prefix + "post_attention_layernorm.weight", np.ones(HIDDEN))
        for name, shape in shapes.items():
            values = rng.standard_normal(shape, np.float32) * 0.02
            adds = name in ("self_attn.o_proj", "mlp.down_proj") and layer >= zero_from
            add(prefix + name + ".weight", np.zeros(shape) if adds else values)
            if name[-6] in "qkv" and name.startswith("self_attn"):
                add(prefix + name + ".bias", np.zeros(shape[0]))
    write_safetensors(folder / "model.safetensors", names, {"format": "pt"}, data)


def prompts(tokens: int) -> dict[str, list[int]]:
    """Prompts for the successor model, each ending with the token before the answer."""
    rng = np.random.default_rng(1)
    start, orbit = 4711, [4711]
    for _ in range(tokens):
        orbit.append(successor(orbit[-1]))
    known: list[int] = []
    for begin in range(0, tokens, RUN + GAP):
        known += orbit[begin : begin + RUN + 1] + [int(rng.integers(VOCAB))]
    random = rng.choice(VOCAB, len(known), replace=False).tolist()
    return {"80 % of the transitions in the prompt": [*known, start], "none": [*random, start]}


class Served:
    """A model in an engine, and its speed."""

    def __init__(self, folder: Path, dtype: str, threads: int, speculation: str, draft: str = "", unit: str = "CPU:0"):
        self.engine = Engine()
        self.engine.install_model(AsModelConfig(
            "m", str(folder), weight_dtype=dtype, num_threads=threads, engine_max_batch=1, engine_max_length=2048,
            speculation=speculation, draft_model=draft, enable_prefix_cache=False, cache_memory=1 << 30,
            compute_unit=unit))
        self.engine.start_model("m")

    def answer(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """The answer, and its tokens/s after the first token."""
        config = {"do_sample": False, "max_new_tokens": tokens, "early_stopping": False}
        _, handle, queue = self.engine.start_request("m", {"input_ids": prompt}, config)
        ids = list(queue.Get().ids_from_generate)
        began, first = time.perf_counter(), len(ids)
        while (more := queue.Get()) is not None:
            ids += more.ids_from_generate
        rate = (len(ids) - first) / (time.perf_counter() - began)
        self.engine.release_request("m", handle)
        return ids, rate


def compare(name: str, plain: Served, other: Served, prompt: list[int], tokens: int, rounds: int) -> dict:
    """Runs both in turn; their answers must be equal."""
    rates: list[tuple[float, float]] = []
    for _ in range(rounds + 1):  # the first round warms up
        (ids, without), (same, speculating) = plain.answer(prompt, tokens), other.answer(prompt, tokens)
        assert ids == same, "speculation changed the answer"
        rates.append((without, speculating))
    without, speculating = (statistics.median(column) for column in zip(*rates[1:]))
    ratio = statistics.median(b / a for a, b in rates[1:])
    print(f"{name:<60} {without:8.1f} {speculating:8.1f} {ratio:7.3f}", flush=True)
    return {"name": name, "without": without, "speculating": speculating, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "w8a8"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("lookup", "draft", "head"))
    parser.add_argument("--right", type=int, nargs="+", default=[100, 80, 0], help="of the tokens, in percent")
    parser.add_argument("--unit", default="CPU:0", help="compute_unit: CPU:0, CUDA:0 or CUDA:0,1")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b", help="of the checkpoints with a head")
    options = parser.parse_args()
    served = functools.partial(Served, unit=options.unit)
    for name, layers, head, zero_from in (("successor", LAYERS, True, 0), ("large", LAYERS, False, KEPT),
                                          ("draft", KEPT, False, KEPT)):
        if options.only != "head" and not (options.folder / name / "model.safetensors").exists():
            write(options.folder / name, layers, head, zero_from)
    print(f"{'tokens/s at batch 1':<60} {'without':>8} {'with':>8} {'ratio':>7}")
    for dtype in options.formats:
        for right in options.right if options.only in (None, "head") else ():
            folder = options.folder / f"head-{options.shape}-{right}"
            if not (folder / "model.safetensors").exists():
                write_with_head(folder, right, options.shape)
            plain, other = (served(folder, dtype, options.threads, how) for how in ("off", "mtp"))
            compare(f"{dtype}, head that is right after {right} %", plain, other, prompts(64)["none"], options.tokens,
                    options.rounds)
            plain.engine.close()
            other.engine.close()
        if options.only in (None, "lookup"):
            plain = served(options.folder / "successor", dtype, options.threads, "off")
            other = served(options.folder / "successor", dtype, options.threads, "prompt_lookup")
            for name, prompt in prompts(options.tokens).items():
                compare(f"{dtype}, prompt lookup, {name}", plain, other, prompt, options.tokens, options.rounds)
            plain.engine.close()
            other.engine.close()
        if options.only in (None, "draft"):
            large, draft = options.folder / "large", str(options.folder / "draft")
            plain = served(large, dtype, options.threads, "off")
            other = served(large, dtype, options.threads, "draft", draft)
            compare(f"{dtype}, draft of {KEPT} of {LAYERS} layers", plain, other, prompts(64)["none"], options.tokens,
                    options.rounds)
            plain.engine.close()
            other.engine.close()


if __name__ == "__main__":
    main()
