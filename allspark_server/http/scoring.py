"""/v1/rerank in Jina's and Cohere's form, /v1/score and /v1/classify in vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from allspark_client.errors import AllSparkError
from allspark_client.texts import check_reranker, cosines, document_prompts, scores_of, shortened
from allspark_client.types import ModelInfo

from .call import Call, new_id
from .completions import MAX_PROMPTS
from .embeddings import Truncation, outputs_of
from .errors import ApiError, bad_value
from .pieces import json_list, json_object
from .wire import INT32_MAX, Body, Many, ModelName, Wire

Text = Annotated[str, Field(min_length=1)]


class Document(Wire):
    """A document as an object."""

    text: str


Documents = Annotated[Many[str | Document], Field(min_length=1, max_length=MAX_PROMPTS)]


class RerankRequest(Body):
    """A request for the documents in the order in which they answer a query."""

    model: ModelName
    query: Text
    documents: Documents
    top_n: Annotated[int | None, Field(ge=1, le=INT32_MAX, description="Only so many of the best documents")] = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Truncation = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    priority: int | None = None
    user: str | None = None


class ScoreRequest(Body):
    """A request for the scores of pairs of texts: one with many, or each with its own."""

    model: ModelName
    text_1: Text | Annotated[Many[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    text_2: Text | Annotated[Many[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    truncate_prompt_tokens: Truncation = None
    user: str | None = None


class ClassifyRequest(Body):
    """A request for the scores of a classifier's labels."""

    model: ModelName
    input: Text | Annotated[Many[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    truncate_prompt_tokens: Truncation = None
    user: str | None = None


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def _scores(call: Call, request: Any, info: ModelInfo, first: Sequence[str], second: Sequence[str],
                  name: str) -> tuple[np.ndarray[Any, Any], int]:
    """The score of each pair, and how many tokens were computed. `first` has one text, or as many as `second`.

    Of an embedder it is the cosine of the embeddings.
    """
    if not info.labels:
        before, after = document_prompts(info)
        inputs = [{"text": before + one} for one in first] + [{"text": after + one} for one in second]
        found, tokens = await outputs_of(call, request, info, inputs, name)
        vectors = shortened(found, info, None, True)
        return cosines(vectors[:len(first)], vectors[len(first):]), tokens
    try:
        check_reranker(info)
    except AllSparkError as error:
        raise bad_value("model", error.message) from None
    queries = list(first) * (len(second) if len(first) == 1 else 1)
    inputs = [{"text": one, "text_pair": other} for one, other in zip(queries, second)]
    found, tokens = await outputs_of(call, request, info, inputs, name)
    return scores_of(info, found)[:, 0], tokens


async def rerank(call: Call, request: RerankRequest) -> None:
    """The documents by how well they answer a query, the best one first. Documents that are too long are cut."""
    await _rerank(call, request, request.return_documents is not False)


async def rerank_v2(call: Call, request: RerankRequest) -> None:
    """The same in version 2 of Cohere's form: without the texts, unless they are asked for."""
    await _rerank(call, request, bool(request.return_documents))


async def _rerank(call: Call, request: RerankRequest, shown: bool) -> None:
    info = await call.model(request.model)
    texts = [one if isinstance(one, str) else one.text for one in request.documents]
    if not info.labels and not all(texts):
        raise bad_value(f"documents[{texts.index('')}]", "it is empty")
    if request.truncate_prompt_tokens is None:
        request.truncate_prompt_tokens = min(request.max_tokens_per_doc or info.max_length, info.max_length)
    scores, tokens = await _scores(call, request, info, [request.query], texts, "documents")
    best = np.argsort(-scores, kind="stable")[:request.top_n]
    results = ({"index": int(i), "relevance_score": float(scores[i]),
                **({"document": {"text": texts[i]}} if shown else {})} for i in best)
    await call.reply_in_pieces(json_object({
        "id": new_id("rerank"), "model": request.model, "results": json_list(results, 16), "usage": _usage(tokens),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }))


async def score(call: Call, request: ScoreRequest) -> None:
    """The score of each pair of texts."""
    info = await call.model(request.model)
    first, second = ([one] if isinstance(one, str) else list(one) for one in (request.text_1, request.text_2))
    if len(first) not in (1, len(second)):
        raise bad_value("text_1", f"it has {len(first)} texts: expected 1, or as many as text_2 ({len(second)})")
    scores, tokens = await _scores(call, request, info, first, second, "text_2")
    data = ({"index": i, "object": "score", "score": float(value)} for i, value in enumerate(scores))
    await call.reply_in_pieces(json_object({
        "id": new_id("score"), "object": "list", "created": int(time.time()), "model": request.model,
        "data": json_list(data, 16), "usage": _usage(tokens),
    }))


async def classify(call: Call, request: ClassifyRequest) -> None:
    """The most likely label of each text, and the scores of all labels."""
    info = await call.model(request.model)
    if not info.labels:
        raise ApiError(400, f"Model '{request.model}' ({info.architecture}) is no classifier", "model", "invalid_value")
    inputs = [request.input] if isinstance(request.input, str) else request.input
    found, tokens = await outputs_of(call, request, info, [{"text": one} for one in inputs], "input")
    data = ({"index": i, "label": info.labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(row)}
            for i, row in enumerate(scores_of(info, found)))
    await call.reply_in_pieces(json_object({
        "id": new_id("classify"), "object": "list", "created": int(time.time()), "model": request.model,
        "data": json_list(data, 16), "usage": _usage(tokens),
    }))
