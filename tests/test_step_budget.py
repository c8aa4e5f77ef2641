"""What a step may cost so that its time stays under a target."""

from __future__ import annotations

from allspark_server.cache import SpanPool
from allspark_server.scheduler import Limits, Scheduler, Sequence, StopRules
from allspark_server.step_budget import StepBudget
from fake_group import step_result


def test_step_budget_holds_a_latency():
    budget = StepBudget(1024, 8, 20.0)
    for _ in range(50):
        budget.learn(budget.rows, 0, budget.rows * 1e-4)
    assert 140 <= budget.rows <= 200
    off = StepBudget(1024, 8, 0.0)
    off.learn(1024, 0, 100.0)
    assert off.rows == 1024


def test_rows_far_into_a_context_cost_more():
    """A prompt is computed in chunks; a position before a row costs a thousandth of the row."""
    limits = Limits(4, 1024, 1024, 32)
    times = []
    budget = StepBudget(1024, 4, 20.0)
    scheduler = Scheduler(limits, SpanPool(2048))
    scheduler.add(Sequence(list(range(30_000)), 30_000, b"", StopRules(30_001)))
    while scheduler.has_work:
        step = scheduler.plan(budget.rows, budget.price)
        times.append(1e-4 * (step.rows + step.context / 1000))
        budget.learn(step.rows, step.context, times[-1])
        scheduler.complete(step, step_result([[1]] * len(step.drawing), [0] * len(step.drawing)))
    assert 0.0008 < budget.price < 0.0012
    assert max(times[8:]) < 0.024 and sum(times[8:-1]) / len(times[8:-1]) > 0.014
    for _ in range(20):  # short prompts only
        budget.learn(budget.rows, budget.rows**2 // 2, 1e-4 * (budget.rows + budget.rows**2 / 2000))
    scheduler.add(Sequence([2] * 30_000, 30_000, b"", StopRules(30_001)))
    scheduler.plan(1)
    scheduler._running[0].planned = 20_000  # found in a prefix cache, say
    rows = scheduler.plan(budget.rows, budget.price).rows
    assert 0.005 < 1e-4 * (rows + rows * 20) < 0.024
