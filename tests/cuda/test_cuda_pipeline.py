"""Steps that are queued while the GPU computes earlier ones have the bits of steps run one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from support.gpu_sampling import LONGEST, SPAN, Head

pytestmark = pytest.mark.cuda
VOCAB = 3000
SPANS = LONGEST // SPAN
WAYS = [dict(do_sample=False), dict(top_p=0.9), dict(), dict(top_k=5, repetition_penalty=1.4, logprobs=True),
        dict(do_sample=False, presence_penalty=0.5), dict(top_p=0.7, frequency_penalty=0.3, no_repeat_ngram_size=2)]


def plans(seed: int, masks, drafts: int = 0) -> list[bytes]:
    """Plans with sequences that come, are computed in chunks, and go, whatever is sampled."""
    rng, left, found = np.random.default_rng(seed), {}, []
    for step in range(90):
        free, new, work = [], [], []
        for slot in range(6):
            if slot in left and left[slot][1] <= 0:
                del left[slot]
                free.append(slot)
            if slot not in left and rng.random() < 0.3:
                prompt = rng.integers(1, VOCAB, int(rng.integers(1, 30))).tolist()
                way = WAYS[int(rng.integers(len(WAYS)))]
                block = SamplingParams(**way, seed=step, prompt_len=len(prompt)).encode()
                new.append(NewSlot(slot, prompt, block, 0))
                left[slot] = [len(prompt), int(rng.integers(1, 12))]
                spans = list(range(slot * SPANS, (slot + 1) * SPANS))
            else:
                spans = []
            if slot not in left or (not spans and rng.random() < 0.1):
                continue  # nothing of this one in this step
            prompt = left[slot][0]
            rows = int(rng.integers(1, prompt + 1)) if prompt > 1 else 1
            draws = rows >= prompt
            wanted = drafts if draws and rng.random() < 0.2 else 0
            work.append(WorkItem(slot, rows, (SAMPLE if draws else 0) | (Flag.LOOKUP if wanted else 0), spans=spans,
                                 drafts=wanted))
            left[slot] = [1 if draws else prompt - rows, left[slot][1] - draws]
        found.append(StepPlan(free=free, new=new, work=work).encode())
    found.append(StepPlan(free=list(left)).encode())
    return found


def told(result) -> tuple:
    return (result.counts.tolist(), result.drafted.tolist(), result.tokens.tolist(), result.status.tolist(),
            result.logprobs.tobytes())


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_bits_of_steps_one_after_the_other(drafts):
    head = Head(VOCAB, np.random.default_rng(0), 1.0, False)
    for seed in range(6):
        steps = plans(seed, head.e.masks, drafts)
        expected = [told(head.e.step(step)) for step in steps]
        stepper, found = _native.Stepper(), []
        for i, step in enumerate(steps):
            stepper.submit(head.e, step)
            if i:
                found.append(told(stepper.collect()))
        found.append(told(stepper.collect()))
        assert found == expected


def test_a_plan_out_of_order_is_reported_in_its_turn():
    head = Head(VOCAB, np.random.default_rng(1), 1.0, False)
    block = SamplingParams(do_sample=False, prompt_len=2).encode()
    first = StepPlan(new=[NewSlot(0, [1, 2], block, 0)],
                     work=[WorkItem(0, 2, SAMPLE, spans=list(range(SPANS)))]).encode()
    going_on, wrong = StepPlan(work=[WorkItem(0, 1, SAMPLE)]).encode(), StepPlan(work=[WorkItem(5, 1, SAMPLE)]).encode()
    expected = [told(head.e.step(step)) for step in (first, going_on, going_on)]
    head.e.step(StepPlan(free=[0]).encode())
    stepper = _native.Stepper()
    for step in (first, wrong, going_on):
        stepper.submit(head.e, step)
    assert told(stepper.collect()) == expected[0]
    with pytest.raises(ValueError, match="slot 5 holds no sequence"):
        stepper.collect()
    assert told(stepper.collect()) == expected[1]
    stepper.submit(head.e, going_on)
    assert told(stepper.collect()) == expected[2]


def test_masks_that_are_written_when_the_last_step_was_collected():
    head = Head(VOCAB, np.random.default_rng(2), 1.0, False)
    block = SamplingParams(do_sample=False, prompt_len=2).encode()
    work = [WorkItem(0, 2, SAMPLE, spans=list(range(SPANS)), mask=1)]
    steps = [StepPlan(new=[NewSlot(0, [1, 2], block, 0)], work=work).encode()]
    steps += [StepPlan(work=[WorkItem(0, 1, SAMPLE, mask=1 + i % 2)]).encode() for i in range(1, 20)]
    stepper, masks, tokens = _native.Stepper(), head.e.masks, []

    def publish(i: int) -> None:  # the ids that the last token lets come next
        row, last = i % 2, tokens[-1] if tokens else 1
        masks.bits[row] = 0
        for id_ in range(last * 7 % 100, VOCAB, 97):
            masks.bits[row, id_ // 32] |= np.uint32(1) << np.uint32(id_ % 32)
        masks.publish([row])

    for i, step in enumerate(steps):
        masks.clear([i % 2])
        stepper.submit(head.e, step)
        if i:
            publish(i - 1)
            tokens.append(int(stepper.collect().tokens[0]))
    publish(len(steps) - 1)
    tokens.append(int(stepper.collect().tokens[0]))
    for last, token in zip([1, *tokens], tokens):
        assert token % 97 == (last * 7 % 100) % 97
