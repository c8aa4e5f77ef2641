"""Sampling on the GPU: tokens, log probabilities and best alternatives have the bits of the host's sampler on the same
logits.
"""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server.runtime.plan import SAMPLE, Flag
from support.gpu_sampling import SLOTS, Head, cases_of
from support.sampling_reference import SETTINGS, Params, bitmask, draw, random_case

pytestmark = pytest.mark.cuda


def assert_same(found, i: int, expected: dict) -> None:
    assert int(found.tokens[i]) == expected["token"]
    assert bool(found.status[i]) == bool(expected["status"])
    assert found.logprobs[i].tobytes() == np.float32(expected["logprob"]).tobytes()
    assert found.top_ids[i].tolist() == expected["top_ids"]
    assert found.top_logprobs[i].tobytes() == np.array(expected["top_logprobs"], np.float32).tobytes()


@pytest.mark.parametrize("vocab, spread, ties", [
    (300, 1.0, True), (1024, 2.0, False), (5003, 1.0, False), (16384, 0.5, True), (40_001, 1.0, False),
    (151_936, 0.2, False), (151_936, 1.0, True), (262_144, 1.5, False)])
def test_every_processor_and_filter(vocab, spread, ties):
    rng = np.random.default_rng(vocab)
    head = Head(vocab, rng, spread, ties)
    cases = cases_of(vocab, rng)
    for first in range(0, len(cases), SLOTS):
        some = cases[first:first + SLOTS]
        found = head.draws(some)
        for i, (params, history, mask) in enumerate(some):
            assert_same(found, i, draw(found.logits[i], params, history, 1, mask))


def test_what_is_no_number_is_a_status():
    head = Head(2000, np.random.default_rng(0), 1.0, False)
    cases = [(Params(top_p=0.5, logprobs=True), [1, 2, token], None) for token in (5, 0, 7)]
    found = head.draws(cases)
    assert found.status.astype(bool).tolist() == [False, True, False] and found.tokens[1] == -1
    for i, (params, history, _mask) in enumerate(cases):
        assert_same(found, i, draw(found.logits[i], params, history))


def test_everything_banned():
    vocab = 3000
    head = Head(vocab, np.random.default_rng(1), 1.0, False)
    words = [[i] for i in range(vocab)]
    masks = (None, bitmask(np.arange(vocab) % 7 == 0), bitmask(np.zeros(vocab, bool)))
    for fields in ({}, {"top_p": 0.5}, {"do_sample": False}, {"top_k": 5}):
        for eos in ([], [3], [vocab + 5]):
            cases = [(Params(bad_words=words, eos=eos, logprobs=True, **fields), [1, 2, 9], mask) for mask in masks]
            found = head.draws(cases)
            for i, (params, history, mask) in enumerate(cases):
                assert_same(found, i, draw(found.logits[i], params, history, 1, mask))


def test_prompts_are_scored():
    head, rng = Head(5003, np.random.default_rng(2), 1.0, False), np.random.default_rng(3)
    cases = [(Params(), rng.integers(1, 5003, length), None) for length in (40, 128)]
    found = head.draws(cases, SAMPLE | Flag.PROMPT, outputs=30)
    assert len(found.prompt_logprobs) == 2 * 29
    for case, (_, history, _) in enumerate(cases):
        for i in range(29):
            row, target = found.logits[case * 30 + i].astype(np.float64), history[len(history) - 29 + i]
            log_norm = row.max() + np.log(np.exp(row - row.max()).sum())
            top = draw(found.logits[case * 30 + i], Params(do_sample=False, logprobs=True, top_logprobs=20))
            at = case * 29 + i
            assert abs(found.prompt_logprobs[at] - (row[target] - log_norm)) < 1e-4
            assert found.prompt_top_ids[at].tolist() == top["top_ids"]
            assert found.prompt_top_logprobs[at].tobytes() == np.array(top["top_logprobs"], np.float32).tobytes()


def test_a_sample_is_the_same_in_every_batch():
    vocab, rng = 40_000, np.random.default_rng(4)
    head = Head(vocab, rng, 0.6, False)
    cases = []
    for how, fields in SETTINGS.items():
        params, history = random_case(rng, "all", vocab, 50)
        params.do_sample, params.seed, params.top_logprobs = how != "greedy", 5, 4
        for field, value in fields.items():
            setattr(params, field, value)
        cases.append((params, np.maximum(history, 1), None))
    cases = cases[:SLOTS]
    together = head.draws(cases)
    for i, case in enumerate(cases):
        alone = head.draws([case])
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == together.logprobs[i]
        assert alone.top_ids[0].tolist() == together.top_ids[i].tolist()


def test_long_histories_are_too_many_edits_for_one_step():
    """The host then samples the remaining rows."""
    vocab, rng = 151_936, np.random.default_rng(5)
    head = Head(vocab, rng, 1.0, False)
    biases = [(int(i), 0.5) for i in rng.permutation(vocab)]
    cases = [(Params(logit_bias=biases, seed=i, top_p=0.9, logprobs=True), rng.integers(1, vocab, 20), None)
             for i in range(SLOTS)]
    found = head.draws(cases)
    for i, (params, history, _mask) in enumerate(cases):
        assert_same(found, i, draw(found.logits[i], params, history))
