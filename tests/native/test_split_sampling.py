"""Draws whose rows several threads share (ShardDraw): the bits of those that one thread makes."""

import numpy as np
import pytest

from support.sampling_reference import FILTERS, PROCESSORS, SETTINGS, Params, bitmask, draw, random_case


def assert_same(logits, params, history, mask, ranks):
    alone = draw(logits, params, history, ranks, mask)
    for threads in (1, 2, 5, 16):
        shared = draw(logits, params, history, ranks, mask, threads=threads)
        assert shared == alone or (np.isnan(alone["logprob"]) and shared["token"] == alone["token"])
    return alone


@pytest.mark.parametrize("vocab, ranks", [(7, 1), (700, 2), (5003, 3), (40_000, 1), (151_936, 2)])
@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.timeout(300)
def test_every_processor_and_filter_has_the_bits_of_one_thread(how, vocab, ranks, one_rng):
    rng = one_rng
    names = list(PROCESSORS) if vocab < 10_000 else ["all", "logit_bias"]
    for name in names:
        params, history = random_case(rng, name, vocab, 60)
        for field_name, value in SETTINGS[how].items():
            setattr(params, field_name, value)
        params.do_sample = how != "greedy"
        params.seed, params.logprobs = int(rng.integers(2**62)), bool(rng.integers(2))
        params.top_logprobs = int(rng.integers(21))
        logits = rng.normal(0, 2, vocab).astype(np.float32)
        logits[rng.random(vocab) < 0.02] = -np.inf
        if rng.integers(2):
            logits = np.round(logits)  # ties
        mask = bitmask(rng.random(vocab) < rng.choice([0.0, 0.01, 0.6])) if rng.integers(2) else None
        alone = assert_same(logits, params, history, mask, ranks)
        assert alone["status"] == ""


def test_wide_sets_take_several_rounds(one_rng):
    logits = one_rng.normal(0, 1, 40_000).astype(np.float32)
    for how in ("wide_top_k", "wide_nucleus", "wide_both", "wide_min_p", "all_filters"):
        assert assert_same(logits, Params(**SETTINGS[how]), (), None, 2)["rounds"] > 1, how


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logits_are_found_whoever_scans_them(value, one_rng):
    for filters in FILTERS.values():
        logits = one_rng.normal(0, 1, 5000).astype(np.float32)
        logits[one_rng.integers(5000)] = value
        alone = assert_same(logits, Params(eos=[5], prompt_len=2, **filters), [1, 2, 3], None, 2)
        assert alone["token"] == -1 and alone["status"]


def test_everything_banned_falls_back_alike(one_rng):
    logits = one_rng.normal(0, 1, 3000).astype(np.float32)
    for banned in (Params(bad_words=[[i] for i in range(3000)]),
                   Params(bad_words=[[i] for i in range(3000)], top_p=0.5)):
        for mask in (None, bitmask(np.arange(3000) % 7 == 0), bitmask(np.zeros(3000, bool))):
            assert_same(logits, banned, (), mask, 2)
