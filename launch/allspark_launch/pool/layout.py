"""The layout of a pool's members over NUMA nodes: one wide group with a rank on every node, or a group on each node.
The chosen layout is saved beside the pool's configuration.
"""
from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from allspark_server import access

from ..machine.placement import nearest_memory
from ..machine.topology import Topology, format_list
from ..options import GroupOptions
from ..output import write_whole

logger = logging.getLogger(__name__)

#: the values of `layout` and `optimize` in a pool file, the default first
LAYOUTS, PURPOSES = ("wide", "nodes", "auto"), ("throughput", "latency")


def uses_layout(member: GroupOptions) -> bool:
    """Whether a layout applies to a member: not if it has numa_nodes, hosts or gpus."""
    return member.numa_nodes is None and not member.hosts and not member.gpus


def check(member: GroupOptions) -> None:
    """Raises ValueError if `member` has an option that does not work with a group on each node."""
    if member.ranks:
        raise ValueError(f"ranks is {member.ranks}, but a group on each node has one rank; leave ranks out, or set "
                         "numa_nodes")
    if any(isinstance(model, dict) and model.get("host_cache_dir") for model in member.models):
        raise ValueError("host_cache_dir belongs to one group; for a group on each node write one member per node, "
                         "with numa_nodes and a directory of its own")


def expand(name: str, member: GroupOptions, machine: Topology) -> dict[str, GroupOptions]:
    """Replaces a member by one group on each node, called NAME-NODE. Each next group gets the next port; Unix sockets
    are called PATH-NODE.
    """
    groups = {}
    for i, (node, memory) in enumerate(nearest_memory(machine, machine.default_nodes, member.memory_nodes).items()):
        groups[f"{name}-{node}"] = replace(
            member, numa_nodes=[node], memory_nodes=list(memory), http=member.http and _shift(member.http, i, node),
            address=[_shift(address, i, node) for address in member.address])
    return groups


def _shift(address: str, index: int, node: int) -> str:
    host, _, port = address.rpartition(":")
    if access.is_unix(address) or not port.isdigit():
        return f"{address}-{node}"
    return f"{host}:{int(port) + index}"


def candidates(member: GroupOptions, machine: Topology) -> dict[str, list[GroupOptions]]:
    """The groups to measure, by layout. They have only the options that affect speed."""
    bare = GroupOptions(models=member.models, cpus_per_rank=member.cpus_per_rank, use_siblings=member.use_siblings,
                        strict=member.strict, memory_nodes=member.memory_nodes)
    wide = replace(bare, numa_nodes=machine.default_nodes)
    return {"wide": [wide], "nodes": list(expand("", bare, machine).values())}


def subject(member: GroupOptions, machine: Topology, purpose: str) -> dict:
    """What a measurement is valid for: a machine, models and a purpose."""
    return {
        "optimize": purpose,
        "nodes": [{"id": node.id, "cpus": format_list(node.cpus), "memory_gib": round(node.memory_total / 2**30)}
                  for node in machine.nodes],
        "models": member.models, "memory_nodes": member.memory_nodes, "cpus_per_rank": member.cpus_per_rank,
        "use_siblings": member.use_siblings}


@dataclass
class Decision:
    """The layout chosen for a member. `subject`: what the choice is valid for. `measured`: figures of each layout,
    which no code reads.
    """

    layout: str
    why: str
    subject: dict
    time: str
    measured: list[dict] = field(default_factory=list)


def layout_file(pool: str, config_dir: str) -> Path:
    """The file of a pool's SavedLayout. It is not in the pool's folder, where every `*.json` is a member's file."""
    return Path(config_dir, f"{pool}.layout.json")


@dataclass
class SavedLayout:
    """The saved layout of a pool. `flags`: the layout flags of install and apply. `decisions`: by member."""

    path: Path
    flags: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)

    @classmethod
    def read(cls, pool: str, config_dir: str) -> SavedLayout:
        """Reads the file, if there is one. Raises ValueError if it is damaged."""
        path = layout_file(pool, config_dir)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, dict(content["said"]), {n: Decision(**d) for n, d in content["decisions"].items()})
        except FileNotFoundError:
            return cls(path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); remove it; then layouts are "
                             "measured again") from None

    def write(self) -> None:
        """Writes the file, or removes it if there is nothing to save."""
        if not self.flags and not self.decisions:
            self.path.unlink(missing_ok=True)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"said": self.flags, "decisions": {n: asdict(d) for n, d in self.decisions.items()}}
        write_whole(self.path, json.dumps(content, indent=1) + "\n", 0o644)

    def layout_of(self, member: str, layout: str) -> str:
        """The layout of a member, where "auto" stands for the measured layout, or wide if nothing was measured yet."""
        decision = self.decisions.get(member)
        return layout if layout != "auto" else decision.layout if decision else LAYOUTS[0]
