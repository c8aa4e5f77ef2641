"""Groups over hosts that are namespaces, each with its own network, name and /dev/shm: requests survive the loss of
hosts, ranks and agents. Needs root.
"""
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from allspark_client import AsModelConfig, ClientEngine
from allspark_launch.group.background import shipped_model
from support.over_hosts import namespaces, shell_server
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())]
TOKENS = 80


class Group:
    """`allspark serve` on the first host over all of them, or those of these names."""

    def __init__(self, hosts: namespaces.Hosts, folder: Path, *words: str, models: int = 1,
                 names: list[str] | None = None):
        names = names or hosts.names
        self.folder, self.address = folder, f"unix:{folder}/s"
        self.log = folder / "log"
        words = [*hosts.enter(names[0]), sys.executable, "-m", "allspark_launch", "serve", "--hosts", ",".join(names),
                 "--remote-shell", namespaces.REMOTE_SHELL, "--address", self.address, "--ready-file",
                 str(folder / "ready"), "--cpus-per-rank", "1", *words]
        if models:
            words += ["--model", str(shipped_model()), "--model-name", "m"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            start_new_session=True)

    def __enter__(self):
        try:
            wait_for(lambda: (self.folder / "ready").exists() or self.process.poll() is not None, 120)
            assert "addresses" in json.loads((self.folder / "ready").read_text())
        except BaseException:
            print(self.log.read_text(errors="replace")[-6000:])
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if sys.exc_info()[0] is not None:
            print(self.log.read_text(errors="replace")[-12000:])


def ask(engine, arrived=lambda: None, n: int = TOKENS) -> list:
    """Ids and logprob bits; arrived() is called for each message."""
    found = []
    config = {"max_new_tokens": n, "early_stopping": False, "seed": 3, "temperature": 1.3, "logprobs": True,
              "top_logprobs": 2}
    _, handle, queue = engine.start_request("m", {"input_ids": list(range(20, 60))}, config)
    for elements in queue:
        for token, probabilities in zip(elements.ids_from_generate, elements.log_probs_list):
            found.append((token, probabilities))
        arrived()
    engine.release_request("m", handle)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The answer of a group of `ranks` ranks on one host."""
    known = {}

    def get(ranks: int) -> list:
        if ranks not in known:
            from allspark_launch.group.background import background_group
            words = ["--ranks", str(ranks), "--cpus-per-rank", "1", "--model-name", "m", "--model",
                     str(shipped_model())]
            with background_group(words) as group, ClientEngine(group.addresses[0]) as engine:
                known[ranks] = ask(engine)
        return known[ranks]

    return get


def ranks_on(hosts: namespaces.Hosts, name: str) -> list[int]:
    found = []
    for pid in hosts.processes(name):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"allspark_server"]:
                found.append(pid)
    return found


def agents_on(hosts: namespaces.Hosts, name: str) -> list[int]:
    return [pid for pid in hosts.processes(name)
            if b"allspark_launch.group.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("count", [2, 4])
def test_hosts_give_the_bits_of_one(count, tmp_path, undisturbed):
    with namespaces.hosts(count, tmp_path) as hosts:
        with Group(hosts, tmp_path, "--ranks", "4") as group, ClientEngine(group.address) as engine:
            assert engine.get_rank_nums() == 4
            assert [len(ranks_on(hosts, name)) for name in hosts.names] == [4 // count] * count
            assert ask(engine) == undisturbed(4)
            time.sleep(1)
            pids = [pid for name in hosts.names for pid in ranks_on(hosts, name)]
            before = cpu_seconds(pids)
            time.sleep(5)
            assert (cpu_seconds(pids) - before) / 5 / len(pids) < 0.02      # they sleep
        wait_for(lambda: not any(agents_on(hosts, name) for name in hosts.names))
        assert not any(ranks_on(hosts, name) for name in hosts.names)
        left = [file for name in hosts.names for file in hosts.run(name, "ls", "/dev/shm").split()]
        assert not [file for file in left if not file.startswith("allspark-memory-")]       # what users share


SNIFF = """
import socket, sys
capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("ready", flush=True)
while True:
    sys.stdout.buffer.write(capture.recv(1 << 17))
"""


def test_nobody_on_the_network_reads_commands(tmp_path):
    """Every packet between the hosts is captured, from the start on. None has the prompt's ids, which are in rank 0's
    commands. The secret is not looked for: the test's remote shell sends it, which is plain, unlike ssh.
    """
    captured = tmp_path / "captured"
    with namespaces.hosts(2, tmp_path) as hosts, open(captured, "wb") as file:
        sniffer = subprocess.Popen([*hosts.enter("switch"), sys.executable, "-u", "-c", SNIFF], stdout=file)
        try:
            wait_for(lambda: captured.read_bytes().startswith(b"ready"))
            with Group(hosts, tmp_path, "--ranks", "2") as group, ClientEngine(group.address) as engine:
                ask(engine)
                ranks = [pid for name in hosts.names for pid in ranks_on(hosts, name)]
                tunnels = [pid for name in hosts.names for pid in hosts.processes(name)
                           if b"tunnel.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                assert len(ranks) == len(tunnels) == 2
                for pid in ranks + tunnels + [pid for name in hosts.names for pid in agents_on(hosts, name)]:
                    for seen in ("cmdline", "environ"):         # the secret is in neither
                        assert b"PRIVATE KEY" not in Path(f"/proc/{pid}/{seen}").read_bytes()
            wait_for(lambda: not any(map(os.path.exists, (f"/proc/{pid}" for pid in tunnels))))
        finally:
            sniffer.kill()
            sniffer.wait()
    seen = captured.read_bytes()
    assert len(seen) > 1 << 20                          # MPI's sums
    assert np.arange(20, 60, dtype=np.int32).tobytes() not in seen


LISTENERS = """
import psutil
print(*(c.laddr.port for c in psutil.net_connections("inet") if c.status == "LISTEN"))
"""
GARBAGE = """
import contextlib, os, socket, sys
for where in sys.argv[1:]:
    host, _, port = where.partition(":")
    for data in (b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(4096), bytes(4096), b"\\xff" * 4096, b""):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 2) as stranger:
            stranger.settimeout(0.2)
            stranger.sendall(data)
            stranger.recv(100)
"""


def test_strangers_change_nothing(tmp_path):
    """A host that is not of the group connects to every port of its hosts and sends what does not belong there."""
    with namespaces.hosts(3, tmp_path) as hosts, Group(hosts, tmp_path, "--ranks", "2", names=["h0", "h1"]) as group, \
            ClientEngine(group.address) as engine:
        wanted, before = ask(engine), [ranks_on(hosts, name) for name in hosts.names]
        where = [f"{hosts.address(name)}:{port}" for name in ("h0", "h1")
                 for port in set(hosts.run(name, sys.executable, "-c", LISTENERS).split())
                 if int(port) != shell_server.PORT]
        assert len(where) > 2               # MPI's
        hosts.run("h2", sys.executable, "-c", GARBAGE, *where)
        assert ask(engine) == wanted and [ranks_on(hosts, name) for name in hosts.names] == before


def cpu_seconds(pids: list[int]) -> float:
    def of(pid: int) -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return sum(map(of, pids)) / os.sysconf("SC_CLK_TCK")


def cut(hosts):
    hosts.link("h1", "down")


def kill_rank(hosts):
    os.kill(ranks_on(hosts, "h1")[0], signal.SIGKILL)


def freeze_rank(hosts):
    os.kill(ranks_on(hosts, "h1")[0], signal.SIGSTOP)


def kill_agent(hosts):
    os.kill(agents_on(hosts, "h1")[0], signal.SIGKILL)


def freeze_agent(hosts):
    os.kill(agents_on(hosts, "h1")[0], signal.SIGSTOP)


@pytest.mark.parametrize("happens,noticed", [(cut, 5.0), (kill_rank, 1.0), (freeze_rank, 5.0), (kill_agent, 1.0),
                                             (freeze_agent, 5.0)], ids=lambda x: getattr(x, "__name__", ""))
def test_a_loss_changes_no_byte(happens, noticed, tmp_path, undisturbed, capsys):
    """A loss amid a request: the request continues within 15 s, elsewhere if necessary."""
    wanted = undisturbed(2)
    with namespaces.hosts(2, tmp_path) as hosts:
        with Group(hosts, tmp_path, "--ranks", "2") as group, ClientEngine(group.address) as engine:
            seen = SimpleNamespace(messages=0, at=0.0, gap=0.0)

            def arrived():
                now = time.monotonic()
                seen.messages += 1
                if seen.at:
                    seen.gap = max(seen.gap, now - seen.at)
                if seen.messages == 20:
                    happens(hosts)
                    seen.at = time.monotonic()

            before = ranks_on(hosts, "h1")
            known = {}

            def watch():        # when the supervisor says so
                while "noticed" not in known and not known.get("over"):
                    if "the group is ended" in group.log.read_text(errors="replace"):
                        known["noticed"] = time.monotonic()
                    time.sleep(0.02)

            thread = threading.Thread(target=watch)
            thread.start()
            try:
                assert ask(engine, arrived) == wanted
                while "noticed" not in known and time.monotonic() < seen.at + noticed:
                    assert ask(engine, arrived) == wanted       # all else still works
            finally:
                known["over"] = True
                thread.join()
            lost = known["noticed"] - seen.at
            with capsys.disabled():
                print(f"\n{happens.__name__}: noticed after {lost:.2f} s, next token after {seen.gap:.2f} s")
            assert lost < noticed and seen.gap < 15
            if happens is cut:          # ranks that were cut off have ended by themselves
                assert not set(before) & set(ranks_on(hosts, "h1")) and not agents_on(hosts, "h1")
                hosts.link("h1", "up")
                assert ask(engine) == wanted


def test_the_loss_of_the_first_host(tmp_path, undisturbed):
    """It has the supervisor, rank 0 and the address. The other host's ranks end by themselves and nothing starts there;
    the client's request continues at another group of the pool, which holds the same model on as many ranks.
    """
    wanted = undisturbed(2)
    folders = [tmp_path / name for name in ("hosts", "first", "second")]
    for folder in folders:
        folder.mkdir()
    with namespaces.hosts(4, folders[0]) as hosts, \
            Group(hosts, folders[1], "--ranks", "2", names=["h0", "h1"]) as first, \
            Group(hosts, folders[2], "--ranks", "2", names=["h2", "h3"]) as second, \
            ClientEngine([first.address, second.address], reconnect_timeout=15) as engine:
        seen, lost_at = [], 0.0

        def arrived():
            nonlocal lost_at
            seen.append(1)
            if len(seen) == 20:
                hosts.link("h0", "down")                # the host as its group sees it,
                for pid in hosts.processes("h0"):       # and as its clients do, whose socket is a file here
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                lost_at = time.monotonic()

        def left() -> list[int]:
            return ranks_on(hosts, "h1") + agents_on(hosts, "h1")

        assert len(left()) == 2
        assert ask(engine, arrived) == wanted
        wait_for(lambda: not left(), 10)
        assert time.monotonic() - lost_at < 10
        assert ask(engine) == wanted and not left()
        # Started again on a host that is left, the group serves again: here on that host alone.
        (folders[1] / "ready").unlink(missing_ok=True)
        (folders[1] / "s").unlink(missing_ok=True)
        with Group(hosts, folders[1], "--ranks", "2", names=["h1"]) as again, ClientEngine(again.address) as engine:
            assert ask(engine) == wanted


def test_a_missing_host_is_reported(tmp_path):
    with namespaces.hosts(2, tmp_path) as hosts:
        hosts.link("h1", "down")
        with pytest.raises(FileNotFoundError), Group(hosts, tmp_path):
            pass
        assert "the agent on h1 does not start" in (tmp_path / "log").read_text()


def test_another_checkpoint_is_reported(tmp_path):
    """One host has an edited copy at the same path."""
    copy = tmp_path / "model"
    shutil.copytree(shipped_model(), copy)
    other = tmp_path / "other.json"
    other.write_text((copy / "config.json").read_text() + "\n")
    with namespaces.hosts(2, tmp_path) as hosts:
        hosts.run("h1", "mount", "--bind", str(other), str(copy / "config.json"))
        # Its agents are started by a shell that was in that namespace before.
        with Group(hosts, tmp_path, "--model-root", str(tmp_path), models=0) as group:
            with ClientEngine(group.address) as engine, pytest.raises(Exception) as error:
                engine.install_model(AsModelConfig(model_name="m", model_path=str(copy)))
                engine.start_model("m")
            assert f"{copy / 'config.json'} on host h1 differs from that on host h0" in str(error.value)


SLURM = """
ClusterName=test
SlurmctldHost=h0
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=h[0-1] CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.mark.skipif(not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))), reason="Slurm is not installed")
def test_slurm(tmp_path, undisturbed):
    """launch/examples/group.sbatch under a real slurmctld and two slurmds."""
    wanted = undisturbed(2)
    (tmp_path / "state").mkdir()
    file = tmp_path / "slurm.conf"
    file.write_text(SLURM.format(folder=tmp_path))
    script = tmp_path / "job"
    script.write_text(f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --no-kill --signal=B:TERM@20 --output={tmp_path}/log
exec {sys.executable} -m allspark_launch serve --hosts auto --address unix:{tmp_path}/s --ready-file {tmp_path}/ready \\
    --model {shipped_model()} --model-name m --cpus-per-rank 1
""")
    with namespaces.hosts(2, tmp_path) as hosts:
        slurm = ["env", f"SLURM_CONF={file}"]
        for name, words in (("h0", ["slurmctld", "-D"]), ("h0", ["slurmd", "-D", "-N", "h0"]),
                            ("h1", ["slurmd", "-D", "-N", "h1"])):
            # Agents end with their hosts.
            subprocess.Popen([*hosts.enter(name), *slurm, *words], stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for(lambda: hosts.run("h0", *slurm, "sinfo", "--noheader", "--format=%D %t") == "2 idle\n", 60)
            job = hosts.run("h0", *slurm, "sbatch", "--parsable", str(script)).strip()
            wait_for((tmp_path / "ready").exists, 60)
            with ClientEngine(f"unix:{tmp_path}/s") as engine:
                assert [len(ranks_on(hosts, name)) for name in hosts.names] == [1, 1]
                assert ask(engine) == wanted
            hosts.run("h0", *slurm, "scancel", "--batch", "--signal=TERM", job)
            wait_for(lambda: not any(ranks_on(hosts, name) + agents_on(hosts, name) for name in hosts.names))
        except BaseException:
            for log in sorted(tmp_path.glob("*log")):
                print(log, log.read_text(errors="replace")[-5000:], sep="\n")
            raise


@pytest.mark.skipif(not os.path.exists("/usr/sbin/sshd"), reason="sshd is not installed")
def test_ssh(tmp_path, undisturbed):
    """Agents that ssh starts, which is the default."""
    wanted = undisturbed(2)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(tmp_path / name)], check=True)
    daemon = ["/usr/sbin/sshd", "-D", "-e", "-h", str(tmp_path / "host"), "-o", f"PidFile={tmp_path}/pid", "-o",
              f"AuthorizedKeysFile={tmp_path}/user.pub", "-o", "StrictModes=no", "-o", "UsePAM=no"]
    shell = f"ssh -i {tmp_path}/user -o BatchMode=yes -o StrictHostKeyChecking=no "\
            f"-o UserKnownHostsFile={tmp_path}/known"
    with namespaces.hosts(2, tmp_path) as hosts:
        Path("/run/sshd").mkdir(exist_ok=True)      # sshd wants it
        subprocess.Popen([*hosts.enter("h1"), *daemon], stdin=subprocess.DEVNULL, start_new_session=True)
        with Group(hosts, tmp_path, "--ranks", "2", "--remote-shell", shell) as group:
            with ClientEngine(group.address) as engine:
                assert len(ranks_on(hosts, "h1")) == 1 and ask(engine) == wanted
        wait_for(lambda: not ranks_on(hosts, "h1") and not agents_on(hosts, "h1"))
