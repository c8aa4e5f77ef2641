"""Recurrent states in the scheduler: checkpoints are taken, found, shared, evicted and restored, and a slot never
begins with another state than that of its history. The fake executor's states are the ids before them.
"""

from __future__ import annotations

import random

import pytest

from allspark_server.runtime.plan import STATES, Flag
from support.fake_group import expected_output
from support.scheduler_rig import Rig


def states(plan) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(slot, position) of the states that a plan saves and loads."""
    for kind, words in plan.sections if plan is not None else ():
        if kind == STATES:
            saved, size = words[0], words[1] + 2
            copies = [(words[i], words[i + 1]) for i in range(2, len(words), size)]
            return copies[:saved], copies[saved:]
    return [], []


def moves(rig) -> list[tuple[list, list]]:
    """The states of all steps until nothing is left."""
    found = []
    while rig.scheduler.has_work or rig.running:
        found.append(states(rig.step()))
    return [each for each in found if any(each)]


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


def rig_of(**fields) -> Rig:
    return Rig(**{"num_spans": 200, "span_size": 16, "max_step_tokens": 256, "max_chunk": 256, "state_spans": 3,
                  **fields})


def test_a_prompt_and_its_answer_leave_a_state_each():
    rig = rig_of()
    first = rig.add(ids(150), 60)
    assert moves(rig) == [([(0, 128)], []), ([(0, 192)], [])]
    assert not rig.executor.plans[-1].work  # that of the end has a step of its own, as no other one follows
    rig.add([*first.tokens, *ids(10, 1)], 1)
    assert moves(rig) == [([], [(0, 192)])]


def test_the_host_cache_gets_all_before_the_next_request():
    rig = rig_of(host_spans=100, lasting=True)
    first = rig.add(ids(150), 60)
    rig.run()
    assert rig.scheduler.counters.saved_spans == 13 + 2 * 3 and not rig.scheduler.has_work
    before = len(rig.executor.plans)
    rig.add([*first.tokens, *ids(10, 1)], 5)
    rig.step()
    assert [kind for kind, _ in rig.executor.plans[before].sections] == [STATES]
    rig.run()


def test_states_without_a_host_cache_make_no_empty_steps():
    rig = rig_of()
    rig.add(ids(150), 60)
    rig.run()
    assert rig.scheduler.has_work is False and rig.step() is None


def test_a_state_that_lies_beyond_the_tokens_is_not_kept():
    """Steps are planned before it is known that a sequence has ended: they may advance its state."""
    rig = rig_of(depth=2)
    rig.add(ids(100), 28)  # it ends with 127 positions computed, 128 with the step that was already planned
    found = moves(rig)
    rig.add(ids(90, 1), 1)
    assert (0, 128) not in [copy for saved, _ in found + moves(rig) for copy in saved]


def test_a_prompt_of_whole_chunks_cannot_use_the_state_of_its_end():
    rig = rig_of()
    rig.add(ids(128), 1)
    rig.run()
    again = rig.add(ids(128), 1)
    rig.run()
    assert again.prefix_len == 0  # the last row must be computed
    longer = rig.add(ids(128) + [1], 1)
    rig.run()
    assert longer.prefix_len == 128


def test_long_prompts_leave_states_on_the_way():
    rig = rig_of(num_spans=400)
    rig.add(ids(3000), 2)
    assert [saved for saved, _ in moves(rig)] == [[(0, 1024)], [(0, 2048)], [(0, 2944)]]


def test_a_shared_prefix_ends_a_chunk_where_it_ends():
    """Of prompts with 200 shared tokens, the second waits, and gets the state at the last multiple."""
    rig = rig_of(num_spans=400, max_chunk=100)
    shared = ids(200)
    first = rig.add(shared + ids(300, 1), 1)
    second = rig.add(shared + ids(300, 2), 1)
    rig.run()
    assert (first.prefix_len, second.prefix_len) == (0, 192)


def test_a_fork_leaves_a_state_for_the_next_one():
    """One prompt after the other: the second finds spans without a state, the third finds the state."""
    rig = rig_of(num_spans=400)
    shared, found = ids(200), []
    for seed in (1, 2, 3):
        found.append(rig.add(shared + ids(300, seed), 1))
        rig.run()
    assert [sequence.prefix_len for sequence in found] == [0, 0, 192]


def test_spans_of_128_positions_keep_every_second_multiple():
    rig = rig_of(span_size=128, num_spans=50)
    rig.add(ids(330), 2)
    assert moves(rig) == []  # 320 is not a multiple of 128
    rig.add(ids(260, 1), 2)
    assert moves(rig) == [([(0, 256)], [])]


def test_a_preempted_sequence_continues_at_its_state():
    rig = rig_of(num_spans=24, max_batch=2, state_spans=1)
    old, young = rig.add(ids(150), 200), rig.add(ids(150, 1), 60)
    rig.run()
    assert rig.scheduler.counters.preemptions > 0 and young.preemptions > 0
    for sequence in (old, young):
        assert rig.output[sequence] == expected_output(sequence.tokens[:150], len(rig.output[sequence]))


def test_states_that_are_lost_with_the_cache_are_forgotten():
    rig = rig_of()
    rig.add(ids(150), 60)
    rig.run()
    rig.scheduler.lose_cache()
    again = rig.add(ids(150), 1)
    assert moves(rig) == [] or again.prefix_len == 0
    assert again.prefix_len == 0 and rig.pool.used == 0


@pytest.mark.parametrize("seed", range(24))
def test_random_conversations(seed):
    """Turns, forks and preemptions with all sizes; the executor checks every state that is saved and loaded."""
    rng = random.Random(seed)
    draft_kind = rng.choice([0, 0, int(Flag.LOOKUP)])
    rig = Rig(num_spans=rng.choice([30, 60, 200]), span_size=rng.choice([16, 32, 64]), max_batch=3,
              max_step_tokens=rng.choice([40, 130, 600]), max_chunk=rng.choice([40, 130, 600]),
              depth=1 if draft_kind else rng.choice([1, 2]), state_spans=rng.choice([1, 3]),
              host_spans=rng.choice([0, 20]), lasting=rng.random() < 0.5, draft_kind=draft_kind)
    chats = [rng.choices(range(5), k=rng.choice([3, 70, 300])) for _ in range(3)]
    hits = 0
    for _turn in range(8):
        asked = {}
        for index, chat in enumerate(chats):
            if rng.random() < 0.8:
                asked[index] = rig.add(chat + rng.choices(range(5), k=rng.choice([1, 20, 64, 90])),
                                       rng.choice([1, 5, 64, 100]))
            for _ in range(rng.choice([0, 3, 500])):
                if rig.scheduler.has_work or rig.running:
                    rig.step()
        rig.run()
        for index, sequence in asked.items():
            if sequence not in rig.oversized:
                output = rig.output[sequence]
                assert output == expected_output(sequence.tokens[:sequence.prompt_len], len(output))
                hits += sequence.prefix_len or 0
                if len(sequence.tokens) < 900:
                    chats[index] = list(sequence.tokens)
    assert hits > 0 or rig.pool.num_spans < 200
