"""Two real groups on one set of CPUs."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group, shipped_model
from allspark_server.runtime import reservations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = str(shipped_model())


def single_cpu_threads(pid: int) -> int:
    """How many threads of a process may run on one CPU only."""
    masks = [Path(task, "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    allowed = [next(line.split()[1] for line in mask.splitlines() if line.startswith("Cpus_allowed_list")) for mask in
               masks]
    return sum(text.isdigit() for text in allowed)


def rank_of(supervisor: int) -> int:
    """The process of a supervisor's only rank."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            environment = Path("/proc", pid, "environ").read_bytes()
            parent = int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"allspark_server" in words and b"OMPI_COMM_WORLD_RANK=0" in environment:
            above = int(Path("/proc", str(parent), "stat").read_text().rpartition(")")[2].split()[1])
            found += [int(pid)] * (supervisor in (parent, above))
    return found[0]


def answer(address: str) -> list:
    with ClientEngine(address) as client:
        name = client.list_models()[0].name
        _, _, queue = client.start_request(name, {"input_ids": list(range(5, 45))}, {
            "max_new_tokens": 24, "seed": 3, "logprobs": True, "top_logprobs": 1, "early_stopping": False})
        return [pair for elements in queue for pair in zip(elements.ids_from_generate, elements.log_probs_list)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing is pinned anyway")
def test_the_second_group_shares_cpus_and_computes_the_same_bits():
    others = reservations.CpuReservation().others()     # groups that run on this machine meanwhile
    words = ["--model", MODEL, "--ranks", "1", "--max-length", "512"]
    with background_group(words) as first, background_group(words) as second:
        assert answer(first.addresses[0]) == answer(second.addresses[0])
        pinned = [single_cpu_threads(rank_of(group.supervisor_pid)) for group in (first, second)]
    assert (pinned[0] > 0 or others) and pinned[1] == 0, pinned
