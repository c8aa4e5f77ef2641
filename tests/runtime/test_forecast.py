"""What a model would take and how fast it could be, compared with what ranks announce and read when they have it."""
from __future__ import annotations

from dataclasses import replace

import pytest

from allspark_client import AllSparkError, AsModelConfig
from allspark_server.runtime import device, memory, runner
from allspark_server.runtime.announced import Announced
from allspark_server.runtime.forecast import Experts, Place, RankForecast, Work, decode, forecast
from allspark_server.runtime.profile import Roofline

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver
from support.sparse_checkpoints import qwen3_moe

SIZES = {"engine_max_length": 256, "engine_max_batch": 2, "cache_memory": 4 << 20, "num_threads": 1}
GROUPS = {"one": (1, {}), "two": (2, {}), "mixed": (3, {"compute_unit": "CPU:0+CPU:0,0"})}


def places(world: int) -> list[Place]:
    return [Place(0, (0,))] * world


def forecast_of(name, world: int, **fields) -> list[RankForecast]:
    path = checkpoint(name) if isinstance(name, str) else name
    return forecast(AsModelConfig(model_name="m", model_path=str(path), **{**SIZES, **fields}), places(world))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name, fields", [
    ("glm4-moe", {"weight_dtype": "int8"}), ("qwen3-moe", {"weight_dtype": "int4", "weight_group_size": 32}),
    ("gpt-oss", {"weight_dtype": "bfloat16"}),
    ("qwen3-next", {}), ("kimi-linear", {}), ("deepseek-v2", {"weight_dtype": "w8a8"}), ("deepseek-v4", {})])
def test_it_is_what_ranks_announce(monkeypatch, name, fields, group):
    world, unit = GROUPS[group]
    announced = []

    class Recorded(device.Reservation):
        def __init__(self, model, size, nodes):
            announced.append(size)
            super().__init__(model, size, nodes)

    ranks = forecast_of(name, world, **fields, **unit)
    monkeypatch.setattr(device, "Reservation", Recorded)
    with Driver(checkpoint(name), world, **SIZES, **fields, **unit) as driver:
        assert sorted(announced) == sorted(rank.needed for rank in ranks)       # to the byte
        assert driver.info.num_spans == ranks[0].spans and ranks[0].tokens > 0
        for rank, info, own in zip(ranks, driver.infos, driver.runners):
            taken = own._executor.weight_bytes()    # matrices alone, and what lies between them
            assert rank.announced.weights + rank.announced.experts == pytest.approx(taken, rel=0.02)
            assert info.cache_bytes <= rank.cache + rank.announced.states
    assert all(not rank.refused for rank in ranks)
    assert [rank.role for rank in ranks] == (["model", "experts", "experts"] if group == "mixed" else ["all"] * world)


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_it_reads_what_a_step_reads(form):
    """The profile counts the bytes of what each op has read: of the matrices, and of few rows."""
    (rank,) = forecast_of("qwen3-moe", 1, weight_dtype=form)
    with Driver(checkpoint("qwen3-moe"), 1, **SIZES, weight_dtype=form) as driver:
        driver.generate(prompt_of(9), 1)
        driver.runners[0]._executor.set_profiling(True)
        driver.generate(prompt_of(1), 1)        # one row
        entries = driver.runners[0]._executor.profile()
        ops = driver.runners[0]._model.graph.ops
    read = {kind: sum(entry["bytes"] / max(entry["count"], 1) for entry in entries if entry["count"]
                      and ops[entry["index"]].type == kind) for kind in ("linear", "expert_linear")}
    (experts,) = rank.experts
    assert experts.work(1).bytes == pytest.approx(read["expert_linear"], rel=0.1)
    assert rank.every.bytes == pytest.approx(read["linear"], rel=0.1)
    assert rank.read(1) == rank.every.bytes + rank.every.row_bytes + experts.work(1).bytes
    assert experts.layers == sum(op.type == "combine_experts" for op in ops)


def test_a_published_shape(tmp_path):
    """Qwen3-30B-A3B with int4 in groups of 64: the bytes that docs/decisions/hybrid.md and issue 30 count by hand."""
    fields = {"weight_dtype": "int4", "weight_group_size": 64, "compute_unit": "CPU:0+CPU:0,0"}
    model, *experts = forecast_of(qwen3_moe(tmp_path), 3, **fields)
    assert [each.layers for each in experts[0].experts] == [48]
    assert sum(rank.read(1) for rank in experts) == pytest.approx(1.02e9, rel=0.01)
    assert [round(experts[0].experts[0].touched(rows)) for rows in (1, 4, 16)] == [8, 29, 82]
    assert sum(rank.announced.experts for rank in experts) == pytest.approx(128 * 48 * 4.72e6 * 0.5625, rel=0.01)
    assert model.announced.experts == 0 and all(rank.announced.weights == 0 for rank in experts)
    assert (model.messages, model.message_row) == (48, 4 * (2048 + 16))
    assert (experts[0].messages, experts[0].message_row) == (48, 4 * 2048)


def test_a_model_that_does_not_fit(monkeypatch, tmp_path):
    """Why, and still its bytes and speed."""
    from allspark_server.runtime import forecast as module
    monkeypatch.setattr(module, "available_memory", lambda world, nodes: (2 << 30) // (1 + len(nodes)))
    model, experts = forecast_of(qwen3_moe(tmp_path), 2, compute_unit="CPU:0+CPU:0", weight_dtype="int4")
    assert not model.refused and model.spans > 0
    assert "rank 1 of 2 needs" in experts.refused and "2,048.0 MiB are available" in experts.refused
    assert experts.needed > experts.available == 2 << 30 and experts.read(1) > 0
    with pytest.raises(AllSparkError, match="no routed experts"):
        forecast_of("qwen2-gqa-tied", 2, compute_unit="CPU:0+CPU:0")


def test_memory_of_the_nodes_to_which_ranks_will_be_bound(monkeypatch):
    asked = []
    from allspark_server.runtime import forecast as module
    monkeypatch.setattr(module, "available_memory", lambda world, nodes: asked.append((world, nodes)) or 1 << 30)
    config = AsModelConfig(model_name="m", model_path=str(checkpoint("qwen3-moe")), **SIZES,
                           compute_unit="CPU:0+CPU:0,1")
    ranks = forecast(config, [Place(0, (0,), (0,)), Place(0, (0,), (0, 2)), Place(1, (0,), (1,))])
    assert asked == [(3, (0,)), (2, (0, 2)), (2, (1,))]     # ranks of experts share memory among themselves
    assert [rank.device for rank in ranks] == ["node 0", "node 0", "node 1"]
    assert memory.ranks_on_node == {}


def test_what_a_rank_on_a_gpu_takes_of_the_host(monkeypatch):
    """Messages are in the host's memory; without a GPU here, CPUs stand for it."""
    class Elsewhere(device.Cpus):
        host_memory = False

        def available(self, world):
            return 1 << 28

    monkeypatch.setattr(runner, "device_of", lambda config, rank, world, cpus, threads, memory: (
        Elsewhere if config.on_gpus else device.Cpus)(cpus, threads))
    model, experts = forecast_of("qwen3-moe", 2, compute_unit="CUDA:3+CPU:0")
    assert (model.device, experts.device, model.available) == ("GPU 3", "node 0", 1 << 28)
    assert model.on_host == model.announced.messages > 0
    assert model.needed == replace(model.announced, messages=0).fixed + model.cache
    assert experts.on_host == experts.needed > experts.announced.messages


NOTHING = Announced(0, 0, 0, 0, 0, 0, 0, 0, 0, True)


def rank_of(number: int, role: str, **work) -> RankForecast:
    return RankForecast(number, role, "node 0", NOTHING, 0, **work)


def test_the_least_time_of_a_mixed_step():
    model = rank_of(0, "model", every=Work(400, 1), meanwhile=Work(100))
    slow, fast = (rank_of(n, "experts", experts=[Experts(8, 2, 1, Work(size))]) for n, size in ((1, 1600), (2, 800)))
    ranks, rates = [model, slow, fast], [Roofline(100, 1e9), Roofline(100, 1e9), Roofline(100, 1e9)]
    one = decode(ranks, rates, 1)
    # 4.01 s of the model's own, and 4 s of the slower rank's quarter, of which 1 s meanwhile.
    assert (one.seconds, one.wait) == (pytest.approx(4.01 + 3), pytest.approx(3))
    assert one.touched == 2 and one.read == [401, 400, 200] and one.limit == (0, "memory")
    two = decode(ranks, rates, 2)
    assert two.touched == pytest.approx(8 * (1 - 0.75 ** 2)) and two.limit == (1, "memory")
    assert two.seconds == pytest.approx(4.02 + 7 - 1) and two.tokens_per_second == pytest.approx(2 / 10.02)
    hidden = decode([replace(model, meanwhile=Work(400)), fast], rates[:2], 1)      # a shared expert takes longer
    assert (hidden.seconds, hidden.wait) == (pytest.approx(4.01), 0)


def test_the_least_time_of_an_ordinary_step():
    """The slowest rank's; arithmetic limits it where rows are many."""
    ranks = [rank_of(0, "all", every=Work(100, 0, 10)), rank_of(1, "all", every=Work(300, 0, 0, 40))]
    rates = [Roofline(100, 100, 400), Roofline(100, 100, 400)]
    assert (decode(ranks, rates, 1).seconds, decode(ranks, rates, 1).limit) == (3, (1, "memory"))
    assert (decode(ranks, rates, 60).seconds, decode(ranks, rates, 60).limit) == (6, (1, "compute"))
    assert decode(ranks, rates, 1).wait == decode(ranks, rates, 1).touched == 0
    assert decode([ranks[1]], [Roofline(100, 100)], 10).seconds == 4      # no rate of integers
