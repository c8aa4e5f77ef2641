"""The span pool, the prefix cache, the plan's encoding and the scheduler, without tensors."""

from __future__ import annotations

import struct
import time

import pytest

from allspark_server.cache import SpanKeys, SpanPool
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.scheduler import FinishReason, State, StopRules
from allspark_server.scheduler.state import PRIORITY_LEVELS, PRIORITY_SECONDS
from support.fake_group import expected_output
from support.scheduler_rig import Rig, output, prompt_of

GREEDY = SamplingParams(do_sample=False).encode()


# --- plan ---


def test_plan_survives_encoding():
    params = SamplingParams(
        False, True, True, 0.5, 7, 0.25, 1.5, -0.5, 2.0, 3, 11, 20, 2**63 - 5, 2, 17, (1, 2), ((3,), (4, 5, 6))
    )
    new = [NewSlot(1, [9, 8, 7], params.encode(), 2), NewSlot(0, [1], params.encode())]
    work = [
        WorkItem(1, 3, SAMPLE, spans=[5]),
        WorkItem(2, 1, SAMPLE | Flag.GIVEN | Flag.PROMPT, [4, 6], [7, 8], drafts=2, outputs=4, adapter=3, mask=1),
        WorkItem(0, 16),
    ]
    plan = StepPlan([3, 1], new, work, [(7, [1, 2, 3]), (8, [])])
    data = plan.encode()
    assert StepPlan.decode(data) == plan
    assert SamplingParams.decode(plan.new[0].sampling, 0) == (params, len(plan.new[0].sampling))
    assert plan.rows == 22
    for item in work:
        item.other_spans = [[9], []]
    assert StepPlan.decode(plan.encode()) == plan


def test_plan_layout_is_the_documented_one():
    work = [WorkItem(2, 8, SAMPLE, [4], [6, 7], adapter=5), WorkItem(3, 1, SAMPLE | Flag.LOOKUP, [], [9], 2, mask=6)]
    words = (0x41535032, 1, 1, 2, 1, 1) + (8,)
    words += (1, 4, 2) + struct.unpack("<16i", GREEDY) + (9, 8)
    words += (2, 3, 8, 1, 1, 1, 0, 2, 1, 3, 5, -1, 0, 6, 1, 0, 2, 1)  # one column after the other
    words += (4,) + (6, 7, 9)
    words += (11, 2, 12, 13)
    data = StepPlan([8], [NewSlot(1, [9, 8], GREEDY, 4)], work, [(11, [12, 13])]).encode()
    assert struct.unpack(f"<{len(words)}i", data) == words
    block = SamplingParams(seed=(5 << 32) | 6, eos=(1,), bad_words=((2, 3),)).encode()
    assert struct.unpack("<ififfffiiiIIiiii4i", block) == (
        (1, 1.0, 0, 1.0, 1.0, 0.0, 0.0, 0, 0, 0, 6, 5, 0, 0, 1, 1) + (1, 2, 2, 3)
    )


@pytest.mark.parametrize("damage", [
    lambda d: d[:-2], lambda d: d[:-4], lambda d: d + bytes(4), lambda d: b"\1" + d[1:], lambda d: b"",
    lambda d: d[:16] + bytes(4) + d[20:], lambda d: d[:8] + b"\xff" * 4 + d[12:],
    lambda d: d[:-12] + b"\xff" * 4 + d[-8:],
])
def test_damaged_plan_is_refused(damage):
    data = StepPlan([1], [NewSlot(0, [5], GREEDY)], [WorkItem(0, 1, SAMPLE, [1], [2])]).encode()
    with pytest.raises(ValueError):
        StepPlan.decode(damage(data))


# --- cache ---


def test_pool_counts_references_and_evicts_the_least_recently_used():
    pool = SpanPool(3)
    forgotten = []
    pool.set_evict_listener(forgotten.append)
    a, b, _c = pool.allocate(3)
    assert pool.allocate(1) is None and pool.used == 3
    pool.keep([a])
    pool.keep([b])
    pool.acquire([a])
    pool.release([a], 1.0)
    assert pool.available == 0  # one reference is left
    pool.release([b], 2.0)
    pool.release([a], 3.0)
    assert (pool.available, pool.kept) == (2, 2)
    assert pool.allocate(1) == [b] and forgotten == [b]
    pool.acquire([a])
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    with pytest.raises(ValueError):
        SpanPool(0)


def test_prefix_chain_depends_on_ids_salt_and_length():
    cache = SpanKeys(2, dynamic_rope_original=10)
    assert cache.root("", 5) == cache.root("", 10) != cache.root("x", 5)
    assert cache.root("", 11) != cache.root("", 12) != cache.root("", 5)
    long = SpanKeys(2, long_rope_original=10)
    assert long.root("", 5) == long.root("", 10) != long.root("", 11) == long.root("", 12)
    assert long.root("", 5, 10) == long.root("", 5) != long.root("", 5, 11) == long.root("", 11)
    plain = SpanKeys(2)
    assert plain.root("", 11) == plain.root("", 12)
    one, two, three = [], [], []
    cache.extend(one, cache.root("", 5), [1, 2, 3, 4, 5], 2)
    cache.extend(two, cache.root("", 5), [1, 2, 3, 9, 5], 2)
    cache.extend(three, cache.root("x", 5), [1, 2, 3, 4, 5], 2)
    assert one[0] == two[0] and one[1] != two[1] and one[0] != three[0]


def test_prefix_hit_leaves_one_row_to_compute():
    rig = Rig()
    prompt = prompt_of(12)
    first = rig.add(prompt)
    rig.run()
    again = rig.add(prompt)
    plan = rig.step()
    assert (first.prefix_len, again.prefix_len) == (0, 8)
    assert (plan.new[0].cached, plan.work[0].rows) == (8, 4)
    rig.run()
    longer = rig.add(prompt + [1])
    rig.run()
    assert longer.prefix_len == 12
    assert output(again) == output(first) == expected_output(prompt, 5)


def test_generated_spans_are_found_again():
    rig = Rig()
    prompt = prompt_of(6)
    first = rig.add(prompt, 9)
    rig.run()
    again = rig.add(first.tokens, 3)  # the conversation goes on
    rig.run()
    assert again.prefix_len == 12  # positions 0…13 were computed (the last token never was): 3 full spans
    assert output(again) == expected_output(first.tokens, 3)


def test_salt_and_ttl_separate_prefixes():
    rig = Rig(ttl=10.0)
    prompt = prompt_of(12)
    rig.add(prompt, salt="a")
    rig.run()
    other = rig.add(prompt, salt="b")
    same = rig.add(prompt, salt="a")
    rig.run()
    assert (other.prefix_len, same.prefix_len) == (0, 8)
    rig.clock.now = 11.0
    late = rig.add(prompt, salt="a")
    rig.run()
    assert late.prefix_len == 0


def test_only_computed_spans_are_entered():
    rig = Rig(max_chunk=5)
    prompt = prompt_of(20)
    sequence = rig.add(prompt)
    rig.step()
    assert len(rig.prefix) == 1  # 5 rows: one full span
    rig.scheduler.cancel(sequence)
    again = rig.add(prompt)
    rig.run()
    assert again.prefix_len == 4


# --- scheduling ---


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_outputs_do_not_depend_on_the_batch(chunk, prefix):
    rig = Rig(max_chunk=chunk, prefix=prefix)
    sequences = [rig.add(prompt_of(1 + 7 * i % 23, seed=i), 3 + i % 6) for i in range(12)]
    rig.run()
    for i, sequence in enumerate(sequences):
        assert output(sequence) == expected_output(sequence.tokens[: sequence.prompt_len], 3 + i % 6)
        assert rig.finished[sequence] is FinishReason.LENGTH


def test_budget_goes_to_single_rows_first():
    rig = Rig(max_step_tokens=6, max_batch=3)
    streaming = [rig.add(prompt_of(2, seed=i), 20) for i in range(2)]
    rig.step()
    long = rig.add(prompt_of(30, seed=9))
    plan = rig.step()
    assert [item.rows for item in plan.work] == [1, 1, 4] and plan.rows == 6
    assert long.computed == 4
    rig.run()
    assert all(output(s) == expected_output(s.tokens[:2], 20) for s in streaming)


def test_order_is_priority_then_arrival():
    rig = Rig(max_batch=1)
    names = {}
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1)):
        names[rig.add(prompt_of(3), 2, priority=priority)] = name
    rig.run()
    assert [names[sequence] for sequence in rig.finished] == ["c", "a", "b", "d"]


def test_priority_is_worth_a_bounded_time_of_waiting():
    rig = Rig(max_batch=1)
    low = rig.add(prompt_of(3), 2, priority=-(10**9))
    rig.clock.now = PRIORITY_SECONDS * 2 * PRIORITY_LEVELS - 1
    above = rig.add(prompt_of(3), 2, priority=10**9)
    rig.clock.now += 2
    late = rig.add(prompt_of(3), 2, priority=10**9)
    rig.run()
    assert list(rig.finished) == [above, low, late]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    rig = Rig(num_spans=1024, max_step_tokens=64)
    long, other = rig.add(prompt_of(1000, seed=1), 1), rig.add(prompt_of(1000, seed=2), 1)
    rig.step()
    short = [rig.add(prompt_of(20, seed=i), 3) for i in (3, 4)]
    plan = rig.step()
    assert [item.rows for item in plan.work] == [20, 12, 32] and long.computed == 96  # it keeps half of every step
    rig.step()
    assert [len(rig.output[s]) for s in short] == [2, 1]
    steps = 3 + rig.run()
    assert list(rig.finished) == [*short, long, other] and steps < 2000 / 64 + 4  # equally long ones go in turn
    for sequence in (long, other, *short):
        assert output(sequence) == expected_output(sequence.tokens[: sequence.prompt_len], len(output(sequence)))


def test_short_prompts_do_not_keep_a_long_one_from_its_slot():
    rig = Rig(num_spans=1024, max_batch=2, max_step_tokens=16)
    first, second = rig.add(prompt_of(160, seed=1), 1), rig.add(prompt_of(160, seed=2), 1)
    steps = 0
    while second not in rig.finished:
        if rig.scheduler.waiting < 4:
            rig.add(prompt_of(4, seed=steps), 2)
        rig.step()
        steps += 1
        assert steps < 100
    assert list(rig.finished).index(first) < list(rig.finished).index(second)


def test_a_blocked_head_looks_at_the_cache_only_when_it_may_help():
    rig = Rig(num_spans=32, span_size=4, max_batch=4)
    shared = prompt_of(80)
    rig.add(shared, 1)
    rig.run()  # 20 spans are kept
    running = rig.add(prompt_of(20, seed=2), 20)
    rig.step()
    matches, match = [], rig.prefix.match
    rig.prefix.match = lambda keys, groups: matches.append(len(keys)) or match(keys, groups)
    blocked = rig.add(shared + prompt_of(40, seed=3), 2)
    while running not in rig.finished:
        rig.step()
        assert blocked.state is State.WAITING
    assert len(matches) == 1
    rig.run()
    assert output(blocked) == expected_output(blocked.tokens[:120], 2) and output(running) == expected_output(
        running.tokens[:20], 20
    )


def test_preemption_recomputes_and_loses_nothing():
    rig = Rig(num_spans=8, prefix=False)
    sequences = [rig.add(prompt_of(6, seed=i), 20) for i in range(3)]
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    assert sequences[0].preemptions == 0  # the first is never preempted
    assert all(output(s) == expected_output(s.tokens[:6], 20) for s in sequences)


def test_preemption_takes_the_lowest_priority():
    rig = Rig(num_spans=8, prefix=False)
    low = rig.add(prompt_of(6, seed=1), 20, priority=-1)
    high = rig.add(prompt_of(6, seed=2), 20)
    rig.run()
    assert low.preemptions > 0 and high.preemptions == 0


def test_too_long_for_the_whole_cache():
    rig = Rig(num_spans=4, prefix=False)
    grows = rig.add(prompt_of(10), 20)
    never = rig.add(prompt_of(17), 20)
    other = rig.add(prompt_of(5), 2)
    rig.run()
    assert rig.oversized == [grows, never]
    assert grows.tokens == grows.tokens[:10] + expected_output(grows.tokens[:10], 7)
    assert output(other) == expected_output(other.tokens[:5], 2)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancel_frees_everything(after):
    rig = Rig(max_batch=2, max_chunk=4)
    sequences = [rig.add(prompt_of(9, seed=i), 20) for i in range(4)]
    for _ in range(after):
        rig.step()
    for sequence in sequences[:3]:
        rig.scheduler.cancel(sequence)
        rig.scheduler.cancel(sequence)  # cancelling twice has one effect
    assert rig.scheduler.waiting + rig.scheduler.running == 1
    rig.run()
    assert output(sequences[3]) == expected_output(sequences[3].tokens[:9], 20)
    assert all(s.state is State.ENDED for s in sequences)


def test_cancelled_ones_do_not_pile_up_behind_a_long_request():
    rig = Rig(max_batch=1)
    long = rig.add(prompt_of(5), 20)
    rig.step()
    last = rig.add(prompt_of(6), 2)
    for i in range(500):
        rig.scheduler.cancel(rig.add(prompt_of(4, seed=i)))
    assert rig.scheduler.waiting == 1 and len(last.account.by_order) < 100
    rig.run()
    assert len(output(long)) == 20 and len(output(last)) == 2


def test_stop_rules():
    prompt = prompt_of(5)
    words = expected_output(prompt, 10)
    rig = Rig()
    eos = rig.add(prompt, stop=StopRules(15, eos=frozenset([words[3]])))
    word = rig.add(prompt, stop=StopRules(15, stop_words=((words[1], words[3]), tuple(words[4:7]))))
    length = rig.add(prompt, stop=StopRules(15, eos=frozenset([prompt[0]]), stop_words=((prompt[-1], words[0]),)))
    rig.run()
    assert output(eos) == words[:4] and rig.finished[eos] is FinishReason.STOP
    assert output(word) == words[:7] and rig.finished[word] is FinishReason.STOP_WORD
    assert output(length) == words and rig.finished[length] is FinishReason.LENGTH


def test_the_cost_of_stop_words_does_not_grow_with_their_number():
    tokens = list(range(300))

    def seconds(words) -> float:
        rules = StopRules(10_000, stop_words=words)
        began = time.perf_counter()
        for _ in range(100):
            assert rules.check(tokens, 0) is None
        return time.perf_counter() - began

    few = ((1, 2, 299), (5, 298, 299), (7, 8))
    many = (*few, *((i, 298, 299) for i in range(1000, 101_000)))
    assert min(seconds(many) for _ in range(5)) < 5 * min(seconds(few) for _ in range(5)) + 1e-4
    assert StopRules(10_000, stop_words=(*many, (297, 298, 299))).check(tokens, 297) is FinishReason.STOP_WORD
    assert StopRules(10_000, stop_words=(*many, (297, 298, 299))).check(tokens, 298) is None


def test_resumption_continues_the_same_output():
    prompt = prompt_of(7)
    words = expected_output(prompt, 10)
    rig = Rig()
    resumed = rig.add(prompt, 10, generated=words[:4])
    stop = StopRules(17, stop_words=((words[3], words[4]),))  # begins before the resumption, ends after it
    stopped = rig.add(prompt, generated=words[:4], stop=stop)
    rig.run()
    assert resumed.prompt_len == 7 and output(resumed) == words
    assert output(stopped) == words[:5]


def test_samples_of_one_prompt_share_its_spans():
    rig = Rig(max_batch=4)
    prompt = prompt_of(21)
    rig.add(prompt)
    others = [rig.add(prompt) for _ in range(3)]
    rig.run()
    assert [s.prefix_len for s in others] == [20, 20, 20]
    rows = rig.scheduler.counters.computed_rows
    assert rows == 21 + 3 * 1 + 4 * 4
