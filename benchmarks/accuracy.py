"""Prints the loss of quality of each weight format.

    accuracy.py [--formats LIST] [--tasks sums,records,stories,fresh] [--count N] [--model DIR --text FILE]
                [--json FILE] [--compute-unit CUDA:0]

bfloat16 is computed by transformers, every format of this build by this project's engine. It measures the perplexity
of new stories, the tasks of the shipped model (tools/shipped_model/evaluate.py: sums, JSON records, stories), and the
error of the format's GEMM against float64 on weights with outliers, relative to the product's root mean square.

A format may lose this many points in any task answered greedily: int8 0.5, w8a8 1, int4 and w4a8 2. "+-" is half of the
95 % (Wilson) interval of the worst task, given its number of problems. Sampled stories are shown only, because the two
engines sample differently. A format with "+head" keeps embedding and head as they are stored. Formats of other programs
(fp8-blocks, nvfp4, ...: `stored_formats.py`) are computed as the engine computes such checkpoints; nothing is allowed
or forbidden for these.

With --model, the perplexity of any checkpoint is measured on the lines of --text FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "allspark_server" / "assets" / "fable"
sys.path[:0] = [str(HERE), str(HERE.parent / "tools" / "shipped_model"), str(HERE.parent / "tests")]

import evaluate  # noqa: E402
import story  # noqa: E402
from stored_formats import STORED, write_stored  # noqa: E402

from allspark_client.config import AsModelConfig  # noqa: E402
from allspark_client.errors import AllSparkError  # noqa: E402
from allspark_server import Engine, _native  # noqa: E402
from allspark_server.runtime.plan import NewSlot, SamplingParams, StepPlan, WorkItem  # noqa: E402
from allspark_server.runtime.runner import ModelRunner  # noqa: E402
from support.driver import spans_of_groups  # noqa: E402

logger = logging.getLogger(__name__)

REFERENCE = "transformers bfloat16"
DEFAULT_FORMATS = (
    "float32",
    "bfloat16",
    "int8",
    "int8:64",
    "int4:64",
    "int4:64+head",
    "int4:32",
    "w8a8",
    "w4a8:64",
    "w4a8:64+head",
)
KEPT_HEAD = "+head"
ALLOWED_POINTS = {"int8": 0.5, "w8a8": 1.0, "int4": 2.0, "w4a8": 2.0, "float32": 0.5, "bfloat16": 0.5}
PERPLEXITY, SAMPLED = "perplexity", "sampled"


def score_fresh(model: evaluate.Model, count: int, show: int) -> dict[str, float]:
    """Only the perplexity of new stories, which is quick."""
    rng = random.Random("fresh")
    return {f"{PERPLEXITY} of fresh stories": model.perplexity([story.plain_story(rng) for _ in range(count)])}


TASKS = {"sums": evaluate.score_sums, "records": evaluate.score_records, "stories": evaluate.score_stories,
         "fresh": score_fresh}
COUNTS = {"sums": 1000, "records": 300, "stories": 300, "fresh": 100}
BATCH, MAX_LENGTH = 32, 1024


@dataclass
class Row:
    """Scores of a format (0 to 1; perplexities as they are) and the relative error of its GEMM."""

    name: str
    dtype: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    product_error: float | None = None
    missing: str = ""

    def worst(self, reference: Row) -> tuple[float, str]:
        """How many points the worst greedy task falls below the reference (negative if all are better), and its
        name.
        """
        falls = [(100 * (reference.scores[name] - value), name) for name, value in self.scores.items()
                 if not name.startswith((PERPLEXITY, SAMPLED))]
        return max(falls, default=(0.0, ""))


def half_interval(share: float, count: int) -> float:
    """Half of the 95 % Wilson interval, in points, of a share measured on this many problems."""
    z = 1.96
    return 100 * z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)


def problems_of(name: str, count: int | None) -> int:
    """Number of problems behind a score of measure()."""
    task = next((task for task in TASKS if task in name), "")
    return count or COUNTS.get(task, 1)


def parts_of(form: str) -> tuple[str, int, bool]:
    """(weight_dtype, weight_group_size, quantize_head) of a format's name, such as "int4:64+head"."""
    dtype, _, group = form.removesuffix(KEPT_HEAD).partition(":")
    return dtype, int(group or 0), not form.endswith(KEPT_HEAD)


def config_of(folder: Path, form: str, unit: str = "CPU:0") -> AsModelConfig:
    dtype, group, head = parts_of(form)
    made = {} if form in STORED else {"weight_dtype": dtype, "weight_group_size": group, "quantize_head": head}
    return AsModelConfig(model_name="m", model_path=str(folder), engine_max_length=MAX_LENGTH, engine_max_batch=BATCH,
                         compute_unit=unit, **made)


class EngineModel:
    """evaluate.Model's interface on this project's engine. Token ids come from the same tokenizer."""

    def __init__(self, folder: Path, form: str, unit: str, tokenizer):
        self.config, self.tokenizer = config_of(folder, form, unit), tokenizer
        self.engine = Engine()
        try:
            self.engine.install_model(self.config)
            self.engine.start_model("m")
        except Exception:
            self.engine.close()
            raise

    def close(self) -> None:
        self.engine.close()

    def chat(self, prompts: list[str], limit: int) -> list[str]:
        """Greedy answers to chat prompts."""
        return self.generate([self.tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False,
                                                                 add_generation_prompt=True) for p in prompts], limit)

    def generate(self, texts: list[str], limit: int, sample: bool = False) -> list[str]:
        """Continuations without special tokens: greedy, or sampled at temperature 1 with the text's index as seed."""
        requests = []
        for seed, text in enumerate(texts):
            options = {"max_new_tokens": limit, "do_sample": sample, "seed": seed}
            ids = self.tokenizer(text)["input_ids"]
            requests.append(self.engine.start_request("m", {"input_ids": ids}, options)[1:])
        answers = []
        for handle, queue in requests:
            ids = [token for elements in queue for token in elements.ids_from_generate]
            answers.append(self.tokenizer.decode(ids, skip_special_tokens=True))
            self.engine.release_request("m", handle)
        return answers

    def perplexity(self, texts: list[str]) -> float:
        """Perplexity per token, over all tokens but the first of each text."""
        with contextlib.closing(TeacherForcing(self.config)) as model:
            return model.perplexity([self.tokenizer(text)["input_ids"] for text in texts])


class TeacherForcing:
    """Log-probabilities of given tokens: sequences are fed token by token, and each step's logits score the next
    token.
    """

    def __init__(self, config: AsModelConfig):
        self.runner = ModelRunner(config)
        self.info = self.runner.allocate_cache(self.runner.load())

    def close(self) -> None:
        self.runner.close()

    def perplexity(self, sequences: list[list[int]]) -> float:
        """Perplexity: exp of the mean negative log-probability of every token but the first of each sequence."""
        total, count = 0.0, 0
        for start in range(0, len(sequences), self.info.max_batch):
            for logprobs in self.logprobs(sequences[start:start + self.info.max_batch]):
                total -= float(logprobs.sum())
                count += len(logprobs)
        return math.exp(total / max(1, count))

    def logprobs(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """float64 [length - 1] for each of at most max_batch sequences: of each token after the first."""
        size, capacity = self.info.span_size, self.info.max_length // self.info.span_size
        groups = len(self.info.cache_windows)
        most = self.info.num_spans // groups // capacity
        if max(map(len, sequences)) > capacity * size or len(sequences) > most:
            raise ValueError(f"at most {most} sequences of at most {capacity * size} tokens "
                             f"fit, not {len(sequences)} of up to {max(map(len, sequences))}")
        sampling = SamplingParams(do_sample=False, prompt_len=1).encode()
        new = [NewSlot(slot, list(ids), sampling) for slot, ids in enumerate(sequences)]
        found: list[list[float]] = [[] for _ in sequences]
        for position in range(max(map(len, sequences)) - 1):
            live = [slot for slot, ids in enumerate(sequences) if position + 1 < len(ids)]
            spans = [[slot * capacity + position // size] if position % size == 0 else [] for slot in live]
            work = [WorkItem(slot, 1, spans=span, other_spans=spans_of_groups(self.info, span), outputs=1)
                    for slot, span in zip(live, spans)]
            logits = self.runner.step(StepPlan(new=new, work=work).encode(), want_logits=True).logits.astype(np.float64)
            new = []
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            for row, slot in zip(logits, live):
                found[slot].append(row[sequences[slot][position + 1]])
        self.runner.step(StepPlan(free=list(range(len(sequences))), groups=groups).encode())
        return [np.array(values) for values in found]


def outlier_weights(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Normal weights rounded to bfloat16, in float32; one in a thousand is twenty times as large."""
    weights = rng.normal(0, 0.02, (rows, columns)).astype(np.float32)
    weights[rng.random(weights.shape) < 1e-3] *= 20
    return (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)


def product_error(form: str, rows: int = 896, columns: int = 896, batch: int = 16) -> float:
    """Root mean square error of a GEMM against float64, relative to the product's. Raises RuntimeError if this build
    lacks the format.
    """
    rng = np.random.default_rng(0)
    weights, x = outlier_weights(rng, rows, columns), rng.normal(0, 1, (batch, columns)).astype(np.float32)
    dtype, group, _ = parts_of(form)
    executor = _native.Executor(num_threads=1)
    try:
        matrix = executor.add_matrix(rows, columns, dtype, group)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error).splitlines()[0]) from None
    executor.fill_matrix(matrix, weights, "F32")
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    error = executor.multiply(matrix, x, rows) - exact
    return float(np.sqrt((error ** 2).mean() / (exact ** 2).mean()))


def score(model, tasks: list[str], count: int | None, text: list[str]) -> dict[str, float]:
    """Scores of the tasks and perplexity of given texts. `count`: problems of each task (None: COUNTS)."""
    scores: dict[str, float] = {}
    for task in tasks:
        began = time.monotonic()
        scores.update(TASKS[task](model, count or COUNTS[task], 0))
        logger.info("%s: %s in %.0f s", type(model).__name__, task, time.monotonic() - began)
    if text:
        scores["perplexity of the text"] = model.perplexity(text)
    return scores


def measure(folder: Path, forms: list[str], tasks: list[str], count: int | None, text: list[str],
            unit: str) -> list[Row]:
    """A row for the reference and for each format, in this order."""
    reference = evaluate.Model(folder, "bfloat16", 250)
    rows = [Row(REFERENCE, "bfloat16", score(reference, tasks, count, text))]
    tokenizer = reference.tokenizer
    for form in forms:
        row = Row(form, parts_of(form)[0])
        rows.append(row)
        try:
            with tempfile.TemporaryDirectory() as name:
                path = write_stored(folder, Path(name) / "stored", form) if form in STORED else folder
                with contextlib.closing(EngineModel(path, form, unit, tokenizer)) as model:
                    row.scores = score(model, tasks, count, text)
            if form not in STORED and unit.startswith("CPU"):
                row.product_error = product_error(form)
        except (AllSparkError, RuntimeError) as error:
            row.missing = "not available yet" if "not available yet" in str(error) else str(error)
    return rows


def table(rows: list[Row], count: int | None) -> str:
    """The rows as text. "worst" is the most points that a greedy task falls below the reference, next to the allowed
    points.
    """
    reference = rows[0]
    names = list(reference.scores)
    width = max(len(row.name) for row in rows)
    lines = [f"({chr(97 + i)}) {name}" for i, name in enumerate(names)]
    heads = "".join(f"{'(' + chr(97 + i) + ')':>9}" for i in range(len(names)))
    lines += ["", f"{'format':<{width}}{heads}{'worst':>9}{'+-':>6}{'allowed':>9}{'product error':>15}"]
    for row in rows:
        if row.missing:
            lines.append(f"{row.name:<{width}}  {row.missing}")
            continue
        values = "".join(f"{row.scores[name]:>9{'.3f' if name.startswith(PERPLEXITY) else '.1%'}}" for name in names)
        error = "" if row.product_error is None else f"{row.product_error:>15.2e}"
        verdict = ""
        if row is not reference:
            (worst, name), allowed = row.worst(reference), ALLOWED_POINTS.get(row.dtype, math.inf)
            noise = half_interval(row.scores[name], problems_of(name, count)) if name else 0.0
            verdict = f"{worst:>9.1f}{noise:>6.1f}{allowed if allowed < math.inf else '':>9}"
            error += "" if worst <= allowed else "  worse than allowed"
        lines.append(f"{row.name:<{width}}{values}{verdict or ' ' * 24}{error}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 if a format is worse than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED, help="default: the model that ships")
    parser.add_argument("--formats", default=",".join(DEFAULT_FORMATS), help="default %(default)s")
    parser.add_argument("--tasks", help=f"of {','.join(TASKS)} (default: all but fresh; none with another model)")
    parser.add_argument("--count", type=int, help=f"problems of each task (default {COUNTS})")
    parser.add_argument("--text", type=Path, help="texts for perplexity, one a line")
    parser.add_argument("--compute-unit", default="CPU:0", help="where formats are computed (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    default = "sums,records,stories" if options.model == SHIPPED else ""
    tasks = [t for t in (default if options.tasks is None else options.tasks).split(",") if t]
    if unknown := [task for task in tasks if task not in TASKS]:
        parser.error(f"--tasks: {unknown[0]!r} is none of {', '.join(TASKS)}")
    text = options.text.read_text(encoding="utf-8").splitlines() if options.text else []
    if not tasks and not text:
        parser.error("nothing to measure: give --text FILE, or --tasks")
    rows = measure(options.model, options.formats.split(","), tasks, options.count, text, options.compute_unit)
    print(table(rows, options.count))
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    return int(any(row.scores and row.worst(rows[0])[0] > ALLOWED_POINTS.get(row.dtype, math.inf) for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
