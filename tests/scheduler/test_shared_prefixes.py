"""A new prefix that two requests need at once is computed once. Whatever happens to the request that computes it, the
bits are the same.
"""

from __future__ import annotations

import pytest

from allspark_server.scheduler import State
from support.fake_group import expected_output
from support.scheduler_rig import Rig, output, prompt_of


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prefix_in_flight_is_computed_once(depth):
    rig = Rig(num_spans=1024, max_batch=32, depth=depth)
    system = prompt_of(400)
    sequences = [rig.add(system + prompt_of(10, seed=1 + i), 3) for i in range(32)]
    rig.run()
    assert [s.prefix_len for s in sequences] == [0] + [400] * 31
    assert rig.scheduler.counters.computed_rows == 410 + 31 * 10 + 32 * 2
    for sequence in sequences:
        assert output(sequence) == expected_output(sequence.tokens[:410], 3)


def test_only_what_is_shared_is_waited_for():
    rig = Rig(num_spans=1024, max_batch=8, max_chunk=40, max_step_tokens=80)
    long = rig.add(prompt_of(1000), 1)
    rig.step()
    half = rig.add(prompt_of(1000)[:160] + [1] * 40, 1)
    other = rig.add(prompt_of(100, seed=3), 1)
    steps = 0
    while half not in rig.finished:
        rig.step()
        steps += 1
        assert other.state is not State.BLOCKED
    assert half.prefix_len == 160 and steps < 8 and long not in rig.finished
    rig.run()
    assert output(half) == expected_output(half.tokens[:200], 1)


@pytest.mark.parametrize("fate", ["cancel", "block"])
def test_those_that_wait_go_on_when_the_one_that_computes_does_not(fate):
    rig = Rig(num_spans=1024, max_batch=8, max_chunk=40, depth=2)
    first = rig.add(prompt_of(400), 2)
    second, third = rig.add(prompt_of(400) + [7], 2), rig.add(prompt_of(400) + [8], 2)
    for _ in range(4):
        rig.step()
    assert second.state is third.state is State.BLOCKED and second.blocked_on == "spans that another request computes"
    if fate == "cancel":
        rig.scheduler.cancel(first)
    else:
        rig.scheduler.block(first, "a grammar")
    assert second.state is third.state is State.WAITING
    rig.step()
    assert second.state is State.RUNNING and third.state is State.BLOCKED and second.prefix_len >= 80
    if fate == "block":
        rig.scheduler.unblock(first)
    rig.run()
    for sequence in (second, third):
        assert output(sequence) == expected_output(sequence.tokens[:401], 2)
    assert rig.scheduler.counters.computed_rows < 500


def test_one_that_waits_can_be_cancelled():
    rig = Rig(num_spans=1024, max_chunk=40)
    rig.add(prompt_of(400), 2)
    second = rig.add(prompt_of(400) + [7], 2)
    rig.step()
    assert second.state is State.BLOCKED
    rig.scheduler.cancel(second)
    assert second.state is State.ENDED and rig.scheduler.waiting == 0
    rig.run()


def test_whoever_is_waited_for_is_served_as_those_that_wait():
    """Requests do not wait for a prefix that a low-priority tenant's request computes."""
    rig = Rig(num_spans=4096, max_batch=8, max_chunk=64)
    for i in range(3):
        rig.add(prompt_of(1000, seed=20 + i), 1, tenant="heavy")
    rig.add(prompt_of(8, seed=5), 1, tenant="third")
    for _ in range(30):
        rig.step()
    shared = rig.add(prompt_of(600, seed=9), 1, tenant="heavy", priority=5)
    while shared.state is not State.RUNNING:
        rig.step()
    rivals = [rig.add(prompt_of(1000, seed=30 + i), 1, tenant="third") for i in range(3)]
    light = rig.add(prompt_of(600, seed=9) + [1], 1, tenant="light")
    steps = 0
    while light not in rig.finished:
        rig.step()
        steps += 1
    assert light.prefix_len >= 500 and steps < 26 and not any(s in rig.finished for s in rivals)
    rig.run()


def test_salts_keep_them_apart():
    rig = Rig(num_spans=1024, max_chunk=40)
    first, second = rig.add(prompt_of(100), 2, salt="a"), rig.add(prompt_of(100), 2, salt="b")
    rig.step()
    rig.step()
    assert second.state is not State.BLOCKED
    rig.run()
    assert (first.prefix_len, second.prefix_len) == (0, 0)
