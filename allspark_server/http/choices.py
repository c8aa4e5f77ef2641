"""The choices of an answer: what each sample of a request has generated so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from allspark_client.types import GeneratedElements, ModelInfo

from .logprobs import TokenTexts, prompt_logprobs
from .pool import Answer, Pool

_REASONS = {"stop": "stop", "stop_word": "stop", "length": "length", "tool_calls": "tool_calls"}
DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One sample, as far as it is generated."""

    index: int
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    #: why it ended (ResultQueue.FinishReason), and the stop string that ended it; None while it runs
    ended: str | None = None
    stop_string: str | None = None
    #: what was generated, with log probabilities, if Choices keeps it
    elements: GeneratedElements = field(default_factory=GeneratedElements)

    def take(self, elements: GeneratedElements, keep: bool) -> None:
        """Add new tokens. `keep`: in `elements`, too."""
        self.ids += elements.ids_from_generate
        self.texts.append(elements.text)
        if elements.finish_reason is not None:
            self.ended, self.stop_string = elements.finish_reason, elements.stop_string
        if keep:
            self.elements.extend(elements)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class Choices:
    """The samples of one request to the pool."""

    def __init__(self, answer: Answer, info: ModelInfo, first_index: int = 0, keep_logprobs: bool = False):
        """`keep_logprobs`: keep log probabilities, if wanted at all, for an answer that is written as a whole."""
        config = answer.spec.config
        self.answer, self.info = answer, info
        self._first_index, self._keep = first_index, keep_logprobs and config.logprobs
        self.all = [Choice(first_index + i) for i in range(config.n)]
        #: GeneratedElements.prompt_logprobs_list
        self.prompt_logprobs: list[list[tuple[int, float]]] = []

    def take(self, elements: GeneratedElements) -> Choice:
        """Add new tokens; returns the choice that they belong to."""
        choice = self.all[elements.sample_index]
        choice.take(elements, self._keep)
        self.prompt_logprobs = self.prompt_logprobs or elements.prompt_logprobs_list
        return choice

    async def collect(self) -> Choices:
        """Read all tokens until the request ends; returns self."""
        async for elements in self.answer:
            self.take(elements)
        return self

    def finish_reason(self, choice: Choice) -> str:
        """Why a choice ended, in OpenAI's words."""
        return _REASONS.get(choice.ended or self.answer.finish_reason or "", "stop")

    @property
    def tokens(self) -> int:
        """The number of generated tokens of all samples."""
        return sum(len(choice.ids) for choice in self.all)

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens from the prefix cache."""
        return self.answer.stat.context_cached_length


def ids_field(name: str, ids: list[int]) -> str:
    """A further field of a chunk's JSON, with token ids."""
    return f',"{name}":{json.dumps(ids)}'


def usage(parts: list[Choices], generated: bool = True, reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's `usage` of requests.

    `generated`: whether generated tokens count; `reasoning`: how many of them are reasoning.
    """
    prompt = sum(len(part.answer.prompt_ids) for part in parts)
    completion = sum(part.tokens for part in parts) if generated else 0
    cached = sum(part.cached_tokens for part in parts)
    stats = [part.answer.stat for part in parts]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(stat.accepted_prediction_tokens for stat in stats),
            "rejected_prediction_tokens": sum(stat.rejected_prediction_tokens for stat in stats),
        },
    }


def timings(choices: Choices) -> dict[str, Any]:
    """Where the time of a request that has ended went, in the form of llama-server's `timings`.

    Times are in ms. `queue_ms` is this server's own: from the request's arrival at its group to the first step that
    computed it; `prompt_ms` goes from there to the first token, and `predicted_ms` to the end. The rate of generation
    is of the tokens after the first.
    """
    stat = choices.answer.stat
    queue = stat.time_in_queue or stat.finish_time      # it ended while it waited
    prompt_end = stat.time_to_first_token or stat.finish_time
    prompt, generated = max(prompt_end - queue, 0.0), stat.finish_time - prompt_end
    computed = stat.context_token_length - stat.context_cached_length
    return {
        "queue_ms": queue,
        "cache_n": stat.context_cached_length,
        "prompt_n": computed,
        "prompt_ms": prompt,
        "prompt_per_token_ms": prompt / computed if computed else 0.0,
        "prompt_per_second": 1e3 * computed / prompt if prompt else 0.0,
        "predicted_n": stat.generated_token_length,
        "predicted_ms": generated,
        "predicted_per_token_ms": 1e3 / stat.generate_tps if stat.generate_tps else 0.0,
        "predicted_per_second": stat.generate_tps,
    }


def fingerprint(info: ModelInfo) -> str:
    """OpenAI's system_fingerprint: if it is equal, so are answers with the same seed."""
    return f"fp_{info.model_hash[:10]}_{info.ranks}"


async def token_bytes(pool: Pool, info: ModelInfo, elements: GeneratedElements) -> dict[int, bytes]:
    """The bytes of all tokens that the log probabilities name."""
    ids = set(elements.ids_from_generate)
    for pairs in elements.log_probs_list:
        ids.update(i for i, _ in pairs)
    return await pool.token_bytes(info, ids)


async def logprobs_json(pool: Pool, info: ModelInfo, elements: GeneratedElements,
                        make: Callable[[TokenTexts], str]) -> str:
    """What `make` writes of the log probabilities of new tokens, once the texts of all tokens that they name are known.
    `make` raises KeyError, before anything has changed, if some are not.
    """
    texts = pool.token_texts(info)
    try:
        return make(texts)
    except KeyError:
        await token_bytes(pool, info, elements)
        return make(texts)


async def prompt_field(pool: Pool, choices: Choices, top: int | None) -> dict[str, Iterator[str]]:
    """The field `prompt_logprobs` of a request's answer; `top`: how many alternatives, None for no such field."""
    if top is None:
        return {}
    known = await pool.token_bytes(choices.info, {i for pairs in choices.prompt_logprobs for i, _ in pairs})
    return {"prompt_logprobs": prompt_logprobs(choices.prompt_logprobs, top, known)}
