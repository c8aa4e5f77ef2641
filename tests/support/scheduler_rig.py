"""A scheduler on a fake executor."""
from __future__ import annotations

import random
from collections import deque

from allspark_server.cache import HostCache, PrefixCache, SpanKeys, SpanPool
from allspark_server.runtime.plan import SamplingParams
from allspark_server.scheduler import FinishReason, Limits, Scheduler, Sequence, StopRules
from support.fake_group import FakeExecutor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A scheduler and an executor with the same limits.

    `depth` steps are planned before the oldest one's results are known, that one included. `executor` are arguments of
    FakeExecutor, `host_spans` the size of the host cache, and `windows` the cache groups' sliding windows, 0 for full
    attention. `state_spans`: those of a recurrent state, 0 for none.
    """

    def __init__(self, num_spans=64, span_size=4, max_batch=4, max_step_tokens=64, max_chunk=64, prefix=True, depth=1,
                 draft_kind=0, executor=None, host_spans=0, lasting=False, windows=(0,), state_spans=0, **cache):
        self.clock = Clock()
        self.pool = SpanPool(num_spans)
        self.host_cache = HostCache(host_spans, span_size, lasting=lasting) if host_spans and prefix else None
        keys = SpanKeys(span_size)
        self.prefix = PrefixCache(self.pool, keys, clock=self.clock, host_cache=self.host_cache,
                                  **cache) if prefix else None
        limits = Limits(max_batch, max_step_tokens, max_chunk, span_size, draft_kind, windows=windows,
                        state_spans=state_spans)
        self.scheduler = Scheduler(limits, self.pool, self.prefix, clock=self.clock)
        self.executor = FakeExecutor(num_spans, span_size, max_batch, max_step_tokens, windows=windows,
                                     state_spans=state_spans, **(executor or {}))
        self.depth, self.running = depth, deque()
        self.finished: dict[Sequence, FinishReason] = {}
        self.output: dict[Sequence, list[int]] = {}
        self.oversized: list[Sequence] = []
        self.failed: list[Sequence] = []

    def add(self, prompt, new_tokens=5, generated=(), **fields) -> Sequence:
        stop = fields.pop("stop", StopRules(len(prompt) + new_tokens))
        sequence = Sequence([*prompt, *generated], len(prompt), SamplingParams().encode(), stop, **fields)
        self.output[sequence] = list(generated)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """Plans a step. Completes the oldest step if `depth` steps run, or if nothing can be planned."""
        step = self.scheduler.plan()
        self.oversized += self.scheduler.take_oversized()
        plan = None
        if step is not None:
            self.running.append((step, self.executor.step(step.encode())))
            plan = self.executor.plans[-1]
        if self.running and (step is None or len(self.running) == self.depth):
            self.complete()
        return plan

    def complete(self):
        step, result = self.running.popleft()
        outcome = self.scheduler.complete(step, result)
        for sequence, first, kept in zip(outcome.sequences, outcome.first.tolist(), outcome.kept.tolist()):
            self.output[sequence] += result.tokens[first:first + kept].tolist()
        for index, reason in outcome.ended:
            assert outcome.sequences[index] not in self.finished
            self.finished[outcome.sequences[index]] = reason
        self.failed += [outcome.sequences[index] for index in outcome.failed]
        return outcome, result

    def run(self, limit=10_000) -> int:
        steps = 0
        while self.scheduler.has_work or self.running:
            self.step()
            steps += 1
            assert steps < limit, "no progress"
        self.check_nothing_leaks()
        return steps

    def check_nothing_leaks(self) -> None:
        assert self.pool.used == 0
        assert sorted(self.scheduler._free_slots) == list(range(self.scheduler.limits.max_batch))
        assert not any(sequence.in_flight for sequence in self.output)
        for sequence, drawn in self.output.items():
            assert output(sequence)[:len(drawn)] == drawn


def output(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_len :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def repetitive(history: list[int]) -> int:
    """A token that often, but not always, repeats an earlier one, so that lookup drafts are accepted and rejected."""
    return (history[-1] * 7 + len(history) // 9) % 5 if len(history) > 1 else 1
