"""Speculation changes no bit: 40 requests alone, together, in random order and with a cache that is too small; without
drafts, with prompt lookup and with a draft model; on one rank and on two. Counters prove that drafts were accepted and
rejected, rows discarded and sequences preempted.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allspark_client import AbstractEngine, AllSparkError, AsModelConfig
from allspark_server import Engine
from allspark_server.weights.asgraph import from_float32, to_float32
from allspark_server.weights.safetensors import SafetensorsFile, write_safetensors
from support.checkpoints import checkpoint, prompt_of, write_checkpoint
from support.invariance import PENALTIES, bits
from support.tiny_configs import CONFIGS, Spec
from support.units import GPUS, SHARED, UNIT

MODEL, NEW_TOKENS, SPAN = "qwen2-gqa-tied", 40, 16
DTYPES = ("auto", "float16") if GPUS and not SHARED else ("auto",)
KINDS = ("off", "prompt_lookup", "draft")


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Repetitive prompts, so that lookup finds drafts; greedy and sampled, with every parameter that changes a
    sample.
    """
    rng = random.Random(3)
    stops = [[token] for token in range(0, 300, 9)]
    ways: list[dict[str, Any]] = [
        {"do_sample": False}, {"temperature": 0.3}, {"temperature": 0.9, "top_k": 8},
        {"top_p": 0.6, "temperature": 0.5},
        {"temperature": 0.2, **PENALTIES}, {"do_sample": False, "repetition_penalty": 1.3, "min_length": 90},
        {"do_sample": False, "bad_words_ids": [[5], [7, 9]]}, {"temperature": 0.4, "stop_words_ids": stops},
    ]
    made = []
    for i in range(40):
        piece = prompt_of(rng.randrange(4, 40), seed=i)
        prompt = (piece * 4)[: rng.randrange(len(piece), 4 * len(piece) + 1)]
        made.append((prompt, {"seed": i, **ways[i % len(ways)]}))
    return made


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory) -> Path:
    """The model with noise on its weights, which makes a draft model that is often right and often wrong."""
    folder = tmp_path_factory.mktemp("draft")
    source = checkpoint(MODEL)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    file = SafetensorsFile(source / "model.safetensors")
    rng = np.random.default_rng(0)
    names, data = [], []
    for name in sorted(file.names()):
        tensor = file.get(name)
        values = to_float32(np.array(tensor.data), tensor.dtype)
        noisy = values + 0.02 * values.std() * rng.standard_normal(values.shape).astype(np.float32)
        names.append((name, tensor.dtype, tuple(values.shape)))
        data.append([from_float32(np.ascontiguousarray(noisy), tensor.dtype)])
    write_safetensors(folder / "model.safetensors", names, {"format": "pt"}, data)
    return folder


def config(speculation: str, draft: Path, **fields: Any) -> AsModelConfig:
    defaults = {"num_threads": 1, "engine_max_batch": 12, "engine_max_length": 256, "cache_span_size": SPAN,
                "speculation": speculation, "draft_model": str(draft) if speculation == "draft" else "", **UNIT}
    return AsModelConfig("m", str(checkpoint(MODEL)), **{**defaults, **fields})


def run(engine: AbstractEngine, order: list[int], together: bool) -> dict[int, tuple]:
    """Ids, bits of the logprobs and of the best alternatives, and finish reason, by request."""
    always = {"max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "logprobs": True, "top_logprobs": 2}
    all_requests, started, outputs = requests(), {}, {}

    def take(i: int) -> None:
        handle, queue = started[i]
        ids, logprobs, top = [], [], []
        for elements in queue:
            ids += elements.ids_from_generate
            logprobs += bits(elements.token_logprobs_list)
            top += [[(t, *bits([value])) for t, value in pairs] for pairs in elements.log_probs_list]
        assert len(ids) == len(logprobs) == len(top) <= NEW_TOKENS
        assert queue.RequestStatInfo().generated_token_length == len(ids)      # usage is cut at the stop, too
        outputs[i] = ids, logprobs, top, queue.FinishReason()
        engine.release_request("m", handle)

    for i in order:
        prompt, generate = all_requests[i]
        _, handle, queue = engine.start_request("m", {"input_ids": prompt}, {**always, **generate})
        started[i] = handle, queue
        if not together:
            take(i)
    for i in order if together else ():
        take(i)
    return outputs


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(dtype) -> dict[int, tuple]:
    with Engine() as engine:
        engine.install_model(config("off", Path(), weight_dtype=dtype))
        engine.start_model("m")
        outputs = run(engine, list(range(40)), together=False)
    assert {reason for *_, reason in outputs.values()} == {"length", "stop_word"}
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind, perturbed, expected, dtype):
    order = list(range(40))
    with Engine() as engine:
        engine.install_model(config(kind, perturbed, weight_dtype=dtype))
        engine.start_model("m")
        counters = engine._models["m"].scheduler.counters
        if kind != "off":
            assert run(engine, order, together=False) == expected
        random.Random(5).shuffle(order)
        assert run(engine, order, together=True) == expected
        drafted, accepted, discarded = counters.drafted_tokens, counters.accepted_tokens, counters.discarded_rows
        assert discarded > 0 or engine._group.depth == 1   # one processor: steps do not overlap
        assert (0 < accepted < drafted) if kind != "off" else drafted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_too_small(kind, perturbed, expected, dtype):
    """Too small by half: sequences are preempted and computed again."""
    order = list(range(40))
    random.Random(6).shuffle(order)
    fields = {"num_threads": 2, "engine_max_length": 208, "weight_dtype": dtype}
    with Engine() as engine:
        engine.install_model(config(kind, perturbed, **fields))
        spans = engine.get_model_info("m").num_spans
        per_span = engine.get_model_info("m").cache_bytes // spans
        engine.release_model("m")
        small = 26 * per_span * (2 if kind == "draft" else 1)   # the draft model's spans count, too
        engine.install_model(config(kind, perturbed, **fields, cache_memory=small))
        assert engine.get_model_info("m").num_spans <= 27
        engine.start_model("m")
        assert run(engine, order, together=True) == expected
        counters = engine._models["m"].scheduler.counters
        assert counters.preemptions > 0
        assert kind == "off" or 0 < counters.accepted_tokens < counters.drafted_tokens


@pytest.mark.parametrize("kind", KINDS[1:])
def test_two_ranks(kind, perturbed, engine_of, dtype):
    """Two ranks, compared with themselves without drafts. Ranks that share a GPU compute fewer requests, together."""
    engine, order = engine_of("client-2"), list(range(16 if SHARED else 40))
    outputs = []
    for each in ("off", kind):
        engine.install_model(config(each, perturbed, weight_dtype=dtype))
        engine.start_model("m")
        outputs.append(run(engine, order, together=SHARED or each != "off"))
        engine.release_model("m")
        random.Random(7).shuffle(order)
    assert outputs[0] == outputs[1]


def test_a_draft_model_must_have_the_vocabulary(tmp_path):
    spec = CONFIGS[MODEL]
    other = write_checkpoint(tmp_path / "m", Spec(spec.family, {**spec.fields, "vocab_size": 300}))
    with Engine() as engine, pytest.raises(AllSparkError, match="vocabulary of 300 tokens.*must be equal"):
        engine.install_model(config("draft", other))
