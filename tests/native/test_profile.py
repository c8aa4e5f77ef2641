"""Profiling of ops: counted bytes and operations, and which steps are profiled."""

from __future__ import annotations

import time

import pytest

from allspark_client.config import AsModelConfig
from allspark_server.runtime import profile
from allspark_server.runtime.native import native_library
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.runtime.runner import ModelRunner


@pytest.fixture
def runner(tiny_model):
    runner = ModelRunner(AsModelConfig(model_name="m", model_path=str(tiny_model), engine_max_length=256,
                                       engine_max_batch=2, num_threads=1, weight_dtype="float32"))
    runner.allocate_cache(runner.load())
    yield runner
    runner.close()


def prefill(runner: ModelRunner, length: int) -> None:
    sampling = SamplingParams(do_sample=False, prompt_len=length).encode()
    runner.step(StepPlan(new=[NewSlot(0, list(range(length)), sampling)],
                         work=[WorkItem(0, length, SAMPLE, spans=list(range(-(-length // 32))))]).encode())
    runner.step(StepPlan(free=[0]).encode())


def test_bytes_and_operations_are_those_of_shapes_and_rows(runner):
    rows, net = 40, runner._model.graph.config
    prefill(runner, rows)
    ops = {(op.op, op.weight): op for op in runner.profile().ops}
    layers = net.num_layers
    all_rows = (layers - 1) * rows + 1      # behind its attention, the last layer computes the row that samples
    out = ops["linear+add", "self_attn.o_proj"]     # computed together: the product itself need not pass through memory
    hidden, heads, kv_heads = net.hidden_size, net.num_heads * net.head_dim, net.num_kv_heads * net.head_dim
    assert out.count == layers
    assert out.operations == all_rows * hidden * (2 * heads + 1)
    floats = layers * heads * hidden + all_rows * (heads + 2 * hidden)
    assert 4 * floats <= out.bytes <= 4 * floats * 1.2 + layers * 8192  # panels are padded
    head = ops["linear", "lm_head"]  # of the one row that samples
    assert head.operations == 2 * hidden * net.vocab_size
    attention = ops["rope+span_attention", ""]
    rotated = 3 * rows * (heads + kv_heads)
    assert attention.operations == layers * (4 * heads * rows * (rows + 1) / 2 + rotated)
    passed = 4 * rows * (2 * heads + 2 * kv_heads)  # in and out
    cached = native_library().span_bytes(32, net.head_dim, "float32") / 32 * net.num_kv_heads * rows
    assert attention.bytes == layers * (passed + 2 * cached)  # written and read
    both = ops["rms_norm+linear", "mlp.gate_proj+up_proj"]
    assert both.operations == all_rows * 4 * hidden * (1 + net.intermediate_size)


def test_profiling_ends_by_itself_and_begins_anew_after_a_reading(runner, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(profile.time, "monotonic", lambda: now)

    def counted() -> int:
        return next((op.count for op in runner.profile().ops if op.op == "sample"), 0)

    assert counted() == 0
    prefill(runner, 3)
    assert counted() == 1
    prefill(runner, 3)
    assert counted() == 2                       # a reading within the minute adds up
    now += profile.PROFILE_SECONDS + 1          # but the minute begins with the next step
    prefill(runner, 3)
    now += profile.PROFILE_SECONDS + 1
    prefill(runner, 3)
    assert not runner._profiler.active
    prefill(runner, 3)
    assert counted() == 3                       # the last profile is still there
    prefill(runner, 3)
    assert counted() == 1                       # and the reading began a new one


def test_an_op_is_compared_with_its_own_roofline():
    op = profile.OpProfile("linear", "lm_head", 1, 1.0, 1.0, 1.0, bytes=5e9, operations=100e9)
    top = profile.Roofline(20e9, 200e9, 800e9)
    assert profile.Profile([op], top).table().splitlines()[1].split()[-2] == "50.0%"
    op.integer = True       # 12.5 % of the integers' rate: memory, a quarter, is what binds
    assert profile.Profile([op], top).table().splitlines()[1].split()[-2] == "25.0%"


@pytest.fixture
def nothing_measured(monkeypatch):
    monkeypatch.setattr(profile.RooflineMeter, "_known", {})


def test_the_roofline_is_measured_once(runner, nothing_measured):
    prefill(runner, 3)
    first = runner.profile().roofline
    assert first.bytes_per_second > 1e8 and first.operations_per_second > 1e8
    assert runner.measure_roofline() and runner.profile().roofline is first


def test_the_roofline_is_measured_in_slices(runner, nothing_measured):
    times = []
    done = False
    while not done:
        begin = time.perf_counter()
        done = runner.measure_roofline()
        times.append(time.perf_counter() - begin)
        if not done:
            prefill(runner, 3)      # steps run in between
    assert len(times) >= 12 and sorted(times)[len(times) // 2] < 5 * profile.SLICE_SECONDS
    found, native = runner.profile().roofline, native_library()
    bandwidth, rate = native.measure_roofline(runner._pinned(), 1, 3, 256)
    tiles = native.measure_tile_roofline(runner._pinned(), 1, 3)[0]  # 0 without tiles
    whole = (bandwidth, max(rate, tiles), native.measure_integer_rate(runner._pinned(), 1, 3))
    for part, figure in zip(
        (found.bytes_per_second, found.operations_per_second, found.integer_operations_per_second), whole
    ):
        assert figure / 3 <= part <= 3 * figure         # the same, allowing for other work on the machine


def test_8_bit_gemms_have_a_roofline_at_every_level():
    from allspark_server import _native
    meter = _native.RooflineMeter(megabytes=32)
    while not meter.slice(0.01):
        pass
    assert min(meter.rates()) > 0 and _native.measure_integer_rate(repeats=1) > 0


def test_both_sides_of_a_layer():
    """The last line of a mixed group's table: the means of a layer, on rank 0 with all ops outside of layers."""
    top = profile.Roofline(1e9, 1e9)

    def op(name: str, count: int, seconds: float):
        return profile.OpProfile(name, "", count, seconds / count, seconds / count, seconds)

    model = [op("linear", 30, 0.003), op("dispatch_rows", 10, 0.001), op("returned_sums+add", 10, 0.02)]
    experts = [op("dispatched_rows", 20, 0.004), op("dispatched_choices", 20, 0.0), op("expert_linear", 40, 0.06),
               op("return_sums", 20, 0.002)]
    found = profile.Profile(model, top, [experts, []]).table().splitlines()
    assert found[-1] == ("a layer, ms: rank 0 computes 0.300, sends 0.100, waits for sums 2.000; "
                         "rank 1 computes 3.000, sends 0.100, waits for rows 0.200")
    assert "a layer" not in profile.Profile(model, top).table()
    # Where a GPU waits: 10 messages since the last reading, of 3 ms in all that one rank computes.
    waits = profile.ExpertWaits(15, 0.0042, (0.003, 0.0041)).since(profile.ExpertWaits(5, 0.001, (0.001, 0.0011)))
    line = profile.Profile(model, top, [experts, []], waits).table().splitlines()[-1]
    assert line == found[-1] + "; from a message to its sums 0.3200, 0.0200 more than ranks compute"
    waits = profile.ExpertWaits(5, 0.1, (0.1,), 90, 7, 20).since(profile.ExpertWaits(0, 0.0, (), 30, 2, 8))
    lines = profile.Profile(model, top, [experts], waits).table().splitlines()
    assert lines[-2] == ("on the GPU: 5 of 12 experts that rows chose, and some or all of those of 60 rows of prompts, "
                         "over all layers")
    assert profile.ExpertWaits(1, 2.0, (1.0,)).since(profile.ExpertWaits()) == profile.ExpertWaits(1, 2.0, (1.0,))
