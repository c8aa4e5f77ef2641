"""The input stage: turns a caller's request into sequences for the scheduler.

It runs in the callers' threads. Its steps: tokenize, compile the grammar, encode the sampling parameters, make the
sequences.
"""

from __future__ import annotations

import bisect
import copy
import math
import os
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from allspark_client.chat import ChatOptions
from allspark_client.config import GenerateConfig, check_available
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.generate_checks import INT32_MAX, MAX_WORD_IDS
from allspark_client.request import RequestSpec
from allspark_client.types import Detokenized, ModelInfo

from ..cache import SpanGroups, SpanKeys, scope
from ..chat import ChatFormat, chat_format
from ..chat.format import TAIL_IDS, opened_in, render, render_pair
from ..guided import Guidance, Guide, ReasoningBudget, ReasoningTokens
from ..runtime.native import native_library
from ..runtime.plan import Flag, SamplingParams
from ..scheduler import (
    NO_ADAPTER,
    TOKEN_BYTES,
    PredictedText,
    Prediction,
    PromptImages,
    PromptOutputs,
    Sequence,
    StopRules,
)
from .adapters import Adapter
from .quarantine import MAX_DEATHS
from .queue_limits import SEQUENCE_BYTES
from .threads import callers_only

if TYPE_CHECKING:
    from ..tokenizer.detokenizer import OutputText
    from ..tokenizer.tokenizer import Tokenizer
    from .prompt_images import ImageStage, ReadImages

#: how much longer a grammar may take that another server has accepted, perhaps on a faster machine
_RESUMED_PATIENCE = 4
#: the most log probabilities of one prompt, top ones included; one message carries them
MAX_PROMPT_PAIRS = 1_000_000


@dataclass
class Dependency:
    """Something that a request waits for before it may be scheduled, such as a grammar or spans from elsewhere. The
    request continues when `done` has a result, and fails with its exception. A true result says that spans were brought
    to the host cache for it. `name`: for errors and logs.
    """

    name: str
    done: Future


class Interest:
    """Whether anybody still wants the results of a request. `ended`: nobody does."""

    ended = False

    def lasts(self) -> bool:
        """The opposite of `ended`."""
        return not self.ended


@dataclass
class PreparedRequest:
    """A request that was checked and tokenized.

    `sequences`: one for each sample, with the keys of its prompt's spans. `texts`: the detokenizer of each sample,
    None if its text is not needed. `top_logprobs`: the requested number, -1 if no log probabilities are requested.
    `prompt_logprobs`: the requested number of top log probabilities for each prompt token. `size`: bytes that all
    sequences take in this process. `deadline`: when it fails if it has not begun, on the monotonic clock. `deaths`: the
    number of servers lost while they ran it; `proven`: that is known to be true. `name`: the client's name for it.
    `trace`: the traceparent it came with. `interest`: tells of its end.
    """

    sequences: list[Sequence]
    texts: list[OutputText | None]
    size: int
    top_logprobs: int
    prompt_logprobs: int = 0
    pooling: str | None = None
    deadline: float = math.inf
    dependency: Dependency | None = None
    deaths: int = 0
    proven: bool = True
    name: str = ""
    model: str = ""
    tenant: str = ""
    adapter: Adapter | None = None
    trace: str = ""
    interest: Interest = field(default_factory=Interest)


class InputStage:
    """The input stage of one model. `tokenizer`: None if the model takes ids only."""

    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer | None = None, keys: SpanKeys | None = None,
        guide: Guide | None = None, own_templates: bool = False, images: ImageStage | None = None,
    ):
        """`keys`: names spans, if there is a prefix cache. `guide`: compiles grammars, if output can be constrained.
        `own_templates`: whether requests may bring chat templates. `images`: of models that see.
        """
        self.tokenizer, self._own_templates, self.images = tokenizer, own_templates, images
        self._info, self._keys, self._guide = info, keys, guide
        self._reasoning: dict[str, ReasoningTokens] = {}     # by chat format
        groups = SpanGroups(info.span_size, tuple(info.cache_windows))
        # The maximum length of a sequence that the cache can hold.
        self._cache_length = bisect.bisect_right(range(1, info.max_length + 1), info.num_spans, key=groups.needed)

    def tokenize(self, spec: RequestSpec, bare: bool = False) -> list[int]:
        """The prompt's ids, those of its images included; tokenizes a text or a chat.

        `bare`: text without the special tokens that the tokenizer adds. AllSparkError if the text is so long that it
        has certainly more tokens than the engine's maximum length.
        """
        return self._read(spec, bare)[0]

    def _read(self, spec: RequestSpec, bare: bool = False) -> tuple[list[int], ReadImages | None]:
        """As tokenize(), and the prompt's images."""
        if not spec.images:
            return self._text_ids(spec, bare), None
        if self.images is None:
            why = self._info.no_images_reason and f": {self._info.no_images_reason}"
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"images: model {self._info.name!r} ({self._info.architecture}) takes no images{why}")
        if spec.text_pair is not None:
            raise ValueError("images: a prompt with images has no text_pair")
        if self.images.together and (spec.config.prompt_logprobs is not None or spec.config.pooling is not None):
            raise ValueError(f"images: prompt_logprobs and pooling are not available for prompts with images of model "
                             f"{self._info.name!r}, which computes all rows of an image in one step")
        return self.images.read(self._text_ids(spec, bare), spec.images, self._info.max_length, spec.cache_scope,
                                lambda text: self._need_tokenizer().encode(text, add_special_tokens=False))

    def _text_ids(self, spec: RequestSpec, bare: bool) -> list[int]:
        """The prompt's ids, with a placeholder for each image."""
        given = [name for name in ("input_ids", "text", "messages") if getattr(spec, name) is not None]
        if len(given) != 1:
            raise ValueError(f"one of input_ids, text and messages must be given; given: {', '.join(given) or 'none'}")
        if spec.input_ids is not None:
            return spec.input_ids
        tokenizer, text = self._need_tokenizer(), spec.text or ""
        if spec.messages is not None:
            options = spec.chat or ChatOptions()
            if options.chat_template and not self._own_templates:
                raise AllSparkError(
                    AsStatus.ALLSPARK_PARAM_ERROR,
                    f"chat_template: model {spec.model!r} takes no templates of requests; its operator allows them "
                    "with trust_request_chat_template (--trust-request-chat-template)",
                )
            text = render(tokenizer.templates, spec.messages, options)
        max_length = self._info.max_length
        longest = tokenizer.longest_text(max_length)
        pair, cuts = spec.text_pair, spec.config.pooling is not None and spec.config.truncate_prompt_tokens is not None
        if longest is not None and cuts:  # the end is cut anyway
            text, pair = text[:longest], pair and pair[:longest]
        if longest is not None and (characters := max(len(text), len(pair or ""))) > longest:
            raise _over_limit(
                f"the prompt is a text of {characters} characters: more than the {longest} that can make "
                f"{max_length} tokens (engine_max_length of model {spec.model!r}, prompt and output together)"
            )
        if pair is not None:
            return self._pair(tokenizer, text, pair)
        # A chat template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=not (bare or spec.messages is not None))

    def _pair(self, tokenizer: Tokenizer, text: str, pair: str) -> list[int]:
        """The ids of two texts to compare: by the chat template of rerankers that have one for that."""
        info = self._info
        if not info.whole_texts:
            shown = render_pair(tokenizer.templates, text, pair, info.prompts.get(info.default_prompt, ""))
            if shown is not None:
                return tokenizer.encode(shown, add_special_tokens=False)
            if info.score_function == "odds":
                raise AllSparkError(
                    AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                    f"model {info.name!r} compares texts by a chat template with the roles 'query' and 'document', and "
                    "its checkpoint has none; give one as chat_template (--chat-template)",
                )
        return tokenizer.encode_pair(text, pair)

    def detokenize(self, ids: list[int]) -> Detokenized:
        """The text of ids, and the bytes of each."""
        check_ids("ids", ids, self._info.vocab_size)
        tokenizer = self._need_tokenizer()
        return Detokenized(tokenizer.decode(ids, skip_special_tokens=False), tokenizer.token_bytes(ids))

    @callers_only
    def prepare(self, spec: RequestSpec, adapter: Adapter | None = None) -> PreparedRequest:
        """Does the work on a request that needs no engine thread. `adapter`: the LoRA adapter that its config names.

        Replaces a prompt of text or of a chat by its ids in `spec`. Raises ValueError or TypeError for a bad argument,
        AllSparkError for a request that is refused.
        """
        check_available(spec.config)
        config = self._with_pooling(spec.config).with_seed()
        info, tokenizer, is_chat = self._info, self.tokenizer, spec.messages is not None
        # The format applies if chat options were given, even if the chat is already tokenized.
        form = None if spec.chat is None else chat_format(spec.chat.chat_format or info.chat_format or "plain")

        # Tokenize.
        prompt, images = self._read(spec)
        prompt = list(prompt)
        if not prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        most = config.truncate_prompt_tokens
        if config.pooling is not None and tokenizer is not None and most is not None and not images:
            prompt = tokenizer.cut(prompt, most)
        spec.set_prompt(prompt)
        spec.cut_prompt()
        prompt = spec.input_ids or []
        tail = ""
        if form is not None and tokenizer is not None:
            tail = tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False)
        histories = self._check_request(spec, config, prompt)
        longest = max(map(len, histories))
        limit = length_limit(config, len(prompt), longest, info)
        if len(prompt) + longest > self._cache_length:
            raise AllSparkError(
                AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
                f"{len(prompt) + longest} tokens can never fit the cache of model {info.name!r}: "
                f"{info.num_spans} spans of {info.span_size} tokens; give it more cache_memory",
            )
        prompt_outputs = _prompt_outputs(config, prompt, histories[0], info)
        eos = eos_ids(config, info)
        texts = self._output_texts(spec, () if form is None else form.markers, eos)

        # Compile the grammar.
        if form is not None and is_chat:
            spec.opened = opened_in(tail)
        known_eos = [i for i in eos if i < info.vocab_size]
        guidances = self._guidances(spec, form, tail, known_eos, histories)
        if config.thinking_token_budget is not None and config.pooling is None:
            guidances = self._limit_reasoning(config.thinking_token_budget, form, prompt, histories, guidances)

        # Encode the sampling parameters.
        banned = [*config.bad_words_ids, *self._words(config.bad_words)]
        samplings = [_sampling_params(config, index, len(prompt), known_eos, banned).encode()
                     for index in range(config.n)]

        predicted = self._predicted(config.prediction)

        # Make the sequences. A request in quarantine shares no spans with others.
        salt = scope(config.cache_salt if not spec.deaths else f"{config.cache_salt} alone {os.urandom(8).hex()}",
                     adapter.digest if adapter is not None else "", spec.cache_scope)
        shown = self.images.place(prompt, images) if self.images is not None and images else None
        root, chains = self._span_keys(salt, prompt, histories, shown)
        stop = StopRules(limit, frozenset(eos) if config.early_stopping else frozenset(),
                         tuple(tuple(word) for word in config.stop_words_ids))
        # The samples share the rules and the predicted text.
        pictures = images.size + shown.size if images is not None and shown is not None else 0
        tokens = sum(map(len, stop.stop_words)) + (len(predicted.ids) if predicted is not None else 0)
        shared = pictures + TOKEN_BYTES * tokens
        sequences: list[Sequence] = []
        for generated, sampling, guidance, chain in zip(histories, samplings, guidances, chains):
            sequences.append(
                Sequence(
                    tokens=prompt + generated,
                    prompt_len=len(prompt),
                    sampling=sampling,
                    stop=stop,
                    priority=config.priority,
                    salt=salt,
                    adapter=adapter.index if adapter is not None else NO_ADAPTER,
                    prompt_outputs=None if sequences else prompt_outputs,  # one sample is enough
                    generates=config.pooling is None,
                    guidance=guidance,
                    images=shown,
                    prediction=Prediction(predicted, len(prompt)) if predicted is not None else None,
                    tenant=spec.tenant,
                    extra=SEQUENCE_BYTES + len(sampling) + (0 if sequences else shared),
                    root=root,
                    keys=chain,
                )
            )
        timeout = config.queue_timeout if not longest else 0  # a resumed request has begun
        dependency, interest = None, Interest()
        if self.images is not None and images is not None and shown is not None:
            computed = self.images.compute(spec.cache_scope, images, shown, interest.lasts)
            dependency = Dependency("images", computed) if computed is not None else None
        return PreparedRequest(
            sequences, texts, sum(sequence.size for sequence in sequences),
            top_logprobs=config.top_logprobs if config.logprobs else -1, prompt_logprobs=config.prompt_logprobs or 0,
            pooling="last" if info.whole_texts and config.pooling else config.pooling,  # the model has pooled its rows
            deadline=time.monotonic() + timeout if timeout else math.inf, deaths=spec.deaths, proven=spec.proven,
            name=config.user_request_id or config.uuid or "", model=spec.model, tenant=spec.tenant, adapter=adapter,
            trace=spec.trace, dependency=dependency, interest=interest
        )

    def _with_pooling(self, config: GenerateConfig) -> GenerateConfig:
        """The config with the pooling that "auto" stands for. AllSparkError if the model does not have what it asks."""
        info, wanted = self._info, config.pooling
        if wanted is None and info.only_pools:
            what = "a classifier" if info.labels else "an embedder"
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model {info.name!r} ({info.architecture}) is {what} and generates no tokens: set pooling, or call "
                f"{'classify or rerank' if info.labels else 'embed'}",
            )
        if wanted is None or not info.pooling:
            return config
        fixed = info.whole_texts or info.only_pools
        if wanted not in ("auto", info.pooling) and (fixed or wanted == "cls"):
            allowed = f"'auto' and {info.pooling!r}" if fixed else "'auto', 'last' and 'mean'"
            raise AllSparkError(
                AsStatus.ALLSPARK_PARAM_ERROR,
                f"pooling={wanted!r} is not available for model {info.name!r} ({info.architecture}): allowed are "
                f"{allowed}",
            )
        config = copy.copy(config)
        config.pooling = info.pooling if wanted == "auto" else wanted
        return config

    def _check_request(self, spec: RequestSpec, config: GenerateConfig, prompt: list[int]) -> list[list[int]]:
        """Checks the token ids and the resumption; returns the generated ids of each sample."""
        vocab_size = self._info.vocab_size
        check_ids("input_ids", prompt, vocab_size)
        if (spec.generated and config.n > 1) or (spec.samples and len(spec.samples) != config.n):
            raise ValueError(f"to resume a request with n={config.n} needs what was generated of each sample")
        histories = [list(spec.generated_of(index)) for index in range(config.n)]
        for generated in histories:
            check_ids("generated", generated, vocab_size)
        if spec.deaths > MAX_DEATHS:
            raise AllSparkError(
                AsStatus.ALLSPARK_RUNTIME_ERROR,
                f"{MAX_DEATHS} servers were lost while they ran this request alone: it seems to be what ends them",
            )
        for name in ("bad_words_ids", "stop_words_ids"):
            for i, word in enumerate(getattr(config, name)):
                check_ids(f"{name}[{i}]", word, vocab_size)
        check_ids("logit_bias", sorted(config.logit_bias), vocab_size)
        return histories

    def _guidances(
        self, spec: RequestSpec, form: ChatFormat | None, tail: str, eos: list[int], histories: list[list[int]]
    ) -> list[Guidance] | list[None]:
        """The place of each sample in its grammar; None without a grammar. `tail`: the end of the prompt's text."""
        config, field = spec.config, None  # the field to name in errors, if not response_format
        response_format = config.response_format
        if form is not None and spec.chat is not None and (spec.chat.forced or self.tokenizer is not None):
            tokenizer = self._need_tokenizer()
            constrained = form.answer_format(spec.chat, response_format, tail, tokenizer.templates.sources.values(),
                                             tokenizer.marks)
            if constrained is not None:
                given = {"tools": spec.chat.offered, "response_format": response_format}
                field = " and ".join(name for name, value in given.items() if value)
                response_format = constrained
        if response_format is None or response_format["type"] == "text" or config.pooling is not None:
            return [None] * len(histories)
        if self._guide is None:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model {spec.model!r} has no tokenizer.json beside its checkpoint: its output cannot be guided "
                f"({field or 'response_format'})",
            )
        # With early_stopping=False too, the grammar ends with an end-of-sequence id, which is ignored and comes again.
        ends = eos or [word[0] for word in config.stop_words_ids if len(word) == 1]
        if not ends:
            raise ValueError(f"{field or 'response_format'} needs an id that ends the output: eos_token_id="
                             f"{config.eos_token_id} gives none")
        return self._guide.guidances(response_format, ends, spec.prompt_len, histories,
                                     vocab=config.vocab, vocab_type=config.vocab_type, field=field,
                                     scope=spec.cache_scope, patience=_RESUMED_PATIENCE if spec.resumed else 1)

    def _limit_reasoning(
        self, budget: int, form: ChatFormat | None, prompt: list[int], histories: list[list[int]],
        guidances: list[Guidance] | list[None],
    ) -> list[Guidance]:
        """Adds a budget for the reasoning of each sample."""
        info = self._info
        if self.tokenizer is None or self._guide is None:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model {info.name!r} has no tokenizer.json beside its checkpoint: its reasoning cannot be limited "
                f"(thinking_token_budget={budget})",
            )
        tokenizer, form = self.tokenizer, form or chat_format(info.chat_format or "plain")
        tokens = self._reasoning.get(form.name)
        if tokens is None:
            marks = form.reasoning(tokenizer.templates.sources.values())
            if marks is None:
                raise ValueError(f"thinking_token_budget={budget}: model {info.name!r} has no reasoning that a budget "
                                 "could end; its chat template has no marks of it, such as <think>")
            tokens = self._reasoning[form.name] = ReasoningTokens.of(
                marks, info.vocab_size, lambda text: tokenizer.encode(text, add_special_tokens=False),
                tokenizer.token_bytes)
        opened, closed = form.reasoning_at(tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False))
        limited = []
        for generated, guidance in zip(histories, guidances):
            limit = ReasoningBudget(tokens, budget, len(prompt), opened, closed)
            limit.accept(generated)
            guidance = guidance or Guidance(None, len(prompt) + len(generated))
            guidance.budget = limit
            limited.append(guidance)
        return limited

    def _words(self, words: list[str]) -> list[list[int]]:
        """The ids of words, with and without a blank before them: tokenizers have other tokens for these."""
        found: list[list[int]] = []
        for word in words:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                ids = self._need_tokenizer().encode(text, add_special_tokens=False)
                if len(ids) > MAX_WORD_IDS:
                    raise ValueError(f"bad_words: {word[:80]!r} has {len(ids)} tokens; allowed: at most {MAX_WORD_IDS}")
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _predicted(self, text: str) -> PredictedText | None:
        """The text that an output is expected to resemble; None if none is given. Drafts are taken from it."""
        ids = self._need_tokenizer().encode(text, add_special_tokens=False) if text else []
        check_ids("prediction", ids, self._info.vocab_size)
        return PredictedText(ids) if ids else None

    def _output_texts(self, spec: RequestSpec, markers: tuple[str, ...], eos: tuple[int, ...]
                      ) -> list[OutputText | None]:
        config = spec.config
        if not spec.want_text and not config.stop:
            return [None] * config.n
        from ..tokenizer.detokenizer import OutputText, StopStrings  # `tokenizers` is not needed to serve ids

        tokenizer = self._need_tokenizer()
        stops = StopStrings(config.stop, config.include_stop_str_in_output) if config.stop else None
        shown = config.skip_special_tokens or config.include_stop_str_in_output or not config.early_stopping
        hidden = frozenset[int]() if shown else frozenset(eos)
        texts: list[OutputText | None] = []
        for index in range(config.n):
            text = OutputText(tokenizer.detokenizer(markers, config.skip_special_tokens), stops, spec.want_text, hidden)
            texts.append(text)
            if generated := spec.generated_of(index):
                text.push(generated)  # the client has this text, except for what was held back
        return texts

    def _span_keys(
        self, salt: str, prompt: list[int], histories: list[list[int]], images: PromptImages | None
    ) -> tuple[bytes, list[list[bytes]]]:
        """The root of the hash chains, and the chain of each sample."""
        keys, size = self._keys, self._info.span_size
        if keys is None:
            return b"", [[] for _ in histories]
        root = keys.root(salt, len(prompt))
        common: list[bytes] = []
        keys.extend(common, root, prompt, len(prompt) // size, images)
        chains = [list(common) for _ in histories]
        for chain, generated in zip(chains, histories):
            if generated:
                keys.extend(chain, root, prompt + generated, (len(prompt) + len(generated)) // size, images)
        return root, chains

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model {self._info.name!r} has no tokenizer.json beside its checkpoint: it accepts only token ids",
            )
        return self.tokenizer


def _prompt_outputs(
    config: GenerateConfig, prompt: list[int], generated: list[int], info: ModelInfo
) -> PromptOutputs | None:
    """The requested results of the prompt's rows; None if there are none or the client has them already."""
    if config.pooling is not None:
        if not info.embeddings:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model {info.name!r} was serialized without the op that returns hidden states: pooling="
                f"{config.pooling!r} needs it; convert its checkpoint again",
            )
        return PromptOutputs(int(Flag.HIDDEN), config.pooling == "mean" and not info.whole_texts)
    if config.prompt_logprobs is None or generated or len(prompt) == 1:
        return None
    pairs = len(prompt) * (1 + config.prompt_logprobs)
    if pairs > MAX_PROMPT_PAIRS:
        raise _over_limit(f"prompt_logprobs={config.prompt_logprobs} of {len(prompt)} tokens are {pairs} log "
                       f"probabilities; at most {MAX_PROMPT_PAIRS} are given")
    return PromptOutputs(int(Flag.PROMPT), True)


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """ValueError unless all ids are in the vocabulary."""
    if isinstance(ids, list) and native_library().ids_below(ids, vocab_size):
        return
    for index, bad in enumerate(ids):   # elements of other integer types may be right
        if not 0 <= bad < vocab_size:
            raise ValueError(f"{name}[{index}]={bad} is not in the vocabulary; allowed: 0 to {vocab_size - 1}")


def length_limit(config: GenerateConfig, prompt_len: int, generated: int, info: ModelInfo) -> int:
    """The maximum length of prompt and output, in tokens. AllSparkError if not even one more token fits.

    An explicit max_length above the engine's is refused. max_new_tokens and the engine's length both limit the output:
    the lower limit counts.
    """
    limit = info.max_length
    if config.max_length is not None:
        if config.max_length > limit:
            raise _over_limit(
                f"max_length={config.max_length} exceeds engine_max_length={limit} of model {info.name!r}")
        limit = config.max_length
    if config.pooling is not None and prompt_len <= limit:
        return prompt_len
    if prompt_len >= limit:
        which = "engine_max_length" if limit == info.max_length else "max_length"
        raise _over_limit(
            f"the prompt has {prompt_len} tokens and {which}={limit} counts prompt and output: "
            f"at most {limit - 1} prompt tokens leave room for one of output"
        )
    if config.max_new_tokens is not None:
        limit = min(limit, prompt_len + config.max_new_tokens)
    if prompt_len + generated > limit:
        raise _over_limit(f"{generated} tokens to resume from after {prompt_len} of prompt exceed the limit of {limit}")
    return limit


def eos_ids(config: GenerateConfig, info: ModelInfo) -> tuple[int, ...]:
    """The end-of-sequence ids that count for a request. Ids beyond the vocabulary never occur and do no harm."""
    value = config.eos_token_id
    if value is None:
        return tuple(info.eos_token_ids)
    ids = [value] if isinstance(value, int) else value
    return tuple(i for i in ids if i >= 0)


def _sampling_params(
    config: GenerateConfig, index: int, prompt_len: int, eos: list[int], banned: list[list[int]],
) -> SamplingParams:
    """What the ranks need to sample the tokens of sample `index`. `banned`: sequences of ids that do not occur."""
    fewest = min(prompt_len + config.min_new_tokens, INT32_MAX) if config.min_new_tokens else 0
    return SamplingParams(
        do_sample=config.do_sample and config.top_k != 1, logprobs=config.logprobs,
        suppress_repetition_in_generation=config.suppress_repetition_in_generation, temperature=config.temperature,
        top_k=config.top_k, top_p=config.top_p, repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty, frequency_penalty=config.frequency_penalty,
        no_repeat_ngram_size=config.no_repeat_ngram_size, min_length=max(config.min_length, fewest),
        top_logprobs=config.top_logprobs if config.logprobs else 0, seed=config.seed or 0, sample_index=index,
        prompt_len=prompt_len, eos=tuple(eos), bad_words=tuple(map(tuple, banned)),
        min_p=config.min_p, logit_bias=tuple(sorted(config.logit_bias.items()))
    )


def _over_limit(message: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, message)
