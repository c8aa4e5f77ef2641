"""/v1/completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any, AsyncIterator, Optional, Union

from pydantic import Field

from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, ModelInfo

from .call import Call, new_id
from .chat import check_stream_options
from .choices import DONE, Choice, Choices, fingerprint, quoted, token_bytes, usage
from .errors import bad_value, not_available
from .pool import Answer
from .logprobs import CompletionLogprobs
from .sampling import check_room, config_of
from .wire import INT32_MAX, Generation

#: OpenAI's
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
#: what may be ready to be written of several prompts' completions
_WAITING = 64

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Union[str, Ids, Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)],
               Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]]


class CompletionRequest(Generation):
    prompt: Prompt
    logprobs: Annotated[Optional[int], Field(ge=0, le=5)] = None
    echo: Optional[bool] = None
    best_of: Annotated[Optional[int], Field(ge=1, le=20)] = None
    suffix: Optional[str] = None


class _Part:
    """One prompt's completions."""

    def __init__(self, choices: Choices, echo: str, logprobs: int | None):
        self.choices, self.echo = choices, echo
        self.logprobs = [CompletionLogprobs(logprobs or 0, len(echo)) for _ in choices.all]


def _check(request: CompletionRequest) -> None:
    if request.suffix:
        raise not_available("suffix", "it does not insert")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise not_available("best_of", "it returns all that it generates; leave it out, or set it to n")
    if request.echo and request.logprobs is not None:
        raise not_available("echo", "its engine does not have the logprobs of prompts yet")
    if request.max_tokens == 0 and not request.echo:
        raise bad_value("max_tokens", "it must be at least 1, unless 'echo' is true")
    check_stream_options(request)


def _prompts(given: Any) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else given


async def completions(call: Call, request: CompletionRequest) -> None:
    """Completes one prompt or several."""
    _check(request)
    info = await call.model(request.model)
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    config = config_of(request, info, max(wanted, 1))   # of what is generated for 0, nothing is shown
    if request.logprobs is not None:
        config.logprobs, config.top_logprobs = True, request.logprobs
    prompts = _prompts(request.prompt)
    specs = []
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise bad_value("prompt" if len(prompts) == 1 else f"prompt[{i}]", "it is empty")
        specs.append(RequestSpec(request.model, config=config, want_text=True,
                                 **{"text" if isinstance(prompt, str) else "input_ids": prompt}))
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(*(stack.enter_async_context(call.generate(spec)) for spec in specs),
                                       return_exceptions=True)
        answers = [answer for answer in started if isinstance(answer, Answer)]
        if len(answers) < len(specs):
            raise next(error for error in started if isinstance(error, BaseException))
        parts = []
        for answer, prompt in zip(answers, prompts):
            check_room(info, len(answer.prompt_ids), wanted, "max_tokens")
            echo = ""
            if request.echo:
                echo = prompt if isinstance(prompt, str) else (await call.pool.detokenize(request.model, prompt)).text
            choices = Choices(answer, info, len(parts) * config.n)
            parts.append(_Part(choices, echo, request.logprobs))
        await _Writer(call, request, info, parts, wanted).run()
        for part in parts:
            call.ended(part.choices)


class _Writer:
    def __init__(self, call: Call, request: CompletionRequest, info: ModelInfo, parts: list[_Part], wanted: int):
        self._call, self._request, self._info, self._parts, self._wanted = call, request, info, parts, wanted
        self._id = new_id("cmpl-")

    async def run(self) -> None:
        """Writes the answer, at once or as it comes."""
        if self._request.stream:
            await self._stream()
        else:
            await asyncio.gather(*(part.choices.collect() for part in self._parts))
            await self._call.reply(await self._whole())

    async def _whole(self) -> dict[str, Any]:
        found = []
        for part in self._parts:
            for at, choice in enumerate(part.choices.all):
                logprobs = None
                if self._request.logprobs is not None:
                    logprobs = await self._logprobs(part, at, choice.elements)
                found.append({
                    "text": part.echo + (choice.text if self._wanted else ""),
                    "index": choice.index,
                    "logprobs": logprobs,
                    "finish_reason": part.choices.finish_reason(choice) if self._wanted else "length",
                })
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._call.created,
            "model": self._request.model,
            "choices": found,
            "usage": usage([part.choices for part in self._parts]),
            "system_fingerprint": fingerprint(self._info),
        }

    async def _logprobs(self, part: _Part, at: int, elements: GeneratedElements) -> dict[str, Any]:
        tokens = await token_bytes(self._call.pool, self._info, elements)
        return part.logprobs[at].of(elements.ids_from_generate, elements.token_logprobs_list,
                                    elements.log_probs_list, tokens)

    # --- as it comes ---

    async def _stream(self) -> None:
        call, request = self._call, self._request
        wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        head = (f'data: {{"id":"{self._id}","object":"text_completion","created":{call.created},'
                f'"model":{quoted(request.model)},"system_fingerprint":"{fingerprint(self._info)}","choices":[')
        tail = ']' + (',"usage":null' if wants_usage else '') + '}\n\n'

        def chunk(choice: Choice, text: str, logprobs: str = "null", reason: str = "null") -> bytes:
            return (f'{head}{{"text":{quoted(text)},"index":{choice.index},"logprobs":{logprobs},'
                    f'"finish_reason":{reason}}}{tail}').encode()

        await call.stream()
        for part in self._parts:
            for choice in part.choices.all if part.echo else ():
                await call.write(chunk(choice, part.echo))
        async for part, elements in _merged(self._parts):
            choice = part.choices.take(elements)
            logprobs = "null"
            if request.logprobs is not None:
                logprobs = json.dumps(await self._logprobs(part, elements.sample_index, elements))
            elif not elements.text:
                continue
            if self._wanted:
                await call.write(chunk(choice, elements.text, logprobs))
        for part in self._parts:
            for choice in part.choices.all:
                reason = part.choices.finish_reason(choice) if self._wanted else "length"
                await call.write(chunk(choice, "", reason=f'"{reason}"'))
        last = DONE
        if wants_usage:
            counts = json.dumps(usage([part.choices for part in self._parts]))
            last = f'{head}],"usage":{counts}}}\n\n'.encode() + DONE
        await call.write(last, more=False)


async def _merged(parts: list[_Part]) -> AsyncIterator[tuple[_Part, GeneratedElements]]:
    """What comes for any of the parts, until all have ended. Raises what one of them ends with."""
    if len(parts) == 1:
        async for elements in parts[0].choices.answer:
            yield parts[0], elements
        return
    ready: asyncio.Queue[tuple[_Part, GeneratedElements | Exception | None]] = asyncio.Queue(_WAITING)

    async def pump(part: _Part) -> None:
        try:
            async for elements in part.choices.answer:
                await ready.put((part, elements))
        except Exception as error:  # raised again by who reads
            await ready.put((part, error))
        else:
            await ready.put((part, None))

    tasks = [asyncio.ensure_future(pump(part)) for part in parts]
    try:
        left = len(parts)
        while left:
            part, elements = await ready.get()
            if isinstance(elements, Exception):
                raise elements
            if elements is None:
                left -= 1
            else:
                yield part, elements
    finally:
        for task in tasks:
            task.cancel()
