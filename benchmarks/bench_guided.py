"""Measures the cost of constrained decoding: bench_guided.py MODEL_DIR [--tokenizer FILE] [--batch 32] [--tokens 64]
[--rounds 3].

Tokens/s of a full batch without a grammar and with several, in turn, so that other work on the machine affects all
alike; the best round counts. Every request runs to its length: end-of-sequence ids follow a grammar's end. Strings are
sampled uniformly, as a model with random weights would do; this is the worst case for the automata. One core more than
--threads must be free. MODEL_DIR needs a tokenizer.json; `--make-tokenizer` writes one of 151,643 entries, trained
on the sources of the installed packages.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allspark_client import AsModelConfig
from allspark_server import Engine

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["carpenter", "baker", "clockmaker"]}, "note": {"type": "string"},
    },
    "required": ["note", "name", "age", "tags", "kind"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "json_object": {"type": "json_object"},
    "json_schema": {"type": "json_schema", "json_schema": {"schema": RECORD}, "disable_any_whitespace": True},
    "regex": {"type": "regex", "regex": "([A-Z][a-z ]{1,80}\\. )*"},
}


def make_tokenizer(target: Path, size: int = 151643, characters: int = 60_000_000) -> None:
    """Trains a tokenizer; takes minutes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def texts() -> Iterator[str]:
        left = characters
        for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            left -= len(text)
            yield text
            if left < 0:
                return

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(target))


def tokens_per_second(engine: Engine, batch: int, tokens: int, form: dict[str, Any] | None, seed: int) -> float:
    """Tokens/s of a batch once its prompts are computed."""
    config = {"max_new_tokens": tokens, "early_stopping": False, "response_format": form}
    queues = [engine.start_request("m", {"input_ids": [5 + i, 7, 11]}, {**config, "seed": seed + i})[2]
              for i in range(batch)]
    while any(queue.GeneratedLength() < 2 for queue in queues):
        time.sleep(0.001)
    began, before = time.perf_counter(), sum(queue.GeneratedLength() for queue in queues)
    while all(queue.GeneratedLength() < tokens for queue in queues):
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    generated = sum(queue.GeneratedLength() for queue in queues) - before
    for queue in queues:
        queue.wait_final()
    return generated / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--make-tokenizer", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weight-dtype", default="w8a8")
    options = parser.parse_args()
    if options.make_tokenizer:
        make_tokenizer(options.model / "tokenizer.json")
    best = dict.fromkeys(FORMATS, 0.0)
    with Engine() as engine:
        engine.install_model(AsModelConfig(
            model_name="m", model_path=str(options.model), engine_max_batch=options.batch, engine_max_length=512,
            num_threads=options.threads, weight_dtype=options.weight_dtype))
        engine.start_model("m")
        for turn in range(options.rounds):
            for name, form in FORMATS.items():
                speed = tokens_per_second(engine, options.batch, options.tokens, form, 1000 * turn)
                best[name] = max(best[name], speed)
    for name, speed in best.items():
        print(json.dumps({"format": name, "batch": options.batch, "tokens/s": round(speed, 2),
                          "of none": round(speed / best["none"], 4)}))


if __name__ == "__main__":
    main()
