"""What each op of a model costs: time, bytes and operations, beside what this machine can do at most.

Nothing is switched: the steps of PROFILE_SECONDS after a model's first step are profiled (on a GPU a few of them:
cuda/op_times.h), and of as long after each reading; a reading in that time adds to what was counted, a later one finds
the last profile and has the next one made anew. So reading every minute profiles all the time, and a model that nobody
looks at pays nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allspark_server.models.graph import Graph, Op
from allspark_server.runtime.memory import available_memory
from allspark_server.runtime.native import cuda_library, native_library
from allspark_server.weights.formats import WeightFormat

PROFILE_SECONDS = 60.0
INTEGER_FORMATS = ("w8a8", "w4a8")  # activations are quantized too, products are of integers
SLICE_SECONDS = 0.01  # of measuring ceilings at a time: about a decoding step
_MEASURED_MIB = 512  # read to measure bandwidth: much more than caches hold


@dataclass(frozen=True)
class Roofline:
    """What a number of threads together can do at most: bytes/s read from memory, operations/s in registers in fp32
    (where
    there are tiles: in bfloat16), and of 8-bit integers (0: not measured).
    """

    bytes_per_second: float
    operations_per_second: float
    integer_operations_per_second: float = 0.0


class RooflineMeter:
    """Measures the ceilings of some threads once in a process, SLICE_SECONDS at a time: steps can run in between."""

    _known: dict[tuple[tuple[int, ...], int], Roofline] = {}

    def __init__(self, cpus: list[int], threads: int):
        """cpus: to pin the threads to, or []."""
        self._cpus, self._threads = cpus, threads
        self._native: Any = None    # the native meter while it measures

    @property
    def roofline(self) -> Roofline | None:
        """None: not measured yet."""
        return self._known.get((tuple(self._cpus), self._threads))

    def measure(self) -> bool:
        """A slice of it, unless all is measured. Returns whether all is."""
        if self.roofline is not None:
            return True
        if self._native is None:
            mib = max(32, min(_MEASURED_MIB, (available_memory(1) >> 20) // 4))
            self._native = native_library().RooflineMeter(self._cpus, self._threads, mib)
        if not self._native.slice(SLICE_SECONDS):
            return False
        self._known[tuple(self._cpus), self._threads] = Roofline(*self._native.rates())
        self._native = None     # and its memory
        return True

    def finish(self) -> Roofline:
        """All of the rest at once: up to a second, at the first call of a process."""
        while not self.measure():
            pass
        return self._known[tuple(self._cpus), self._threads]


class GpuRooflineMeter:
    """The same of a GPU, at once: 40 ms, and half a gigabyte of its memory."""

    _known: dict[int, Roofline] = {}

    def __init__(self, index: int):
        self._index = index

    def measure(self) -> bool:
        """RuntimeError where there is not that much memory."""
        if self._index not in self._known:
            self._known[self._index] = Roofline(*cuda_library().measure_roofline(self._index))
        return True

    def finish(self) -> Roofline:
        self.measure()
        return self._known[self._index]


@dataclass
class OpProfile:
    """All calls of one kind of op: seconds (least, most, total), bytes and operations in total.

    weight: which matrix a linear op multiplies by, by its role in a layer; "" for other ops. integer: operations are
    those of 8-bit integers.
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
        """Takes over the calls of another place in the op list."""
        if not other.count:
            return
        self.min = min(self.min, other.min) if self.count else other.min
        self.max = max(self.max, other.max)
        self.count += other.count
        self.sum += other.sum
        self.bytes += other.bytes
        self.operations += other.operations


@dataclass
class Profile:
    """A model's ops by kind, the most expensive first, and the ceilings of the rank and threads that were timed."""

    ops: list[OpProfile]
    roofline: Roofline

    def table(self) -> str:
        """As text: times in milliseconds, part of the total, bytes and operations, their rates, the part of its ceiling
        that the op reaches, and the matrix. The last line holds the ceilings.

        The ceiling of an op is the time that its bytes take at the memory's rate, or its operations at the rate of
        multiply-adds (fp32, or 8-bit integers where activations are quantized), whichever is longer. What stays in the
        CPU's caches can exceed the memory's rate. The last line's Gop/s are fp32.
        """
        total = sum(op.sum for op in self.ops) or 1.0
        width = max([len(op.op) for op in self.ops] + [len("ceiling")])
        lines = [f"{'op':<{width}} {'count':>9} {'min':>9} {'max':>9} {'mean':>9} {'sum':>11} {'%':>6} {'GB':>10} "
                 f"{'Gop':>10} {'GB/s':>7} {'Gop/s':>7} {'ceiling':>7}  weight"]
        top = self.roofline
        for op in self.ops:
            seconds = op.sum or 1e-12
            rate = (op.integer and top.integer_operations_per_second) or top.operations_per_second
            part = max(op.bytes / top.bytes_per_second, op.operations / rate) / seconds
            lines.append(
                f"{op.op:<{width}} {op.count:>9} {1e3 * op.min:>9.4f} {1e3 * op.max:>9.4f} "
                f"{1e3 * op.sum / op.count:>9.4f} {1e3 * op.sum:>11.3f} {100 * op.sum / total:>6.2f} "
                f"{op.bytes / 1e9:>10.4f} {op.operations / 1e9:>10.4f} {op.bytes / seconds / 1e9:>7.1f} "
                f"{op.operations / seconds / 1e9:>7.1f} {100 * part:>6.1f}%  {op.weight}".rstrip())
        zero = 0.0
        lines.append(f"{'ceiling':<{width}} {0:>9} {zero:>9.4f} {zero:>9.4f} {zero:>9.4f} {zero:>11.3f} {zero:>6.2f} "
                     f"{zero:>10.4f} {zero:>10.4f} {top.bytes_per_second / 1e9:>7.1f} "
                     f"{top.operations_per_second / 1e9:>7.1f} {100:>6.1f}%")
        return "\n".join(lines)


def role_of(graph: Graph, op: Op) -> str:
    """What a linear op's matrix is in any layer: "self_attn.o_proj", "lm_head"; "" for other ops."""
    if op.type != "linear":
        return ""
    if graph.tensors[op.inputs[0]].logit_rows:
        return "lm_head"
    return re.sub(r"^model\.layers\.\d+\.", "", op.weights[0]).removesuffix(".weight")


def summarize(entries: list[OpProfile]) -> list[OpProfile]:
    """The places of an op list added up by op and weight, without those never run, the most expensive first."""
    kinds: dict[tuple[str, str], OpProfile] = {}
    for entry in entries:
        new = OpProfile(entry.op, entry.weight, integer=entry.integer)
        kinds.setdefault((entry.op, entry.weight), new).add(entry)
    return sorted((kind for kind in kinds.values() if kind.count), key=lambda kind: -kind.sum)


class Profiler:
    """Decides which steps of an executor are profiled; see the top of this file. `active`: call before_step."""

    def __init__(self, executor: Any):
        self._executor = executor
        self.active = False
        self._renew = False
        self._end: float | None = None  # on the monotonic clock; None: the next step sets it
        self.prolong()

    def prolong(self) -> None:
        """Profiles the steps of PROFILE_SECONDS from the next one on."""
        self._renew = self._renew or not self.active
        self.active, self._end = True, None

    def before_step(self) -> bool | None:
        """Whether the executor's profiling is to be switched: on (True) at the first step of the time, off after it."""
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
        """What was counted, for each place in the graph's op list; and more will be. formats: of the matrices.

        Ops computed together with the next one are entries of their own, "linear+silu_mul" for instance.
        """
        entries = [OpProfile(entry["op"], role_of(graph, op), entry["count"], entry["min"], entry["max"], entry["sum"],
                             entry["bytes"], entry["operations"],
                             op.type == "linear" and formats[op.weights[0]].dtype in INTEGER_FORMATS)
                   for entry in self._executor.profile() for op in (graph.ops[entry["index"]],)]
        self.prolong()
        return entries
