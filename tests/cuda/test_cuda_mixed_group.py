"""A served mixed group with a GPU, whose experts move while requests run, and whose steps are computed in all ways:
hits of the prefix cache, speculation, and a rank that is lost.
"""
from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group
from allspark_server.runtime.native import cuda_library

pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.invariance import OTHERS, PROBES, experts_on_the_gpu, installed, run_alone, run_together
from support.processes import ranks_of

pytestmark = pytest.mark.cuda

#: without hot experts, also where the unit of the tests has some
FORM = {"weight_dtype": "int4", "weight_group_size": 32, "compute_unit": "CUDA:0+CPU:0,0", "hot_expert_memory": 0}
MOVING = {**FORM, "hot_expert_memory": 8 << 20, "expert_streaming_rows": 24}


@pytest.fixture(scope="module")
def group():
    with background_group(["--gpus", "0", "--experts-on", "cpu", "--ranks", "3"], timeout=120) as started, \
            ClientEngine(started.addresses[0], reconnect_timeout=120) as client:
        yield SimpleNamespace(engine=client, supervisor=started.supervisor_pid)


@pytest.fixture(scope="module")
def engine(group):
    return group.engine


@pytest.fixture(scope="module")
def first(engine):
    """Without a prefix cache; ranks of experts compute all steps."""
    with installed(engine, "glm4-moe", **FORM, expert_streaming_rows=0) as name:
        return run_alone(engine, name)


@pytest.mark.parametrize("fields", [{"expert_streaming_rows": 0}, {"expert_streaming_rows": 1},
                                    {"expert_streaming_rows": 40}, MOVING],
                         ids=["ranks", "streamed", "both", "hot"])
def test_prefix_hits_change_no_bit(engine, first, fields):
    """Prompts are computed in chunks around the number of rows, then found in the cache, whole and in part."""
    with installed(engine, "glm4-moe", **{**FORM, **fields}, enable_prefix_cache=True, engine_max_prefill_length=64,
                   max_step_tokens=96) as name:
        assert run_alone(engine, name) == first
        before = engine.get_as_engine_stat(name).prefix_cache_hit_token
        assert run_alone(engine, name) == first
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > before
        hot, rows = experts_on_the_gpu(engine, name)
        assert bool(hot) == ("hot_expert_memory" in fields) and bool(rows) == (fields["expert_streaming_rows"] > 0)
        for _ in range(2):
            assert run_together(engine, name, OTHERS) == first
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > 1500


def test_speculation_while_experts_move(engine, first):
    with installed(engine, "glm4-moe", **MOVING, speculation="prompt_lookup") as name:
        for _ in range(3):
            assert run_together(engine, name, OTHERS) == first
        assert run_alone(engine, name) == first


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_while_experts_move(group, first, victim):
    """Requests go on with the same tokens in the group that is started again, in which no expert is hot at first."""
    prompt, generate = PROBES[1]

    def request(name: str, then=lambda: None) -> list[int]:
        _, handle, results = group.engine.start_request(
            name, {"input_ids": prompt}, {**generate, "max_new_tokens": 200, "eos_token_id": -1})
        ids = list(results.Get().ids_from_generate)     # it runs
        then()
        ids += [i for elements in results for i in elements.ids_from_generate]
        assert results.GenerateStatus().name == "GenerateFinished"
        group.engine.release_request(name, handle)
        return ids

    with installed(group.engine, "glm4-moe", **MOVING) as name:
        expected, before = request(name), {process.pid for process in ranks_of(group.supervisor)}
        assert experts_on_the_gpu(group.engine, name)[0]
        lost = next(p for p in ranks_of(group.supervisor) if ("--address" in p.cmdline()) == (victim == 0))
        assert request(name, lambda: lost.send_signal(signal.SIGKILL)) == expected and len(expected) == 200
        assert {process.pid for process in ranks_of(group.supervisor)}.isdisjoint(before)
        assert run_alone(group.engine, name) == first


def test_two_gpus(monkeypatch):
    """Ranks in turn on one GPU, if there is no second one. Hot experts, prompts' experts and the batch do not change
    bits; a mixed group with one GPU, whose sums have another order, is not compared.
    """
    gpus = "0,1" if cuda_library().device_count() > 1 else "0,0"
    monkeypatch.setenv("ALLSPARK_TEST_SHARED_GPUS", "1")
    form = {"weight_dtype": "int8", "weight_group_size": 0, "compute_unit": f"CUDA:{gpus}+CPU:0,0",
            "cache_memory": 64 << 20}
    with background_group(["--gpus", gpus, "--experts-on", "cpu", "--ranks", "4"], timeout=120) as started, \
            ClientEngine(started.addresses[0]) as client:
        with installed(client, "glm4-moe", **form, hot_expert_memory=0, expert_streaming_rows=0) as name:
            expected = run_alone(client, name)
        moving = {**MOVING, **form, "engine_max_prefill_length": 64, "max_step_tokens": 96}
        with installed(client, "glm4-moe", **moving) as name:
            assert run_together(client, name, OTHERS) == expected
            hot, rows = experts_on_the_gpu(client, name)
            assert hot and rows
            assert run_together(client, name, OTHERS) == expected
