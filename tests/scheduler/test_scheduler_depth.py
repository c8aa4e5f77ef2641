"""The scheduler while steps with unknown results run: drafts, late stops, blocked sequences."""

from __future__ import annotations

import numpy as np

from allspark_server.runtime.plan import MAX_STEP_DRAFTS, SAMPLE, Flag
from allspark_server.scheduler import FinishReason, State, StopRules
from allspark_server.scheduler.sequence import TOKEN_BYTES
from allspark_server.scheduler.speculation import DraftLengths
from support.fake_group import expected_output
from support.scheduler_rig import Rig, output, prompt_of


def counting(history: list[int]) -> int:
    """Tokens 0 to 6 in a cycle: lookup is always right after the first cycle."""
    return (history[-1] + 1) % 7


def test_the_length_is_foreseen():
    rig = Rig(depth=2)
    sequence = rig.add(prompt_of(5), 6)
    rig.run()
    assert output(sequence) == expected_output(prompt_of(5), 6)
    assert rig.scheduler.counters.discarded_rows == 0 and rig.scheduler.counters.computed_rows == 5 + 5


def test_rows_after_a_late_stop_are_discarded():
    words = expected_output(prompt_of(5), 9)
    rig = Rig(depth=2)
    sequence = rig.add(prompt_of(5), stop=StopRules(100, frozenset([words[3]])))
    while sequence not in rig.finished:
        rig.step()
    assert len(rig.running) == 1 and rig.pool.used == 0  # its spans are free while a step still writes to them
    other = rig.add(prompt_of(9, seed=1), 7)
    rig.run()
    assert output(sequence) == words[:4] and rig.finished[sequence] is FinishReason.STOP
    assert rig.scheduler.counters.discarded_rows == 1
    assert output(other) == expected_output(prompt_of(9, seed=1), 7)


def test_what_a_preempted_sequence_drew_is_kept():
    rig = Rig(num_spans=5, max_batch=2, prefix=False, depth=3)
    first, second = rig.add(prompt_of(7), 12), rig.add(prompt_of(6, seed=1), 12)
    while not second.preemptions:
        rig.step()
    drawn = len(rig.output[second])
    assert second.state is State.WAITING and second.in_flight == 1
    assert rig.scheduler.waiting_bytes == TOKEN_BYTES * (6 + drawn)
    rig.step()
    assert second.in_flight == 0
    assert len(rig.output[second]) == drawn + 1 == rig.scheduler.waiting_bytes / TOKEN_BYTES - 6
    rig.run()
    for sequence in (first, second):
        prompt = sequence.tokens[:sequence.prompt_len]
        assert output(sequence) == expected_output(prompt, 12)
    assert rig.scheduler.counters.generated_tokens == 24  # none was sampled twice


def test_only_completed_steps_enter_the_prefix_cache():
    rig = Rig(depth=2)
    rig.add(prompt_of(12), 20)
    rig.step()
    assert len(rig.prefix) == 0  # it is planned, and its result not known
    rig.step()
    assert len(rig.prefix) == 3
    lengths = []
    while rig.scheduler.has_work:
        rig.step()
        lengths.append((len(rig.prefix), rig.scheduler._slots.length[0]))
    assert all(4 * spans < length for spans, length in lengths)


def test_drafts_are_accepted_and_save_steps():
    steps = []
    for kind in (0, int(Flag.LOOKUP)):
        rig = Rig(depth=2, num_spans=256, draft_kind=kind, executor={"token": counting, "max_length": 200})
        sequence = rig.add([1, 2, 3], 150)
        steps.append(rig.run())
        assert output(sequence) == expected_output([1, 2, 3], 150, counting)
    counters = rig.scheduler.counters
    assert counters.accepted_tokens > 100 and steps[1] < steps[0] / 3
    assert counters.discarded_rows == 0 and counters.computed_rows == 3 + 149


def test_drafts_that_are_never_accepted_are_soon_not_asked_for():
    rig = Rig(num_spans=256, draft_kind=int(Flag.MODEL), executor={"drafts": lambda history, n: [history[0]] * n})
    rig.add([1000], 300)
    asked = []
    while rig.scheduler.has_work or rig.running:
        plan = rig.step()
        asked.append(bool(plan and plan.work[0].drafts))
    assert sum(asked[:10]) <= 4 and 1 <= sum(asked[10:]) <= 8  # tried again now and then


def test_draft_lengths_follow_what_is_accepted():
    lengths, slots = DraftLengths(2, 7), np.array([0, 1])
    for slot in slots:
        lengths.start(slot)
    assert lengths.choose(slots).tolist() == [4, 4]
    lengths.learn(slots, np.array([4, 4]), np.array([4, 1]))
    assert lengths.choose(slots).tolist() == [6, 2]
    lengths.learn(slots, np.array([6, 2]), np.array([6, 0]))
    assert lengths.choose(slots).tolist() == [7, 1]
    for _ in range(2):
        lengths.learn(slots, np.array([0, 1]), np.array([0, 0]))
    assert [lengths.choose(slots).tolist() for _ in range(16)] == [[7, 0]] * 15 + [[7, 2]]


def test_a_head_that_is_never_right_is_seldom_asked():
    """By new sequences neither: of any 1,025 steps one has drafts. One that is accepted ends the doubt."""
    lengths, slots = DraftLengths(4, 7, 2, shared=True), np.arange(4)
    tried, steps = [], 6000
    for step in range(steps):
        if step % 200 == 0:
            lengths.start(step // 200 % 4)
        drafts = lengths.choose(slots)
        tried += [step] if drafts.any() else []
        lengths.learn(slots, drafts, np.zeros(4, int))
    assert len([step for step in tried if step < 256]) <= 12 and np.diff(tried)[-3:].tolist() == [1025] * 3
    while not (drafts := lengths.choose(slots)).any():
        pass
    assert drafts.tolist() == [2, 2, 2, 2]
    lengths.learn(slots, drafts, np.array([0, 0, 2, 0]))
    lengths.start(1)
    assert lengths.choose(slots).tolist() == [1, 2, 4, 1]


def test_drafts_are_bounded_by_rows_outputs_and_length():
    rig = Rig(num_spans=512, span_size=16, max_batch=32, max_step_tokens=256, draft_kind=int(Flag.LOOKUP),
              executor={"token": counting, "max_length": 40})
    sequences = [rig.add([i % 7], 39) for i in range(32)]
    rig.run()
    for plan in rig.executor.plans:
        assert plan.rows <= 256 and sum(item.drafts for item in plan.work) <= MAX_STEP_DRAFTS
        assert all(item.flags & (Flag.LOOKUP | SAMPLE) == Flag.LOOKUP | SAMPLE for item in plan.work if item.drafts)
    assert all(output(s) == expected_output(s.tokens[:1], 39, counting) for s in sequences)
    assert rig.scheduler.counters.accepted_tokens > 100


def test_nobody_is_preempted_for_drafts():
    rig = Rig(num_spans=8, max_batch=2, prefix=False, draft_kind=int(Flag.LOOKUP), executor={"token": counting})
    sequences = [rig.add([1, 2, 3], 13), rig.add([4, 5], 14)]  # 16 tokens each: 4 spans
    rig.run()
    assert rig.scheduler.counters.preemptions == 0
    assert [len(output(sequence)) for sequence in sequences] == [13, 14]


def test_a_blocked_sequence_keeps_its_place():
    rig = Rig(max_batch=1)
    blocked = rig.add(prompt_of(5), 3, blocked_on="a grammar")
    first, second = rig.add(prompt_of(5, seed=1), 3), rig.add(prompt_of(5, seed=2), 3)
    rig.step()
    assert blocked.state is State.BLOCKED and rig.scheduler.waiting == 2 and rig.scheduler.blocked == 1
    rig.scheduler.unblock(blocked)
    rig.run()
    assert list(rig.finished) == [first, blocked, second]


def test_nothing_is_planned_while_all_are_blocked():
    rig = Rig(depth=2)
    sequence = rig.add(prompt_of(9), 8)
    for _ in range(4):
        rig.step()
    rig.scheduler.block(sequence, "spans from elsewhere")
    assert rig.pool.used == 0 and sequence.blocked_on and not rig.scheduler.has_work
    assert rig.step() is None and not rig.running  # what was in flight is kept
    drawn = len(rig.output[sequence])
    assert drawn == 4 and rig.scheduler.waiting_bytes == TOKEN_BYTES * (9 + drawn)
    rig.scheduler.block(sequence, "twice is once")
    rig.scheduler.unblock(sequence)
    rig.scheduler.unblock(sequence)
    rig.run()
    assert output(sequence) == expected_output(prompt_of(9), 8)
