"""One model on one rank: opens it, checks that it fits, loads the rank's weights, sizes the cache and runs steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from allspark_client.config import AsModelConfig, check_available
from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_client.types import ModelInfo
from allspark_server.cache import SpanGroups
from allspark_server.models.generation import sampling_defaults
from allspark_server.models.text_outputs import text_outputs
from allspark_server.runtime import binding, expert_streams, memory
from allspark_server.runtime.announced import Announced
from allspark_server.runtime.device import Device, device_of, gpu_of, step_tokens
from allspark_server.runtime.digest import results_digest
from allspark_server.runtime.host_cache import HEADER, HostCacheFile
from allspark_server.runtime.memory import physical_cores
from allspark_server.runtime.model_checks import config_of_texts, memory_errors, mib, placement_of
from allspark_server.runtime.native import native_library
from allspark_server.runtime.profile import (
    ExpertWaits,
    GpuRooflineMeter,
    OpProfile,
    Profile,
    Profiler,
    RooflineMeter,
    summarize,
)
from allspark_server.runtime.rank_model import RankModel, check_draft
from allspark_server.runtime.reservations import Reservation, planning
from allspark_server.runtime.roles import check_first_ranks, exchange_sizes, role_of
from allspark_server.runtime.step_sizes import StepSizes, step_sizes
from allspark_server.runtime.steps import DEPTH
from allspark_server.runtime.tower import TowerRunner
from allspark_server.weights.checkpoint import model_hash
from allspark_server.weights.loader import Progress

logger = logging.getLogger(__name__)

_PAGE = 4096
_ANY_NUMBER = 2**31 - 1     # of spans, on ranks that have no cache
PROGRESS_SECONDS = 5.0
_SHARED_SLACK = 2 << 20     # bytes of address space for the alignment of matrices


class ModelRunner:
    """The shards of a model and of its draft model on one rank.

    Loading has two phases, `load` and `allocate_cache`, so that all ranks agree on the number of spans.
    """

    def __init__(self, config: AsModelConfig, *, rank: int = 0, world: int = 1, shared_memory: Any = None,
                 cpus: list[int] | None = None):
        """shared_memory: of the ranks (None: one rank). cpus: the compute threads' (None: they are not pinned)."""
        #: what this rank computes; it has part `role.rank` of `role.world` parts
        self.role = role_of(config, rank, world)
        self._group_rows = step_tokens(config)  # rows of a step by default, of all ranks of a mixed group
        self._unit = config.compute_unit    # of the whole group
        self.config, self.rank, self.world = self.role.config_of(config), rank, world
        self.shared_memory = shared_memory
        self.cpus = list(cpus or [])
        #: called during load with (elements loaded, elements in all)
        self.progress: Progress | None = None
        self._sizes = StepSizes(0, 0, 0, 0)     # known once load() has opened the model
        self._state_spans = 0       # spans that hold a sequence's recurrent state
        self._device: Any = None    # a Device, and its native executors, once load() has started
        self._executor: Any = None
        self._exchange: Any = None  # native, in a mixed group
        self._exchange_sizes: dict[str, Any] = {}
        self._streaming: int | None = None  # in a mixed group: bytes of the GPU's memory; None: it computes no experts
        self._reservation: Reservation | None = None  # of memory that is not touched yet
        self._model: RankModel | None = None
        self._drafts: list[RankModel] = []      # a draft model, or the layers of a draft head
        self._draft_executors: list[Any] = []
        #: the vision tower, once load() has opened the model; None if it takes no images
        self.tower: TowerRunner | None = None
        self._no_images_reason = ""
        self._profiler: Profiler | None = None
        self._waits = ExpertWaits()     # when the profile was last read
        self._meter: RooflineMeter | GpuRooflineMeter | None = None
        self._host_file: HostCacheFile | None = None
        self._adapter_memory: dict[int, Reservation | None] = {}  # by the adapter's index
        #: digest of the bytes that load has read on this rank
        self.digest = ""
        #: the address of this rank's device for other ranks, known after load; connect needs every rank's
        self.address = ""
        #: where this process's memory lies; see RankModels.numbers
        self.placement: dict = {}
        #: the number of spans that fit into this rank's host cache, known after load
        self.host_spans = 0
        #: the spans by key that the host cache kept from an earlier process, known after allocate_cache; None on a rank
        #: that keeps no keys and values
        self.held: dict[bytes, int] | None = None if self.role.experts else {}

    def open(self) -> Announced:
        """Opens the model and loads nothing; returns what load() announces. close() may follow.

        Raises AllSparkError if the model cannot be opened, or not on this rank.
        """
        check_available(self.config.validate())
        config, role = self.config, self.role
        check_first_ranks(role, self._unit, self.shared_memory)
        # The model's ranks of a mixed group sum and sample with no rank of experts.
        device = self._device = device_of(config, role.rank, role.world, self._pinned(), self._host_threads,
                                          self._peers)
        # A draft model shares its target's span tables, and may be behind it.
        whole = config.speculation in ("draft", "mtp", "eagle")
        model = self._model = RankModel(config, config.model_path, config.weights_path, role.rank, role.world, device,
                                        whole, adapters=config.lora_max_num > 0 and not role.mixed, role=role)
        if model.whole.whole_texts or not model.whole.generates:
            config = self.config = model.config = config_of_texts(config, model)
        models = [model]
        if config.speculation == "draft":
            part = device.draft_shard(role.rank, role.world)
            self._drafts = [RankModel(config, config.draft_model, "", *part, device, whole)]
            check_draft(self._drafts[0], model)
        else:
            self._drafts = [RankModel(config, "", "", role.rank, role.world, device, of=model, layer=layer)
                            for layer in range(model.draft_layers)]
        models += self._drafts
        self._no_images_reason = model.opened.no_images_reason
        if model.opened.tower is not None and role.mixed:
            self._no_images_reason = f"compute_unit={self._unit!r} is a mixed group, which has no vision towers"
        elif model.opened.tower is not None and (missing := device.missing(model.opened.tower.graph)):
            self._no_images_reason = (f"its vision tower has {missing}, which compute_unit={config.compute_unit!r} "
                                      "does not have")
        elif model.opened.tower is not None:
            self.tower = TowerRunner(config, model.opened.tower, self.rank, self.world, device,
                                     any("temporal" in op.attrs for op in model.graph.ops))
        if model.opened.tower is not None and self.tower is None:
            logger.warning("model %s: images are refused: %s", config.model_name, self._no_images_reason)
        for shard in models:
            device.check(config, set(shard.formats.values()), shard.cache_dtype)
        default = self._group_rows if role.mixed else device.step_tokens_of(model.graph)
        image_rows = self.tower.tokens if self.tower is not None and self.tower.vision.together else 0
        sizes = self._sizes = step_sizes(config, model, default, image_rows)
        sizes.check(config, device.most_rows, bool(self._drafts))
        self._span_bytes = sum(shard.span_bytes(device) for shard in models)
        self._state_spans = model.state_spans(device)
        self.host_spans = self._count_host_spans()
        activations = device.activation_bytes(model, sizes.rows, sizes.outputs)
        activations += sum(device.activation_bytes(draft, sizes.draft_rows, sizes.draft_outputs)
                           for draft in self._drafts)
        messages = images = host_cache = 0
        if role.mixed:
            experts = self.world - role.model_ranks
            self._streaming = expert_streams.rank_bytes(model, config, self._unit, role, sizes.rows, experts)
            self._exchange_sizes = exchange_sizes(
                model.whole, sizes.rows, role.entries, expert_streams.entry_rows(role, self._streaming))
            messages = native_library().ExpertExchange.bytes_needed(
                **self._exchange_sizes, holds_experts=role.experts) if role.exchanges else 0
        if self.tower is not None and not self.rank:
            images = config.image_cache_memory
        if not config.host_cache_dir and not role.experts:
            host_cache = config.host_cache_memory
        return Announced(
            experts=sum(shard.weight_bytes(device, experts=True) for shard in models),
            weights=sum(shard.weight_bytes(device, experts=False) for shard in models), activations=activations,
            states=config.engine_max_batch * sum(model.state_bytes(device)),
            tower=self.tower.memory if self.tower is not None else 0, messages=messages, images=images,
            host_cache=host_cache, span_bytes=self._span_bytes, in_host_memory=device.host_memory,
            streaming=self._streaming + config.hot_expert_memory if self._streaming else 0)

    def load(self) -> int:
        """Opens and loads the model; returns the number of cache spans that fit. Raises AllSparkError on failure."""
        began = time.perf_counter()
        announced = self.open()
        config, role, device, model = self.config, self.role, self._device, self._shard
        with planning():
            spans = self.spans(device.available(self.sharers), announced)
            self._reservation = device.reserve(config.model_name, announced.fixed + spans * announced.span_bytes)
        self._executor = device.executor(role.rank, role.world, self._peers or self.shared_memory)
        if role.experts and self._streaming is not None:
            self._executor.share_matrices(announced.experts + _SHARED_SLACK)
        with memory_errors(f"loading the weights of model {config.model_name!r}"):
            model.load(self._executor, self._report())
        self.digest = model.digest
        if self.tower is not None:
            with memory_errors(f"loading the vision tower of model {config.model_name!r}"):
                of_tower = self.tower.load(device.draft_executor(self._executor, True))
            self.digest += f" {self.tower.digest}"
        with memory_errors(f"allocating the exchange buffers of model {config.model_name!r}"):
            self.address = device.share(self._executor, self._sizes.rows, self._sizes.outputs)
            if role.exchanges:
                by_gpu = self._unit.startswith("CUDA:")
                self._exchange = native_library().ExpertExchange(self.shared_memory, **self._exchange_sizes,
                                                                 by_gpu=by_gpu, model_ranks=role.model_ranks)
                self.address = f"{self._exchange.address.hex()} {self.address}".rstrip()
                if role.experts and self._streaming is not None:
                    self.address += " " + self._executor.describe_experts().hex()
                    if small := self._executor.small_bytes:
                        logger.warning("rank %d: up to %s of experts' weights are not in huge pages: decoding may be "
                                       "slower than with expert_streaming_rows=0", self.rank, mib(small))
        for draft in self._drafts:
            self._draft_executors.append(executor := device.draft_executor(self._executor, draft.world > 1))
            with memory_errors(f"loading the weights of {self._draft_name}"):
                draft.load(executor, None, self._executor)
            if draft.world > 1:
                with memory_errors(f"allocating the exchange buffers of {self._draft_name}"):
                    self.address += " " + device.share(executor, self._sizes.draft_rows, self._sizes.draft_outputs)
        if self.tower is not None:
            self.address += f" {of_tower}"
        logger.info("rank %d of %d loaded %s of model %r as %s in %.2f s", self.rank, self.world,
                    mib(self._executor.weight_bytes()), self.config.model_name, model.weight_dtype,
                    time.perf_counter() - began)
        return spans

    @property
    def _draft_name(self) -> str:
        """What makes drafts besides the model, for messages; "" if nothing does."""
        names = {"draft": f"draft_model={self.config.draft_model!r}", "mtp": "the checkpoint's draft head",
                 "eagle": f"the EAGLE-3 head {self.config.draft_model!r}"}
        return names.get(self.config.speculation, "")

    def connect(self, addresses: Sequence[str]) -> None:
        """Connects this rank's device to those of the other ranks, after load(). addresses: every rank's, by rank.

        Once one rank has the addresses all ranks call it, even if the load is given up: a device's memory is freed when
        all ranks that have opened it have left it.
        """
        self._loaded()
        models = self.role.model_ranks
        if self.role.mixed and not self.role.experts and models > 1:    # the first one's follows that of its messages
            self._device.connect(self._executor, [address.split(" ")[-1] for address in addresses[:models]])
        if self._exchange is not None:
            exchanges = [address.split(" ") for address in (addresses[0], *addresses[models:])]
            self._exchange.connect([bytes.fromhex(parts[0]) for parts in exchanges])
            if self.role.experts and any(form.exact for form in self._shard.formats.values()):
                self._executor.use_exact_activations()
            self._executor.set_exchange(self._exchange)
            if self._streaming and all(len(parts) > 1 for parts in exchanges[1:]):
                expert_streams.stream(self._executor, [parts[1] for parts in exchanges[1:]], self._sizes.rows,
                                      self._exchange_sizes["top"], self._streaming, self.config)
        if self.role.mixed:
            return
        executors = [self._executor, *(executor for draft, executor in zip(self._drafts, self._draft_executors)
                                       if draft.world > 1)]
        for i, executor in enumerate(executors):  # an address for each
            self._device.connect(executor, [address.split(" ")[i] for address in addresses])
        if self.tower is not None:
            self.tower.connect([address.split(" ")[-1] for address in addresses])

    def allocate_cache(self, num_spans: int, digests: Sequence[str] = (), host_spans: int | None = None) -> ModelInfo:
        """Allocates KV cache and activations, after which the model can run steps. With several ranks, connect() comes
        first.

        num_spans, host_spans: the least numbers of spans that fit on all ranks; host_spans: by default this rank's.
        digests: every rank's, by rank; by default only this rank's. Raises AllSparkError if memory is short.
        """
        config, model = self.config, self._loaded()
        if host_spans is None:
            host_spans = self.host_spans
        if self.role.experts:   # it keeps no keys and values
            num_spans, host_spans = 1, 0
        rows, outputs = self._sizes.rows, self._sizes.outputs
        sizes = config.engine_max_batch, config.engine_max_length, config.cache_span_size, num_spans
        with memory_errors(f"allocating the cache of model {config.model_name!r} ({num_spans} spans)"):
            for draft, executor in zip(self._drafts, self._draft_executors):
                executor.allocate(self._sizes.draft_rows, *sizes, draft.cache_dtype, self._sizes.draft_outputs)
            more = {"adapters": config.lora_max_num, "adapter_rank": config.lora_max_rank,
                    "adapter_dtype": model.adapter_dtype} if model.targets else {}
            if self.tower is not None:
                more |= self._device.for_images
            self._device.allocate(self._executor, rows, sizes, model.cache_dtype, outputs, self._draft_executors,
                                  0 if self.role.experts else DEPTH * outputs, more)
        if self.tower is not None:
            with memory_errors(f"allocating the memory of the vision tower of model {config.model_name!r}"):
                self.tower.allocate()
        seen = [self.tower.hash_facts] if self.tower is not None else []
        placement = f"experts on {self.world - self.role.model_ranks} ranks" if self.role.mixed else ""
        hash_of_model = model_hash(model.opened, model.opened_formats, digests or [self.digest], seen, placement)
        if host_spans:
            with memory_errors(f"allocating the host cache of model {config.model_name!r}"):
                self._allocate_host_cache(host_spans, hash_of_model)
        if self.rank == 0 or self.role.experts:
            self._profiler, self._meter = Profiler(self._executor), self._device.meter()
        self.placement = placement_of(self.cpus, self.rank)
        net = model.graph.config
        return ModelInfo(
            name=config.model_name, architecture=net.architecture, vocab_size=net.vocab_size, num_layers=net.num_layers,
            eos_token_ids=list(net.eos_token_ids), max_length=config.engine_max_length, num_spans=num_spans,
            span_size=config.cache_span_size, max_step_tokens=rows, max_batch=config.engine_max_batch,
            weight_bytes=self._weight_bytes(), cache_bytes=self._executor.cache_bytes(), ranks=self.world,
            isa=self._device.isa, weight_dtype=model.weight_dtype, cache_dtype=model.cache_dtype,
            model_hash=hash_of_model, host_spans=host_spans,
            host_cache_bytes=self._executor.host_cache_bytes(host_spans) if host_spans else 0,
            tokenizer_dir=model.opened.tokenizer_dir,
            dynamic_rope_original=net.rope.original_max if net.rope.type == "dynamic" else 0,
            long_rope_original=net.rope.original_max if net.rope.type == "longrope" else 0,
            cache_windows=list(self._groups.windows), state_spans=self._state_spans,
            weight_group_size=model.weight_group_size, quantize_head=model.quantize_head,
            embeddings=any(op.type == "hidden_states" for op in model.graph.ops), draft_layers=model.draft_layers,
            no_images_reason=self._no_images_reason, **text_outputs(model.graph, model.opened.tokenizer_dir),
            sampling_defaults=sampling_defaults(model.opened.tokenizer_dir))

    def _weight_bytes(self) -> int:
        """Bytes of the model's weights and of those that make its drafts, on this rank."""
        return sum(executor.weight_bytes() for executor in (self._executor, *self._draft_executors))

    def warm_up(self, count: int) -> tuple[int, int]:
        """Runs up to `count` of the steps after which no request meets the first launch of a kernel.

        Between steps, on all ranks together, after allocate_cache(). Returns how many of them have run, of how many.
        """
        if self.role.experts:   # computes what the model's rank sends meanwhile
            self._executor.step(b"", False)
            return 0, 0
        try:
            return self._warm_up(count)
        finally:
            if self._exchange is not None:
                self._exchange.end_step()

    def _warm_up(self, count: int) -> tuple[int, int]:
        with memory_errors(f"warming up model {self.config.model_name!r}"):
            done, total = self._device.warm_up(self._executor, 0)
            if self.tower is None or done < total:
                done, total = self._device.warm_up(self._executor, count)
                count = 0
            further, more = self.tower.warm_up(count) if self.tower is not None else (0, 0)
            return done + further, total + more

    def load_adapter(self, index: int, directory: str) -> str:
        """Loads a LoRA adapter while steps run that do not use this index.

        Returns its digest, which is equal on all ranks that have read equal files. Raises AllSparkError if the adapter
        cannot be loaded or does not fit.
        """
        config, model = self.config, self._loaded()
        if not model.targets:
            why = "in a mixed group" if self.role.mixed else "with lora_max_num=0"
            raise not_available(f"load_lora of model {config.model_name!r} {why}")
        began = time.perf_counter()
        adapter = model.open_adapter(directory)
        size = model.adapter_bytes(self._device, adapter)
        with planning():
            available = self._device.available(self.world)
            if size > available:
                raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR,
                                    f"the adapter in {directory} does not fit: rank {self.rank} of {self.world} needs "
                                    f"{mib(size)} for it, {mib(available)} are available")
            reservation = self._device.reserve(f"{config.model_name} adapter {index}", size)
        try:
            with memory_errors(f"loading the adapter in {directory}"):
                filled = self._executor.new_adapter()
                model.fill_adapter(adapter, filled)
                self._executor.set_adapter(index, filled)
        except BaseException:
            if reservation is not None:
                reservation.release()
            raise
        self._adapter_memory[index] = reservation
        logger.info("rank %d of %d loaded %s of the adapter in %s in %.2f s", self.rank, self.world, mib(size),
                    directory, time.perf_counter() - began)
        return adapter.digest

    def unload_adapter(self, index: int) -> None:
        """Frees an adapter between steps. Does nothing if there is none of this index."""
        if index not in self._adapter_memory:
            return
        self._executor.set_adapter(index, None)
        if (reservation := self._adapter_memory.pop(index)) is not None:
            reservation.release()

    def move_memory(self, loaded: bool) -> None:
        """Moves the weights of a model on a GPU between steps.

        loaded=False copies them to host memory and frees the GPU's memory; True loads them again. The cache's content
        is lost. Raises AllSparkError, and changes nothing, if the target has too little memory.
        """
        self._loaded()
        if self.role.experts:   # it has none on a GPU
            return
        began = time.perf_counter()
        name, verb = self.config.model_name, "load" if loaded else "unload"
        size = self._weight_bytes()
        if not loaded and size > (available := memory.available_memory(self.world)):
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR,
                                f"unload_device_mem of model {name!r}: rank {self.rank} of {self.world} needs "
                                f"{mib(size)} of the host's memory for its weights, {mib(available)} are available")
        with memory_errors(f"{verb}_device_mem of model {name!r}"):
            (self._executor.load if loaded else self._executor.unload)()
            if self.tower is not None:
                self.tower.move_memory(loaded)
        logger.info("rank %d of %d %sed the device memory of model %r in %.2f s", self.rank, self.world, verb, name,
                    time.perf_counter() - began)

    def _allocate_host_cache(self, spans: int, hash_of_model: str) -> None:
        """Allocates the host cache in memory or in a file; existing spans of a file are verified."""
        config, model = self.config, self._loaded()
        if not config.host_cache_dir:
            self._executor.allocate_host_cache(spans)
            return
        self._host_file = HostCacheFile(config.host_cache_dir, config.model_name, self.rank, self.world)
        facts = {"results": results_digest(self.gpu), "model": hash_of_model, "draft": self._draft_name,
                 "rank": self.rank, "world": self.world,
                 "weights": [model.weight_dtype, model.weight_group_size, model.quantize_head],
                 "cache": model.cache_dtype, "span": [config.cache_span_size, self._span_bytes], "spans": spans,
                 "windows": self._groups.windows, "state": self._state_spans}
        self._host_file.prepare(facts, self._executor.host_cache_bytes(spans))
        began = time.perf_counter()
        self._executor.allocate_host_cache(spans, self._host_file.fd, HEADER)
        self.held, dropped = self._executor.verify_host_cache()
        if dropped:
            logger.warning("%s: %d damaged spans are dropped", self._host_file.path, dropped)
        logger.info("%s holds %d of %d spans of model %r; they were checked in %.2f s", self._host_file.path,
                    len(self.held), spans, config.model_name, time.perf_counter() - began)

    def step(self, plan: bytes, want_logits: bool = False) -> Any:
        """Runs one step plan (see runtime/plan.py) without the GIL. Returns the native StepResult."""
        switch = self._profiler_switch()
        if switch is not None:
            self._executor.set_profiling(switch)
        return self._executor.step(plan, want_logits)

    @property
    def masks(self) -> Any:
        """Rank 0's native Masks of allowed tokens for sampling: one for each output of all submitted steps."""
        return self._executor.masks

    def submit(self, stepper: Any, plan: bytes, shared_memory: Any, kind: int, prefix: bytes) -> None:
        """Has a native Stepper run a plan, after publishing prefix + plan in `shared_memory` (None: no other ranks)."""
        switch = self._profiler_switch()
        stepper.submit(self._executor, plan, shared_memory, kind, prefix, -1 if switch is None else int(switch))

    def _profiler_switch(self) -> bool | None:
        """Whether the next step switches profiling on or off; None: neither."""
        return self._profiler.before_step() if self._profiler is not None and self._profiler.active else None

    def measure_roofline(self) -> bool:
        """Measures the roofline for a few milliseconds between steps (rank 0 only). Returns whether it is complete."""
        self._loaded()
        assert self._meter is not None
        with memory_errors("measuring the device's roofline"):
            return self._meter.measure()

    def profile(self) -> Profile:
        """The cost of the ops of the profiled steps (rank 0 only). First completes the measurement of the roofline."""
        model = self._loaded()
        assert self._profiler is not None and self._meter is not None
        ops = self._profiler.read(model.graph, model.formats)
        if self.tower is not None:
            ops += self.tower.profile()
        return Profile(summarize(ops), self._meter.finish(), waits=self._expert_waits())

    def _expert_waits(self) -> ExpertWaits | None:
        """Of messages since the last call; None unless a GPU sends messages to ranks of experts."""
        if not self.role.mixed or not self.config.on_gpus:
            return None
        messages, waited, computed = self._executor.expert_times
        now = ExpertWaits(messages, waited, tuple(computed), self._executor.streamed_rows, *self._executor.expert_uses)
        found, self._waits = now.since(self._waits), now
        return found

    def profile_of_experts(self) -> list[OpProfile]:
        """The cost of the ops of the profiled steps on a rank of experts; [] on other ranks."""
        if not self.role.experts or self._profiler is None:
            return []
        model = self._loaded()
        return summarize(self._profiler.read(model.graph, model.formats))

    def close(self) -> None:
        """Frees weights and cache. No other method may be called afterwards."""
        self._device = self._executor = None
        self._model = self._profiler = self._meter = None
        self._drafts, self._draft_executors = [], []
        if self.tower is not None:
            self.tower.close()
        for reservation in filter(None, self._adapter_memory.values()):
            reservation.release()
        if self._host_file is not None:
            self._host_file.close()
        if self._reservation is not None:
            self._reservation.release()

    # -- choices -------------------------------------------------------------------------------------------------------
    def _loaded(self) -> RankModel:
        if self._model is None or self._executor is None:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {self.config.model_name!r} is not loaded")
        return self._model

    @property
    def _shard(self) -> RankModel:
        """The model's shard, once load() has opened it."""
        assert self._model is not None
        return self._model

    @property
    def _groups(self) -> SpanGroups:
        """The cache groups as the scheduler sees them. With windows, they need spans for the rows of two steps."""
        windows = tuple(group.window for group in self._shard.graph.cache_groups)
        return SpanGroups(self.config.cache_span_size, windows, 2 * self._sizes.rows)

    def _pinned(self) -> list[int]:
        return binding.cpus_of_threads(self.cpus, self.config.num_threads or len(self.cpus))

    @property
    def expert_counts(self) -> dict[str, float]:
        """See expert_streams.expert_counts(). Any thread may call it."""
        return expert_streams.expert_counts(self.role, self._exchange, self._executor, self.config.on_gpus)

    def tokens_of(self, spans: int) -> int:
        """The number of tokens that a cache of so many spans holds, after open()."""
        return self._groups.positions(spans)

    @property
    def opened(self) -> tuple[RankModel, Device]:
        """The rank's part of the model, and its device, after open()."""
        return self._shard, self._device

    @property
    def _peers(self) -> Any:
        """The shared memory of the ranks that this one sums and samples with; None if it is alone."""
        if not self.role.mixed or self.shared_memory is None:
            return self.shared_memory
        return None if self.role.experts or self.role.world == 1 else self.shared_memory.first_ranks(self.role.world)

    @property
    def sharers(self) -> int:
        """The number of ranks that share the host's memory with this one, itself included."""
        # Ranks of experts take no more than they need: they share it among themselves.
        return self.role.world if self.role.experts else self.world

    @property
    def gpu(self) -> int | None:
        """The index of the GPU that computes; None if CPUs compute."""
        return gpu_of(self.config, self.role.rank, self.role.world) if self.config.on_gpus else None

    @property
    def threads(self) -> int:
        """The number of compute threads; 1 if a GPU computes: the thread that waits for it."""
        return 1 if self.config.on_gpus else self._host_threads

    @functools.cached_property      # it reads /sys
    def _host_threads(self) -> int:
        return self.config.num_threads or physical_cores(self.cpus)

    def _count_host_spans(self) -> int:
        """The number of spans that fit into the host cache, whose file and spans have headers."""
        size = self.config.host_cache_memory
        if size and self.role.experts:
            return _ANY_NUMBER
        spans = (size - HEADER - _PAGE) // (-(-self._span_bytes // 64) * 64 + 32)
        if size and spans < 1:
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR,
                                f"host_cache_memory={size} holds no span of {self.config.cache_span_size} tokens: one "
                                f"takes {self._span_bytes} bytes on rank {self.rank}")
        return min(spans, _ANY_NUMBER) if size else 0

    def spans(self, available: int, announced: Announced) -> int:
        """The number of cache spans that this rank takes of the `available` bytes of its memory, after open(), which
        has returned `announced`. Raises AllSparkError if the model does not fit.
        """
        config, fixed, span_bytes = self.config, announced.fixed, announced.span_bytes
        groups = self._groups
        one_request = groups.needed(config.engine_max_length)

        def refuse(cache_bytes: int, purpose: str) -> AllSparkError:
            return AllSparkError(
                AsStatus.ALLSPARK_MEMORY_ERROR,
                f"model {config.model_name!r} does not fit: rank {self.rank} of {self.world} needs {mib(fixed)} for "
                f"weights ({self._shard.weight_dtype}) and activations and {mib(cache_bytes)} for {purpose}, "
                f"{mib(available)} are available")

        if self.role.experts:
            if fixed > available:
                raise refuse(0, "no cache")
            return _ANY_NUMBER
        if config.cache_memory:
            spans = config.cache_memory // span_bytes
            if spans < 1:
                raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR,
                                    f"cache_memory={config.cache_memory} holds no span of {config.cache_span_size} "
                                    f"tokens: one takes {span_bytes} bytes on rank {self.rank}")
            if fixed + config.cache_memory > available:
                raise refuse(config.cache_memory, f"a cache of cache_memory={config.cache_memory} bytes")
            if spans < one_request:
                logger.warning("cache_memory=%d holds %d tokens, fewer than engine_max_length=%d", config.cache_memory,
                               groups.positions(spans), config.engine_max_length)
            return spans
        left = max(0, available - fixed)
        # A request's prompt and end leave a checkpoint each of its recurrent state.
        checkpoints = 2 * self._state_spans if config.enable_prefix_cache else 0
        wanted = (one_request + checkpoints) * config.engine_max_batch
        if self._shard.graph.whole_texts:  # spans are free again after a step
            in_steps = (DEPTH + 1) * groups.needed(self._sizes.rows) + config.engine_max_batch
            wanted = min(wanted, max(in_steps, one_request))
        spans = min(wanted, int(left * self._device.cache_share) // span_bytes)
        if spans < one_request:
            spans = min(one_request, int(left * self._device.largest_cache_share) // span_bytes)
        if spans < one_request:
            raise refuse(one_request * span_bytes,
                         f"the cache of one request of engine_max_length={config.engine_max_length} tokens")
        if spans < wanted:
            logger.warning("the cache of model %r holds %d tokens on rank %d: not every one of engine_max_batch=%d "
                           "requests can have engine_max_length=%d", config.model_name, groups.positions(spans),
                           self.rank, config.engine_max_batch, config.engine_max_length)
        return spans

    # -- warnings ------------------------------------------------------------------------------------------------------
    def _report(self) -> Progress:
        """A function that reports loading to `progress`, and every few seconds to the log."""
        last = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if self.progress is not None:
                self.progress(done, total)
            if time.monotonic() - last > PROGRESS_SECONDS:
                last = time.monotonic()
                logger.info("rank %d has loaded %d %% of model %r", self.rank, 100 * done // total,
                            self.config.model_name)

        return report
