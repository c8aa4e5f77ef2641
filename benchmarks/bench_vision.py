"""Compares a vision tower on this CPU with transformers (torch), in one run.

    bench_vision.py [--layers N] [--side PIXELS] [--threads N] [--rounds N] [--formats float32,w8a8+bfloat16]
                    [--torch float32,bfloat16] [--requests FORMAT] [--streams] [--peer "NAME=COMMAND"]
                    [--checkpoint DIR] [--whole N]

The tower is that of Qwen2.5-VL-3B (32 layers unless --layers says otherwise) with random weights, before a model of
its text's shape with 2 layers. It computes one image of noise; 1,024 x 1,024 pixels are 5,476 patches. A tower's time
is that of the rows of an image whose patches are there: its decoding is not in it. Rounds alternate, and the least of
each counts. Processor time (user and system, of all threads) stands beside wall time, since other work may share the
cores. Operations are those of matrices and of attention within windows. "of it" compares their number in a second of
processor time with the rate of FMA in float32 that a thread reaches, the highest of all rounds. Cosines are those of
an image's rows to torch's in float32.

--requests: the one of --formats with which first tokens are measured: of a request with a new image, and of one with
the same image and other text.

--streams: how long a stream of tokens waits at most for the next one while an image is computed, and how long without
images.

A peer is a command that writes "ready" to its output, then encodes the image once for each line that it reads, and
answers with seconds of wall time and of processor time. {pixels} and {rows} in the command are the files of the
image's normalized pixels, float32 [height, width, 3], and for the rows, float32 [rows, 2,048].
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allspark_client import AsModelConfig, Image
from allspark_client.images import as_image
from allspark_server import Engine, _native

HIDDEN, HEADS, INNER, OUTPUTS, PATCH, MERGE, WINDOW, WHOLE = 1280, 16, 3420, 2048, 14, 2, 112, 8
VOCAB, LENGTH = 512, 4096
START, PAD, END = 3, 4, 5   # the marks of an image in a prompt
WAIT = 3600.0               # seconds for one image at most

Measured = tuple[float, float, NDArray[np.float32]]     # wall seconds, processor seconds, rows


def write_checkpoint(directory: Path, layers: int, whole: int) -> None:
    """A random checkpoint in bfloat16, with a tokenizer of words w0, w1, …"""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.Qwen2_5_VLConfig(
        text_config={"hidden_size": OUTPUTS, "num_attention_heads": 16, "num_key_value_heads": 2,
                     "intermediate_size": 11008, "num_hidden_layers": 2, "vocab_size": VOCAB,
                     "max_position_embeddings": 4 * LENGTH, "rope_parameters": {
                         "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        vision_config={"depth": layers, "hidden_size": HIDDEN, "num_heads": HEADS, "intermediate_size": INNER,
                       "out_hidden_size": OUTPUTS, "patch_size": PATCH, "spatial_merge_size": MERGE,
                       "window_size": WINDOW, "fullatt_block_indexes": list(range(whole - 1, layers, whole))},
        image_token_id=PAD, vision_start_token_id=START, vision_end_token_id=END, video_token_id=0,
        tie_word_embeddings=True)
    torch.manual_seed(1)
    transformers.Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (directory / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE,
        "temporal_patch_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}))


def operations(grid: tuple[int, int, int], layers: int, every: int) -> float:
    """Of the matrices and of attention, a multiplication and an addition counted as two."""
    _, height, width = grid
    patches, units = height * width, height * width // MERGE ** 2
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    merger = HIDDEN * MERGE ** 2 * (HIDDEN * MERGE ** 2 + OUTPUTS)
    side = WINDOW // PATCH
    ends = [[min(side, length - begin) for begin in range(0, length, side)] for length in (height, width)]
    windows = float(np.prod([sum(part ** 2 for part in parts) for parts in ends]))
    whole = layers // every
    pairs = whole * float(patches) ** 2 + (layers - whole) * windows
    return 2.0 * (patches * (layers * layer + 6 * PATCH ** 2 * HIDDEN) + units * merger) + 4.0 * HIDDEN * pairs


def picture(side: int, seed: int) -> Image:
    """A PNG of noise."""
    return as_image(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def pixels_of(image: Any) -> NDArray[np.float32]:
    """The pixels of an image's patches, [height, width, 3]."""
    _, height, width = image.grid
    parts = image.patches.reshape(height // MERGE, width // MERGE, MERGE, MERGE, 3, 2, PATCH, PATCH)[:, :, :, :, :, 0]
    return np.ascontiguousarray(parts.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * PATCH, width * PATCH, 3))


class Peer:
    """A peer's process; see the head of this file."""

    def __init__(self, command: str, folder: Path, image: Any):
        pixels, self._rows = folder / "pixels", folder / "rows"
        pixels_of(image).tofile(pixels)
        words = [word.format(pixels=pixels, rows=self._rows) for word in shlex.split(command)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def _answer(self, expected: str = "") -> str:
        assert self._process.stdout is not None
        limit = threading.Timer(WAIT, self._process.kill)
        limit.start()
        line = self._process.stdout.readline().strip()
        limit.cancel()
        if not line or (expected and line != expected):
            raise RuntimeError(f"the peer answered {line!r}; exit status {self._process.poll()}")
        return line

    def encode(self) -> Measured:
        """Encodes the image once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall, spent = map(float, self._answer().split())
        return wall, spent, np.fromfile(self._rows, np.float32).reshape(-1, OUTPUTS)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def timed(run: Callable[[], NDArray[np.float32]]) -> Callable[[], Measured]:
    """A function that runs and measures another one of this process."""
    def measure() -> Measured:
        wall, spent = time.perf_counter(), time.process_time()
        rows = run()
        return time.perf_counter() - wall, time.process_time() - spent, rows
    return measure


def torch_tower(directory: Path, dtype: str, image: Any) -> Callable[[], NDArray[np.float32]]:
    """Encodes an image with transformers."""
    import torch
    import transformers

    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    tower, patches, grid = model.model.visual, torch.from_numpy(image.patches), torch.tensor([image.grid])

    def run() -> NDArray[np.float32]:
        with torch.inference_mode():
            return tower(patches.to(tower.dtype), grid_thw=grid).pooler_output.float().numpy()
    return run


def first_token(engine: Engine, name: str, image: Image, seed: int) -> float:
    """Seconds from the call to the first token of a request that shows an image."""
    text = np.random.default_rng(seed).integers(10, VOCAB, 32).tolist()
    began = time.perf_counter()
    *_, queue = engine.start_request(name, {"input_ids": [START, PAD, END, *text], "images": [image]},
                                     {"max_new_tokens": 2, "eos_token_id": -1})
    queue.Get()
    seconds = time.perf_counter() - began
    for _ in queue:
        pass
    return seconds


def longest_waits(engine: Engine, name: str, encode: Callable[[], Measured]) -> tuple[float, float]:
    """The longest wait for a token of a stream, in seconds, without images and while one is computed."""
    _, handle, queue = engine.start_request(name, {"input_ids": [10, 11, 12]},
                                            {"max_new_tokens": LENGTH - 100, "eos_token_id": -1})
    arrivals: list[float] = []

    def read() -> None:
        for _ in queue:
            arrivals.append(time.perf_counter())

    reading = threading.Thread(target=read)
    reading.start()
    while len(arrivals) < 60:
        time.sleep(0.01)
    began = time.perf_counter()
    encode()
    ended = time.perf_counter()
    engine.stop_request(name, handle)
    reading.join()
    if arrivals[-1] < ended:
        raise RuntimeError(f"the stream of {len(arrivals)} tokens ended before the image")
    ends = np.array(arrivals[10:])      # the first tokens may find the engine cold
    waits, during = np.diff(ends), (ends[1:] > began) & (ends[:-1] < ended)
    return float(waits[~during].max()), float(waits[during].max())


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="layers of the tower (default: %(default)s)")
    parser.add_argument("--side", type=int, default=1024, help="of the image, in pixels (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each; 0 only writes the checkpoint "
                                                              "(default: %(default)s)")
    parser.add_argument("--formats", default="float32,bfloat16,int8,w8a8",
                        help="types of the tower's matrices, each with that of its keys and values if it is another "
                             "(default: %(default)s)")
    parser.add_argument("--torch", default="float32,bfloat16", help="types of torch (default: %(default)s)")
    parser.add_argument("--requests", default="", help="the one of --formats with which first tokens are measured, too")
    parser.add_argument("--streams", action="store_true", help="also measure how long a stream waits")
    parser.add_argument("--whole", type=int, default=WHOLE, help="every how many layers one attends to all patches "
                                                                 "(default: %(default)s)")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND of a further engine")
    parser.add_argument("--checkpoint", help="where the checkpoint is, or is written if it is not there")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.requests and options.requests not in options.formats.split(","):
        parser.error(f"--requests {options.requests}: expected one of --formats, {options.formats}")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(options.checkpoint or Path(folder, "m"))
        if not (directory / "preprocessor_config.json").exists():
            write_checkpoint(directory, options.layers, options.whole)
        if options.rounds:
            compare(options, directory, Path(folder))


def compare(options: argparse.Namespace, directory: Path, folder: Path) -> None:
    """Measures all engines in turn and prints the table."""
    import torch

    torch.set_num_threads(options.threads)
    runs: dict[str, Callable[[], Measured]] = {}
    peers: list[Peer] = []
    tokens: list[tuple[float, float]] = []
    most = max(2048, math.ceil(options.side / PATCH / MERGE) ** 2)
    waits: dict[str, tuple[float, float]] = {}
    ceiling, image = 0.0, None
    with Engine() as engine:
        for form in filter(None, options.formats.split(",")):
            weights, _, cache = form.partition("+")
            engine.install_model(AsModelConfig(
                model_name=form, model_path=str(directory), weight_dtype=weights, vision_weight_dtype=weights,
                cache_dtype=cache or "auto", engine_max_length=2 * most, engine_max_batch=4, max_image_tokens=most,
                cache_memory=128 << 20, num_threads=options.threads))
            engine.start_model(form)
            stage = engine.served_model(form).input.images
            assert stage is not None
            if image is None:
                _, found_images = stage.read([START, PAD, END], [picture(options.side, 7)], 2 * most, "",
                                             lambda text: [])
                (image,) = found_images.inputs
            scopes = (f"round {i}" for i in itertools.count())  # rows are kept, but not for another scope
            runs[form] = timed(lambda encoder=stage.encoder, scopes=scopes:
                               encoder.request(next(scopes), image, lambda: True).result(WAIT))
        assert image is not None
        engine_forms = list(runs)
        for dtype in filter(None, options.torch.split(",")):
            runs[f"torch {dtype}"] = timed(torch_tower(directory, dtype, image))
        for peer in options.peer:
            name, _, command = peer.partition("=")
            peers.append(Peer(command, folder, image))
            runs[name] = peers[-1].encode
        best = dict.fromkeys(runs, (float("inf"), float("inf")))
        found = {}
        for number in range(options.rounds):
            for name, run in runs.items():
                # many short pieces: one that other work does not interrupt is enough
                _, rate = _native.measure_roofline(threads=options.threads, repeats=40, megabytes=4)
                ceiling = max(ceiling, rate / options.threads)
                wall, spent, found[name] = run()
                best[name] = min(best[name][0], wall), min(best[name][1], spent)
                print(f"round {number}: {name}: {wall:.2f} s, {spent:.2f} s of processor time", flush=True)
            for name in runs if options.streams and not number else ():
                if name in engine_forms:
                    waits[name] = longest_waits(engine, name, runs[name])
            if options.requests:
                shown = picture(options.side, 100 + number)
                tokens.append((first_token(engine, options.requests, shown, 2 * number),
                               first_token(engine, options.requests, shown, 2 * number + 1)))
    for peer in peers:
        peer.close()
    report(options, image, best, found, ceiling, tokens, waits)


def report(options: argparse.Namespace, image: Any, best: dict[str, tuple[float, float]],
           found: dict[str, NDArray[np.float32]], ceiling: float, tokens: list[tuple[float, float]],
           waits: dict[str, tuple[float, float]]) -> None:
    """Prints the table, and writes it as JSON if it is asked for."""
    work, rows = operations(image.grid, options.layers, options.whole), []
    reference = found.get("torch float32", next(iter(found.values())))
    print(f"{options.layers} layers, {len(image.patches)} patches, {work / 1e9:.0f} Gop, {options.threads} threads; "
          f"ceiling {ceiling / 1e9:.0f} Gop/s a thread")
    print(f"{'':18}{'wall s':>10}{'processor s':>12}{'Gop/s':>8}{'of it':>7}{'cosine':>10}")
    for name, (wall, spent) in best.items():
        norms = np.linalg.norm(found[name], axis=1) * np.linalg.norm(reference, axis=1)
        cosine = float(((found[name] * reference).sum(axis=1) / norms).min())
        rows.append({"name": name, "wall_seconds": round(wall, 3), "processor_seconds": round(spent, 3),
                     "gops": round(work / spent / 1e9, 1), "of_ceiling": round(work / spent / ceiling, 3),
                     "least_cosine": round(cosine, 5)})
        print(f"{name:18}{wall:10.2f}{spent:12.2f}{work / spent / 1e9:8.0f}{work / spent / ceiling:7.2f}{cosine:10.5f}")
    for name, (without, during) in waits.items():
        print(f"{name}: a token comes after at most {1e3 * during:.0f} ms, {1e3 * without:.0f} ms without images")
    for first, second in tokens:
        print(f"first token with {options.requests}: {first:.3f} s, again {second:.3f} s: {second / first:.3f} of it")
    if options.json:
        Path(options.json).write_text(json.dumps({
            **vars(options), "operations": work, "ceiling": ceiling, "rows": rows, "first_tokens": tokens,
            "waits": waits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
