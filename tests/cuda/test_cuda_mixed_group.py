"""A served mixed group with a GPU: what the prefix cache keeps serves requests in steps that are computed otherwise."""
from __future__ import annotations

import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group

pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.invariance import OTHERS, installed, run_alone, run_together

pytestmark = pytest.mark.cuda

FORM = {"weight_dtype": "int4", "weight_group_size": 32, "compute_unit": "CUDA:0+CPU:0,0"}


@pytest.fixture(scope="module")
def engine():
    with background_group(["--gpus", "0", "--experts-on", "cpu", "--ranks", "3"], timeout=120) as started, \
            ClientEngine(started.addresses[0]) as client:
        yield client


@pytest.fixture(scope="module")
def first(engine):
    """Without a prefix cache; ranks of experts compute all steps."""
    with installed(engine, "glm4-moe", **FORM, expert_streaming_rows=0) as name:
        return run_alone(engine, name)


@pytest.mark.parametrize("fields", [{"expert_streaming_rows": 0}, {"expert_streaming_rows": 1},
                                    {"expert_streaming_rows": 40},
                                    {"expert_streaming_rows": 24, "hot_expert_memory": 8 << 20}],
                         ids=["ranks", "streamed", "both", "hot"])
def test_prefix_hits_change_no_bit(engine, first, fields):
    """Prompts are computed in chunks around the number of rows, then found in the cache, whole and in part."""
    with installed(engine, "glm4-moe", **FORM, **fields, enable_prefix_cache=True, engine_max_prefill_length=64,
                   max_step_tokens=96) as name:
        assert run_alone(engine, name) == first
        before = engine.get_as_engine_stat(name).prefix_cache_hit_token
        assert run_alone(engine, name) == first
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > before
        for _ in range(2):
            assert run_together(engine, name, OTHERS) == first
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > 1500
