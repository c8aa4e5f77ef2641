"""One installed model: its requests, its scheduler and its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import AsEngineStat, GenerateRequestStatus, ModelInfo, ModelState

from ..cache import HostCache, PrefixCache, SpanKeys, SpanPool
from ..guided import Guide, MaskWriter, MatcherError
from ..runtime.device import LONG_STEPS, step_tokens
from ..runtime.plan import Flag
from ..runtime.steps import DEPTH
from ..scheduler import FinishReason, Limits, QuarantineScheduler, Sequence, State, Step, StepResult, TokenBudget
from .adapters import Adapter, Adapters
from .deadlines import Deadlines
from .handover import HandoverCounters, Records
from .image_encoder import ImageEncoder
from .input_stage import InputStage
from .output import Begun, End, OutputStage, StepOutput
from .prompt_images import ImageStage
from .quarantine import Quarantine
from .queue_limits import QueueLimits
from .request import Request
from .statistics import Throughput, Timings, engine_stat
from .threads import one_thread

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer

#: seconds to wait before a quarantined request runs, so that its client learns of it before a possible crash
ANNOUNCE_SECONDS = 0.02
_DRAFT_KINDS = {"off": 0, "prompt_lookup": int(Flag.LOOKUP), "draft": int(Flag.MODEL), "mtp": int(Flag.MODEL),
                "eagle": int(Flag.MODEL)}


class ServedModel:
    """Passes requests to the scheduler, plans steps, and takes their results; on the engine's thread unless said
    otherwise.

    `running`: it accepts requests. `failure`: why it failed, until it is loaded again. `lost`: this process cannot load
    it again, because it has lost the device. `loaded`: its device memory is loaded. `input`: its input stage. Tokens
    and ends of requests go to `output`.
    """

    def __init__(
        self, config: AsModelConfig, info: ModelInfo, tokenizer: Tokenizer | None, digest: str,
        output: OutputStage, host_spans: dict[bytes, int] | None = None, guide: Guide | None = None, masks: Any = None,
        post: Callable[[Callable[[], None]], None] = lambda command: None, images: ImageStage | None = None,
    ):
        """`digest`: the fingerprint. `host_spans`: spans by key that a persistent host cache holds from an earlier run.
        `guide`, `masks`: for constrained decoding, if it is available; `masks` is rank 0's native Masks. `post`: runs a
        command on the engine's thread. `images`: of a model that sees.
        """
        self.config, self.info, self.fingerprint = config, info, digest
        self.image_fingerprint = images.fingerprint if images is not None else ""
        self.name = info.name
        self.running = False
        self.loaded = True
        self.failure: str | None = None
        self.lost = False
        self.live: set[Request] = set()
        self.last_used = time.monotonic()   # when a request last began or ended
        self.throughput = Throughput()
        self.timings = Timings()
        # Of a model with experts on CPUs, steps have more rows than of others (Device.step_tokens_of).
        usual = step_tokens(config)
        longer = not config.on_gpus and info.max_step_tokens == LONG_STEPS * usual
        self.budget = TokenBudget(
            info.max_step_tokens, info.max_batch, config.target_token_latency, fixed=config.max_step_tokens > 0,
            shared_rows=max(usual, 2 * info.max_batch) if longer else 0)
        self._output = output
        pool = SpanPool(info.num_spans)
        prefix = None
        keys: SpanKeys | None = None
        self.host_cache: HostCache | None = None
        self.records: Records | None = None     # of the host cache, if rank 0 can open all ranks' files
        self.handover = HandoverCounters()
        if config.enable_prefix_cache and not info.whole_texts:
            keys = SpanKeys(info.span_size, info.dynamic_rope_original, info.long_rope_original)
            if info.host_spans:
                self.host_cache = HostCache(
                    info.host_spans, info.span_size, host_spans, bool(config.host_cache_dir),
                    info.cache_bytes // info.num_spans)
            prefix = PrefixCache(pool, keys, config.prefix_cache_ttl, host_cache=self.host_cache)
        chunk = min(config.engine_max_prefill_length or info.max_step_tokens, info.max_step_tokens)
        if info.whole_texts or (images is not None and images.together):
            chunk = info.max_step_tokens
        self._guide = guide if masks is not None else None
        self._masks = MaskWriter(masks, self._fail_constrained) if masks is not None else None
        info.max_characters = (tokenizer and tokenizer.longest_text(info.max_length)) or 0
        self.input = InputStage(info, tokenizer, keys, self._guide, config.trust_request_chat_template, images)
        #: what the pipeline computes of it: its own steps, and those of its vision tower
        self.stepping: list[ServedModel | ImageEncoder] = [self] if images is None else [images.encoder, self]
        self._post = post
        limits = Limits(
            info.max_batch, info.max_step_tokens, chunk, info.span_size, _DRAFT_KINDS[config.speculation],
            masks=len(masks.bits) // DEPTH if masks is not None else 0, recompute_beyond=info.long_rope_original,
            windows=tuple(info.cache_windows), state_spans=info.state_spans,
            # a layer of a head was made for one token: begin with little, it grows by itself
            first_drafts=max(2, info.draft_layers) if config.speculation == "mtp" else Limits.first_drafts,
            whole=step_tokens(config) if info.whole_texts else 0,
        )
        self.scheduler = QuarantineScheduler(limits, pool, prefix)
        self.queue = QueueLimits(info.name, self.scheduler, config.max_queue, config.max_queue_memory)
        self.adapters = Adapters(info.name, config.lora_max_num)
        self._flushing: list[Future[None]] = []     # see `flush`
        self._flushed: deque[tuple[Step, list[Future[None]]]] = deque()
        self._in_flight = 0     # planned steps that are not completed
        self._deadlines = Deadlines()
        self._quarantine = Quarantine()

    def not_running(self) -> AllSparkError:
        """The error for requests to a model that does not run."""
        if self.failure is not None:
            remedy = "" if self.lost else "; start_model loads it again"  # the failure says what to do
            return AllSparkError(
                AsStatus.ALLSPARK_RUNTIME_ERROR, f"model {self.name!r} has failed ({self.failure}){remedy}"
            )
        return AllSparkError(
            AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {self.name!r} is not running; call start_model first"
        )

    def stat(self) -> AsEngineStat:
        """Load and counters. Any thread."""
        return engine_stat(self)

    def state(self) -> ModelState:
        """What a client needs to choose among the members of a pool. Any thread."""
        load = self.scheduler.waiting + self.scheduler.running + self.queue.incoming
        return ModelState(self.name, self.running and self.failure is None, self.fingerprint, load,
                          self.scheduler.pending_tokens, {a.name: a.digest for a in self.adapters},
                          list(self.config.aliases), isa=self.info.isa, installed_on_demand=self.config.on_demand,
                          image_fingerprint=self.image_fingerprint)

    @property
    def has_work(self) -> bool:
        """Whether a step might be planned."""
        return self.running and self.failure is None and (
            self.scheduler.has_work or bool(self._quarantine) or bool(self._flushing))

    @one_thread
    def next_alone(self) -> Sequence | None:
        """The quarantined sequence for `plan_alone`; None if none may run now. Its client is informed some time before
        it runs for the first time.
        """
        sequence = self._quarantine.next if self._quarantine else None
        if sequence is None or sequence.slot >= 0:
            return sequence
        request, now = sequence.owner.request, time.monotonic()
        if not request.announced:
            self._output.put(Begun(request))
            self._output.flush()
            request.announced = now
        return sequence if now >= request.announced + ANNOUNCE_SECONDS else None

    @property
    def has_others(self) -> bool:
        """Whether any sequence outside quarantine runs or waits."""
        return self.scheduler.has_others

    @property
    def has_quarantined(self) -> bool:
        """Whether any sequence is in quarantine, even if it may not run yet."""
        return bool(self._quarantine)

    @one_thread
    def enqueue(self, request: Request) -> None:
        """Gives a request, for which room in the queue is reserved, to the scheduler."""
        self.queue.unreserve(request.tenant, request.samples, request.size)
        if request.ended:  # cancelled while it was queued for this thread
            return
        if not self.running or self.failure is not None:
            self.end(request, GenerateRequestStatus.GenerateInterrupted)
            return
        if request.adapter is not None and request.adapter not in self.adapters:  # unloaded since it was prepared
            error = AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND, f"adapter {request.adapter.name!r} was unloaded")
            self.end(request, GenerateRequestStatus.InternalError, error)
            return
        self.live.add(request)
        self.last_used = time.monotonic()
        self._deadlines.add(request)
        for sequence in request.sequences:
            complete = sequence.tokens[sequence.prompt_len :] and sequence.stop.check(
                sequence.tokens, sequence.prompt_len
            )
            if sequence.owner.stopped:
                complete = FinishReason.STOP
            if complete:  # a resumed request that had already reached its end
                self._end_sequence(sequence, complete)
            else:
                if request.dependency is not None:
                    sequence.blocked_on = request.dependency.name
                elif request.deaths and (request.proven or self._quarantine.has_room(request.tenant)):
                    self.scheduler.quarantine(sequence)
                    self._quarantine.add(sequence)
                    continue
                self.scheduler.add(sequence)

    def check_loaded(self) -> None:
        """AllSparkError unless the device memory is loaded."""
        if not self.loaded:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"the device memory of model {self.name!r} is unloaded; call load_device_mem first")

    @one_thread
    def flush(self) -> Future[None]:
        """Done when all steps that were planned before have ended, and one more with the copies that are wanted now, if
        there are any. A model that fails or stops does not finish it.
        """
        future: Future[None] = Future()
        self._flushing.append(future)
        return future

    def leave_memory(self) -> None:
        """Prepares for unloading or loading the device memory. No step may be running."""
        self.loaded = False
        self.scheduler.lose_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets the cached prefixes that no request uses."""
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.reset()

    def remove_adapter(self, adapter: Adapter) -> None:
        """Requests cannot use the adapter from now on. AllSparkError if some use it or it is not loaded."""
        if adapter not in self.adapters:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND, f"adapter {adapter.name!r} was unloaded")
        users = sum(request.adapter is adapter for request in self.live)
        if users:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_IN_USE,
                                f"adapter {adapter.name!r} of model {self.name!r} is in use by {users} requests")
        self.adapters.remove(adapter)

    @one_thread
    def unblock(self, request: Request) -> None:
        """Continues a request whose dependency is done, or fails it if the dependency failed."""
        dependency = request.dependency
        if request.ended or dependency is None:
            return
        error = dependency.done.exception()
        if error is None:
            for sequence in request.sequences:
                sequence.brought = bool(dependency.done.result())
                self.scheduler.unblock(sequence)
        else:
            if not isinstance(error, AllSparkError):
                error = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"{dependency.name}: {error}")
            self.end(request, GenerateRequestStatus.InternalError, error)

    @one_thread
    def end(
        self, request: Request, status: GenerateRequestStatus, error: AllSparkError | None = None
    ) -> None:
        """Ends a request early. Does nothing if it has ended."""
        if request.ended:
            return
        request.ended = True
        for sequence in request.sequences:
            self.scheduler.cancel(sequence)
        self.live.discard(request)
        self.last_used = time.monotonic()
        if request.done.is_set():  # the output stage has ended it
            request.sequences = []
        else:
            self._output.put(End(request, status, error))

    def end_all(self, status: GenerateRequestStatus, error: AllSparkError | None = None) -> None:
        """Ends every live request."""
        for request in list(self.live):
            self.end(request, status, error)

    def release_masks(self) -> None:
        """Lets steps that wait for masks continue; their results are not needed. Any thread."""
        if self._masks is not None:
            self._masks.release()

    def close(self) -> None:
        """Ends the model's threads and processes, after its last step."""
        if self.records is not None:
            self.records.close()
        if self.input.images is not None:
            self.input.images.close()
        if self._masks is not None:
            self._masks.close()
        if self._guide is not None:
            self._guide.close()

    def _fail_constrained(self, sequence: Sequence, error: MatcherError) -> None:
        """On the masks' thread: a sequence cannot continue in its grammar."""
        failure = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"response_format: {error}")
        self._post(lambda: self.end(sequence.owner.request, GenerateRequestStatus.InternalError, failure))

    @one_thread
    def finish_stopped(self, sequence: Sequence) -> None:
        """Ends a sequence in which the output stage has found a stop string; its later tokens are discarded. Does
        nothing if it has ended.
        """
        if sequence.state is not State.ENDED:
            self.scheduler.cancel(sequence)
            self._end_sequence(sequence, FinishReason.STOP)

    def seconds_to_deadline(self) -> float | None:
        """Seconds until the next deadline of a request that has not begun; None if there is none."""
        return self._deadlines.seconds_left()

    @one_thread
    def expire(self) -> None:
        """Ends the requests that have not begun by their deadline."""
        for request in self._deadlines.take_missed(len(self.live)):
            waited = time.monotonic() - request.arrival
            error = AllSparkError(
                AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                f"the request has waited for {waited:.1f} s in the queue of model {self.name!r}, longer than its "
                "queue_timeout allows",
                retryable=True,
            )
            self.end(request, GenerateRequestStatus.InternalError, error)

    @one_thread
    def plan(self) -> Step | None:
        """The next step, if one can be planned before the results of running steps are known."""
        if self._deadlines:
            self.expire()
        return self._planned(self.scheduler.plan(None if self.info.whole_texts else self.budget))

    @one_thread
    def plan_alone(self, sequence: Sequence) -> Step | None:
        """The next step of a sequence of `next_alone`; None if it has no room yet. No other step may be running."""
        step = self._planned(self.scheduler.plan_alone(sequence, None if self.info.whole_texts else self.budget))
        self._quarantine.forget_done()
        return step

    def _planned(self, step: Step | None) -> Step | None:
        for sequence in self.scheduler.take_oversized():
            error = AllSparkError(
                AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
                f"the cache of model {self.name!r}, {self.info.num_spans} spans of {self.info.span_size} tokens, "
                f"cannot hold the {len(sequence.tokens)} tokens of this request; give it more cache_memory",
            )
            self.end(sequence.owner.request, GenerateRequestStatus.InternalError, error)
        if self._flushing and (step is not None or not self._in_flight):
            futures, self._flushing = self._flushing, []
            if step is not None:
                self._flushed.append((step, futures))
            else:
                _finish(futures)
        self._in_flight += step is not None
        if step is not None and step.masked and self._masks is not None:
            self._masks.plan(step.masked)
        if step is not None and step.admitted:
            now = time.monotonic()
            for sequence in step.admitted:
                request = sequence.owner.request
                request.first_step = request.first_step or now
        return step

    @one_thread
    def complete(self, step: Step, result: StepResult, seconds: float) -> None:
        """Takes the results of the oldest running step, which took `seconds`, and passes its tokens on."""
        self.budget.learn(step.rows, step.context, seconds, step.decoding)
        self._in_flight -= 1
        if self._flushed and self._flushed[0][0] is step:
            _finish(self._flushed.popleft()[1])
        if self.host_cache is not None:
            copies = len(step.copies) if step.copies is not None else 0
            self.host_cache.costs.learn(step.rows, seconds, copies, result.copy_seconds)
        generated = self.scheduler.counters.generated_tokens
        outcome = self.scheduler.complete(step, result)
        if step.masked and self._masks is not None:
            self._masks.complete(step, outcome, result.tokens)
        output = StepOutput(outcome, result, time.monotonic(), self.timings)
        for index, reason in outcome.ended:
            end = self._ended_sequence(outcome.sequences[index], reason)
            if end is not None:
                output.ends.append(end)
        for sequence in outcome.computed:
            end = self._ended_sequence(sequence, FinishReason.STOP)
            if end is not None:
                output.ends.append(end)
        generated = self.scheduler.counters.generated_tokens - generated
        self.throughput.add(output.now, step.rows, generated)
        if generated or outcome.prompt_rows or outcome.computed:
            self._output.put(output)
        for index in outcome.failed:  # the sampler had no finite logits; other rows are not affected
            failure = AllSparkError(
                AsStatus.ALLSPARK_RUNTIME_ERROR,
                f"the logits of model {self.name!r} are not finite; its weights hold NaN or infinite values",
            )
            self.end(outcome.sequences[index].owner.request, GenerateRequestStatus.InternalError, failure)

    def _end_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        end = self._ended_sequence(sequence, reason)
        if end is not None:
            self._output.put(end)

    def _ended_sequence(self, sequence: Sequence, reason: FinishReason) -> End | None:
        """A sequence is complete. Returns the end of its request if it was the last one."""
        request = sequence.owner.request
        request.unfinished -= 1
        if request.unfinished or request.ended:
            return None
        request.ended = True
        self.live.discard(request)
        self.last_used = time.monotonic()
        return End(request, GenerateRequestStatus.GenerateFinished, complete=reason)


def _finish(futures: list[Future[None]]) -> None:
    for future in futures:
        future.set_result(None)
