"""Compares embeddings of texts on this CPU with sentence-transformers (torch), in one run.

    bench_embeddings.py [--layers N] [--texts N] [--threads N] [--rounds N] [--formats float32,w8a8+bfloat16]
                        [--step N] [--batch N] [--processor-time]

The shape is that of bge-m3 (XLM-RoBERTa large: 1,024 features, 16 heads, 4,096 in the MLP; 24 layers unless --layers
says otherwise), with random weights and texts of 128 to 512 tokens. Rounds alternate, and the best of each counts.
sentence-transformers sorts texts by length and pads them to the longest of a batch. The ceiling is the rate of FMA in
float32 that all threads reach, measured before each round; "of it" counts the operations of matrices and attention.
Cosines are those to the float32 embeddings of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from allspark_client import AsModelConfig
from allspark_server import Engine, _native

HIDDEN, HEADS, INNER, VOCAB, LONGEST = 1024, 16, 4096, 8000, 512
CLS, SEP = 0, 2


def write_checkpoint(directory: Path, layers: int) -> None:
    """A random checkpoint with a tokenizer of words w0, w1, …"""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    config = transformers.XLMRobertaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=INNER, num_hidden_layers=layers,
        vocab_size=VOCAB, max_position_embeddings=LONGEST + 2, type_vocab_size=1, pad_token_id=1, bos_token_id=CLS,
        eos_token_id=SEP)
    torch.manual_seed(1)
    transformers.XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(directory)
    words = {"<s>": CLS, "<pad>": 1, "</s>": SEP, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", CLS), ("</s>", SEP)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>",
        "model_max_length": LONGEST}))
    (directory / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({
        "word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    (directory / "2_Normalize").mkdir()


def operations(lengths: np.ndarray, layers: int) -> float:
    """Of the matrices and of attention, a multiplication and an addition counted as two."""
    matrices = 2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) * lengths.sum()
    return layers * float(matrices + 4 * HIDDEN * (lengths.astype(float) ** 2).sum())


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24, help="layers (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=100, help="texts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each (default: %(default)s)")
    parser.add_argument("--formats", default="float32,bfloat16,int8,w8a8,w8a8+bfloat16,w4a8",
                        help="weight formats, each with the type of its cache if it is another (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="texts of a batch of torch (default: %(default)s)")
    parser.add_argument("--processor-time", action="store_true", help="count processor time: for a machine with other "
                                                                      "work, with --threads 1")
    parser.add_argument("--step", type=int, default=0, help="most rows of a step; 0: the engine's choice")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(7)
    lengths = rng.integers(128, LONGEST + 1, options.texts)
    texts = [" ".join(f"w{i}" for i in rng.integers(4, VOCAB, n - 2)) for n in lengths]
    work = operations(lengths, options.layers)
    with tempfile.TemporaryDirectory() as folder, Engine() as engine:
        directory = Path(folder, "m")
        write_checkpoint(directory, options.layers)
        runs = {}
        for dtype in ("float32", "bfloat16"):
            peer = SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
            runs[f"torch {dtype}"] = lambda peer=peer: peer.encode(texts, batch_size=options.batch)
        clock = time.process_time if options.processor_time else time.perf_counter
        for form in options.formats.split(","):
            weights, _, cache = form.partition("+")
            engine.install_model(AsModelConfig(
                model_name=form, model_path=str(directory), weight_dtype=weights, cache_dtype=cache or "auto",
                weight_group_size=64 if "4" in weights else 0, engine_max_length=LONGEST, num_threads=options.threads,
                max_step_tokens=options.step))
            engine.start_model(form)
            runs[form] = lambda form=form: engine.embed(form, texts)
        best: dict[str, float] = dict.fromkeys(runs, float("inf"))
        part: dict[str, float] = dict.fromkeys(runs, 0.0)
        found = {}
        for _ in range(options.rounds):
            for name, run in runs.items():
                _, rate = _native.measure_roofline(threads=options.threads)
                began = clock()
                found[name] = np.asarray(run(), np.float32)
                seconds = clock() - began
                best[name] = min(best[name], seconds)
                part[name] = max(part[name], work / seconds / rate)
    found = {name: vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for name, vectors in found.items()}
    reference = found["torch float32"]
    tokens, rows = int(lengths.sum()), []
    print(f"{options.layers} layers, {options.texts} texts, {tokens} tokens, {options.threads} threads")
    print(f"{'':14}{'tokens/s':>10}{'of torch':>10}{'of it':>8}{'cosine':>10}")
    for name, seconds in best.items():
        cosine = float((found[name] * reference).sum(axis=1).min())
        rows.append({"name": name, "tokens_per_second": round(tokens / seconds, 1),
                     "of_torch": round(best["torch float32"] / seconds, 3), "of_ceiling": round(part[name], 3),
                     "least_cosine": round(cosine, 5)})
        print(f"{name:14}{tokens / seconds:10.0f}{rows[-1]['of_torch']:10.2f}{part[name]:8.2f}{cosine:10.5f}")
    if options.json:
        Path(options.json).write_text(json.dumps({**vars(options), "tokens": tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
