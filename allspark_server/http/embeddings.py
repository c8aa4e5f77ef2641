"""/v1/embeddings, OpenAI's: pooled hidden states of a model's last layer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from allspark_client.request import RequestSpec
from allspark_client.texts import prompt_of, shortened
from allspark_client.types import ModelInfo

from .call import Call
from .completions import Prompt, prompts_of, start_all
from .errors import ApiError, bad_value
from .pieces import json_list, json_object
from .pool import Answer
from .sampling import checked
from .wire import INT32_MAX, Body, ModelName

#: vLLM's field: prompts are cut to so many tokens, -1: to the model's limit; otherwise longer ones are refused
Truncation = Annotated[int | None, Field(ge=-1, le=INT32_MAX)]


class EmbeddingRequest(Body):
    """A request for embeddings of one input or several."""

    model: ModelName
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    user: str | None = None
    pooling: Annotated[
        Literal["auto", "cls", "last", "mean"] | None,
        Field(description="As the checkpoint says (`auto`, the default), the hidden state of the first or the last "
                          "token, or the mean over all tokens"),
    ] = None
    prompt_name: Annotated[
        str | None, Field(description="The checkpoint's prompt to put before each text, such as `query`")
    ] = None
    normalize: Annotated[bool | None, Field(description="Scale each embedding to length 1 (default)")] = None
    truncate_prompt_tokens: Truncation = None


async def embeddings(call: Call, request: EmbeddingRequest) -> None:
    """An embedding of each input."""
    info = await call.model(request.model)
    try:
        before = prompt_of(info, request.prompt_name)
    except ValueError as error:
        raise bad_value("prompt_name", str(error)) from None
    inputs = [{"text": before + one} if isinstance(one, str) else {"input_ids": one}
              for one in prompts_of(request.input, "input")]
    found, tokens = await outputs_of(call, request, info, inputs, "input", request.pooling or "auto")
    try:
        vectors = shortened(found, info, request.dimensions, request.normalize is not False)
    except ValueError as error:
        raise bad_value("dimensions", str(error)) from None
    data = ({"object": "embedding", "index": i, "embedding": _written(vector, request.encoding_format)}
            for i, vector in enumerate(vectors))
    await call.reply_in_pieces(json_object({
        "object": "list",
        "data": json_list(data, 1),
        "model": request.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }))


async def outputs_of(call: Call, request: Any, info: ModelInfo, inputs: Sequence[dict[str, Any]], name: str,
                     pooling: str = "auto") -> tuple[np.ndarray[Any, Any], int]:
    """The model's output for each input, float32 [inputs, values], and how many tokens these have.

    `request` names the model and says how long prompts are cut; `name`: the field that errors name.
    """
    values: dict[str, Any] = {"pooling": pooling}
    if (most := request.truncate_prompt_tokens) is not None:
        values["truncate_prompt_tokens"] = info.max_length if most == -1 else most
    config = checked(values)
    specs = [RequestSpec(request.model, config=config, **one) for one in inputs]
    async with contextlib.AsyncExitStack() as stack:
        answers = await start_all(call, stack, specs, name)
        found = []
        for answer in answers:
            found.append(await _output(answer))
            await asyncio.sleep(0)      # others' turn, if all is there
        tokens = sum(len(answer.prompt_ids) for answer in answers)
    return np.array(found, np.float32), tokens


async def _output(answer: Answer) -> np.ndarray[Any, Any]:
    async for elements in answer:
        for tensors in elements.tensors_from_model_inference:
            return np.asarray(tensors["embedding"], dtype=np.float32)
    raise ApiError(500, "the model gave no output")


def _written(vector: np.ndarray[Any, Any], form: str | None) -> Any:
    """A vector as a list of numbers, or as OpenAI's client wants it: little-endian float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
