"""One installed model: its scheduler, its live requests and its counters. Everything here runs on the engine's thread,
except what says otherwise.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import AsEngineStat, Detokenized, GenerateRequestStatus, ModelInfo, ModelState

from ..cache import HostTier, PrefixCache, SpanKeys, SpanPool
from ..chat import chat_format, chat_format_of
from ..guided import Guide, MaskWriter, MatcherError
from ..runtime.plan import Flag
from ..runtime.steps import DEPTH
from ..scheduler import FinishReason, IsolatingScheduler, Limits, Sequence, State, Step
from .adapters import Adapter, Adapters
from .fingerprint import fingerprint
from .output import Begun, End, OutputStage, StepOutput
from .prepare import check_ids, need_tokenizer, prompt_ids
from .quarantine import Suspects
from .queue_limits import QueueLimits
from .request import Request
from .step_budget import StepBudget, Throughput
from .timings import Timings

if TYPE_CHECKING:
    from ..tokenizer.text import Tokenizer

#: for the word to leave this process that a request is computed which may end it
ANNOUNCE_SECONDS = 0.02
_DRAFT_KINDS = {"off": 0, "prompt_lookup": int(Flag.LOOKUP), "draft": int(Flag.MODEL)}


class ServedModel:
    """`running` says whether requests are taken; `failure` why they are not until the model is loaded again. What
    happens to requests goes to `output`.
    """

    def __init__(
        self, config: AsModelConfig, info: ModelInfo, tokenizer: Tokenizer | None, digest: str,
        output: OutputStage, held: dict[bytes, int] | None = None, guide: Guide | None = None, masks: Any = None,
        post: Callable[[Callable[[], None]], None] = lambda command: None,
    ):
        """`held`: what the prefix cache's second tier holds from before, by keys. `guide`, `masks`: of guided output, if
        there is any: rank 0's native Masks. `post`: has a command run on the engine's thread.
        """
        self.config, self.info, self.tokenizer, self.fingerprint = config, info, tokenizer, digest
        self.name = info.name
        self.running = False
        #: whether its device memory is there; start_model needs it
        self.loaded = True
        self.failure: str | None = None
        self.live: set[Request] = set()
        self.throughput = Throughput()
        self.timings = Timings()
        self.budget = StepBudget(
            info.max_step_tokens, info.max_batch, config.target_token_latency, fixed=config.max_step_tokens > 0)
        self._output = output
        pool = SpanPool(info.num_spans)
        prefix = None
        #: names spans of prompts; None without a prefix cache
        self.keys: SpanKeys | None = None
        self.tier: HostTier | None = None
        if config.enable_prefix_cache:
            self.keys = SpanKeys(info.span_size, info.dynamic_rope_original, info.long_rope_original)
            if info.host_spans:
                self.tier = HostTier(info.host_spans, info.span_size, held, bool(config.host_cache_dir))
            prefix = PrefixCache(pool, self.keys, config.prefix_cache_ttl, tier=self.tier)
        chunk = min(config.engine_max_prefill_length or info.max_step_tokens, info.max_step_tokens)
        #: compiles grammars; None where output cannot be guided
        self.guide = guide if masks is not None else None
        self._masks = MaskWriter(masks, self._unguided) if masks is not None else None
        self._post = post
        limits = Limits(
            info.max_batch, info.max_step_tokens, chunk, info.span_size, _DRAFT_KINDS[config.speculation],
            masks=len(masks.bits) // DEPTH if masks is not None else 0, anew_beyond=info.long_rope_original,
            windows=tuple(info.cache_windows),
        )
        self.scheduler = IsolatingScheduler(limits, pool, prefix)
        self.queue = QueueLimits(info.name, self.scheduler, config.max_queue, config.max_queue_memory)
        self.adapters = Adapters(info.name, config.lora_max_num)
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._suspects = Suspects()

    @classmethod
    def open(
        cls, config: AsModelConfig, info: ModelInfo, output: OutputStage, held: dict[bytes, int] | None, masks: Any,
        post: Callable[[Callable[[], None]], None],
    ) -> ServedModel:
        """A model with what its checkpoint has beside the weights. Any thread."""
        tokenizer = guide = None
        if info.tokenizer_dir:
            from ..tokenizer.text import Tokenizer  # `tokenizers` and jinja2 are not needed to serve ids

            tokenizer = Tokenizer.from_dir(info.tokenizer_dir)
            info.chat_format = chat_format_of(tokenizer.chat_templates, info.architecture)
            stops = [*tokenizer.stop_ids, *map(tokenizer.mark_id, chat_format(info.chat_format).stops)]
            info.eos_token_ids += [i for i in dict.fromkeys(stops) if i is not None and i not in info.eos_token_ids]
            guide = Guide.from_dir(info.tokenizer_dir, info.vocab_size, info.eos_token_ids)
            guide.start()
        gpu = config.device_ids[0] if config.on_gpus else None
        return cls(config, info, tokenizer, fingerprint(info, gpu), output, held, guide, masks, post)

    # Any thread.

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

    def state(self) -> ModelState:
        """What a client needs to choose among the members of a pool."""
        load = self.scheduler.waiting + self.scheduler.running + self.queue.incoming
        return ModelState(self.name, self.running and self.failure is None, self.fingerprint, load,
                          self.scheduler.pending_tokens, {a.name: a.digest for a in self.adapters})

    def stat(self) -> AsEngineStat:
        """Load and counters. Read without a lock: values may be a step apart."""
        scheduler, info = self.scheduler, self.info
        counters, pool, groups = scheduler.counters, scheduler.pool, scheduler.limits.groups
        rows, generated = self.throughput.rates(time.monotonic())
        hit, seen = counters.prefix_tokens, counters.prompt_tokens
        return AsEngineStat(
            model_name=self.name,
            total_span=pool.num_spans,
            used_span=pool.used,
            free_span=pool.available,
            total_token=groups.positions(pool.num_spans),
            free_token=groups.positions(pool.available),
            pendding_request=scheduler.waiting + self.queue.incoming,
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
            total_host_span=info.host_spans,
            used_host_span=len(self.tier) if self.tier is not None else 0,
            prefix_cache_host_token=counters.restored_tokens,
            saved_host_span=counters.saved_spans,
            restored_host_span=counters.restored_spans,
        )

    def tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        """The ids of a prompt; see prepare.prompt_ids."""
        return prompt_ids(spec, self.tokenizer, self.info.max_length, bare)

    def detokenize(self, ids: list[int]) -> Detokenized:
        """The text of ids, and the bytes of each."""
        check_ids("ids", ids, self.info.vocab_size)
        tokenizer = need_tokenizer(self.tokenizer, self.name)
        return Detokenized(tokenizer.decode(ids, skip_special_tokens=False), tokenizer.token_bytes(ids))

    # The engine's thread.

    @property
    def has_work(self) -> bool:
        """Whether a step might be planned."""
        return self.running and self.failure is None and (self.scheduler.has_work or bool(self._suspects))

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that is to be computed alone next, or is being so: see `plan_alone`."""
        return self._suspects.next

    @property
    def has_suspects(self) -> bool:
        """Whether there are any, be it too early for them."""
        return bool(self._suspects)

    def enqueue(self, request: Request) -> None:
        """Hands a request, for which there is room in the queue, to the scheduler."""
        self.queue.unreserve(request.tenant, request.samples, request.size)
        if request.ended:  # cancelled before it came here
            return
        if not self.running or self.failure is not None:
            self.end(request, GenerateRequestStatus.GenerateInterrupted)
            return
        if request.adapter is not None and request.adapter not in self.adapters:  # unloaded since it was prepared
            error = AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND, f"adapter {request.adapter.name!r} was unloaded")
            self.end(request, GenerateRequestStatus.InternalError, error)
            return
        self.live.add(request)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.handle, request))
        for sequence in request.sequences:
            complete = sequence.tokens[sequence.prompt_len :] and sequence.stop.check(
                sequence.tokens, sequence.prompt_len
            )
            if sequence.owner.stopped:
                complete = FinishReason.STOP
            if complete:  # a resumed request whose last token the client had already
                self._end_sequence(sequence, complete)
            else:
                if request.obstacle is not None:
                    sequence.blocked_on = request.obstacle.name
                elif request.deaths:
                    sequence.blocked_on = "a step of its own"
                    self._suspects.add(sequence)
                self.scheduler.add(sequence)

    def check_loaded(self) -> None:
        """AllSparkError while the device memory is given back, or under way."""
        if not self.loaded:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"the device memory of model {self.name!r} is unloaded; call load_device_mem first")

    def leave_memory(self) -> None:
        """The device memory is about to be given back, or taken again; no step is under way."""
        self.loaded = False
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.clear()

    def remove_adapter(self, adapter: Adapter) -> None:
        """Requests cannot have it from now on. AllSparkError while some have it."""
        if adapter not in self.adapters:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND, f"adapter {adapter.name!r} was unloaded")
        users = sum(request.adapter is adapter for request in self.live)
        if users:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_IN_USE,
                                f"adapter {adapter.name!r} of model {self.name!r} is in use by {users} requests")
        self.adapters.remove(adapter)

    def unblock(self, request: Request) -> None:
        """What the request waited for is there, or is known to fail: then so does the request."""
        if request.ended:
            return
        error = request.obstacle.gone.exception()
        if error is None:
            for sequence in request.sequences:
                self.scheduler.unblock(sequence)
        else:
            if not isinstance(error, AllSparkError):
                error = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"{request.obstacle.name}: {error}")
            self.end(request, GenerateRequestStatus.InternalError, error)

    def end(
        self, request: Request, status: GenerateRequestStatus, error: AllSparkError | None = None
    ) -> None:
        """Ends a request before its time; nothing happens if it has ended."""
        if request.ended:
            return
        request.ended = True
        for sequence in request.sequences:
            self.scheduler.cancel(sequence)
        self.live.discard(request)
        if request.done.is_set():  # the output stage has ended it
            request.sequences = []
        else:
            self._output.put(End(request, status, error))

    def end_all(self, status: GenerateRequestStatus, error: AllSparkError | None = None) -> None:
        """Ends every live request."""
        for request in list(self.live):
            self.end(request, status, error)

    def give_up_masks(self) -> None:
        """Steps that still wait for masks need not: their results are of no use to anybody. Any thread."""
        if self._masks is not None:
            self._masks.release()

    def close(self) -> None:
        """Ends its threads and processes; the engine has no steps of it any more."""
        if self._masks is not None:
            self._masks.close()
        if self.guide is not None:
            self.guide.close()

    def _unguided(self, sequence: Sequence, error: MatcherError) -> None:
        """On the masks' thread: a sequence can go on in its grammar no more."""
        failure = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"response_format: {error}")
        self._post(lambda: self.end(sequence.owner.request, GenerateRequestStatus.InternalError, failure))

    def finish_stopped(self, sequence: Sequence) -> None:
        """The output stage has found a stop string: what the sequence has drawn since is discarded. Nothing happens if
        it has ended.
        """
        if sequence.state is not State.ENDED:
            self.scheduler.cancel(sequence)
            self._end_sequence(sequence, FinishReason.STOP)

    def seconds_to_deadline(self) -> float | None:
        """How long until `expire` has something to do, at the earliest; None: never, as things are."""
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def expire(self) -> None:
        """Ends the requests that have not begun in the time they had for that."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][2].begun or deadlines[0][0] <= time.monotonic()):
            request = heapq.heappop(deadlines)[2]
            if not request.begun:
                waited = time.monotonic() - request.arrival
                error = AllSparkError(
                    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                    f"the request has waited for {waited:.1f} s in the queue of model {self.name!r}, longer than its "
                    "queue_timeout allows",
                    retryable=True,
                )
                self.end(request, GenerateRequestStatus.InternalError, error)
        if len(deadlines) > 2 * len(self.live) + 64:  # nobody may ever meet those that have begun
            deadlines[:] = [entry for entry in deadlines if not entry[2].begun]
            heapq.heapify(deadlines)

    def plan(self) -> Step | None:
        """The next step, if one can be planned before results of those that run."""
        if self._deadlines:
            self.expire()
        return self._planned(self.scheduler.plan(self.budget))

    def plan_alone(self) -> Step | None:
        """The next step of the `suspect`, when no other is under way. Its client is told before the first."""
        sequence = self.suspect
        if sequence.state is State.BLOCKED:
            self._output.put(Begun(sequence.owner.request))
            self._output.flush()
            time.sleep(ANNOUNCE_SECONDS)
        return self._planned(self.scheduler.plan_alone(sequence))

    def _planned(self, step: Step | None) -> Step | None:
        for sequence in self.scheduler.take_unfit():
            error = AllSparkError(
                AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
                f"the cache of model {self.name!r}, {self.info.num_spans} spans of {self.info.span_size} tokens, "
                f"cannot hold the {len(sequence.tokens)} tokens of this request; give it more cache_memory",
            )
            self.end(sequence.owner.request, GenerateRequestStatus.InternalError, error)
        if step is not None and step.masked:
            self._masks.plan(step.masked)
        if step is not None and step.admitted:
            now = time.monotonic()
            for sequence in step.admitted:
                request = sequence.owner.request
                request.first_step = request.first_step or now
        return step

    def complete(self, step: Step, result, seconds: float) -> None:
        """Takes the results of the oldest step that runs, which took so long, and passes on what it drew."""
        self.budget.learn(step.rows, step.context, seconds, step.decoding)
        if self.tier is not None:
            copies = len(step.copies) if step.copies is not None else 0
            self.tier.costs.learn(step.rows, seconds, copies, result.copy_seconds)
        generated = self.scheduler.counters.generated_tokens
        outcome = self.scheduler.complete(step, result)
        if step.masked:
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
        if generated or outcome.probed or outcome.computed:
            self._output.put(output)
        for index in outcome.failed:  # the sampler found nothing to draw from; other rows are not harmed
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
        """A sequence is complete: the end of its request, if it was the last."""
        request = sequence.owner.request
        request.unfinished -= 1
        if request.unfinished or request.ended:
            return None
        request.ended = True
        self.live.discard(request)
        return End(request, GenerateRequestStatus.GenerateFinished, complete=reason)
