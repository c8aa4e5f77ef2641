"""A reference for the native sampler, in NumPy and float64, and cases for it.

Inputs are new in every run. ALLSPARK_TEST_SEED=N repeats those of a failing test; N is the number in its id.
"""

import os
import secrets
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

import allspark_server._native as native

SEED = int(os.environ.get("ALLSPARK_TEST_SEED", secrets.randbits(32)))
SAMPLES = 20_000
SMALLEST_P = 1e-6  # of a chi-square test: a correct sampler fails one test in a million


@dataclass
class Params:
    """Fields of the sampling block, neutral by default."""

    do_sample: bool = True
    logprobs: bool = False
    suppress: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    top_logprobs: int = 0
    seed: int = 0
    sample_index: int = 0
    prompt_len: int = 0
    eos: list = field(default_factory=list)
    bad_words: list = field(default_factory=list)
    min_p: float = 0.0
    logit_bias: list = field(default_factory=list)  # (id, bias)

    def block(self) -> np.ndarray:
        def real(x):
            return int(np.float32(x).view(np.int32))

        extended = bool(self.min_p or self.logit_bias)
        words = [
            self.do_sample + 2 * self.logprobs + 4 * self.suppress + 8 * extended,
            real(self.temperature),
            self.top_k,
            real(self.top_p),
            real(self.repetition_penalty),
            real(self.presence_penalty),
            real(self.frequency_penalty),
            self.no_repeat_ngram_size,
            self.min_length,
            self.top_logprobs,
            int(np.uint32(self.seed & 0xFFFFFFFF).view(np.int32)),
            int(np.uint32(self.seed >> 32).view(np.int32)),
            self.sample_index,
            self.prompt_len,
            len(self.eos),
            len(self.bad_words),
            *self.eos,
        ]
        for word in self.bad_words:
            words += [len(word), *word]
        if extended:
            words += [real(self.min_p), len(self.logit_bias)]
            for token, bias in self.logit_bias:
                words += [token, real(bias)]
        return np.array(words, np.int32)


def draw(logits, params, history=(), ranks=1, mask=None, cuts=None, threads=0):
    if cuts is None:
        cuts = [len(logits) * r // ranks for r in range(1, ranks)]
    unit = native.chunk_of(len(logits))
    shards = np.split(np.asarray(logits, np.float32), [cut // unit * unit for cut in cuts])
    return native.sample_once(shards, params.block(), np.asarray(history, np.int32), mask, threads)


def bitmask(allowed):
    bits = np.zeros((len(allowed) + 31) // 32 * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


# ---- reference ----------------------------------------------------------------------------------------------


def processed(logits, p, history):
    """Logits after all processors, in float64."""
    x = np.array(logits, np.float64)
    history = list(history)
    for t in set(history[p.prompt_len if p.suppress else 0 :]):
        x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
    output = history[p.prompt_len :]
    for t in set(output):
        x[t] -= p.presence_penalty + p.frequency_penalty * output.count(t)
    n = p.no_repeat_ngram_size
    if n:
        for i in range(len(history) - n + 1):
            if history[i : i + n - 1] == history[len(history) - n + 1 :]:
                x[history[i + n - 1]] = -np.inf
    for word in p.bad_words:
        if len(word) == 1 and word[0] in p.eos:
            continue
        if len(word) - 1 <= len(history) and history[len(history) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(history) < p.min_length:
        x[p.eos] = -np.inf
    for token, bias in p.logit_bias:
        x[token] += np.float32(bias)
    return x


def distribution(logits, p, history=()):
    x = processed(logits, p, history) / p.temperature
    order = np.lexsort((np.arange(len(x)), -x))
    if p.top_k:
        x[order[p.top_k :]] = -np.inf
    prob = np.exp(x - x.max())
    prob /= prob.sum()
    if p.top_p < 1:
        before = np.cumsum(prob[order]) - prob[order]
        prob[order[(before >= np.float32(p.top_p)) & (np.arange(len(x)) > 0)]] = 0
        prob /= prob.sum()
    if p.min_p:
        prob[prob < np.float32(p.min_p) * prob.max() * (1 - 1e-7)] = 0
        prob /= prob.sum()
    return prob


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def chi_square(tokens, prob):
    counts = np.bincount(tokens, minlength=len(prob))
    assert counts[prob == 0].sum() == 0, "a token was drawn that the filters exclude"
    expected = prob * len(tokens)
    order = np.argsort(expected)
    # Cells with fewer than 5 expected samples are pooled.
    pooled, observed, want = [], [], []
    for t in order[expected[order] > 0]:
        pooled.append(t)
        if expected[pooled].sum() >= 5:
            observed.append(counts[pooled].sum())
            want.append(expected[pooled].sum())
            pooled = []
    if pooled:
        observed[-1] += counts[pooled].sum()
        want[-1] += expected[pooled].sum()
    if len(want) < 2:
        return
    p_value = stats.chisquare(observed, np.array(want) * sum(observed) / sum(want)).pvalue
    assert p_value > SMALLEST_P


def ranking(logits, params, history, ranks):
    """Ids in the order of descending logits, as greedy sampling takes them; banned ids are left out."""
    allowed = np.ones(len(logits), bool)
    alive = processed(logits, params, history) > -np.inf
    ids = []
    for _ in range(alive.sum()):
        ids.append(draw(logits, params, history, ranks, bitmask(allowed))["token"])
        allowed[ids[-1]] = False
    return ids


# ---- cases ---------------------------------------------------------------------------------------------------

PROCESSORS = {
    "repetition": dict(repetition_penalty=1.7),
    "repetition_below_1": dict(repetition_penalty=0.6),
    "suppress": dict(repetition_penalty=1.7, suppress=True),
    "presence": dict(presence_penalty=0.9),
    "frequency": dict(frequency_penalty=0.4),
    "negative": dict(presence_penalty=-0.7, frequency_penalty=-0.3),
    "ngram1": dict(no_repeat_ngram_size=1),
    "ngram2": dict(no_repeat_ngram_size=2),
    "ngram3": dict(no_repeat_ngram_size=3),
    "min_length": dict(min_length=10**6),
    "min_length_reached": dict(min_length=1),
    "bad_words": dict(),
    "logit_bias": dict(),
    "all": dict(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, no_repeat_ngram_size=2, min_length=30
    ),
}


def random_case(rng, name, vocab, length):
    history = rng.integers(0, max(1, vocab // 2), length)
    p = Params(do_sample=False, prompt_len=int(rng.integers(0, length + 1)), **PROCESSORS[name])
    p.eos = sorted({int(i) for i in rng.integers(0, vocab, 2)})
    if name in ("bad_words", "all"):
        tail = [int(i) for i in history[-2:]]
        p.bad_words = [
            [int(rng.integers(vocab))],
            [*tail[-1:], int(rng.integers(vocab))],
            [*tail, int(rng.integers(vocab))],
            [int(i) for i in rng.integers(0, vocab, 3)],
            [p.eos[0]],
        ]
    if name in ("logit_bias", "all"):
        ids = [*rng.integers(0, vocab, 5), *history[-1:]]
        p.logit_bias = [(int(i), float(rng.normal(0, 3))) for i in [*ids, ids[0]]]
    return p, history


FILTERS = {
    "plain": dict(),
    "hot": dict(temperature=1.9),
    "cold": dict(temperature=0.45),
    "top_k": dict(top_k=7),
    "top_p": dict(top_p=0.8),
    "top_k_top_p": dict(top_k=12, top_p=0.7, temperature=1.3),
    "min_p": dict(min_p=0.1, temperature=1.2),
    "min_p_top_p": dict(min_p=0.02, top_p=0.9, temperature=1.7),
    "min_p_top_k": dict(min_p=0.05, top_k=9, temperature=2.0),
    "logit_bias": dict(logit_bias=[(3, 2.0), (40, -1.5), (3, 0.5), (7, 3.0)]),
    "everything": dict(
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        no_repeat_ngram_size=2,
        min_length=9,
        min_p=0.03,
        logit_bias=[(11, 1.0), (12, -2.0)],
    ),
}


SETTINGS = {
    "greedy": dict(do_sample=False),
    "plain": dict(),
    "top_k": dict(top_k=40),
    "wide_top_k": dict(top_k=1500, temperature=2.0),
    "nucleus": dict(top_p=0.9),
    "wide_nucleus": dict(top_p=0.95, temperature=3.0),
    "wide_both": dict(top_k=3000, top_p=0.9, temperature=3.0),
    "min_p": dict(min_p=0.05),
    "wide_min_p": dict(min_p=0.0005, temperature=3.0),
    "all_filters": dict(top_k=2000, top_p=0.97, min_p=0.01, temperature=2.5),
}
