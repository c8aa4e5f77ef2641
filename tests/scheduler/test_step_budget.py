"""The budget of a step: with a target latency, and with prompts and streams that share its time."""

from __future__ import annotations

import math
import random
import statistics
from collections import deque

import pytest

from allspark_server.cache import PrefixCache, SpanKeys, SpanPool
from allspark_server.scheduler import Limits, Scheduler, Sequence, State, StopRules
from allspark_server.scheduler.token_budget import TokenBudget
from support.fake_group import step_result


def rows_of(budget: TokenBudget) -> int:
    """Rows of a step that a target allows."""
    return int(budget.for_prompts(0, 0, 1))


def test_step_budget_holds_a_latency():
    budget = TokenBudget(1024, 8, 20.0)
    for _ in range(50):
        budget.learn(rows_of(budget), 0, rows_of(budget) * 1e-4)
    assert 140 <= rows_of(budget) <= 200
    fixed = TokenBudget(1024, 8, 0.0, fixed=True)
    fixed.learn(8, 0, 0.03, 8)
    fixed.learn(1024, 0, 100.0, 8)
    assert fixed.for_prompts(8, 0, 1) == math.inf


def test_streams_and_prompts_share_a_step_by_their_numbers():
    """Streams alone take 34 ms; each row of a prompt adds a millisecond."""
    budget = TokenBudget(256, 8, 0.0)
    assert budget.for_prompts(0, 0, 4) == budget.for_prompts(8, 0, 4) == math.inf  # nothing is known
    for _ in range(50):
        budget.learn(8, 0, 0.034, 8)
        budget.learn(108, 0, 0.134, 8)
    assert budget.for_prompts(0, 0, 4) == math.inf  # nobody waits for it
    assert 45 < budget.for_prompts(8, 0, 1) == budget.for_prompts(8, 0, 8) < 60
    quick = TokenBudget(256, 8, 0.0)
    for _ in range(50):
        quick.learn(8, 0, 0.005, 8)
        quick.learn(108, 0, 0.015, 8)
    assert 400 < quick.for_prompts(8, 0, 1) < 500  # 50 ms in all
    assert budget.for_prompts(1, 0, 7) == pytest.approx(7 * budget.for_prompts(8, 0, 8))


def test_steps_without_streams_take_a_second_at_most():
    budget = TokenBudget(1024, 8, 0.0, shared_rows=256)
    assert budget.for_prompts(0, 0, 1) == math.inf and budget.most_rows(0, 0) == 256  # nothing is known
    budget.learn(256, 0, 0.5)
    assert budget.most_rows(0, 0) == pytest.approx(512)
    budget.learn(512, 0, 0.6)   # a row of a longer step costs less: later steps without streams may have more
    assert budget.most_rows(0, 0) == pytest.approx(512 / 0.6)
    budget.learn(8, 0, 0.1, decoding=8)
    assert budget.for_prompts(8, 0, 16) == pytest.approx(1.5 * 0.1 * 2 / (0.5 / 256))   # as if it had not been
    budget = TokenBudget(1024, 8, 0.0, shared_rows=256)
    budget.learn(256, 0, 10.0)
    assert budget.most_rows(0, 0) == 256


def test_steps_with_streams_stay_short():
    """However many prompts wait, and however little a row costs."""
    budget = TokenBudget(1024, 8, 0.0, shared_rows=256)
    budget.learn(1, 0, 0.1, decoding=1)
    budget.learn(256, 0, 0.01)
    assert budget.for_prompts(1, 0, 16) > 1024 and budget.most_rows(1, 0) == 255
    for other in (TokenBudget(256, 8, 0.0, shared_rows=256), TokenBudget(1024, 8, 0.0, True, shared_rows=256),
                  TokenBudget(1024, 8, 50.0, shared_rows=256)):
        assert other.most_rows(0, 0) == other.most_rows(1, 0) == math.inf


def test_rows_far_into_a_context_cost_more():
    """A prompt is computed in chunks; each earlier position adds a thousandth of a row's cost."""
    limits = Limits(4, 1024, 1024, 32)
    times = []
    budget = TokenBudget(1024, 4, 20.0)
    scheduler = Scheduler(limits, SpanPool(2048))
    scheduler.add(Sequence(list(range(30_000)), 30_000, b"", StopRules(30_001)))
    while scheduler.has_work:
        step = scheduler.plan(budget)
        times.append(1e-4 * (step.rows + step.context / 1000))
        budget.learn(step.rows, step.context, times[-1])
        scheduler.complete(step, step_result([[1]] * len(step.sampling), [0] * len(step.sampling)))
    assert 0.0008 < budget.price < 0.0012
    assert max(times[8:]) < 0.024 and sum(times[8:-1]) / len(times[8:-1]) > 0.014
    for _ in range(20):  # short prompts only
        budget.learn(rows_of(budget), rows_of(budget)**2 // 2, 1e-4 * (rows_of(budget) + rows_of(budget)**2 / 2000))
    scheduler.add(Sequence([2] * 30_000, 30_000, b"", StopRules(30_001)))
    scheduler.plan()
    scheduler.active[0].planned = 20_000  # found in a prefix cache, say
    rows = scheduler.plan(budget).rows
    assert 0.005 < 1e-4 * (rows + rows * 20) < 0.024


def test_a_prompt_gets_what_running_sequences_leave():
    """Running sequences take 34 ms, a prompt's rows half a millisecond each: 22 of them fit into 50 ms less a tenth."""
    budget = TokenBudget(256, 8, 50.0)
    for _ in range(40):
        budget.learn(8, 8 * 100, 0.034, 8)
    assert rows_of(budget) == 32
    for turn in range(3):
        times = []
        for step in range(120):
            times.append(0.034 + 5e-4 * (rows_of(budget) - 8))
            budget.learn(rows_of(budget), 8 * 100 + 10 * step, times[-1], 8)
        assert max(times) < 0.050 and min(times) > (0.042 if turn else 0.040)
        for _ in range(200):  # and they alone again
            budget.learn(8, 8 * 100, 0.034, 8)


def test_one_slow_step_is_not_taken_for_the_rule():
    budget = TokenBudget(256, 8, 50.0)
    for alone in (True, False):
        for _step in range(60):
            budget.learn(8, 0, 0.034, 8)
            budget.learn(rows_of(budget), 0, 0.030 + 5e-4 * rows_of(budget), 8)
        before = rows_of(budget)
        budget.learn(8 if alone else rows_of(budget), 0, 3.0, 8)
        assert rows_of(budget) >= before // 2
        for _step in range(60):
            budget.learn(8, 0, 0.034, 8)
            budget.learn(rows_of(budget), 0, 0.030 + 5e-4 * rows_of(budget), 8)
        assert abs(rows_of(budget) - before) <= 2


def test_the_fewest_rows_are_given_even_where_the_target_is_out_of_reach():
    budget = TokenBudget(256, 8, 5.0)
    for _ in range(20):
        budget.learn(8, 100, 0.034, 8)
        budget.learn(rows_of(budget), 100, 0.030 + 5e-4 * rows_of(budget), 8)
    assert rows_of(budget) == 8


@pytest.mark.parametrize("target, most", ((0.0, 3.0), (1.5 * 34 + 8, 2.0)))
def test_streams_keep_their_pace_while_a_long_prompt_is_computed(target, most):
    """Simulates a small model on two cores: a step takes 34 ms, and each row of a prompt 3.2 ms more, both up to a
    tenth more or less. Measured is the time between tokens of 8 streams while a prompt of 4,000 tokens comes, and then
    another.
    """
    rng = random.Random(5)
    limits = Limits(8, 256, 256, 32)
    budget = TokenBudget(256, 8, target)
    pool = SpanPool(2048)
    scheduler = Scheduler(limits, pool, PrefixCache(pool, SpanKeys(32)))
    running, clock = deque(), 0.0
    streams = [Sequence([1000 + i] * 16, 16, b"", StopRules(5000)) for i in range(7)]
    for sequence in streams:
        scheduler.add(sequence)
    gaps: dict[bool, list[float]] = {True: [], False: []}  # with a prompt, and without

    def steps(count: int, prompt: Sequence | None = None) -> None:
        nonlocal clock
        for _ in range(count):
            step = scheduler.plan(budget)
            rows = step.rows - step.decoding
            seconds = (0.034 + 0.0032 * rows + 2e-7 * step.context) * rng.uniform(0.9, 1.1)
            running.append((step, seconds))
            if len(running) < 2:
                continue
            oldest, seconds = running.popleft()
            clock += seconds
            gaps[oldest.rows > oldest.decoding].append(seconds)
            budget.learn(oldest.rows, oldest.context, seconds, oldest.decoding)
            scheduler.complete(oldest, step_result([[1]] * len(oldest.sampling), [0] * len(oldest.sampling)))
            if prompt is not None and prompt.state is State.ENDED:
                return

    steps(100)
    gaps[True].clear()  # of their own prompts
    for turn in range(2):
        prompt = Sequence([7 + turn] * 4000, 4000, b"", StopRules(4001))
        scheduler.add(prompt)
        steps(3000, prompt)
        assert prompt.state is State.ENDED
        steps(50)
    median = statistics.median(gaps[False])
    assert statistics.quantiles(gaps[True], n=100)[98] < most * median
    assert statistics.median(gaps[True]) > 1.3 * median  # and it uses its whole allowance
