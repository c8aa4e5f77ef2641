"""Runs in the virtual machine at boot: proves a pool of systemd services, from installation to removal.

The kernel's command line names the user and the part (proof.user=NAME proof.part=PART). Each step prints a line "PROOF
..." to the console, which prove.py reads. Meanwhile prove.py's clients stream through the forwarded ports.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path("/opt/proof")
POOL = HERE / "pool.json"
PACKAGES = next(Path("/opt/allspark").glob("lib/python3*/site-packages"))
MODEL = str(next(PACKAGES.glob("allspark_server/assets/*/config.json")).parent)
DEVIATION = 0.02        # part of a rank's pages that may be on another node
# The other host is a namespace at the end of a cable with this much delay and loss in each direction.
NETEM = "delay 20ms loss 1%"
OTHER_HOST = f"""
modprobe sch_netem; modprobe veth
hostname h0
printf '[Match]\\nName=to-h1\\n[Link]\\nUnmanaged=yes\\n' >/etc/systemd/network/00-to-h1.network
networkctl reload     # or it takes the cable's address away, and what is sent to h1 leaves this machine
printf '10.77.0.1 h0\\n10.77.0.2 h1\\n' >>/etc/hosts
ip netns add h1
ip link add to-h1 type veth peer name eth0 netns h1
ip address add 10.77.0.1/24 dev to-h1
ip link set to-h1 up
ip -n h1 address add 10.77.0.2/24 dev eth0
ip -n h1 link set eth0 up
ip -n h1 link set lo up
tc qdisc add dev to-h1 root netem {NETEM}
tc -n h1 qdisc add dev eth0 root netem {NETEM}
"""
OTHER_SHELL = "hostname h1 && mount -t tmpfs tmpfs /dev/shm && exec runuser -u {user} -- taskset --cpu-list 2,3 " \
              "/opt/allspark/bin/python /opt/proof/over_hosts/shell_server.py"


def say(text: str) -> None:
    """Prints a line for prove.py."""
    print(f"PROOF {text}", flush=True)


def shell(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def allspark(*words: str) -> None:
    """Runs a command and passes its output on as it comes."""
    command = ["/opt/allspark/bin/python", "-u", "-m", "allspark_launch", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            say(f"  {line.rstrip()}")
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {process.returncode}")


def status() -> str:
    """Status of the pool, which may be down."""
    return shell("/opt/allspark/bin/python", "-m", "allspark_launch", "pool", "status", "--config", str(POOL),
                 check=False)


def write_pool(user: str, members: list[dict]) -> None:
    POOL.write_text(json.dumps({
        "name": "p", "user": user,
        "defaults": {"token_file": "/etc/allspark/tokens", "tls_cert": "/etc/allspark/cert.pem",
                     "tls_key": "/etc/allspark/key.pem", "drain_limit": 60, "models": [
                         {"model_name": "m", "model_path": MODEL, "engine_max_batch": 8, "engine_max_length": 512}]},
        "member": members}))


def ranks() -> dict[int, int]:
    """Process ids of the members' ranks, by rank."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            environment = Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"allspark_server" in words and b"python" in words[0]:
            number = [e for e in environment if e.startswith(b"OMPI_COMM_WORLD_RANK=")]
            found[int(number[0].partition(b"=")[2])] = int(entry)
    return found


def check_pages() -> None:
    """Checks that each rank's own memory is on its node."""
    for rank, pid in sorted(ranks().items()):
        on: dict[int, int] = {}
        for line in Path("/proc", str(pid), "numa_maps").read_text().splitlines():
            if " file=" not in line:
                for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
                    on[int(node)] = on.get(int(node), 0) + int(pages)
        share = on.get(rank, 0) / max(1, sum(on.values()))
        allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", Path("/proc", str(pid), "status").read_text())[1]
        owner = Path("/proc", str(pid)).stat().st_uid
        say(f"rank {rank}: CPUs {allowed}, {share:.1%} of its pages on node {rank}, uid {owner}")
        assert share > 1 - DEVIATION, on


def requests_run() -> bool:
    """Requests that run at member a. systemd is asked, because a call of our own takes seconds under emulation."""
    return re.match("serving: [1-9]", unit("StatusText")) is not None


def prove_group(user: str) -> None:
    """One member with a rank on each node: placement, lost ranks, drain."""
    write_pool(user, [{"name": "a", "address": "0.0.0.0:50051"}])
    began = time.monotonic()
    allspark("pool", "install", "--config", str(POOL), "--now")
    say(f"installed and serving after {time.monotonic() - began:.0f} s: {unit('StatusText')}")
    for line in status().splitlines():
        say(f"  {line}")
    assert len(ranks()) == 2, ranks()
    check_pages()
    scores = [int(Path("/proc", str(pid), "oom_score_adj").read_text())
              for pid in (int(unit("MainPID")), ranks()[0])]
    say(f"oom_score_adj of supervisor and rank: {scores}")
    assert scores[0] < scores[1]
    shell("systemd-analyze", "verify", "--man=no", "/etc/systemd/system/allspark-p.target")
    say(shell("systemd-analyze", "security", "--no-pager", "allspark-p@a.service").splitlines()[-1])
    say("READY")
    wait(requests_run, 400)

    before = ranks()
    for hours in (1, -2, 1):
        time.clock_settime(time.CLOCK_REALTIME, time.time() + 3600 * hours)
        time.sleep(40)
        wait(requests_run, 60)
        assert ranks() == before and unit("NRestarts") == "0"
        say(f"the clock went {hours:+d} h: all ranks are the same 40 s later, and requests run")
    time.clock_settime(time.CLOCK_REALTIME, time.time() + 3601)     # what follows meets tickets that are too old
    reach_memory_limit()

    victim = random.choice(sorted(ranks()))
    before = ranks()
    os.kill(before[victim], signal.SIGKILL)
    began = time.monotonic()
    wait(lambda: len(ranks()) == 2 and not set(ranks().values()) & set(before.values()), 60)
    say(f"rank {victim} was killed; all ranks are others {time.monotonic() - began:.1f} s later")
    wait(requests_run, 400)
    say(f"requests run again {time.monotonic() - began:.1f} s after the kill: {unit('StatusText')}")
    check_pages()

    shell("systemctl", "kill", "--kill-whom=main", "-s", "KILL", "allspark-p@a.service")
    wait(lambda: unit("NRestarts") == "1" and unit("ActiveState") == "active", 400)
    say("the supervisor was killed; systemd has started it again")
    wait(requests_run, 400)

    began = time.monotonic()
    say("draining, while requests run")
    allspark("pool", "drain", "--config", str(POOL))
    allspark("pool", "drain", "--config", str(POOL), "--undo")
    say(f"drained after {time.monotonic() - began:.1f} s, and taking requests again")

    say("HALT")
    time.sleep(5)       # the clients end
    uninstall()


def reach_memory_limit() -> None:
    """Lets the member reach the memory limit of its unit."""
    cgroup = Path("/sys/fs/cgroup", unit("ControlGroup").lstrip("/"))
    before, limit = ranks(), int((cgroup / "memory.current").read_text()) + (64 << 20)
    shell("systemctl", "set-property", "--runtime", "allspark-p@a.service", f"MemoryMax={limit}")
    file = Path("/dev/shm/of-the-proof")
    with file.open("wb") as output, subprocess.Popen(
            ["cat", "/dev/zero"], stdout=output, preexec_fn=lambda: (cgroup / "cgroup.procs").write_text("0")) as hog:
        wait(lambda: "memory limit" in journal(), 120)
        hog.kill()
    file.unlink()
    say(next(line for line in journal().splitlines() if "memory limit" in line))
    wait(lambda: len(ranks()) == 2 and not set(ranks().values()) & set(before.values()), 60)
    wait(requests_run, 400)
    assert unit("NRestarts") == "0"
    shell("systemctl", "set-property", "--runtime", "allspark-p@a.service", "MemoryMax=infinity")


def prove_pool(user: str) -> None:
    """Two members, one on each node: rolling restart, wrong configuration, removal."""
    write_pool(user, [{"name": "a", "address": "0.0.0.0:50051", "numa_nodes": [0]},
                      {"name": "b", "address": "0.0.0.0:50052", "numa_nodes": [1]}])
    allspark("pool", "install", "--config", str(POOL), "--now")
    say("READY")
    wait(requests_run, 400)
    began = time.monotonic()
    say("ROLLING")
    allspark("pool", "restart", "--rolling", "--config", str(POOL))
    say(f"ROLLED after {time.monotonic() - began:.0f} s")
    for line in status().splitlines():
        say(f"  {line}")
    say("HALT")
    time.sleep(5)       # the clients end

    POOL.write_text(POOL.read_text().replace(MODEL, "/nowhere"))
    shell("systemctl", "stop", "allspark-p.target")
    shell("/opt/allspark/bin/python", "-m", "allspark_launch", "pool", "apply", "--config", str(POOL), check=False)
    wait(lambda: unit("ActiveState") == "failed", 60)
    say(f"with a model that is not there: {unit('ActiveState')}, {unit('Result')}, {unit('NRestarts')} restarts, "
        f"status {unit('ExecMainStatus')}")
    assert unit("ActiveState") == "failed" and unit("ExecMainStatus") == "78"
    uninstall()


def prove_hosts(user: str) -> None:
    """One member over two hosts, with late and lost packets between them: the bytes are those of two ranks on one
    host.
    """
    write_pool(user, [{"name": "a", "address": "0.0.0.0:50051"}])
    allspark("pool", "install", "--config", str(POOL), "--now")
    wanted = answers()
    subprocess.run(["sh", "-ec", OTHER_HOST], check=True)
    words = ["ip", "netns", "exec", "h1", "unshare", "--uts", "--mount", "sh", "-ec", OTHER_SHELL.format(user=user)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"listening\n"
            say(f"between h0 and h1: {NETEM}, each way")
            write_pool(user, [{"name": "a", "address": "0.0.0.0:50051", "hosts": "h0:1,h1:1",
                               "remote_shell": f"/opt/allspark/bin/python {HERE}/over_hosts/shell_client.py"}])
            allspark("pool", "apply", "--config", str(POOL))
            say(f"over two hosts: {unit('StatusText')}; ranks on {sorted(map(host_of, ranks().values()))}")
            assert sorted(map(host_of, ranks().values())) == ["h0", "h1"]
            assert answers() == wanted
            say("answers are those of two ranks on one host, to the bit")
            say("READY")
            wait(requests_run, 400)
            before = ranks()
            os.kill(next(pid for pid in before.values() if host_of(pid) == "h1"), signal.SIGKILL)
            began = time.monotonic()
            wait(lambda: len(ranks()) == 2 and not set(ranks().values()) & set(before.values()), 200)
            wait(requests_run, 400)
            say(f"the rank on h1 was killed; requests run again {time.monotonic() - began:.1f} s later")
            before = ranks()
            shell("ip", "link", "set", "to-h1", "down")
            began = time.monotonic()
            wait(lambda: len(ranks()) == 2 and not set(ranks().values()) & set(before.values()), 200)
            wait(requests_run, 400)
            say(f"the cable was cut; requests run again {time.monotonic() - began:.1f} s later; ranks on "
                f"{sorted(map(host_of, ranks().values()))}")
            assert answers() == wanted
            say("HALT")
            time.sleep(5)       # the clients end
            uninstall()
            memory = Path("/proc", str(other.pid), "root/dev/shm")
            assert not (left := [*owned(memory), *(p for p in Path("/proc").glob("[0-9]*") if is_agent(p))]), left
        finally:
            other.kill()


def answers() -> list:
    """Ids and logprob bits of two requests to member a."""
    sys.path.insert(0, str(PACKAGES))
    from allspark_client import ClientEngine

    found = []
    token = Path("/etc/allspark/tokens").read_text().split()[1]
    with ClientEngine("unix:/run/allspark/p/a/socket", token=token, reconnect_timeout=180) as client:
        for length in (4, 70):
            began = time.monotonic()
            _, handle, queue = client.start_request(
                "m", {"input_ids": [(7 * i + 3) % 500 + 5 for i in range(length)]},
                {"max_new_tokens": 12, "seed": 3, "temperature": 1.3, "logprobs": True, "top_logprobs": 2,
                 "early_stopping": False})
            before = len(found)
            for elements in queue:
                found += zip(elements.ids_from_generate, elements.log_probs_list)
            client.release_request("m", handle)
            say(f"{len(found) - before} tokens after {length} in {time.monotonic() - began:.1f} s")
    return found


def host_of(pid: int) -> str:
    """The name of the host that a process runs on."""
    own = os.stat("/proc/self/ns/net").st_ino
    return "h0" if os.stat(f"/proc/{pid}/ns/net").st_ino == own else "h1"


def is_agent(process: Path) -> bool:
    try:
        return b"allspark_launch.group.agent" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def owned(memory: Path) -> list[Path]:
    """Files of groups in shared memory, without the folder that all groups of a user share."""
    return [path for path in memory.glob("*") if not path.name.startswith("allspark-memory-")]


def uninstall() -> None:
    allspark("pool", "uninstall", "--config", str(POOL))
    left = [*owned(Path("/dev/shm")), *Path("/run/allspark").glob("*/*"), *Path("/tmp").glob("allspark*")]
    left += [Path("/proc", str(pid)) for pid in ranks().values()]
    assert not left, left
    say("nothing is left behind")


def journal() -> str:
    return shell("journalctl", "--all", "--no-pager", "-b", "-o", "cat", "-u", "allspark-p@a")


def unit(key: str) -> str:
    return shell("systemctl", "show", "-P", key, "allspark-p@a.service").strip()


def wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(1.0)


if __name__ == "__main__":
    name = re.search(r"proof\.user=(\S+) proof\.part=(\S+)", Path("/proc/cmdline").read_text())
    try:
        say(f"as {name[1]}: {os.uname().release}, {os.cpu_count()} CPUs, "
            f"{len(list(Path('/sys/devices/system/node').glob('node[0-9]*')))} nodes")
        shutil.chown("/etc/allspark/tokens", name[1])
        shutil.chown("/etc/allspark/key.pem", name[1])
        {"group": prove_group, "pool": prove_pool, "hosts": prove_hosts}[name[2]](name[1])
        say("DONE")
    except BaseException:
        traceback.print_exc()
        print(shell("journalctl", "--all", "--no-pager", "-b", "-n", "60", "-u", "allspark-p@*", check=False),
              flush=True)
        say("FAILED")
    subprocess.run(["systemctl", "poweroff"], check=False)
