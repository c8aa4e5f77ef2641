"""Scores a checkpoint with transformers.

    python evaluate.py MODEL_FOLDER [--dtype float32|bfloat16] [--sums N] [--records N] [--stories N] [--show N]

Sums: held-out problems asked as "a+b=?" and in mixed phrasings, greedy. Records: held-out requests, greedy: the
share of answers that are valid JSON, and that have exactly the requested fields. Stories: continuations of "Once upon a
time" sampled at temperature 1, and greedy answers to requests, judged by the rules of the grammar; perplexity of fresh
stories of the grammar.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import check_story
import records
import smalltalk
import story
import sums
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Model:
    """A checkpoint with batched generation."""

    def __init__(self, folder: Path, dtype: str, batch: int):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder).to(self.device, getattr(torch, dtype)).eval()
        self.batch = batch

    def chat(self, prompts: list[str], limit: int) -> list[str]:
        """Greedy answers to chat prompts."""
        return self.generate([self.tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False,
                                                                 add_generation_prompt=True) for p in prompts], limit)

    @torch.no_grad()
    def generate(self, texts: list[str], limit: int, sample: bool = False) -> list[str]:
        """Continuations without special tokens; greedy, or sampled at temperature 1."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        answers = [""] * len(texts)
        for start in range(0, len(order), self.batch):
            part = order[start:start + self.batch]
            inputs = self.tokenizer([texts[i] for i in part], return_tensors="pt", padding=True).to(self.device)
            options = {"do_sample": False}
            if sample:
                options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
            out = self.model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                                      max_new_tokens=limit,
                                      max_length=None, **options)
            for i, ids in zip(part, out[:, inputs["input_ids"].shape[1]:]):
                answers[i] = self.tokenizer.decode(ids, skip_special_tokens=True)
        return answers

    @torch.no_grad()
    def perplexity(self, texts: list[str]) -> float:
        """The perplexity over all tokens of the texts except the first token of each."""
        total, count = 0.0, 0
        for text in texts:
            ids = self.tokenizer(text, return_tensors="pt")["input_ids"].to(self.device)
            logits = self.model(ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
        return float(torch.tensor(total / max(1, count)).exp())


def score_sums(model: Model, count: int, show: int) -> dict[str, float]:
    rng = random.Random("phrases")
    problems = sums.held_out_problems(count)
    answers = [str(sums.solve(*p)) for p in problems]
    scores = {}
    for name, prompts in (
        ("sums", [f"{a}{op}{b}=?" for a, b, op in problems]),
        ("sums, mixed phrasings", [rng.choice(sums.PHRASES[op]).format(a=a, b=b) for a, b, op in problems]),
    ):
        got = model.chat(prompts, 8)
        wrong = [(p, g, a) for p, g, a in zip(prompts, got, answers) if g.strip() != a]
        scores[name] = 1 - len(wrong) / count
        for prompt, given, right in wrong[:show]:
            print(f"  wrong: {prompt} {given!r}, not {right}")
    return scores


def score_records(model: Model, count: int, show: int) -> dict[str, float]:
    rng = random.Random("records")
    cases = [records.request(rng, evaluation=True) for _ in range(count)]
    answers = model.chat([c[0] for c in cases], 300)
    problems = [c[2].problem(a) for c, a in zip(cases, answers)]
    bad = [(c[0], a, p) for c, a, p in zip(cases, answers, problems) if p]
    for case, answer in list(zip(cases, answers))[:show]:
        print(f"  record: {case[0]}\n          {answer}")
    for prompt, answer, problem in bad[:show]:
        print(f"  wrong: {prompt}\n         {answer}\n         {problem}")
    invalid = sum(p.startswith("not JSON") for _, _, p in bad)
    return {"records, valid JSON": 1 - invalid / count, "records, as requested": 1 - len(bad) / count}


def score_stories(model: Model, count: int, show: int) -> dict[str, float]:
    rng = random.Random("stories")
    checker = check_story.Checker()
    torch.manual_seed(0)
    sampled = ["Once upon a time" + t for t in model.generate(["Once upon a time"] * count, 500, sample=True)]
    asked = model.chat([story.request_and_story(rng)[0] for _ in range(count)], 500)
    scores = {}
    for name, texts in (("sampled stories", sampled), ("requested stories", asked)):
        reports = [checker.check(t) for t in texts]
        total = max(1, sum(r.sentences for r in reports))
        scores[f"{name}, sentences of the grammar"] = 1 - sum(len(r.unknown) for r in reports) / total
        faults = sum(len(r.unknown) + len(r.inconsistent) for r in reports)
        scores[f"{name}, sentences that agree with the story"] = 1 - faults / total
        scores[f"{name}, without any fault"] = sum(r.good for r in reports) / count
        for text, report in list(zip(texts, reports))[:show]:
            print(f"  {name}: {text}\n  faults: {report.unknown + report.inconsistent}\n")
    scores["perplexity of fresh stories"] = model.perplexity([story.plain_story(rng) for _ in range(min(count, 100))])
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sums", type=int, default=1000)
    parser.add_argument("--records", type=int, default=500)
    parser.add_argument("--stories", type=int, default=100)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--show", type=int, default=3, help="how many examples to print")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    args = parser.parse_args()
    model = Model(args.folder, args.dtype, args.batch)
    scores: dict[str, float] = {}
    for part, count in ((score_sums, args.sums), (score_records, args.records), (score_stories, args.stories)):
        started = time.monotonic()
        if count:
            scores.update(part(model, count, args.show))
            print(f"{part.__name__}: {time.monotonic() - started:.0f} s", flush=True)
    rng = random.Random("talk")
    prompts = [smalltalk.chat(rng)[0] for _ in range(4 * args.show)]
    for prompt, answer in zip(prompts, model.chat(prompts, 60) if prompts else []):
        print(f"  {prompt!r}: {answer!r}")
    print(f"scores of {args.folder.name} ({args.dtype}):")
    for name, value in scores.items():
        print(f"  {name}: " + (f"{value:.3f}" if name.startswith("perplexity") else f"{value:.1%}"))
    if args.json:
        args.json.write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
