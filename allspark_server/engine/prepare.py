"""The input stage: what a request's caller asked for becomes sequences that the scheduler can take as they are. Runs in
the callers' threads.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allspark_client.chat import ChatOptions
from allspark_client.config import GenerateConfig, check_available
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import ModelInfo

from ..cache import SpanGroups, SpanKeys, scope
from ..chat import formats, prompt as chats
from ..guided import Guidance, Guide, Matcher, MatcherError
from ..runtime.plan import Flag, SamplingParams
from ..scheduler import NO_ADAPTER, TOKEN_BYTES, Probe, Sequence, StopRules
from ..tokenizer.stop_strings import OutputText, StopStrings
from .adapters import Adapter
from .queue_limits import SEQUENCE_BYTES

if TYPE_CHECKING:
    from ..tokenizer.text import Tokenizer


#: Log probabilities of one prompt, the likeliest ones included, that one message carries.
MAX_PROMPT_PAIRS = 1_000_000
#: servers that a request may end while it runs there alone, without being refused
MOST_DEATHS = 2


@dataclass
class Obstacle:
    """What a request waits for beside a place in the batch, and what it is called: a grammar that is compiled, spans
    that come from elsewhere. The request goes on when `gone` has a result, and fails with its exception.
    """

    name: str
    gone: Future


@dataclass
class PreparedRequest:
    """A request that was checked and tokenized: a sequence for each of its samples, with the keys of its prompt's
    spans; how many of the top logprobs are wanted, -1 if none are wanted at all; what makes the text of each, if
    somebody needs it; when it ends if it has not begun, on the monotonic clock.
    """

    sequences: list[Sequence]
    top_logprobs: int
    texts: list[OutputText | None]
    prompt_logprobs: int = 0  # how many of the likeliest are wanted beside each token of the prompt, if they are
    pooling: str | None = None
    deadline: float = math.inf
    obstacle: Obstacle | None = None
    deaths: int = 0  # of servers: it may be what ended them, and is computed alone until its first tokens

    name: str = ""  # the client's for it, for logs
    model: str = ""
    adapter: Adapter | None = None
    trace: str = ""  # the traceparent that it came with

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.sequences[0].tenant

    @property
    def size(self) -> int:
        """Bytes that all sequences take in this process."""
        return sum(sequence.size for sequence in self.sequences)


def size_before(spec: RequestSpec) -> int:
    """Bytes that a request takes in this process until it is prepared, about."""
    words = sum(map(len, (*spec.config.stop_words_ids, *spec.config.bad_words_ids))) + len(spec.config.logit_bias)
    generated = len(spec.generated) + sum(map(len, spec.samples))
    size = spec.config.n * SEQUENCE_BYTES + TOKEN_BYTES * (words + generated)
    if spec.input_ids is not None:
        return size + TOKEN_BYTES * len(spec.input_ids)
    return size + len(str(spec.text or spec.messages))


def prepare(
    spec: RequestSpec, info: ModelInfo, tokenizer: Tokenizer | None, keys: SpanKeys | None = None,
    guide: Guide | None = None, adapter: Adapter | None = None,
) -> PreparedRequest:
    """Does all the work on a request that needs no engine's thread, and checks all that can be checked before it is
    queued. A prompt of text or of a chat is replaced by its ids in `spec`. `keys`: if there is a prefix cache; `guide`: if
    output can be guided; `adapter`: that its config names.

    Raises ValueError or TypeError for a bad argument, AllSparkError for one that is refused.
    """
    check_available(spec.config)
    config = spec.config.with_seed()
    chat_format = None
    if spec.chat is not None:
        chat_format = formats.chat_format(spec.chat.chat_format or info.chat_format or "plain")
    of_chat = spec.messages is not None
    prompt = list(prompt_ids(spec, tokenizer, info.max_length))
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    spec.set_prompt(prompt)
    if chat_format is not None and of_chat:
        spec.opened = chats.opened(tokenizer, prompt)
    check_ids("input_ids", prompt, info.vocab_size)
    if (spec.generated and config.n > 1) or (spec.samples and len(spec.samples) != config.n):
        raise ValueError(f"to resume a request with n={config.n} needs what was generated of each sample")
    histories = [list(spec.generated_of(index)) for index in range(config.n)]
    for generated in histories:
        check_ids("generated", generated, info.vocab_size)
    if spec.deaths > MOST_DEATHS:
        raise AllSparkError(
            AsStatus.ALLSPARK_RUNTIME_ERROR,
            f"{MOST_DEATHS} servers were lost while they ran this request alone: it seems to be what ends them",
        )
    longest = max(map(len, histories))
    for name in ("bad_words_ids", "stop_words_ids"):
        for i, word in enumerate(getattr(config, name)):
            check_ids(f"{name}[{i}]", word, info.vocab_size)
    check_ids("logit_bias", sorted(config.logit_bias), info.vocab_size)
    limit = length_limit(config, len(prompt), longest, info)
    groups = SpanGroups(info.span_size, tuple(info.cache_windows))
    if groups.needed(len(prompt) + longest) > info.num_spans:
        raise AllSparkError(
            AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
            f"{len(prompt) + longest} tokens can never fit the cache of model {info.name!r}: "
            f"{info.num_spans} spans of {info.span_size} tokens; give it more cache_memory",
        )
    probe = _probe(config, prompt, histories[0], info)
    eos = eos_ids(config, info)
    stop = StopRules(
        limit,
        frozenset(eos) if config.early_stopping else frozenset(),
        tuple(tuple(word) for word in config.stop_words_ids),
    )
    texts = _output_texts(spec, tokenizer, () if chat_format is None else chat_format.markers)
    # What is computed alone shares nothing with others.
    salt = scope(config.cache_salt if not spec.deaths else f"{config.cache_salt} alone {os.urandom(8).hex()}",
                 adapter.digest if adapter is not None else "")
    root, common = b"", []
    if keys is not None:
        root = keys.root(salt, len(prompt))
        keys.extend(common, root, prompt, len(prompt) // info.span_size)
    words = TOKEN_BYTES * sum(map(len, stop.stop_words))  # the rules are shared
    matchers = _matchers(spec, tokenizer, chat_format, [i for i in eos if i < info.vocab_size], guide, histories)
    sequences: list[Sequence] = []
    for index, generated in enumerate(histories):
        chain = list(common)
        if keys is not None:
            keys.extend(chain, root, prompt + generated, (len(prompt) + len(generated)) // info.span_size)
        sampling = sampling_params(config, index, len(prompt), [i for i in eos if i < info.vocab_size]).encode()
        sequences.append(
            Sequence(
                tokens=prompt + generated,
                prompt_len=len(prompt),
                sampling=sampling,
                stop=stop,
                priority=config.priority,
                salt=salt,
                adapter=adapter.index if adapter is not None else NO_ADAPTER,
                probe=None if sequences else probe,  # one sample is enough
                draws=config.pooling is None,
                guidance=matchers and Guidance(matchers[index], len(prompt) + len(generated)),
                tenant=spec.tenant,
                extra=SEQUENCE_BYTES + len(sampling) + (0 if index else words),
                root=root,
                keys=chain,
            )
        )
    top_logprobs = config.top_logprobs if config.logprobs else -1
    timeout = config.queue_timeout if not longest else 0  # what is resumed has begun
    deadline = time.monotonic() + timeout if timeout else math.inf
    return PreparedRequest(sequences, top_logprobs, texts, config.prompt_logprobs or 0, config.pooling, deadline,
                           deaths=spec.deaths, name=config.user_request_id or config.uuid or "", model=spec.model,
                           adapter=adapter, trace=spec.trace)


def _probe(config: GenerateConfig, prompt: list[int], generated: list[int], info: ModelInfo) -> Probe | None:
    """What is wanted of the prompt's rows; None: nothing, or the client has it already."""
    if config.pooling is not None:
        if not info.embeddings:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model {info.name!r} was serialized without the op that hands out hidden states: pooling="
                f"{config.pooling!r} needs it; convert its checkpoint again",
            )
        return Probe(int(Flag.HIDDEN), config.pooling == "mean")
    if config.prompt_logprobs is None or generated or len(prompt) == 1:
        return None
    pairs = len(prompt) * (1 + config.prompt_logprobs)
    if pairs > MAX_PROMPT_PAIRS:
        raise _exceeds(f"prompt_logprobs={config.prompt_logprobs} of {len(prompt)} tokens are {pairs} log "
                       f"probabilities; at most {MAX_PROMPT_PAIRS} are given")
    return Probe(int(Flag.PROMPT), True)


def _matchers(
    spec: RequestSpec, tokenizer: Tokenizer | None, chat_format: formats.ChatFormat | None, eos: list[int],
    guide: Guide | None, histories: list[list[int]],
) -> list[Matcher] | None:
    """Where each sample is in the grammar of its output; None: it has none."""
    config, field = spec.config, None  # what the caller has given, if not response_format
    response_format = config.response_format
    if chat_format is not None and (spec.chat.forced or tokenizer is not None):
        calls = chats.guided_calls(need_tokenizer(tokenizer, spec.model), chat_format, spec)
        if calls is not None:
            given = {"tools": spec.chat.offered, "response_format": response_format}
            field = " and ".join(name for name, value in given.items() if value)
            response_format = calls
    if response_format is None or response_format["type"] == "text" or config.pooling is not None:
        return None
    if guide is None:
        raise AllSparkError(
            AsStatus.ALLSPARK_INVALID_CALL_ERROR,
            f"model {spec.model!r} has no tokenizer.json beside its checkpoint: its output cannot be guided "
            f"({field or 'response_format'})",
        )
    # With early_stopping=False, too, the grammar's end is an end-of-sequence id: it is ignored, and comes again.
    ends = eos or [word[0] for word in config.stop_words_ids if len(word) == 1]
    if not ends:
        raise ValueError(f"{field or 'response_format'} needs an id that ends the output: eos_token_id="
                         f"{config.eos_token_id} gives none")
    grammar = guide.compile(response_format, config.vocab, config.vocab_type, field)
    try:
        if not any(histories):
            first = grammar.matcher(ends, ())
            return [first.fork() for _ in histories]
        return [grammar.matcher(ends, generated) for generated in histories]
    except MatcherError as error:
        raise ValueError(f"generated does not follow the {field or 'response_format'}: {error}") from error


def _output_texts(
    spec: RequestSpec, tokenizer: Tokenizer | None, markers: Iterable[str]
) -> list[OutputText | None]:
    config = spec.config
    if not spec.want_text and not config.stop:
        return [None] * config.n
    tokenizer = need_tokenizer(tokenizer, spec.model)
    stops = StopStrings(config.stop) if config.stop else None
    texts = [OutputText(tokenizer.detokenizer(markers), stops, spec.want_text) for _ in range(config.n)]
    for index, text in enumerate(texts):
        if generated := spec.generated_of(index):
            text.push(generated)    # the client has its text, but for what was held back
    return texts


def need_tokenizer(tokenizer: Tokenizer | None, model: str) -> Tokenizer:
    """The tokenizer; AllSparkError if the model has none."""
    if tokenizer is None:
        raise AllSparkError(
            AsStatus.ALLSPARK_INVALID_CALL_ERROR,
            f"model {model!r} has no tokenizer.json beside its checkpoint: it takes and gives ids alone",
        )
    return tokenizer


def prompt_ids(
    spec: RequestSpec, tokenizer: Tokenizer | None, max_length: int, bare: bool = False
) -> list[int]:
    """The prompt's ids, tokenized here if it came as text or as a chat. `bare`: text without what the tokenizer puts
    around it. Raises what says that it has more than `max_length`, if its size tells so beforehand.
    """
    given = [name for name in ("input_ids", "text", "messages") if getattr(spec, name) is not None]
    if len(given) != 1:
        raise ValueError(f"one of input_ids, text and messages must be given; given: {', '.join(given) or 'none'}")
    if spec.input_ids is not None:
        return spec.input_ids
    tokenizer = need_tokenizer(tokenizer, spec.model)
    chat = spec.messages is not None
    text = chats.render(tokenizer, spec.messages, spec.chat or ChatOptions()) if chat else spec.text
    longest = tokenizer.longest_text(max_length)
    if longest is not None and len(text) > longest:
        raise _exceeds(
            f"the prompt is a text of {len(text)} characters: more than the {longest} that can make "
            f"{max_length} tokens (engine_max_length of model {spec.model!r}, prompt and output together)"
        )
    return tokenizer.encode(text, add_special_tokens=not (chat or bare))  # a template writes them itself


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
    if config.pooling is not None and prompt_len <= limit:
        return prompt_len
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
        min_p=config.min_p,
        logit_bias=tuple(sorted(config.logit_bias.items())),
    )
