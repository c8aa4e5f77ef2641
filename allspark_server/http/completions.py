"""/v1/completions, OpenAI's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, ModelInfo
from allspark_server.json_structure import MAX_VALUES

from .call import Call, new_id
from .chat_wire import ResponseFormat
from .choices import DONE, Choice, Choices, fingerprint, ids_field, logprobs_json, prompt_field, token_bytes, usage
from .errors import ApiError, bad_value, not_available
from .infill import prompts_with_suffix
from .logprobs import CompletionLogprobs, logprobs_in_pieces
from .pieces import joined, json_object, quoted
from .pool import Answer, Pool
from .sampling import check_prompt_logprobs, check_room, check_stream_options, config_of, response_format
from .wire import INT32_MAX, Generation, Many

#: OpenAI's default
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
#: results of several prompts that may wait to be written
_WAITING = 64
#: prompts of one request that are started at the same time, so that other requests have their turn
_STARTED = 4

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Ids = Annotated[Many[TokenId], Field(min_length=1, max_length=MAX_VALUES)]
Prompt = (str | Ids | Annotated[Many[str], Field(min_length=1, max_length=MAX_PROMPTS)]
          | Annotated[Many[Ids], Field(min_length=1, max_length=MAX_PROMPTS)])


class CompletionRequest(Generation):
    """A request for completions of one prompt or several."""

    prompt: Prompt
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    echo: bool | None = None
    best_of: Annotated[int | None, Field(ge=1, le=20)] = None
    suffix: Annotated[
        str | None, Field(description="The answer stands between `prompt` and this, for models of code")
    ] = None
    response_format: ResponseFormat | None = None


class _Part:
    """One prompt's completions. `echo`: the prompt's text, if wanted; `logprobs`: how many alternatives, or None."""

    def __init__(self, choices: Choices, echo: str, logprobs: int | None):
        self.choices, self.echo = choices, echo
        self.top = logprobs or 0
        #: whether the prompt's log probabilities must still be written
        self.owes_prompt = bool(echo) and logprobs is not None
        self.logprobs = [CompletionLogprobs(self.top, len(echo)) for _ in choices.all]

    async def collect(self) -> None:
        """Read all tokens until the request ends."""
        async for elements in self.choices.answer:
            self.choices.take(elements)

    async def of_prompt(self, pool: Pool) -> dict[str, Any]:
        """The log probabilities of the prompt's tokens; None for the first, which has no context."""
        ids, given = self.choices.answer.prompt_ids, self.choices.prompt_logprobs
        known = await pool.token_bytes(self.choices.info, {*ids, *(i for pairs in given for i, _ in pairs)})
        top = [pairs[1:1 + self.top] for pairs in given]
        return CompletionLogprobs(self.top).of(ids, [None, *(pairs[0][1] for pairs in given)], [[], *top], known,
                                               self.echo)

    async def json(self, pool: Pool, at: int, elements: GeneratedElements) -> str:
        """The log probabilities of new tokens of the choice with index `at`."""
        make = functools.partial(self.logprobs[at].json, elements)
        return await logprobs_json(pool, self.choices.info, elements, make)


def _check(request: CompletionRequest) -> None:
    if request.suffix and request.echo:
        raise bad_value("suffix", "it is not allowed together with 'echo'")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise not_available("best_of", "it returns all that it generates; leave it out, or set it to n")
    if request.max_tokens == 0 and not request.echo:
        raise bad_value("max_tokens", "it must be at least 1, unless 'echo' is true")
    check_prompt_logprobs(request)
    check_stream_options(request)


def prompts_of(given: Any, name: str) -> list[str | list[int]]:
    """The prompts of a field that may hold one or several. Raises ApiError if one is empty."""
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    for i, prompt in enumerate(given):
        if not prompt:
            raise bad_value(name if len(given) == 1 else f"{name}[{i}]", "it is empty")
    return given


async def start_all(call: Call, stack: contextlib.AsyncExitStack, specs: list[RequestSpec], name: str) -> list[Answer]:
    """Start requests, many at the same time; `stack` releases them.

    Raises ApiError if one is rejected; `name` is the field that the error names.
    """
    answers: list[Answer] = []
    for first in range(0, len(specs), _STARTED):    # starting one holds the event loop for 0.1 ms
        stack.push_async_callback(asyncio.sleep, 0)     # others' turn also while they are released
        part = specs[first:first + _STARTED]
        started = await asyncio.gather(*(stack.enter_async_context(call.generate(spec)) for spec in part),
                                       return_exceptions=True)
        for answer in started:
            if isinstance(answer, BaseException):
                if isinstance(answer, ApiError) and answer.param == "prompt":
                    answer.param = name
                raise answer
            answers.append(answer)
    return answers


async def completions(call: Call, request: CompletionRequest) -> None:
    """Completes one prompt or several."""
    _check(request)
    info = await call.model(request.model)
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    config = config_of(request, info, max(wanted, 1))   # with max_tokens=0 one token is generated and dropped
    if request.response_format is not None:
        config.response_format = response_format(request.response_format)
    if request.logprobs is not None:
        config.logprobs, config.top_logprobs = True, request.logprobs
        if request.echo:
            config.prompt_logprobs = max(request.logprobs, request.prompt_logprobs or 0)
    prompts = prompts_of(request.prompt, "prompt")
    whole: Sequence[str | list[int]] = prompts
    if request.suffix:
        whole = await prompts_with_suffix(call.pool, info, prompts, request.suffix)
    specs = [RequestSpec(request.model, config=config, want_text=True,
                         **({"text": one} if isinstance(one, str) else {"input_ids": one})) for one in whole]
    async with contextlib.AsyncExitStack() as stack:
        answers = await start_all(call, stack, specs, "prompt")
        parts: list[_Part] = []
        for answer, prompt in zip(answers, prompts):
            check_room(info, len(answer.prompt_ids), wanted, "max_tokens")
            echo = ""
            if request.echo:
                echo = prompt if isinstance(prompt, str) else (await call.pool.detokenize(request.model, prompt)).text
            choices = Choices(answer, info, len(parts) * config.n, keep_logprobs=not request.stream)
            call.generated.append(choices)
            parts.append(_Part(choices, echo, request.logprobs))
        await _Writer(call, request, info, parts, wanted).run()


class _Writer:
    """Writes an answer, at once or as events."""

    def __init__(self, call: Call, request: CompletionRequest, info: ModelInfo, parts: list[_Part], wanted: int):
        self._call, self._request, self._info, self._parts, self._wanted = call, request, info, parts, wanted
        self._id = new_id("cmpl-")

    async def run(self) -> None:
        """Write the answer."""
        if self._request.stream:
            await self._stream()
        else:
            for part in self._parts:
                await part.collect()
                await asyncio.sleep(0)      # others' turn, if all is there
            await self._call.reply_in_pieces(await self._whole())

    def _reason(self, part: _Part, choice: Choice) -> str:
        return part.choices.finish_reason(choice) if self._wanted else "length"

    def _usage(self) -> dict[str, Any]:
        return usage([part.choices for part in self._parts], generated=bool(self._wanted))

    async def _whole(self) -> Iterator[str]:
        call, request = self._call, self._request
        choices = []
        for part in self._parts:
            for at, choice in enumerate(part.choices.all):
                choices.append(json_object({
                    "text": part.echo + (choice.text if self._wanted else ""),
                    "index": choice.index,
                    "logprobs": await self._logprobs(part, at, choice),
                    "finish_reason": self._reason(part, choice),
                    **self._ids(part, choice),
                    **await prompt_field(call.pool, part.choices, request.prompt_logprobs),
                }))
        return json_object({
            "id": self._id,
            "object": "text_completion",
            "created": call.created,
            "model": request.model,
            "choices": joined(choices),
            "usage": self._usage(),
            "system_fingerprint": fingerprint(self._info),
        })

    def _ids(self, part: _Part, choice: Choice) -> dict[str, list[int]]:
        """The fields of `return_token_ids`."""
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": part.choices.answer.prompt_ids, "token_ids": choice.ids if self._wanted else []}

    async def _logprobs(self, part: _Part, at: int, choice: Choice) -> Iterator[str] | None:
        if self._request.logprobs is None:
            return None
        prompt = [await part.of_prompt(self._call.pool)] if part.owes_prompt else []
        elements = choice.elements
        tokens = await token_bytes(self._call.pool, self._info, elements)
        await asyncio.sleep(0)      # others' turn: they are many
        if not self._wanted and prompt:
            return json_object(prompt[0])
        return logprobs_in_pieces(prompt, part.logprobs[at], elements, tokens)

    # --- as events ---

    async def _stream(self) -> None:
        call, request = self._call, self._request
        options = request.stream_options
        wants_usage = bool(options and options.include_usage)
        usage_in_each = bool(wants_usage and options and options.continuous_usage_stats)
        head = (f'data: {{"id":"{self._id}","object":"text_completion","created":{call.created},'
                f'"model":{quoted(request.model)},"system_fingerprint":"{fingerprint(self._info)}","choices":[')
        tail = ']' + (',"usage":null' if wants_usage else '') + '}\n\n'

        def chunk(choice: Choice, text: str, logprobs: str = "null", reason: str = "null", more: str = "") -> bytes:
            end = f'],"usage":{json.dumps(self._usage())}}}\n\n' if usage_in_each else tail
            return (f'{head}{{"text":{quoted(text)},"index":{choice.index},"logprobs":{logprobs},'
                    f'"finish_reason":{reason}{more}}}{end}').encode()

        await call.stream()
        for part in self._parts:
            for choice in part.choices.all if part.echo and not part.owes_prompt else ():
                await call.write(chunk(choice, part.echo))

        async def write(part: _Part, elements: GeneratedElements) -> None:
            choice = part.choices.take(elements)
            if part.owes_prompt:    # the prompt's log probabilities come with the first token
                of_prompt = json.dumps(await part.of_prompt(call.pool))
                for sample in part.choices.all:
                    await call.write(chunk(sample, part.echo, of_prompt))
                part.owes_prompt = False
            logprobs = "null"
            if request.logprobs is not None:
                logprobs = await part.json(call.pool, elements.sample_index, elements)
            data, more = b"", ""
            if request.return_token_ids:
                more = ids_field("token_ids", elements.ids_from_generate)
                if len(choice.ids) == len(elements.ids_from_generate):      # the first chunk
                    more = ids_field("prompt_token_ids", part.choices.answer.prompt_ids) + more
            if self._wanted and (elements.text or more or request.logprobs is not None):
                data = chunk(choice, elements.text, logprobs, more=more)
            if choice.ended is not None:
                data += chunk(choice, "", reason=f'"{self._reason(part, choice)}"')
            if data:
                await call.write(data)

        if len(self._parts) == 1:
            async for elements in self._parts[0].choices.answer:
                await write(self._parts[0], elements)
        else:
            async for part, elements in _merged(self._parts):
                await write(part, elements)
        for part in self._parts:
            for choice in part.choices.all:
                if choice.ended is None:
                    await call.write(chunk(choice, "", reason=f'"{self._reason(part, choice)}"'))
        last = DONE
        if wants_usage:
            last = f'{head}],"usage":{json.dumps(self._usage())}}}\n\n'.encode() + DONE
        await call.write(last, more=False)


async def _merged(parts: list[_Part]) -> AsyncIterator[tuple[_Part, GeneratedElements]]:
    """New tokens of all parts as they arrive, until all have ended. Raises the error of a part that fails."""
    ready: asyncio.Queue[tuple[_Part, GeneratedElements | Exception | None]] = asyncio.Queue(_WAITING)

    async def pump(part: _Part) -> None:
        try:
            async for new in part.choices.answer:
                await ready.put((part, new))
        except Exception as error:  # raised again by the reader
            await ready.put((part, error))
        else:
            await ready.put((part, None))

    tasks = [asyncio.ensure_future(pump(part)) for part in parts]
    try:
        left = len(parts)
        while left:
            part, result = await ready.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                left -= 1
            else:
                yield part, result
    finally:
        for task in tasks:
            task.cancel()
