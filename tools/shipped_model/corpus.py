"""The training text: documents drawn from the generators, as token rows ready for training.

A document is a list of (text, learn) parts; only the tokens of parts with ``learn`` count in the loss. In the arrays
a token that does not count is stored as -1 - token.

    python corpus.py TOKENIZER_FOLDER OUTPUT_FOLDER [--long-rows N] [--short-rows N] [--seed S] [--workers W]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from pathlib import Path

import numpy as np
import records
import smalltalk
import story
import sums
from tokenizers import Tokenizer

LONG, SHORT = 1024, 64            # row lengths (plus one token for the shifted target)
END_OF_TEXT = "<|endoftext|>"
Document = list[tuple[str, bool]]


def chat_document(turns: list[tuple[str, str]], system: str | None = None) -> Document:
    """A conversation in the chat format; the answers (with their <|im_end|>) count in the loss."""
    parts: Document = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    for question, answer in turns:
        parts.append((f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False))
        parts.append((f"{answer}<|im_end|>", True))
        parts.append(("\n", True))
    return parts


def _turn(rng: random.Random) -> tuple[str, str]:
    roll = rng.random()
    if roll < 0.5:
        return records.request(rng)[:2]
    if roll < 0.7:
        return story.request_and_story(rng)
    return smalltalk.chat(rng) if roll < 0.85 else sums.chat(rng)


def document(rng: random.Random) -> Document:
    """A document for the long rows: a plain story, a conversation, or some plain sums."""
    roll = rng.random()
    if roll < 0.33:
        return [(story.plain_story(rng) + END_OF_TEXT, True)]
    if roll < 0.35:
        return [(sums.plain(rng) + END_OF_TEXT, True)]
    turns = [_turn(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    system = rng.choice(smalltalk.SYSTEM_PROMPTS) if rng.random() < 0.15 else None
    return [*chat_document(turns, system), (END_OF_TEXT, False)]


def short_document(rng: random.Random) -> Document:
    """A document for the short rows: nearly always one sum, now and then a greeting or a refusal."""
    turn = smalltalk.chat(rng) if rng.random() < 0.04 else sums.chat(rng)
    system = rng.choice(smalltalk.SYSTEM_PROMPTS) if rng.random() < 0.03 else None
    return [*chat_document([turn], system), (END_OF_TEXT, False)]


def render(doc: Document) -> str:
    return "".join(text for text, _ in doc)


def encode(tokenizer: Tokenizer, doc: Document) -> list[int]:
    """Token ids, -1 - id where the token does not count in the loss."""
    ids: list[int] = []
    for text, learn in doc:
        part = tokenizer.encode(text).ids
        ids += part if learn else [-1 - i for i in part]
    return ids


def make_rows(task: tuple[str, str, int, str]) -> np.ndarray:
    """Rows of one worker: int16 [count, length + 1]. Each row begins with the beginning of a document."""
    tokenizer_file, kind, count, seed = task
    tokenizer = Tokenizer.from_file(tokenizer_file)
    rng = random.Random(seed)
    make, length = (document, LONG + 1) if kind == "long" else (short_document, SHORT + 1)
    pad = -1 - tokenizer.token_to_id(END_OF_TEXT)
    rows = np.full((count, length), pad, dtype=np.int16)
    for row in rows:
        filled = 0
        while filled < length:
            ids = encode(tokenizer, make(rng))
            if kind == "short" and filled and filled + len(ids) > length:
                break                                    # short documents are never cut
            ids = ids[: length - filled]
            row[filled:filled + len(ids)] = ids
            filled += len(ids)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--long-rows", type=int, default=100_000)
    parser.add_argument("--short-rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool(args.workers) as pool:
        for kind, total in (("long", args.long_rows), ("short", args.short_rows)):
            # fixed, so that the text does not depend on the number of workers
            pieces = 64
            tasks = [(str(args.tokenizer / "tokenizer.json"), kind, max(1, total // pieces),
                      f"{args.seed} {kind} {piece}")
                     for piece in range(pieces)]
            rows = np.concatenate(pool.map(make_rows, tasks, chunksize=1))
            np.save(args.output / f"{kind}.npy", rows)
            print(f"{kind} rows: {rows.shape[0]:,} of {rows.shape[1] - 1} tokens, "
                  f"{(rows >= 0).mean():.0%} of them in the loss", flush=True)


if __name__ == "__main__":
    main()
