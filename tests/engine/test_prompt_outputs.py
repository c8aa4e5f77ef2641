"""Outputs about a request's prompt: log probabilities of its tokens, and an embedding. With every engine, against
transformers. The bits do not depend on chunks, batches, preemption or the prefix cache.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from allspark_client import AllSparkError, AsModelConfig
from support.checkpoints import checkpoint, prompt_of, reference_model

MODEL = "qwen2-gqa-tied"
PLAIN = {"num_threads": 1, "max_step_tokens": 64, "engine_max_batch": 24, "weight_dtype": "float32"}
_names = (f"prompts-{i}" for i in itertools.count())


@pytest.fixture
def install(any_engine):
    installed = []

    def install(**fields) -> str:
        name = next(_names)
        any_engine.install_model(AsModelConfig(model_name=name, model_path=str(checkpoint(MODEL)),
                                               **{**PLAIN, **fields}))
        any_engine.start_model(name)
        installed.append(name)
        return name

    yield install
    for name in installed:
        any_engine.release_model(name)


def ask(engine, name: str, length: int, seed: int = 0, **generate):
    if "pooling" not in generate:
        generate = {"max_new_tokens": 3, "eos_token_id": -1, "do_sample": False, **generate}
    return engine.start_request(name, {"input_ids": prompt_of(length, seed)}, generate)[2]


def answer(results):
    """(log probabilities of the prompt, embedding, ids) of a request with one sample."""
    logprobs, embedding, ids = [], None, []
    for elements in results:
        assert not (elements.prompt_logprobs_list and ids)  # they come first
        logprobs += elements.prompt_logprobs_list
        for tensor in elements.tensors_from_model_inference:
            embedding = tensor["embedding"]
        ids += elements.ids_from_generate
    return logprobs, embedding, ids


def test_prompt_logprobs_are_those_of_transformers(any_engine, install):
    prompt, name = prompt_of(150), install()
    logprobs, _, ids = answer(ask(any_engine, name, 150, prompt_logprobs=4))
    assert len(logprobs) == 149 and len(ids) == 3
    with torch.inference_mode():
        logits = reference_model(checkpoint(MODEL), torch.float64)(torch.tensor([prompt])).logits[0]
    exact = torch.log_softmax(logits, -1).numpy()
    for position, pairs in enumerate(logprobs):
        assert len(pairs) == 5 and pairs[0][0] == prompt[position + 1]
        np.testing.assert_allclose([v for _, v in pairs], exact[position][[i for i, _ in pairs]], atol=2e-3)
        assert [v for _, v in pairs[1:]] == sorted((v for _, v in pairs[1:]), reverse=True)
        assert pairs[1][1] >= exact[position].max() - 2e-3


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_hidden_states_of_transformers(any_engine, install, pooling):
    prompt, name = prompt_of(100), install()
    logprobs, embedding, ids = answer(ask(any_engine, name, 100, pooling=pooling))
    assert not logprobs and not ids and embedding.dtype == np.float32
    model = reference_model(checkpoint(MODEL), torch.float64)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0].numpy()
    exact = hidden[-1] if pooling == "last" else hidden.mean(0)
    np.testing.assert_allclose(embedding, exact, atol=2e-3 * np.abs(exact).max())


def test_the_bits_are_those_of_a_request_alone(any_engine, install):
    """With other chunks, neighbours, a cache too small for all, and prompts that are in the prefix cache already."""
    wanted = [{"prompt_logprobs": 20}, {"pooling": "mean"}, {"pooling": "last"}, {"prompt_logprobs": 0}, {}]
    lengths = [70, 120, 33, 200, 150]
    alone = install(enable_prefix_cache=False)
    expected = [answer(ask(any_engine, alone, n, i, **w)) for i, (n, w) in enumerate(zip(lengths, wanted))]
    for fields in ({"max_step_tokens": 37}, {"cache_memory": 0, "engine_max_length": 256, "engine_max_batch": 3},
                   {"num_threads": 2, "cache_span_size": 16}):
        name = install(**fields)
        for _ in range(2):  # then their prompts are in the cache
            running = [ask(any_engine, name, n, i, **w) for i, (n, w) in enumerate(zip(lengths, wanted))]
            for found, (logprobs, embedding, ids) in zip(map(answer, running), expected):
                assert found[0] == logprobs and found[2] == ids
                assert (embedding is None) == (found[1] is None)
                assert embedding is None or found[1].tobytes() == embedding.tobytes()


def test_samples_share_their_prompts_logprobs(any_engine, install):
    name, seen = install(), {}
    for elements in ask(any_engine, name, 40, prompt_logprobs=1, n=3, do_sample=True, seed=4):
        ids, logprobs = seen.setdefault(elements.sample_index, ([], []))
        ids += elements.ids_from_generate
        logprobs += elements.prompt_logprobs_list
    assert sorted(seen) == [0, 1, 2] and [len(seen[i][1]) for i in range(3)] == [39, 0, 0]
    assert all(len(ids) == 3 for ids, _ in seen.values())


def test_a_prompt_of_one_token_and_of_the_whole_length(any_engine, install):
    name = install(engine_max_length=64)
    assert answer(ask(any_engine, name, 1, prompt_logprobs=2))[0] == []
    assert answer(ask(any_engine, name, 1, pooling="mean"))[1] is not None
    assert answer(ask(any_engine, name, 64, pooling="last"))[1] is not None  # nothing is generated: it may fill all
    with pytest.raises(AllSparkError, match="EXCEED_LIMIT"):
        ask(any_engine, name, 65, pooling="last")
    with pytest.raises(ValueError, match="pooling='last' returns an embedding.* n=2"):
        ask(any_engine, name, 4, pooling="last", n=2)


def test_too_many_log_probabilities_are_refused(any_engine, install):
    name = install(engine_max_length=60_000, cache_memory=1 << 26)
    with pytest.raises(AllSparkError, match="1050000 log probabilities; at most 1000000"):
        ask(any_engine, name, 50_000, prompt_logprobs=20)
