"""The ranks of a mixed group: the first ones compute the model, the others hold a slice of every routed expert.

compute_unit="CUDA:0+CPU:0,1" names them: the devices of the model's ranks, then one NUMA node for each rank of experts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_server.models.graph import Graph
from allspark_server.models.roles import experts_part, message_sizes, model_part


@dataclass(frozen=True)
class Role:
    """What a rank computes of a model: all, if the group is not mixed.

    rank, world: among the ranks that compute the same part, whose weights are divided among them. model_ranks: how many
    compute the model, the first of which exchanges messages with those of experts. entries: ranks of experts return
    entries, because the model's rank computes some of them (hot_expert_memory). either: they return sums, or entries in
    steps that its GPU shares with them.
    """

    rank: int
    world: int
    mixed: bool = False
    experts: bool = False
    entries: bool = False
    either: bool = False
    model_ranks: int = 1

    @property
    def exchanges(self) -> bool:
        """Whether the rank takes part in the exchange between the model and its routed experts."""
        return self.experts or (self.mixed and self.rank == 0)

    def config_of(self, config: AsModelConfig) -> AsModelConfig:
        """The config of the rank's own part of a group: compute_unit names all of the model's devices, or for a rank of
        experts CPU:0.
        """
        if not self.mixed:
            return config
        own = copy.copy(config)
        own.compute_unit = "CPU:0" if self.experts else config.compute_unit.partition("+")[0]
        return own

    def part_of(self, graph: Graph) -> Graph:
        """The rank's part of a graph. AllSparkError if the model has none."""
        if not self.mixed:
            return graph
        try:
            return experts_part(graph, self.entries, self.either) if self.experts else model_part(graph, not self.rank)
        except ValueError as error:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"a mixed group: {error}") from error


def role_of(config: AsModelConfig, rank: int, world: int) -> Role:
    """The role of a rank of a group of `world` ranks. AllSparkError if the config cannot be met."""
    nodes = config.expert_nodes
    if config.hot_expert_memory and not (nodes and config.on_gpus):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"hot_expert_memory={config.hot_expert_memory} is for mixed groups with a GPU, such as "
                            f"compute_unit='CUDA:0+CPU:0'; compute_unit is {config.compute_unit!r}")
    if not nodes:
        return Role(rank, world)
    unit = f"compute_unit={config.compute_unit!r}"
    models = len(config.device_ids)
    if world != models + len(nodes):
        number = "one" if models == 1 else str(models)
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{unit} needs {models + len(nodes)} ranks, {number} of the model and {len(nodes)} of "
                            f"experts, but this group has {world}: start a group for it with allspark serve "
                            + (f"--gpus {','.join(map(str, config.device_ids))} " if config.on_gpus else "")
                            + "--experts-on cpu")
    if config.speculation in ("draft", "mtp", "eagle"):
        raise not_available(f"speculation={config.speculation!r} in a mixed group")
    if config.lora_names:
        raise not_available("lora_names in a mixed group")
    entries = config.hot_expert_memory > 0
    more: dict[str, Any] = {"model_ranks": models, "entries": entries,
                            "either": not entries and config.on_gpus and config.expert_streaming_rows != 0}
    if rank < models:
        return Role(rank, models, mixed=True, **more)
    return Role(rank - models, len(nodes), mixed=True, experts=True, **more)


def check_first_ranks(role: Role, unit: str, shared_memory: Any) -> None:
    """Raises AllSparkError if several ranks are to compute the model of a mixed group without memory to sum in.

    unit: the group's compute_unit. shared_memory: of its ranks; None: nothing is computed.
    """
    if role.model_ranks == 1 or shared_memory is None or shared_memory.first_count == role.model_ranks:
        return
    gpus = unit.partition("+")[0].partition(":")[2] if unit.startswith("CUDA:") else "0,1"
    raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                        f"compute_unit={unit!r} divides the model among {role.model_ranks} ranks, which this group has "
                        f"no memory for: start a group with allspark serve --gpus {gpus} --experts-on cpu")


def exchange_sizes(graph: Graph, rows: int, entries: bool = False, entry_rows: int = 0) -> dict[str, Any]:
    """The native ExpertExchange's arguments for a whole model's graph and steps of up to `rows` rows.

    entries: see Role. entry_rows: rows of the largest message that may ask for entries.
    """
    width, top, sum_width = message_sizes(graph, entries)
    return {"rows": rows, "width": width, "top": top, "sum_width": sum_width,
            "entry_rows": min(rows, entry_rows)}
