"""Random runs of the scheduler on the fake executor: outputs are always as expected, and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from allspark_server.runtime.plan import Flag
from allspark_server.scheduler import FinishReason, PredictedText, Prediction, Sequence, State, StopRules
from support.fake_group import expected_output, next_token
from support.scheduler_rig import Rig, output, prompt_of, repetitive

RUNS = 800
CHUNKS = 4  # number of tests that the runs are spread over


def corrupted(history: list[int]) -> int:
    """Like repetitive(), with logits that are not finite now and then."""
    return -1 if sum(history[-6:]) == 11 else repetitive(history)


def guess(history: list[int], limit: int) -> list[int]:
    """A draft model that is right most of the time."""
    drafts: list[int] = []
    for _ in range(limit):
        token = repetitive([*history, *drafts])
        drafts.append(token if (len(history) + token) % 4 else 3)
    return drafts


def expected_until_stop(prompt: list[int], stop: StopRules, token) -> tuple[list[int], FinishReason | None]:
    """The output up to the stop, and its reason; None where no token can be sampled."""
    tokens = list(prompt)
    while True:
        tokens.append(token(tokens))
        if tokens[-1] < 0:
            return tokens[len(prompt) : -1], None
        reason = stop.check(tokens, len(prompt))
        if reason is not None:
            return tokens[len(prompt) :], reason


class Run:
    """A random run: traffic for a while, then until everything is done."""

    def __init__(self, seed: int):
        rng = self.rng = random.Random(seed)
        self.token = rng.choice([None, repetitive, repetitive, corrupted])
        kind = rng.choice([0, Flag.LOOKUP, Flag.LOOKUP, Flag.MODEL])
        executor = {"drafts": guess, "max_length": 64}
        if self.token is not None:
            executor["token"] = self.token
        self.max_batch = rng.choice([1, 3, 6])
        self.rig = Rig(
            num_spans=rng.choice([9, 14, 20, 64]), span_size=rng.choice([4, 4, 7]), max_batch=self.max_batch,
            max_step_tokens=rng.choice([8, 20, 64]), max_chunk=rng.choice([1, 5, 64]), prefix=rng.random() < 0.7,
            depth=rng.choice([1, 2, 2, 2, 3]), draft_kind=int(kind), executor=executor, ttl=rng.choice([0.5, 100.0]),
            host_spans=rng.choice([0, 0, 3, 30]), lasting=rng.random() < 0.3,
            windows=rng.choice([(0,), (0,), (0, 6), (0, 6), (9,), (0, 0, 5), (0, 3, 3)]),
        )  # fmt: skip
        self.tenants = [f"tenant {i}" for i in range(rng.choice([1, 1, 2, 5]))]
        self.live: list[Sequence] = []
        self.cancelled: set[Sequence] = set()
        self.blocked: list[Sequence] = []
        self.seen = Counter()

    def add(self) -> None:
        rng = self.rng
        prompt = prompt_of(rng.randrange(1, 24), seed=rng.randrange(3))
        if rng.random() < 0.2:  # beside which others are short
            prompt = prompt_of(rng.randrange(24, 40), seed=rng.randrange(3))
        if self.token is not None:
            prompt = [token % 5 for token in prompt]
        vocabulary = range(5) if self.token is not None else range(1000)
        eos = frozenset(rng.sample(vocabulary, rng.choice([0, 0, 1, 3])))
        words = tuple(tuple(rng.choices(vocabulary, k=rng.randrange(1, 4))) for _ in range(rng.choice([0, 0, 1, 2])))
        stop = StopRules(len(prompt) + rng.randrange(1, 16), eos, words)
        blocked = "a grammar" if rng.random() < 0.1 else ""
        if self.live and rng.random() < 0.1:  # another sample
            other = rng.choice(self.live)
            prompt = other.tokens[: other.prompt_len]
            stop = StopRules(len(prompt) + 9)
        tenant = rng.choice(self.tenants)
        prediction = None
        if rng.random() < 0.2:  # sometimes right, sometimes with other tokens in it
            guessed = expected_until_stop(prompt, StopRules(stop.max_length), self.token or next_token)[0]
            text = [token if rng.random() < 0.9 else rng.choice(vocabulary) for token in guessed]
            prediction = Prediction(PredictedText(text[rng.choice([0, 0, 2]):]), len(prompt))
        sequence = self.rig.add(prompt, stop=stop, priority=rng.randrange(2), tenant=tenant, blocked_on=blocked,
                                prediction=prediction)
        self.live.append(sequence)
        if blocked:
            self.blocked.append(sequence)

    def disturb(self) -> None:
        """Cancels, blocks and unblocks."""
        rng, scheduler = self.rng, self.rig.scheduler
        if self.live and rng.random() < 0.12:
            sequence = rng.choice(self.live)
            if sequence.state is not State.ENDED:
                self.seen["cancelled in flight"] += any(sequence in step.sequences for step, _ in self.rig.running)
                self.cancelled.add(sequence)
            scheduler.cancel(sequence)
        if self.live and rng.random() < 0.08:
            sequence = rng.choice(self.live)
            if sequence.state in (State.WAITING, State.RUNNING):
                self.seen["blocked while running"] += sequence.state is State.RUNNING
                scheduler.block(sequence, "spans from elsewhere")
                assert sequence.slot == -1 and not sequence.spans and sequence.state is State.BLOCKED
                self.blocked.append(sequence)
        if self.blocked and rng.random() < 0.3:
            self.unblock(self.blocked.pop(rng.randrange(len(self.blocked))))

    def unblock(self, sequence: Sequence) -> None:
        self.seen["unblocked"] += sequence.state is State.BLOCKED
        self.rig.scheduler.unblock(sequence)

    def go(self) -> Counter:
        rig, rng = self.rig, self.rng
        for _ in range(15):
            for _ in range(rng.randrange(3)):
                self.add()
            self.disturb()
            before = [(s, s.preemptions) for step, _ in rig.running for s in step.sequences]
            if rig.host_cache is not None and rng.random() < 0.2:  # cost of copies and rows
                rig.host_cache.costs.copy, rig.host_cache.costs.row = rng.choice([0.0, 1e-3, 0.3]), rng.choice([0.0,
                                                                                                                1e-3])
            rig.step()
            self.seen["waited for a prefix"] += sum(s.awaited is not None for s in self.live)
            self.seen["preempted in flight"] += sum(s.preemptions - n for s, n in before)
            rig.clock.now += 0.2
        while self.blocked:
            self.unblock(self.blocked.pop())
        rig.run()
        self.check()
        return self.seen

    def check(self) -> None:
        rig, scheduler = self.rig, self.rig.scheduler
        assert scheduler.waiting == scheduler.waiting_bytes == scheduler.blocked == scheduler.running == 0
        for sequence in self.live:
            prompt = sequence.tokens[: sequence.prompt_len]
            token = self.token or (lambda history: expected_output(history, 1)[0])
            tokens, reason = expected_until_stop(prompt, sequence.stop, token)
            got = rig.output[sequence]
            assert sequence.state is State.ENDED and output(sequence) == got
            if sequence in self.cancelled or sequence in rig.oversized:
                assert got == tokens[: len(got)] and sequence not in rig.finished
            else:
                assert (got, rig.finished.get(sequence)) == (tokens, reason)
                assert (sequence in rig.failed) == (reason is None)
            assert not sequence.followers and sequence.awaited is None
        assert not scheduler._spans.pending._producers and not len(scheduler.tenants)
        counters, executor = scheduler.counters, rig.executor
        assert counters.generated_tokens == sum(map(len, rig.output.values()))
        assert counters.accepted_tokens == executor.accepted <= executor.drafted <= counters.drafted_tokens
        seen = self.seen
        predictions = [sequence.prediction for sequence in self.live if sequence.prediction is not None]
        seen["predicted"] += sum(prediction.accepted for prediction in predictions)
        seen["wrongly predicted"] += sum(prediction.rejected for prediction in predictions)
        seen["accepted"] += counters.accepted_tokens
        seen["rejected"] += executor.drafted - executor.accepted
        seen["discarded"] += counters.discarded_rows
        seen["preempted"] += counters.preemptions
        seen["found in the prefix cache"] += counters.prefix_tokens
        seen["saved"] += counters.saved_spans
        seen["restored"] += counters.restored_spans
        seen["failed"] += len(rig.failed)
        seen["oversized"] += len(rig.oversized)
        seen.update(reason.value for reason in rig.finished.values())


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, CHUNKS))])
def test_random_traffic(chunk):
    seen: Counter = Counter()
    for seed in range(chunk, RUNS, CHUNKS):
        try:
            seen += Run(seed).go()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    wanted = ("accepted", "rejected", "discarded", "preempted", "preempted in flight", "cancelled in flight",
              "unblocked", "blocked while running", "waited for a prefix", "saved", "restored",
              "found in the prefix cache", "failed", "oversized", "predicted", "wrongly predicted",
              "stop", "stop_word", "length")
    assert all(seen[what] >= 5 for what in wanted), seen
