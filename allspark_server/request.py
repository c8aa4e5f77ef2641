"""A request inside the engine: from its checked configuration to sequences, and from their tokens to its sink."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional, Protocol

from allspark_client.config import GenerateConfig, check_available
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, GenerateRequestStatus, ModelInfo

from .runtime.plan import SamplingParams
from .scheduler import Sequence, StopRules

if TYPE_CHECKING:
    from .text import StreamDetokenizer, Tokenizer


logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a request's results go. Called on the engine's thread; must not block."""

    def on_elements(self, handle: int, elements: GeneratedElements, text: Optional[str]) -> None:
        """New tokens of one sample; `text` is what became decodable, None unless the spec wants text."""

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        """Progress short of the end: ContextFinished with the first token, Generating with the second."""

    def on_finish(
        self, handle: int, status: GenerateRequestStatus, error: Optional[AllSparkError], stat: dict[str, float]
    ) -> None:
        """The last call for this request."""


@dataclass
class Sample:
    """One of a request's sequences, with what its output needs."""

    request: "Request"
    index: int
    top_logprobs: int  # -1: no logprobs wanted
    detokenizer: Optional[StreamDetokenizer]


@dataclass(eq=False)
class Request:
    """Lives on the engine's thread from the moment it is queued; `done` and `status` may be read by any."""

    handle: int
    spec: RequestSpec
    sink: Sink
    sequences: list[Sequence] = field(default_factory=list)
    status: GenerateRequestStatus = GenerateRequestStatus.Init
    done: threading.Event = field(default_factory=threading.Event)
    unfinished: int = 0
    generated: int = 0
    wall_arrival: float = field(default_factory=time.time)
    arrival: float = field(default_factory=time.monotonic)
    first_step: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def deliver(
        self, sequence: Sequence, token: int, logprob: float, top: list[tuple[int, float]], ended: bool
    ) -> None:
        """Hands one token to the sink, and the statuses that it brings."""
        sample: Sample = sequence.owner
        now = time.monotonic()
        self.last_token = now
        self.generated += 1
        if self.status is GenerateRequestStatus.Init:
            self.first_token = now
            self._set_status(GenerateRequestStatus.ContextFinished)
        elif self.status is GenerateRequestStatus.ContextFinished:
            self._set_status(GenerateRequestStatus.Generating)
        cached = sequence.prefix_len or 0
        elements = GeneratedElements(
            [token], prefix_cache_len=cached, prefix_len_cpu=cached, sample_index=sample.index
        )
        if sample.top_logprobs >= 0:
            elements.token_logprobs_list = [logprob]
            elements.log_probs_list = [top]
        text = None
        if sample.detokenizer is not None:
            text = sample.detokenizer.push([token])
            if ended:
                text += sample.detokenizer.finish()
            elements.text = text
        self.sink.on_elements(self.handle, elements, text)

    def finish(self, status: GenerateRequestStatus, error: Optional[AllSparkError] = None) -> None:
        """The end; later calls change nothing. From now on only the handle and the status are of interest."""
        if self.done.is_set():
            return
        self.status = status
        try:
            self.sink.on_finish(self.handle, status, error, self.stat())
        except Exception:  # a sink's trouble must not keep other requests from ending
            logger.exception("the end of request %d cannot be delivered", self.handle)
        self.done.set()
        self.sequences = []  # callers may keep handles for long: let go of the tokens

    def stat(self) -> dict[str, float]:
        """Values of RequestStatInfo."""
        now = time.monotonic()
        prompt_len = self.sequences[0].prompt_len if self.sequences else self.spec.prompt_len
        cached = (self.sequences[0].prefix_len or 0) if self.sequences else 0
        values = {
            "arrival_time": self.wall_arrival,
            "finish_time": 1e3 * (now - self.arrival),
            "context_token_length": prompt_len,
            "generated_token_length": self.generated,
            "context_cached_length": min(cached, prompt_len),
        }
        if self.first_step:
            values["time_in_queue"] = 1e3 * (self.first_step - self.arrival)
        if self.first_token:
            values["first_token_time"] = self.wall_arrival + self.first_token - self.arrival
            values["last_token_time"] = self.wall_arrival + self.last_token - self.arrival
            values["time_to_first_token"] = 1e3 * (self.first_token - self.arrival)
            values["context_tps"] = prompt_len / max(self.first_token - self.first_step, 1e-9)
            if self.generated > 1:
                values["generate_tps"] = (self.generated - 1) / max(self.last_token - self.first_token, 1e-9)
        return values

    def _set_status(self, status: GenerateRequestStatus) -> None:
        self.status = status
        self.sink.on_status(self.handle, status)


def prompt_ids(spec: RequestSpec, tokenizer: Optional[Tokenizer], max_length: int) -> list[int]:
    """The prompt's ids, tokenized here if it came as text or as a chat. Raises what says that it has more than
    `max_length`, if its size tells so beforehand."""
    given = [name for name in ("input_ids", "text", "messages") if getattr(spec, name) is not None]
    if len(given) != 1:
        raise ValueError(f"one of input_ids, text and messages must be given; given: {', '.join(given) or 'none'}")
    if spec.input_ids is not None:
        return spec.input_ids
    if tokenizer is None:
        raise AllSparkError(
            AsStatus.ALLSPARK_INVALID_CALL_ERROR,
            f"model {spec.model!r} has no tokenizer.json beside its checkpoint: start requests with input_ids",
        )
    chat = spec.messages is not None
    text = tokenizer.apply_chat_template(spec.messages) if chat else spec.text
    longest = tokenizer.longest_text(max_length)
    if longest is not None and len(text) > longest:
        raise _exceeds(
            f"the prompt is a text of {len(text)} characters: more than the {longest} that can make "
            f"{max_length} tokens (engine_max_length of model {spec.model!r}, prompt and output together)"
        )
    return tokenizer.encode(text, add_special_tokens=not chat)  # a template writes them itself


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """ValueError unless all ids are in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, bad = next((i, v) for i, v in enumerate(ids) if not 0 <= v < vocab_size)
        raise ValueError(f"{name}[{index}]={bad} is not in the vocabulary; allowed: 0 to {vocab_size - 1}")


def length_limit(config: GenerateConfig, prompt_len: int, generated: int, info: ModelInfo) -> int:
    """How long prompt and output may become. Raises if not even one token more fits.

    An explicit max_length beyond the engine's is refused; max_new_tokens is a bound on the output, and the engine's
    length is another: the lower one counts.
    """
    limit = info.max_length
    if config.max_length is not None:
        if config.max_length > limit:
            raise _exceeds(f"max_length={config.max_length} exceeds engine_max_length={limit} of model {info.name!r}")
        limit = config.max_length
    if prompt_len >= limit:
        which = "engine_max_length" if limit == info.max_length else "max_length"
        raise _exceeds(
            f"the prompt has {prompt_len} tokens and {which}={limit} counts prompt and output: "
            f"at most {limit - 1} prompt tokens leave room for one of output"
        )
    if config.max_new_tokens is not None:
        limit = min(limit, prompt_len + config.max_new_tokens)
    if prompt_len + generated > limit:
        raise _exceeds(f"{generated} tokens to resume from after {prompt_len} of prompt exceed the limit of {limit}")
    return limit


def _exceeds(message: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, message)


def eos_ids(config: GenerateConfig, info: ModelInfo) -> tuple[int, ...]:
    """The end-of-sequence ids that count for a request; those beyond the vocabulary never come up and do no harm."""
    value = config.eos_token_id
    if value is None:
        return tuple(info.eos_token_ids)
    ids = [value] if isinstance(value, int) else value
    return tuple(i for i in ids if i >= 0)


def build_request(
    handle: int, spec: RequestSpec, sink: Sink, info: ModelInfo, tokenizer: Optional[Tokenizer]
) -> Request:
    """Checks everything that can be checked before a request is queued, and makes its sequences.

    Raises ValueError or TypeError for a bad argument, AllSparkError for one that is refused.
    """
    check_available(spec.config)
    config = spec.config.with_seed()
    prompt = list(prompt_ids(spec, tokenizer, info.max_length))
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    generated = list(spec.generated)
    check_ids("input_ids", prompt, info.vocab_size)
    check_ids("generated", generated, info.vocab_size)
    if generated and config.n > 1:
        raise ValueError(f"only a request with n=1 can be resumed, not n={config.n}")
    for name in ("bad_words_ids", "stop_words_ids"):
        for i, word in enumerate(getattr(config, name)):
            check_ids(f"{name}[{i}]", word, info.vocab_size)
    limit = length_limit(config, len(prompt), len(generated), info)
    if len(prompt) + len(generated) > info.num_spans * info.span_size:
        raise AllSparkError(
            AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
            f"{len(prompt) + len(generated)} tokens can never fit the cache of model {info.name!r}: "
            f"{info.num_spans} spans of {info.span_size} tokens; give it more cache_memory",
        )
    eos = eos_ids(config, info)
    stop = StopRules(
        limit,
        frozenset(eos) if config.early_stopping else frozenset(),
        tuple(tuple(word) for word in config.stop_words_ids),
    )
    if spec.want_text and tokenizer is None:
        raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {spec.model!r} has no tokenizer: no text")
    request = Request(handle, spec, sink)
    for index in range(config.n):
        sampling = sampling_params(config, index, len(prompt), [i for i in eos if i < info.vocab_size])
        detokenizer = None
        if spec.want_text:
            from .text import StreamDetokenizer

            detokenizer = StreamDetokenizer(tokenizer)
            detokenizer.push(generated)  # the client has their text
        sample = Sample(request, index, config.top_logprobs if config.logprobs else -1, detokenizer)
        leader = request.sequences[0] if request.sequences else None
        request.sequences.append(
            Sequence(
                tokens=prompt + generated,
                prompt_len=len(prompt),
                sampling=sampling.encode(),
                stop=stop,
                priority=config.priority,
                salt=config.cache_salt,
                leader=leader,
                owner=sample,
            )
        )
    request.unfinished = config.n
    return request


def sampling_params(config: GenerateConfig, index: int, prompt_len: int, eos: list[int]) -> SamplingParams:
    """What the executors need to draw the tokens of sample `index`."""
    return SamplingParams(
        do_sample=config.do_sample and config.top_k != 1,
        logprobs=config.logprobs,
        suppress_repetition_in_generation=config.suppress_repetition_in_generation,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        min_length=config.min_length,
        top_logprobs=config.top_logprobs if config.logprobs else 0,
        seed=config.seed,
        sample_index=index,
        prompt_len=prompt_len,
        eos=tuple(eos),
        bad_words=tuple(tuple(word) for word in config.bad_words_ids),
    )
