"""Costs of ops on the GPU: counted as on CPUs and timed by events, in steps whose bits do not change."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver

pytestmark = pytest.mark.cuda
UNIT = {"compute_unit": "CUDA:0"}


def ops_of(driver) -> dict:
    return {(op.op, op.weight): op for op in driver.runners[0].profile().ops}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_counts_and_times(dtype):
    with Driver(checkpoint("qwen2-gqa-tied"), weight_dtype=dtype, **UNIT) as gpu:
        runner, net = gpu.runners[0], gpu.runners[0]._model.graph.config
        assert ops_of(gpu) == {}
        expected = gpu.generate(prompt_of(40), 12)  # the steps after the first are timed
        ops = ops_of(gpu)
        assert gpu.runners[0].measure_roofline() and runner.profile().roofline.bytes_per_second > 1e11
        head, layers = ops["linear", "lm_head"], net.num_layers
        times = head.count
        assert times == 3 and ops["sample", ""].count == times
        assert head.operations == 2 * times * net.hidden_size * net.vocab_size
        out = ops["linear+add", "self_attn.o_proj"]
        assert out.count == times * layers
        assert out.operations == times * layers * net.hidden_size * (2 * net.num_heads * net.head_dim + 1)
        attention = ops["rope+span_attention", ""]
        assert attention.count == times * layers and attention.bytes > 0
        for op in ops.values():
            assert 0 < op.min <= op.sum / op.count <= op.max < 0.1
        assert 0 < sum(op.sum for op in ops.values()) < 1
        found = gpu.generate(prompt_of(40), 12)  # not timed
        assert found[0] == expected[0]
        assert [row.tobytes() for row in found[1]] == [row.tobytes() for row in expected[1]]
        assert ops_of(gpu)["linear", "lm_head"].count == times


def test_a_long_profile_times_few_steps():
    with Driver(checkpoint("qwen2-gqa-tied"), weight_dtype="bfloat16", **UNIT) as gpu:
        gpu.generate(prompt_of(5), 300)
        table = gpu.runners[0].profile()
        sample = next(op for op in table.ops if op.op == "sample")
        assert 3 <= sample.count <= 9
        lines = table.table().splitlines()
        assert lines[0].split()[:7] == ["op", "count", "min", "max", "mean", "sum", "%"]
        assert sum(float(line.split()[6]) for line in lines[1:]) == pytest.approx(100, abs=0.1)
