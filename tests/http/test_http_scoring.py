"""Embeddings, reranking, scores and labels over HTTP, before a group of two ranks."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
openai = pytest.importorskip("openai")

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group
from support.encoders import install_encoders
from support.http_helpers import http_server_for, refusal

DOCUMENTS = ["the red house", "what is a cat?", "a", "the dog sat on the mat"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(HTTP client, ClientEngine) of a group with an embedder, a reranker and a classifier."""
    folder = tmp_path_factory.mktemp("models")
    with background_group(["--numa-nodes", "0,0"], timeout=60.0) as group, ClientEngine(group.addresses[0]) as engine:
        install_encoders(engine, folder, "CPU:0,0")
        with http_server_for(group.addresses[0], insecure=True) as address:
            with httpx.Client(base_url=f"http://{address}", timeout=60) as client:
                yield client, engine


def answer(client, path, **body):
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    return found.json()


def test_embeddings_are_those_of_the_engine(served):
    client, engine = served
    wanted = engine.embed("embedder", DOCUMENTS)
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0) as api:
        found = api.embeddings.create(model="embedder", input=DOCUMENTS, encoding_format="base64").data
    values = [np.frombuffer(base64.b64decode(one.embedding), "<f4") for one in found]
    assert np.array(values).tobytes() == wanted.tobytes()
    body = {"model": "embedder", "input": DOCUMENTS[0]}
    for more, vector in (({"prompt_name": "query"}, engine.embed("embedder", DOCUMENTS[:1], prompt_name="query")),
                         ({"dimensions": 7}, engine.embed("embedder", DOCUMENTS[:1], dimensions=7)),
                         ({"normalize": False}, engine.embed("embedder", DOCUMENTS[:1], normalize=False))):
        found = answer(client, "/v1/embeddings", **body, **more)["data"][0]["embedding"]
        np.testing.assert_array_equal(np.array(found, np.float32), vector[0])
    assert refusal(client, "/v1/embeddings", {**body, "prompt_name": "x"})["param"] == "prompt_name"
    assert refusal(client, "/v1/embeddings", {**body, "pooling": "mean"})["message"].count("'auto' and 'cls'") == 1
    long = "the cat " * 300
    assert "tokens" in refusal(client, "/v1/embeddings", {"model": "embedder", "input": long})["message"]
    cut = answer(client, "/v1/embeddings", model="embedder", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 400
    assert "generates no tokens" in refusal(client, "/v1/completions", {"model": "embedder", "prompt": "a"})["message"]


@pytest.mark.parametrize("model", ["reranker", "embedder"])
def test_rerank_as_jina_has_it(served, model):
    client, engine = served
    scores = engine.rerank(model, "what is red?", DOCUMENTS)
    found = answer(client, "/v1/rerank", model=model, query="what is red?", documents=DOCUMENTS)
    order = [one["index"] for one in found["results"]]
    assert order == np.argsort(-scores, kind="stable").tolist()
    for one in found["results"]:
        assert one["relevance_score"] == pytest.approx(float(scores[one["index"]]), abs=1e-6)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert found["usage"]["total_tokens"] > len(DOCUMENTS)
    best = answer(client, "/rerank", model=model, query="what is red?", top_n=2, return_documents=False,
                  documents=[{"text": text} for text in DOCUMENTS])["results"]
    assert [one["index"] for one in best] == order[:2] and "document" not in best[0]
    cut = answer(client, "/v1/rerank", model=model, query="a", documents=["the dog sat " * 2000, "the"])
    assert len(cut["results"]) == 2


def test_rerank_as_cohere_has_it(served):
    client, engine = served
    cohere = pytest.importorskip("cohere")
    api = cohere.ClientV2(api_key="-", base_url=str(client.base_url))
    found = api.rerank(model="reranker", query="what is red?", documents=DOCUMENTS, top_n=3).results
    scores = engine.rerank("reranker", "what is red?", DOCUMENTS)
    assert [one.index for one in found] == np.argsort(-scores, kind="stable")[:3].tolist()
    assert [one.relevance_score for one in found] == pytest.approx([float(scores[one.index]) for one in found])


def test_score(served):
    client, engine = served
    scores = engine.rerank("reranker", "what is red?", DOCUMENTS)
    found = answer(client, "/v1/score", model="reranker", text_1="what is red?", text_2=DOCUMENTS)["data"]
    assert [one["score"] for one in found] == pytest.approx(scores.tolist(), abs=1e-6)
    pairs = answer(client, "/score", model="reranker", text_1=DOCUMENTS[::-1], text_2=DOCUMENTS)["data"]
    one = engine.rerank("reranker", DOCUMENTS[2], [DOCUMENTS[1]])
    assert pairs[1]["score"] == pytest.approx(float(one[0]), abs=1e-6)
    wrong = refusal(client, "/v1/score", {"model": "reranker", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert wrong["param"] == "text_1" and "expected 1, or as many as text_2 (3)" in wrong["message"]


def test_classify(served):
    client, engine = served
    wanted = engine.classify("classifier", DOCUMENTS)
    found = answer(client, "/v1/classify", model="classifier", input=DOCUMENTS)["data"]
    for one, row in zip(found, wanted):
        assert one["probs"] == pytest.approx(row.tolist(), abs=1e-6) and one["num_classes"] == 3
        assert one["label"] == f"LABEL_{row.argmax()}"
    assert answer(client, "/classify", model="classifier", input="a")["data"][0]["label"].startswith("LABEL_")
    assert "no classifier" in refusal(client, "/v1/classify", {"model": "embedder", "input": "a"})["message"]
    wrong = refusal(client, "/v1/rerank", {"model": "classifier", "query": "a", "documents": ["b"]})
    assert wrong["param"] == "model" and "3 labels" in wrong["message"]


def test_the_list_of_models_says_what_they_are_for(served):
    client, _ = served
    tasks = {card["id"]: card["task"] for card in client.get("/v1/models").json()["data"]}
    assert tasks == {"embedder": "embed", "reranker": "rerank", "classifier": "classify"}
