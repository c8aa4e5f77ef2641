"""What a model would take of each rank's memory, and how fast it could be, before anything is loaded.

Memory is what ranks announce when they load the model (announced.py). A speed is a ceiling: a decoding step takes at
least as long as its weights are read and multiplied at the rates that were measured. Keys and values, messages between
ranks and waiting for them come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.graph import Op
from allspark_server.models.roles import message_sizes
from allspark_server.runtime.announced import Announced
from allspark_server.runtime.device import Device
from allspark_server.runtime.memory import available_memory
from allspark_server.runtime.profile import INTEGER_FORMATS, Roofline
from allspark_server.runtime.rank_model import RankModel
from allspark_server.runtime.runner import ModelRunner

MEMORY, COMPUTE = "memory", "compute"


@dataclass(frozen=True)
class Place:
    """Where a rank will be. node: the NUMA node of its CPUs. cpus: one for each compute thread. memory_nodes: the nodes
    to which its memory is bound; none: the system decides.
    """

    node: int
    cpus: tuple[int, ...]
    memory_nodes: tuple[int, ...] = ()


@dataclass
class Work:
    """What some ops of a decoding step read and compute on a rank.

    bytes: of weights that every step reads once. row_bytes, operations, integers: for each row: bytes of embeddings,
    and multiplications and additions of floats and of 8-bit integers.
    """

    bytes: float = 0
    row_bytes: float = 0
    operations: float = 0
    integers: float = 0

    def seconds(self, rows: int, rates: Roofline) -> tuple[float, str]:
        """The shortest time for a step of so many rows, and what limits it: "memory" or "compute"."""
        memory = (self.bytes + rows * self.row_bytes) / rates.bytes_per_second
        compute = rows * (self.operations / rates.operations_per_second + self.integers
                          / (rates.integer_operations_per_second or rates.operations_per_second))
        return max((memory, MEMORY), (compute, COMPUTE))


@dataclass
class Experts:
    """The routed experts of a rank's layers that have `count` of them each, of which a row takes `top`. held: Work of
    all experts that the rank holds, each with one row. layers: how many layers.
    """

    count: int
    top: int
    layers: int = 0
    held: Work = field(default_factory=Work)

    def touched(self, rows: int) -> float:
        """How many experts of a layer `rows` rows take together, if each chooses independently: the mean."""
        return self.count * (1 - (1 - self.top / self.count) ** rows)

    def work(self, rows: int) -> Work:
        """What a step of so many rows reads and computes."""
        each = self.top / self.count
        return Work(self.held.bytes * self.touched(rows) / self.count, 0, self.held.operations * each,
                    self.held.integers * each)


@dataclass
class RankForecast:
    """One rank. role: "all" (of an ordinary group), "model" or "experts". device: "GPU 0", "node 1".

    spans, tokens: of the cache. available: bytes of the memory that it computes in. refused: why it does not fit, ""
    if it does. every: Work of all but routed experts; meanwhile: the part of it for which ranks of experts need not be
    awaited. messages: that it sends in a step, in a mixed group; message_row: bytes of one row of them. formats: of its
    matrices.
    """

    rank: int
    role: str
    device: str
    announced: Announced
    available: int
    spans: int = 0
    tokens: int = 0
    refused: str = ""
    every: Work = field(default_factory=Work)
    meanwhile: Work = field(default_factory=Work)
    experts: list[Experts] = field(default_factory=list)
    messages: int = 0
    message_row: int = 0
    formats: list[str] = field(default_factory=list)

    @property
    def cache(self) -> int:
        """Bytes of the cache."""
        return self.spans * self.announced.span_bytes

    @property
    def needed(self) -> int:
        """Bytes that the rank announces: of its device's memory."""
        return self.announced.fixed + self.cache

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory that the rank takes."""
        return self.needed if self.announced.in_host_memory else self.announced.on_host

    def read(self, rows: int) -> float:
        """Bytes of weights that a step of so many rows reads."""
        return (self.every.bytes + rows * self.every.row_bytes
                + sum(experts.work(rows).bytes for experts in self.experts))


@dataclass(frozen=True)
class Decode:
    """A decoding step of `rows` sequences. touched: experts of a layer that it takes; 0: it has no experts. read: bytes
    by rank. seconds: the least. wait: the part of it that the rank of the model waits for the experts, in a mixed
    group. limit: what takes the time: the rank, and its "memory" or "compute".
    """

    rows: int
    touched: float
    read: list[float]
    seconds: float
    wait: float
    limit: tuple[int, str]

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.rows / self.seconds


def forecast(config: AsModelConfig, places: Sequence[Place]) -> list[RankForecast]:
    """The forecast of each rank of a group at these places. Nothing is loaded, and no memory is reserved.

    config: model_path is a folder or a file of this machine. Raises AllSparkError if the group cannot have the model
    for another reason than memory.
    """
    found = []
    for number, place in enumerate(places):
        runner = ModelRunner(config, rank=number, world=len(places), cpus=list(place.cpus))
        try:
            found.append(_of_rank(runner, place))
        finally:
            runner.close()
    # All ranks take the number of spans that fits on each.
    caches = [rank.spans for rank in found if rank.announced.span_bytes and not rank.refused]
    for rank in found:
        rank.spans = min(caches, default=0) if rank.announced.span_bytes else 0
        rank.tokens = min((other.tokens for other in found if other.tokens), default=0) if rank.spans else 0
    return found


def _of_rank(runner: ModelRunner, place: Place) -> RankForecast:
    announced, role = runner.open(), runner.role
    model, device = runner.opened
    available = (available_memory(runner.sharers, nodes=place.memory_nodes) if device.host_memory
                 else device.available(runner.sharers))
    found = RankForecast(
        runner.rank, ("experts" if role.experts else "model") if role.mixed else "all",
        f"GPU {runner.gpu}" if runner.gpu is not None else f"node {place.node}", announced, available)
    try:
        found.spans = runner.spans(available, announced)
        found.tokens = runner.tokens_of(found.spans) if announced.span_bytes else 0
    except AllSparkError as error:
        if error.status != AsStatus.ALLSPARK_MEMORY_ERROR:
            raise
        found.refused = error.message
    found.formats = sorted({str(form) for form in model.formats.values()})
    _add_work(found, model, device)
    if role.mixed:
        width, top, sums = message_sizes(model.whole, role.entries)
        found.messages = sum(op.type in ("dispatch_rows", "return_sums") for op in model.graph.ops)
        found.message_row = 4 * sums if role.experts else 4 * (width + 2 * top)
    return found


def _add_work(found: RankForecast, model: RankModel, device: Device) -> None:
    """Adds what the rank's ops read and compute."""
    graph = model.graph
    sizes: dict[tuple[int, int], Experts] = {}
    awaiting = False    # whether ranks of experts are computing
    for op in graph.ops:
        if op.type in ("dispatch_rows", "returned_sums"):
            awaiting = op.type == "dispatch_rows"
        if op.type == "expert_linear":
            top, count = graph.row_sets[graph.tensors[op.outputs[0]].rows].times, graph.weights[op.weights[0]].experts
            experts = sizes.setdefault((count, top), Experts(count, top))
            # An expert has two of these, the second for what the first has computed.
            experts.layers += graph.tensors[op.inputs[0]].rows not in graph.row_sets
            _add_op(experts.held, op, model, device)
            continue
        _add_op(found.every, op, model, device)
        if awaiting:
            _add_op(found.meanwhile, op, model, device)
    found.experts = list(sizes.values())


def _add_op(work: Work, op: Op, model: RankModel, device: Device) -> None:
    """Adds what one op reads and computes. It reads its weights even if an op before has: caches are small."""
    for name in op.weights:
        weight = model.graph.weights[name]
        size = model.bytes_of(weight, device)
        if op.type == "embedding":
            work.row_bytes += size / max(1, weight.rows_of(model.rank, model.world))
            continue
        work.bytes += size
        if weight.is_matrix:
            operations = 2 * weight.elements_of(model.rank, model.world)
            if model.formats[name].dtype in INTEGER_FORMATS:
                work.integers += operations
            else:
                work.operations += operations


def decode(ranks: Sequence[RankForecast], rates: Sequence[Roofline], rows: int) -> Decode:
    """The shortest decoding step of `rows` sequences. rates: of each rank, as measured."""
    mixed = ranks[0].role == "model"
    experts = [_sum([each.work(rows) for each in rank.experts]) for rank in ranks]
    of_experts = max((*work.seconds(rows, own), rank.rank) for rank, work, own in zip(ranks, experts, rates))
    if mixed:
        models = [(*one.every.seconds(rows, own), one.rank) for one, own in zip(ranks, rates) if one.role == "model"]
        every, limit, number = max(models)
        wait = max(0.0, of_experts[0] - ranks[0].meanwhile.seconds(rows, rates[0])[0])
        slowest = (number, limit) if every > of_experts[0] else (of_experts[2], of_experts[1])
        seconds = every + wait
    else:
        wait = 0.0
        seconds, limit, number = max((*_sum([one.every, work]).seconds(rows, own), one.rank)
                                     for one, work, own in zip(ranks, experts, rates))
        slowest = number, limit
    touched = next((each.touched(rows) for rank in ranks for each in rank.experts), 0.0)
    return Decode(rows, touched, [rank.read(rows) for rank in ranks], seconds, wait, slowest)


def _sum(works: Sequence[Work]) -> Work:
    return Work(sum(work.bytes for work in works), sum(work.row_bytes for work in works),
                sum(work.operations for work in works), sum(work.integers for work in works))
