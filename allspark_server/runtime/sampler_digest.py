"""Digests of sampled tokens, and the fixed inputs of all digests (digest.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from allspark_server.runtime.native import native_library
from allspark_server.runtime.plan import SamplingParams

SAMPLINGS = (
    SamplingParams(do_sample=False, logprobs=True, top_logprobs=5),
    SamplingParams(seed=11, logprobs=True),
    SamplingParams(seed=12, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2),
    SamplingParams(seed=13, temperature=3.0, top_k=1050, top_p=0.99, logprobs=True),
)


def fixed_values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 values in [-1, 1) of this shape, computed exactly by splitmix64."""
    count = int(np.prod(shape))
    x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
    return (x.astype(np.float32) * np.float32(2**-23) - np.float32(1)).reshape(shape)


def sampled(cases: Iterable[tuple[SamplingParams, np.ndarray]]) -> str:
    """Digest of tokens sampled from a vocabulary of realistic size, in large chunks, by parameters and history."""
    digest, logits = hashlib.sha256(), _logits()
    for params, history in cases:
        block = np.frombuffer(params.encode(), np.int32)
        drawn = native_library().sample_once([logits[:10_240], logits[10_240:]], block, history)
        digest.update(repr((drawn["token"], np.float32(drawn["logprob"]).tobytes(), drawn["top_ids"])).encode())
        digest.update(np.float32(drawn["top_logprobs"]).tobytes())
    return digest.hexdigest()[:16]


def _logits() -> np.ndarray:
    return fixed_values((20_000,), 1) * np.float32(6)


def sample() -> str:
    """Digest of tokens sampled with each of SAMPLINGS."""
    return sampled((params, np.arange(0, 3000, 7, dtype=np.int32)) for params in SAMPLINGS)


def more_samplings() -> list[tuple[SamplingParams, np.ndarray]]:
    """Parameters and histories with the fields that SAMPLINGS do not use. The history has the likeliest tokens, so that
    each field decides the token.
    """
    a, b, c, d = np.argsort(-_logits(), kind="stable")[:4].tolist()
    history = np.array([b, 50, 60, a, c, c, d, 50, 60], np.int32)
    fields: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"presence_penalty": 0.5, "prompt_len": 4},
        {"frequency_penalty": 0.5}, {"frequency_penalty": 0.5, "prompt_len": 4}, {"no_repeat_ngram_size": 3},
        {"suppress_repetition_in_generation": True, "repetition_penalty": 1.3, "prompt_len": 4},
        {"min_length": 100, "eos": (a,)}, {"bad_words": ((a,), (60, b))}, {"logit_bias": ((7, 9.5), (a, -3.0))},
        {"do_sample": True, "temperature": 3.0, "min_p": 0.9}, {"do_sample": True, "sample_index": 2})
    return [(SamplingParams(**{"do_sample": False, "seed": 14, "logprobs": True, "top_logprobs": 3, **each}), history)
            for each in fields]
