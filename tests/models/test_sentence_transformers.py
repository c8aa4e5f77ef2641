"""Embeddings and scores against sentence-transformers itself, where it is installed: texts, prompts and pairs as its
users write them.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

from allspark_client import AsModelConfig
from allspark_server import Engine
from support.encoders import add_wordpiece, encoder

TEXTS = ["The cat sat on the mat.", "what is red?", "a", "the blue house " * 60, "Passage: dogs, cats and numbers 012"]


@pytest.fixture(scope="module")
def engine():
    with Engine() as engine:
        yield engine


def installed(engine, name, directory):
    engine.install_model(AsModelConfig(model_name=name, model_path=str(directory), num_threads=2))
    engine.start_model(name)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert", "embedding-gemma"])
def test_embeddings(engine, tmp_path, name):
    directory = shutil.copytree(encoder(name), tmp_path / name)
    add_wordpiece(directory)
    installed(engine, name, directory)
    peer = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    np.testing.assert_allclose(engine.embed(name, TEXTS), peer.encode(TEXTS), atol=1e-5)
    np.testing.assert_allclose(engine.embed(name, TEXTS, prompt_name="query"), peer.encode(TEXTS, prompt_name="query"),
                               atol=1e-5)
    np.testing.assert_allclose(engine.embed(name, TEXTS, dimensions=20),
                               peer.encode(TEXTS, truncate_dim=20, normalize_embeddings=True), atol=1e-5)
    if name == "bert":
        long = ["the cat " * 500]
        np.testing.assert_allclose(engine.embed(name, long, truncate=True), peer.encode(long), atol=1e-5)
    engine.release_model(name)


@pytest.mark.parametrize("name, identity", [("xlm-roberta-reranker", False), ("modernbert-reranker", True)])
def test_rerankers(engine, tmp_path, name, identity):
    directory = shutil.copytree(encoder(name), tmp_path / name)
    add_wordpiece(directory, 2 if name.startswith("xlm") else 1)
    if identity:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "sentence_transformers": {
            "activation_fn": "torch.nn.modules.linear.Identity"}}))
    installed(engine, name, directory)
    peer = sentence_transformers.CrossEncoder(str(directory), device="cpu")
    wanted = peer.predict([("what is red?", text) for text in TEXTS])
    np.testing.assert_allclose(engine.rerank(name, "what is red?", TEXTS), wanted, atol=2e-5)
    engine.release_model(name)


def test_classifier(engine, tmp_path):
    directory = shutil.copytree(encoder("bert-classes"), tmp_path / "m")
    add_wordpiece(directory)
    installed(engine, "classes", directory)
    peer = sentence_transformers.CrossEncoder(str(directory), device="cpu")
    wanted = peer.predict([("what is red?", text) for text in TEXTS], apply_softmax=True)
    found = engine.classify("classes", [("what is red?", text) for text in TEXTS])
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    engine.release_model("classes")
