"""The launcher without a model: topology of fabricated machines, placement, command lines, private folders."""
import json
import os
import shlex
import stat
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from allspark_launch.cli import EXIT_CONFIG, main
from allspark_launch.commands import doctor
from allspark_launch.commands.topology import print_topology
from allspark_launch.group import folders, mpi as launch_mpi, plan
from allspark_launch.group.folders import private_folder
from allspark_launch.group.plan import plan_group
from allspark_launch.machine.drawing import draw, save
from allspark_launch.machine.gpus import Gpu
from allspark_launch.machine.placement import place, place_beside
from allspark_launch.machine.topology import format_list, parse_list, read_topology
from allspark_launch.options import GroupOptions
from allspark_server.runtime import reservations
from support.machines import machine

# ---- topology ------------------------------------------------------------------------------------------------------

def cpus_of(placement) -> list[tuple[int, ...]]:
    return [r.cpus for r in placement.ranks]


def test_list_format_round_trip():
    assert parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert format_list([11, 10, 8, 3, 2, 1, 0]) == "0-3,8,10-11"
    assert parse_list("") == [] and format_list([]) == ""
    with pytest.raises(ValueError, match="'a-b' is not a list"):
        parse_list("a-b")


def test_one_node(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0], [1], [2], [3]]}))
    assert [n.id for n in topology.nodes] == [0]
    assert topology.nodes[0].memory_total == 64 << 30 and topology.nodes[0].memory_free == 48 << 30
    assert cpus_of(place(topology)) == [(0, 1, 2, 3)]
    assert place(topology).ranks[0].whole_node
    two = place(topology, 2)
    assert cpus_of(two) == [(0, 1), (2, 3)] and not two.oversubscribed
    assert not two.ranks[0].whole_node
    three = place(topology, 3)
    assert sorted(c for r in three.ranks for c in r.cpus) == [0, 1, 2, 3]
    six = place(topology, 6)
    assert cpus_of(six) == [(0,), (1,), (2,), (3,), (0,), (1,)] and six.oversubscribed
    assert "6 ranks share the 4 usable core(s)" in six.warnings[0]


def test_two_nodes_with_smt_use_physical_cores_only(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0, 4], [1, 5]], 1: [[2, 6], [3, 7]]}))
    placement = place(topology)
    assert cpus_of(placement) == [(0, 1), (2, 3)]
    assert [r.node for r in placement.ranks] == [0, 1] == [r.memory_node for r in placement.ranks]
    assert placement.ranks[1].bound_cpus == (2, 3, 6, 7)        # Python's threads may use the siblings
    assert cpus_of(place(topology, use_siblings=True)) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert cpus_of(place(topology, cpus_per_rank=3, use_siblings=True)) == [(0, 1, 4), (2, 3, 6)]
    assert cpus_of(place(topology, nodes=[1])) == [(2, 3)]
    assert cpus_of(place(topology, 1)) == [(0, 1)]
    assert cpus_of(place(topology, 4)) == [(0,), (1,), (2,), (3,)]
    with pytest.raises(ValueError, match="cpus_per_rank is 3, but rank 0's share .* has 2 physical cores"):
        place(topology, cpus_per_rank=3)
    with pytest.raises(ValueError, match="no NUMA node 5; it has 0-1"):
        place(topology, nodes=[5])
    with pytest.raises(ValueError, match="names a node twice"):
        place(topology, nodes=[0, 0])
    with pytest.raises(ValueError, match="ranks is -1"):
        place(topology, -1)


def test_xeon6_with_three_nodes_a_socket(tmp_path):
    cores, nodes = 128, {}
    for node in range(6):
        first = node * cores // 6
        nodes[node] = [[c, c + cores] for c in range(first, (node + 1) * cores // 6)]
    topology = read_topology(machine(tmp_path, nodes))
    assert [len(n.cores) for n in topology.nodes] == [21, 21, 22, 21, 21, 22]
    placement = place(topology)
    assert len(placement.ranks) == 6 and not placement.warnings
    assert placement.ranks[0].cpus == tuple(range(0, 20))       # one core is left to rank 0's service
    assert placement.ranks[1].cpus == tuple(range(21, 42))
    eight = place(topology, 8)
    assert [r.node for r in eight.ranks] == [0, 1, 2, 2, 3, 4, 5, 5]        # the larger nodes take two


def test_memoryless_node_takes_memory_of_the_nearest(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0], [1]], 1: [[2], [3]], 2: [[4], [5]]}, memory={1: 0},
                                     distances=[[10, 31, 12], [31, 10, 21], [12, 21, 10]]))
    assert topology.default_nodes == [0, 2]
    placement = place(topology, nodes=[0, 1])
    assert placement.ranks[1].memory_node == 2
    assert "node 1 has no memory" in placement.warnings[0]


def test_a_node_of_memory_only_gets_no_rank(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0], [1]], 1: []}))
    assert topology.default_nodes == [0]
    with pytest.raises(ValueError, match="node 1 has no CPU that this process may use; nodes with CPUs: 0"):
        place(topology, nodes=[1])


def test_memory_of_nodes_without_cpus_is_used_only_where_configured(tmp_path):
    """Two sockets, the second without memory of its own; node 2 is CXL memory near the second, node 3 CXL memory
    equally far from both.
    """
    root = machine(tmp_path, {0: [[0], [1]], 1: [[2], [3]], 2: [], 3: []}, memory={1: 0},
                   distances=[[10, 21, 24, 30], [21, 10, 14, 30], [24, 14, 10, 40], [30, 30, 40, 10]])
    topology = read_topology(root)
    assert topology.default_nodes == [0]
    assert [r.memory_nodes for r in place(topology).ranks] == [(0,)]
    assert [r.memory_nodes for r in place(topology, nodes=[0, 1]).ranks] == [(0,), (0,)], "not the nearer CXL"
    placement = place(topology, nodes=[0, 1], memory_nodes=[2, 3])
    assert [r.memory_nodes for r in placement.ranks] == [(0, 3), (0, 2, 3)]
    words = launch_mpi.group_command(MPI5, placement, "python", [], use_numactl=True)
    assert [word for word in words if word.startswith("--membind")] == ["--membind=0,3", "--membind=0,2-3"]
    assert words.count("0:2,3:2") == 1 and words.count("0:2,2:1,3:2") == 1
    words = launch_mpi.group_command(MPI5, placement, "python", [], use_numactl=False)
    assert words[words.index("--bind-memory") + 1] == "0,3"
    for nodes, why in (([1], "NUMA node 1, which has CPUs.* nodes with memory only: 2-3"),
                       ([0], "NUMA node 0, which has CPUs: ranks there use its memory anyway"),
                       ([9], "no NUMA node 9")):
        with pytest.raises(ValueError, match=why):
            place(topology, nodes=[0], memory_nodes=nodes)
    found = doctor.nodes_of(topology)
    assert any("node 2 has 64 GiB and no CPUs (CXL, for example)" in f.text for f in found if f.level == "ok")
    assert all(f.remedy for f in found if f.level != "ok") and any("node 1 has no memory" in f.text for f in found)


def test_each_start_is_planned_anew(tmp_path, monkeypatch):
    """A node whose CPUs went offline between two incarnations of a group gets no rank."""
    monkeypatch.setattr(plan, "read_topology", lambda: read_topology(machine(tmp_path, {0: [[0]], 1: [[1]]})))
    assert len(plan_group(GroupOptions()).placement.ranks) == 2
    monkeypatch.setattr(plan, "read_topology", lambda: read_topology(machine(tmp_path, {0: [[0]], 1: [[1]]},
                                                                                offline=[1])))
    assert [r.node for r in plan_group(GroupOptions()).placement.ranks] == [0]
    assert [r.node for r in plan_group(GroupOptions(), keep=2).placement.ranks] == [0, 0]


def test_kernel_settings_have_a_remedy(tmp_path):
    root = machine(tmp_path, {0: [[0], [1]], 1: [[2], [3]], 2: []})
    topology = read_topology(root)
    assert doctor.kernel_of(topology, str(root)) == []
    settings = {"sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
                "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
                "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise madvise [never]",
                "proc/sys/kernel/numa_balancing": "2", "sys/kernel/mm/numa/demotion_enabled": "true"}
    for name, text in settings.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    found = doctor.kernel_of(topology, str(root))
    assert [f.subject for f in found] == ["clock", "huge pages", "huge pages", "NUMA", "NUMA"]
    assert "CPUs 1 is 'powersave'" in found[0].text and all(f.remedy for f in found if f.level == "note")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]")
    assert "huge pages are off" in doctor.kernel_of(topology, str(root))[1].text


def test_offline_cpus_and_nodes_of_different_size(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0, 8], [1, 9], [2, 10], [3, 11]], 1: [[4, 12], [5, 13]]},
                                     offline=[1, 9, 4]))
    assert topology.offline_cpus == [1, 4, 9]
    assert cpus_of(place(topology)) == [(0, 2, 3), (5, 12)]     # 12's sibling is offline: it is a core by itself
    assert [r.node for r in place(topology, 3).ranks] == [0, 0, 1]


def test_restricted_affinity_and_memory(tmp_path):
    topology = read_topology(machine(tmp_path, {0: [[0, 4], [1, 5]], 1: [[2, 6], [3, 7]]}, allowed="1-2,5-6", mems="0"))
    assert cpus_of(place(topology, nodes=[0, 1])) == [(1,), (2,)]
    assert [r.memory_node for r in place(topology, nodes=[0, 1]).ranks] == [0, 0]
    assert not place(topology, nodes=[0]).ranks[0].whole_node
    assert topology.default_nodes == [0]


def test_memory_that_no_node_reports_is_counted_and_shown(tmp_path, capsys):
    root = machine(tmp_path, {0: [[0]], 1: [[1]], 2: []}, memory={0: 4, 1: 4, 2: 8})
    (root / "proc/meminfo").write_text(f"MemTotal: {30 << 20} kB\nMemAvailable: {28 << 20} kB\n")
    topology = read_topology(root)
    assert [node.memory_total >> 30 for node in topology.nodes] == [11, 11, 8]
    assert [node.memory_free >> 30 for node in topology.nodes] == [10, 10, 6]
    print_topology(topology)
    assert "14.0 GiB of this machine's memory are reported of no node" in capsys.readouterr().out


def test_kernel_without_numa_and_cgroup_quota(tmp_path):
    root = machine(tmp_path, {0: [[0], [1], [2], [3]]})
    for file in (root / "sys/devices/system/node/node0").iterdir():
        file.unlink()
    (root / "sys/devices/system/node/node0").rmdir()
    (root / "proc/meminfo").write_text("MemTotal:  2097152 kB\nMemAvailable:  1048576 kB\n")
    folder = root / "sys/fs/cgroup/a/b"
    folder.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    (folder.parent / "cpu.max").write_text("150000 100000\n")
    (folder / "cpu.max").write_text("max 100000\n")
    (folder / "memory.max").write_text("1073741824\n")
    topology = read_topology(root)
    assert topology.nodes[0].memory_total == 2 << 30
    assert topology.cpu_quota == 1.5 and topology.memory_limit == 1 << 30
    placement = place(topology, 2)
    assert cpus_of(placement) == [(0,), (2,)]
    assert placement.oversubscribed and "the cgroup allows 1.5 CPUs: 2 threads instead of 4" in placement.warnings[0]
    assert place(topology, 2, cpus_per_rank=2).oversubscribed and cpus_of(place(topology)) == [(0, 1)]
    assert not place(topology, 1, cpus_per_rank=1).oversubscribed


@pytest.mark.parametrize("files", [
    {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"},         # a container's own view
    {"proc/self/cgroup": "0::/kubepods/pod1/c1\n", "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000\n",
     "sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "max 100000\n", "sys/fs/cgroup/kubepods/cpu.max": "900000 100000\n"},
    {"proc/self/cgroup": "4:cpu,cpuacct:/kubepods/pod1\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
     "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/cpu/kubepods/pod1/cpu.cfs_quota_us": "350000\n",
     "sys/fs/cgroup/cpu/kubepods/pod1/cpu.cfs_period_us": "100000\n"},
], ids=["container", "version 2", "version 1"])
def test_a_quota_limits_threads(tmp_path, files):
    """The usual case in Kubernetes: all cores of a large host are visible, but only the time of four may be used."""
    root = machine(tmp_path, {0: [[c] for c in range(64)]})
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    placement = place(read_topology(root))
    assert cpus_of(placement) == [(0, 1, 2, 3)]
    assert "4 threads instead of 63" in placement.warnings[0]
    assert [len(c) for c in cpus_of(place(read_topology(root), 3))] == [1, 1, 1]
    from allspark_server.runtime.memory import physical_cores
    assert physical_cores(root=str(root)) <= 4 and physical_cores([0], root=str(root)) == 1


def test_a_quota_without_cpus_of_its_own_pins_nothing(tmp_path):
    """Two containers with a quota of four CPUs chose the same four of a large host."""
    root = machine(tmp_path, {0: [[c, c + 32] for c in range(32)]})
    file = root / "sys/fs/cgroup/cpu.max"
    file.parent.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    file.write_text("400000 100000\n")
    placement = place(read_topology(root))
    (rank,) = placement.ranks
    assert len(rank.cpus) == 4 and not rank.pinned and len(rank.bound_cpus) == 64
    assert "none that are this group's own: threads are not pinned" in placement.warnings[-1]
    assert "--no-pin" in launch_mpi.group_command(MPI5, placement, "python", [], use_numactl=False)
    # Kubernetes' static CPU manager: a cpuset of as many CPUs as the quota.
    own = place(read_topology(root, affinity=[0, 1, 32, 33]))
    assert own.ranks[0].pinned and own.ranks[0].cpus == (0, 1) and not own.warnings


def rank_0(placement):
    return placement.ranks[0].cpus, placement.ranks[0].pinned, placement.oversubscribed


def test_groups_take_cores_that_no_other_has(tmp_path):
    cores = [[c, c + 8] for c in range(8)]
    topology = read_topology(machine(tmp_path, {0: cores[:4], 1: cores[4:]}))
    others = dict.fromkeys((0, 1), 77)
    # They would both have chosen the first cores.
    beside = place_beside(topology, others, lambda t: place(t, nodes=[0], cpus_per_rank=2))
    assert rank_0(beside) == ((2, 3), True, False) and not {0, 1} & set(beside.ranks[0].bound_cpus)
    assert "6 of 8 cores are free: the group of process 77 uses the others" in beside.warnings
    # A group without wishes takes the nodes that are free.
    others = dict.fromkeys((0, 1, 2, 3), 77)
    assert [r.node for r in place_beside(topology, others, place).ranks] == [1]
    # One that must share sleeps in waits, and is not pinned.
    shared = place_beside(topology, others, lambda t: place(t, nodes=[0]))
    assert rank_0(shared) == ((0, 1, 2, 3), False, True)
    assert "CPUs 0-3 are shared: the group of process 77 uses them too" in shared.warnings[-1]
    # Not more ranks than free cores on one of them, either.
    assert [r.node for r in place_beside(topology, dict.fromkeys((0, 1, 2, 3, 4, 5, 6), 77),
                                         lambda t: place(t, 3)).ranks] == [0, 0, 1]
    with pytest.raises(ValueError, match="no NUMA node 5"):
        place_beside(topology, others, lambda t: place(t, nodes=[5]))


def test_cpus_are_reserved_as_long_as_the_process_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(reservations, "folder", lambda: tmp_path / "r")
    one, two = reservations.CpuReservation(), reservations.CpuReservation()
    one.take([0, 1])
    two.take([2])
    assert one.others() == {2: os.getpid()} and two.others() == dict.fromkeys((0, 1), os.getpid())
    two.take([2, 3])
    assert set(one.others()) == {2, 3}
    assert reservations.pending([]) == 0, "they are no memory"
    code = ("import os\nfrom pathlib import Path\nfrom allspark_server.runtime import reservations\n"
            f"reservations.folder = lambda: Path({str(tmp_path / 'r')!r})\n"
            "r = reservations.CpuReservation()\nr.take([7])\nprint(sorted(r.others()), flush=True)\nos._exit(0)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 1, 2, 3]\n" and 7 not in one.others(), "it was killed"
    two.close()
    assert one.others() == {}


def test_plans_reserve_and_keep_their_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(reservations, "folder", lambda: tmp_path / "r")
    first, second, third = (reservations.CpuReservation() for _ in range(3))
    plan = plan_group(GroupOptions(), reserved=first)
    assert "not pinned" not in plan.describe()[0]
    shared = plan_group(GroupOptions(), reserved=second)
    assert "not pinned" in shared.describe()[0] and "--no-pin" in shared.words and "--no-spin" in shared.words
    # A restart changes neither: the first still has its CPUs, the second still shares them.
    assert plan_group(GroupOptions(), reserved=first).words == plan.words
    assert plan_group(GroupOptions(), reserved=second).words == shared.words
    meant = plan_group(GroupOptions(share_cpus=True), reserved=third)
    assert "--no-pin" in meant.words and not meant.placement.warnings and not set(third.others()) - set(first._cpus)
    first.close()
    second.close()
    assert plan_group(GroupOptions(), reserved=second).words == plan.words


# ---- command lines -------------------------------------------------------------------------------------------------

MPI5 = launch_mpi.Installation(Path("/opt/mpi/bin/mpirun"), Path("/opt/mpi/lib/libmpi.so.40"), (5, 0, 1), "system")
MPI4 = launch_mpi.Installation(Path("/usr/bin/mpirun"), Path("/usr/lib/libmpi.so.40"), (4, 1, 4), "system")


def contexts(words: list[str]) -> list[list[str]]:
    """The command words of each rank, from its -np on."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
    found[0] = found[0][found[0].index("-np"):]
    return found


def test_command_line_by_node(tmp_path):
    placement = place(read_topology(machine(tmp_path, {0: [[0], [1]], 1: [[2], [3]]})))
    words = launch_mpi.group_command(MPI5, placement, "python", ["--address", "unix:/a b"], use_numactl=True)
    first, second = contexts(words)
    assert first == ["-np", "1", "-x", "LD_PRELOAD=", "numactl", "--cpunodebind=0", "--membind=0", "python", "-m",
                     "allspark_server", "--ranks", "2", "--cpus", "0,1", "--address", "unix:/a b"]
    assert second == ["-np", "1", "-x", "LD_PRELOAD=", "numactl", "--cpunodebind=1", "--membind=1", "python", "-m",
                      "allspark_server", "--ranks", "2", "--cpus", "2,3"]
    assert "self,sm" in words and words[words.index("--bind-to") + 1] == "none" and "--oversubscribe" in words
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    line = launch_mpi.shell_line({"MPI4PY_LIBMPI": "/x"}, words)
    assert shlex.split(line) == ["MPI4PY_LIBMPI=/x", *words]


def test_command_line_of_ranks_that_share_a_node(tmp_path, monkeypatch):
    placement = place(read_topology(machine(tmp_path, {0: [[0], [1]]})), 3)
    words = launch_mpi.group_command(MPI4, placement, "python", [], use_numactl=True, bind_memory=False)
    assert "self,vader" in words and "mpi_yield_when_idle" in words
    for rank, context in enumerate(contexts(words)):
        assert context[4:6] == ["numactl", f"--physcpubind={rank % 2}"]
        assert "--no-spin" in context and not any("membind" in w for w in context)
    monkeypatch.setattr(launch_mpi.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "numactl" in launch_mpi.group_command(MPI4, placement, "python", [])
    words = launch_mpi.group_command(MPI4, placement, "python", [], bind_memory=False)  # newer ones would exit
    assert "numactl" not in words and contexts(words)[1][-3:] == ["--bind-cpus", "1", "--no-spin"]
    words = launch_mpi.group_command(MPI4, placement, "python", [], use_numactl=False)
    assert contexts(words)[1][-7:] == ["--bind-cpus", "1", "--bind-memory", "0", "--ranks-on-nodes", "0:3", "--no-spin"]


def test_library_belongs_to_mpirun(tmp_path):
    for prefix, folder in (("a", "lib"), ("b", "lib/x86_64-linux-gnu")):
        (tmp_path / prefix / "bin").mkdir(parents=True)
        (tmp_path / prefix / "bin/mpirun").write_text("")
        (tmp_path / prefix / folder).mkdir(parents=True)
        (tmp_path / prefix / folder / "libmpi.so.40").write_text("")
        (tmp_path / prefix / folder / "libmpi.so").write_text("")
        assert launch_mpi.library_of(tmp_path / prefix / "bin/mpirun") == tmp_path / prefix / folder / "libmpi.so.40"
    (tmp_path / "c/bin").mkdir(parents=True)
    assert launch_mpi.library_of(tmp_path / "c/bin/mpirun") is None


def test_forced_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("ALLSPARK_MPIRUN", str(tmp_path / "none"))
    with pytest.raises(launch_mpi.MpiNotFound, match="ALLSPARK_MPIRUN is .* not an executable"):
        launch_mpi.find_mpi()
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho HYDRA build details\n")
    fake.chmod(0o755)
    monkeypatch.setenv("ALLSPARK_MPIRUN", str(fake))
    with pytest.raises(launch_mpi.MpiNotFound, match="is not Open MPI's .*HYDRA"):
        launch_mpi.find_mpi()
    fake.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 3.1.2'\n")
    with pytest.raises(launch_mpi.MpiNotFound, match="version 4 or later"):
        launch_mpi.find_mpi()


def test_what_mpirun_says_is_passed_on(monkeypatch, tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho \"home: $HOME\" >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("ALLSPARK_MPIRUN", str(fake))
    monkeypatch.delenv("HOME")
    with pytest.raises(launch_mpi.MpiNotFound, match="does not run: --version ended with status 1: home: /"):
        launch_mpi.find_mpi()


def test_dry_run_prints_only_the_line(capsys):
    assert main(["serve", "--dry-run", "--ranks", "2", "--address", "unix:/tmp/a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    words = shlex.split(lines[0])
    assert words[0].startswith("MPI4PY_LIBMPI=") and next(w for w in words if "=" not in w).endswith("mpirun")
    assert words.count("allspark_server") == 2 and words.count("--address") == 1


def test_number_of_ranks_from_the_environment(monkeypatch):
    monkeypatch.setenv("AS_NUMA_NUM", "3")
    assert len(plan_group(GroupOptions()).placement.ranks) == 3
    assert len(plan_group(GroupOptions(ranks=2)).placement.ranks) == 2
    monkeypatch.setenv("AS_NUMA_NUM", "many")
    with pytest.raises(ValueError, match="AS_NUMA_NUM is 'many'"):
        plan_group(GroupOptions())


def test_serve_config_file(tmp_path, capsys):
    config = tmp_path / "group.json"
    config.write_text(json.dumps({"ranks": 2, "address": "unix:/tmp/x", "models": ["/m"]}))
    assert main(["serve", "--config", str(config), "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("--address") + 1] == "unix:/tmp/x" and words[words.index("--model") + 1] == "/m"
    bad = {'{"rank": 2}': "unknown key 'rank'", '{"ranks": "2"}': "ranks is '2'", "[": "group.json"}
    for text, message in bad.items():
        config.write_text(text)
        assert main(["serve", "--config", str(config), "--dry-run"]) == EXIT_CONFIG
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments,message", [
    (["serve", "--model", "/nowhere", "--dry-run"], "there is no such file or directory"),
    (["serve", "--numa-nodes", "77", "--dry-run"], "no NUMA node 77"),
    (["run", " "], "the prompt is empty"),
    (["run", "--image", "/nowhere.png", "x"], "the image '/nowhere.png' cannot be read: No such file"),
    (["run", "--image", __file__, "x"], "test_launch.py': the image begins with"),
    (["run", "--raw", "--image", "/nowhere.png", "x"], "--image needs the chat template"),
    (["run", "--model", "/", "--set", "engine_max_lenght=3", "x"], "engine_max_length"),
    (["convert", "/nowhere", "/tmp/x", "--weight-dtype", "int4"], "/nowhere is not a directory"),
])
def test_mistakes_are_reported(arguments, message, capsys):
    assert main(arguments) == (EXIT_CONFIG if arguments[0] == "serve" else 1)
    assert message in capsys.readouterr().err


def test_doctor_counts_at_least_the_shared_memory_that_a_rank_takes():
    from allspark_server import _native
    needed = _native.SharedMemory.bytes_needed(2)
    assert needed <= doctor.SHARED_MEMORY_PER_RANK < needed + (4 << 20)


def test_doctor_on_shared_memory_that_others_may_change(monkeypatch, tmp_path):
    machine = read_topology()
    monkeypatch.setattr(doctor, "trusted", lambda path: False)
    (finding,) = doctor._shared_memory(machine)
    assert finding.level == "note" and "other users may rename files there" in finding.text
    assert "statefulset.yaml" in finding.remedy


def test_topology_and_doctor_for_programs(capsys):
    assert main(["topology", "--json", "--ranks", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["ranks"]) == 2 and report["nodes"]
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert {"python", "MPI", "processor", "memory", "memory policy"} <= {f["subject"] for f in findings}
    assert all(f["remedy"] for f in findings if f["level"] != "ok")


def test_what_the_machine_looks_like(tmp_path):
    root = machine(tmp_path, {0: [[0, 4], [1, 5]], 1: [[2, 6], [3, 7]], 2: []}, memory={0: 64, 1: 64, 2: 256})
    for cpu in range(8):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        folder.mkdir(parents=True)
        shared = "0-1,4-5" if cpu in (0, 1, 4, 5) else "2-3,6-7"
        for name, text in (("level", "3"), ("size", "32768K"), ("type", "Unified"), ("shared_cpu_list", shared)):
            (folder / name).write_text(text + "\n")
    gpu = root / "sys/bus/pci/devices/0000:17:00.0"
    gpu.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "1")):
        (gpu / name).write_text(text + "\n")
    found = read_topology(root)
    assert [(cache.level, cache.size, cache.cpus) for cache in found.caches] == \
        [(3, 32 << 20, (0, 1, 4, 5)), (3, 32 << 20, (2, 3, 6, 7))]
    assert found.gpus == [Gpu("0000:17:00.0", 1, 0)]
    picture = draw(found, place(found))
    shapes = xml.etree.ElementTree.fromstring(picture)
    texts = [element.text for element in shapes.iter("{http://www.w3.org/2000/svg}text")]
    assert {"node 0", "node 1", "node 2", "GPU 0 0000:17:00.0", "rank 0: 2 threads",
            "L3 32,768 KiB for CPUs 2-3,6-7"} <= \
        set(texts)
    assert picture.count("rank 1</title>") == 2 and "21" in texts
    with pytest.raises(ValueError, match="must end in .svg"):
        save("x.png", found, place(found))


def test_folders_of_killed_processes_are_removed(tmp_path):
    (tmp_path / f"{folders.PREFIX}old").mkdir()
    with private_folder(str(tmp_path)) as first:
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        with private_folder(str(tmp_path)) as second:
            assert first.exists() and second.exists() and not (tmp_path / f"{folders.PREFIX}old").exists()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_prepared_harms_no_file(tmp_path):
    """Any user may create a "stale" folder in /tmp. Files that it links to must be neither truncated nor removed."""
    parent, victim = tmp_path / "tmp", tmp_path / "victim"
    parent.mkdir()
    parent.chmod(0o1777)
    victim.mkdir()
    (victim / "lock").write_text("precious")
    for prefix in {"allspark-group-", folders.PREFIX}:
        planted = parent / f"{prefix}planted"
        planted.mkdir()
        (planted / "lock").symlink_to(victim / "lock")
        (parent / f"{prefix}link").symlink_to(victim)
        if os.geteuid() == 0:
            os.chown(planted, 65534, 65534)
    with private_folder(str(parent)):
        pass
    assert (victim / "lock").read_text() == "precious"
    assert (parent / f"{folders.PREFIX}link").is_symlink()
    assert (parent / f"{folders.PREFIX}planted").exists() == (os.geteuid() == 0)     # others' folders are left alone


def test_folders_that_others_could_exchange_are_not_removed(tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / f"{folders.PREFIX}old").mkdir()
    assert not folders.trusted(str(tmp_path))
    folders.remove_stale(str(tmp_path))
    assert (tmp_path / f"{folders.PREFIX}old").exists()


def test_groups_that_start_together_keep_their_folders(tmp_path):
    """Many processes create and remove folders; each must find its own intact until it has finished."""
    code = ("import sys\nfrom allspark_launch.group.folders import private_folder\n"
            "for i in range(60):\n"
            "    with private_folder(sys.argv[1]) as folder:\n"
            "        for file in 'abcd':\n"
            "            (folder / file).write_text(file)\n"
            "        assert ''.join((folder / file).read_text() for file in 'abcd') == 'abcd'\n")
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
               for _ in range(8)]
    assert [p.communicate(timeout=60)[1] for p in running] == [""] * 8
    assert not list(tmp_path.iterdir())
