"""The hosts of a group: their names (from a file, a Slurm allocation, a LeaderWorkerSet or the Kubernetes MPI
operator), which of them is this host, how a command is started on another one, and how many ranks each gets.
"""
from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allspark_server.runtime.hosts import own_addresses

MPI_OPERATOR = Path("/etc/mpi/hostfile")        # the host file of the Kubernetes MPI operator
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]


@dataclass(frozen=True)
class Host:
    """A host, by the name that reaches it. `ranks`: how many it gets; 0: one per NUMA node."""

    name: str
    ranks: int = 0


@dataclass(frozen=True)
class Allocation:
    """The hosts of a group, this one first. `shell` HOST COMMAND … runs a command on a host."""

    hosts: tuple[Host, ...]
    shell: tuple[str, ...]

    @property
    def others(self) -> tuple[Host, ...]:
        """All hosts but this one."""
        return self.hosts[1:]


def find_hosts(text: str, remote_shell: str = "", environment: Mapping[str, str] = os.environ) -> Allocation:
    """The hosts that --hosts names: a file, names separated by commas, or "auto". Raises ValueError."""
    if text == "auto":
        hosts = _from_environment(environment)
    elif "/" in text or Path(text).is_file():
        hosts = read_host_file(text)
    else:
        hosts = [_host(word, text) for word in text.split(",")]
    names = [host.name for host in hosts]
    if len(set(names)) != len(names):
        raise ValueError(f"hosts: {next(n for n in names if names.count(n) > 1)} is named twice; write NAME slots=N "
                         "for several ranks")
    here = next((host for host in hosts if is_here(host.name)), None)
    if here is None:
        raise ValueError(f"hosts: this one ({socket.gethostname()}) is not among {', '.join(names)}; start the "
                         "group on one of its hosts (an MPIJob needs runLauncherAsWorker: true)")
    return Allocation((here, *(host for host in hosts if host != here)), tuple(_shell(remote_shell, environment)))


def read_host_file(path: str) -> list[Host]:
    """The hosts of a file in mpirun's format: a line "NAME" or "NAME slots=N" for each, comments after #."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hosts: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_host(" ".join(words), f"{path}:{number}"))
    if not hosts:
        raise ValueError(f"hosts: {path} names no host")
    return hosts


def _host(text: str, where: str) -> Host:
    match = re.fullmatch(rf"({_NAME.pattern}?)(?:(?:\s+slots=|:)(\d+))?(?:\s+max[-_]slots=\d+)?", text.strip())
    if not match or not _NAME.fullmatch(match[1]):
        raise ValueError(f"hosts: {where}: {text!r} must be NAME or NAME slots=N")
    return Host(match[1], int(match[2] or 0))


def _from_environment(environment: Mapping[str, str]) -> list[Host]:
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        try:
            done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=20,
                                  stdin=subprocess.DEVNULL, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"hosts: scontrol does not list those of SLURM_JOB_NODELIST={nodes}: {error}") from None
        return [Host(name) for name in done.stdout.split()]
    if leader := environment.get("LWS_LEADER_ADDRESS"):
        # Pods of a LeaderWorkerSet: LEADER.SERVICE.NAMESPACE, and for its workers LEADER-N.SERVICE.NAMESPACE from 1 on.
        name, dot, rest = leader.partition(".")
        try:
            size = int(environment["LWS_GROUP_SIZE"])
        except (KeyError, ValueError):
            raise ValueError(f"hosts: LWS_LEADER_ADDRESS={leader} needs LWS_GROUP_SIZE, a number of pods, not "
                             f"{environment.get('LWS_GROUP_SIZE')!r}") from None
        return [Host(leader), *(Host(f"{name}-{worker}{dot}{rest}") for worker in range(1, size))]
    file = environment.get("OMPI_MCA_orte_default_hostfile") or environment.get("PRTE_MCA_prte_default_hostfile")
    if file or MPI_OPERATOR.is_file():
        return read_host_file(file or str(MPI_OPERATOR))
    raise ValueError("hosts: auto finds neither a Slurm allocation (SLURM_JOB_NODELIST), nor a LeaderWorkerSet "
                     "(LWS_LEADER_ADDRESS), nor a host file of the Kubernetes MPI operator "
                     f"({MPI_OPERATOR}); name a file or hosts")


def _shell(remote_shell: str, environment: Mapping[str, str]) -> list[str]:
    """The remote shell, chosen as mpirun does: a configured one, else srun in a Slurm allocation, else ssh."""
    arguments = shlex.split(environment.get("OMPI_MCA_plm_rsh_args", ""))
    agent = remote_shell or environment.get("OMPI_MCA_plm_rsh_agent", "")
    if agent:
        words = shlex.split(agent)
        if shutil.which(words[0]) is None:
            raise ValueError(f"remote_shell: {words[0]!r} is not an executable")
        return words + ([] if remote_shell else arguments)
    if environment.get("SLURM_JOB_ID"):
        return ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mem=0", "--quit-on-interrupt",
                "--nodelist"]
    return [*_SSH, *arguments]


def is_here(name: str) -> bool:
    """Whether a name is that of this host."""
    own = socket.gethostname()
    if name in (own, own.partition(".")[0]) or name.partition(".")[0] == own:
        return True
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return bool(addresses & {*own_addresses(), "127.0.0.1", "::1"})


def share_ranks(cores: list[int], wanted: list[int], ranks: int) -> list[int]:
    """How many ranks each host gets: `wanted`, unless `ranks` gives the total. Then the first hosts get one each, and
    further ranks go where most of the host's `cores` are left per rank.
    """
    if not ranks:
        return list(wanted)
    counts = [int(i < ranks) for i in range(len(cores))]
    for _ in range(ranks - len(cores)):
        counts[max(range(len(cores)), key=lambda i: (cores[i] / (counts[i] + 1), -i))] += 1
    return counts
