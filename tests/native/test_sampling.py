"""The native sampler against independent references: NumPy in float64 and transformers' logits processors."""

from dataclasses import replace

import numpy as np
import pytest

import allspark_server._native as native
from support.sampling_reference import (
    FILTERS,
    PROCESSORS,
    SAMPLES,
    Params,
    bitmask,
    chi_square,
    distribution,
    draw,
    log_softmax,
    processed,
    random_case,
    ranking,
)


# ---- processors ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("vocab, ranks", [(17, 1), (17, 3), (65, 2), (300, 1)])
def test_processors_rank_all_ids_as_the_reference(name, vocab, ranks, rng):
    for length in (1, 5, 40):
        logits = rng.normal(0, 1.5, vocab).astype(np.float32)
        p, history = random_case(rng, name, vocab, length)
        x = processed(logits, p, history)
        ids = ranking(logits, p, history, ranks)
        values = x[ids]
        assert sorted(ids) == sorted(np.flatnonzero(x > -np.inf))
        assert np.all(np.diff(values) <= 1e-5), "the order of two ids differs by more than rounding"


@pytest.mark.parametrize("name", ["repetition", "ngram1", "ngram2", "ngram3", "min_length", "bad_words"])
@pytest.mark.parametrize("vocab, ranks", [(17, 2), (1031, 3)])
def test_processors_as_transformers(name, vocab, ranks, rng):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    for length in (2, 60):
        logits = rng.normal(0, 1.5, vocab).astype(np.float32)
        p, history = random_case(rng, name, vocab, length)
        p.bad_words = p.bad_words[:-1]
        processor = {
            "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
            "ngram": lambda: hf.NoRepeatNGramLogitsProcessor(p.no_repeat_ngram_size),
            "min_length": lambda: hf.MinLengthLogitsProcessor(p.min_length, p.eos),
            "bad_words": lambda: hf.NoBadWordsLogitsProcessor(p.bad_words),
        }[name.rstrip("123")]()
        p.eos = p.eos if name == "min_length" else []
        want = processor(torch.tensor(history)[None], torch.tensor(logits)[None])[0].numpy()
        assert draw(logits, p, history, ranks)["token"] == want.argmax()
        np.testing.assert_allclose(processed(logits, p, history), want, rtol=1e-6)


@pytest.mark.parametrize("vocab, ranks", [(50, 1), (2000, 2), (5003, 1), (5003, 3)])
def test_min_p_keeps_the_tokens_that_transformers_keeps(vocab, ranks, rng):
    """Also for sets larger than the candidates, with and without top_k and top_p."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    for min_p, temperature, top_k, top_p in [(0.3, 1.0, 0, 1.0), (0.02, 2.5, 0, 1.0), (0.05, 1.5, 30, 1.0),
                                             (0.01, 2.0, 0, 0.9),
                                             (0.01, 2.0, 1500, 0.8), (0.001, 3.0, 0, 1.0)]:
        logits = rng.normal(0, 1.0, vocab).astype(np.float32)
        x = torch.tensor(logits)[None] / temperature
        for warper in ([hf.TopKLogitsWarper(top_k)] if top_k else []) + [hf.TopPLogitsWarper(top_p)] * (top_p < 1):
            x = warper(None, x)
        kept = np.flatnonzero(np.isfinite(hf.MinPLogitsWarper(min_p)(None, x)[0].numpy()))
        p = Params(min_p=min_p, temperature=temperature, top_k=top_k, top_p=top_p)
        drawn = {draw(logits, replace(p, seed=i), ranks=ranks)["token"] for i in range(300)}
        assert drawn <= set(kept.tolist())
        least = kept[np.argmin(logits[kept])]  # the last token of the set can be sampled, the next one cannot
        others = np.setdiff1d(np.arange(vocab), kept)
        if top_k == 0 and top_p == 1 and others.size:
            nearest = others[np.argmax(logits[others])]
            for token, possible in ((least, True), (nearest, False)):
                allowed = np.isin(np.arange(vocab), [token, np.argmax(logits)])
                seen = {draw(logits, replace(p, seed=i), mask=bitmask(allowed),
                             ranks=ranks)["token"] for i in range(3000)}
                assert (int(token) in seen) == possible or min_p < 0.01


def test_mask_and_its_borders(rng):
    for vocab in (1, 31, 32, 33, 1031):
        allowed = rng.random(vocab) < 0.3
        allowed[rng.integers(vocab)] = True
        logits = rng.normal(0, 2, vocab)
        p = Params(do_sample=False)
        want = np.where(allowed, np.float32(logits), -np.inf).argmax()
        for ranks in (1, 2, 4):
            assert draw(logits, p, ranks=ranks, mask=bitmask(allowed))["token"] == want
        for seed in range(50):
            for filters in (dict(), dict(top_k=5), dict(top_p=0.9)):
                assert allowed[draw(logits, Params(seed=seed, **filters), ranks=2, mask=bitmask(allowed))["token"]]


def test_penalties_may_overflow():
    logits = np.array([3e38, -3e38, 0, 1e30], np.float32)
    p = Params(repetition_penalty=1e-30, logprobs=True, top_p=0.9)
    assert draw(logits, p, [0, 1])["token"] == 0
    assert draw(logits, Params(presence_penalty=-3e38, do_sample=False), [3, 0])["token"] == 0


# ---- greedy, ties, everything banned, bad logits ------------------------------------------------------------

SIZES = [1, 2, 17, 255, 256, 257, 1031, 151936]


@pytest.mark.parametrize("vocab", SIZES)
def test_greedy_takes_the_lowest_id_of_the_best(vocab, one_rng):
    for ranks in (1, 2, 3, 4):
        logits = one_rng.integers(0, 4, vocab).astype(np.float32)
        cuts = sorted(int(c) for c in one_rng.integers(0, vocab + 1, ranks - 1))  # empty shards too
        for p in (Params(do_sample=False), Params(top_k=1), Params(temperature=0)):
            assert draw(logits, p, cuts=cuts)["token"] == logits.argmax()


@pytest.mark.parametrize(
    "filters", [dict(do_sample=False), dict(), dict(top_k=3), dict(top_p=0.5), dict(top_k=3, top_p=0.5)]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_everything_banned_falls_back(filters, ranks, rng):
    logits = rng.normal(size=9)
    history = list(range(9))
    p = Params(no_repeat_ngram_size=1, logprobs=True, eos=[4], **filters)
    assert draw(logits, p, history, ranks)["token"] == logits.argmax()
    allowed = np.zeros(9, bool)
    allowed[[2, 6]] = True
    assert draw(logits, p, history, ranks, bitmask(allowed))["token"] == (2 if logits[2] > logits[6] else 6)
    assert draw(logits, p, history, ranks, bitmask(np.zeros(9, bool)))["token"] == 4
    p.eos = []
    assert draw(logits, p, history, ranks, bitmask(np.zeros(9, bool)))["token"] == logits.argmax()


@pytest.mark.parametrize("filters", [dict(do_sample=False), dict(), dict(top_k=3), dict(top_p=0.5)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logits_are_a_status(filters, value, rng):
    for vocab in (1, 17, 1031):
        logits = rng.normal(size=vocab)
        logits[rng.integers(vocab)] = value
        for ranks in (1, 2, 4):
            out = draw(logits, Params(logprobs=True, **filters), ranks=ranks)
            assert out["token"] == -1 and "NaN" in out["status"]
    assert draw(np.full(17, -np.inf), Params(**filters), ranks=2)["token"] == -1


def test_minus_infinity_is_never_sampled(rng):
    logits = rng.normal(size=600)
    logits[rng.random(600) < 0.9] = -np.inf
    logits[300] = 0
    for seed in range(100):
        for filters in (dict(), dict(top_k=500), dict(top_p=0.999), dict(temperature=1e4)):
            out = draw(logits, Params(seed=seed, logprobs=True, **filters), ranks=3)
            assert logits[out["token"]] > -np.inf and np.isfinite(out["logprob"])


def test_malformed_blocks_are_named():
    good = Params(bad_words=[[1, 2]], eos=[3]).block()
    for cut in range(len(good)):
        with pytest.raises(ValueError, match="sampling block ends"):
            native.sample_once([np.zeros(4, np.float32)], good[:cut], np.zeros(0, np.int32))
    for change, name in [
        (dict(temperature=-1), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_k=-1), "top_k"),
        (dict(top_p=1.5), "top_p"),
        (dict(repetition_penalty=0), "repetition_penalty"),
        (dict(top_logprobs=21), "top_logprobs"),
        (dict(presence_penalty=float("inf")), "presence_penalty"),
        (dict(bad_words=[[]]), "bad word"),
        (dict(min_p=1.5), "min_p"),
        (dict(logit_bias=[(-1, 1.0)]), "logit bias"),
        (dict(logit_bias=[(1, float("nan"))]), "logit bias"),
    ]:
        with pytest.raises(ValueError, match=name):
            draw(np.zeros(4), replace(Params(), **change))


# ---- distributions ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_distribution(name, ranks, one_rng):
    vocab = 41
    logits = one_rng.normal(0, 1.5, vocab)
    history = one_rng.integers(0, vocab, 8)
    p = Params(prompt_len=3, eos=[5], **FILTERS[name])
    base = int(one_rng.integers(2**62))
    tokens = [
        draw(logits, replace(p, seed=base + i), history, ranks, cuts=[5, 30] if ranks == 3 else None)["token"]
        for i in range(SAMPLES)
    ]
    chi_square(tokens, distribution(np.float32(logits), p, history))


@pytest.mark.parametrize("ranks", [1, 4])
def test_distribution_over_several_chunks(ranks, one_rng):
    logits = one_rng.normal(0, 2, 1031)
    p = Params(temperature=1.2)
    tokens = [draw(logits, replace(p, seed=i), ranks=ranks)["token"] for i in range(SAMPLES)]
    chi_square(tokens, distribution(np.float32(logits), p))


@pytest.mark.parametrize("ranks", [1, 2])
def test_wide_nucleus_takes_the_second_round(ranks, one_rng):
    logits = one_rng.normal(0, 0.3, 5003)
    p = Params(top_p=0.6, logprobs=True)
    prob = distribution(np.float32(logits), p)
    outs = [draw(logits, replace(p, seed=i), ranks=ranks) for i in range(SAMPLES)]
    assert (prob > 0).sum() > 2048 and all(out["rounds"] > 1 for out in outs)
    # Rounding may move the nucleus' border by a token of mass 1/3000.
    tokens = np.array([out["token"] for out in outs])
    assert (prob[tokens] == 0).mean() < 0.002
    chi_square(tokens[prob[tokens] > 0], prob)
    raw = log_softmax(np.float32(logits))
    np.testing.assert_allclose([out["logprob"] for out in outs], raw[tokens], atol=2e-6)


def test_candidates_below_what_a_rank_left_out_do_not_count(one_rng):
    """One rank has 1,300 good tokens and sends 1,024; the other sends all of its worse ones. These must not fill the
    gap.
    """
    logits = np.concatenate([1 + one_rng.normal(0, 0.01, 1300), one_rng.normal(0, 0.01, 900)])
    p = Params(top_p=0.75)
    prob = distribution(np.float32(logits), p)
    assert prob[1300:].sum() == 0 and (prob > 0).sum() > 1100
    for seed in range(500):
        out = draw(logits, replace(p, seed=seed), cuts=[1300])
        assert out["rounds"] > 1 and out["token"] < 1300
        assert draw(logits[::-1], replace(p, seed=seed), cuts=[900])["token"] >= 900


@pytest.mark.parametrize("field_name", ["sample_index", "position"])
def test_samples_and_positions_are_independent_streams(field_name, one_rng):
    vocab = 6
    logits = one_rng.normal(0, 1, vocab)
    prob = distribution(np.float32(logits), Params())
    base = int(one_rng.integers(2**62))
    side = 142

    def token(seed, i):
        if field_name == "position":
            return draw(logits, Params(seed=seed), np.zeros(i, np.int32))["token"]
        return draw(logits, Params(seed=seed, sample_index=i))["token"]

    table = np.array([[token(base + s, i) for i in range(side)] for s in range(side)])
    assert table.size >= SAMPLES
    chi_square(table.ravel(), prob)
    chi_square((table[:, 1:] * vocab + table[:, :-1]).ravel(), np.outer(prob, prob).ravel())  # neighbours
    chi_square((table[1:] * vocab + table[:-1]).ravel(), np.outer(prob, prob).ravel())  # neighbouring seeds


def test_flat_big_vocabulary_reaches_everywhere(one_rng):
    vocab = 151936
    logits = one_rng.normal(0, 0.01, vocab)
    for ranks in (1, 4):
        tokens = [draw(logits, Params(seed=i), ranks=ranks)["token"] for i in range(1000)]
        chi_square(np.array(tokens) * 20 // vocab, np.full(20, 1 / 20))


# ---- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", SIZES)
def test_top_k_and_top_p_supports(vocab, one_rng):
    logits = one_rng.normal(0, 3, vocab)
    for filters in (
        dict(top_k=2),
        dict(top_k=50),
        dict(top_k=10**9),
        dict(top_p=0.5),
        dict(top_p=0.0),
        dict(top_k=20, top_p=0.3),
        dict(top_p=1e-9),
        dict(top_p=0.999),
    ):
        p = Params(**filters)
        prob = distribution(np.float32(logits), p)
        for seed in range(6 if vocab > 10**5 else 60):
            for ranks in (1, 2, 4):
                token = draw(logits, replace(p, seed=seed), ranks=ranks)["token"]
                assert prob[token] > 0, (filters, seed, ranks)


@pytest.mark.parametrize("vocab", [17, 1031, 151936])
def test_samples_do_not_depend_on_the_sharding(vocab, one_rng):
    logits = one_rng.normal(0, 2, vocab)
    history = one_rng.integers(0, vocab, 30)
    for seed in range(60 if vocab < 10**5 else 15):
        for filters in (
            dict(),
            dict(temperature=0.3),
            dict(temperature=1e30),
            dict(top_k=40),
            dict(top_k=5000),
            dict(top_p=0.4),
            dict(top_p=0.95, temperature=2.0),
            dict(top_k=300, top_p=0.9, repetition_penalty=1.3),
            dict(top_k=3000, top_p=0.9, temperature=1.5),
            dict(do_sample=False),
        ):
            p = Params(seed=seed, prompt_len=10, presence_penalty=0.4, no_repeat_ngram_size=1, logprobs=True, **filters)
            one = draw(logits, p, history)
            for ranks in (2, 3, 4):
                other = draw(logits, p, history, ranks)
                assert other["token"] == one["token"] and other["logprob"] == pytest.approx(one["logprob"], rel=1e-6)


def test_thousands_of_samples_do_not_depend_on_the_sharding(one_rng):
    for i in range(4000):
        vocab = int(one_rng.choice([5, 300, 1024, 1025, 5003, 16384, 16400, 40001]))
        logits = one_rng.normal(0, one_rng.uniform(0, 4), vocab)
        p = Params(seed=int(one_rng.integers(2**63)), sample_index=int(one_rng.integers(9)),
                   temperature=float(one_rng.choice([0.1, 0.7, 1, 3])), top_k=int(one_rng.choice([0, 0, 0, 50, 2000])),
                   top_p=float(one_rng.choice([1, 1, 0.99, 0.7])))
        history = np.zeros(int(one_rng.integers(1000)), np.int32)
        tokens = {draw(logits, p, history, ranks)["token"] for ranks in (1, 2, 3, 4)}
        assert len(tokens) == 1, (i, vocab, p)


def test_shards_are_made_of_whole_chunks():
    assert [native.chunk_of(n) for n in (1, 1024, 1025, 16384, 16385, 151936)] == [1, 1, 16, 16, 256, 256]
    with pytest.raises(ValueError, match="not made of whole chunks of 256 ids"):
        native.sample_once([np.zeros(100, np.float32), np.zeros(20000, np.float32)], Params().block(),
                           np.zeros(0, np.int32))


@pytest.mark.parametrize("ranks", [1, 3])
def test_distribution_of_a_wide_top_k(ranks, one_rng):
    logits = one_rng.normal(0, 0.5, 5003)
    for filters in (dict(top_k=2500), dict(top_k=2500, top_p=0.7)):
        p = Params(temperature=0.8, **filters)
        prob = distribution(np.float32(logits), p)
        outs = [draw(logits, replace(p, seed=i), ranks=ranks) for i in range(SAMPLES // 4)]
        assert all(out["rounds"] > 1 for out in outs)
        tokens = np.array([out["token"] for out in outs])
        if "top_p" in filters:  # rounding may move the border by a token
            assert (prob[tokens] == 0).mean() < 0.002
            tokens = tokens[prob[tokens] > 0]
        chi_square(tokens, prob)


def test_wide_sets_end_at_the_right_token(one_rng):
    """Ties go to the lowest id, in whichever bins; equal logits fill one bin."""
    vocab = 6000
    for logits in (np.zeros(vocab), one_rng.integers(0, 3, vocab).astype(float), one_rng.normal(0, 1e-9, vocab)):
        order = np.lexsort((np.arange(vocab), -np.float32(logits)))
        for k in (1025, 2047, 4999):
            allowed = set(order[:k].tolist())
            for temperature in (0.02, 1.0, 1e38):
                tokens = {draw(logits, Params(seed=s, top_k=k, temperature=temperature), ranks=1 + s % 4)["token"]
                          for s in range(60)}
                # Differences of less than 2^-30 of a step are ties.
                assert tokens <= allowed or np.ptp(logits) < 1e-6 or temperature > 1e30
    flat = [draw(np.zeros(vocab), Params(seed=s, top_p=0.5), ranks=1 + s % 4)["token"] for s in range(2000)]
    assert max(flat) < vocab / 2 + 1
    chi_square(np.array(flat) // 300, np.full(10, 0.1))


def test_messages_of_a_wide_set_are_small():
    logits = np.random.default_rng(1).normal(0, 2, 151936).astype(np.float32)
    for filters in (dict(top_p=0.999), dict(top_k=100_000), dict(top_k=100_000, top_p=0.99), dict()):
        assert draw(logits, Params(**filters), ranks=2)["largest_blob"] <= 24 << 10


@pytest.mark.parametrize("vocab", SIZES)
def test_same_key_same_bits(vocab, one_rng):
    logits = one_rng.normal(0, 2, vocab)
    for filters in (dict(), dict(top_k=4), dict(top_p=0.95), dict(temperature=2.5, top_p=0.99)):
        p = Params(seed=2**63 + 12345, sample_index=3, logprobs=True, top_logprobs=20, **filters)
        first = draw(logits, p, [0], 2)
        draw(logits[::-1], replace(p, seed=1), [0], 1)  # nothing is kept between samples
        assert draw(logits, p, [0], 2) == first


def test_speculation_samples_by_the_position_alone(one_rng):
    """A sample depends on its position's distribution and key only, not on how the history was reached."""
    logits = one_rng.normal(0, 2, 500)
    for seed in range(50):
        p = Params(seed=seed, top_p=0.95)
        assert (
            draw(logits, p, one_rng.integers(0, 500, 20))["token"]
            == draw(logits, p, one_rng.integers(0, 500, 20))["token"]
        )


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_logprobs(vocab, ranks, one_rng):
    """Log probabilities are those of the model's own logits, whatever processors, filters and masks do."""
    logits = np.float32(one_rng.normal(0, 4, vocab) + 30)
    want = log_softmax(logits)
    history = one_rng.integers(0, vocab, 20)
    for filters in (
        dict(do_sample=False),
        dict(),
        dict(top_k=9, temperature=0.7),
        dict(top_p=0.9, repetition_penalty=1.5),
    ):
        p = Params(logprobs=True, top_logprobs=int(one_rng.integers(0, 21)), presence_penalty=1.0, **filters)
        out = draw(logits, p, history, ranks)
        assert out["logprob"] == pytest.approx(want[out["token"]], abs=1e-5)
        shown = min(p.top_logprobs, vocab)
        ids = out["top_ids"][:shown]
        assert ids == list(np.lexsort((np.arange(vocab), -logits))[:shown])
        np.testing.assert_allclose(out["top_logprobs"][:shown], want[ids], atol=1e-5)
        assert out["top_ids"][shown:] == [-1] * (20 - shown)
        if out["token"] in ids:
            assert out["top_logprobs"][ids.index(out["token"])] == out["logprob"]
    assert draw(logits, Params(), history, ranks)["logprob"] == 0


def philox(seed, sample_index, position):
    """Philox4x32-10 by its definition, in Python integers."""
    low = 0xFFFFFFFF
    c = [position, sample_index, 0, 0]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


def test_philox_and_inverse_cdf(one_rng):
    assert [f"{w:08x}" for w in philox(0, 0, 0)] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]  # Random123's known answer
    vocab = 1000
    for _ in range(200):
        seed, index, position = (
            int(one_rng.integers(2**63)),
            int(one_rng.integers(2**31)),
            int(one_rng.integers(1, 3000)),
        )
        words = philox(seed, index, position)
        uniform = ((words[0] << 32 | words[1]) >> 11) / 2**53
        p = Params(seed=seed, sample_index=index, top_k=vocab)
        token = draw(np.zeros(vocab), p, np.zeros(position, np.int32))["token"]
        assert token == int(uniform * vocab)
