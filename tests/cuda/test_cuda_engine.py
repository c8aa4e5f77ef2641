"""The GPU through Engine and ClientEngine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client import AsModelConfig, ClientEngine
from allspark_server import Engine
from support.checkpoints import checkpoint, prompt_of

pytestmark = pytest.mark.cuda
FIELDS = {"compute_unit": "CUDA:0", "engine_max_length": 512}
REQUESTS = [({"do_sample": False}, 30), ({"seed": 3, "temperature": 1.2, "top_k": 20, "logprobs": True}, 65),
            ({"seed": 4, "top_p": 0.9, "repetition_penalty": 1.2, "top_logprobs": 3, "logprobs": True}, 7)]


def answers(engine, name: str, requests=REQUESTS) -> list:
    """Ids and logprobs of all requests, run at once."""
    started = [engine.start_request(name, {"input_ids": prompt_of(length)},
                                    {"max_new_tokens": 40, "eos_token_id": -1, **config})[2]
               for config, length in requests]
    found = []
    for results in started:
        ids, logprobs = [], []
        for elements in results:
            ids += elements.ids_from_generate
            logprobs += elements.token_logprobs_list
        found.append((ids, logprobs))
    return found


@pytest.mark.parametrize("name, dtype", [("qwen3-bf16-sharded", "bfloat16"), ("llama-fp16-heads-of-64", "float16")])
def test_engine_and_client_give_the_same_bytes(name, dtype):
    directory = str(checkpoint(name))
    engine = Engine()
    engine.install_model(AsModelConfig(model_name="m", model_path=directory, **FIELDS))
    engine.start_model("m")
    info = engine.get_model_info("m")
    assert info.weight_dtype == info.cache_dtype == dtype
    assert info.isa.startswith("sm_") and info.weight_bytes > 0 and info.cache_bytes > 0
    expected = answers(engine, "m")
    assert [len(ids) for ids, _ in expected] == [40] * 3
    fingerprint = engine.fingerprint("m")
    engine.close()
    from allspark_launch.group.background import background_group

    with background_group(["--model", directory, "--gpus", "0", "--model-name", "m", "--max-length", "512"],
                          timeout=120.0) as group, ClientEngine(group.addresses[0]) as client:
        assert client.get_model_info("m").isa == info.isa
        assert answers(client, "m") == expected
    assert fingerprint


@pytest.mark.parametrize("name, draft", [("llama-fp16-heads-of-64", "llama-bf16-heads-of-64"),
                                         ("llama-bf16-heads-of-64", "llama-fp16-heads-of-64")])
def test_drafts_of_another_type(name, draft):
    """The draft model has the same weights with other rounding: many drafts are right, and no bit changes."""
    found = []
    for fields in ({}, {"speculation": "draft", "draft_model": str(checkpoint(draft))}):
        with Engine() as engine:
            engine.install_model(AsModelConfig(model_name="m", model_path=str(checkpoint(name)), cache_memory=64 << 20,
                                               **FIELDS, **fields))
            engine.start_model("m")
            found.append(answers(engine, "m"))
            accepted = engine._models["m"].scheduler.counters.accepted_tokens
    assert found[0] == found[1] and accepted > 0


def test_models_beside_each_other():
    """Kernels of two models may overlap without waiting for each other: each has the bytes that it has alone."""
    names = {"dense": "qwen3-bf16-sharded", "experts": "qwen3-moe"}
    fields = {**FIELDS, "weight_dtype": "bfloat16", "cache_memory": 64 << 20}
    with Engine() as engine:
        for name, directory in names.items():
            engine.install_model(AsModelConfig(model_name=name, model_path=str(checkpoint(directory)), **fields))
            engine.start_model(name)
        alone = {name: answers(engine, name) for name in names}
        one = {name: answers(engine, name, REQUESTS[:1]) for name in names}
        with ThreadPoolExecutor(2) as pool:
            for requests, expected in ((REQUESTS, alone), (REQUESTS[:1], one)) * 3:
                assert dict(zip(names, pool.map(lambda name: answers(engine, name, requests), names))) == expected
