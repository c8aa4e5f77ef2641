"""Chooses a NUMA node, physical cores and memory for each rank."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .topology import Core, Node, Topology, format_list

# From this many cores on, rank 0 leaves one to the service's Python threads. They would preempt a compute thread, and
# every step waits for its slowest thread.
SERVICE_CORE_FROM = 16
# Cores of the rank that has the GPU of a mixed group: one waits for the GPU, the other runs the service.
GPU_RANK_CORES = 2


@dataclass(frozen=True)
class RankPlacement:
    """One rank. `cpus`: one per compute thread. `bound_cpus`: CPUs that the whole process may use."""

    rank: int
    node: int
    cpus: tuple[int, ...]
    bound_cpus: tuple[int, ...]
    memory_node: int | None     # None: leave the memory policy alone
    whole_node: bool            # no other rank uses the node's CPUs
    more_memory: tuple[int, ...] = ()   # nodes without CPUs that it may use once its own memory is full
    host: str = ""              # another host's name
    gpu: int | None = None      # the GPU that it computes on
    pinned: bool = True         # each compute thread to its CPU; else to bound_cpus, and `cpus` is only their number

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """The nodes that its memory is bound to, the nearest first. Empty if the system decides."""
        return () if self.memory_node is None else (self.memory_node, *self.more_memory)


@dataclass
class Placement:
    """The places of all ranks. `oversubscribed`: ranks share a core, or use more cores than the cgroup's quota, so
    waiting threads must sleep and not spin.
    """

    ranks: list[RankPlacement]
    oversubscribed: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def nodes(self) -> list[int]:
        """The NUMA nodes of the ranks."""
        return sorted({r.node for r in self.ranks})


def place(topology: Topology, ranks: int = 0, nodes: list[int] | None = None, cpus_per_rank: int = 0,
          use_siblings: bool = False, memory_nodes: list[int] | None = None, first: int = 0) -> Placement:
    """Places `ranks` ranks on `nodes`, numbered from `first` on.

    ranks: 0 is one per node.
    nodes: node ids; None is every node with cores and memory.
    cpus_per_rank: compute threads of each rank; 0 is every physical core of its share.
    use_siblings: threads may also use the second hardware thread of a core.
    memory_nodes: nodes without CPUs; the ranks nearest to each may use its memory too.
    Raises ValueError naming the argument if a node does not exist or has no usable core (or memory), or if a rank's
    share has fewer cores than cpus_per_rank.
    """
    if ranks < 0:
        raise ValueError(f"ranks is {ranks}; it must be at least 1 (0: one per NUMA node)")
    if cpus_per_rank < 0:
        raise ValueError(f"cpus_per_rank is {cpus_per_rank}; it must be at least 1 (0: every core of the share)")
    if nodes is not None and len(set(nodes)) != len(nodes):
        raise ValueError(f"numa_nodes {nodes} names a node twice; for more ranks, use ranks={len(nodes)} instead")
    chosen = [topology.node(n) for n in (topology.default_nodes if nodes is None else nodes)]
    for node in chosen:
        if not node.cores:
            usable = format_list(n.id for n in topology.nodes if n.cores)
            raise ValueError(f"NUMA node {node.id} has no CPU that this process may use; nodes with CPUs: {usable}")
    if not chosen:
        raise ValueError("this process may use no CPU at all")
    ranks = ranks or len(chosen)
    result = Placement([])
    more = nearest_memory(topology, [node.id for node in chosen[:ranks]], memory_nodes or [])
    share = _ranks_per_node(chosen[:ranks], ranks)
    rank = first
    for node, count in zip(chosen[:ranks], share):
        if not node.has_memory:
            near = topology.memory_node(node)
            result.warnings.append(f"NUMA node {node.id} has no memory that this process may use; "
                                   f"its ranks use memory of node {near.id}")
        for part in range(count):
            one = _place_rank(topology, result, node, rank, part, count, cpus_per_rank, use_siblings)
            result.ranks.append(replace(one, more_memory=more[node.id]))
            rank += 1
    _obey_limits(result, topology, cpus_per_rank)
    return result


def place_on_gpus(topology: Topology, gpus: list[int], cpus_per_rank: int = 0, use_siblings: bool = False,
                  share: bool = False) -> Placement:
    """Places one rank for each GPU, in the order of `gpus`, on cores of the NUMA node that the GPU is attached to. If
    that node is unknown, nodes are used in turn. `share`: a GPU may be named twice.

    Raises ValueError for an unknown GPU, and as place() does.
    """
    known = {gpu.index: gpu for gpu in topology.gpus if gpu.index >= 0}
    for i, gpu in enumerate(gpus):
        if gpu in gpus[:i] and not share:
            raise ValueError(f"gpus={gpus} names GPU {gpu} twice: each rank needs its own")
        if topology.gpus and gpu not in known:
            usable = format_list(known) or "none, because a container or CUDA_VISIBLE_DEVICES hides them"
            raise ValueError(f"gpus={gpus}: there is no GPU {gpu}; this process may use {usable} (see allspark "
                             "topology)")
    others = [topology.node(n) for n in topology.default_nodes]
    if not others:
        raise ValueError("this process may use no CPU at all")
    result = Placement([])
    nodes = []
    for rank, gpu in enumerate(gpus):
        attached = next((n for n in topology.nodes if gpu in known and n.id == known[gpu].node), None)
        if attached is not None and not attached.cores:
            result.warnings.append(f"GPU {gpu} is attached to NUMA node {attached.id}, which has no CPU that this "
                                   "process may use")
        nodes.append(attached if attached is not None and attached.cores else others[rank % len(others)])
    for rank, (gpu, node) in enumerate(zip(gpus, nodes)):
        part, count = nodes[:rank].count(node), nodes.count(node)
        one = _place_rank(topology, result, node, rank, part, count, cpus_per_rank, use_siblings)
        result.ranks.append(replace(one, gpu=gpu))
    _obey_limits(result, topology, cpus_per_rank)
    return result


def place_mixed(topology: Topology, ranks: int = 0, nodes: list[int] | None = None, gpus: list[int] | None = None,
                cpus_per_rank: int = 0, use_siblings: bool = False, memory_nodes: list[int] | None = None,
                share: bool = False) -> Placement:
    """Places a mixed group: the ranks that compute the model, and those of routed experts on `nodes`.

    ranks: all of them; 0 is one of experts per node besides those of the model. gpus: one rank of the model computes on
    each, with few cores of its node; none: rank 0 computes on an equal part of the first node's cores. They leave the
    other cores of their nodes to the ranks of experts there; where there are too few, they have one each in turn, and
    the ranks of experts all. share: see place_on_gpus(). Raises ValueError as place() and place_on_gpus() do.
    """
    models = len(gpus or [0])
    if 0 < ranks <= models:
        raise ValueError(f"ranks is {ranks}; a mixed group has {'a rank' if models == 1 else f'{models} ranks'} of the "
                         "model, and at least one of experts")
    chosen = [topology.node(n) for n in (topology.default_nodes if nodes is None else nodes)]
    experts = ranks - models if ranks else len(chosen)
    if not gpus:
        if not chosen or not chosen[0].cores:
            return place(topology, experts, nodes)      # says why not
        homes = [chosen[0]]
        counts = _ranks_per_node(chosen[:experts], experts)
        parts = [len(homes[0].cores) // (1 + counts[0])]
    else:
        homes = [topology.node(rank.node) for rank in place_on_gpus(topology, gpus, share=share).ranks]
        parts = [GPU_RANK_CORES if len(home.cores) >= 4 * GPU_RANK_CORES * homes.count(home) else 1 for home in homes]
    left = {node.id: node.cores for node in topology.nodes}
    own, shared = [], {}    # cores of each rank of the model; nodes whose ranks share all of their cores
    for rank, (home, part) in enumerate(zip(homes, parts)):
        if not part or len(home.cores) < homes.count(home) + (home in chosen[:experts]):
            turn = homes[:rank].count(home) % len(home.cores)
            own.append(home.cores[turn:turn + 1])
            shared[home.id] = home
        else:
            own.append(left[home.id][:part])
            left[home.id] = left[home.id][part:]
    others = replace(topology, nodes=[replace(n, cores=left[n.id]) if n in homes and n in chosen else n
                                      for n in topology.nodes])
    result = place(others, experts, nodes, cpus_per_rank, use_siblings, memory_nodes, first=models)
    for home in shared.values():
        result.oversubscribed = True
        result.warnings.append(f"the ranks on NUMA node {home.id} share its {len(home.cores)} usable core(s); waiting "
                               "threads will sleep at once instead of spinning")
    for rank, (home, cores) in enumerate(zip(homes, own)):
        one = _place_rank(topology, result, replace(home, cores=cores), rank, 0, 1, 0 if gpus else cpus_per_rank,
                          use_siblings)
        result.ranks.insert(rank, replace(one, gpu=gpus[rank] if gpus else None))
    result.ranks = [replace(rank, whole_node=rank.whole_node and rank.node not in shared) for rank in result.ranks]
    _obey_limits(result, topology, cpus_per_rank)
    return result


def place_beside(topology: Topology, others: dict[int, int], place: Callable[[Topology], Placement]) -> Placement:
    """`place` on cores that no other group has reserved. If that cannot be, on cores of other groups too: then threads
    are not pinned and sleep instead of spinning, and a warning names the other groups.

    others: CPUs of other groups on this host, each with the process that reserved it.
    """
    if not others:
        return place(topology)
    free = replace(topology, nodes=[
        replace(node, cores=[core for core in node.cores if not others.keys() & set(core.cpus)])
        for node in topology.nodes])
    try:
        result = place(free)
        if not result.oversubscribed:
            left = sum(len(node.cores) for node in free.nodes), sum(len(node.cores) for node in topology.nodes)
            if left[0] < left[1]:
                result.warnings.append(f"{left[0]} of {left[1]} cores are free: {_owners(others)} the others")
            return result
    except ValueError:      # none, or too few, are free where they are wanted
        pass
    result = place(topology)
    shared = sorted({cpu for rank in result.ranks if not rank.host for cpu in rank.bound_cpus} & others.keys())
    if shared:
        share_cpus(result, topology)
        result.warnings.append(f"CPUs {format_list(shared)} are shared: {_owners(others)} them too. Threads are not "
                               "pinned, and sleep instead of spinning. Give each group numa_nodes of its own, or "
                               "cpus_per_rank so that both fit; share_cpus says that it is meant")
    return result


def _owners(others: dict[int, int]) -> str:
    pids = sorted(set(others.values()))
    return f"the group{'s' * (len(pids) > 1)} of process {format_list(pids)} use{'s' * (len(pids) == 1)}"


def share_cpus(placement: Placement, topology: Topology) -> None:
    """Changes a placement to one beside other groups on the same CPUs."""
    placement.oversubscribed = True
    _unpin(placement, topology)


def _unpin(placement: Placement, topology: Topology) -> None:
    """Lets the threads of this host's ranks run on any CPU of their nodes."""
    nodes = {node.id: node for node in topology.nodes}
    placement.ranks = [rank if rank.host else replace(
        rank, pinned=False, bound_cpus=tuple(nodes[rank.node].usable_cpus), whole_node=nodes[rank.node].whole)
        for rank in placement.ranks]


def _obey_limits(result: Placement, topology: Topology, cpus_per_rank: int) -> None:
    """Limits the threads to the cgroup's CPUs, unless their number was requested."""
    if topology.cpu_quota and not cpus_per_rank:
        _obey_quota(result, topology.cpu_quota)
    threads = sum(len(r.cpus) for r in result.ranks)
    if 0 < topology.cpu_quota < sum(len(node.usable_cpus) for node in topology.nodes):
        # Every container with a quota and no CPUs of its own would choose the same ones.
        _unpin(result, topology)
        result.warnings.append(f"the cgroup allows {topology.cpu_quota:g} CPUs, but none that are this group's own: "
                               "threads are not pinned; with a cpuset (docker run --cpuset-cpus, or Kubernetes' static "
                               "CPU manager) they are")
    if 0 < topology.cpu_quota < threads:
        result.oversubscribed = True
        result.warnings.append(f"the cgroup allows {topology.cpu_quota:g} CPUs but the ranks have {threads} threads; "
                               "waiting threads will sleep at once instead of spinning")


def nearest_memory(topology: Topology, nodes: list[int], memory_nodes: list[int]) -> dict[int, tuple[int, ...]]:
    """Assigns each of `memory_nodes` to the nodes that are nearest to it. Returns node -> its memory nodes. Raises
    ValueError if a memory node has CPUs or no memory.
    """
    nearest: dict[int, tuple[int, ...]] = dict.fromkeys(nodes, ())
    for number in memory_nodes:
        memory = topology.node(number)
        if memory.cpus or not memory.has_memory:
            alone = format_list(n.id for n in topology.nodes if n.has_memory and not n.cpus)
            raise ValueError(f"memory_nodes names NUMA node {number}, which has "
                             + ("CPUs: ranks there use its memory anyway" if memory.cpus else
                                "no memory that this process may use")
                             + f"; nodes with memory only: {alone or 'none'}")
        distances = {node: topology.node(node).distances.get(number, 255) for node in nodes}
        for node in nodes:
            if distances[node] == min(distances.values()):
                nearest[node] += (number,)
    return nearest


def _obey_quota(result: Placement, quota: float) -> None:
    """Gives each rank the same number of threads, together no more than the cgroup's CPUs. More threads would be
    slower: once the CPU time of a period is used up, all threads are paused until the next one.
    """
    most = max(1, math.ceil(quota) // len(result.ranks))
    before = sum(len(r.cpus) for r in result.ranks)
    result.ranks = [replace(r, cpus=r.cpus[:most]) for r in result.ranks]
    threads = sum(len(r.cpus) for r in result.ranks)
    if threads < before:
        result.warnings.append(f"the cgroup allows {quota:g} CPUs: {threads} threads instead of {before}")


def _ranks_per_node(nodes: list[Node], ranks: int) -> list[int]:
    """The number of ranks on each node: one, and each further rank goes to the node with most cores per rank."""
    counts = [1] * len(nodes)
    for _ in range(ranks - len(nodes)):
        roomiest = max(range(len(nodes)), key=lambda i: (len(nodes[i].cores) / (counts[i] + 1), -i))
        counts[roomiest] += 1
    return counts


def _place_rank(topology: Topology, result: Placement, node: Node, rank: int, part: int, count: int,
                cpus_per_rank: int, use_siblings: bool) -> RankPlacement:
    cores: list[Core] = node.cores
    if count <= len(cores):
        mine = cores[part * len(cores) // count:(part + 1) * len(cores) // count]
    else:                                                   # ranks share cores
        mine = [cores[part % len(cores)]]
        if not result.oversubscribed:
            result.oversubscribed = True
            result.warnings.append(f"{count} ranks share the {len(cores)} usable core(s) of NUMA node {node.id}; "
                                   "waiting threads will sleep at once instead of spinning")
    # First hardware threads come before second ones, so that fewer threads than CPUs use whole cores.
    width = max(len(c.cpus) for c in mine) if use_siblings else 1
    threads = [c.cpus[i] for i in range(width) for c in mine if i < len(c.cpus)]
    if cpus_per_rank > len(threads):
        kind = "hardware threads" if use_siblings else "physical cores"
        raise ValueError(f"cpus_per_rank is {cpus_per_rank}, but rank {rank}'s share of NUMA node {node.id} "
                         f"({count} rank(s) on {len(cores)} usable core(s)) has {len(threads)} {kind}")
    if cpus_per_rank:
        threads = threads[:cpus_per_rank]
    elif rank == 0 and len(mine) >= SERVICE_CORE_FROM:
        threads = threads[:-1]
    bound = sorted(c for core in mine for c in core.cpus)
    whole = count == 1 and node.whole
    memory = topology.memory_node(node)
    return RankPlacement(rank, node.id, tuple(threads), tuple(bound), memory.id if memory.has_memory else None, whole)
