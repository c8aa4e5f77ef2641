"""Binds this process to CPUs and a memory node by system calls, as numactl does, and reads where its pages lie."""
from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import resource

logger = logging.getLogger(__name__)

#: environment variable: the GPUs that the group was started for; ranks are bound to CPUs near them
GROUP_GPUS = "ALLSPARK_GROUP_GPUS"
#: environment variable: how many ranks divide the model of a mixed group, if several do; they have memory to sum in
MODEL_RANKS = "ALLSPARK_MODEL_RANKS"
#: whether each compute thread is pinned to a CPU; otherwise to all CPUs of this process
pin_threads = True
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
_MPOL_BIND = 2
_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD = -3
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def bind_memory(nodes: list[int]) -> bool:
    """From now on, allocate memory only from `nodes`, from the nearest one while it has free pages.

    Returns False if the system refuses (a container without SYS_NICE). Memory then comes from the node whose CPU
    touches it first, which has the same effect while the node has free memory.
    """
    if _SET_MEMPOLICY is None:
        return False
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    # The kernel reads one bit less than this number.
    done = _libc.syscall(_SET_MEMPOLICY, _MPOL_BIND, words, ctypes.c_ulong(64 * len(words) + 1))
    if done != 0:
        logger.warning("memory cannot be bound to NUMA nodes %s (%s); relying on first touch", nodes,
                       os.strerror(ctypes.get_errno()))
    return done == 0


def memory_policy_allowed() -> bool:
    """Whether this process may set a memory policy. It sets the default policy, which changes nothing."""
    return _SET_MEMPOLICY is not None and _libc.syscall(_SET_MEMPOLICY, 0, None, ctypes.c_ulong(0)) == 0


def bind_process(cpus: list[int], memory_nodes: list[int]) -> None:
    """Bind this process, and threads that it starts later, to `cpus`, and its memory to `memory_nodes` ([]: any).

    Raises OSError if the process may use none of the CPUs.
    """
    os.sched_setaffinity(0, cpus)
    if memory_nodes:
        bind_memory(memory_nodes)


def cpus_of_threads(planned: list[int], threads: int) -> list[int]:
    """A CPU for each compute thread, the planned ones first; empty if threads are not pinned.

    More threads than were planned get the process's other CPUs, such as the one left to the service. Two threads pinned
    to one CPU would wait for each other at every barrier, for as long as the system's time slices are.
    """
    if not pin_threads or not planned:
        return []
    cpus = [*planned, *sorted(os.sched_getaffinity(0) - set(planned))]
    return cpus[:threads] if threads <= len(cpus) else []


def raise_open_files(wanted: int) -> int:
    """Let this process open `wanted` files, or as many as the system allows; returns how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def return_large_memory() -> None:
    """Make the C library give blocks of 1 MiB and more back to the system as soon as they are freed.

    By default it keeps blocks of up to 32 MiB in arenas of its threads once one has been freed. Other C libraries than
    glibc have no such setting.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def die_with_parent(signal_number: int) -> None:
    """Make the kernel send this process `signal_number` when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the subreaper: descendants whose parent ends become its children."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def pages_by_node() -> dict[int, int]:
    """Bytes of this process's anonymous and shared memory on each NUMA node; {} if the kernel does not report it."""
    totals: dict[int, int] = {}
    try:
        with open("/proc/self/numa_maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                if " file=" in line and "/dev/shm" not in line:
                    continue                                # a mapped file's pages stay where they were first read
                size = re.search(r"kernelpagesize_kB=(\d+)", line)
                for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
                    totals[int(node)] = totals.get(int(node), 0) + int(pages) * int(size[1] if size else 4) * 1024
    except OSError:
        return {}
    return totals
