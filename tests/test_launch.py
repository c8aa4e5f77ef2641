"""The launcher without a model: topology of fabricated machines, placement, command lines, and the supervisor with
ranks that only send heartbeats."""
import functools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from allspark_launch import mpi as launch_mpi
from allspark_launch.cli import main
from allspark_launch.placement import place
from allspark_launch.pool import Pool, units
from allspark_launch.serving import GroupOptions, plan_group, private_folder, tell_systemd
from allspark_launch.supervisor import GroupFailed, Limits, Supervisor, processes_of_session
from allspark_launch.topology import format_list, parse_list, read_topology

import waiting

wait_for = functools.partial(waiting.wait_for, seconds=20.0)
REPOSITORY = Path(__file__).resolve().parent.parent
GIB = 1 << 20       # in the kB of meminfo


# ---- topology ------------------------------------------------------------------------------------------------------

def machine(root: Path, nodes: dict[int, list[list[int]]], *, memory: dict[int, int] | None = None,
            offline: list[int] = (), allowed: str | None = None, mems: str | None = None,
            distances: list[list[int]] | None = None) -> Path:
    """Fabricate sysfs below `root`. nodes: id -> cores, each a list of its hardware threads. memory: node -> GiB."""
    cpus = sorted(c for cores in nodes.values() for core in cores for c in core)
    online = [c for c in cpus if c not in offline]

    def write(path: str, text: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    write("sys/devices/system/cpu/present", format_list(cpus))
    write("sys/devices/system/cpu/online", format_list(online))
    for index, (node, cores) in enumerate(nodes.items()):
        folder = f"sys/devices/system/node/node{node}"
        members = [c for core in cores for c in core if c in online]
        write(f"{folder}/cpulist", format_list(members))
        row = distances[index] if distances else [10 if other == node else 21 for other in nodes]
        write(f"{folder}/distance", " ".join(map(str, row)))
        size = (memory or {}).get(node, 64) * GIB
        write(f"{folder}/meminfo", f"Node {node} MemTotal:  {size} kB\nNode {node} MemFree:  {size // 2} kB\n"
                                   f"Node {node} Inactive(file):  {size // 4} kB")
        for number, core in enumerate(cores):
            for cpu in core:
                if cpu in online:           # an offline CPU has no topology folder
                    write(f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(number))
                    write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(node // 3))
                    write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                          format_list(c for c in core if c in online))
    write("proc/self/status", f"Cpus_allowed_list:\t{allowed or format_list(online)}\n"
                              f"Mems_allowed_list:\t{mems or format_list(nodes)}")
    return root


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
    assert placement.oversubscribed and "the cgroup allows 1.5 CPUs" in placement.warnings[0]
    assert not place(topology, 1, cpus_per_rank=1).oversubscribed


# ---- command lines -------------------------------------------------------------------------------------------------

MPI5 = launch_mpi.Installation(Path("/opt/mpi/bin/mpirun"), Path("/opt/mpi/lib/libmpi.so.40"), (5, 0, 1), "system")
MPI4 = launch_mpi.Installation(Path("/usr/bin/mpirun"), Path("/usr/lib/libmpi.so.40"), (4, 1, 4), "system")


def contexts(words: list[str]) -> list[list[str]]:
    """The words of each rank, from its -np on."""
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
    assert first == ["-np", "1", "numactl", "--cpunodebind=0", "--membind=0", "python", "-m", "allspark_server",
                     "--ranks", "2", "--cpus", "0,1", "--address", "unix:/a b"]
    assert second == ["-np", "1", "numactl", "--cpunodebind=1", "--membind=1", "python", "-m", "allspark_server",
                      "--ranks", "2", "--cpus", "2,3"]
    assert "self,sm" in words and words[words.index("--bind-to") + 1] == "none" and "--oversubscribe" in words
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    line = launch_mpi.shell_line({"MPI4PY_LIBMPI": "/x"}, words)
    assert shlex.split(line) == ["MPI4PY_LIBMPI=/x", *words]


def test_command_line_of_ranks_that_share_a_node(tmp_path):
    placement = place(read_topology(machine(tmp_path, {0: [[0], [1]]})), 3)
    words = launch_mpi.group_command(MPI4, placement, "python", [], use_numactl=True, bind_memory=False)
    assert "self,vader" in words and "mpi_yield_when_idle" in words
    for rank, context in enumerate(contexts(words)):
        assert context[2:4] == ["numactl", f"--physcpubind={rank % 2}"]
        assert "--no-spin" in context and not any("membind" in w for w in context)
    words = launch_mpi.group_command(MPI4, placement, "python", [], use_numactl=False)
    assert contexts(words)[1][-5:] == ["--bind-cpus", "1", "--bind-memory", "0", "--no-spin"]


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


def test_dry_run_prints_only_the_line(capsys):
    assert main(["serve", "--dry-run", "--ranks", "2", "--address", "unix:/tmp/a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    words = shlex.split(lines[0])
    assert words[0].startswith("MPI4PY_LIBMPI=") and words[1].endswith("mpirun")
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
        assert main(["serve", "--config", str(config), "--dry-run"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments,message", [
    (["serve", "--model", "/nowhere", "--dry-run"], "there is no such file or directory"),
    (["serve", "--numa-nodes", "77", "--dry-run"], "no NUMA node 77"),
    (["run", " "], "the prompt is empty"),
    (["run", "--model", "/", "--set", "engine_max_lenght=3", "x"], "engine_max_length"),
    (["convert", "/nowhere", "/tmp/x", "--weight-dtype", "int4"], "/nowhere is not a directory"),
])
def test_mistakes_are_told(arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_topology_and_doctor_for_programs(capsys):
    assert main(["topology", "--json", "--ranks", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["ranks"]) == 2 and report["nodes"]
    main(["doctor", "--json"])
    assert {"python", "MPI"} <= {f["subject"] for f in json.loads(capsys.readouterr().out)}


def test_pool_units(tmp_path, capsys):
    pytest.importorskip("tomllib") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")
    example = REPOSITORY / "launch/systemd/pool.toml"
    files = units(Pool.from_file(str(example)), Path("/etc/allspark"))
    assert set(files) == {"allspark-default-a.service", "allspark-default-b.service", "allspark-default.target"}
    assert "serve --config /etc/allspark/default-a.json" in files["allspark-default-a.service"]
    assert not any("{" in text for text in files.values())
    arguments = ["pool", "install", "--config", str(example), "--unit-dir", str(tmp_path / "u"),
                 "--config-dir", str(tmp_path / "c")]
    assert main(arguments) == 0
    assert "systemctl" in capsys.readouterr().out
    assert json.loads((tmp_path / "c/default-b.json").read_text())["numa_nodes"] == [2, 3]
    assert main(["serve", "--config", str(tmp_path / "c/default-a.json"), "--numa-nodes", "0", "--dry-run"]) == 0
    bad = tmp_path / "pool.json"
    bad.write_text(json.dumps({"member": [{"name": "a", "address": "x:1"}, {"name": "b", "address": "x:1"}]}))
    assert main(["pool", "install", "--config", str(bad)]) == 1
    assert "both have address x:1" in capsys.readouterr().err


def test_status_of_a_group_that_is_down(capsys, tmp_path):
    assert main(["pool", "status", "--address", f"unix:{tmp_path}/none"]) == 1
    assert "down" in capsys.readouterr().out


def test_systemd_is_told(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        tell_systemd(str(tmp_path / "notify"))
        assert listener.recv(100) == b"READY=1"
    tell_systemd("")        # not started by systemd


def test_folders_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "allspark-group-old").mkdir()
    (tmp_path / "allspark-group-old" / "lock").touch()
    with private_folder(str(tmp_path)) as first:
        with private_folder(str(tmp_path)) as second:
            assert first.exists() and second.exists() and not (tmp_path / "allspark-group-old").exists()
    assert not list(tmp_path.iterdir())


# ---- supervisor ----------------------------------------------------------------------------------------------------

FAKE_RANK = """
import os, signal, sys, time
from allspark_server.runtime.binding import die_with_parent
die_with_parent(signal.SIGKILL)
from allspark_server.runtime.worker import Heartbeat
rank, mode = int(sys.argv[1]), sys.argv[2]
heartbeat = Heartbeat(os.environ["ALLSPARK_SUPERVISOR"], rank)
heartbeat.start()
if mode == "crash":
    print(f"rank {rank} has a bad day", flush=True)
    os._exit(7)
if mode == "fatal":
    heartbeat.state("failed", error=f"rank {rank}: the port is in use", fatal=True)
    time.sleep(60)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if mode == "stubborn" else lambda *_: os._exit(0))
if mode == "stuck":
    heartbeat.watch(type("Member", (), {"step_began": time.monotonic(), "window": None}))
heartbeat.state("ready", **({"addresses": ["unix:/fake"]} if rank == 0 else {}))
open(f"{sys.argv[0]}.{os.getpid()}.sent", "w").close()
while True:
    time.sleep(60)
"""
# As mpirun: starts the ranks, ends all when one ends.
FAKE_MPIRUN = """
import os, signal, subprocess, sys
children = [subprocess.Popen([sys.executable, sys.argv[1], str(r), sys.argv[3]], preexec_fn=os.setpgrp)
            for r in range(int(sys.argv[2]))]
signal.signal(signal.SIGTERM, lambda *_: [c.terminate() for c in children])
pid, status = os.wait()
for c in children:
    if c.pid != pid:
        c.kill()
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""
DRIVER = """
import logging, os, signal, sys
from pathlib import Path
from allspark_launch.supervisor import GroupFailed, Limits, Supervisor
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
folder, mode, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
words = [sys.executable, str(folder / "mpirun.py"), str(folder / "rank.py"), "2", mode]
limits = Limits(heartbeat_timeout=2.5, step_timeout=2, stop_timeout=3, kill_timeout=1, first_backoff=0.1,
                max_fast_failures=3)
s = Supervisor(words, dict(os.environ), 2, folder, ready_file=folder / "ready", parent_pid=parent, limits=limits)
for n in (signal.SIGTERM, signal.SIGINT):
    signal.signal(n, lambda *_: s.request_stop("signal"))
try:
    s.run()
except GroupFailed as error:
    print("GAVE UP:", error)
    sys.exit(1)
"""


class Fake:
    """A supervisor process over two fake ranks."""

    def __init__(self, folder: Path, mode: str = "good", parent: int = 0):
        for name, text in (("rank.py", FAKE_RANK), ("mpirun.py", FAKE_MPIRUN), ("driver.py", DRIVER)):
            (folder / name).write_text(textwrap.dedent(text))
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, str(folder / "driver.py"), str(folder), mode, str(parent)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)

    def wait_ready(self) -> dict:
        wait_for(lambda: (self.folder / "ready").exists())
        wait_for(lambda: len(self.ranks()) == 2)
        # Both have been heard of: a rank stopped before its first heartbeat is late in starting, not silent.
        wait_for(lambda: all((self.folder / f"rank.py.{pid}.sent").exists() for pid in self.ranks()))
        return json.loads((self.folder / "ready").read_text())

    def processes(self, script: str) -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if str(self.folder / script) in command_of(pid).split("\0")[1:2]]

    def ranks(self) -> list[int]:
        return self.processes("rank.py")

    def mpirun(self) -> list[int]:
        return self.processes("mpirun.py")

    def nothing_left(self) -> bool:
        return not self.ranks() and not self.mpirun()

    def finish(self) -> tuple[str, str]:
        output = self.process.communicate(timeout=30)
        wait_for(self.nothing_left)
        return output


def command_of(pid: int) -> str:
    """A process's command line; "" once it has ended, also as a zombie."""
    try:
        return Path("/proc", str(pid), "cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def fake(tmp_path):
    started = []

    def start(*arguments, **keywords):
        started.append(Fake(tmp_path, *arguments, **keywords))
        return started[-1]

    yield start
    for f in started:
        f.process.kill()
        f.process.communicate()
        wait_for(f.nothing_left)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_supervisor_stops_on_a_signal(fake, number):
    f = fake()
    ready = f.wait_ready()
    assert ready == {"addresses": ["unix:/fake"], "pid": f.process.pid, "ranks": 2}
    started = time.monotonic()
    f.process.send_signal(number)
    f.finish()
    assert f.process.returncode == 0 and time.monotonic() - started < 3
    assert not (f.folder / "ready").exists()


def test_stop_is_bounded_when_ranks_do_not_listen(fake):
    f = fake("stubborn")
    f.wait_ready()
    started = time.monotonic()
    f.process.terminate()
    f.finish()
    assert f.process.returncode == 0 and time.monotonic() - started < 8


@pytest.mark.parametrize("victim", ["rank", "mpirun"])
def test_group_is_restarted_after_a_kill(fake, victim):
    f = fake()
    f.wait_ready()
    before = set(f.ranks())
    os.kill(f.ranks()[1] if victim == "rank" else f.mpirun()[0], signal.SIGKILL)
    wait_for(lambda: len(set(f.ranks()) - before) >= 2)  # under load a new one may be lost as well
    assert not before & set(f.ranks())
    f.process.terminate()
    _, log = f.finish()
    assert "starting it again" in log


def test_nothing_outlives_a_killed_supervisor(fake):
    f = fake()
    f.wait_ready()
    f.process.kill()
    f.finish()


def test_a_silent_rank_is_noticed(fake):
    f = fake()
    f.wait_ready()
    before = set(f.ranks())
    os.kill(max(before), signal.SIGSTOP)
    wait_for(lambda: len(set(f.ranks()) - before) >= 2)  # under load a new one may be lost as well
    f.process.terminate()
    _, log = f.finish()
    assert "has been silent for" in log


def test_a_rank_stuck_in_a_step_is_noticed(fake):
    f = fake("stuck")
    f.wait_ready()
    before = set(f.ranks())
    wait_for(lambda: len(set(f.ranks()) - before) >= 2)  # under load a new one may be lost as well
    f.process.terminate()
    _, log = f.finish()
    assert "has been in one step for" in log


def test_supervisor_gives_up_with_the_last_lines(fake):
    f = fake("crash")
    output, _ = f.finish()
    assert f.process.returncode == 1
    assert "failed 3 times in a row" in output and "has a bad day" in output
    assert "has a bad day" in json.loads((f.folder / "ready").read_text())["error"]


def test_an_error_of_the_start_is_not_repeated(fake):
    f = fake("fatal")
    started = time.monotonic()
    output, log = f.finish()
    assert f.process.returncode == 1 and time.monotonic() - started < 10
    assert "the port is in use" in output and "starting it again" not in log


def test_supervisor_ends_with_its_parent(fake):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    f = fake(parent=parent.pid)
    f.wait_ready()
    parent.kill()
    parent.wait()
    f.finish()
    assert f.process.returncode == 0


def test_supervisor_in_process_reports_a_missing_mpirun(tmp_path):
    supervisor = Supervisor(["/nowhere/mpirun"], {}, 1, tmp_path, limits=Limits(max_fast_failures=1))
    with pytest.raises((GroupFailed, OSError), match="/nowhere/mpirun"):
        supervisor.run()
    assert processes_of_session(2 ** 22 + 1) == []
