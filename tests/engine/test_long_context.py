"""Contexts of 131,072 tokens: rotary angles of the last positions, memory, and retrieval by a model made for that
(support/induction.py) with every type of cache; the same bits however it is computed.

By default contexts are shorter; -m "slow or not slow" runs all lengths.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from allspark_client import AsModelConfig
from allspark_client.types import AsCacheMode
from allspark_server import Engine, _native
from allspark_server.models import read_config
from allspark_server.models.rotary import rotary_of
from allspark_server.runtime.plan import Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from support.induction import HEAD_DIM, KEYS, LENGTH, SCALINGS, THETA, haystack, induction_model

slow = pytest.mark.slow
SHORT = 8_192  # twice the length that scaling begins from
CACHES = {
    "float32": {"cache_dtype": "float32"},
    "bfloat16": {"cache_dtype": "bfloat16"},
    "int8": {"cache_mode": AsCacheMode.AsCacheQuantI8},
    "uint4": {"cache_mode": AsCacheMode.AsCacheQuantU4},
}
SCALED = [name for name in SCALINGS if name != "none"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints by rotary scaling and the first layer's window."""
    made = {}

    def get(scaling: str, window: int = 0):
        if (scaling, window) not in made:
            made[scaling, window] = induction_model(tmp_path_factory.mktemp("induction") / "m", scaling, window)
        return made[scaling, window]

    return get


# -- angles ------------------------------------------------------------------------------------------------------------
def published(scaling: str) -> tuple[np.ndarray, float]:
    """Radians per position and the factor of cosines and sines, in float64: YaRN (Peng et al., 2023) and Llama 3.1."""
    fields, plain = SCALINGS[scaling], THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = fields["original_max_position_embeddings"] * plain / (2 * np.pi)  # over the original length
    if scaling == "llama3":
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        kept, factor = np.clip((turns - low) / (high - low), 0, 1), 1.0
    else:  # those that turn more than 32 times are kept, less than once are scaled, between them by their number
        def pair(turns: float) -> float:
            return HEAD_DIM * np.log(4096 / (turns * 2 * np.pi)) / (2 * np.log(THETA))

        first, last = np.floor(pair(32)), np.ceil(pair(1))
        kept = 1 - np.clip((np.arange(HEAD_DIM // 2) - first) / (last - first), 0, 1)
        factor = 0.1 * np.log(fields["factor"]) + 1
    return plain * (kept + (1 - kept) / fields["factor"]), factor


@pytest.mark.parametrize("scaling", SCALED)
def test_angles_at_the_last_positions(scaling, models):
    """Angles equal float64's but for the rounding of position * frequency to float32, as in transformers."""
    rotary = rotary_of(read_config(models(scaling)).rope, HEAD_DIM)
    expected, factor = published(scaling)
    np.testing.assert_allclose(rotary.inv_freq, expected, rtol=1e-6)  # computed in float32
    assert rotary.attention_factor == pytest.approx(factor, rel=1e-12)
    executor = _native.Executor()
    frequencies = executor.add_vector(np.asarray(rotary.inv_freq, np.float32))
    table = executor.add_matrix(1, HEAD_DIM, "float32", 0)
    ones = np.concatenate([np.ones(HEAD_DIM // 2), np.zeros(HEAD_DIM // 2)]).astype(np.float32)
    executor.fill_matrix(table, ones[None], "F32")
    x, out = executor.add_tensor(HEAD_DIM), executor.add_tensor(HEAD_DIM, _native.OUTPUT_ROWS)
    executor.add_op("rotary_table", [], [], [frequencies], {"rotary_dim": HEAD_DIM,
                                                            "attention_factor": rotary.attention_factor})
    executor.add_op("embedding", [], [x], [table], {"vocab_begin": 0})
    executor.add_op("rope", [x], [x], [], {"offset": 0, "heads": 1, "head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM})
    executor.add_op("select_rows", [x], [out], [], {})
    executor.add_op("hidden_states", [out], [], [], {})
    executor.add_op("sample", [out], [], [], {"vocab_begin": 0, "vocab_size": HEAD_DIM})
    executor.allocate(max_rows=64, max_slots=1, max_length=LENGTH, span_size=128, num_spans=1, cache_dtype="float32",
                      max_outputs=64)
    first = LENGTH - 128
    for begin in (first, first + 64):
        new = [NewSlot(0, [0] * LENGTH, SamplingParams(prompt_len=LENGTH).encode(), first)] if begin == first else []
        spans = [0] * (LENGTH // 128) if begin == first else []
        step = StepPlan(new=new, work=[WorkItem(0, 64, int(Flag.HIDDEN), outputs=64, spans=spans)])
        rotated = executor.step(step.encode()).hidden
    positions = np.arange(LENGTH - 64, LENGTH)
    angles = positions[:, None] * np.asarray(rotary.inv_freq, float)
    found = np.asarray(rotated, float) / rotary.attention_factor
    rounded = (positions[:, None].astype(np.float32) * np.asarray(rotary.inv_freq, np.float32)).astype(float)
    np.testing.assert_allclose(found, np.concatenate([np.cos(rounded), np.sin(rounded)], 1), rtol=0, atol=2e-7)
    error = np.abs(found - np.concatenate([np.cos(angles), np.sin(angles)], 1))
    assert (error <= np.tile(angles, 2) * 2.0**-24 + 2e-7).all()  # at most 0.008 for the fastest pair


# -- what was said long ago --------------------------------------------------------------------------------------------
def said(path, length: int, keys=KEYS, **fields) -> dict[int, tuple[list[int], list[float]]]:
    """The token after each key at the end of a haystack, and log probabilities. The haystack is the same for all keys,
    so a prefix cache computes it once.
    """
    engine, name = Engine(), "long"
    config = AsModelConfig(**{"model_name": name, "model_path": str(path), "engine_max_length": length + 8,
                              "engine_max_batch": 1, "max_step_tokens": 512, "num_threads": 2,
                              "weight_dtype": "float32", "enable_prefix_cache": True, "cache_span_size": 32, **fields})
    found = {}
    with engine:
        engine.install_model(config)
        engine.start_model(name)
        for key in keys:
            prompt = [*haystack(length - 1), key]
            answer = list(engine.start_request(name, {"input_ids": prompt}, {
                "max_new_tokens": 3, "do_sample": False, "logprobs": True, "top_logprobs": 1, "eos_token_id": -1})[2])
            found[key] = ([i for part in answer for i in part.ids_from_generate],
                          [p for part in answer for p in part.token_logprobs_list])
        engine.stop_model(name)
        engine.release_model(name)
    return found


def check(found) -> None:
    for key, (ids, logprobs) in found.items():
        assert ids[0] == KEYS[key] and logprobs[0] > -0.01, (key, ids, logprobs)


@pytest.mark.parametrize("length", [SHORT, pytest.param(LENGTH, marks=slow)])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("scaling", SCALED)
def test_what_was_said_is_found_through_every_type_of_cache(scaling, cache, length, models):
    if length == SHORT and scaling != "yarn" and cache != "uint4":
        pytest.skip("one of each")
    check(said(models(scaling), length, **CACHES[cache]))


@pytest.mark.parametrize("length", [SHORT, pytest.param(LENGTH, marks=slow)])
def test_what_was_said_is_found_beside_a_window(length, models):
    """The first layer keeps the spans of two positions; the bits are those of a layer that keeps all."""
    found = said(models("yarn", 2), length, max_step_tokens=256)
    check(found)


@slow
def test_without_scaling_it_is_not_found(models):
    """Without scaled rotary embeddings the model fails, so the other tests do test scaling."""
    found = said(models("none"), LENGTH, keys=[0])
    assert found[0][0][0] != KEYS[0] or found[0][1][0] < -0.01


@pytest.mark.parametrize("length", [SHORT, pytest.param(LENGTH, marks=slow)])
def test_the_same_bits_however_it_is_computed(length, models):
    """With other chunks, without prefix cache, with drafts."""
    path, last = models("llama3"), list(KEYS)[-1:]
    expected = said(path, length)
    check(expected)
    other = said(path, length, keys=last, max_step_tokens=333, enable_prefix_cache=False, num_threads=1,
                 cache_span_size=128, speculation="prompt_lookup")  # fmt: skip
    assert {key: expected[key] for key in last} == other


# -- memory ------------------------------------------------------------------------------------------------------------
MEASURED = """
    import resource, sys
    sys.path[:0] = {paths!r}
    from allspark_client import AsModelConfig
    from allspark_server.runtime import device
    from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
    from allspark_server.runtime.runner import ModelRunner

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    config = AsModelConfig(model_name="m", model_path={path!r}, engine_max_length={length}, engine_max_batch=1,
                           max_step_tokens=512, num_threads=2, weight_dtype="float32", cache_dtype="float32")
    runner = ModelRunner(config)
    announced, reserve = [], device.Cpus.reserve
    device.Cpus.reserve = lambda self, name, size: announced.append(size) or reserve(self, name, size)
    device.native_library()
    before = resident()
    spans = runner.load()
    info = runner.allocate_cache(spans)
    size, length, computed, held = info.span_size, {length}, 0, 0
    new = [NewSlot(0, [7] * length, SamplingParams(prompt_len=length).encode())]
    step = {step}
    while computed < length:
        rows = min(step, length - computed)
        needed = -(-(computed + rows) // size)
        runner.step(StepPlan(new=new, work=[WorkItem(0, rows, SAMPLE if computed + rows == length else 0,
                                                     spans=list(range(held, needed)))]).encode())
        new, held, computed = [], needed, computed + rows
    print(announced[0], resident() - before, spans, info.num_spans, info.cache_bytes)
"""


@pytest.mark.parametrize("length", [SHORT, pytest.param(LENGTH, marks=slow)])
def test_memory_is_what_was_announced(length, models):
    """One request of full length: the growth of the process between loading and the end of the request."""
    script = textwrap.dedent(MEASURED).format(paths=sys.path, path=str(models("yarn")), length=length, step=512)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    announced, taken, spans, total, cache = map(int, done.stdout.split())
    assert spans == total == -(-length // 32) and cache <= announced
    assert cache < taken < announced + (8 << 20), (announced, taken)  # beside it Python's own, and the history
