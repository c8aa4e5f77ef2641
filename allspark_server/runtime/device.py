"""What a rank computes on: the CPUs of its node, or a GPU. How much memory that has, what a model takes of it, and the
executors that the native libraries make for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from allspark_client.config import UNQUANTIZED, AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_server.models.graph import OUTPUT_ROWS
from allspark_server.runtime.binding import GROUP_GPUS
from allspark_server.runtime.memory import available_memory, bound_nodes
from allspark_server.runtime.native import cuda_library, native_library
from allspark_server.runtime.profile import CeilingMeter, GpuCeilingMeter
from allspark_server.runtime.reservations import Reservation
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.gpu_forms import HOPPER, RECOVERED, gpu_form, on_gpu
from allspark_server.weights.quantized import ColumnSlice

#: of a GPU's memory, what the driver, kernels and recorded steps take beside what is counted
GPU_RESERVE = 768 << 20
GPU_CACHES = (*UNQUANTIZED, "int8", "uint4", "float8")
#: of types that only GPUs have
INSTEAD_ON_CPUS = {"float16": "'float32' or 'bfloat16'",
                   "float8": "weight_dtype='int8' or 'w8a8', cache_mode=AsCacheQuantI8"}
MOST_SAMPLING_THREADS = 16
#: for tests where there are fewer GPUs than ranks: 1 lets ranks share one
SHARED_GPUS = "ALLSPARK_TEST_SHARED_GPUS"


class Device(Protocol):
    """isa: its kernels, as users are told. half: what checkpoints in float16 are computed in. step_tokens: rows of a step
    unless told otherwise; most_rows: that one may have. cache_share, largest_cache_share: of the memory that is left
    beside the weights, what a cache of unspecified size takes at most; and what it may take if that is needed for even
    one request of full length. host_memory: whether it is the host's, of which a host cache takes its
    part.
    """

    isa: str
    half: str
    step_tokens: int
    most_rows: int
    cache_share: float
    largest_cache_share: float
    host_memory: bool

    def check(self, config: AsModelConfig, forms: set[WeightFormat], cache_dtype: str) -> None:
        """AllSparkError for what is not built yet. forms: of matrices."""

    def available(self, world: int) -> int:
        """Bytes that this rank may use, now."""

    def reserve(self, name: str, size: int) -> Reservation | None:
        """So much memory is about to be used: tells others, where they cannot see it."""

    def executor(self, rank: int, world: int, window):
        """A native executor of a model. window: the ranks' shared memory, or None."""

    def beside(self, executor):
        """Another one, of its draft model."""

    def share(self, executor, rows: int) -> str:
        """Of an executor with a program: what other ranks need to reach this rank's device in steps of so many rows; ""
        where they do not. connect() follows, with every rank's in rank order, and then allocate().
        """

    def connect(self, executor, addresses: Sequence[str]) -> None:
        ...

    def allocate(self, executor, rows: int, sizes: tuple[int, int, int, int], cache_dtype: str, outputs: int, draft,
                 masks: int, adapters: dict) -> None:
        """Has an executor compile what it was given. sizes: sequences, their length, tokens of a span, spans. adapters:
        how many rows may have, as the native library names it; {}: none.
        """

    def meter(self) -> CeilingMeter | GpuCeilingMeter:
        """Of what it does at most."""

    def matrix_bytes(self, rows: int, part: ColumnSlice, experts: int) -> int:
        """Of so many matrices with so many rows of these columns."""

    def span_bytes(self, span_size: int, head_dim: int, dtype: str) -> int:
        """Of one layer and KV head."""

    def adapter_bytes(self, rank: int, inputs: int, columns: int, dtype: str) -> int:
        """Of the two matrices that an adapter has for one target."""

    def activation_bytes(self, model, rows: int, outputs: int) -> int:
        """What steps of a RankModel need, of so many rows, so many of them with outputs."""

    def form_of(self, form: WeightFormat, experts: bool, firsts: Sequence[int]) -> WeightFormat:
        """The format here of a matrix that a checkpoint has in this one; experts: it is a stack of theirs; firsts: the
        columns that ranks' slices begin at.
        """

    def beside_codes(self, dtype: str) -> str:
        """The type here of what is not quantized beside codes: of what others have left so, or of float16. dtype: what
        it is otherwise.
        """


class Cpus:
    """The CPUs of a rank."""

    half = "float32"
    # Enough rows for matrix products to be bound by arithmetic, few enough that a long prompt does not hold up the
    # other requests' tokens.
    step_tokens = 256
    most_rows = 2**31 - 1
    cache_share, largest_cache_share = 0.6, 0.9
    host_memory = True

    def __init__(self, cpus: list[int], threads: int):
        """cpus: to pin the threads to, or []."""
        self._cpus, self._threads, self._native = cpus, threads, native_library()
        self.isa = self._native.isa()

    def check(self, config, forms, cache_dtype):
        wanted = [("weight_dtype", form.dtype) for form in forms] + [("cache_dtype", cache_dtype)]
        for name, dtype in sorted(wanted, reverse=True):    # what weights need first
            if dtype in INSTEAD_ON_CPUS:
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{name}={dtype!r} is for GPUs (compute_unit="
                                    f"'CUDA:0'); on CPUs use {INSTEAD_ON_CPUS[dtype]}")

    def form_of(self, form, experts, firsts):
        return form

    def beside_codes(self, dtype):
        return dtype

    def available(self, world):
        return available_memory(world)

    def reserve(self, name, size):
        return Reservation(name, size, bound_nodes())

    def executor(self, rank, world, window):
        return self._native.Executor(rank, world, window, self._cpus, self._threads)

    def beside(self, executor):
        return executor.beside()

    def share(self, executor, rows):
        return ""   # the window is all

    def connect(self, executor, addresses):
        pass

    def allocate(self, executor, rows, sizes, cache_dtype, outputs, draft, masks, adapters):
        executor.allocate(rows, *sizes, cache_dtype, outputs, draft=draft, masks=masks, **adapters)

    def meter(self):
        return CeilingMeter(self._cpus, self._threads)

    def matrix_bytes(self, rows, part, experts):
        return self._native.matrix_bytes(rows, part.inputs, experts=experts, gathered=part.gathered, **part.native())

    def span_bytes(self, span_size, head_dim, dtype):
        return self._native.span_bytes(span_size, head_dim, dtype)

    def adapter_bytes(self, rank, inputs, columns, dtype):
        return self._native.adapter_bytes(rank, inputs, columns, dtype)

    def activation_bytes(self, model, rows, outputs):
        graph, native = model.graph, self._native
        attention = native.attention_bytes(self._threads, model.config.engine_max_length, graph.config.head_dim,
                                           model.cache_dtype)
        # Layers of different windows share out their work, and keep their partial results, each for themselves.
        windows = {op.attrs.get("window", 0) for op in graph.ops if op.type == "span_attention"}
        prepared = 0
        for op in graph.ops:
            if op.type not in ("linear", "expert_linear"):
                continue
            part, row_set = model.slice_of(graph.weights[op.weights[0]]), graph.tensors[op.outputs[0]].rows
            gathered = 4 * part.inputs if row_set in graph.row_sets else 0  # rows of experts, as floats
            size = native.prepared_bytes(part.inputs, gathered=part.gathered, **part.native()) or gathered
            prepared = max(prepared, size * max(rows_of(graph, row_set, rows, outputs), self._threads))
        forms = 2 if model.targets else 1  # of the program: with adapters, and without
        together = max((len(target.weight.parts) for target in model.targets), default=0)
        lora = native.lora_bytes(rows, together, model.config.lora_max_rank) if together else 0
        # A product's own rows, and attention's.
        return (tensor_bytes(model, rows, outputs) + forms * len(windows) * attention + 2 * prepared
                + lora)


class Gpu:
    """A rank's GPU."""

    half = "float16"
    step_tokens = 2048
    most_rows = 65535  # blocks of threads in a grid's second dimension: some kernels have one for each row
    cache_share = largest_cache_share = 0.95
    host_memory = False

    def __init__(self, index: int, threads: int, group: Sequence[int] = (), window=None):
        """threads: that draw tokens on the host. group: the GPUs of all ranks, where there are several, whose window is
        `window`. AllSparkError that says what to do where there is no such GPU, or it does not reach the others.
        """
        self._library, self._index, self._threads = cuda_library(), index, min(threads, MOST_SAMPLING_THREADS)
        self._group, self._window = list(group) or [index], window
        if len(self._group) > self._library.MOST_RANKS:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"a group has up to {self._library.MOST_RANKS} GPUs, and "
                                f"compute_unit names {len(self._group)}: start a group for each part of them")
        try:
            for other in self._group:
                self._library.check_peer(index, other)
            self._first = self._executor()  # it says whether there is a GPU, and which; the first model has it
        except (ValueError, RuntimeError) as error:
            unit = ",".join(map(str, self._group))
            full = "cannot allocate" in str(error) or "out of memory" in str(error)
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR if full else AsStatus.ALLSPARK_PARAM_ERROR,
                                f"compute_unit='CUDA:{unit}': {error}") from error
        self._capability = self._first.capability
        self.isa = f"sm_{self._capability} ({self._first.device_name})"

    def check(self, config, forms, cache_dtype):
        missing = [f"a matrix of type {form}" for form in sorted(forms, key=str) if not on_gpu(form)]
        if any(form.dtype == "float8" for form in forms) and self._capability != HOPPER:
            missing.append(f"a matrix of type float8 on {self.isa}, which is not sm_90,")
        if cache_dtype not in GPU_CACHES:
            missing.append(f"a cache of type {cache_dtype}")
        if config.host_cache_dir:
            missing.append("host_cache_dir")
        if config.speculation == "draft" and len(self._group) > 1:
            missing.append("speculation='draft' of several ranks")
        if missing:
            raise not_available(f"{missing[0]} on CUDA")

    def form_of(self, form, experts, firsts):
        return gpu_form(form, experts, self._capability, firsts)

    def beside_codes(self, dtype):
        return RECOVERED    # kernels of codes take activations in bfloat16

    def available(self, world):
        free, _ = self._library.memory_info(self._index)
        return max(0, free - GPU_RESERVE) // self._group.count(self._index)

    def reserve(self, name, size):
        return None  # the driver knows what is taken

    def executor(self, rank, world, window):
        found, self._first = self._first, None
        return found or self._executor()

    def beside(self, executor):
        return executor.beside(self._sampler())

    def _executor(self):
        return self._library.Executor(self._index, self._sampler(), self._window)

    def _sampler(self):
        return native_library().HostSampler(self._threads, window=self._window)

    def share(self, executor, rows):
        return executor.share(rows).hex()

    def connect(self, executor, addresses):
        if len(self._group) > 1:
            executor.connect([bytes.fromhex(address) for address in addresses])

    def allocate(self, executor, rows, sizes, cache_dtype, outputs, draft, masks, adapters):
        executor.allocate(rows, *sizes, cache_dtype, outputs, masks, draft=draft, **adapters)

    def meter(self):
        return GpuCeilingMeter(self._index)

    def matrix_bytes(self, rows, part, experts):
        return self._library.matrix_bytes(rows, part.inputs, experts=experts, **part.native())

    def span_bytes(self, span_size, head_dim, dtype):
        return self._library.span_bytes(span_size, head_dim, dtype)

    def adapter_bytes(self, rank, inputs, columns, dtype):
        return self._library.adapter_bytes(rank, inputs, columns, dtype)

    def activation_bytes(self, model, rows, outputs):
        config, net = model.config, model.graph.config
        splits = -(-config.engine_max_length // self._library.KV_SPLIT_TOKENS)
        partials = self._library.partial_bytes(net.head_dim) * net.num_kv_heads * runs * config.engine_max_batch
        widest = max(model.slice_of(weight).inputs for weight in model.graph.weights.values() if weight.is_matrix)
        rotary = rows * net.head_dim * 4
        dtype = model.weight_dtype if model.weight_dtype in UNQUANTIZED else RECOVERED
        shared = self._library.exchange_bytes(model.world, rows, net.hidden_size, dtype) if model.world > 1 else 0
        lora = self._library.lora_bytes(rows, config.lora_max_rank) if model.targets else 0
        return (tensor_bytes(model, rows, outputs) + partials + 2 * widest * (rows + 64) + rotary + shared + lora
                + model.span_bytes(self)  # of zeros: what windows have left behind
                + self._widened_bytes(model, rows, outputs))

    def _widened_bytes(self, model, rows: int, outputs: int) -> int:
        """What products of quantized matrices with many rows work in."""
        graph, widened = model.graph, 0
        for op, after in zip(graph.ops, graph.ops[1:]):
            if op.type == "linear" and model.formats[op.weights[0]].quantized:
                weight = graph.weights[op.weights[0]]
                most = rows_of(graph, graph.tensors[op.outputs[0]].rows, rows, outputs)
                widened = max(widened, self._library.widened_bytes(
                    weight.rows_of(model.rank, model.world), model.slice_of(weight).inputs, after.type == "silu_mul",
                    most))
        return widened


def tensor_bytes(model, rows: int, outputs: int) -> int:
    """Of all activation buffers, as floats."""
    graph = model.graph
    return 4 * sum(tensor.width_of(model.rank, model.world) * rows_of(graph, tensor.rows, rows, outputs)
                   for tensor in graph.tensors.values())


def rows_of(graph, row_set: str, rows: int, outputs: int) -> int:
    """How many rows a row set has in a step of so many, so many of them with outputs."""
    formed = graph.row_sets.get(row_set)
    if formed:
        return formed.times * rows_of(graph, formed.of, rows, outputs)
    return outputs if row_set == OUTPUT_ROWS else rows


def step_tokens(config: AsModelConfig) -> int:
    """Rows of a step unless the configuration says."""
    return (Gpu if config.on_gpus else Cpus).step_tokens


def device_of(config: AsModelConfig, rank: int, world: int, cpus: list[int], threads: int, window=None) -> Device:
    """What compute_unit says. window: to the other ranks. AllSparkError that says what to do if there is no such GPU,
    or there are not as many as ranks.
    """
    if not config.on_gpus:
        return Cpus(cpus, threads)
    return Gpu(gpu_of(config, rank, world), threads, config.device_ids if world > 1 else (), window)


def gpu_memory(index: int) -> dict[str, int]:
    """What the supervisor is told of a GPU that is in use: bytes that are free, and all."""
    try:
        free, total = cuda_library().memory_info(index)
    except RuntimeError:    # it is lost; steps say so
        return {}
    return {"index": index, "free": free, "total": total}


def gpu_of(config: AsModelConfig, rank: int, world: int) -> int:
    """The rank's GPU: of those that compute_unit names, ranks have one each, in order. AllSparkError if they cannot."""
    gpus, unit = config.device_ids, f"compute_unit={config.compute_unit!r}"
    if len(gpus) != world:
        number = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
        ranks = f"{world} ranks" if world > 1 else "1 rank"
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{unit} names {number}, and this group has {ranks}: each rank has one; start a group for "
                            f"them with allspark serve --gpus {','.join(map(str, gpus))}")
    if len(set(gpus)) < len(gpus) and os.environ.get(SHARED_GPUS) != "1":
        twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{unit} names GPU {twice} twice: each rank needs its own")
    own = os.environ.get(GROUP_GPUS, "")
    if own and own != ",".join(map(str, gpus)):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{unit} names other GPUs than this group was started for: use compute_unit='CUDA:{own}', "
                            f"or start a group with allspark serve --gpus {','.join(map(str, gpus))}")
    return gpus[rank]
