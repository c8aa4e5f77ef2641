"""Mixed groups with a GPU: it computes the model, CPUs its routed experts. Ranks are threads of this process."""
from __future__ import annotations

import time

import numpy as np
import pytest

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver, together

pytestmark = pytest.mark.cuda

SIZES = {"engine_max_length": 512, "cache_memory": 16 << 20, "num_threads": 2, "max_step_tokens": 128}
PROMPT = prompt_of(75)


def driver(name: str, experts: int, unit: str = "CUDA:0", **fields) -> Driver:
    nodes = ",".join(["0"] * experts)
    return Driver(checkpoint(name), 1 + experts, compute_unit=f"{unit}+CPU:{nodes}", **{**SIZES, **fields})


@pytest.mark.parametrize("name, form", [
    ("qwen3-moe", {}), ("qwen3-moe", {"weight_dtype": "bfloat16"}),
    ("qwen3-moe", {"weight_dtype": "int4", "weight_group_size": 32}), ("glm4-moe", {}), ("qwen2-moe", {}),
    ("gpt-oss", {}), ("mixtral", {}), ("granite-moe", {})])
def test_a_gpu_is_near_a_cpu_and_its_bits_do_not_depend_on_chunks(name, form):
    with driver(name, 2, "CPU:0", **form) as own:
        _, near = own.generate(PROMPT, 1)
    with driver(name, 2, **form) as mixed:
        tokens, logits = mixed.generate(PROMPT, 8)
        again, rows = mixed.generate(PROMPT, 8, 17)
    spread = 0.03 if form else 0.003
    np.testing.assert_allclose(logits[0], near[0], atol=spread * np.abs(near[0]).max(), rtol=0)
    assert tokens == again
    np.testing.assert_array_equal(np.stack(logits), np.stack(rows))


def test_bits_do_not_depend_on_the_batch():
    prompts = [prompt_of(5), prompt_of(40, seed=3)]
    with driver("glm4-moe", 1) as mixed:
        both = together(mixed, prompts, 16)
        alone = [together(mixed, [prompt], 64)[0] for prompt in prompts]
    np.testing.assert_array_equal(np.stack(both), np.stack(alone))


def test_warm_up_and_graphs():
    with driver("qwen3-moe", 3) as mixed:
        expected = mixed.generate(PROMPT, 6)
        left = 1
        while left:
            steps = [mixed.pool.submit(runner.warm_up, 8) for runner in mixed.runners]
            done, total = steps[0].result()
            assert all(step.result() == (0, 0) for step in steps[1:])
            left = total - done
        began = time.perf_counter()
        tokens, logits = mixed.generate(PROMPT, 6)
        assert time.perf_counter() - began < 10
    assert tokens == expected[0]
    np.testing.assert_array_equal(np.stack(logits), np.stack(expected[1]))


def test_a_rejected_plan_leaves_the_ranks_in_step():
    with driver("qwen3-moe", 1) as mixed:
        before = mixed.generate(PROMPT, 2)[0]
        steps = [mixed.pool.submit(runner.step, b"no plan", False) for runner in mixed.runners]
        with pytest.raises(ValueError):
            steps[0].result()
        assert steps[1].exception() is None and mixed.generate(PROMPT, 2)[0] == before
