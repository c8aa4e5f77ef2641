"""A group without tensors: checks every plan against the contract and returns scripted tokens."""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Callable, Optional

import numpy as np

from allspark_client.config import AsModelConfig
from allspark_client.types import ModelInfo
from allspark_server.runtime.plan import StepPlan
from allspark_server.runtime.profile import Ceilings, OpProfile, Profile, summarize


def next_token(history: list[int], vocab: int = 1000) -> int:
    """A token that depends on the whole history: a wrong history gives a wrong output."""
    digest = hashlib.blake2b(struct.pack(f"<{len(history)}i", *history), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab


def expected_output(prompt: list[int], count: int, token: Callable[[list[int]], int] = next_token) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token(tokens))
    return tokens[len(prompt) :]


@dataclass
class _Slot:
    history: list[int]
    spans: list[int] = field(default_factory=list)
    computed: Optional[int] = None


class FakeExecutor:
    """Follows plans as the native executor does. The "cache" remembers which ids each span's positions hold, so that a
    wrong or overwritten span is noticed as wrong keys would be.
    """

    def __init__(
        self,
        num_spans: int,
        span_size: int,
        max_batch: int,
        max_step_tokens: int,
        token: Callable[[list[int]], int] = next_token,
    ):
        self.span_size, self.max_batch, self.max_step_tokens = span_size, max_batch, max_step_tokens
        self.num_spans = num_spans
        self.token = token
        self.slots: dict[int, _Slot] = {}
        self.cache: list[list[Optional[int]]] = [[None] * span_size for _ in range(num_spans)]
        self.plans: list[StepPlan] = []

    def step(self, data: bytes) -> SimpleNamespace:
        plan = StepPlan.decode(data)
        self.plans.append(plan)
        assert 0 < plan.rows <= self.max_step_tokens
        for slot in plan.free:
            del self.slots[slot]
        for new in plan.new:
            assert 0 <= new.slot < self.max_batch and new.slot not in self.slots
            self.slots[new.slot] = _Slot(list(new.history))
        assert len({item.slot for item in plan.work}) == len(plan.work)
        tokens = []
        for item in plan.work:
            tokens += self._work(item)
        count = len(tokens)
        return SimpleNamespace(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array([-t / 1000 for t in tokens], np.float32),
            top_ids=np.tile(np.arange(20, dtype=np.int32), (count, 1)),
            top_logprobs=np.tile(-np.arange(20, dtype=np.float32), (count, 1)),
            logits=None,
        )

    def _work(self, item) -> list[int]:
        slot, size = self.slots[item.slot], self.span_size
        slot.history += item.append
        slot.spans += item.spans
        assert all(0 <= span < self.num_spans for span in slot.spans) and len(set(slot.spans)) == len(slot.spans)
        if slot.computed is None:
            assert item.start % size == 0, "a prefix hit is full spans"
        else:
            assert item.start == slot.computed
        end = item.start + item.count
        assert item.count > 0 and end <= len(slot.history) and end <= len(slot.spans) * size
        for position in range(item.start, end):
            self.cache[slot.spans[position // size]][position % size] = slot.history[position]
        slot.computed = end
        cached = [self.cache[slot.spans[p // size]][p % size] for p in range(end)]
        assert cached == slot.history[:end], "the cache holds something else than this sequence's ids"
        if not item.sample:
            return []
        assert end == len(slot.history)
        return [self.token(slot.history)]


class FakeGroup:
    """A group of one process whose models are FakeExecutors. `fail_at`: in which step, counted from 0, a rank is lost;
    `delay`: seconds a step takes; `loaded`: an event that a load waits for."""

    size = 1

    def __init__(self, *, num_spans: int = 256, fail_at: int = -1, delay: float = 0, loaded=None):
        self.num_spans, self.fail_at, self.delay, self.loaded = num_spans, fail_at, delay, loaded
        self.failures: list[str] = []
        self.executors: dict[str, FakeExecutor] = {}
        self.steps = 0
        self.measured_at: list[int] = []    # steps before each slice of measuring ceilings
        self.closed = False

    def start_load(self, config: AsModelConfig) -> None:
        self.config = config

    def poll_load(self) -> Optional[ModelInfo]:
        if self.loaded is not None and not self.loaded.is_set():
            return None
        config = self.config
        rows = config.max_step_tokens or 256
        size = config.cache_span_size
        self.executors[config.model_name] = FakeExecutor(self.num_spans, size, config.engine_max_batch, rows)
        return ModelInfo(
            name=config.model_name,
            architecture="fake",
            vocab_size=1000,
            num_layers=1,
            eos_token_ids=[999],
            max_length=config.engine_max_length,
            num_spans=self.num_spans,
            span_size=size,
            max_step_tokens=rows,
            max_batch=config.engine_max_batch,
            model_hash="fake",
        )

    def step(self, name: str, plan: bytes) -> SimpleNamespace:
        if self.steps == self.fail_at:
            raise RuntimeError("rank 1 was lost")
        self.steps += 1
        if self.delay:
            time.sleep(self.delay)
        return self.executors[name].step(plan)

    def unload(self, name: str) -> None:
        self.executors.pop(name, None)

    def fail(self, message: str) -> None:
        self.failures.append(message)

    def measure_ceilings(self, name: str) -> bool:
        self.measured_at.append(self.steps)
        return len(self.measured_at) >= 5

    def profile(self, name: str) -> Profile:
        return Profile(summarize([
            OpProfile("linear", "mlp.down_proj", 4, 0.1, 0.4, 1.0, 2e9, 4e9),
            OpProfile("span_attention", "", 1, 1.0, 1.0, 1.0, 1e9, 1e9),
            OpProfile("span_attention", "", 1, 2.0, 2.0, 2.0, 1e9, 1e9),
            OpProfile("add"),
        ]), Ceilings(20e9, 100e9))

    def close(self) -> None:
        self.closed = True
