"""Groups over several hosts. Tests that need no root split this host into several by name only: their ranks then talk
by MPI as those of different hosts do. See test_namespaces.py for hosts that are namespaces.
"""
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_launch.cli import EXIT_CONFIG, main
from allspark_launch.group import hosts
from allspark_launch.group.hosts import Allocation, Host, find_hosts, read_host_file, share_ranks
from allspark_launch.group.mpi import clean_environment, installations
from allspark_server.runtime.hosts import HostsError, Layout, layout_of
from allspark_server.weights.copies import check_copies, file_digests
from support.paths import SUPPORT
from support.waiting import wait_for

HERE = SUPPORT / "over_hosts"
MPIS = {i.source: i for i in installations()[0]}
OWN = socket.gethostname()


def mpirun(source: str, ranks: int, *words: str) -> subprocess.Popen:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return subprocess.Popen([MPIS[source].mpirun, *root, "--bind-to", "none", "--oversubscribe", "-np", str(ranks),
                             sys.executable, *words], env=clean_environment(), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.parametrize("source,ranks,count", [
    *((source, 4, 2) for source in MPIS),
    *(pytest.param(next(iter(MPIS)), *shape, marks=pytest.mark.slow) for shape in ((4, 4), (3, 2), (5, 2), (7, 3)))])
def test_windows_over_hosts(source, ranks, count):
    """Sums, rows, messages and commands equal those on one host, bit by bit; aborts reach every rank."""
    process = mpirun(source, ranks, str(HERE / "window_ranks.py"), str(count))
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "all checks passed" in output, output


def answer(folder: Path, model: Path, *words: str) -> list:
    """The answer of a group of four ranks: ids and logprob bits."""
    process = mpirun(next(iter(MPIS)), 4, "-m", "allspark_server", "--no-spin", "--cpus", "0", "--model-root", "/",
                     "--address", f"unix:{folder}/s", *words)
    try:
        wait_for((folder / "s").exists)
        with ClientEngine(f"unix:{folder}/s") as engine:
            engine.install_model(AsModelConfig(model_name="m", model_path=str(model), engine_max_length=256))
            engine.start_model("m")
            found = []
            for length, config in ((5, {"do_sample": False}), (90, {"seed": 7, "temperature": 1.5, "top_k": 0})):
                ids = [(7 * i + 3) % 500 for i in range(length)]
                _, handle, queue = engine.start_request("m", {"input_ids": ids}, {
                    "max_new_tokens": 12, "logprobs": True, "top_logprobs": 3, "early_stopping": False, **config})
                for elements in queue:
                    found += zip(elements.ids_from_generate, elements.log_probs_list)
                engine.release_request("m", handle)
            engine.release_model("m")
            return found
    finally:
        process.terminate()
        print(process.communicate(timeout=20)[0])
        (folder / "s").unlink(missing_ok=True)


def test_a_group_over_hosts_gives_the_bits_of_one(tmp_path, tiny_model):
    one, two = answer(tmp_path, tiny_model), answer(tmp_path, tiny_model, "--split-hosts", "2")
    assert len(one) == 24 and two == one


def test_layouts():
    layout = layout_of([0, 0, 2, 2, 2], 3)
    assert layout == Layout([0, 2, 5], 1) and list(layout.here) == [2, 3, 4]
    assert [layout.receiver(r) for r in (0, 1)] == [2, 3] and layout.mirrors(4) == []
    assert Layout([0, 2, 5], 0).mirrors(0) == [2, 4] and Layout([0, 2, 5], 0).mirrors(1) == [3]
    with pytest.raises(HostsError, match="must be consecutive"):
        layout_of([0, 1, 0], 0)


def test_host_files(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"# a comment\n{OWN} slots=2\nnode-1.example.org:4\n\n10.0.0.3   # more\nn2 slots=1 max_slots=3\n")
    assert read_host_file(str(file)) == [Host(OWN, 2), Host("node-1.example.org", 4), Host("10.0.0.3"), Host("n2", 1)]
    for text, message in (("a b", "hosts:1: 'a b' must be"), ("", "names no host"), ("-oProxyCommand=x", "must be")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_host_file(str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        read_host_file(str(tmp_path / "none"))


def test_finding_hosts(tmp_path, monkeypatch):
    assert find_hosts(f"other.invalid,{OWN}", "env", {}) == Allocation((Host(OWN), Host("other.invalid")), ("env",))
    assert find_hosts(f"{OWN}:2,b.invalid", "", {}).shell[0] == "ssh"
    with pytest.raises(ValueError, match=r"this one \(.*\) is not among a.invalid, b.invalid"):
        find_hosts("a.invalid,b.invalid", "", {})
    with pytest.raises(ValueError, match="a is named twice"):
        find_hosts("a,a", "", {})
    with pytest.raises(ValueError, match="auto finds neither"):
        find_hosts("auto", "", {})
    with pytest.raises(ValueError, match="'/no/shell' is not an executable"):
        find_hosts(OWN, "/no/shell", {})
    # Slurm, whose scontrol knows the names
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n[ \"$3\" = 'n[1-2]' ] && printf 'n1.invalid\\n{OWN}\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = find_hosts("auto", "", {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert found.hosts == (Host(OWN), Host("n1.invalid"))
    assert found.shell[0] == "srun" and found.shell[-1] == "--nodelist"
    # the leader of a LeaderWorkerSet on Kubernetes, whose pod's name is its host name
    leader = f"{OWN}.llm.serving"
    found = find_hosts("auto", "env", {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "0"})
    assert found.hosts == (Host(leader), Host(f"{OWN}-1.llm.serving"), Host(f"{OWN}-2.llm.serving"))
    with pytest.raises(ValueError, match="needs LWS_GROUP_SIZE, a number of pods, not None"):
        find_hosts("auto", "env", {"LWS_LEADER_ADDRESS": leader})
    # the Kubernetes MPI operator
    file = tmp_path / "hostfile"
    file.write_text(f"w-0.invalid slots=1\n{OWN} slots=1\n")
    monkeypatch.setattr(hosts, "MPI_OPERATOR", file)
    found = find_hosts("auto", "", {"OMPI_MCA_plm_rsh_agent": "env", "OMPI_MCA_plm_rsh_args": "-o X=1"})
    assert found == Allocation((Host(OWN, 1), Host("w-0.invalid", 1)), ("env", "-o", "X=1"))


def test_sharing_ranks_out():
    assert share_ranks([4, 8], [1, 2], 0) == [1, 2]
    assert share_ranks([4, 8], [1, 2], 3) == [1, 2]
    assert share_ranks([4, 8, 8], [1, 1, 1], 2) == [1, 1, 0]
    assert share_ranks([4], [1], 4) == [4]


def test_a_host_that_is_not_there_yet_is_no_error_of_the_configuration(tmp_path, capsys):
    """Systemd's restart tries again."""
    words = ["serve", "--hosts", f"{OWN},b.invalid", "--address", f"unix:{tmp_path}/s", "--remote-shell"]
    assert main([*words, "false"]) == 1
    assert "the agent on b.invalid does not start by false" in capsys.readouterr().err
    assert main([*words, "/no/shell"]) == EXIT_CONFIG


AGENT = "import sys, allspark_launch.group.agent as a; a.LEASE_SECONDS = {lease}; sys.exit(a.main())"


class Agent:
    """An agent of this host, as its supervisor sees it."""

    def __init__(self, lease: float = 20, command: str = AGENT):
        self.process = subprocess.Popen([sys.executable, "-c", command.replace("{lease}", str(lease))], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self):
        self.hello = self.wait("hello")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()

    def send(self, **message) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def wait(self, kind: str, lease: bool = False):
        while line := self.process.stdout.readline():
            message = json.loads(line)
            if lease and "alive" in message:
                self.send(lease=message["alive"])
            if kind in message:
                return message[kind]
        raise AssertionError(f"no {kind}: {self.process.stderr.read()}")

    def launch(self, tmp_path: Path) -> int:
        """Starts a daemon whose child has a session of its own and outlives it; returns the child's process."""
        file = tmp_path / "pid"
        self.send(launch={"command": f"setsid sh -c 'echo $$ >{file}.new; mv {file}.new {file}; exec sleep 100' &",
                          "environment": {}, "secret": "the secret"})
        wait_for(file.exists)
        return int(file.read_text())


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_an_agent_places_and_ends(tmp_path):
    with Agent(lease=20) as agent:
        assert agent.hello["host"] == OWN and agent.hello["cores"] == len(os.sched_getaffinity(0))
        how = {"nodes": None, "cpus_per_rank": 1, "use_siblings": False, "strict": False}
        agent.send(place={"ranks": 2, "first": 3, **how})
        assert [rank["rank"] for rank in agent.wait("placed")["ranks"]] == [3, 4]
        agent.send(place={"ranks": 1, "first": 3, **{**how, "cpus_per_rank": 1000}})
        assert "cpus_per_rank is 1000" in agent.wait("placed")["error"]
        pid = agent.launch(tmp_path)
        home = Path(Path(f"/proc/{pid}/environ").read_text().partition("ALLSPARK_SUPERVISOR=")[2].split("\0")[0]).parent
        assert (home / "secret").read_text() == "the secret" and (home / "secret").stat().st_mode & 0o777 == 0o600
        agent.send(end=True)
        assert agent.wait("ended") and not is_alive(pid) and not (home / "secret").exists()
        (tmp_path / "pid").unlink()
        pid = agent.launch(tmp_path)            # another incarnation
        agent.process.stdin.close()             # the supervisor is gone
        assert agent.process.wait(10) == 0 and not is_alive(pid)


STUBBORN = """import psutil, sys, time, allspark_launch.group.agent as a
began, free, children = [], [1 << 30], psutil.Process.children
class Stays:
    pid = 4194303
    def kill(self):
        began.append(time.monotonic())
    def children(self, recursive):      # memory grows for a second, then it does not
        free[0] += (16 << 20) * (not began or time.monotonic() < began[0] + 1)
        return [Stays()]
psutil.Process = lambda *_: Stays()
psutil.virtual_memory = lambda: type("Memory", (), {"available": free[0]})
a.LEASE_SECONDS = 1.0
sys.exit(a.main())"""


@pytest.mark.slow
def test_an_agent_reports_processes_that_survive_sigkill():
    """It is heard meanwhile, and waits as long as memory is freed."""
    with Agent(command=STUBBORN) as agent:
        began = time.monotonic()
        agent.send(end=True)
        agent.wait("alive")
        assert agent.wait("survivors") == [4194303] and time.monotonic() - began > 1.5
        agent.process.terminate()
        assert agent.process.wait(20) == 0


def test_a_lease_runs_out(tmp_path):
    with Agent(lease=1.5) as agent:
        pid = agent.launch(tmp_path)
        for _ in range(4):
            agent.wait("alive", lease=True)     # answered: it still lives after two seconds
        assert is_alive(pid)
        began = time.monotonic()
        assert agent.process.wait(10) == 5 and time.monotonic() - began < 3 and not is_alive(pid)


def test_checkpoints_that_differ_are_named(tmp_path, tiny_model):
    config = AsModelConfig(model_name="m", model_path=str(tiny_model))
    own = file_digests(config)
    assert str(tiny_model / "model.safetensors") in own and str(tiny_model / "config.json") in own
    large = tmp_path / "large.gguf"
    large.write_bytes(bytes(9 << 20))
    before = file_digests(AsModelConfig(model_name="g", model_path=str(large)))
    with open(large, "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"x")
    assert file_digests(AsModelConfig(model_name="g", model_path=str(large))) != before
    check_copies("m", {"a": own, "b": dict(own)})
    check_copies("m", {"a": own, "b": {}})
    with pytest.raises(AllSparkError, match="model 'm': .*config.json on host c differs from that on host a"):
        check_copies("m", {"a": own, "b": own, "c": {**own, str(tiny_model / "config.json"): "0"}})
