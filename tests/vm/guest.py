"""What the virtual machine does at boot: a pool of systemd services, from its installation to its end, as the user that
the kernel's command line names (proof.user=NAME). Each step prints a line "PROOF ..." to the console, which prove.py
reads; meanwhile that one's clients stream through the forwarded ports."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
import traceback
from pathlib import Path

HERE = Path("/opt/proof")
POOL = HERE / "pool.json"
MODEL = str(next(Path("/opt/allspark").glob("lib/python3*/site-packages/allspark_server/assets/*/config.json")).parent)
DEVIATION = 0.02        # of a rank's pages that may be elsewhere


def say(text: str) -> None:
    """A line for prove.py."""
    print(f"PROOF {text}", flush=True)


def shell(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def allspark(*words: str) -> None:
    """Runs a command, and passes on what it says while it says it."""
    command = ["/opt/allspark/bin/python", "-u", "-m", "allspark_launch", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            say(f"  {line.rstrip()}")
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {process.returncode}")


def status() -> str:
    """Of the pool; it may be down."""
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
    """Process ids of member a's ranks, by rank."""
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
    """Each rank's own memory is on its node."""
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
    return re.search(r"^a .*serving +\d+ +\S+ +[1-9]", status(), re.M) is not None


def prove_group(user: str) -> None:
    """One member with a rank on each node: placement, losses, drain."""
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


def prove_pool(user: str) -> None:
    """Two members, one on each node: rolled, misconfigured, removed."""
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


def uninstall() -> None:
    allspark("pool", "uninstall", "--config", str(POOL))
    left = [*Path("/dev/shm").glob("*"), *Path("/run/allspark").glob("*/*"), *Path("/tmp").glob("allspark*")]
    left += [Path("/proc", str(pid)) for pid in ranks().values()]
    assert not left, left
    say("nothing is left behind")


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
        {"group": prove_group, "pool": prove_pool}[name[2]](name[1])
        say("DONE")
    except BaseException:
        traceback.print_exc()
        print(shell("journalctl", "--no-pager", "-b", "-n", "60", "-u", "allspark-p@*", check=False), flush=True)
        say("FAILED")
    subprocess.run(["systemctl", "poweroff"], check=False)
