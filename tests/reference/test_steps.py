"""Plans of version 2 in the reference backend: chunks, drafts, outputs, masks, sampling, ranks."""

from __future__ import annotations

import numpy as np
import pytest

from reference.backend import compile
from reference.batch import Limits, look_up
from reference.plan import COPIES, GIVEN, HIDDEN, LOOKUP, PROMPT, SAMPLE
from reference.toy import ALL, OUTPUTS, Toy, fields, generate, item, plan, spans_for, start

VOCAB, WIDTH, HEADS = 37, 12, (2, 1, 4)
GREEDY, DRAWN = {}, {"do_sample": True, "temperature": 1.3, "seed": 7, "top_k": 20}


def model():
    """Embedding, two layers of attention and a gated product, and a head."""
    toy = Toy()
    x = toy.embedding(VOCAB, WIDTH, toy.rng.normal(size=(VOCAB, WIDTH)))
    toy.rotary(4)
    for layer in range(2):
        qkv = toy.op("linear", (x,), 16, (toy.matrix(16, WIDTH),))
        toy.op("rope", (qkv,), offset=0, heads=3, head_dim=4)
        attended = toy.attention(qkv, *HEADS, layer=layer)
        toy.op("add", (x, toy.op("linear", (attended,), WIDTH, (toy.matrix(WIDTH, 8),))))
        both = toy.op("linear", (x,), 10, (toy.matrix(10, WIDTH),))
        toy.op("add", (x, toy.op("linear", (toy.op("silu_mul", (both,), 5),), WIDTH, (toy.matrix(WIDTH, 5),))))
    selected = toy.op("select_rows", (x,), WIDTH, rows=OUTPUTS)
    toy.op("hidden_states", (selected,))
    logits = toy.op("linear", (selected,), VOCAB, (toy.matrix(VOCAB, WIDTH),))
    toy.op("sample", (logits,), vocab_begin=0, vocab_size=VOCAB)
    return toy


def prompt_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


@pytest.fixture(scope="module")
def toy():
    return model()


@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_chunks_do_not_matter(toy, chunk, sampling):
    expected, whole, _ = generate(toy.runner(), prompt_of(33), 8, **sampling)
    found, parts, _ = generate(toy.runner(), prompt_of(33), 8, chunk=chunk, **sampling)
    assert found == expected
    np.testing.assert_allclose(parts.logits, whole.logits, rtol=1e-12)


def test_positions_in_the_prefix_cache_are_not_computed(toy):
    runner, prompt = toy.runner(), prompt_of(40)
    expected, *_ = generate(toy.runner(), prompt, 3)
    runner.step(plan([item(0, 32, 0, spans=[5, 6])], [start(0, prompt)]))
    work = item(1, 8, SAMPLE, spans=[5, 6, 9])
    found = runner.step(plan([work], [start(1, prompt, cached=32)], free=[0]))
    assert found.tokens.tolist() == expected[:1] and found.counts.tolist() == [1]


def test_spans_go_to_the_host_cache_and_come_back(toy):
    """With the same plans and tokens as on CPUs."""
    runner, prompt = toy.runner(), prompt_of(40)
    expected, *_ = generate(toy.runner(), prompt, 3)
    runner.step(plan([item(0, 32, 0, spans=[5, 6])], [start(0, prompt)]))
    key = [[5, 5, 5, 5], [6, 6, 6, 6]]
    saved = [2, 5, 0, *key[0], 6, 1, *key[1]]
    runner.step(plan([], free=[0], sections=[(COPIES, saved)]))
    runner.step(plan([item(0, 40, 0, spans=[5, 6, 7])], [start(0, prompt_of(41, seed=1))]))
    restored = [0, 3, 0, *key[0], 6, 1, *key[1]]
    work = item(1, 8, SAMPLE, spans=[3, 6, 9])
    found = runner.step(plan([work], [start(1, prompt, cached=32)], free=[0], sections=[(COPIES, restored)]))
    assert found.tokens.tolist() == expected[:1]
    with pytest.raises(ValueError, match="span 1 of the host cache is not what was saved there"):
        runner.step(plan([], sections=[(COPIES, [0, 6, 1, *key[0]])]))


# -- drafts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, {**DRAWN, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3}])
@pytest.mark.parametrize("right", [0, 2, 4])
def test_drafts_change_no_token_and_what_is_rejected_leaves_no_trace(toy, sampling, right):
    """If n of four drafts are right, a step yields 1 + n tokens, and they are those sampled without drafts."""
    prompt = prompt_of(19)
    expected, alone, steps = generate(toy.runner(span_size=4), prompt, 24, **sampling)

    def guess(tokens):
        ahead = expected[len(tokens):len(tokens) + 4]
        return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(ahead)] if len(ahead) == 4 else []

    found, result, fewer = generate(toy.runner(span_size=4), prompt, 24, flags=GIVEN, guess=guess, **sampling)
    assert found == expected and steps == 24
    assert result.counts.max() == 1 + right and fewer == pytest.approx(24 / (1 + right), abs=4)
    np.testing.assert_allclose(result.logits[:24], alone.logits, rtol=1e-9)
    np.testing.assert_allclose(result.logprobs[:24], alone.logprobs, rtol=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_lookup_accepts_repetitions(sampling):
    """A model that maps each token to its successor: all drafts are right."""
    toy, period = Toy(), 9
    x = toy.embedding(VOCAB, 32, np.eye(VOCAB, 32))
    head = np.zeros((VOCAB, 32))
    for token in range(period):
        head[(token + 1) % period, token] = 50.0
    toy.finish(toy.op("linear", (x,), VOCAB, (toy.matrix(VOCAB, 32, head),)))
    prompt = list(range(period)) + [0, 1]
    expected, *_ = generate(toy.runner(), prompt, 30, **sampling)
    found, result, steps = generate(toy.runner(), prompt, 30, drafts=5, flags=LOOKUP, **sampling)
    assert found == expected == [(2 + i) % period for i in range(30)]
    assert result.counts.tolist()[:-1] == [6] * (steps - 1) and steps == 5


def test_lookup_takes_the_longest_match_and_of_equal_ones_the_latest():
    assert look_up([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 2) == [4, 9]  # [1, 2, 3] beats the later [2, 3]
    assert look_up([7, 2, 3, 4, 8, 2, 3, 5, 9, 2, 3], 2) == [5, 9]
    assert look_up([1, 2, 3, 4], 3) == [] and look_up([5, 5, 5], 4) == [5, 5, 5, 5]


def test_drafts_end_where_spans_or_the_length_end(toy):
    prompt = prompt_of(14)
    step = toy.runner(max_length=16).step(plan([item(0, 14, SAMPLE | GIVEN, known=[1] * 5, drafts=5, spans=[0])],
                                               [start(0, prompt)]))
    assert len(step.counts) == 1  # and no row was written beyond the span


def test_a_plan_is_made_before_the_last_one_s_tokens_are_known(toy):
    """Items give numbers of positions, not tokens, because ranks know the tokens."""
    prompt = prompt_of(20)
    expected, *_ = generate(toy.runner(), prompt, 6, **DRAWN)
    plans = [plan([item(0, 20, SAMPLE, spans=spans_for(26))], [start(0, prompt, **DRAWN)])]
    plans += [plan([item(0, 1, SAMPLE)]) for _ in range(5)]
    runner = toy.runner()
    assert np.concatenate([runner.step(data).tokens for data in plans]).tolist() == expected


def test_a_forced_continuation_enters_the_history(toy):
    prompt = prompt_of(10)
    runner = toy.runner()
    first = runner.step(plan([item(0, 10, SAMPLE, spans=[0])], [start(0, prompt)])).tokens[0]
    found = runner.step(plan([item(0, 4, SAMPLE, known=[3, 1, 4])])).tokens[0]
    whole = start(0, [*prompt, int(first), 3, 1, 4])
    again = toy.runner().step(plan([item(0, 14, SAMPLE, spans=[0])], [whole])).tokens[0]
    assert found == again


# -- outputs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cuts", [(21,), (5, 16), (1, 2, 18)])
def test_log_probabilities_of_a_prompt_and_hidden_states(toy, cuts):
    """Outputs of every position are independent of chunks: they are those of each token's own row."""
    prompt, runner, new, found, hidden = prompt_of(21), toy.runner(), None, [], []
    new, begin = [start(0, prompt)], 0
    for count in cuts:
        last = begin + count == 21
        flags = PROMPT | HIDDEN | (SAMPLE if last else 0)
        work = item(0, count, flags, outputs=count, spans=spans_for(21) if new else [])
        step = runner.step(plan([work], new))
        found += step.prompt_logprobs.tolist()
        hidden.append(step.hidden)
        new, begin = [], begin + count
    head, hidden = toy.weights[max(toy.weights)], np.concatenate(hidden)
    logits = hidden @ head.T
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(found, logprobs[np.arange(20), prompt[1:]], rtol=1e-12)
    for n in (1, 13, 21):
        alone = toy.runner().step(plan([item(0, n, SAMPLE, spans=spans_for(n))], [start(0, prompt[:n])]))
        np.testing.assert_allclose(alone.logits[0], logits[n - 1], rtol=1e-12)
    assert step.tokens.tolist() == [logits[20].argmax()]


def test_items_with_and_without_outputs_in_one_step(toy):
    a, b, c = prompt_of(9, 1), prompt_of(12, 2), prompt_of(5, 3)
    work = [item(0, 9, SAMPLE, spans=[3]), item(1, 7, 0, spans=[1]), item(2, 5, SAMPLE | HIDDEN, spans=[2], outputs=2)]
    step = toy.runner().step(plan(work, [start(0, a), start(1, b), start(2, c)]))
    assert step.tokens.tolist() == [generate(toy.runner(), p, 1)[0][0] for p in (a, c)]
    assert step.hidden.shape == (2, WIDTH) and step.counts.tolist() == [1, 1]


# -- sampling ----------------------------------------------------------------------------------------------------------
def mask_of(allowed):
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def test_masks_are_bound_late_and_each_draft_has_its_own(toy):
    """A mask is read when the sampling op needs it; an item's further outputs use the masks that follow."""
    prompt, asked = prompt_of(8), []
    masks = np.stack([mask_of([30, 31]), mask_of([4]), mask_of([6, 7]), mask_of(range(VOCAB))])

    def late():
        asked.append(True)
        return masks

    runner = toy.runner()
    new, other = start(0, prompt), start(1, prompt)
    work = [item(1, 8, SAMPLE, spans=[4]), item(0, 8, SAMPLE | GIVEN, known=[4, 7], drafts=2, spans=[0], mask=2)]
    step = runner.step(plan(work, [new, other]), late)
    assert asked == [True] and step.tokens[0] == generate(toy.runner(), prompt, 1)[0][0]
    assert step.tokens[1] == 4 and step.tokens[2] in (6, 7) and step.counts[1] == 2 + (step.tokens[2] == 7)
    assert runner.step(plan([item(0, 1, SAMPLE, mask=1)]), masks).tokens[0] in (30, 31)


def test_logit_bias_moves_the_choice_but_not_the_log_probabilities(toy):
    prompt = prompt_of(8)
    plain = toy.runner().step(plan([item(0, 8, SAMPLE, spans=[0])], [start(0, prompt)]))
    best, other = int(plain.tokens[0]), (int(plain.tokens[0]) + 5) % VOCAB
    new = start(0, prompt, extra=fields(logit_bias={other: 100.0, best: -2.5}))
    step = toy.runner().step(plan([item(0, 8, SAMPLE, spans=[0])], [new]))
    logprobs = plain.logits[0] - np.logaddexp.reduce(plain.logits[0])
    assert step.tokens.tolist() == [other]
    np.testing.assert_allclose(step.logprobs, logprobs[[other]], rtol=1e-5)


def test_min_p_leaves_out_what_is_far_from_the_best(toy):
    prompt, sampling = prompt_of(8), {"do_sample": True, "temperature": 2.0}
    drawn = {min_p: set() for min_p in (0.0, 0.3, 1.0)}
    for min_p in drawn:
        for seed in range(120):
            new = start(0, prompt, extra=fields(min_p=min_p), seed=seed, **sampling)
            step = toy.runner().step(plan([item(0, 8, SAMPLE, spans=[0])], [new]))
            drawn[min_p].add(int(step.tokens[0]))
    shares = np.exp((step.logits[0] - step.logits[0].max()) / 2.0)
    assert drawn[1.0] == {int(shares.argmax())}
    assert drawn[0.3] == set(np.flatnonzero(shares >= 0.3).tolist()) < drawn[0.0]


def test_a_row_without_numbers_says_so(toy):
    broken = model()
    broken.weights[0] = broken.weights[0].copy()
    broken.weights[0][3] = np.nan
    step = broken.runner().step(plan([item(0, 2, SAMPLE, spans=[0]), item(1, 2, SAMPLE, spans=[1])],
                                     [start(0, [1, 3]), start(1, [1, 2])]))
    assert step.status.tolist() == [1, 0] and step.tokens[0] == -1 and step.counts.tolist() == [1, 1]


# -- adapters ----------------------------------------------------------------------------------------------------------
def with_lora():
    """Program: x -> W x + B A x (targets 0 and 1 of one packed product) -> + x."""
    toy = Toy(3)
    x = toy.embedding(VOCAB, WIDTH, np.random.default_rng(1).normal(size=(VOCAB, WIDTH)))
    y = toy.op("linear", (x,), WIDTH, (toy.matrix(WIDTH, WIDTH),))
    toy.op("lora", (y, x), target=0, offset=0, columns=5)
    toy.op("lora", (y, x), target=1, offset=5, columns=WIDTH - 5)
    toy.emit(toy.op("add", (x, y)))
    return toy


def test_adapters_add_to_a_linear_before_its_residual():
    toy, rng = with_lora(), np.random.default_rng(2)
    adapters = [{0: (rng.normal(size=(2, WIDTH)), rng.normal(size=(5, 2))),
                 1: (rng.normal(size=(4, WIDTH)), rng.normal(size=(7, 4)))},
                {1: (rng.normal(size=(1, WIDTH)), rng.normal(size=(7, 1)))}]
    prompts = [prompt_of(6, seed) for seed in range(4)]
    runner = toy.runner()
    runner.set_adapter([adapters])
    chosen = (1, -1, 0, 1)
    work = [item(i, 6, HIDDEN, outputs=6, spans=[i], adapter=a) for i, a in enumerate(chosen)]
    found = runner.step(plan(work, [start(i, p) for i, p in enumerate(prompts)])).hidden.reshape(4, 6, WIDTH)
    table, weight = toy.weights[0], toy.weights[1]
    for i, (prompt, adapter) in enumerate(zip(prompts, chosen)):
        merged = weight.copy()
        for target, rows in ((0, slice(0, 5)), (1, slice(5, None))):
            if adapter >= 0 and target in adapters[adapter]:
                a, b = adapters[adapter][target]
                merged[rows] += b @ a
        np.testing.assert_allclose(found[i], table[prompt] @ (np.eye(WIDTH) + merged.T), rtol=1e-12, atol=1e-13)
    plain = toy.runner().step(plan([item(1, 6, HIDDEN, outputs=6, spans=[0])], [start(1, prompts[1])])).hidden
    np.testing.assert_array_equal(found[1], plain)


# -- ranks -------------------------------------------------------------------------------------------------------------
def divided(world):
    """Splits the model's last product along K, so that ranks' parts are added in rank order, and the head by
    vocabulary.
    """
    cuts, ids = np.linspace(0, WIDTH, world + 1).astype(int), np.linspace(0, VOCAB, world + 1).astype(int)
    rng = np.random.default_rng(4)
    table, weight, head = (rng.normal(size=(n, WIDTH)) for n in (VOCAB, WIDTH, VOCAB))
    toys = []
    for rank in range(world):
        toy, own, local = Toy(), slice(cuts[rank], cuts[rank + 1]), slice(ids[rank], ids[rank + 1])
        x = toy.op("embedding", (), WIDTH, (toy.matrix(local.stop - local.start, WIDTH, table[local]),), ALL,
                   vocab_begin=int(local.start))
        toy.op("all_reduce", (x,))
        middle = toy.op("linear", (x,), own.stop - own.start, (toy.matrix(own.stop - own.start, WIDTH, weight[own]),))
        y = toy.op("linear", (middle,), WIDTH, (toy.matrix(WIDTH, own.stop - own.start, weight[:, own]),))
        selected = toy.op("select_rows", (toy.op("all_reduce", (y,)),), WIDTH, rows=OUTPUTS)
        toy.op("hidden_states", (selected,))
        logits = toy.op("linear", (selected,), local.stop - local.start,
                        (toy.matrix(local.stop - local.start, WIDTH, head[local]),))
        toy.op("sample", (logits,), vocab_begin=int(local.start), vocab_size=VOCAB)
        toys.append(toy)
    return compile([t.program for t in toys], [t.weights for t in toys], Limits())


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_ranks_add_up_to_one(world, sampling):
    prompt = prompt_of(15)
    expected, alone, _ = generate(divided(1), prompt, 12, **sampling)
    found, result, _ = generate(divided(world), prompt, 12, **sampling)
    assert found == expected
    np.testing.assert_allclose(result.logits, alone.logits, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(result.logprobs, alone.logprobs, rtol=1e-5)


def test_ranks_run_the_same_ops():
    with pytest.raises(ValueError, match="ranks run different ops"):
        compile([model().program, with_lora().program], [model().weights, with_lora().weights], Limits())


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("work, new, problem", [
    ([item(3, 1)], [], "slot 3 holds no sequence"),
    ([], [start(9, [1])], "slot 9 is taken, or not there"),
    ([], [start(0, [1, 2], cached=1)], "1 cached positions of 2"),
    ([item(0, 3, spans=[0])], [start(0, [1, 2])], "positions 0...3 of 2 tokens"),
    ([item(0, 1, spans=[0])], [start(0, [1, 2])], "positions 0...1 of 2 tokens"),
    ([item(0, 2)], [start(0, [1, 2])], "positions up to 2, of which spans hold 0"),
    ([item(0, 2, spans=[64])], [start(0, [1, 2])], r"spans \[64\] of 64"),
    ([item(0, 2, SAMPLE | 8, spans=[0], drafts=1)], [start(0, [1, 2])], "ask for a draft model"),
    ([item(0, 2, 64, spans=[0])], [start(0, [1, 2])], "flags 64 are not known"),
    ([item(0, 2, HIDDEN, outputs=3, spans=[0])], [start(0, [1, 2])], "3 outputs of 2 rows"),
])  # fmt: skip
def test_plans_that_cannot_be(toy, work, new, problem):
    with pytest.raises(ValueError, match=problem):
        toy.runner().step(plan(work, new))


def test_sections_of_unknown_kinds_and_damaged_plans(toy):
    with pytest.raises(ValueError, match="a section of the unknown kind 99"):
        toy.runner().step(plan([], sections=[(99, [1])]))
    data = plan([item(0, 2, spans=[0])], [start(0, [1, 2])])
    for cut in (data[:-4], data + b"\0\0\0\0", data[4:], data[:7]):
        with pytest.raises(ValueError, match="step plan"):
            toy.runner().step(cut)
