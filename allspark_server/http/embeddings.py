"""/v1/embeddings, OpenAI's: pooled hidden states of a model's last layer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from allspark_client.request import RequestSpec

from .call import Call
from .completions import Prompt, prompts_of, start_all
from .errors import ApiError, not_available
from .pieces import json_list, json_object
from .pool import Answer
from .sampling import checked
from .wire import INT32_MAX, Body, ModelName


class EmbeddingRequest(Body):
    """A request for embeddings of one input or several."""

    model: ModelName
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    user: str | None = None
    pooling: Annotated[
        Literal["last", "mean"] | None,
        Field(description="The hidden state of the last token (default), or the mean over all tokens"),
    ] = None


async def embeddings(call: Call, request: EmbeddingRequest) -> None:
    """An embedding of each input, normalized to length 1."""
    await call.model(request.model)
    config = checked({"pooling": request.pooling or "last"})
    inputs = prompts_of(request.input, "input")
    specs = [RequestSpec(request.model, config=config,
                         **({"text": one} if isinstance(one, str) else {"input_ids": one})) for one in inputs]
    async with contextlib.AsyncExitStack() as stack:
        answers = await start_all(call, stack, specs, "input")
        vectors = []
        for answer in answers:
            vectors.append(await _embedding(answer))
            await asyncio.sleep(0)      # others' turn, if all is there
        if request.dimensions is not None and request.dimensions != len(vectors[0]):
            raise not_available("dimensions", f"this model's embeddings have {len(vectors[0])}")
        tokens = sum(len(answer.prompt_ids) for answer in answers)
    data = ({"object": "embedding", "index": i, "embedding": _written(vector, request.encoding_format)}
            for i, vector in enumerate(vectors))
    await call.reply_in_pieces(json_object({
        "object": "list",
        "data": json_list(data, 1),
        "model": request.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }))


async def _embedding(answer: Answer) -> np.ndarray[Any, Any]:
    async for elements in answer:
        for tensors in elements.tensors_from_model_inference:
            vector = np.asarray(tensors["embedding"], dtype=np.float32)
            length = float(np.linalg.norm(vector))
            return vector / length if length else vector
    raise ApiError(500, "the model gave no embedding")


def _written(vector: np.ndarray[Any, Any], form: str | None) -> Any:
    """A vector as a list of numbers, or as OpenAI's client wants it: little-endian float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
