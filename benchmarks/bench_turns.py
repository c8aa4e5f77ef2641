"""Measures the first tokens of an agent's turns: bench_turns.py FOLDER [--tokens 38000] [--layers 4] [--…].

The model has random weights in the shape of Qwen3.5-9B, with few layers and a small vocabulary: three of four layers
have the gated delta rule. A conversation begins with a long prompt; each turn adds 200 tokens, the answer among them.
Times are from the call to the first token, in one process with the engine:

    prompt    the first prompt
    turn      turns whose history is in the cache
    host      the same after all spans have left the cache: they and states come from the host tier
    restart   the same in a new process, from the host cache's file

Reports each turn's time, and the median of each kind as a part of the prompt's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import numpy as np

from allspark_client.config import AsModelConfig
from allspark_server import Engine
from allspark_server.weights.asgraph import from_float32
from allspark_server.weights.safetensors import write_safetensors

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 12288, 16, 4, 256, 8192
KEY_HEADS, VALUE_HEADS, STATE_DIM, TAPS = 16, 32, 128, 4
ADDED, ANSWER = 200, 20     # tokens of a turn, and of these the answer to the turn before
Turn = tuple[str, float, int]   # kind; seconds to the first token; tokens found in the cache


def write(folder: Path, layers: int) -> None:
    """Writes the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        vocab_size=VOCAB, max_position_embeddings=262144, rms_norm_eps=1e-6, eos_token_id=VOCAB - 1, hidden_act="silu",
        linear_num_key_heads=KEY_HEADS, linear_num_value_heads=VALUE_HEADS, linear_key_head_dim=STATE_DIM,
        linear_value_head_dim=STATE_DIM, linear_conv_kernel_dim=TAPS, full_attention_interval=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True, torch_dtype="bfloat16")))
    rng = np.random.default_rng(0)
    keys, values = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM
    delta = {"in_proj_qkv.weight": (2 * keys + values, HIDDEN), "in_proj_z.weight": (values, HIDDEN),
             "in_proj_a.weight": (VALUE_HEADS, HIDDEN), "in_proj_b.weight": (VALUE_HEADS, HIDDEN),
             "conv1d.weight": (2 * keys + values, 1, TAPS), "A_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS,),
             "norm.weight": (STATE_DIM,), "out_proj.weight": (HIDDEN, values)}
    attention = {"q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN), "k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                 "v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN), "o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
                 "q_norm.weight": (HEAD_DIM,), "k_norm.weight": (HEAD_DIM,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        prefix, full = f"model.layers.{layer}.", layer % 4 == 3
        shapes |= {f"{prefix}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}{'self_attn' if full else 'linear_attn'}.{name}": shape
                   for name, shape in (attention if full else delta).items()}
        shapes |= {f"{prefix}mlp.{name}.weight": (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
                   for name in ("gate_proj", "up_proj", "down_proj")}
    made: dict[tuple[int, ...], list] = {}  # matrices of a shape may be equal

    def values_of(name: str, shape: tuple[int, ...]) -> list:
        if len(shape) > 1 and "conv1d" not in name:
            if shape not in made:
                made[shape] = [from_float32(rng.standard_normal(shape, np.float32) * HIDDEN**-0.5, "BF16")]
            return made[shape]
        mean = 1.0 if name.endswith("linear_attn.norm.weight") else -2.0 if name.endswith("A_log") else 0.0
        return [from_float32(np.float32(mean) + 0.2 * rng.standard_normal(shape, np.float32), "BF16")]

    write_safetensors(folder / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()],
                      {"format": "pt"}, [values_of(name, shape) for name, shape in shapes.items()])


class Conversation:
    """A conversation with a model of an engine."""

    def __init__(self, engine: Engine, name: str, history: list[int]):
        self.engine, self.name, self.history = engine, name, list(history)

    def turn(self, kind: str, added: list[int]) -> Turn:
        """Adds tokens to the history, and the answer."""
        self.history += added
        began, before = time.perf_counter(), self._hits()
        _, handle, queue = self.engine.start_request(self.name, {"input_ids": self.history}, {
            "max_new_tokens": ANSWER, "eos_token_id": -1, "do_sample": False})
        seconds = 0.0
        for part in queue:
            if part.ids_from_generate and not seconds:
                seconds = time.perf_counter() - began
            self.history += part.ids_from_generate
        self.engine.release_request(self.name, handle)
        return kind, seconds, self._hits() - before

    def _hits(self) -> int:
        return self.engine.get_as_engine_stat(self.name).prefix_cache_hit_token


def tokens_of(seed: int, count: int) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, VOCAB - 1, count).tolist()


def run(options: argparse.Namespace, history: list[int], results: multiprocessing.Queue) -> None:
    """One process: turns of a new conversation, or, with a history, of one from a process before."""
    engine = Engine()
    spans, name = -(-(options.tokens + ADDED * (options.turns + 8)) // options.span), "turns"
    fields = {"weight_dtype": options.weights, "num_threads": options.threads, "engine_max_batch": 2,
              "engine_max_length": spans * options.span, "cache_span_size": options.span, "enable_prefix_cache": True,
              "host_cache_dir": options.host, "host_cache_memory": options.host_memory << 20,
              "compute_unit": options.compute_unit}
    engine.install_model(AsModelConfig(name, str(options.model), cache_memory=options.cache_memory << 20, **fields))
    engine.start_model(name)
    info = engine.get_model_info(name)
    print(f"{info.num_spans} spans of {info.span_size} tokens and {info.cache_bytes / info.num_spans / 1024:.0f} KiB, "
          f"{info.state_spans} a state, {info.host_spans} in the host tier; {info.isa}, {info.weight_dtype}, "
          f"cache in {info.cache_dtype}", flush=True)
    turns: list[Turn] = []

    def note(conversation: Conversation, kind: str, added: list[int]) -> None:
        turns.append(conversation.turn(kind, added))
        print("{}: {:.3f} s, {} tokens found".format(*turns[-1]), flush=True)

    chat = Conversation(engine, name, history)
    if history:
        for turn in range(options.turns):   # the first one's spans are in the file, the others' in the cache
            note(chat, "turn" if turn else "restart", tokens_of(1000 + turn, ADDED - ANSWER))
    else:
        note(chat, "prompt", tokens_of(0, options.tokens))
        for turn in range(options.turns):
            note(chat, "turn", tokens_of(1 + turn, ADDED - ANSWER))
        # As if others had taken the cache: its spans go to the host tier, in the steps of another prompt.
        model = engine._models[name]
        engine._thread.call(lambda: model.scheduler.prefix_cache._pool.evict_older_than(float("inf")))
        note(Conversation(engine, name, []), "other", tokens_of(500, 500))
        note(chat, "host", tokens_of(501, ADDED - ANSWER))
    results.put((turns, chat.history))
    engine.release_model(name)
    engine.close()


def main() -> None:
    """Reads the command line and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the checkpoint and the host cache")
    parser.add_argument("--tokens", type=int, default=38000, help="of the first prompt (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="turns in the cache (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compute-unit", default="CPU:0", help="such as CUDA:0 (default: %(default)s)")
    parser.add_argument("--weights", default="w8a8", help="weight_dtype (default: %(default)s)")
    parser.add_argument("--span", type=int, default=32, help="tokens of a span (default: %(default)s)")
    parser.add_argument("--cache-memory", type=int, default=1024, help="MiB of the cache (default: %(default)s)")
    parser.add_argument("--host-memory", type=int, default=2048, help="MiB of the host tier (default: %(default)s)")
    options = parser.parse_args()
    options.model, options.host = options.folder / f"qwen3.5-9b-{options.layers}", str(options.folder / "host")
    if not (options.model / "model.safetensors").exists():
        write(options.model, options.layers)
    os.makedirs(options.host, exist_ok=True)
    context, turns, history = multiprocessing.get_context("spawn"), [], []
    for _ in range(2):
        results = context.Queue()
        process = context.Process(target=run, args=(options, history, results))
        process.start()
        some, history = results.get()
        process.join()
        turns += some
    prompt = next(seconds for kind, seconds, _ in turns if kind == "prompt")
    for kind in ("turn", "host", "restart"):
        times = [seconds for each, seconds, _ in turns if each == kind]
        middle = statistics.median(times)
        print(f"{kind}: {middle:.3f} s of {prompt:.1f}, {100 * middle / prompt:.2f} %")


if __name__ == "__main__":
    main()
