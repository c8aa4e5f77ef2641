"""One installed model: its scheduler, its live requests and its counters. Everything here runs on the engine's thread,
except what says otherwise."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Optional

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import AsEngineStat, GenerateRequestStatus, ModelInfo

from .cache import PrefixCache, SpanPool
from .request import Request
from .runtime.group import Group
from .scheduler import FinishReason, Limits, Scheduler, Step

if TYPE_CHECKING:
    from .text import Tokenizer

logger = logging.getLogger(__name__)

_NO_TOP: list[tuple[int, float]] = []  # never filled
# Waiting prompts may have so many times the tokens that the cache holds, and so many in any case: about 40 bytes each.
_QUEUED_CACHES, _QUEUED_TOKENS = 16, 1 << 20
_RATE_SECONDS = 10  # throughput is over at most so many past seconds


class Throughput:
    """Rows and generated tokens of the last seconds, counted by whole seconds."""

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque(maxlen=_RATE_SECONDS + 1)  # [second, rows, generated]

    def add(self, now: float, rows: int, generated: int) -> None:
        """Counts a step that ended at `now`, in seconds of the monotonic clock."""
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += rows
        self._seconds[-1][2] += generated

    def rates(self, now: float) -> tuple[float, float]:
        """Rows and generated tokens per second. May be called by any thread."""
        recent = [entry for entry in list(self._seconds) if now - entry[0] <= _RATE_SECONDS]
        if not recent:
            return 0.0, 0.0
        span = max(now - recent[0][0], 1e-3)
        return sum(entry[1] for entry in recent) / span, sum(entry[2] for entry in recent) / span


class StepBudget:
    """What a step may cost, chosen to keep its time under a target: less after a step that was too slow, more again
    while steps that used the whole budget are fast. What a request outputs does not depend on it.

    The unit is a row at the beginning of its context; `price` is what each position before it adds, as learned from the
    times of steps.
    """

    _MEMORY = 0.95  # of what was learned, how much stays with each step

    def __init__(self, max_rows: int, min_rows: int, target_ms: float):
        self.rows, self.price = max_rows, 0.0
        self._min, self._target = min(min_rows, max_rows), target_ms / 1e3
        self._sums = [0.0] * 5  # of rows², rows · context, context², rows · seconds, context · seconds

    @property
    def adaptive(self) -> bool:
        """Whether there is a target."""
        return self._target > 0

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """Takes notice of a step of so many rows, with so many positions before them in all, that took so long."""
        if not self.adaptive:
            return
        terms = (rows * rows, rows * context, context * context, rows * seconds, context * seconds)
        self._sums = [self._MEMORY * old + new for old, new in zip(self._sums, terms)]
        rr, rc, cc, rs, cs = self._sums
        determinant = rr * cc - rc * rc  # least squares of seconds = a · rows + b · context
        if determinant > 1e-6 * rr * cc:
            row, position = (cc * rs - rc * cs) / determinant, (rr * cs - rc * rs) / determinant
            if row > 0:
                self.price = max(0.0, position / row)
        cost = rows + self.price * context
        if seconds > self._target and cost > self._min:
            self.rows = max(self._min, min(self.rows, int(cost * max(0.5, self._target / seconds))))
        elif seconds < 0.8 * self._target and cost >= 0.9 * self.rows:
            self.rows += max(1, self.rows // 8)


class ServedModel:
    """`running` says whether requests are taken; `failure` why they are not until the model is loaded again."""

    def __init__(self, config: AsModelConfig, info: ModelInfo, tokenizer: Optional[Tokenizer], fingerprint: str):
        self.config, self.info, self.tokenizer, self.fingerprint = config, info, tokenizer, fingerprint
        self.name = info.name
        self.running = False
        self.failure: Optional[str] = None
        self.live: set[Request] = set()
        self.throughput = Throughput()
        self._lock = threading.Lock()
        self._incoming = 0  # requests admitted by `reserve` that the scheduler does not have yet
        self._incoming_tokens = 0  # and tokens, by `reserve_tokens`
        self._max_queued_tokens = max(_QUEUED_CACHES * info.num_spans * info.span_size, _QUEUED_TOKENS)
        chunk = config.engine_max_prefill_length or info.max_step_tokens
        self._max_chunk = min(chunk, info.max_step_tokens)
        self.budget = StepBudget(info.max_step_tokens, info.max_batch, config.target_token_latency)
        pool = SpanPool(info.num_spans)
        prefix = None
        if config.enable_prefix_cache:
            prefix = PrefixCache(pool, info.span_size, config.prefix_cache_ttl, info.dynamic_rope_original)
        limits = Limits(info.max_batch, info.max_step_tokens, self._max_chunk, info.span_size)
        self.scheduler = Scheduler(limits, pool, prefix)

    # Any thread.

    def reserve(self, samples: int) -> None:
        """Takes places in the queue, or raises. Undone by `enqueue` or `unreserve`."""
        self.check_running()
        with self._lock:
            waiting = self.scheduler.waiting
            free_slots = 0 if waiting else self.info.max_batch - self.scheduler.running
            if waiting + self._incoming + samples - free_slots > self.config.max_queue:
                raise AllSparkError(
                    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                    f"the queue of model {self.name!r} is full: {waiting + self._incoming} requests wait, "
                    f"max_queue={self.config.max_queue}",
                    retryable=True,
                )
            self._incoming += samples

    def unreserve(self, samples: int) -> None:
        """Gives places back."""
        with self._lock:
            self._incoming -= samples

    def reserve_tokens(self, request: Request) -> None:
        """Takes room for the prompt of a request, or raises. Undone by `enqueue` or `unreserve_tokens`."""
        tokens = request.tokens
        with self._lock:
            waiting = self.scheduler.waiting_tokens + self._incoming_tokens
            if waiting and waiting + tokens > self._max_queued_tokens:
                raise AllSparkError(
                    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                    f"the queue of model {self.name!r} is full: prompts of {waiting} tokens wait, and {tokens} more "
                    f"would exceed its limit of {self._max_queued_tokens} tokens",
                    retryable=True,
                )
            self._incoming_tokens += tokens

    def unreserve_tokens(self, request: Request) -> None:
        """Gives that room back."""
        with self._lock:
            self._incoming_tokens -= request.tokens

    def check_running(self) -> None:
        """Raises AllSparkError unless the model takes requests."""
        if self.failure is not None:
            raise AllSparkError(
                AsStatus.ALLSPARK_RUNTIME_ERROR,
                f"model {self.name!r} has failed ({self.failure}); start_model loads it again",
            )
        if not self.running:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {self.name!r} is not running; call start_model first"
            )

    def stat(self) -> AsEngineStat:
        """Load and counters. Read without a lock: values may be a step apart."""
        scheduler, info = self.scheduler, self.info
        counters, pool = scheduler.counters, scheduler.pool
        rows, generated = self.throughput.rates(time.monotonic())
        hit, seen = counters.prefix_tokens, counters.prompt_tokens
        return AsEngineStat(
            model_name=self.name,
            total_span=pool.num_spans,
            used_span=pool.used,
            free_span=pool.available,
            total_token=pool.num_spans * info.span_size,
            free_token=pool.available * info.span_size,
            pendding_request=scheduler.waiting + self._incoming,
            running_request=scheduler.running,
            total_prefill_token=seen,
            total_generated_token=counters.generated_tokens,
            generate_token_persec=generated,
            process_token_persec=rows,
            token_usage_percentage=100.0 * pool.used / pool.num_spans,
            prefix_cache_hit_token=hit,
            prefix_cache_miss_token=seen - hit,
            prefix_cache_hit_rate=hit / seen if seen else 0.0,
            prefix_cache_miss_rate=(seen - hit) / seen if seen else 0.0,
            preempted_request=counters.preemptions,
        )

    # The engine's thread.

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.running and self.failure is None and self.scheduler.has_work

    def enqueue(self, request: Request) -> None:
        """Hands a request for which `reserve` was called to the scheduler."""
        self.unreserve(request.samples)
        self.unreserve_tokens(request)
        if request.done.is_set():  # cancelled before it came here
            return
        if not self.running or self.failure is not None:
            request.finish(GenerateRequestStatus.GenerateInterrupted)
            return
        self.live.add(request)
        for sequence in request.sequences:
            complete = sequence.tokens[sequence.prompt_len :] and sequence.stop.check(
                sequence.tokens, sequence.prompt_len
            )
            if complete:  # a resumed request whose last token the client had already
                self._sequence_ended(request, complete)
            else:
                self.scheduler.add(sequence)

    def end(
        self, request: Request, status: GenerateRequestStatus, error: Optional[AllSparkError] = None
    ) -> None:
        """Ends a request before its time; nothing happens if it has ended."""
        if request.done.is_set():
            return
        for sequence in request.sequences:
            self.scheduler.cancel(sequence)
        self.live.discard(request)
        request.finish(status, error)

    def end_all(self, status: GenerateRequestStatus, error: Optional[AllSparkError] = None) -> None:
        """Ends every live request."""
        for request in list(self.live):
            self.end(request, status, error)

    def step(self, group: Group) -> None:
        """Plans and computes one step and delivers its tokens. Raises what the group raises."""
        scheduler = self.scheduler
        budget = self.budget
        step = scheduler.plan(budget.rows, budget.price) if budget.adaptive else scheduler.plan()
        for sequence in scheduler.take_unfit():
            request = sequence.owner.request
            error = AllSparkError(
                AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
                f"the cache of model {self.name!r}, {self.info.num_spans} spans of {self.info.span_size} tokens, "
                f"cannot hold the {len(sequence.tokens)} tokens of this request; give it more cache_memory",
            )
            self.end(request, GenerateRequestStatus.InternalError, error)
        if step is None:
            return
        begin = time.monotonic()
        for sequence in step.admitted:
            request = sequence.owner.request
            request.first_step = request.first_step or begin
        group.submit(self.name, step.plan.encode())
        result = group.collect()
        end = time.monotonic()
        rows = step.plan.rows
        if budget.adaptive:
            context = sum(
                item.rows * (2 * start + item.rows - 1) // 2 for item, start in zip(step.plan.work, step.starts)
            )
            budget.learn(rows, context, end - begin)
        sampled = self._deliver(step, result, end)
        self.throughput.add(end, rows, sampled)

    def _deliver(self, step: Step, result, now: float) -> int:
        outcomes = self.scheduler.complete(step, result.tokens.tolist())
        logprobs = top_ids = top_logprobs = None
        for outcome in outcomes:
            sequence = outcome.sequence
            sample = sequence.owner
            if sample.request.done.is_set():  # another of its samples could not be delivered, just now
                continue
            if outcome.token < 0:  # the sampler found nothing to draw from; other rows are not harmed
                failure = AllSparkError(
                    AsStatus.ALLSPARK_RUNTIME_ERROR,
                    f"the logits of model {self.name!r} are not finite; its weights hold NaN or infinite values",
                )
                self.end(sample.request, GenerateRequestStatus.InternalError, failure)
                continue
            logprob, top = None, _NO_TOP
            if sample.top_logprobs >= 0:
                if logprobs is None:
                    logprobs = result.logprobs.tolist()
                    top_ids, top_logprobs = result.top_ids, result.top_logprobs
                logprob = logprobs[outcome.index]
                if sample.top_logprobs:
                    ids = top_ids[outcome.index, : sample.top_logprobs].tolist()
                    values = top_logprobs[outcome.index, : sample.top_logprobs].tolist()
                    top = [(i, value) for i, value in zip(ids, values) if i >= 0]
            try:
                sample.request.deliver(sequence, outcome.token, logprob, top, outcome.finished is not None, now)
            except Exception as error:  # this request's output cannot be delivered; the others' can
                logger.exception("request %d of model %r", sample.request.handle, self.name)
                failure = AllSparkError(AsStatus.ALLSPARK_UNKNOWN_ERROR, f"its output cannot be delivered: {error}")
                self.end(sample.request, GenerateRequestStatus.InternalError, failure)
            if outcome.finished is not None:
                self._sequence_ended(sample.request, outcome.finished)
        return len(outcomes)

    def _sequence_ended(self, request: Request, reason: FinishReason) -> None:
        request.unfinished -= 1
        if request.unfinished == 0:
            self.live.discard(request)
            request.finish(GenerateRequestStatus.GenerateFinished, complete=reason)
