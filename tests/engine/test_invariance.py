"""Same request, same bytes: a request's ids and logprob bits depend on nothing but the request.

Runs against one process and against a group of two ranks, each compared with itself; and an Engine against a group of
one rank. ALLSPARK_TEST_UNIT=CUDA:0 runs it on a GPU, alone and behind a server; CUDA:0,1 in a group of two;
CUDA:0+CPU:0,0 in a mixed group whose hot experts move meanwhile. Every probe is compared with its first run: alone,
with its prompt in one chunk, one thread and no prefix cache.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from allspark_client import AbstractEngine, GenerateConfig, GenerateRequestStatus
from allspark_client.request import RequestSpec
from support.checkpoints import prompt_of
from support.invariance import (
    ALWAYS,
    NEW_TOKENS,
    OTHERS,
    PROBES,
    bits,
    collect,
    installed,
    run_alone,
    run_together,
    start,
)
from support.units import EXPERT_RANKS, GPUS, UNIT

MODELS = ("qwen2-gqa-tied", "llama-dynamic", "qwen3-bf16-sharded")
FAMILIES = ("glm4-moe", "minimax-m2", "seed-oss", "granite", "ernie", "ernie-moe", "hunyuan-biases",
            "exaone4", "arcee", "dots1", "hunyuan-moe", "afmoe")
RECURRENT = ("qwen3-next", "qwen3-5-moe", "lfm2-moe", "nemotron-h", "granite-hybrid", "bamba", "falcon-h1",
             "kimi-linear")
LATENT = ("deepseek-v2", "deepseek-v3-heads", "deepseek-v32", "glm-moe-dsa")
COMPRESSED = ("deepseek-v4", "deepseek-v4-wide")
GEMMA4 = ("gemma4", "gemma4-moe", "gemma4-small")
POOLS = () if GPUS or EXPERT_RANKS else ("glm5-next", "glm5-next-wide")  # only CPUs compute attention to pools
SLOW_MODELS = ("phi3-longrope", "glm4", "gemma2", "gemma3", "olmo2", *FAMILIES, *GEMMA4, *RECURRENT, *LATENT,
               *COMPRESSED)
GROUP = f"client-{len(GPUS) or (1 if EXPERT_RANKS else 2)}"
if EXPERT_RANKS:
    MODELS, SLOW_MODELS = ("glm4-moe",), ("qwen3-5-moe", "deepseek-v2", "afmoe")
elif GPUS:
    MODELS += ("llama-bf16-heads-of-64", "llama-fp16-heads-of-64")
SLOW_MODELS += POOLS


#: of first runs in a mixed group whose GPU computes experts later: there ranks of CPUs compute all
BY_RANKS = {"hot_expert_memory": 0, "expert_streaming_rows": 0} if "hot_expert_memory" in UNIT else {}
_first_runs: dict[tuple[int, str], list[dict]] = {}


def first_run(engine: AbstractEngine, model: str) -> list[dict]:
    key = (id(engine), model)
    if key not in _first_runs:
        with installed(engine, model, **BY_RANKS) as name:
            _first_runs[key] = run_alone(engine, name)
    return _first_runs[key]


@pytest.fixture(scope="module", params=["engine", GROUP])
def engine(request, engine_of):
    return engine_of(request.param)


@pytest.fixture(params=[*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)])
def model(request):
    return request.param


def test_probes_are_worth_comparing(engine, model):
    runs = first_run(engine, model)
    ids = [tuple(sample[0]) for run in runs for sample in run.values()]
    assert len(set(ids)) == len(ids) == len(PROBES) + 1
    assert all(len(set(sample)) > 2 for sample in ids)


def test_in_a_batch_of_17_others(engine, model):
    with installed(engine, model) as name:
        assert run_together(engine, name, OTHERS) == first_run(engine, model)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_in_chunks(engine, model, chunk):
    with installed(engine, model, engine_max_prefill_length=chunk) as name:
        assert run_alone(engine, name) == first_run(engine, model)


def test_small_steps_shared_by_many(engine, model):
    """The step's budget cuts prompts at positions that depend on other requests."""
    with installed(engine, model, max_step_tokens=29) as name:
        assert run_together(engine, name, OTHERS) == first_run(engine, model)


def test_threads(engine_of, model):
    engine = engine_of("engine")
    with installed(engine, model, num_threads=2) as name:
        assert run_alone(engine, name) == first_run(engine, model)


def test_prefix_cache(engine, model):
    with installed(engine, model, enable_prefix_cache=True) as name:
        assert run_together(engine, name, OTHERS) == first_run(engine, model)
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token < 300
        assert run_together(engine, name, OTHERS) == first_run(engine, model)
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > 1500


def cache_of_one(engine, model, spare: int, **fields: Any) -> dict[str, Any]:
    """Fields of a model whose cache holds one request of 768 tokens and `more` further spans."""
    fields["engine_max_length"] = 768
    with installed(engine, model, **{**fields, "engine_max_batch": 1, "hot_expert_memory": 0}) as name:
        info = engine.get_model_info(name)
    return {**fields, "cache_memory": (info.num_spans + spare) * (info.cache_bytes // info.num_spans)}


def test_preemption(engine, model):
    with installed(engine, model, **cache_of_one(engine, model, 2, max_step_tokens=64)) as name:
        growing = {**ALWAYS, "max_new_tokens": 400, "priority": 1, "n": 3}  # two of its samples outgrow the cache
        _, _, grown = engine.start_request(name, {"input_ids": prompt_of(20)}, growing)
        outputs = run_together(engine, name)
        engine.sync_request(name)
        assert engine.get_as_engine_stat(name).preempted_request > 0
        assert grown.GeneratedLength() == 3 * 400
        assert outputs == first_run(engine, model)


def test_everything_at_once(engine, model):
    """Small cache, small chunks, shared prefixes, priorities, cancelled requests: every request that finishes has the
    same bytes.
    """
    expected = first_run(engine, model)
    fields = {"engine_max_prefill_length": 40, "max_step_tokens": 60, "num_threads": 0, "enable_prefix_cache": True}
    rng = random.Random(5)
    with installed(engine, model, **cache_of_one(engine, model, 4, **fields)) as name:
        started = []
        growing = {**ALWAYS, "max_new_tokens": 300, "priority": 5, "n": 6}  # three of its samples outgrow the cache
        engine.start_request(name, {"input_ids": prompt_of(10)}, growing)
        for _ in range(60):
            index = rng.randrange(len(PROBES))
            prompt, generate = PROBES[index]
            started.append((index, *start(engine, name, (prompt, {**generate, "priority": rng.randrange(3)}))[1:]))
            if rng.random() < 0.2:
                engine.stop_request(name, rng.choice(started)[1])
        finished = 0
        for index, _, results in started:
            engine.sync_request(name)
            if results.GenerateStatus() is GenerateRequestStatus.GenerateFinished:
                finished += 1
                assert collect(results) == expected[index]
        stat = engine.get_as_engine_stat(name)
        assert finished > 30 and stat.preempted_request > 0 and stat.prefix_cache_hit_token > 0
        assert (stat.used_span, stat.running_request, stat.pendding_request) == (0, 0, 0)


def test_resumption(engine_of, model):
    """A request continued elsewhere from any of its tokens: prompt and tokens are computed again as one prompt."""
    engine = engine_of("engine")
    with installed(engine, model, engine_max_prefill_length=48, enable_prefix_cache=True) as name:
        for (prompt, generate), whole in zip(PROBES, first_run(engine, model)):
            if "n" in generate:
                continue
            ids, logprobs, _top = whole[0]
            for done in (1, 7, NEW_TOKENS - 1):
                config = GenerateConfig(**{**ALWAYS, **generate})
                spec = RequestSpec(name, input_ids=prompt, config=config, generated=ids[:done])
                _, _, results = engine._start(spec)
                rest = [(e.ids_from_generate, bits(e.token_logprobs_list)) for e in results]
                assert [i for part, _ in rest for i in part] == ids[done:]
                assert [value for _, part in rest for value in part] == logprobs[done:]


def test_engine_and_group_of_one_rank(engine_of, model):
    client = engine_of("client-1")
    assert first_run(client, model) == first_run(engine_of("engine"), model)
    with installed(client, model) as name:
        assert run_together(client, name, OTHERS) == first_run(engine_of("engine"), model)


# By default, each of FAMILIES, RECURRENT, LATENT and COMPRESSED goes through one of the tests above; -m slow runs them
# all.
@pytest.mark.parametrize("name, where, check, fields", [
    ("glm4-moe", GROUP, test_everything_at_once, {}),
    ("minimax-m2", "engine", test_preemption, {}),
    ("seed-oss", GROUP, test_prefix_cache, {}),
    ("granite", "engine", test_small_steps_shared_by_many, {}),
    ("ernie", "engine", test_prompt_in_chunks, {"chunk": 7}),
    ("hunyuan-biases", GROUP, test_in_a_batch_of_17_others, {}),
    ("ernie-moe", GROUP, test_prompt_in_chunks, {"chunk": 64}),
    ("exaone4", GROUP, test_prefix_cache, {}),
    ("arcee", "engine", test_prompt_in_chunks, {"chunk": 7}),
    ("dots1", GROUP, test_prefix_cache, {}),
    ("hunyuan-moe", "engine", test_prompt_in_chunks, {"chunk": 64}),
    ("afmoe", GROUP, test_preemption, {}),
    ("qwen3-next", GROUP, test_everything_at_once, {}),
    ("qwen3-next", "engine", test_preemption, {}),
    ("qwen3-5-moe", GROUP, test_prefix_cache, {}),
    ("qwen3-5-moe", "engine", test_prompt_in_chunks, {"chunk": 7}),
    ("lfm2-moe", GROUP, test_prefix_cache, {}),
    ("nemotron-h", GROUP, test_everything_at_once, {}),
    ("nemotron-h", "engine", test_prefix_cache, {}),
    ("granite-hybrid", GROUP, test_preemption, {}),
    ("bamba", "engine", test_everything_at_once, {}),
    ("falcon-h1", GROUP, test_prefix_cache, {}),
    ("falcon-h1", "engine", test_preemption, {}),
    ("kimi-linear", GROUP, test_everything_at_once, {}),
    ("kimi-linear", "engine", test_preemption, {}),
    ("deepseek-v2", GROUP, test_everything_at_once, {}),
    ("deepseek-v3-heads", "engine", test_prefix_cache, {}),
    ("deepseek-v32", GROUP, test_preemption, {}),
    ("glm-moe-dsa", "engine", test_prefix_cache, {}),
    ("deepseek-v4", GROUP, test_everything_at_once, {}),
    ("deepseek-v4", "engine", test_prefix_cache, {}),
    ("deepseek-v4-wide", "engine", test_preemption, {}),
    ("deepseek-v4-wide", GROUP, test_prefix_cache, {}),
    *[(name, *rest) for name, *rest in (
        ("glm5-next", GROUP, test_everything_at_once, {}),
        ("glm5-next", "engine", test_prefix_cache, {}),
        ("glm5-next-wide", "engine", test_preemption, {}),
        ("glm5-next-wide", GROUP, test_prefix_cache, {}),
    ) if name in POOLS],
])  # fmt: skip
def test_one_property_of_each_family(engine_of, name, where, check, fields):
    if EXPERT_RANKS and name in ("seed-oss", "hunyuan-biases", "exaone4", "falcon-h1"):
        pytest.skip("a mixed group is for models with routed experts")
    check(engine_of(where), name, **fields)
