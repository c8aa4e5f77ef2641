"""`allspark topology --plan MODEL`: what a model would take of each rank's memory, and how fast it could be."""
from __future__ import annotations

import argparse
import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..group.plan import compute_unit
from ..machine.gpus import ORDER
from ..machine.placement import Placement, RankPlacement
from ..options import model_config
from .top import table

if TYPE_CHECKING:
    from allspark_server.runtime.forecast import Decode, RankForecast
    from allspark_server.runtime.profile import Roofline

ROWS = (1, 4, 16)   # sequences that decode together
_PARTS = (("weights", "weights"), ("experts", "experts"), ("activations", "activations"), ("states", "states"),
          ("streaming", "streaming"), ("tower", "vision"), ("messages", "messages"), ("images", "images"),
          ("host_cache", "host cache"))


@dataclass
class ModelPlan:
    """A model on a placement. rates: of each rank, as measured. host_available: bytes of the host's memory that all
    ranks together may use.
    """

    name: str
    compute_unit: str
    ranks: list[RankForecast]
    rates: list[Roofline]
    decodes: list[Decode]
    host_available: int

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory that all ranks take together."""
        return sum(rank.on_host for rank in self.ranks)

    @property
    def refusals(self) -> list[str]:
        """Why it does not fit; empty if it does."""
        found = [rank.refused for rank in self.ranks if rank.refused]
        if not found and self.on_host > self.host_available:
            found.append(f"all ranks together need {_gib(self.on_host)} of the host's memory, of which "
                         f"{_gib(self.host_available)} are available")
        return found

    @property
    def fits(self) -> bool:
        """Whether each rank has the memory that it needs."""
        return not self.refusals

    def to_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, times in seconds, rates per second."""
        return {
            "model": self.name, "compute_unit": self.compute_unit, "fits": self.fits,
            "refusals": self.refusals, "host_needed": self.on_host, "host_available": self.host_available,
            "ranks": [{"rank": rank.rank, "role": rank.role, "device": rank.device,
                       "formats": rank.formats,
                       "memory": {name: getattr(rank.announced, name) for name, _ in _PARTS} | {"cache": rank.cache},
                       "needed": rank.needed, "available": rank.available, "fits": not rank.refused,
                       "cache_tokens": rank.tokens, "span_bytes": rank.announced.span_bytes,
                       "messages_per_step": rank.messages, "message_row_bytes": rank.message_row,
                       "roofline": asdict(rates)} for rank, rates in zip(self.ranks, self.rates)],
            "decode": [{"rows": step.rows, "experts_per_layer": step.touched, "read": step.read,
                        "seconds": step.seconds, "wait_seconds": step.wait, "limit_rank": step.limit[0],
                        "limit": step.limit[1], "tokens_per_second": step.tokens_per_second}
                       for step in self.decodes]}

    def lines(self) -> list[str]:
        """For people."""
        parts = [(name, title) for name, title in _PARTS if any(getattr(rank.announced, name) for rank in self.ranks)]
        memory = [("rank", "role", "on", "matrices", *(title for _, title in parts), "cache", "needed", "available",
                   "")]
        for rank in self.ranks:
            memory.append((str(rank.rank), rank.role, rank.device, "+".join(rank.formats),
                           *(_gib(getattr(rank.announced, name)) for name, _ in parts), _gib(rank.cache),
                           _gib(rank.needed), _gib(rank.available), "does not fit" if rank.refused else ""))
        found = [f"plan of model {self.name}, compute_unit={self.compute_unit} (nothing is loaded):",
                 *table(memory)]
        if any(not rank.announced.in_host_memory and rank.announced.on_host for rank in self.ranks):
            found.append("messages, images and host cache of a rank on a GPU are in the host's memory: the GPU "
                         "does not need them")
        found += [f"DOES NOT FIT: {text}" for text in self.refusals]
        if tokens := max(rank.tokens for rank in self.ranks):
            found.append(f"the cache holds {tokens:,} tokens")
        for rank in self.ranks:
            if rank.messages:
                way = "returns" if rank.role == "experts" else "sends"
                found.append(f"rank {rank.rank} {way} {rank.messages} messages a step, with {rank.message_row:,} bytes "
                             "for each row")
        return [*found, "", *self._speeds()]

    def _speeds(self) -> list[str]:
        mixed = self.ranks[0].role == "model"
        rates = ", ".join(f"rank {rank.rank} {rates.bytes_per_second / 1e9:.1f} GB/s"
                          for rank, rates in zip(self.ranks, self.rates))
        steps = [("rows", "experts/layer", *(f"rank {rank.rank} reads" for rank in self.ranks), "least ms",
                  *["wait"] * mixed, "tokens/s", "limit")]
        for step in self.decodes:
            number, limit = step.limit
            steps.append((str(step.rows), f"{step.touched:.1f}" if step.touched else "-",
                          *(f"{size / 1e9:.3f} GB" for size in step.read), f"{1e3 * step.seconds:.2f}",
                          *[f"{100 * step.wait / step.seconds:.0f}%"] * mixed, f"{step.tokens_per_second:.1f}",
                          f"{limit} of rank {number}"))
        return [f"decode at the measured bandwidth ({rates}), at most:", *table(steps),
                "rows: sequences that decode together. Not counted: keys and values, exchange between ranks, sampling"
                + ("; wait: of the model's rank for routed experts" if mixed else "")]


def plan(options: argparse.Namespace, placement: Placement) -> ModelPlan:
    """Forecasts the model that `options.plan` names and measures the memory bandwidth of the ranks' devices, which
    takes a second or two. Raises ValueError or AllSparkError if the group cannot have the model for another reason than
    memory.
    """
    from allspark_client.config import AsModelConfig
    from allspark_server.runtime import binding, memory
    from allspark_server.runtime.forecast import Place, decode, forecast
    from allspark_server.runtime.level import levels
    from allspark_server.runtime.native import native_library

    os.environ |= ORDER
    config = model_config(options, options.plan)
    if options.gpus or options.experts_on:
        config.setdefault("compute_unit", compute_unit(options.gpus, options.experts_on, placement))
    native_library().use_isa(levels()[0])
    bound = binding.memory_policy_allowed()
    places = [Place(rank.node, rank.cpus, rank.memory_nodes if bound else ()) for rank in placement.ranks]
    users: dict[int, int] = defaultdict(int)
    for place in places:
        for node in place.memory_nodes:
            users[node] += 1
    memory.ranks_on_node = dict(users)
    checked = AsModelConfig.from_dict(config)
    ranks = forecast(checked, places)
    rates = measure(placement.ranks, bool(options.experts_on))
    return ModelPlan(checked.model_name, checked.compute_unit, ranks, rates,
                     [decode(ranks, rates, rows) for rows in ROWS], memory.available_memory(nodes=()))


def measure(ranks: list[RankPlacement], mixed: bool = False) -> list[Roofline]:
    """The roofline of each rank, as the profile measures it. Ranks of one node that compute at the same time share what
    is measured there, by their threads: all of an ordinary group, and the ranks of experts of a mixed one.
    """
    from allspark_server.runtime.profile import GpuRooflineMeter, Roofline, RooflineMeter

    together: dict[tuple[int, bool], list[RankPlacement]] = defaultdict(list)
    for rank in ranks:
        if rank.gpu is None:
            together[rank.node, mixed and rank.rank == 0].append(rank)
    found: dict[int, Roofline] = {rank.rank: GpuRooflineMeter(rank.gpu).finish() for rank in ranks
                                  if rank.gpu is not None}
    for sharing in together.values():
        cpus = sorted({cpu for rank in sharing for cpu in rank.cpus})
        pinned = all(rank.pinned for rank in sharing)
        whole = RooflineMeter(cpus if pinned else [], len(cpus)).finish()
        threads = sum(len(rank.cpus) for rank in sharing)
        for rank in sharing:
            part = len(rank.cpus) / threads
            found[rank.rank] = Roofline(whole.bytes_per_second * part, whole.operations_per_second * part,
                                        whole.integer_operations_per_second * part)
    return [found[rank.rank] for rank in ranks]


def _gib(size: int) -> str:
    """Bytes as text."""
    if not size:
        return "-"
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
