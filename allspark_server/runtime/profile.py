"""What each op of a model costs: time, bytes and operations, compared with the machine's roofline.

Profiling needs no switch. Steps are profiled for PROFILE_SECONDS after a model's first step and after each reading (on
a GPU only a few of these steps: cuda/op_times.h). A reading within that time lets the profile grow. A later reading
returns the last profile and starts a new one. So a reading every minute profiles all the time, and a model whose
profile is not read has no cost. A vision tower is profiled as its model is; its ops are named tower:….
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Op
from allspark_server.runtime.memory import available_memory
from allspark_server.runtime.native import cuda_library, native_library
from allspark_server.weights.formats import WeightFormat

PROFILE_SECONDS = 60.0
INTEGER_FORMATS = ("w8a8", "w4a8")  # activations are quantized too: GEMMs of integers
SLICE_SECONDS = 0.01  # of measuring the roofline at a time: about a decoding step
_MEASURED_MIB = 512  # read to measure bandwidth: much more than caches hold


@dataclass(frozen=True)
class Roofline:
    """The peak rates of a number of threads together.

    bytes_per_second: read from memory. operations_per_second: in fp32 from registers (bfloat16 on CPUs with tiles).
    integer_operations_per_second: of 8-bit integers; 0: not measured.
    """

    bytes_per_second: float
    operations_per_second: float
    integer_operations_per_second: float = 0.0


class RooflineMeter:
    """Measures the roofline of some threads once in a process, in slices between which steps can run."""

    _known: dict[tuple[tuple[int, ...], int], Roofline] = {}

    def __init__(self, cpus: list[int], threads: int):
        """cpus: the CPUs to which threads are pinned, or []."""
        self._cpus, self._threads = cpus, threads
        self._native: Any = None    # the native meter while it measures

    @property
    def roofline(self) -> Roofline | None:
        """The roofline; None if it is not measured yet."""
        return self._known.get((tuple(self._cpus), self._threads))

    def measure(self) -> bool:
        """Measures for SLICE_SECONDS, unless the roofline is complete. Returns whether it is complete."""
        if self.roofline is not None:
            return True
        if self._native is None:
            mib = max(32, min(_MEASURED_MIB, (available_memory(1) >> 20) // 4))
            self._native = native_library().RooflineMeter(self._cpus, self._threads, mib)
        if not self._native.slice(SLICE_SECONDS):
            return False
        self._known[tuple(self._cpus), self._threads] = Roofline(*self._native.rates())
        self._native = None     # frees its memory
        return True

    def finish(self) -> Roofline:
        """Measures the rest in one call, which takes up to a second in the first call of a process."""
        while not self.measure():
            pass
        return self._known[tuple(self._cpus), self._threads]


class GpuRooflineMeter:
    """Measures a GPU's roofline in one call, which takes 40 ms and half a gigabyte of its memory."""

    _known: dict[int, Roofline] = {}

    def __init__(self, index: int):
        self._index = index

    def measure(self) -> bool:
        """Measures the roofline; returns True. Raises RuntimeError if the GPU lacks the memory."""
        if self._index not in self._known:
            self._known[self._index] = Roofline(*cuda_library().measure_roofline(self._index))
        return True

    def finish(self) -> Roofline:
        """The roofline, measured if it is not known."""
        self.measure()
        return self._known[self._index]


@dataclass
class OpProfile:
    """All calls of one kind of op: seconds (least, most and total), total bytes and total operations.

    weight: the role in a layer of a linear op's matrix; "" for other ops. integer: the operations are those of 8-bit
    integers.
    """

    op: str
    weight: str = ""
    count: int = 0
    min: float = 0.0
    max: float = 0.0
    sum: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    integer: bool = False

    def add(self, other: OpProfile) -> None:
        """Adds the calls of another position in the op list."""
        if not other.count:
            return
        self.min = min(self.min, other.min) if self.count else other.min
        self.max = max(self.max, other.max)
        self.count += other.count
        self.sum += other.sum
        self.bytes += other.bytes
        self.operations += other.operations


@dataclass(frozen=True)
class ExpertWaits:
    """Messages that a GPU has sent to ranks of experts; the seconds, in all, from each of them until the GPU saw all
    answers; and those that each rank computed, from finding a message to its answer. Rows, over all layers, whose
    experts the GPU computed as a prompt's; of the experts that other rows chose, how many were hot, and how many all
    were.
    """

    messages: int = 0
    waited: float = 0.0
    computed: tuple[float, ...] = ()
    streamed_rows: int = 0
    hits: int = 0
    uses: int = 0

    def since(self, before: ExpertWaits) -> ExpertWaits:
        """The difference to an earlier count."""
        known = before.computed or (0.0,) * len(self.computed)
        return ExpertWaits(self.messages - before.messages, self.waited - before.waited,
                           tuple(now - then for now, then in zip(self.computed, known)),
                           self.streamed_rows - before.streamed_rows, self.hits - before.hits, self.uses - before.uses)


@dataclass
class Profile:
    """A model's ops by kind, the most expensive first, and the roofline of the profiled rank and threads.

    experts: in a mixed group, the ops of each rank of experts, from rank 1 on. waits: if a GPU sends messages to these,
    since the last reading, profiled or not.
    """

    ops: list[OpProfile]
    roofline: Roofline
    experts: list[list[OpProfile]] = field(default_factory=list)
    waits: ExpertWaits | None = None

    def table(self) -> str:
        """The profile as text.

        Columns are times in milliseconds, the share of the total, bytes and operations, their rates, the fraction of
        its roofline that the op reaches, and the matrix. The last line has the machine's roofline; its Gop/s are fp32.

        The roofline of an op is the longer of two times: of its bytes at memory bandwidth, and of its operations at the
        peak rate (of fp32, or of 8-bit integers if activations are quantized). Data that stays in the CPU's caches can
        exceed memory bandwidth.

        In a mixed group, the ops of each rank of experts follow, named "rank 1: expert_linear", with parts of that
        rank's total; its roofline is not measured. The last line then has both sides of a layer, and, where a GPU sends
        messages, how long it waits for an answer in steps that are not profiled, too.
        """
        total = sum(op.sum for op in self.ops) or 1.0
        of_experts = [(f"rank {number}: {op.op}", op, sum(op.sum for op in ops) or 1.0)
                      for number, ops in enumerate(self.experts, 1) for op in ops]
        width = max([len(op.op) for op in self.ops] + [len(name) for name, *_ in of_experts] + [len("roofline")])
        lines = [f"{'op':<{width}} {'count':>9} {'min':>9} {'max':>9} {'mean':>9} {'sum':>11} {'%':>6} {'GB':>10} "
                 f"{'Gop':>10} {'GB/s':>7} {'Gop/s':>7} {'roofline':>8}  weight"]
        top = self.roofline

        def line(name: str, op: OpProfile, total: float, reached: str) -> str:
            seconds = op.sum or 1e-12
            return (f"{name:<{width}} {op.count:>9} {1e3 * op.min:>9.4f} {1e3 * op.max:>9.4f} "
                    f"{1e3 * op.sum / op.count:>9.4f} {1e3 * op.sum:>11.3f} {100 * op.sum / total:>6.2f} "
                    f"{op.bytes / 1e9:>10.4f} {op.operations / 1e9:>10.4f} {op.bytes / seconds / 1e9:>7.1f} "
                    f"{op.operations / seconds / 1e9:>7.1f} {reached:>8}  {op.weight}".rstrip())

        for op in self.ops:
            rate = (op.integer and top.integer_operations_per_second) or top.operations_per_second
            part = max(op.bytes / top.bytes_per_second, op.operations / rate) / (op.sum or 1e-12)
            lines.append(line(op.op, op, total, f"{100 * part:.1f}%"))
        zero = 0.0
        lines.append(f"{'roofline':<{width}} {0:>9} {zero:>9.4f} {zero:>9.4f} {zero:>9.4f} {zero:>11.3f} {zero:>6.2f} "
                     f"{zero:>10.4f} {zero:>10.4f} {top.bytes_per_second / 1e9:>7.1f} "
                     f"{top.operations_per_second / 1e9:>7.1f} {100:>7.1f}%")
        lines += [line(name, op, of_rank, "-") for name, op, of_rank in of_experts]
        lines += [line for line in (self._experts_on_the_gpu(), self._sides()) if line]
        return "\n".join(lines)

    def _experts_on_the_gpu(self) -> str:
        """In a mixed group with a GPU, which experts the GPU computed; "" if none."""
        if self.waits is None or not (self.waits.hits or self.waits.streamed_rows):
            return ""
        return (f"on the GPU: {self.waits.hits} of {self.waits.uses} experts that rows chose, and some or all of "
                f"those of {self.waits.streamed_rows} rows of prompts, over all layers")

    def _sides(self) -> str:
        """In a mixed group, the milliseconds that each side spends in a layer with experts on average, in one line: the
        model's rank with all its other ops, by the number of its layers with experts.
        """
        def means(ops: list[OpProfile], names: tuple[str, str]) -> list[float]:
            """Of all other ops, then of those of these names; [] if the last of them did not run."""
            own = [sum(op.sum for op in ops if name in op.op.split("+")) for name in names]
            count = sum(op.count for op in ops if names[-1] in op.op.split("+"))
            return [1e3 * seconds / count for seconds in (sum(op.sum for op in ops) - sum(own), *own)] if count else []

        parts = []
        if found := means(self.ops, ("dispatch_rows", "returned_sums")):
            parts.append("rank 0 computes {:.3f}, sends {:.3f}, waits for sums {:.3f}".format(*found))
        for number, ops in enumerate(self.experts, 1):
            if found := means(ops, ("return_sums", "dispatched_rows")):
                parts.append("rank {} computes {:.3f}, sends {:.3f}, waits for rows {:.3f}".format(number, *found))
        if parts and self.waits is not None and self.waits.messages:
            waited = 1e3 * self.waits.waited / self.waits.messages
            longest = 1e3 * max(self.waits.computed) / self.waits.messages
            parts.append(f"from a message to its sums {waited:.4f}, {waited - longest:.4f} more than ranks compute")
        return f"a layer, ms: {'; '.join(parts)}" if self.experts and parts else ""


def role_of(graph: Graph, op: Op) -> str:
    """The role of a linear op's matrix, without its layer: "self_attn.o_proj", "lm_head"; "" for other ops."""
    if op.type != "linear":
        return ""
    name, layers = re.subn(r"^(model\.layers|encoder\.layers|transformer\.layers|blocks)\.\d+\.", "", op.weights[0])
    if not layers and graph.tensors[op.inputs[0]].logit_rows:
        return "lm_head"    # a tied one has the embedding's name
    return name.removesuffix(".weight")


def summarize(entries: list[OpProfile]) -> list[OpProfile]:
    """Sums of the op list's entries by op and weight, the most expensive first, without ops that never ran."""
    kinds: dict[tuple[str, str], OpProfile] = {}
    for entry in entries:
        new = OpProfile(entry.op, entry.weight, integer=entry.integer)
        kinds.setdefault((entry.op, entry.weight), new).add(entry)
    return sorted((kind for kind in kinds.values() if kind.count), key=lambda kind: -kind.sum)


class Profiler:
    """Decides which steps of an executor are profiled (see the module). active: before_step must be called."""

    def __init__(self, executor: Any):
        self._executor = executor
        self.active = False
        self._renew = False
        self._end: float | None = None  # on the monotonic clock; None: the next step sets it
        self.prolong()

    def prolong(self) -> None:
        """Profiles steps for PROFILE_SECONDS from the next step on."""
        self._renew = self._renew or not self.active
        self.active, self._end = True, None

    def before_step(self) -> bool | None:
        """Whether to switch the executor's profiling on (True), when a new profile starts, or off (False), after it.

        None: leave it.
        """
        now = time.monotonic()
        if self._end is None:
            self._end = now + PROFILE_SECONDS
            if self._renew:
                self._renew = False
                return True
        elif now > self._end:
            self.active = False
            return False
        return None

    def read(self, graph: Graph, formats: Mapping[str, WeightFormat]) -> list[OpProfile]:
        """The counts for each entry of the graph's op list; prolongs profiling. formats: of the matrices.

        An op that is fused with the next one has an entry of its own, such as "linear+silu_mul".
        """
        entries = [OpProfile(entry["op"], role_of(graph, op), entry["count"], entry["min"], entry["max"], entry["sum"],
                             entry["bytes"], entry["operations"],
                             op.type == "linear" and formats[op.weights[0]].dtype in INTEGER_FORMATS)
                   for entry in self._executor.profile() for op in (graph.ops[entry["index"]],)]
        self.prolong()
        return entries
