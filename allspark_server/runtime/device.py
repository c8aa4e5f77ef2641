"""The device that a rank computes on, the CPUs of its node or a GPU: its memory, the memory that a model needs, and the
native executors for it.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from allspark_client.config import UNQUANTIZED, AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import OUTPUT_ROWS, Op
from allspark_server.runtime.binding import GROUP_GPUS
from allspark_server.runtime.chip_costs import chip_costs
from allspark_server.runtime.memory import available_memory, bound_nodes
from allspark_server.runtime.native import DeviceLost, cuda_library, native_library
from allspark_server.runtime.profile import GpuRooflineMeter, RooflineMeter
from allspark_server.runtime.reservations import Reservation
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.gpu_forms import HOPPER, RECOVERED, gpu_form, on_gpu
from allspark_server.weights.quantized import ColumnSlice

if TYPE_CHECKING:
    from allspark_server.runtime.rank_model import RankModel

logger = logging.getLogger(__name__)

#: bytes of a GPU's memory for the driver, kernels and recorded steps, which are not counted otherwise
GPU_RESERVE = 768 << 20
GPU_CACHES = (*UNQUANTIZED, "int8", "uint4", "float8")
#: types that only GPUs support, and what to use on CPUs
INSTEAD_ON_CPUS = {"float16": "'float32' or 'bfloat16'",
                   "float8": "weight_dtype='int8' or 'w8a8', cache_mode=AsCacheQuantI8"}
MOST_SAMPLING_THREADS = 16
#: rows of a step by default of a model with routed experts, as a multiple of those of other models
LONG_STEPS = 4
#: for tests where there are fewer GPUs than ranks: 1 lets ranks share one
SHARED_GPUS = "ALLSPARK_TEST_SHARED_GPUS"


class Device:
    """A device. Numbers and formats default to those of CPUs.

    isa: the name of its kernels, for users. half: the type that float16 checkpoints are computed in. step_tokens:
    default number of rows in a step; most_rows: the largest number. cache_share: the part of the memory beside the
    weights that a cache of unspecified size may take; largest_cache_share: the part it may take if even one request of
    full length needs it. latent_caches, row_caches: the types of a cache for latent attention, and for attention over
    compressed positions. missing_ops, missing_attributes: ops, and attributes of ops, that it lacks, in words for
    users. classifies: it has models that sample no tokens. host_memory: it computes in host memory, of which a host
    cache takes a part. for_images: the native library's arguments for a model that takes images. tower_rate: operations
    a second of a vision tower, before one was measured: a guess that is too low rather than too high.
    """

    isa: str
    half = "float32"
    # Enough rows for GEMMs to be bound by arithmetic, few enough that a long prompt does not delay other requests'
    # tokens.
    step_tokens = 256
    most_rows = 2**31 - 1
    cache_share, largest_cache_share = 0.6, 0.9
    latent_caches: tuple[str, ...] = ("float32", "bfloat16", "int8")
    row_caches: tuple[str, ...] = ("float32", "bfloat16")
    missing_ops: ClassVar[dict[str, str]] = {}
    missing_attributes: ClassVar[dict[tuple[str, str], str]] = {}
    classifies = True
    host_memory = True
    for_images: ClassVar[dict[str, Any]] = {}
    tower_rate = 2e10
    _library: Any  # the native library for the device

    def check(self, config: AsModelConfig, forms: set[WeightFormat], cache_dtype: str) -> None:
        """AllSparkError if the device does not support a format of a matrix (`forms`), the cache type or the config."""
        raise NotImplementedError

    def missing(self, graph: Graph) -> str | None:
        """What a network's layers have that the device lacks, in words for users; None if it lacks nothing."""
        found = next((self.missing_ops[op.type] for op in graph.ops if op.type in self.missing_ops), None)
        return found or next((words for op in graph.ops for (kind, name), words in self.missing_attributes.items()
                              if op.type == kind and op.attrs.get(name)), None)

    def step_tokens_of(self, graph: Graph) -> int:
        """The default number of rows in a step of a model. Routed experts get few of the usual number each: such a step
        takes as long as reading their weights. While sequences of the model decode, `TokenBudget` keeps steps short.
        """
        with_experts = any(op.type == "expert_linear" for op in graph.ops)
        return LONG_STEPS * self.step_tokens if with_experts else self.step_tokens

    def available(self, world: int) -> int:
        """The bytes that this rank may use now."""
        raise NotImplementedError

    def reserve(self, name: str, size: int) -> Reservation | None:
        """Announces to other processes that `size` bytes will be used soon; None if the device itself tells them."""
        return None

    def executor(self, rank: int, world: int, shared_memory: Any) -> Any:
        """A native executor for a model. shared_memory: the ranks' shared memory, None for one rank."""
        raise NotImplementedError

    def draft_executor(self, executor: Any, divided: bool) -> Any:
        """An executor for the draft model, or a layer of the draft head, of `executor`. divided: whether each rank has
        a part of it.
        """
        raise NotImplementedError

    def draft_shard(self, rank: int, world: int) -> tuple[int, int]:
        """Which shard of a draft model a rank has, and of how many."""
        return rank, world

    def share(self, executor: Any, rows: int, outputs: int) -> str:
        """The address by which other ranks reach this rank's device in steps of up to `rows` rows, `outputs` of them
        with outputs; "" if they do not. Call it after the executor has its program; connect() and allocate() follow.
        """
        return ""

    def connect(self, executor: Any, addresses: Sequence[str]) -> None:
        """Connects an executor to the devices of the other ranks. addresses: of share(), of every rank, in rank
        order.
        """

    def allocate(self, executor: Any, rows: int, sizes: tuple[int, int, int, int], cache_dtype: str, outputs: int,
                 drafts: Sequence[Any], masks: int, more: dict[str, Any]) -> None:
        """Has an executor compile its program and allocate its memory.

        sizes: sequences, their maximum length, tokens of a span, spans. drafts: the executor of the draft model, or
        those of the draft head's layers; none without either. more: the native library's arguments for LoRA
        adapters and images.
        """
        executor.allocate(rows, *sizes, cache_dtype, outputs, drafts=list(drafts), masks=masks, **more)

    def warm_up(self, executor: Any, count: int) -> tuple[int, int]:
        """Has an allocated executor run up to `count` of the steps that prepare it for requests, between steps; all
        ranks together. Returns how many of them have run, of how many.
        """
        return 0, 0

    def meter(self) -> RooflineMeter | GpuRooflineMeter:
        """A measurement of the device's peak rates."""
        raise NotImplementedError

    def matrix_bytes(self, rows: int, part: ColumnSlice, experts: int) -> int:
        """Bytes of `experts` matrices with `rows` rows of these columns."""
        return self._library.matrix_bytes(rows, part.inputs, experts=experts, **part.native())

    def span_bytes(self, span_size: int, head_dim: int, dtype: str, whole: bool = False) -> int:
        """Bytes of a span for one layer and KV head. whole: of a network whose rows attend in both directions."""
        return self._library.span_bytes(span_size, head_dim, dtype)

    def latent_span_bytes(self, span_size: int, op: Op, dtype: str) -> int:
        """Bytes of a span of the cache of an op with latent attention."""
        return self._library.latent_span_bytes(span_size, int(op.attrs["latent_dim"]), int(op.attrs["rope_dim"]), dtype)

    def row_span_bytes(self, rows: int, features: int, dtype: str) -> int:
        """Bytes of so many rows of a cache whose rows are both key and value."""
        return self._library.latent_span_bytes(rows, features, 0, dtype)

    def index_span_bytes(self, span_size: int, dim: int, dtype: str) -> int:
        """Bytes of a span of an indexer's keys, of `dim` features, beside a cache of that type."""
        return self._library.index_span_bytes(span_size, dim, dtype)

    def state_bytes(self, graph: Graph, op: Op, rank: int, world: int) -> tuple[int, int]:
        """Bytes that an op with a state keeps of a sequence on a rank: its state, and its recent rows."""
        x = graph.tensors[op.inputs[0]]
        if op.type == "causal_conv":
            return self._library.causal_conv_bytes(x.width_of(rank, world), op.attrs["taps"])
        key_heads, values, key_dim, value_dim = delta_heads(graph, op, rank, world)
        if op.type == "ssd":
            return self._library.ssd_bytes(values // value_dim, key_heads, key_dim, value_dim)
        return self._library.gated_delta_bytes(key_heads, values // value_dim // key_heads, key_dim, value_dim,
                                               key_dim if op.attrs.get("channels") else 1)

    def adapter_bytes(self, rank: int, inputs: int, columns: int, dtype: str) -> int:
        """Bytes of the two matrices of an adapter for one target."""
        return self._library.adapter_bytes(rank, inputs, columns, dtype)

    def activation_bytes(self, model: RankModel, rows: int, outputs: int) -> int:
        """Bytes that steps of up to `rows` rows need, of which up to `outputs` have outputs."""
        raise NotImplementedError

    def form_of(self, form: WeightFormat, experts: bool, firsts: Sequence[int]) -> WeightFormat:
        """The format on this device of a matrix that is stored in the format `form`. experts: it is a stack of experts.
        firsts: the columns at which ranks' slices begin.
        """
        return form

    def head_form(self, form: WeightFormat) -> WeightFormat:
        """The format on this device of a stack with a matrix for each head (`head_linear`) that is stored as `form`."""
        return form

    def unquantized_dtype(self, dtype: str) -> str:
        """The type of unquantized weights in a model with quantized ones. dtype: the type they would have otherwise."""
        return dtype


class Cpus(Device):
    """The CPUs of a rank. They exchange through the ranks' shared memory alone."""

    def __init__(self, cpus: list[int], threads: int):
        """cpus: the CPUs to which threads are pinned, [] for none."""
        self._cpus, self._threads, self._library = cpus, threads, native_library()
        self.isa = self._library.isa()

    def check(self, config: AsModelConfig, forms: set[WeightFormat], cache_dtype: str) -> None:
        """See `Device.check`."""
        wanted = [("weight_dtype", form.dtype) for form in forms] + [("cache_dtype", cache_dtype)]
        for name, dtype in sorted(wanted, reverse=True):    # weights first
            if dtype in INSTEAD_ON_CPUS:
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{name}={dtype!r} is for GPUs (compute_unit="
                                    f"'CUDA:0'); on CPUs use {INSTEAD_ON_CPUS[dtype]}")

    def available(self, world: int) -> int:
        """See `Device.available`."""
        return available_memory(world)

    def reserve(self, name: str, size: int) -> Reservation | None:
        """See `Device.reserve`."""
        return Reservation(name, size, bound_nodes())

    def executor(self, rank: int, world: int, shared_memory: Any) -> Any:
        """See `Device.executor`."""
        return self._library.Executor(rank, world, shared_memory, self._cpus, self._threads)

    def draft_executor(self, executor: Any, divided: bool) -> Any:
        """See `Device.draft_executor`."""
        return executor.beside()

    def meter(self) -> RooflineMeter:
        """See `Device.meter`."""
        return RooflineMeter(self._cpus, self._threads)

    def matrix_bytes(self, rows: int, part: ColumnSlice, experts: int) -> int:
        """See `Device.matrix_bytes`."""
        return self._library.matrix_bytes(rows, part.inputs, experts=experts, gathered=part.gathered, **part.native())

    def activation_bytes(self, model: RankModel, rows: int, outputs: int) -> int:
        """See `Device.activation_bytes`."""
        graph, native = model.graph, self._library
        # Layers with different windows, or heads, have work lists and partial results of their own.
        length = model.config.engine_max_length
        kinds = {(op.attrs.get("window", 0), length, int(op.attrs["head_dim"]), -1) for op in graph.ops
                 if op.type == "span_attention"}
        kinds |= {(0, length, int(op.attrs["latent_dim"]), int(op.attrs["rope_dim"])) for op in graph.ops
                  if op.type == "latent_attention"}
        for op in graph.ops:
            if op.type == "compressed_attention":   # over a window and entries
                rate = int(op.attrs.get("rate", 0))
                listed = min(length, int(op.attrs["window"])) + (length // rate if rate else 0)
                kinds.add((rate, max(length, listed), graph.tensors[op.inputs[1]].width_of(model.rank, model.world), 0))
        attention = sum(native.attention_bytes(self._threads, longest, dim, model.cache_dtype, rope_dim=rope_dim)
                        for _, longest, dim, rope_dim in kinds)
        prepared = 0
        for op in graph.ops:
            if op.type not in ("linear", "expert_linear", "head_linear"):
                continue
            part, row_set = model.slice_of(graph.weights[op.weights[0]]), graph.tensors[op.outputs[0]].rows
            gathered = 4 * part.inputs if row_set in graph.row_sets else 0  # experts' rows, as floats
            size = native.prepared_bytes(part.inputs, gathered=part.gathered, **part.native()) or gathered
            count = max(rows_of(graph, row_set, rows, outputs), self._threads)
            prepared = max(prepared, size * count * (self._threads if op.type == "head_linear" else 1))
        forms = 2 if model.targets else 1  # the program with adapters and without
        together = max((len(target.weight.parts) for target in model.targets), default=0)
        lora = native.lora_bytes(rows, together, model.config.lora_max_rank) if together else 0
        kept = kept_bytes(model, rows)
        scores = 0
        for op in graph.ops:
            if op.type == "indexer":  # of one layer at a time
                width, heads = (graph.tensors[name].width_of(model.rank, model.world) for name in op.inputs[:2])
                rate = int(op.attrs.get("rate", 0))
                scores = max(scores, native.indexer_bytes(self._threads, length // max(rate, 1), heads, width // heads,
                                                          entries=model.cache_dtype if rate else ""))
        # Rows prepared for a GEMM, and for attention.
        return (tensor_bytes(model, rows, outputs) + forms * attention + 2 * prepared
                + lora + kept + scores)


class Gpu(Device):
    """A rank's GPU."""

    half = "float16"
    step_tokens = 2048
    most_rows = 65535  # blocks of threads in a grid's second dimension: some kernels have one for each row
    latent_caches = row_caches = UNQUANTIZED
    missing_ops: ClassVar[dict[str, str]] = {"pool_rows": "attention in both directions"}
    missing_attributes: ClassVar[dict[tuple[str, str], str]] = {
        ("latent_attention", "rate"): "attention to pools of positions that an indexer selects"}
    classifies = False
    for_images: ClassVar[dict[str, Any]] = {"given_rows": True}
    tower_rate = 2e13
    cache_share = largest_cache_share = 0.95
    host_memory = False

    def __init__(self, index: int, threads: int, group: Sequence[int] = (), shared_memory: Any = None):
        """threads: those that sample tokens on the host. group: the GPUs of all ranks if there are several, which then
        share `shared_memory`. AllSparkError says what to do if there is no such GPU; DeviceLost if this process has
        lost it.
        """
        self._library, self._index, self._threads = cuda_library(), index, min(threads, MOST_SAMPLING_THREADS)
        self._group, self._shared_memory = list(group) or [index], shared_memory
        if len(self._group) > self._library.MOST_RANKS:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"a group has up to {self._library.MOST_RANKS} GPUs, "
                                f"but compute_unit names {len(self._group)}: start a group for each part of them")
        try:
            # All ranks see the same GPUs, and so decide alike.
            self._by_host = not all(itertools.starmap(self._library.reaches_peer,
                                                      itertools.permutations(self._group, 2)))
            self._costs = chip_costs(self._library, index)
            self._first: Any = self._executor()  # finds out whether there is a GPU; the first model uses it
        except DeviceLost:
            raise
        except (ValueError, RuntimeError) as error:
            unit = ",".join(map(str, self._group))
            full = "cannot allocate" in str(error) or "out of memory" in str(error)
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR if full else AsStatus.ALLSPARK_PARAM_ERROR,
                                f"compute_unit='CUDA:{unit}': {error}") from error
        self._capability = self._first.capability
        self.isa = f"sm_{self._capability} ({self._first.device_name})"

    def check(self, config: AsModelConfig, forms: set[WeightFormat], cache_dtype: str) -> None:
        """See `Device.check`."""
        missing = [f"a matrix of type {form}" for form in sorted(forms, key=str) if not on_gpu(form)]
        if any(form.dtype == "float8" for form in forms) and self._capability != HOPPER:
            missing.append(f"a matrix of type float8 on {self.isa}, which is not sm_90,")
        if cache_dtype not in GPU_CACHES:
            missing.append(f"a cache of type {cache_dtype}")
        if missing:
            raise not_available(f"{missing[0]} on CUDA")

    def span_bytes(self, span_size: int, head_dim: int, dtype: str, whole: bool = False) -> int:
        """See `Device.span_bytes`."""
        return self._library.span_bytes(span_size, head_dim, dtype, whole=whole)

    def form_of(self, form: WeightFormat, experts: bool, firsts: Sequence[int]) -> WeightFormat:
        """See `Device.form_of`."""
        return gpu_form(form, experts, self._capability, firsts)

    def head_form(self, form: WeightFormat) -> WeightFormat:
        """See `Device.head_form`."""
        return WeightFormat(RECOVERED) if form.quantized else form

    def unquantized_dtype(self, dtype: str) -> str:
        """See `Device.unquantized_dtype`."""
        return RECOVERED    # kernels for quantized weights take activations in bfloat16

    def available(self, world: int) -> int:
        """See `Device.available`."""
        free, _ = self._library.memory_info(self._index)
        return max(0, free - GPU_RESERVE) // self._group.count(self._index)

    def executor(self, rank: int, world: int, shared_memory: Any) -> Any:
        """See `Device.executor`."""
        found, self._first = self._first, None
        return found or self._executor()

    def draft_executor(self, executor: Any, divided: bool) -> Any:
        """See `Device.draft_executor`."""
        shared = self._shared_memory if divided else None
        return executor.beside(native_library().HostSampler(self._threads, shared_memory=shared), shared)

    def draft_shard(self, rank: int, world: int) -> tuple[int, int]:
        """See `Device.draft_shard`. Every GPU has the whole model: the sums of shards would take longer."""
        return 0, 1

    def _executor(self) -> Any:
        sampler = native_library().HostSampler(self._threads, shared_memory=self._shared_memory)
        return self._library.Executor(self._index, sampler, self._shared_memory, self._costs)

    def share(self, executor: Any, rows: int, outputs: int) -> str:
        """See `Device.share`."""
        return executor.share(rows, outputs, by_host=self._by_host).hex()

    def connect(self, executor: Any, addresses: Sequence[str]) -> None:
        """See `Device.connect`."""
        if len(self._group) > 1:
            executor.connect([bytes.fromhex(address) for address in addresses])

    def allocate(self, executor: Any, rows: int, sizes: tuple[int, int, int, int], cache_dtype: str, outputs: int,
                 drafts: Sequence[Any], masks: int, more: dict[str, Any]) -> None:
        """See `Device.allocate`."""
        super().allocate(executor, rows, sizes, cache_dtype, outputs, drafts, masks, more)
        for row in executor.kernels():
            logger.debug("kernel of %(op)s, %(shape)s, rows %(first)s to %(last)s: %(kernel)s", row)

    def warm_up(self, executor: Any, count: int) -> tuple[int, int]:
        """See `Device.warm_up`."""
        return executor.warm_up(count)

    def meter(self) -> GpuRooflineMeter:
        """See `Device.meter`."""
        return GpuRooflineMeter(self._index)

    def activation_bytes(self, model: RankModel, rows: int, outputs: int) -> int:
        """See `Device.activation_bytes`."""
        config, net = model.config, model.graph.config
        split = 0 if model.graph.whole_texts else self._split_bytes(model)
        lists = any(op.type == "compressed_attention" for op in model.graph.ops)  # each row has a tile, drafts too
        tiles = config.engine_max_batch + (self._library.MOST_DRAFTS if lists else 0)
        partials = split * self._library.most_kv_splits(tiles, self._most_seen(model), split)
        widest = max(model.slice_of(weight).inputs for weight in model.graph.weights.values() if weight.is_matrix)
        rotary = 4 * rows * sum(int(op.attrs["rotary_dim"]) for op in model.graph.ops if op.type == "rotary_table")
        dtype = model.weight_dtype if model.weight_dtype in UNQUANTIZED else RECOVERED
        shared = max((self._library.exchange_bytes(
            model.world, rows_of(model.graph, row_set, rows, outputs), width, dtype, outputs, net.vocab_size,
            self._by_host) for row_set, width in summed_rows(model.graph)), default=0) if model.world > 1 else 0
        lora = self._library.lora_bytes(rows, config.lora_max_rank) if model.targets else 0
        return (tensor_bytes(model, rows, outputs) + partials + 2 * widest * (rows + 64) + rotary + shared + lora
                + kept_bytes(model, rows)
                + 4 * rows * given_width(model)
                + model.span_bytes(self)  # a span of zeros stands for positions that windows have left behind
                + self._widened_bytes(model, rows, outputs) + self._delta_bytes(model, rows)
                + self._indexer_bytes(model, rows))

    def _split_bytes(self, model: RankModel) -> int:
        """Bytes of the partial results of one KV split, of all heads."""
        graph = model.graph
        with_rows = next((op for op in graph.ops if op.type in ("latent_attention", "compressed_attention")), None)
        if with_rows is None:
            return max((self._library.partial_bytes(dim) * -(-width // dim) for dim, width in kept_heads(model)),
                       default=0)
        dim = int(with_rows.attrs.get("latent_dim", 0)) or graph.tensors[with_rows.inputs[1]].width_of(
            model.rank, model.world)
        heads = graph.tensors[with_rows.outputs[0]].width_of(model.rank, model.world) // dim
        return self._library.partial_bytes(dim) * self._library.latent_head_tiles(heads)

    def _most_seen(self, model: RankModel) -> int:
        """The most positions that a row sees or, with attention over compressed positions, positions and entries."""
        graph, length = model.graph, model.config.engine_max_length
        lists = []
        for op in graph.ops:
            if op.type == "compressed_attention":
                rate, seen = int(op.attrs.get("rate", 0)), min(int(op.attrs["window"]), length)
                entries = length // rate if rate else 0
                if len(op.inputs) > 2:
                    entries = min(entries, graph.tensors[op.inputs[2]].width_of(model.rank, model.world))
                lists.append(seen + entries)
        return max(lists, default=length)

    def _delta_bytes(self, model: RankModel, rows: int) -> int:
        """Bytes of the workspace for prompts of layers with the gated delta rule or a state space."""
        sizes = [0]
        for op in model.graph.ops:
            if op.type in ("gated_delta", "ssd"):
                key_heads, values, key_dim, value_dim = delta_heads(model.graph, op, model.rank, model.world)
                decays = key_dim if op.attrs.get("channels") else 1
                sizes.append(self._library.gated_delta_scratch(key_heads, values // value_dim, key_dim, decays, rows,
                                                               model.config.engine_max_batch))
        return max(sizes)

    def _indexer_bytes(self, model: RankModel, rows: int) -> int:
        """Bytes of the scores that indexers keep in turn."""
        if not any(op.type == "indexer" for op in model.graph.ops):
            return 0
        return self._library.indexer_bytes(rows, model.config.engine_max_length)

    def _widened_bytes(self, model: RankModel, rows: int, outputs: int) -> int:
        """Bytes of the workspace for GEMMs of quantized matrices with many rows."""
        graph, widened = model.graph, 0
        for op, after in zip(graph.ops, graph.ops[1:]):
            if op.type == "linear" and model.formats[op.weights[0]].quantized:
                weight = graph.weights[op.weights[0]]
                most = rows_of(graph, graph.tensors[op.outputs[0]].rows, rows, outputs)
                widened = max(widened, self._library.widened_bytes(
                    weight.rows_of(model.rank, model.world), model.slice_of(weight).inputs, after.type == "silu_mul",
                    most))
        return widened


def delta_heads(graph: Graph, op: Op, rank: int, world: int) -> tuple[int, int, int, int]:
    """Of a gated_delta op on a rank: key heads, columns of values, dimensions of a key head and of a value head. Of an
    ssd op, the same with its groups of B for key heads.
    """
    first, keys, last = (block.width_of(rank, world) for block in graph.tensors[op.inputs[0]].blocks)
    state_space = op.type == "ssd"
    key_dim, value_dim = (int(op.attrs[name])
                          for name in (("state_dim", "head_dim") if state_space else ("key_dim", "value_dim")))
    return keys // key_dim, first if state_space else last, key_dim, value_dim


def summed_rows(graph: Graph) -> set[tuple[str, int]]:
    """The row sets and widths of tensors that ranks sum."""
    tensors = [graph.tensors[op.inputs[0]] for op in graph.ops if op.type == "all_reduce"]
    return {(tensor.rows, tensor.width_of(0, 1)) for tensor in tensors}


def given_width(model: RankModel) -> int:
    """The width of the rows that plans may give a model; 0: they give none."""
    graph, widths = model.graph, [0]
    for op in graph.ops:
        passes = op.type == "embedding" and graph.config.tower is not None and "given_id" not in op.attrs
        if op.type == "given_rows" or passes:
            widths.append(graph.tensors[op.outputs[0]].width_of(0, 1))
        elif op.type == "add_given":
            widths.append(int(op.attrs.get("offset", 0)) + graph.tensors[op.inputs[0]].width_of(0, 1))
    return max(widths)


def kept_heads(model: RankModel) -> Iterator[tuple[int, int]]:
    """Of each attention that keeps keys and values: the size of a head, and the columns of this rank's keys."""
    for op in model.graph.ops:
        blocks = model.graph.tensors[op.inputs[0]].blocks if op.type == "span_attention" else ()
        if len(blocks) > 1:
            yield int(op.attrs["head_dim"]), blocks[1].width_of(model.rank, model.world)


def kept_bytes(model: RankModel, rows: int) -> int:
    """Bytes of the hidden states that a model keeps for a draft head: of a step's rows, and places of each sequence."""
    ops = {op.type for op in model.graph.ops}
    if "keep_hidden" not in ops or "kept_hidden" in ops:
        return 0
    places = native_library().state_places(rows, model.config.engine_max_batch, model.draft_layers)
    return 4 * places * model.graph.config.hidden_size


def tensor_bytes(model: RankModel, rows: int, outputs: int) -> int:
    """Bytes of all activation buffers in float32."""
    graph = model.graph
    return 4 * sum(tensor.width_of(model.rank, model.world) * rows_of(graph, tensor.rows, rows, outputs)
                   for tensor in graph.tensors.values())


def rows_of(graph: Graph, row_set: str, rows: int, outputs: int) -> int:
    """The number of rows of a row set in a step of `rows` rows, of which `outputs` have outputs."""
    formed = graph.row_sets.get(row_set)
    if formed:
        return formed.times * rows_of(graph, formed.of, rows, outputs)
    return outputs if row_set == OUTPUT_ROWS else rows


def step_tokens(config: AsModelConfig) -> int:
    """The default number of rows in a step."""
    return (Gpu if config.on_gpus else Cpus).step_tokens


def device_of(config: AsModelConfig, rank: int, world: int, cpus: list[int], threads: int,
              shared_memory: Any = None) -> Device:
    """The device that compute_unit names. shared_memory: of the ranks. AllSparkError says what to do if there is
    no such GPU, or not one for each rank.
    """
    if not config.on_gpus:
        return Cpus(cpus, threads)
    return Gpu(gpu_of(config, rank, world), threads, config.device_ids if world > 1 else (), shared_memory)


def gpu_memory(index: int) -> dict[str, int]:
    """The free and total bytes of a GPU, for the supervisor; {} if the GPU is lost."""
    try:
        free, total = cuda_library().memory_info(index)
    except RuntimeError:    # the GPU is lost; steps report it
        return {}
    return {"index": index, "free": free, "total": total}


def gpu_of(config: AsModelConfig, rank: int, world: int) -> int:
    """The rank's GPU: the GPUs that compute_unit names belong to the ranks in order. AllSparkError if that is
    impossible.
    """
    gpus, unit = config.device_ids, f"compute_unit={config.compute_unit!r}"
    if len(gpus) != world:
        number = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
        ranks = f"{world} ranks" if world > 1 else "1 rank"
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{unit} names {number}, but this group has {ranks} and each rank needs one; start a group "
                            f"for them with allspark serve --gpus {','.join(map(str, gpus))}")
    if len(set(gpus)) < len(gpus) and os.environ.get(SHARED_GPUS) != "1":
        twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{unit} names GPU {twice} twice: each rank needs its own")
    own = os.environ.get(GROUP_GPUS, "")
    if own and own != ",".join(map(str, gpus)):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{unit} names other GPUs than those of this group: use compute_unit='CUDA:{own}', or "
                            f"start a group with allspark serve --gpus {','.join(map(str, gpus))}")
    return gpus[rank]
