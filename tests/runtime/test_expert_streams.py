"""What ranks of experts tell a GPU of their matrices, so that it can compute them: where these are, and that they are
the same. Nothing here needs a GPU: ranks of experts are those of a group with one.
"""
from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelConfig
from allspark_server import _native
from allspark_server.models.roles import expert_ops
from allspark_server.runtime import expert_streams
from allspark_server.runtime.roles import role_of
from allspark_server.runtime.runner import ModelRunner

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support import quantized_checkpoints
from support.checkpoints import checkpoint
from support.driver import shared_memories
from support.mxfp4_checkpoint import mxfp4_pair

FORMS = {"int8": {"weight_dtype": "int8"}, "w8a8": {"weight_dtype": "w8a8"},
         "int4": {"weight_dtype": "int4", "weight_group_size": 32},
         "w4a8": {"weight_dtype": "w4a8", "weight_group_size": 32}}


@contextmanager
def ranks_of_experts(directory, count: int, **fields):
    """Loaded runners of all ranks of experts of a group with a GPU."""
    config = AsModelConfig(model_name="m", model_path=str(directory), num_threads=2, engine_max_length=128,
                           compute_unit="CUDA:0+CPU:" + ",".join(["0"] * count),
                           **{"expert_streaming_rows": 64, **fields})
    memories = shared_memories(1 + count)
    runners = [ModelRunner(config, rank=rank, world=1 + count, shared_memory=memories[rank])
               for rank in range(1, 1 + count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda runner: runner.load(), runners))
    try:
        yield runners
    finally:
        for runner in runners:
            runner.close()


def addresses_of(runners) -> list[bytes]:
    return [bytes.fromhex(runner.address.split(" ")[1]) for runner in runners]


def matrices_of(runner):
    """Of each layer and product: the ids of its matrix and of its bias, or None."""
    ids = runner.opened[0]._ids
    for layer, ops in enumerate(expert_ops(runner.opened[0].whole)):
        for down, op in enumerate((ops[0], ops[2])):
            yield layer, bool(down), ids[op.weights[0]], op.weights[1:]


def check_panels(panels, runners) -> None:
    for rank, runner in enumerate(runners):
        for layer, down, handle, bias in matrices_of(runner):
            own, found = runner._executor.panels(handle), panels.panels(rank, layer, down)
            assert own.rows == found.rows
            for expert in range(len(own)):
                np.testing.assert_array_equal(own.bytes(expert), found.bytes(expert))
            assert (panels.bias(rank, layer, down) is not None) == bool(bias)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_the_matrices_are_found(form, count):
    with ranks_of_experts(checkpoint("qwen3-moe"), count, **FORMS[form]) as runners:
        panels = _native.ExpertPanels(addresses_of(runners))
        assert (panels.ranks, panels.layers) == (count, len(expert_ops(runners[0].opened[0].whole)))
        check_panels(panels, runners)
        for rank in range(count):
            seconds = panels.seconds(rank)
            assert list(seconds) == [4, 16, 64, 256] and all(value > 0 for value in seconds.values())


@pytest.mark.parametrize("name", ["mxfp4", "gptq"])
def test_other_formats(name, tmp_path):
    """MXFP4 with biases, of which only one rank adds down's; integers with zero points."""
    if name == "mxfp4":
        directory, _ = mxfp4_pair(tmp_path)
    else:
        directory, _ = quantized_checkpoints.write_pair(tmp_path, quantized_checkpoints.GLM,
                                                        *quantized_checkpoints.gptq(4, 32), seed=5)
    with ranks_of_experts(directory, 2) as runners:
        panels = _native.ExpertPanels(addresses_of(runners))
        check_panels(panels, runners)
        if name == "mxfp4":
            assert np.any(panels.bias(0, 0, True)) and not np.any(panels.bias(1, 0, True))
            assert np.any(panels.bias(1, 0, False))


def test_shared_memory_changes_no_matrix():
    form = FORMS["int4"]
    with (ranks_of_experts(checkpoint("qwen3-moe"), 1, **form) as (shared,),
          ranks_of_experts(checkpoint("qwen3-moe"), 1, expert_streaming_rows=0, **form) as (private,)):
        assert len(private.address.split(" ")) == 1
        for (_, _, one, _), (_, _, other, _) in zip(matrices_of(shared), matrices_of(private)):
            np.testing.assert_array_equal(shared._executor.panels(one).bytes(), private._executor.panels(other).bytes())


@pytest.mark.skipif(not _native.shares_huge_pages(), reason="the system gives shared memory no huge pages")
def test_shared_matrices_are_in_huge_pages():
    def huge() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("ShmemPmdMapped"))

    before, executor = huge(), _native.Executor(num_threads=3)
    executor.share_matrices(64 << 20)
    for _ in range(2):
        executor.add_matrix(8 * 1024, 3000, "w8a8", experts=8)
    size = 2 * _native.matrix_bytes(8 * 1024, 3000, "w8a8", experts=8)
    assert size <= huge() - before < size + (4 << 20) and executor.small_bytes == 0


def test_another_process_maps_them():
    with ranks_of_experts(checkpoint("qwen3-moe"), 1, **FORMS["w4a8"]) as runners:
        _, _, handle, _ = next(matrices_of(runners[0]))
        words = ("import sys; from allspark_server import _native; "
                 "panels = _native.ExpertPanels([bytes.fromhex(sys.argv[1])]); "
                 "sys.stdout.buffer.write(panels.panels(0, 0, False).bytes().tobytes())")
        found = subprocess.run([sys.executable, "-c", words, addresses_of(runners)[0].hex()], check=True,
                               capture_output=True).stdout
        assert found == runners[0]._executor.panels(handle).bytes().tobytes()


@pytest.mark.parametrize("name, fields, reason", [
    ("qwen3-moe", {"weight_dtype": "bfloat16"}, "experts in bfloat16 have no exact recipe"),
    ("qwen3-moe", {"weight_dtype": "int8", "expert_streaming_rows": 0}, "expert_streaming_rows=0"),
    ("nemotron-h", {"weight_dtype": "int8"}, "relu_square")])
def test_what_only_cpus_compute(name, fields, reason):
    with ranks_of_experts(checkpoint(name), 1, **fields) as (runner,):
        assert len(runner.address.split(" ")) == 1
        model = runner.opened[0]
        assert reason in expert_streams.reason_against(model, runner.config, "CUDA:0+CPU:0")
        assert "no GPU" in expert_streams.reason_against(model, runner.config, "CPU:0+CPU:0")


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_return_entries_where_experts_are_hot(count):
    form = FORMS["int4"]
    with (ranks_of_experts(checkpoint("qwen3-moe"), count, hot_expert_memory=1 << 20, **form) as runners,
          ranks_of_experts(checkpoint("qwen3-moe"), count, **form) as others):
        check_panels(_native.ExpertPanels(addresses_of(runners)), runners)
        for own, other in zip(runners, others):
            kinds = [[op.type for op in runner.opened[0].graph.ops] for runner in (own, other)]
            assert kinds[0] == [kind for kind in kinds[1] if kind != "combine_experts"]
            assert own._exchange_sizes["sum_width"] == other._exchange_sizes["sum_width"] * own._exchange_sizes["top"]


def test_hot_experts_are_refused():
    with pytest.raises(AllSparkError, match="hot_expert_memory=5 is not possible: experts in bfloat16 have no exact"):
        with ranks_of_experts(checkpoint("qwen3-moe"), 1, weight_dtype="bfloat16", hot_expert_memory=5):
            pass
    for unit in ("CUDA:0", "CPU:0+CPU:0", "CPU:0"):
        config = AsModelConfig(model_name="m", model_path="m", compute_unit=unit, hot_expert_memory=5)
        with pytest.raises(AllSparkError, match="hot_expert_memory=5 is for mixed groups with a GPU"):
            role_of(config, 0, 1 + len(config.expert_nodes))


def test_addresses_are_checked():
    with ranks_of_experts(checkpoint("qwen3-moe"), 1, **FORMS["int8"]) as runners:
        address = addresses_of(runners)[0]
        for wrong, words in (([], "no ranks of experts"), ([address[:-1]], "incomplete"),
                             ([b"x" + address[1:]], "another build")):
            with pytest.raises(ValueError, match=words):
                _native.ExpertPanels(wrong)
    with pytest.raises(ValueError, match="share_matrices"):
        _native.Executor().describe_experts()
