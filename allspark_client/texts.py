"""Embeddings, scores of documents and labels of texts, on top of an engine's requests."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import AllSparkError, AsStatus, NotLoaded
from .types import ModelInfo

if TYPE_CHECKING:
    from .engine import AbstractEngine

Array = np.ndarray[Any, np.dtype[np.float32]]
#: requests in flight at a time
_IN_FLIGHT = 256
#: names that checkpoints give to the prompts of queries and documents
_PROMPTS = {"query": ("query", "search_query", "s2p_query"), "document": ("document", "passage", "search_document")}


def embed(engine: AbstractEngine, model_name: str, texts: str | Sequence[Any], *, prompt_name: str | None = None,
          prompt: str | None = None, pooling: str = "auto", normalize: bool = True, dimensions: int | None = None,
          truncate: bool = False) -> Array:
    """See AbstractEngine.embed."""
    info = _loaded(engine, model_name)
    if info.labels:
        raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                            f"model {model_name!r} ({info.architecture}) is a classifier with {len(info.labels)} "
                            "labels and gives no embeddings: call classify or rerank")
    before = prompt if prompt is not None else prompt_of(info, prompt_name)
    given = [texts] if isinstance(texts, str) else list(texts)
    inputs = [{"text": before + one} if isinstance(one, str) else {"input_ids": one} for one in given]
    vectors = np.array(outputs(engine, info, inputs, pooling, truncate), np.float32)
    return shortened(vectors.reshape(len(given), info.embedding_size), info, dimensions, normalize)


def rerank(engine: AbstractEngine, model_name: str, query: str, documents: Sequence[str], *,
           truncate: bool = True) -> Array:
    """See AbstractEngine.rerank."""
    if not isinstance(query, str):
        raise TypeError(f"query must be a str, not {type(query).__name__}")
    info, given = _loaded(engine, model_name), list(documents)
    if not info.labels:
        vectors = [embed(engine, model_name, one, prompt=prompt, truncate=truncate)
                   for one, prompt in zip(([query], given), document_prompts(info))]
        return cosines(*vectors)
    check_reranker(info)
    return scores_of(info, outputs(engine, info, [{"text": query, "text_pair": one} for one in given], "auto",
                                   truncate))[:, 0]


def classify(engine: AbstractEngine, model_name: str, texts: str | Sequence[Any], *, truncate: bool = False) -> Array:
    """See AbstractEngine.classify."""
    info = _loaded(engine, model_name)
    if not info.labels:
        raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                            f"model {model_name!r} ({info.architecture}) is no classifier")
    given = [texts] if isinstance(texts, str) else list(texts)
    inputs = [{"text": one} if isinstance(one, str) else {"text": one[0], "text_pair": one[1]}
              if isinstance(one, tuple) else {"input_ids": one} for one in given]
    return scores_of(info, outputs(engine, info, inputs, "auto", truncate))


def _loaded(engine: AbstractEngine, model_name: str) -> ModelInfo:
    """The model's information; a model on demand is loaded for it, as for any request."""
    try:
        return engine.get_model_info(model_name)
    except NotLoaded:
        engine.load_model(model_name)
        return engine.get_model_info(model_name)


def prompt_of(info: ModelInfo, name: str | None) -> str:
    """The checkpoint's prompt of that name; None: its default one, if it has one. ValueError for an unknown name."""
    name = info.default_prompt if name is None else name
    if name and name not in info.prompts:
        known = ", ".join(map(repr, info.prompts)) or "none"
        raise ValueError(f"prompt_name={name!r} is not a prompt of model {info.name!r}; known are {known}")
    return info.prompts[name] if name else ""


def document_prompts(info: ModelInfo) -> tuple[str, str]:
    """The prompts that an embedder's checkpoint has for queries and for documents; its default one if it names none."""
    names = (next((name for name in known if name in info.prompts), None) for known in _PROMPTS.values())
    query, document = (prompt_of(info, name) for name in names)
    return query, document


def check_reranker(info: ModelInfo) -> None:
    """AllSparkError unless the classifier has one label, which says how well a document answers a query."""
    if len(info.labels) != 1:
        raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                            f"model {info.name!r} ({info.architecture}) has {len(info.labels)} labels: a reranker has "
                            "one; call classify")


def outputs(engine: AbstractEngine, info: ModelInfo, inputs: Iterable[dict[str, Any]], pooling: str,
            truncate: bool) -> list[Array]:
    """The model's output for each prompt, in order."""
    config = {"pooling": pooling, **({"truncate_prompt_tokens": info.max_length} if truncate else {})}
    running: deque[Any] = deque()
    found: list[Array] = []

    def take() -> None:
        handle, queue = running.popleft()
        try:
            vector = None
            for elements in queue:  # raises the request's error
                for tensors in elements.tensors_from_model_inference:
                    vector = np.asarray(tensors["embedding"], np.float32)
            if vector is None:
                raise AllSparkError(
                    AsStatus.ALLSPARK_RUNTIME_ERROR,
                    f"model {info.name!r} gave no output: the request ended as {queue.GenerateStatus().name}")
            found.append(vector)
        finally:
            engine.release_request(info.name, handle)

    try:
        for one in inputs:
            if len(running) == _IN_FLIGHT:
                take()
            _, handle, queue = engine.start_request(info.name, one, config)
            running.append((handle, queue))
        while running:
            take()
    finally:
        for handle, _ in running:
            engine.release_request(info.name, handle)
    return found


def shortened(vectors: Array, info: ModelInfo, dimensions: int | None, normalize: bool) -> Array:
    """The first `dimensions` values of each vector, scaled to length 1 if wanted. ValueError if there are fewer."""
    if dimensions is not None:
        size = info.embedding_size or vectors.shape[1]
        if not 0 < dimensions <= size:
            raise ValueError(f"dimensions={dimensions} of model {info.name!r}: allowed are 1 to {size}")
        vectors = vectors[:, :dimensions]
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return vectors


def cosines(first: Array, second: Array) -> Array:
    """The cosine of each pair of vectors of length 1. `first` has one, or as many as `second`."""
    sums: Array = (first * second).sum(axis=1)
    return sums


def scores_of(info: ModelInfo, logits: Sequence[Array] | Array) -> Array:
    """Scores [texts, labels] of a classifier's logits."""
    values = 2 if info.score_function == "odds" else len(info.labels)
    x = np.array(logits, np.float64).reshape(len(logits), values)
    if info.score_function == "odds":
        x = 1 / (1 + np.exp(x[:, 1:] - x[:, :1]))
    elif info.score_function == "sigmoid":
        x = 1 / (1 + np.exp(-x))
    elif info.score_function == "softmax":
        x = np.exp(x - x.max(axis=1, keepdims=True)) if len(x) else x
        x = x / x.sum(axis=1, keepdims=True)
    return x.astype(np.float32)
