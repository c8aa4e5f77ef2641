"""The machine, read from sysfs: NUMA nodes, cores, sibling threads, memory, and which of these this process may use.

Every path is read below `root`, so that tests can fabricate machines. No library and no privilege is needed. A kernel
without NUMA support is a machine with one node.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from allspark_server.runtime.memory import cgroup_cpus, cgroup_limit, rank_nodes, unplugged_memory

from . import sysfs
from .gpus import Gpu, read_gpus


def parse_list(text: str) -> list[int]:
    """The kernel's list format ("0-3,8,10-11") as sorted integers; "" gives []."""
    return sorted(set(parse_sequence(text)))


def parse_sequence(text: str) -> list[int]:
    """The same in the order of the text, with repetitions: for lists whose i-th entry is for rank i."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        try:
            numbers += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"{text.strip()!r} is not a list of numbers such as 0-3,8") from None
    return numbers


def format_list(numbers: Iterable[int]) -> str:
    """The inverse of `parse_list`: [0, 1, 2, 3, 8] gives "0-3,8"."""
    ranges: list[list[int]] = []
    for n in sorted(set(numbers)):
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


@dataclass(frozen=True)
class Core:
    """A physical core: its usable logical CPUs in ascending order (more than one with SMT)."""

    package: int
    core_id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Cache:
    """A data cache, and the CPUs that share it. `size` in bytes."""

    level: int
    size: int
    cpus: tuple[int, ...]


@dataclass
class Node:
    """A NUMA node. `cpus` are all online CPUs, `cores` those that this process may use. Memory in bytes."""

    id: int
    cpus: list[int] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    memory_total: int = 0
    memory_free: int = 0
    memory_allowed: bool = True
    distances: dict[int, int] = field(default_factory=dict)     # node id -> distance, 10 is local

    @property
    def usable_cpus(self) -> list[int]:
        """The CPUs that this process may use."""
        return sorted(c for core in self.cores for c in core.cpus)

    @property
    def has_memory(self) -> bool:
        """Whether it has memory that this process may use."""
        return self.memory_total > 0 and self.memory_allowed

    @property
    def whole(self) -> bool:
        """Whether this process may use every online CPU of the node."""
        return self.usable_cpus == sorted(self.cpus)


@dataclass
class Topology:
    """The machine as this process sees it. The cgroup's `cpu_quota` (CPUs), `memory_limit` (bytes): 0 is no limit.
    `unplugged_memory`: bytes that no node reports; nodes with CPUs count equal parts of it (memory.unplugged_memory).
    """

    nodes: list[Node]
    allowed_cpus: list[int]
    offline_cpus: list[int]
    cpu_quota: float = 0.0
    memory_limit: int = 0
    caches: list[Cache] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    unplugged_memory: int = 0

    def caches_of(self, node: Node) -> list[Cache]:
        """The last-level caches of a node's CPUs."""
        caches = [cache for cache in self.caches if set(cache.cpus) & set(node.cpus)]
        last = max((cache.level for cache in caches), default=0)
        return [cache for cache in caches if cache.level == last]

    def node(self, node_id: int) -> Node:
        """The node with an id. Raises ValueError if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise ValueError(f"this machine has no NUMA node {node_id}; it has {format_list(n.id for n in self.nodes)}")

    def memory_node(self, node: Node) -> Node:
        """The node whose memory `node` uses: itself, or the nearest with memory. Nodes without CPUs (CXL,
        high-bandwidth memory, a GPU's memory) are used only if there is no other: they must be named to be used.
        """
        if node.has_memory:
            return node
        others = [n for n in self.nodes if n.has_memory and n.cpus] or [n for n in self.nodes if n.has_memory]
        return min(others, key=lambda n: (node.distances.get(n.id, 255), n.id)) if others else node

    @property
    def default_nodes(self) -> list[int]:
        """The nodes with usable cores and memory. By default each gets one rank."""
        both = [n.id for n in self.nodes if n.cores and n.has_memory]
        return both or [n.id for n in self.nodes if n.cores]

    def to_dict(self) -> dict:
        """For JSON."""
        return {
            "nodes": [{"id": n.id, "cpus": format_list(n.cpus), "usable_cpus": format_list(n.usable_cpus),
                       "cores": [list(c.cpus) for c in n.cores], "memory_total": n.memory_total,
                       "memory_free": n.memory_free, "memory_allowed": n.memory_allowed,
                       "distances": {str(k): v for k, v in n.distances.items()}} for n in self.nodes],
            "allowed_cpus": format_list(self.allowed_cpus), "offline_cpus": format_list(self.offline_cpus),
            "cpu_quota": self.cpu_quota, "memory_limit": self.memory_limit,
            "unplugged_memory": self.unplugged_memory,
            "caches": [{"level": c.level, "size": c.size, "cpus": format_list(c.cpus)} for c in self.caches],
            "gpus": [{"index": gpu.index, "address": gpu.address, "node": gpu.node, "model": gpu.model,
                      "link": gpu.link} for gpu in self.gpus],
        }


def _meminfo(path: Path) -> tuple[int, int]:
    """(total, free and reclaimable file pages), in bytes, of a node's meminfo; (0, 0) if there is none."""
    values = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"([\w()]+):\s+(\d+)\s*kB", sysfs.text(path))}
    return values.get("MemTotal", 0), values.get("MemFree", 0) + values.get("Inactive(file)", 0)


def _status_list(root: Path, key: str) -> list[int] | None:
    match = re.search(rf"^{key}:\s*(\S*)$", sysfs.text(root / "proc/self/status"), re.M)
    return parse_list(match[1]) if match else None


def read_topology(root: str | os.PathLike = "/", affinity: list[int] | None = None) -> Topology:
    """Reads the machine below `root`.

    affinity: CPUs that this process may use; None asks the scheduler (for another root: Cpus_allowed_list in its
    proc/self/status, or all online CPUs).
    """
    root = Path(root)
    cpu_dir, node_dir = root / "sys/devices/system/cpu", root / "sys/devices/system/node"
    present = parse_list(sysfs.text(cpu_dir / "present")) or list(range(os.cpu_count() or 1))
    online = parse_list(sysfs.text(cpu_dir / "online")) or present
    if affinity is None:
        affinity = sorted(os.sched_getaffinity(0)) if root == Path("/") else _status_list(root, "Cpus_allowed_list")
    allowed = sorted(set(online if affinity is None else affinity) & set(online))
    memories = _status_list(root, "Mems_allowed_list")

    ids = sorted(int(p.name[4:]) for p in node_dir.glob("node[0-9]*") if p.name[4:].isdigit())
    nodes = []
    for node_id in ids:
        folder = node_dir / f"node{node_id}"
        total, free = _meminfo(folder / "meminfo")
        cpus = [c for c in parse_list(sysfs.text(folder / "cpulist")) if c in set(online)]
        distances = [int(d) for d in sysfs.text(folder / "distance").split()]
        nodes.append(Node(node_id, cpus, [], total, free, memories is None or node_id in memories,
                          dict(zip(ids, distances))))
    if not nodes:                                           # a kernel without NUMA, or a sandbox that hides it
        total = free = 0
        for line in sysfs.text(root / "proc/meminfo").splitlines():
            key, _, value = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                amount = int(value.split()[0]) * 1024
                total, free = (amount, free) if key == "MemTotal" else (total, amount)
        nodes = [Node(0, online, [], total, free, True, {0: 10})]
    unplugged = unplugged_memory(str(root))
    sharers = [node for node in nodes if node.id in rank_nodes(str(root))]
    for node in sharers:
        node.memory_total += unplugged // len(sharers)
        node.memory_free += unplugged // len(sharers)
    for node in nodes:
        node.cores = _cores(cpu_dir, [c for c in node.cpus if c in set(allowed)])
    return Topology(nodes, allowed, sorted(set(present) - set(online)), cgroup_cpus(str(root)),
                    cgroup_limit(str(root)), _caches(cpu_dir, online),
                    read_gpus(root, os.environ.get("CUDA_VISIBLE_DEVICES") if root == Path("/") else None),
                    unplugged)


def _caches(cpu_dir: Path, cpus: list[int]) -> list[Cache]:
    """The data caches of these CPUs, each once."""
    caches: dict[tuple[int, tuple[int, ...]], Cache] = {}
    for cpu in cpus:
        for folder in sorted((cpu_dir / f"cpu{cpu}" / "cache").glob("index[0-9]*")):
            size = re.fullmatch(r"(\d+)K", sysfs.text(folder / "size"))
            level, shared = sysfs.number(folder / "level", 0), tuple(parse_list(sysfs.text(folder / "shared_cpu_list")))
            if size and level and sysfs.text(folder / "type") != "Instruction":
                caches.setdefault((level, shared), Cache(level, int(size[1]) * 1024, shared))
    return list(caches.values())


def _cores(cpu_dir: Path, cpus: list[int]) -> list[Core]:
    """Groups logical CPUs by physical core. Cores are in the order of their first CPU."""
    groups: dict[tuple, list[int]] = {}
    for cpu in cpus:
        folder = cpu_dir / f"cpu{cpu}" / "topology"
        package, core = sysfs.number(folder / "physical_package_id", 0), sysfs.number(folder / "core_id", -1)
        siblings = sysfs.text(folder / "thread_siblings_list") or sysfs.text(folder / "core_cpus_list")
        # core_id alone is not unique (on some machines it repeats on each die). The list of siblings is.
        groups.setdefault((package, core, siblings or str(cpu)), []).append(cpu)
    cores = [Core(package, core, tuple(sorted(members))) for (package, core, _), members in groups.items()]
    return sorted(cores, key=lambda c: c.cpus[0])
