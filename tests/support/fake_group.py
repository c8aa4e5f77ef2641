"""A group without tensors: it checks every plan against the contract and returns scripted tokens."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import ModelInfo
from allspark_server.runtime.plan import COPIES, SAMPLE, STATES, Flag, SamplingParams, StepPlan, WorkItem
from allspark_server.runtime.profile import OpProfile, Profile, Roofline, summarize
from allspark_server.runtime.steps import DEPTH


def next_token(history: list[int], vocab: int = 1000) -> int:
    """A token that depends on the whole history, so that a wrong history gives a wrong output."""
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
    computed: int  # positions in the cache
    sample: int  # index among the request's samples
    state: int = 0  # position of its recurrent state
    spans: list[list[int]] = field(default_factory=list)  # a table for each cache group


def lookup(history: list[int], limit: int, longest: int = 3) -> list[int]:
    """Up to `limit` tokens that followed the last earlier occurrence of the last `longest` tokens (or of fewer)."""
    for n in range(min(longest, len(history) - 1), 0, -1):
        for at in range(len(history) - n - 1, -1, -1):
            if history[at:at + n] == history[-n:]:
                return history[at + n:at + n + limit]
    return []


class FakeExecutor:
    """Follows plans as the native executor does.

    Its "cache" records which ids each position of a span holds, and for which cache group, so that a wrong or
    overwritten span is noticed. `windows` are the sliding windows of the cache groups, 0 for full attention. With
    `state_spans`, slots have a recurrent state, whose content is the ids before its position. `drafts(history,
    limit)` plays the draft model. A negative token stands for logits that are not finite. With `samples_differ`
    each sample of a request gets tokens of its own.
    """

    def __init__(
        self,
        num_spans: int,
        span_size: int,
        max_batch: int,
        max_step_tokens: int,
        token: Callable[[list[int]], int] = next_token,
        max_length: int = 1 << 30,
        drafts: Callable[[list[int], int], list[int]] = lookup,
        samples_differ: bool = False,
        windows: tuple[int, ...] = (0,),
        state_spans: int = 0,
    ):
        self.windows, self.state_spans = windows, state_spans
        self.span_size, self.max_batch, self.max_step_tokens = span_size, max_batch, max_step_tokens
        self.num_spans, self.max_length = num_spans, max_length
        self.token, self.drafts, self.samples_differ = token, drafts, samples_differ
        self.slots: dict[int, _Slot] = {}
        self.cache: list[list[tuple[int, int] | None]] = [[None] * span_size for _ in range(num_spans)]
        self.plans: list[StepPlan] = []
        self.drafted = self.accepted = 0
        # the host cache: key and ids by host slot
        self.host: dict[int, tuple[list[int], list[tuple[int, int] | None]]] = {}

    def step(self, data: bytes) -> SimpleNamespace:
        plan = StepPlan.decode(data)
        self.plans.append(plan)
        assert (plan.rows > 0 or plan.sections) and plan.rows <= self.max_step_tokens
        loads: dict[int, tuple[int, list[int]]] = {}
        assert [kind for kind, _ in plan.sections] in ([], [COPIES], [STATES], [COPIES, STATES])
        for kind, words in plan.sections:
            if kind == COPIES:
                self._copy(words)
            else:
                loads = self._copy_states(words)
        for slot in plan.free:
            del self.slots[slot]
        for new in plan.new:
            assert 0 <= new.slot < self.max_batch and new.slot not in self.slots
            assert new.cached % self.span_size == 0 and 0 <= new.cached < len(new.history), "a prefix hit is full spans"
            sample = SamplingParams.decode(new.sampling, 0)[0].sample_index if self.samples_differ else 0
            self.slots[new.slot] = _Slot(list(new.history), new.cached, sample, 0, [[] for _ in self.windows])
            if self.state_spans and new.cached:
                self._load_state(new.slot, *loads.pop(new.slot))
        assert not loads
        assert len({item.slot for item in plan.work}) == len(plan.work)
        tried, drawn, drafted = self.drafted, [], []
        for item in plan.work:
            tokens = self._work(item)
            if item.flags & SAMPLE:
                drawn.append(tokens)
                drafted.append(self.drafted - tried)
            tried = self.drafted
        return step_result(drawn, drafted)

    def _copy(self, words: list[int]) -> None:
        copies = [(words[i], words[i + 1], words[i + 2:i + 6]) for i in range(1, len(words), 6)]
        saved, restored = copies[:words[0]], copies[words[0]:]
        assert len({host for _, host, _ in saved}) == len(saved) and len({s for s, *_ in restored}) == len(restored)
        for span, host, key in saved:
            self.host[host] = key, list(self.cache[span])
        for span, host, key in restored:
            assert self.host[host][0] == key
            self.cache[span] = list(self.host[host][1])

    def _copy_states(self, words: list[int]) -> dict[int, tuple[int, list[int]]]:
        """Saves states to spans. Returns the loads: position and spans by slot."""
        saved, each = words[:2]
        assert each == self.state_spans
        copies = [words[i:i + 2 + each] for i in range(2, len(words), 2 + each)]
        targets = [span for _, _, *spans in copies[:saved] for span in spans]
        assert len(set(targets)) == len(targets)
        for slot, position, *spans in copies[:saved]:
            held = self.slots[slot]
            assert position == held.state > 0, "the slot's state is at another position"
            for part, span in enumerate(spans):
                self.cache[span] = [(-1 - part, tuple(held.history[:position]))] * self.span_size
        return {slot: (position, spans) for slot, position, *spans in copies[saved:]}

    def _load_state(self, index: int, position: int, spans: list[int]) -> None:
        slot = self.slots[index]
        assert position == slot.computed
        for part, span in enumerate(spans):
            assert self.cache[span][0] == (-1 - part, tuple(slot.history[:position])), "the spans hold another state"
        slot.state = position

    def _work(self, item: WorkItem) -> list[int]:
        """The tokens that an item samples."""
        slot, size, given = self.slots[item.slot], self.span_size, bool(item.flags & Flag.GIVEN)
        assert item.drafts == 0 or (item.flags & SAMPLE and item.flags & (Flag.LOOKUP | Flag.GIVEN | Flag.MODEL))
        known = item.known[:len(item.known) - item.drafts] if given else item.known
        slot.history += known
        for table, new in zip(slot.spans, [item.spans, *item.other_spans], strict=True):
            table += new
        begin, end = slot.computed, slot.computed + item.rows
        assert item.rows > 0 and end <= len(slot.history)
        assert all(end + item.drafts <= len(table) * size for table in slot.spans)
        for position in range(begin, end):
            self._write(slot, position, slot.history[position])
        slot.computed, slot.state = end, end // 64 * 64
        seen = [max(0, begin + 1 - window) if window else 0 for window in self.windows]
        now = [span for table, first in zip(slot.spans, seen) for span in table[first // size:]]
        assert all(0 <= span < self.num_spans for span in now) and len(set(now)) == len(now)
        for group, (table, first) in enumerate(zip(slot.spans, seen)):
            cached = [self.cache[table[p // size]][p % size] for p in range(first, end)]
            assert cached == [(group, token) for token in slot.history[first:end]], \
                "the cache holds something else than this sequence's ids"
        if not item.flags & SAMPLE:
            assert item.outputs == 0
            return []
        assert end == len(slot.history) < self.max_length and item.outputs == 1
        return self._draw(slot, self._drafts(slot, item))

    def _write(self, slot: _Slot, position: int, token: int) -> None:
        for group, table in enumerate(slot.spans):
            self.cache[table[position // self.span_size]][position % self.span_size] = group, token

    def _drafts(self, slot: _Slot, item: WorkItem) -> list[int]:
        assert len(slot.history) + item.drafts < self.max_length
        if item.flags & Flag.GIVEN:
            return item.known[len(item.known) - item.drafts:]
        return (self.drafts if item.flags & Flag.MODEL else lookup)(slot.history, item.drafts)

    def _draw(self, slot: _Slot, drafts: list[int]) -> list[int]:
        for i, draft in enumerate(drafts):  # rows of rejected drafts write into the cache, too
            self._write(slot, slot.computed + i, draft)
        self.drafted += len(drafts)
        drawn = []
        for draft in [*drafts, None]:
            token = self.token(slot.history)
            drawn.append((token + 7 * slot.sample) % 1000 if slot.sample else token)
            slot.history.append(drawn[-1])
            if drawn[-1] != draft or drawn[-1] < 0:
                break
            slot.computed += 1
        self.accepted += len(drawn) - 1
        return drawn


def step_result(drawn: list[list[int]], drafted: list[int]) -> SimpleNamespace:
    """A StepResult from the tokens of each item that samples and the number of drafts that it tried. A negative token
    gets an error status.
    """
    tokens = np.array([token for each in drawn for token in each], np.int32)
    return SimpleNamespace(
        counts=np.array([len(each) for each in drawn], np.int32),
        drafted=np.array(drafted, np.int32),
        tokens=np.maximum(tokens, -1),
        status=(tokens < 0).astype(np.int32),
        logprobs=-tokens.astype(np.float32) / 1000,
        top_ids=np.tile(np.arange(20, dtype=np.int32), (len(tokens), 1)),
        top_logprobs=np.tile(-np.arange(20, dtype=np.float32), (len(tokens), 1)),
        logits=None,
        copy_seconds=0.0,
    )


class FakeGroup:
    """A group of one process whose models are FakeExecutors. Steps run in a thread, in the order in which they are
    submitted.

    `fail_at` is the step, counted from 0, in which a rank is lost with `failure`; `delay` the seconds that a step
    takes; `loaded` an event that loading waits for; `token` the function that continues a history.
    """

    size = 1
    depth = DEPTH
    loaded_part = 0.5

    def __init__(
        self,
        *,
        num_spans: int = 256,
        fail_at: int = -1,
        delay: float = 0,
        loaded: threading.Event | None = None,
        token: Callable[[list[int]], int] = next_token,
        samples_differ: bool = False,
        failure: Exception | None = None,
    ):
        self.failure = failure or RuntimeError("rank 1 was lost")
        self.num_spans, self.fail_at, self.delay, self.loaded, self.token = num_spans, fail_at, delay, loaded, token
        self.samples_differ = samples_differ
        self._hurry = threading.Event()
        self.deepest = 0    # the largest number of steps in flight so far
        self._thread = ThreadPoolExecutor(1, "fake-group")
        self._submitted: deque[Future] = deque()
        self.failures: list[str] = []
        self.executors: dict[str, FakeExecutor] = {}
        self.steps = 0
        self.measured_at: list[int] = []    # for each slice of the roofline measurement: the steps computed before it
        self.closed = False

    def start_load(self, config: AsModelConfig) -> None:
        self.config = config

    def poll_load(self) -> ModelInfo | None:
        self._drain()
        if self.loaded is not None and not self.loaded.is_set():
            return None
        config = self.config
        rows = config.max_step_tokens or 256
        size = config.cache_span_size
        self.executors[config.model_name] = FakeExecutor(
            self.num_spans,
            size,
            config.engine_max_batch,
            rows,
            self.token,
            config.engine_max_length,
            samples_differ=self.samples_differ,
        )
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

    def masks(self, name: str) -> None:
        return None

    def tower(self, name):
        return None

    def held_spans(self) -> dict[bytes, int]:
        return {}

    def submit(self, name: str, plan: bytes) -> None:
        assert len(self._submitted) < DEPTH, "too many steps in flight"
        self._submitted.append(self._thread.submit(self._step, name, plan))
        self.deepest = max(self.deepest, len(self._submitted))

    def collect(self) -> SimpleNamespace:
        return self._submitted.popleft().result()

    def hurry(self) -> None:
        """Makes all further steps take no time, and ends the delay of the running one."""
        self._hurry.set()

    def _drain(self) -> None:
        wait(self._submitted)

    def _step(self, name: str, plan: bytes) -> SimpleNamespace:
        if self.steps == self.fail_at:
            raise self.failure
        self.steps += 1
        if self.delay:
            self._hurry.wait(self.delay)
        return self.executors[name].step(plan)

    def unload(self, name: str) -> None:
        self._drain()
        self.executors.pop(name, None)

    def start_load_adapter(self, name: str, index: int, directory: str) -> None:
        self.adapter = directory

    def poll_load_adapter(self) -> str:
        if not os.path.isdir(self.adapter):
            raise AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND, f"{self.adapter} holds no adapter")
        return hashlib.blake2b(self.adapter.encode(), digest_size=16).hexdigest()

    def unload_adapter(self, name: str, index: int) -> None:
        self._drain()

    def fail(self, message: str) -> None:
        self.failures.append(message)

    def measure_roofline(self, name: str) -> bool:
        self._drain()
        self.measured_at.append(self.steps)
        return len(self.measured_at) >= 5

    def profile(self, name: str) -> Profile:
        return Profile(summarize([
            OpProfile("linear", "mlp.down_proj", 4, 0.1, 0.4, 1.0, 2e9, 4e9),
            OpProfile("span_attention", "", 1, 1.0, 1.0, 1.0, 1e9, 1e9),
            OpProfile("span_attention", "", 1, 2.0, 2.0, 2.0, 1e9, 1e9),
            OpProfile("add"),
        ]), Roofline(20e9, 100e9))

    def close(self) -> None:
        self._thread.shutdown()
        self.closed = True
