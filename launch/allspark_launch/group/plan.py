"""The plan of a group's start: where its ranks run, and the mpirun line that starts them."""
from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from allspark_server.options import EVERY_RANK, FIRST_RANK, rank_words
from allspark_server.runtime.binding import GROUP_GPUS

from ..machine.gpus import ORDER
from ..machine.placement import Placement, place, place_on_gpus
from ..machine.topology import Topology, format_list, read_topology
from ..options import NUMA_NUM, NUMA_OFFSET, GroupOptions
from .agents import Agents
from .hosts import find_hosts, share_ranks
from .mpi import Installation, find_mpi, group_command, mpi_environment, shell_line

logger = logging.getLogger(__name__)


@dataclass
class GroupPlan:
    """Everything that starting a group needs."""

    placement: Placement
    mpi: Installation
    words: list[str]
    environment: dict[str, str]     # additions to the environment

    @property
    def line(self) -> str:
        return shell_line(self.environment, self.words)

    def describe(self) -> list[str]:
        """One line for each rank: where it runs."""
        return [f"rank {r.rank}: {f'host {r.host}, ' if r.host else ''}{f'GPU {r.gpu}, ' if r.gpu is not None else ''}"
                f"NUMA node {r.node}, CPUs {format_list(r.cpus)}"
                + (f", memory of node {', '.join(map(str, r.memory_nodes))}" if r.memory_nodes else "")
                for r in self.placement.ranks]


def _nodes_from(offset: str, ranks: int, nodes: list[int]) -> list[int]:
    """The NUMA nodes of $AS_NUMA_OFFSET, with one for each of so many ranks; of 0, all that follow."""
    if not offset.isdigit() or int(offset) not in nodes:
        raise ValueError(f"AS_NUMA_OFFSET is {offset!r}; it must be the first NUMA node that is used, of {nodes}")
    following = [node for node in nodes if node >= int(offset)]
    if ranks > len(following):
        raise ValueError(f"AS_NUMA_NUM={ranks} ranks from AS_NUMA_OFFSET={offset} on need as many NUMA nodes; there are "
                         f"{following}")
    return following[:ranks] if ranks else following


def _place_on_hosts(options: GroupOptions, topology: Topology, ranks: int, bind_memory: bool,
                    agents: Agents) -> Placement:
    """Ranks on this host and on the others that are there, each placed by its agent."""
    if options.gpus:
        raise ValueError("gpus: a group of GPUs on several hosts is not available yet")
    others = agents.connect()
    counts = share_ranks([sum(len(n.cores) for n in topology.nodes), *(a.hello["cores"] for a in others)],
                         [agents.own.ranks or len(options.numa_nodes or topology.default_nodes),
                          *(a.host.ranks or len(options.numa_nodes or ()) or a.hello["nodes"] for a in others)], ranks)
    how = {"nodes": options.numa_nodes, "cpus_per_rank": options.cpus_per_rank, "use_siblings": options.use_siblings,
           "memory_nodes": options.memory_nodes}
    result = place(topology, counts[0], **how)
    if not bind_memory:
        result.ranks = [replace(rank, memory_node=None) for rank in result.ranks]
    for agent, count in zip(others, counts[1:]):
        if count:
            found = agents.place(agent, ranks=count, first=len(result.ranks), strict=options.strict, **how)
            result.ranks += found.ranks
            result.warnings += found.warnings
            result.oversubscribed |= found.oversubscribed
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


def plan_group(options: GroupOptions, inner: str = "", keep: int = 0, agents: Agents | None = None) -> GroupPlan:
    """Placement and command line. ValueError or MpiNotFound says what cannot be met. `inner`: a Unix socket that is
    served, too, for the supervisor's programs. `keep`: there must be so many ranks, several on a node if need be:
    others could not continue the requests of a group that was lost; where there is no way to place them, there are as many as
    the options say. agents: of the other hosts that the options name.
    """
    from allspark_client.environment import check_environment
    from allspark_server.runtime.binding import memory_policy_allowed
    check_environment()
    if keep:
        try:
            return plan_group(replace(options, ranks=keep), inner, agents=agents)
        except ValueError as error:
            logger.error("the lost group's requests will end: its %d ranks cannot be placed again: %s", keep, error)
    ranks = options.ranks
    if options.gpus:
        if ranks not in (0, len(options.gpus)):
            raise ValueError(f"ranks={ranks} and gpus={options.gpus}: there is one rank for each GPU")
        ranks = len(options.gpus)
    if not ranks and options.numa_nodes is None and os.environ.get(NUMA_NUM):
        text = os.environ[NUMA_NUM]
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"AS_NUMA_NUM is {text!r}; it must be the number of ranks, at least 1")
        ranks = int(text)
    numa_nodes, topology = options.numa_nodes, read_topology()
    if not options.ranks and numa_nodes is None and os.environ.get(NUMA_OFFSET, "0") != "0":
        numa_nodes = _nodes_from(os.environ[NUMA_OFFSET], ranks, [node.id for node in topology.nodes if node.cpus])
    bind_memory = memory_policy_allowed()
    if agents is not None:
        placement = _place_on_hosts(replace(options, numa_nodes=numa_nodes), topology, ranks, bind_memory, agents)
    elif options.gpus and numa_nodes is None:
        from allspark_server.runtime.device import SHARED_GPUS
        placement = place_on_gpus(topology, options.gpus, options.cpus_per_rank, options.use_siblings,
                                  os.environ.get(SHARED_GPUS) == "1")
    else:
        placement = place(topology, ranks, numa_nodes, options.cpus_per_rank, options.use_siblings,
                          options.memory_nodes)
    if not bind_memory and options.strict:
        raise ValueError("strict: this system does not let processes choose their memory policy; a container needs "
                         "SYS_NICE for it (docker run --cap-add SYS_NICE)")
    if not bind_memory and options.memory_nodes:
        raise ValueError("memory_nodes: this system does not let processes choose their memory policy; a container "
                         "needs SYS_NICE for it (docker run --cap-add SYS_NICE)")
    if not bind_memory:
        placement.warnings.append("this system does not let processes choose their memory policy (a container needs "
                                  "SYS_NICE for it); memory is placed by first touch")
    mpi = find_mpi()
    models = [_on_gpus(model, options.gpus) for model in options.models] if options.gpus else options.models
    served = replace(options, address=options.addresses(), models=models)
    words = (["--inner-address", inner] if inner else []) + rank_words(served, FIRST_RANK)
    several_hosts = len({rank.host for rank in placement.ranks}) > 1
    command = group_command(mpi, placement, sys.executable, words, bind_memory=bind_memory or several_hosts,
                            rank_words=rank_words(served, EVERY_RANK))
    environment = mpi_environment(mpi, several_hosts)
    if options.gpus:
        # Numbers are those of `allspark topology`; ranks, which are pinned beside these GPUs, use no others.
        environment |= ORDER | {GROUP_GPUS: ",".join(map(str, options.gpus))}
    return GroupPlan(placement, mpi, command, environment)


def _on_gpus(model: dict | str, gpus: list[int]) -> dict:
    """A model's configuration with these GPUs as the compute unit, unless it names another."""
    fields = {"model_name": Path(model).stem, "model_path": model} if isinstance(model, str) else model
    return {"compute_unit": f"CUDA:{','.join(map(str, gpus))}", **fields}
