"""Layers with windows on the GPU: cache groups with tables of their own, whose spans are reused once windows have
passed them; and the ops of families with such layers.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from allspark_server.runtime.plan import StepPlan
from reference.plan import SAMPLE
from reference.toy import Toy, item, plan, spans_for, start
from support.gpu_toys import compiled
from support.seed import SEED

pytestmark = pytest.mark.cuda

VOCAB = 53
FULL, FIRST, SECOND = ("full", 0), ("sliding", 20), ("sliding", 300)
CACHES = [("float32", 1e-4), ("bfloat16", 5e-2), ("float16", 5e-2 / 8), ("int8", 0.1), ("uint4", 0.7), ("float8", 0.4)]


@pytest.fixture(autouse=True)
def seed():
    print(f"ALLSPARK_TEST_SEED={SEED}")


def layers(dim: int, groups, last: float = 0.0) -> Toy:
    """An attention layer per group, all with number 0, on top of each other; `last` is the last id's embedding."""
    own = Toy(SEED, groups)
    table = own.rng.normal(size=(VOCAB, 4 * dim)) / 4
    table[VOCAB - 1] = last
    x = own.embedding(VOCAB, 4 * dim, table, scale=4.0)
    for group, (_, window) in enumerate(groups):
        attended = own.attention(x, 2, 1, dim, cache_group=group, window=window)
        made = own.op("linear", (attended,), 4 * dim, (own.matrix(4 * dim, 2 * dim),))
        own.op("add", (x, made))
    own.finish(x)
    return own


def spans_of(groups, first: int, begin: int, end: int) -> tuple[list[int], list[list[int]]]:
    """New spans for positions [begin, end); each group uses another part of the cache."""
    fresh = [list(range(first + 80 * group + -(-begin // 16), first + 80 * group + -(-end // 16)))
             for group in range(len(groups))]
    return fresh[0], fresh[1:]


def logits_of(gpu, groups, prompt, chunks, first: int = 0, slot: int = 0, others=None) -> np.ndarray:
    """Logits of the last row of each chunk; others(begin) gives further items and sections for the step at a
    position.
    """
    found, begin = [], 0
    for chunk in chunks:
        end = min(begin + chunk, len(prompt))
        spans, more = spans_of(groups, first, begin, end)
        work, new = others(begin) if others else ([], [])
        work = [item(slot, end - begin, SAMPLE if end == len(prompt) else 0, spans=spans, other_spans=more), *work]
        result = gpu.step(plan(work, [*([start(slot, prompt)] if not begin else []), *new]), True)
        if end == len(prompt):
            found.append(result.logits[0])
        begin = end
    return np.array(found)


@functools.cache
def expected_logits(dim: int, groups, prompt: tuple[int, ...]) -> np.ndarray:
    """The reference backend's logits, which take a second."""
    spans = spans_for(len(prompt))
    return layers(dim, groups).runner(num_spans=(64,) * len(groups), max_length=1024, max_rows=1024).step(
        plan([item(0, len(prompt), SAMPLE, spans=spans, other_spans=[spans] * (len(groups) - 1))],
             [start(0, prompt)])).logits[0]


@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("cache, tolerance", CACHES)
@pytest.mark.parametrize("groups", [(FULL, FIRST), (SECOND, FULL, FIRST), (FIRST,)], ids=len)
def test_groups_against_the_reference(groups, cache, tolerance, dim):
    """At once, in chunks, and in decode; a sequence may start with spans that its window has already passed."""
    prompt = np.random.default_rng(SEED + 1).integers(0, VOCAB - 1, 700).tolist()
    own = layers(dim, groups)
    gpu = compiled(own, cache, long=True)
    once = logits_of(gpu, groups, prompt, [700])
    gpu.step(StepPlan(free=[0], groups=len(groups)).encode())
    parts = logits_of(gpu, groups, prompt, [333, 16, 1, 300, 49, 1])
    assert once.tobytes() == parts.tobytes()
    expected = expected_logits(dim, groups, tuple(prompt))
    error = np.abs(once[0] - expected).max() / np.sqrt(np.mean(expected**2))
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance


@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("cache", [cache for cache, _ in CACHES])
def test_spans_behind_a_window_may_be_anybodys(cache, dim):
    """Another sequence overwrites them with NaN."""
    groups = (FIRST,)
    rng = np.random.default_rng(SEED + 2)
    prompt, other = rng.integers(0, VOCAB - 1, 700).tolist(), [VOCAB - 1] * 600
    results = []
    for overwritten in (False, True):
        own = layers(dim, groups, last=3e38 if overwritten else 0.0)  # times 4: infinite
        gpu = compiled(own, cache, long=True)

        def others(begin: int):
            """From position 640 on, another sequence has the spans of the first 600 positions."""
            if begin < 640 or not overwritten:
                return [], []
            at = (begin - 640) * 10
            rows = 10 if begin < 699 else 1
            entering = [start(1, other)] if at == 0 else []
            return [item(1, rows, 0, spans=list(range(-(-at // 16), -(-(at + rows) // 16))))], entering

        results.append(logits_of(gpu, groups, prompt, [640, *[1] * 60], others=others).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("width", [1, 7, 31, 96, 257])
def test_gates_of_gelu_and_soft_caps(width):
    from support.gpu_toys import compare

    own = Toy(SEED)
    both = own.embedding(VOCAB, 2 * width, 4 * own.rng.normal(size=(VOCAB, 2 * width)))
    own.finish(own.op("soft_cap", (own.op("gelu_tanh_mul", (both,), width),), cap=2.5))
    compare(own)


@pytest.mark.parametrize("width", [1, 7, 31, 96, 257])
def test_products_of_values(width):
    from support.gpu_toys import compare

    own = Toy(SEED)
    x = own.embedding(VOCAB, width, 4 * own.rng.normal(size=(VOCAB, width)))
    own.finish(own.op("multiply", (x, own.op("linear", (x,), width, (own.matrix(width, width),)))))
    compare(own)


@pytest.mark.parametrize("q_heads, kv_heads, dim", [(1, 1, 2), (6, 2, 24), (40, 8, 128)])
def test_norms_of_all_queries_and_of_all_keys(q_heads, kv_heads, dim):
    from support.gpu_toys import compare

    own, q, k = Toy(SEED), q_heads * dim, kv_heads * dim
    x = own.embedding(VOCAB, q + 2 * k, own.rng.normal(size=(VOCAB, q + 2 * k)))
    sums = own.op("qk_square_sums", (x,), 2, q_columns=q, k_offset=q, k_columns=k)
    own.op("all_reduce", (sums,))
    own.op("qk_norm", (x, sums), None, (own.vector(q), own.vector(k)), eps=1e-5, q_width=q, k_width=k, q_columns=q,
           k_columns=k)
    own.finish(x)
    compare(own)


# -- whole models ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mistral-window", "ministral", "smollm3-window-biases", "gemma2", "gemma2-uncapped",
                                  "gemma3", "gemma3-capped", "olmo2", "olmo2-mha", "olmo3", "olmo3-mha", "phi3-window",
                                  "glm4"])
def test_logits_and_greedy_ids_in_float32(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.checkpoints import check_logits, checkpoint, prompt_of, reference_logits
    from support.driver import Driver
    from support.greedy import check_greedy, reference_greedy

    directory = checkpoint(name)
    with Driver(directory, weight_dtype="float32", compute_unit="CUDA:0") as gpu:
        assert name in ("olmo2", "olmo2-mha", "glm4") or max(gpu.info.cache_windows) > 0
        for length in (1, 33, 129, 300, 700):
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference_logits(directory, prompt))
        prompt = prompt_of(64)
        check_greedy(gpu.generate(prompt, 24)[0], reference_greedy(directory, prompt, 24))
