"""The host cache as the scheduler uses it: which spans are offloaded, which come back, and what that costs."""

from __future__ import annotations

import random

import pytest

from allspark_server.cache.host_cache import CopyCosts, HostCache
from allspark_server.scheduler import State
from allspark_server.scheduler.spans import SequenceSpans
from support.fake_group import expected_output
from support.scheduler_rig import Rig, output, prompt_of


def copies_of(rig: Rig) -> list[int]:
    """Number of copies in each plan."""
    return [sum(len(words) // 6 for _, words in plan.sections) for plan in rig.executor.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_evicted_spans_come_back(depth):
    rig = Rig(num_spans=32, host_spans=100, depth=depth)
    first = rig.add(prompt_of(80), 5)
    rig.run()
    for seed in range(1, 4):
        rig.add(prompt_of(100, seed), 2)
        rig.run()
    again = rig.add(prompt_of(80), 5)
    rig.run()
    assert output(again) == output(first) == expected_output(prompt_of(80), 5)
    assert again.prefix_len == again.restored == 76
    counters = rig.scheduler.counters
    assert counters.restored_tokens == 76 and counters.restored_spans == 19 and counters.saved_spans >= 19


def test_spans_are_saved_just_before_they_are_written_to():
    rig = Rig(num_spans=64, host_spans=100, max_step_tokens=8, max_batch=2)
    rig.add(prompt_of(240), 1)
    rig.run()
    before = len(rig.executor.plans)
    rig.add(prompt_of(240, seed=1), 1)
    rig.run()
    copies = copies_of(rig)[before:]
    assert max(copies) <= 2 and 50 <= sum(copies) <= 60  # not all at once when the second prompt takes its spans


def test_what_is_not_saved_yet_comes_back_too():
    rig = Rig(num_spans=64, host_spans=100, max_step_tokens=8, max_batch=2)
    rig.add(prompt_of(240), 1)
    rig.run()
    taker = rig.add(prompt_of(240, seed=1), 1)
    rig.step()
    rig.scheduler.cancel(taker)  # it had most of the spans and wrote to few
    assert len(rig.host_cache) > 40
    again = rig.add(prompt_of(240), 1)
    rig.run()
    assert again.prefix_len == 236 and output(again) == expected_output(prompt_of(240), 1)


def test_many_spans_come_back_over_several_steps():
    rig = Rig(num_spans=260, host_spans=2000, max_batch=4, max_step_tokens=64)
    rig.add(prompt_of(600), 1)
    rig.run()
    rig.add(prompt_of(1020, seed=1), 1)
    rig.run()
    rig.host_cache.costs.copy, rig.host_cache.costs.row = 1e-3, 1.0
    stream = rig.add(prompt_of(4, seed=2), 60)
    rig.step()
    before = len(rig.executor.plans)
    again = rig.add(prompt_of(600), 1)
    rig.step()
    assert again.state is State.BLOCKED and again.blocked_on == "spans of the host cache"
    rig.run()
    copies = copies_of(rig)[before:]
    assert max(copies) <= 40 and sum(c > 0 for c in copies) >= 149 // 40  # with those that are saved for it
    assert again.prefix_len == 596 and again.restored > 500
    assert output(again) == expected_output(prompt_of(600), 1) and len(output(stream)) == 60


def evicted() -> Rig:
    """A rig in which another prompt has evicted prompt_of(600) from the device's cache."""
    rig = Rig(num_spans=260, host_spans=2000, max_batch=4)
    rig.add(prompt_of(600), 1)
    rig.run()
    rig.add(prompt_of(1020, seed=1), 1)
    rig.run()
    return rig


def test_copies_alone_make_a_step():
    rig = evicted()
    again = rig.add(prompt_of(600), 1)
    rig.run()
    assert any(not plan.work and plan.sections for plan in rig.executor.plans)
    assert output(again) == expected_output(prompt_of(600), 1)


def test_the_preempted_come_back():
    rig = Rig(num_spans=24, host_spans=100, max_batch=3, max_step_tokens=16)
    sequences = [rig.add(prompt_of(24, seed=i), 30) for i in range(3)]
    rig.run()
    counters = rig.scheduler.counters
    assert counters.preemptions and counters.restored_spans
    for sequence in sequences:
        assert output(sequence) == expected_output(sequence.tokens[:24], 30)


def test_a_request_restored_from_the_host_cache_can_be_cancelled():
    rig = evicted()
    again = rig.add(prompt_of(600), 1)
    rig.step()
    assert again.state is State.BLOCKED
    rig.scheduler.cancel(again)
    rig.run()
    assert again.state is State.ENDED


def test_a_lasting_host_cache_has_what_was_computed():
    rig = Rig(num_spans=64, host_spans=100, lasting=True)
    first = rig.add(prompt_of(80), 9)
    rig.run()
    assert len(rig.host_cache) >= 20 and rig.scheduler.counters.saved_spans >= 20
    held = dict(rig.host_cache._host_of.items())
    later = Rig(num_spans=64)
    later.prefix.host_cache = later.scheduler._spans.host_cache = HostCache(100, 4, held, lasting=True)
    later.executor.host = rig.executor.host
    again = later.add(first.tokens[:88], 3)
    later.run()
    assert again.restored >= 80 and output(again) == expected_output(first.tokens[:88], 3)


def test_copies_are_fast_until_they_are_measured():
    rig = evicted()
    rig.host_cache.costs = CopyCosts(4, span_bytes=1 << 20)
    again = rig.add(prompt_of(600), 1)
    rig.step()
    assert again.state is State.ENDED and again.restored > 500  # 140 MiB are expected to take less than 0.2 s
    rig = evicted()
    rig.host_cache.costs = CopyCosts(4, span_bytes=1 << 20)
    rig.add(prompt_of(4, seed=2), 60)
    rig.step()
    again = rig.add(prompt_of(600), 1)
    rig.step()  # a stream waits for at most 10 ms
    assert again.state is State.BLOCKED and 16 <= again.restored // 4 <= 19
    rig.run()
    assert again.prefix_len == 596


def one_by_one(spans: SequenceSpans, keys: list[bytes]) -> list[int]:
    """SequenceSpans._copy_back, without its short cuts."""
    copied: list[int] = []
    for key in keys:
        span = spans.pool.allocate(1) if spans._copies_left > 0 else None
        if span is None or not spans.host_cache.restore([key], span):
            spans.pool.release(span or [], spans._clock())
            break
        spans._copies_left -= 1
        spans.prefix_cache.enter([key], span)
        copied += span
    return copied


def random_chats(seed: int) -> Rig:
    """A rig after turns of chats that evict each other from a small cache."""
    rng = random.Random(seed)
    windows, state_spans = rng.choice([((0,), 0), ((0, 8), 0), ((0, 0), 0), ((0,), 3)])
    rig = Rig(num_spans=rng.choice([40, 60, 100]), span_size=16 if state_spans else 4, max_batch=3,
              host_spans=rng.choice([60, 90, 400]), depth=rng.choice([1, 2]), lasting=rng.random() < 0.5,
              windows=windows, state_spans=state_spans, max_step_tokens=128, max_chunk=128)
    if rng.random() < 0.5:  # otherwise few copies a step
        rig.host_cache.costs.copy = 1e-4
    chats = [rng.choices(range(50), k=rng.choice([60, 110])) for _ in range(4)]
    for _turn in range(25):
        rig.add([*rng.choice(chats), *rng.choices(range(50), k=9)], rng.choice([1, 5]))
        for _ in range(rng.choice([0, 3, 500])):
            if rig.scheduler.has_work or rig.running:
                rig.step()
        rig.clock.now += rng.choice([0, 1, 200])
    rig.run()
    return rig


def test_many_spans_come_back_as_one_after_the_other(monkeypatch):
    """The plans are the same to the last word: which spans are taken, saved, evicted and restored, in which order."""
    rigs = [random_chats(seed) for seed in range(16)]
    assert sum(rig.scheduler.counters.restored_spans for rig in rigs) > 500
    monkeypatch.setattr(SequenceSpans, "_copy_back", one_by_one)
    for seed, rig in enumerate(rigs):
        assert rig.executor.plans == random_chats(seed).executor.plans


def test_the_least_recently_used_go_first():
    host_cache = HostCache(2, 4)
    for span, key in enumerate((b"a" * 16, b"b" * 16)):
        host_cache.evicted(key, span)
    host_cache.before_writes([0, 1])
    assert len(host_cache.take_copies().saved) == 2
    assert host_cache.restore([b"a" * 16], [0]) == 1
    host_cache.evicted(b"c" * 16, 2)
    host_cache.before_writes([2])
    copies = host_cache.take_copies()
    assert copies.saved[2][0] != copies.restored[0][0]
    assert [name * 16 in host_cache for name in (b"a", b"b", b"c")] == [True, False, True]
    # More in one step than it holds: nothing that the step copies is overwritten in it.
    for span in range(3, 9):
        host_cache.evicted(bytes([span]) * 16, span)
    host_cache.before_writes(range(3, 9))
    copies = host_cache.take_copies()
    assert len({host for host, _ in copies.saved.values()}) == len(copies.saved) == 2 and len(host_cache) == 2


def test_what_is_not_worth_copying_is_computed():
    costs = CopyCosts(32)
    assert costs.worthwhile()
    costs.learn(rows=256, seconds=0.256, copies=0, copy_seconds=0)
    costs.learn(rows=1, seconds=5.0, copies=0, copy_seconds=0)  # too few to matter
    assert abs(costs.row - 1e-3) < 1e-9 and costs.worthwhile()
    costs.learn(rows=0, seconds=0.1, copies=2, copy_seconds=0.1)
    assert abs(costs.copy - 0.05) < 1e-9 and not costs.worthwhile()  # 50 ms against 32
    assert sum(not costs.worthwhile() for _ in range(100)) < 30  # copying is tried again
    rig = Rig(num_spans=32, host_spans=100)
    rig.host_cache.costs.copy, rig.host_cache.costs.row = 10.0, 1e-6
    rig.add(prompt_of(80), 5)
    rig.run()
    rig.add(prompt_of(100, 1), 2)
    rig.run()
    assert rig.scheduler.counters.saved_spans == 0


def test_a_cache_too_small_for_what_comes_back():
    rig = Rig(num_spans=24, host_spans=200, max_batch=4, max_step_tokens=16, depth=2)
    prompts = [prompt_of(60, seed=i) for i in range(4)]
    for _ in range(3):
        sequences = [rig.add(prompt, 6) for prompt in prompts]
        rig.run()
        for prompt, sequence in zip(prompts, sequences):
            assert output(sequence) == expected_output(prompt, 6)
    assert rig.scheduler.counters.restored_spans > 40


def test_a_cache_that_is_lost_takes_what_was_not_copied_along():
    """In sleep, the host cache keeps what it holds and forgets copies that were not made yet."""
    host_cache = HostCache(4, 16)
    keys = [bytes([i] * 16) for i in range(5)]
    host_cache.evicted(keys[0], 10)
    host_cache.before_writes([10])
    assert host_cache.take_copies().saved == {10: (0, keys[0])}  # it is there after the step
    host_cache.evicted(keys[1], 11)  # not copied yet
    host_cache.evicted(keys[2], 12)
    host_cache.before_writes([12])  # to be copied with the next step
    assert host_cache.restore([keys[0]], [13]) == 1
    host_cache.cache_is_lost()
    assert [key in host_cache for key in keys] == [True, False, False, False,
                                                   False] and host_cache.take_copies() is None
    for number in (3, 4, 1):  # and all of its space is free
        host_cache.evicted(keys[number], 20 + number)
        host_cache.before_writes([20 + number])
    assert len(host_cache.take_copies().saved) == 3 and len(host_cache) == 4


def test_spans_are_reserved_for_content_from_elsewhere():
    keys = [bytes([i]) * 16 for i in range(6)]
    host_cache = HostCache(4, 16)
    for span in range(3):
        host_cache.save(keys[span], span)
    host_cache.save(keys[0], 9)  # it is there already
    assert len(host_cache.take_copies().saved) == 3
    # The free one first, then the oldest; those of the same prompt are evicted last, the beginning last of all.
    assert host_cache.reserve(2, keys[:2]) == [3, 2] and keys[2] not in host_cache
    assert host_cache.reserve(9, ()) == [1, 0] and len(host_cache) == 0
    host_cache.save(keys[5], 20)  # nothing is left to evict
    assert host_cache.take_copies() is None and keys[5] not in host_cache
    host_cache.commit([3, 2], {3: keys[3]})
    host_cache.commit([1, 0], {1: keys[3], 0: keys[4]})  # another request has brought the same meanwhile
    assert [host_cache.host_span(key) for key in keys] == [None, None, None, 3, 0, None]
    host_cache.save(keys[5], 20)
    assert host_cache.host_span(keys[5]) in (1, 2) and host_cache.restore([keys[3]], [21]) == 1
    # What the planned step uses is not reserved.
    host_cache.save(keys[2], 22)
    assert len(host_cache.reserve(9, ())) == 1 and host_cache.host_span(keys[4]) is None
    assert host_cache.host_span(keys[3]) == 3


def test_what_a_prompt_lacks():
    rig = Rig(num_spans=32, host_spans=100)
    rig.add(prompt_of(40), 1)
    rig.run()
    keys: list[bytes] = []
    rig.prefix.keys.extend(keys, rig.prefix.keys.root("", 48), [*prompt_of(40), *range(8)], 12)
    assert rig.scheduler.lacking_spans(keys) == (40, keys[10:])
    rig.scheduler.save_spans(keys)
    assert {key for _, key in rig.host_cache.take_copies().saved.values()} == set(keys[:10])
    rig.prefix.reset()
    assert rig.scheduler.lacking_spans(keys)[0] == 0


@pytest.mark.parametrize("brought", [False, True])
def test_what_was_brought_for_a_request_is_copied_back_whatever_it_costs(brought):
    rig = Rig(num_spans=32, host_spans=100)
    first = rig.add(prompt_of(80), 2)
    rig.run()
    rig.scheduler.save_spans(first.keys)
    rig.add(prompt_of(100, 1), 2)  # evicts the first one's spans
    rig.run()
    rig.host_cache.costs.copy, rig.host_cache.costs.row = 10.0, 1e-6
    again = rig.add(prompt_of(80), 2)
    again.brought = brought
    rig.run()
    assert output(again) == output(first) and bool(again.restored) == brought
