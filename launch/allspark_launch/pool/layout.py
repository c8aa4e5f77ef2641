"""How a pool's members are laid out over NUMA nodes: each as one wide group with a rank on every node, or as a group of
its own on each node; and what was decided about it, kept beside the pool's configuration.
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

logger = logging.getLogger(__name__)

#: what a pool file's `layout` may say, and `optimize`; the first is what holds where nothing is said
LAYOUTS, PURPOSES = ("wide", "nodes", "auto"), ("throughput", "latency")


def is_open(member: GroupOptions) -> bool:
    """Whether a layout concerns a member: not one that is told its nodes, has other hosts, or computes on GPUs."""
    return member.numa_nodes is None and not member.hosts and not member.gpus


def check(member: GroupOptions) -> None:
    """ValueError naming an option that groups on each node could not have alike."""
    if member.ranks:
        raise ValueError(f"ranks is {member.ranks}, but a group on each node has one rank; leave ranks out, or say "
                         "numa_nodes")
    if any(isinstance(model, dict) and model.get("host_cache_dir") for model in member.models):
        raise ValueError("host_cache_dir belongs to one group; for a group on each node write a member for each, with "
                         "numa_nodes and a directory of its own")


def expand(name: str, member: GroupOptions, machine: Topology) -> dict[str, GroupOptions]:
    """A group on each node instead of one member: NAME-NODE, on ports that follow one another, Unix sockets
    PATH-NODE.
    """
    found = {}
    for i, (node, memory) in enumerate(nearest_memory(machine, machine.default_nodes, member.memory_nodes).items()):
        found[f"{name}-{node}"] = replace(
            member, numa_nodes=[node], memory_nodes=list(memory), http=member.http and _shift(member.http, i, node),
            address=[_shift(address, i, node) for address in member.address])
    return found


def _shift(address: str, index: int, node: int) -> str:
    host, _, port = address.rpartition(":")
    if access.is_unix(address) or not port.isdigit():
        return f"{address}-{node}"
    return f"{host}:{int(port) + index}"


def candidates(member: GroupOptions, machine: Topology) -> dict[str, list[GroupOptions]]:
    """Layout -> its groups, with what bears on their speed; they serve nobody."""
    bare = GroupOptions(models=member.models, cpus_per_rank=member.cpus_per_rank, use_siblings=member.use_siblings,
                        strict=member.strict, memory_nodes=member.memory_nodes)
    wide = replace(bare, numa_nodes=machine.default_nodes)
    return {"wide": [wide], "nodes": list(expand("", bare, machine).values())}


def subject(member: GroupOptions, machine: Topology, purpose: str) -> dict:
    """What a measurement holds for: it is worth nothing for another machine, model or purpose."""
    return {
        "optimize": purpose,
        "nodes": [{"id": node.id, "cpus": format_list(node.cpus), "memory_gib": round(node.memory_total / 2**30)}
                  for node in machine.nodes],
        "models": member.models, "memory_nodes": member.memory_nodes, "cpus_per_rank": member.cpus_per_rank,
        "use_siblings": member.use_siblings}


@dataclass
class Decision:
    """The layout of a member. measured: each layout's figures, for people."""

    layout: str
    why: str
    subject: dict
    time: str
    measured: list[dict] = field(default_factory=list)


def path_of(pool: str, config_dir: str) -> Path:
    """Where a pool's Kept is: beside its folder, whose `*.json` are members'."""
    return Path(config_dir, f"{pool}.layout.json")


@dataclass
class Kept:
    """What is known of a pool beside its file: what install and apply were told by flags, and what was measured, by
    member.
    """

    path: Path
    said: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)

    @classmethod
    def read(cls, pool: str, config_dir: str) -> Kept:
        """ValueError if the file is not as `write` leaves it."""
        path = path_of(pool, config_dir)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, dict(content["said"]), {n: Decision(**d) for n, d in content["decisions"].items()})
        except FileNotFoundError:
            return cls(path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); remove it, and what it had decided "
                             "is measured again") from None

    def write(self) -> None:
        """Leaves no file where there is nothing to keep."""
        if not self.said and not self.decisions:
            self.path.unlink(missing_ok=True)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps({"said": self.said, "decisions": {n: asdict(d) for n, d in self.decisions.items()}},
                                  indent=1) + "\n", encoding="utf-8")
        new.chmod(0o644)
        new.replace(self.path)

    def layout_of(self, member: str, layout: str) -> str:
        """What a pool's layout comes to for a member; wide as long as nothing was decided."""
        decision = self.decisions.get(member)
        return layout if layout != "auto" else decision.layout if decision else LAYOUTS[0]
