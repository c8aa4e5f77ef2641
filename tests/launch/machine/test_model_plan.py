"""`allspark topology --plan MODEL`: a model's memory and speed on a placement, before it is loaded."""
from __future__ import annotations

import json

import pytest

from allspark_launch import cli
from allspark_launch.commands import doctor, model_plan, topology as topology_command
from allspark_launch.machine.placement import place, place_mixed
from allspark_launch.machine.topology import Topology, read_topology
from allspark_server.runtime import binding, memory
from allspark_server.runtime.profile import Roofline, RooflineMeter
from support.machines import machine
from support.sparse_checkpoints import QWEN3_30B_A3B, qwen3_moe

SMALL = QWEN3_30B_A3B | {"num_hidden_layers": 4, "num_experts": 32, "vocab_size": 1024}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """One node with four cores, 100 GB/s for each thread, and no limits. The command sets what ranks set."""
    monkeypatch.setattr(memory, "ranks_on_node", {})
    monkeypatch.setattr(RooflineMeter, "finish", lambda meter: Roofline(1e11 * meter._threads, 1e15))
    monkeypatch.setenv("ALLSPARK_CPU_COSTS", "off")


@pytest.fixture
def four_cores(monkeypatch, tmp_path):
    root = machine(tmp_path / "machine", {0: [[c] for c in range(4)]})
    monkeypatch.setattr(topology_command, "read_topology", lambda: read_topology(root))


@pytest.fixture
def model(tmp_path):
    return str(qwen3_moe(tmp_path / "small", SMALL))


def asked(capsys, *words: str, status: int = 0):
    assert cli.main(["topology", *words]) == status
    return capsys.readouterr().out


def test_a_mixed_group(four_cores, model, capsys):
    words = ["--plan", model, "--experts-on", "cpu", "--ranks", "3", "--weight-dtype", "int4", "--weight-group-size",
             "64", "--max-batch", "2", "--max-length", "256"]
    shown = asked(capsys, *words)
    assert "plan of model small, compute_unit=CPU:0+CPU:0,0 (nothing is loaded):" in shown
    lines = [line.split() for line in shown[shown.index("plan of"):].splitlines()]
    assert lines[1][:4] == ["rank", "role", "on", "matrices"]
    assert lines[2][1:5] == ["model", "node", "0", "float32+int4:64"]
    assert [line[1] for line in lines[3:5]] == ["experts", "experts"]
    assert "rank 0 sends 4 messages a step, with 8,256 bytes for each row" in shown
    assert "rank 2 returns 4 messages a step, with 8,192 bytes for each row" in shown
    assert "(rank 0 100.0 GB/s, rank 1 100.0 GB/s, rank 2 200.0 GB/s)" in shown      # by their threads

    found = json.loads(asked(capsys, "--json", *words))
    plan = found["plan"]
    assert found["ranks"][0]["cpus"] == [0] and plan["fits"] and plan["refusals"] == []
    one, *others = plan["ranks"]
    assert (one["role"], one["memory"]["experts"], one["memory"]["cache"] > 0) == ("model", 0, True)
    assert [each["memory"]["weights"] for each in others] == [0, 0]
    for rank in plan["ranks"]:
        assert rank["needed"] == sum(rank["memory"].values()) < rank["available"]
    steps = {step["rows"]: step for step in plan["decode"]}
    assert list(steps) == [1, 4, 16] and steps[1]["experts_per_layer"] == pytest.approx(8)
    # 8 of 32 experts in each of 4 layers, half of each on a rank, of which the first has 100 GB/s.
    experts = sum(each["memory"]["experts"] for each in others) / 4
    assert sum(steps[1]["read"][1:]) == pytest.approx(experts, rel=1e-3)
    assert steps[1]["wait_seconds"] == pytest.approx(steps[1]["read"][1] / 1e11)
    assert steps[1]["seconds"] == pytest.approx(steps[1]["read"][0] / 1e11 + steps[1]["wait_seconds"])
    assert steps[16]["tokens_per_second"] == pytest.approx(16 / steps[16]["seconds"])


def test_an_ordinary_group(four_cores, model, capsys):
    shown = asked(capsys, "--plan", model, "--ranks", "2", "--max-batch", "2", "--max-length", "256",
                  "--set", "model_name=named")
    assert "plan of model named, compute_unit=CPU:0 (nothing is loaded):" in shown and "messages" not in shown
    assert "(rank 0 200.0 GB/s, rank 1 200.0 GB/s)" in shown and " wait " not in shown


def test_what_does_not_fit(four_cores, model, capsys, monkeypatch):
    def limited(world=1, root="/", nodes=None):
        return (64 << 20) // world

    from allspark_server.runtime import forecast
    monkeypatch.setattr(forecast, "available_memory", limited)
    shown = asked(capsys, "--plan", model, "--experts-on", "cpu", status=1)
    assert "DOES NOT FIT: model 'small' does not fit: rank 1 of 2 needs" in shown and "does not fit\n" in shown
    assert "tokens/s" in shown      # also then
    plan = json.loads(asked(capsys, "--json", "--plan", model, "--experts-on", "cpu", status=1))["plan"]
    assert not plan["fits"] and not plan["ranks"][1]["fits"] and "rank 1 of 2 needs" in plan["refusals"][1]

    monkeypatch.setattr(forecast, "available_memory", lambda world, nodes: 1 << 40)
    monkeypatch.setattr(memory, "available_memory", limited)
    words = ["--plan", model, "--experts-on", "cpu", "--set", "cache_memory=1000000"]
    assert "all ranks together need" in asked(capsys, *words, status=1)


def test_what_cannot_be_planned(four_cores, model, capsys, tmp_path):
    for words, told in ((["--plan", str(tmp_path / "none")], "there is no such file or directory"),
                        (["--plan", model, "--experts-on", "cpu", "--set", "speculation=mtp"],
                         "speculation='mtp' in a mixed group")):
        assert cli.main(["topology", *words]) == 1
        assert told in capsys.readouterr().err


def test_ranks_are_bound_to_their_nodes(monkeypatch, model, tmp_path):
    """Where the system allows it; two ranks of a node share its memory."""
    topology = read_topology(machine(tmp_path, {0: [[0], [1], [2], [3]], 1: [[4], [5]]}))
    from allspark_server.runtime import forecast
    asked_for = []
    monkeypatch.setattr(forecast, "available_memory", lambda world, nodes: asked_for.append(nodes) or 1 << 34)
    options = cli.build_parser().parse_args(["topology", "--plan", model, "--experts-on", "cpu"])
    for allowed, nodes in ((True, [(0,), (0,), (1,)]), (False, [(), (), ()])):
        monkeypatch.setattr(binding, "memory_policy_allowed", lambda allowed=allowed: allowed)
        asked_for.clear()
        plan = model_plan.plan(options, place_mixed(topology))
        assert asked_for == nodes and memory.ranks_on_node == ({0: 2, 1: 1} if allowed else {})
        assert [rank.device for rank in plan.ranks] == ["node 0", "node 0", "node 1"]


def test_what_is_measured_together(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[c] for c in range(6)], 1: [[c] for c in range(6, 8)]}))
    rates = [rate.bytes_per_second / 1e11 for rate in model_plan.measure(place_mixed(topology).ranks, True)]
    assert rates == [3, 3, 2]       # the model's rank computes while the other one of its node waits
    placement = place(topology, 3)
    assert [len(rank.cpus) for rank in placement.ranks] == [3, 3, 2]
    assert [round(rate.bytes_per_second / 1e11) for rate in model_plan.measure(placement.ranks)] == [3, 3, 2]


def test_doctor_points_to_it(monkeypatch):
    plain = Topology([], [], [])
    assert "allspark topology --plan MODEL says what" in doctor._memory(plain)[0].text
    with_gpus = Topology([], [], [], gpus=[None])
    assert "--plan MODEL --gpus 0 says" in doctor._memory(with_gpus)[0].text
    assert "with --experts-on cpu" in doctor._memory(with_gpus)[0].text
