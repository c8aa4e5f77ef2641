"""Where the ranks of a mixed group go, and the line that starts them. Fabricated machines."""
from __future__ import annotations

import pytest

from allspark_launch.group.plan import plan_group
from allspark_launch.machine.placement import place_mixed
from allspark_launch.machine.topology import read_topology
from allspark_launch.options import GroupOptions
from support.machines import machine

EIGHT = {0: [[c] for c in range(8)], 1: [[c] for c in range(8, 16)]}


@pytest.fixture
def two_nodes(tmp_path):
    return read_topology(machine(tmp_path, EIGHT))


def places(placement):
    return [(r.rank, r.node, r.gpu, r.cpus) for r in placement.ranks]


def test_a_gpu_takes_few_cores(two_nodes):
    placement = place_mixed(two_nodes, gpus=[0])
    assert places(placement) == [(0, 0, 0, (0, 1)), (1, 0, None, tuple(range(2, 8))), (2, 1, None, tuple(range(8, 16)))]
    assert not placement.oversubscribed and not placement.ranks[1].whole_node and placement.ranks[2].whole_node
    # Its own node has no rank of experts.
    assert places(place_mixed(two_nodes, nodes=[1], gpus=[0])) == [(0, 0, 0, (0, 1)), (1, 1, None, tuple(range(8, 16)))]


def test_several_gpus(two_nodes):
    assert places(place_mixed(two_nodes, gpus=[0, 1])) == [     # of which nobody knows where they are
        (0, 0, 0, (0, 1)), (1, 1, 1, (8, 9)), (2, 0, None, tuple(range(2, 8))), (3, 1, None, tuple(range(10, 16)))]
    assert places(place_mixed(two_nodes, ranks=3, nodes=[1], gpus=[0, 1])) == [
        (0, 0, 0, (0, 1)), (1, 1, 1, (8, 9)), (2, 1, None, tuple(range(10, 16)))]
    with pytest.raises(ValueError, match="ranks is 2; a mixed group has 2 ranks of the model, and at least one"):
        place_mixed(two_nodes, ranks=2, gpus=[0, 1])


def test_without_a_gpu_the_ranks_of_a_node_share_it(two_nodes):
    assert places(place_mixed(two_nodes)) == [
        (0, 0, None, (0, 1, 2, 3)), (1, 0, None, (4, 5, 6, 7)), (2, 1, None, tuple(range(8, 16)))]
    assert [(r.node, len(r.cpus)) for r in place_mixed(two_nodes, ranks=4, nodes=[1]).ranks] == [
        (1, 2), (1, 2), (1, 2), (1, 2)]


def test_few_cores_are_shared(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0]]}))
    placement = place_mixed(topology, ranks=3)
    assert places(placement) == [(0, 0, None, (0,)), (1, 0, None, (0,)), (2, 0, None, (0,))]
    assert placement.oversubscribed and "share" in placement.warnings[0]
    with pytest.raises(ValueError, match="ranks is 1; a mixed group has a rank of the model, and at least one"):
        place_mixed(topology, ranks=1)
    with pytest.raises(ValueError, match="no NUMA node 7"):
        place_mixed(topology, nodes=[7])


def shares(placement):
    """The nodes that warnings name, and that the threads' waits sleep."""
    assert placement.oversubscribed and not any(rank.whole_node for rank in placement.ranks if rank.gpu is not None)
    return [warning.split(" share its")[0] for warning in placement.warnings]


def test_more_gpus_than_cores(tmp_path):
    def on(name, cores, gpus, **where):
        return place_mixed(read_topology(machine(tmp_path / name, cores)), gpus=gpus, **where)

    placement = on("elsewhere", {0: [[0]], 1: [[1], [2]]}, [0, 1, 2], nodes=[1])    # no experts on the shared node
    assert places(placement) == [(0, 0, 0, (0,)), (1, 1, 1, (1,)), (2, 0, 2, (0,)), (3, 1, None, (2,))]
    assert shares(placement) == ["the ranks on NUMA node 0"]
    placement = on("two", {0: [[0], [1]]}, [0, 1])
    assert places(placement) == [(0, 0, 0, (0,)), (1, 0, 1, (1,)), (2, 0, None, (0, 1))]
    assert shares(placement) == ["the ranks on NUMA node 0"]
    placement = on("three", {0: [[0], [1], [2]]}, [0, 1, 2, 3])
    assert places(placement) == [(0, 0, 0, (0,)), (1, 0, 1, (1,)), (2, 0, 2, (2,)), (3, 0, 3, (0,)),
                                 (4, 0, None, (0, 1, 2))]
    assert shares(placement) == ["the ranks on NUMA node 0"]
    placement = on("both", {0: [[0]], 1: [[1]]}, [0, 1])
    assert places(placement) == [(0, 0, 0, (0,)), (1, 1, 1, (1,)), (2, 0, None, (0,)), (3, 1, None, (1,))]
    assert shares(placement) == ["the ranks on NUMA node 0", "the ranks on NUMA node 1"]


def test_the_command_line(monkeypatch, two_nodes):
    monkeypatch.setattr("allspark_launch.group.plan.read_topology", lambda: two_nodes)
    line = plan_group(GroupOptions(models=["/m"], experts_on="cpu")).line
    assert '"compute_unit": "CPU:0+CPU:0,1"' in line and line.count("--ranks 3") == 3
    line = plan_group(GroupOptions(models=["/m"], experts_on="cpu", gpus=[0], numa_nodes=[1])).line
    assert '"compute_unit": "CUDA:0+CPU:1"' in line and line.count("--ranks 2") == 2
    assert "ALLSPARK_GROUP_GPUS=0" in line or "GPUS=0" in line
    line = plan_group(GroupOptions(models=["/m"], experts_on="cpu", gpus=[0, 1])).line
    assert '"compute_unit": "CUDA:0,1+CPU:0,1"' in line and line.count("--ranks 4") == 4
    assert "ALLSPARK_MODEL_RANKS=2" in line     # only then: see SharedMemory.first_ranks
    for options in (GroupOptions(models=["/m"], experts_on="cpu", gpus=[0]), GroupOptions(models=["/m"], gpus=[0, 1])):
        assert "ALLSPARK_MODEL_RANKS" not in plan_group(options).line
    with pytest.raises(ValueError, match="a mixed group on several hosts is not available yet"):
        plan_group(GroupOptions(models=["/m"], experts_on="cpu", hosts="a,b"))
