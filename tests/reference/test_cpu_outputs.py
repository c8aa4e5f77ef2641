"""Further outputs of the CPU backend's rows: hidden states, log probabilities of prompts, and samples under masks that
are written while the step runs. Against the reference backend, on one rank and two.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from allspark_server import _native
from reference.backend import compile
from reference.batch import Limits
from reference.plan import GIVEN, HIDDEN, PROMPT, SAMPLE
from reference.test_cpu_ops import SEED, compiled
from reference.toy import OUTPUTS, Toy, item, plan, start
from support.driver import shared_memories

VOCAB, WIDTH, MASKS = 71, 24, 12
WORDS = -(-VOCAB // 32)


@pytest.fixture(autouse=True)
def seed():
    """Shown with a failure; ALLSPARK_TEST_SEED makes the same inputs again."""
    print(f"ALLSPARK_TEST_SEED={SEED}")


def model(rank: int = 0, world: int = 1, hidden: bool = True) -> Toy:
    """Two layers and a norm that every rank has whole, and a head divided among ranks."""
    own = Toy(SEED)
    x = own.embedding(VOCAB, WIDTH, own.rng.normal(size=(VOCAB, WIDTH)))
    own.rotary(8)
    for layer in range(2):
        qkv = own.op("linear", (x,), 40, (own.matrix(40, WIDTH),))
        own.op("rope", (qkv,), offset=0, heads=4, head_dim=8)
        attended = own.attention(qkv, 3, 1, 8, layer=layer)
        own.op("add", (x, own.op("linear", (attended,), WIDTH, (own.matrix(WIDTH, 24),))))
    selected = own.op("select_rows", (x,), WIDTH, rows=OUTPUTS)
    normed = own.op("rms_norm", (selected,), WIDTH, (own.vector(WIDTH),), eps=1e-5)
    if hidden:
        own.op("hidden_states", (normed,))
    head = own.rng.normal(size=(VOCAB, WIDTH)) * WIDTH**-0.5
    first, last = VOCAB * rank // world, VOCAB * (rank + 1) // world
    logits = own.op("linear", (normed,), last - first, (own.matrix(last - first, WIDTH, head[first:last]),))
    own.op("sample", (logits,), vocab_begin=first, vocab_size=VOCAB)
    return own


class Cpu:
    """The same program in the CPU backend, on some ranks."""

    def __init__(self, world: int, masks: int = MASKS, hidden: bool = True):
        self.ranks = [compiled(model(rank, world, hidden), 2 // world, rank, world, window, masks=masks)
                      for rank, window in enumerate(shared_memories(world))]
        self.masks, self.pool = self.ranks[0].masks, ThreadPoolExecutor(world)

    def step(self, data: bytes, want_logits: bool = False):
        return next(f.result() for f in [self.pool.submit(r.step, data, want_logits) for r in self.ranks])

    def write(self, row: int, mask: np.ndarray) -> None:
        self.masks.bits[row] = mask
        self.masks.publish([row])


def reference(world: int = 1):
    toys = [model(rank, world) for rank in range(world)]
    return compile([own.program for own in toys], [own.weights for own in toys], Limits(num_spans=(64,)))


def mask_of(allowed) -> np.ndarray:
    bits = np.zeros(32 * WORDS, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def compare(found, expected) -> None:
    if len(expected.prompt_logprobs):
        np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, atol=1e-4)
    else:
        assert found.prompt_logprobs is None
    if len(expected.hidden):
        np.testing.assert_allclose(found.hidden, expected.hidden, atol=1e-4 * np.abs(expected.hidden).max())
    else:
        assert found.hidden is None
    assert found.counts.tolist() == expected.counts.tolist() and found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_hidden_states_and_log_probabilities_of_prompts(world):
    """Prompts cut at random, every flag in one step; rows of others between them."""
    rng, cpu, exact = np.random.default_rng(SEED + 2), Cpu(world), reference(world)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 31, 40, 5)]
    flags = [HIDDEN, PROMPT, PROMPT | HIDDEN, PROMPT, HIDDEN, 0]
    draws = [False, True, True, False, True, True]
    new = [start(slot, prompt) for slot, prompt in enumerate(prompts)]
    done, spans = [0] * len(prompts), [0] * len(prompts)
    # Nothing follows a prompt's last row, unless a token is drawn there.
    ends = [len(prompt) - (flags[slot] == PROMPT and not draws[slot]) for slot, prompt in enumerate(prompts)]
    while any(d < end for d, end in zip(done, ends)):
        work = []
        for slot, end in enumerate(ends):
            left = end - done[slot]
            if not left:
                continue
            rows = int(rng.integers(1, min(left, 10) + 1))  # 64 outputs fit in a step
            drawn = rows == left and draws[slot]
            outputs = rows if flags[slot] else int(drawn)
            needed = -(-(done[slot] + rows) // 16)
            work.append(item(slot, rows, flags[slot] | (SAMPLE if drawn else 0), outputs=outputs,
                             spans=list(range(8 * slot + spans[slot], 8 * slot + needed))))
            done[slot], spans[slot] = done[slot] + rows, needed
        data = plan(work, new)
        new = []
        compare(cpu.step(data), exact.step(data))


def test_a_prompts_log_probabilities_do_not_depend_on_its_chunks():
    prompt = np.random.default_rng(SEED).integers(0, VOCAB, 45).tolist()

    def score(chunk):
        cpu, found, tops = Cpu(1), [], []
        for done in range(0, 44, chunk):
            rows = min(chunk, 44 - done)
            spans = list(range(-(-done // 16), -(-(done + rows) // 16)))
            result = cpu.step(plan([item(0, rows, PROMPT, outputs=rows, spans=spans)],
                                   [start(0, prompt)] if not done else []))
            found.append(result.prompt_logprobs)
            tops.append(result.prompt_top_ids)
        return np.concatenate(found), np.concatenate(tops)

    whole, ids = score(44)
    assert (ids[:, 0] >= 0).all() and len(np.unique(ids[0])) == 20
    for chunk in (1, 7, 16):
        parts, others = score(chunk)
        assert parts.tobytes() == whole.tobytes() and others.tobytes() == ids.tobytes()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3, "temperature": 1.5, "top_p": 0.9}])
def test_sampling_waits_for_masks(world, sampling):
    """Two of three sequences have masks, one of them with drafts that have their own; masks are written late."""
    rng, cpu, exact = np.random.default_rng(SEED + 4), Cpu(world), reference(world)
    allowed = [rng.choice(VOCAB, n, replace=False).tolist() for n in (2, 1, 30, 5)]
    allowed[1] = [4]
    masks = np.stack([mask_of(ids) for ids in allowed])
    prompts = [rng.integers(0, VOCAB, 8).tolist() for _ in range(3)]
    work = [item(1, 8, SAMPLE, spans=[4]), item(2, 8, SAMPLE, spans=[8], mask=1),
            item(0, 8, SAMPLE | GIVEN, known=[4, 7], drafts=2, spans=[0], mask=2)]
    data = plan(work, [start(slot, prompt, **sampling) for slot, prompt in enumerate(prompts)])
    expected = exact.step(data, masks)
    began, ended = time.monotonic(), []

    def write():
        for row in (1, 3, 2, 0):
            time.sleep(0.05)
            assert not ended
            cpu.write(row, masks[row])

    writer = threading.Thread(target=write)
    writer.start()
    found = cpu.step(data)
    ended.append(time.monotonic() - began)
    writer.join()
    compare(found, expected)
    assert found.tokens[1] in allowed[0] and found.counts.tolist()[2] >= 1 and ended[0] >= 0.2


def test_a_mask_that_does_not_come_ends_the_step():
    cpu = Cpu(1)
    threading.Timer(0.1, cpu.masks.fail, ["the grammars' worker has ended"]).start()
    with pytest.raises(RuntimeError, match="the grammars' worker has ended"):
        cpu.step(plan([item(0, 2, SAMPLE, spans=[0], mask=3)], [start(0, [1, 2])]))


@pytest.mark.parametrize("work, problem", [
    (item(0, 2, SAMPLE, spans=[0], mask=MASKS + 1), "mask 13 for 1 samples; there are 12"),
    (item(0, 2, SAMPLE | GIVEN, known=[1, 2], drafts=2, spans=[0], mask=MASKS - 1), "mask 11 for 3 samples"),
    (item(0, 1, 0, spans=[0], mask=1), "mask 1 for 0 samples"),
    (item(0, 2, SAMPLE, spans=[0], outputs=3), "3 outputs of 2 rows"),
    (item(0, 2, PROMPT, spans=[0], outputs=1), "no token follows its last row"),
])  # fmt: skip
def test_plans_that_cannot_be(work, problem):
    cpu = Cpu(1)
    with pytest.raises(ValueError, match=problem):
        cpu.step(plan([work], [start(0, [1, 2])]))
    assert len(cpu.step(plan([item(0, 2, SAMPLE, spans=[0])], [start(0, [1, 2])])).tokens) == 1  # nothing was changed


def test_a_program_without_hidden_states_says_so():
    with pytest.raises(ValueError, match="does not output hidden states"):
        Cpu(1, hidden=False).step(plan([item(0, 1, HIDDEN, outputs=1, spans=[0])], [start(0, [1, 2])]))


def test_masks_are_checked():
    masks = _native.Masks(2, 33)
    assert masks.bits.shape == (2, 2) and masks.bits.dtype == np.uint32
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match=f"mask {wrong} of 2"):
            masks.publish([0, wrong])
