"""The plan of a group's start: where its ranks run, and the mpirun line that starts them."""
from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allspark_server.options import EVERY_RANK, FIRST_RANK, rank_words
from allspark_server.runtime.binding import GROUP_GPUS, MODEL_RANKS, memory_policy_allowed
from allspark_server.runtime.reservations import CpuReservation, planning

from ..machine.gpus import ORDER
from ..machine.placement import Placement, place, place_beside, place_mixed, place_on_gpus, share_cpus
from ..machine.topology import Topology, format_list, read_topology
from ..options import NUMA_NUM, NUMA_OFFSET, GroupOptions
from .agents import Agent, Agents
from .hosts import find_hosts, share_ranks
from .mpi import Installation, find_mpi, group_command, mpi_environment, shell_line

logger = logging.getLogger(__name__)


@dataclass
class GroupPlan:
    """The placement of a group's ranks, and the mpirun line that starts them."""

    placement: Placement
    mpi: Installation
    words: list[str]
    environment: dict[str, str]     # additions to the environment

    @property
    def line(self) -> str:
        """The command, for a shell."""
        return shell_line(self.environment, self.words)

    def describe(self) -> list[str]:
        """One line for each rank, with its place."""
        return [f"rank {r.rank}: {f'host {r.host}, ' if r.host else ''}{f'GPU {r.gpu}, ' if r.gpu is not None else ''}"
                f"NUMA node {r.node}, "
                + (f"CPUs {format_list(r.cpus)}" if r.pinned else f"{len(r.cpus)} threads, not pinned")
                + (f", memory of node {', '.join(map(str, r.memory_nodes))}" if r.memory_nodes else "")
                for r in self.placement.ranks]


def _nodes_from(offset: str, ranks: int, nodes: list[int]) -> list[int]:
    """The NUMA nodes from $AS_NUMA_OFFSET on: one for each rank, or all for 0 ranks."""
    if not offset.isdigit() or int(offset) not in nodes:
        raise ValueError(f"AS_NUMA_OFFSET is {offset!r}; it must be the first NUMA node to use, one of {nodes}")
    following = [node for node in nodes if node >= int(offset)]
    if ranks > len(following):
        raise ValueError(f"AS_NUMA_NUM={ranks} with AS_NUMA_OFFSET={offset} needs {ranks} NUMA nodes from that one on; "
                         f"there are {following}")
    return following[:ranks] if ranks else following


def _place_on_hosts(options: GroupOptions, topology: Topology, ranks: int, bind_memory: bool,
                    agents: Agents, others: list[Agent]) -> Placement:
    """Places ranks on this host, and through their agents on the `others` that answer."""
    if options.gpus:
        raise ValueError("gpus: a group of GPUs on several hosts is not available yet")
    counts = share_ranks([sum(len(n.cores) for n in topology.nodes), *(a.hello["cores"] for a in others)],
                         [agents.own.ranks or len(options.numa_nodes or topology.default_nodes),
                          *(a.host.ranks or len(options.numa_nodes or ()) or a.hello["nodes"] for a in others)], ranks)
    how: dict[str, Any] = {"nodes": options.numa_nodes, "cpus_per_rank": options.cpus_per_rank,
                           "use_siblings": options.use_siblings, "memory_nodes": options.memory_nodes}
    result = place(topology, counts[0], **how)
    if not bind_memory:
        result.ranks = [replace(rank, memory_node=None) for rank in result.ranks]
    for agent, count in zip(others, counts[1:]):
        if count:
            there = agents.place(agent, ranks=count, first=len(result.ranks), strict=options.strict, **how)
            result.ranks += there.ranks
            result.warnings += there.warnings
            result.oversubscribed |= there.oversubscribed
    return result


@contextlib.contextmanager
def agents_of(options: GroupOptions) -> Iterator[Agents | None]:
    """The agents of the other hosts that the options name, for the length of a with block."""
    agents = Agents(find_hosts(options.hosts, options.remote_shell)) if options.hosts else None
    try:
        yield agents
    finally:
        if agents is not None:
            agents.close()


def plan_group(options: GroupOptions, inner: str = "", keep: int = 0, agents: Agents | None = None,
               mpi: Installation | None = None, reserved: CpuReservation | None = None) -> GroupPlan:
    """Plans the start of a group. Raises ValueError or MpiNotFound if an option cannot be met.

    inner: an additional Unix socket to serve on, for programs that the supervisor starts.
    keep: the number of ranks of a lost group. Its requests can continue only on the same number of ranks, so several
    ranks may share a node. If that many cannot be placed, `options` decide.
    agents: of the other hosts that the options name.
    mpi: the installation to use; by default it is looked up.
    reserved: keeps the CPUs of the plan for this group; without it, other groups are not regarded.
    """
    from allspark_client.environment import check_environment
    check_environment()
    if keep:
        try:
            return plan_group(replace(options, ranks=keep), inner, agents=agents, mpi=mpi, reserved=reserved)
        except ValueError as error:
            logger.error("the lost group's requests will end: its %d ranks cannot be placed again: %s", keep, error)
    bind_memory = memory_policy_allowed()
    placement = _place_group(options, bind_memory, agents, reserved)
    mpi = mpi or find_mpi()
    models = options.models
    if options.gpus or options.experts_on:
        unit = compute_unit(options.gpus, options.experts_on, placement)
        models = [_on_unit(model, unit) for model in models]
    served = replace(options, address=options.addresses(), models=models)
    words = (["--inner-address", inner] if inner else []) + rank_words(served, FIRST_RANK)
    several_hosts = len({rank.host for rank in placement.ranks}) > 1
    command = group_command(mpi, placement, sys.executable, words, bind_memory=bind_memory or several_hosts,
                            rank_words=rank_words(served, EVERY_RANK))
    environment = mpi_environment(mpi, several_hosts)
    if options.gpus:
        # GPUs have the numbers that `allspark topology` shows. Ranks are pinned near these GPUs and use no others.
        environment |= ORDER | {GROUP_GPUS: ",".join(map(str, options.gpus))}
        if options.experts_on and len(options.gpus) > 1:
            environment[MODEL_RANKS] = str(len(options.gpus))
    return GroupPlan(placement, mpi, command, environment)


def _place_group(options: GroupOptions, bind_memory: bool, agents: Agents | None,
                 reserved: CpuReservation | None) -> Placement:
    """Places the ranks. `bind_memory`: whether this system lets processes choose their memory policy."""
    for name in ("strict", "memory_nodes"):
        if getattr(options, name) and not bind_memory:
            raise ValueError(f"{name}: this system does not let processes choose their memory policy; a container "
                             "needs SYS_NICE for it (docker run --cap-add SYS_NICE)")
    ranks = options.ranks
    if options.experts_on and options.hosts:
        raise ValueError("experts_on: a mixed group on several hosts is not available yet")
    if options.gpus and not options.experts_on:
        if ranks not in (0, len(options.gpus)):
            raise ValueError(f"ranks={ranks} and gpus={options.gpus}: there is one rank for each GPU")
        ranks = len(options.gpus)
    if not ranks and options.numa_nodes is None and os.environ.get(NUMA_NUM):
        text = os.environ[NUMA_NUM]
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"{NUMA_NUM} is {text!r}; it must be the number of ranks, at least 1")
        ranks = int(text)
    numa_nodes, topology = options.numa_nodes, read_topology()
    if not options.ranks and numa_nodes is None and os.environ.get(NUMA_OFFSET, "0") != "0":
        numa_nodes = _nodes_from(os.environ[NUMA_OFFSET], ranks, [node.id for node in topology.nodes if node.cpus])
    others = agents.connect() if agents is not None else []

    def place_on(machine: Topology) -> Placement:
        if agents is not None:
            return _place_on_hosts(replace(options, numa_nodes=numa_nodes), machine, ranks, bind_memory, agents, others)
        shares = bool(options.gpus) and _may_share_gpus()
        if options.experts_on:
            return place_mixed(machine, ranks, numa_nodes, options.gpus, options.cpus_per_rank, options.use_siblings,
                               options.memory_nodes, shares)
        if options.gpus and numa_nodes is None:
            return place_on_gpus(machine, options.gpus, options.cpus_per_rank, options.use_siblings, shares)
        return place(machine, ranks, numa_nodes, options.cpus_per_rank, options.use_siblings, options.memory_nodes)

    placement = _place_beside_others(options, topology, reserved, place_on)
    if not bind_memory:
        placement.warnings.append("this system does not let processes choose their memory policy (a container needs "
                                  "SYS_NICE for it); memory is placed by first touch")
    return placement


def _may_share_gpus() -> bool:
    """Whether ranks may share a GPU, for tests."""
    from allspark_server.runtime.device import SHARED_GPUS
    return os.environ.get(SHARED_GPUS) == "1"


def _place_beside_others(options: GroupOptions, topology: Topology, reserved: CpuReservation | None,
                         place_on: Callable[[Topology], Placement]) -> Placement:
    """Places the ranks on CPUs that no other group of this host computes on, and reserves them."""
    if reserved is None:
        return place_on(topology)
    if options.share_cpus:
        placement = place_on(topology)
        share_cpus(placement, topology)
        return placement
    # Agents lock this themselves: one may be on this host, in tests.
    with planning() if not options.hosts else contextlib.nullcontext():
        others = reserved.others()
        placement = place_beside(topology, others, place_on)
        if not options.gpus or options.experts_on:
            # Ranks that compute on a GPU leave their CPUs alone most of the time.
            reserved.take({cpu for rank in placement.ranks if not rank.host and rank.gpu is None
                           for cpu in (rank.cpus if options.cpus_per_rank else rank.bound_cpus)} - others.keys())
    return placement


def compute_unit(gpus: list[int] | None, experts_on: str, placement: Placement) -> str:
    """The compute unit of a group's models. gpus, experts_on: see GroupOptions."""
    first = f"CUDA:{','.join(map(str, gpus))}" if gpus else f"CPU:{placement.ranks[0].node}"
    if not experts_on:
        return first
    return f"{first}+CPU:{','.join(str(rank.node) for rank in placement.ranks[len(gpus or [0]):])}"


def _on_unit(model: dict | str, unit: str) -> dict:
    """A model's configuration with this compute unit, unless it names another."""
    fields = {"model_name": Path(model).stem, "model_path": model} if isinstance(model, str) else model
    return {"compute_unit": unit, **fields}
