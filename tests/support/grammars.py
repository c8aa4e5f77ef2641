"""Random walks through the token masks of a grammar."""
from __future__ import annotations

import random

import numpy as np

from support.paths import ROOT

FABLE = ROOT / "allspark_server/assets/fable"
VOCAB, EOS = 1600, 2  # the tokenizer's 1,536 ids, padded


def allowed(matcher) -> list[int]:
    row = np.full(VOCAB // 32, 0xFFFFFFFF, np.uint32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def walk(matcher, seed, end=EOS, longest=400) -> list[int]:
    """Ids chosen at random among those that the mask allows, until the end of sequence."""
    draw, ids = random.Random(seed), []
    while len(ids) < longest:
        choice = draw.choice(allowed(matcher))
        if choice == end:
            return ids
        ids.append(choice)
        matcher.accept([choice])
    raise AssertionError("no end")
