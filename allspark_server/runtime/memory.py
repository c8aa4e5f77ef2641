"""How much memory and how many cores a rank may use, given its NUMA nodes, memory binding, cgroups and limits."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import reservations

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
_MPOL_BIND = 2
_MASK_WORDS = 16
_UNLIMITED = 1 << 60  # cgroup version 1 writes "no limit" as a number above this

#: NUMA node -> the number of the group's ranks that take memory from it, set by the launcher. For nodes that are not
#: listed, ranks are assumed to be spread over all nodes.
ranks_on_node: dict[int, int] = {}
#: Whether loading fails if a model's memory lies on the wrong NUMA nodes.
strict = False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(text: str) -> dict[str, int]:
    """Bytes by name, from lines such as `Node 0 MemFree: 12 kB`, `MemAvailable: 12 kB` or `inactive_file 12`."""
    found = {}
    for name, value, unit in re.findall(r"^(?:Node \d+ )?([\w()]+):?[ \t]+(\d+)(?: (kB))?$", text, re.M):
        found[name] = int(value) * (1024 if unit else 1)
    return found


def memory_nodes(root: str = "/") -> list[int]:
    """Ids of the NUMA nodes that have memory; [0] if the kernel does not report them."""
    nodes = []
    for folder in Path(root, "sys/devices/system/node").glob("node[0-9]*"):
        if _fields(_read(folder / "meminfo")).get("MemTotal", 0) > 0:
            nodes.append(int(folder.name[4:]))
    return sorted(nodes) or [0]


def rank_nodes(root: str = "/") -> list[int]:
    """Ids of the memory nodes that have CPUs, where ranks run; all memory nodes if none has CPUs.

    Memory of other nodes (CXL, for example) is used only by processes that are bound to it.
    """
    nodes = memory_nodes(root)
    return [n for n in nodes if _read(Path(root, f"sys/devices/system/node/node{n}/cpulist")).strip()] or nodes


def bound_nodes() -> list[int]:
    """The nodes to which this process's memory is bound; [] if it is not bound."""
    if _GET_MEMPOLICY is None:
        return []
    mode, mask = ctypes.c_int(0), (ctypes.c_ulong * _MASK_WORDS)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_GET_MEMPOLICY, ctypes.byref(mode), mask, ctypes.c_ulong(64 * _MASK_WORDS), None, 0) != 0:
        return []
    if mode.value & 0xFF != _MPOL_BIND:
        return []
    return [64 * word + bit for word in range(_MASK_WORDS) for bit in range(64) if mask[word] >> bit & 1]


def _host_available(root: str) -> int:
    """Bytes that a process may use that is bound to no node."""
    available = _fields(_read(Path(root, "proc/meminfo"))).get("MemAvailable", _UNLIMITED)
    nodes = rank_nodes(root)
    if nodes == memory_nodes(root):
        return available
    return min(available, sum(_node_available(node, root) for node in nodes))


def unplugged_memory(root: str = "/") -> int:
    """Bytes that the host has but that no node reports: of a virtual machine whose memory grows with its use. Each of
    the nodes where ranks run gets an equal part of them when it needs it.
    """
    total = _fields(_read(Path(root, "proc/meminfo"))).get("MemTotal", 0)
    folders = Path(root, "sys/devices/system/node").glob("node[0-9]*")
    reported = sum(_fields(_read(folder / "meminfo")).get("MemTotal", 0) for folder in folders)
    return max(0, total - reported) if reported else 0


def _node_available(node: int, root: str) -> int:
    values = _fields(_read(Path(root, f"sys/devices/system/node/node{node}/meminfo")))
    nodes = rank_nodes(root)
    more = unplugged_memory(root) // len(nodes) if node in nodes else 0
    return more + sum(values.get(n, 0) for n in ("MemFree", "Active(file)", "Inactive(file)"))


def _cgroups(controller: str, root: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's cgroups for a controller: its own and all its ancestors.

    The ancestors' limits apply too. Inside a container only the topmost one may be visible.
    """
    lines = _read(Path(root, "proc/self/cgroup")).splitlines() or ["0::/"]
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            version, base = 2, Path(root, "sys/fs/cgroup")
        elif controller in controllers.split(","):
            version, base = 1, Path(root, "sys/fs/cgroup", controller)
        else:
            continue
        folder = base / own.strip("/")
        while folder != base and base in folder.parents:
            yield version, folder
            folder = folder.parent
        yield version, base


def cgroup_available(root: str = "/") -> int:
    """Bytes that this process's memory cgroups still allow, with page cache counted as free; 2**60 without a limit."""
    least = _UNLIMITED
    for version, folder in _cgroups("memory", root):
        if version == 2:
            names = ("memory.max", "memory.current", "")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
        if limit.isdigit() and int(limit) < _UNLIMITED and used.isdigit():
            stat = _fields(_read(folder / "memory.stat"))
            cached = stat.get(f"{names[2]}inactive_file", 0) + stat.get(f"{names[2]}active_file", 0)
            least = min(least, int(limit) - int(used) + cached)
    return max(0, least)


def cgroup_limit(root: str = "/") -> int:
    """Bytes that this process's memory cgroups allow in all; 0 without a limit."""
    texts = [_read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).strip()
             for version, folder in _cgroups("memory", root)]
    return min((int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED), default=0)


def out_of_memory_kills(root: str = "/") -> int:
    """How many processes of this process's memory cgroup the kernel has killed because memory ran out there; version 2
    counts those of cgroups below it too. 0 where the kernel does not count them.
    """
    for version, folder in _cgroups("memory", root):
        events = _fields(_read(folder / ("memory.events" if version == 2 else "memory.oom_control")))
        if "oom_kill" in events:
            return events["oom_kill"]
    return 0


def cgroup_cpus(root: str = "/") -> float:
    """The CPU time that this process's cgroups allow, in CPUs, such as 2.5; 0.0 without a limit."""
    least = math.inf
    for version, folder in _cgroups("cpu", root):
        if version == 2:
            words = _read(folder / "cpu.max").split()
        else:
            words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):     # not "max", not -1
            least = min(least, int(words[0]) / int(words[1]))
    return 0.0 if least == math.inf else least


def _address_space_available() -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    return max(0, limit - _fields(_read(Path("/proc/self/status")).replace(":\t", ": ")).get("VmSize", 0))


def available_memory(world: int = 1, root: str = "/", nodes: Sequence[int] | None = None) -> int:
    """Bytes that one of this host's `world` ranks may use now, less what other groups have reserved.

    Bound ranks share the free memory of their nodes with the other ranks there. Unbound ranks share the host's free
    memory. All ranks share a cgroup's limit. nodes: those to which the rank's memory is bound, [] for none; by default
    those of this process.
    """
    nodes = bound_nodes() if nodes is None else list(nodes)
    if nodes:
        spread = math.ceil(world / len(rank_nodes(root)))
        sharers = {node: ranks_on_node.get(node, spread) for node in nodes}
        own = (sum(_node_available(node, root) // sharers[node] for node in nodes)
               - reservations.pending(nodes) // min(sharers.values()))
    else:
        own = (_host_available(root) - reservations.pending(nodes)) // world
    return min(max(0, own), cgroup_available(root) // world, _address_space_available())


def physical_cores(cpus: list[int] | None = None, root: str = "/") -> int:
    """The number of physical cores to which `cpus` belong.

    By default, these are the CPUs that this process may use, but no more cores than its cgroups allow CPU time for.
    """
    quota = 0.0 if cpus else cgroup_cpus(root)
    cores = set()
    for cpu in cpus or sorted(os.sched_getaffinity(0)):
        siblings = _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).strip()
        cores.add(siblings or str(cpu))
    return min(len(cores), math.ceil(quota)) if quota else len(cores)


def nodes_of_cpus(cpus: list[int], root: str = "/") -> set[int]:
    """The NUMA nodes to which these CPUs belong."""
    found = set()
    for cpu in cpus:
        found |= {int(p.name[4:]) for p in Path(root, f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")}
    return found


def own_nodes(cpus: list[int], root: str = "/") -> set[int]:
    """The nodes on which the memory of a process with these CPUs should lie.

    These are the nodes to which its memory is bound, else the nodes of its CPUs. If those have no memory, they are all
    nodes that ranks may use.
    """
    return set(bound_nodes()) or nodes_of_cpus(cpus, root) & set(memory_nodes(root)) or set(rank_nodes(root))
