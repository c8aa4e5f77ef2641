"""Requests whose ids and logprob bits must not depend on other requests or settings, and functions that run them."""
from __future__ import annotations

import contextlib
import itertools
import re
import struct
from collections.abc import Iterator
from typing import Any

from allspark_client import AbstractEngine, AsModelConfig
from support.checkpoints import checkpoint, prompt_of
from support.units import UNIT

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.1, "no_repeat_ngram_size": 3}


def bits(values: list[float]) -> list[str]:
    """Hexadecimal float32 representations, which are equal only if the floats are equal bit by bit."""
    return [struct.pack("<f", value).hex() for value in values]


NEW_TOKENS = 20
PROBES: list[tuple[list[int], dict[str, Any]]] = [
    (prompt_of(1), {"seed": 1}),
    (prompt_of(33), {"do_sample": False}),
    (prompt_of(64), {"seed": 2**63 + 7, "temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    (prompt_of(101), {"seed": 3, **PENALTIES, "bad_words_ids": [[5], [7, 9]], "min_length": 110}),
    (prompt_of(230), {"seed": 4, "temperature": 1.5, "n": 2}),
    (prompt_of(700), {"seed": 5}),
]
OTHERS = [(prompt_of(3 + 19 * i, seed=i), {"seed": 100 + i}) for i in range(17)]
ALWAYS = {"max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "logprobs": True, "top_logprobs": 3}
PLAIN = {"num_threads": 1, "enable_prefix_cache": False, "max_step_tokens": 1024, "engine_max_batch": 24, **UNIT}
_names = (f"invariance-{i}" for i in itertools.count())


def start(engine: AbstractEngine, name: str, probe: tuple[list[int], dict[str, Any]]):
    prompt, generate = probe
    return engine.start_request(name, {"input_ids": prompt}, {**ALWAYS, **generate})


def collect(results) -> dict[int, tuple]:
    """Reads a request to its end. Returns for each sample its ids, logprob bits, and top alternatives."""
    samples: dict[int, tuple[list, list, list]] = {}
    for elements in results:
        ids, logprobs, top = samples.setdefault(elements.sample_index, ([], [], []))
        ids += elements.ids_from_generate
        logprobs += bits(elements.token_logprobs_list)
        top += [[(i, *bits([value])) for i, value in pairs] for pairs in elements.log_probs_list]
    assert all(len(ids) == len(logprobs) == len(top) == NEW_TOKENS for ids, logprobs, top in samples.values())
    return samples


def experts_on_the_gpu(engine: AbstractEngine, name: str) -> tuple[int, int]:
    """In a mixed group, since the last call: how many of the experts that rows chose were hot, and of how many rows of
    prompts, over all layers, the GPU computed the experts.
    """
    found = re.search(r"^on the GPU: (\d+) of \d+ experts .* of (\d+) rows", engine.get_op_profiling_info(name), re.M)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@contextlib.contextmanager
def installed(engine: AbstractEngine, model: str, **fields: Any) -> Iterator[str]:
    """A model that runs. If it may have hot experts, some must have been used when the block ends: without any, what
    the block compares would be equal, too.
    """
    name, fields = next(_names), {**PLAIN, **fields}
    engine.install_model(AsModelConfig(model_name=name, model_path=str(checkpoint(model)), **fields))
    try:
        engine.start_model(name)
        yield name
        assert not fields.get("hot_expert_memory") or experts_on_the_gpu(engine, name)[0], "no hot expert was used"
    finally:
        engine.release_model(name)


def run_alone(engine: AbstractEngine, name: str) -> list[dict]:
    return [collect(start(engine, name, probe)[2]) for probe in PROBES]


def run_together(engine: AbstractEngine, name: str, others=()) -> list[dict]:
    """Runs the probes between `others`, all at once; returns what collect() gives for each probe."""
    half = len(others) // 2
    before = [start(engine, name, other) for other in others[:half]]
    probes = [start(engine, name, probe)[2] for probe in PROBES]
    after = [start(engine, name, other) for other in others[half:]]
    outputs = [collect(results) for results in probes]
    for _, handle, results in before + after:
        collect(results)
        engine.release_request(name, handle)
    return outputs
