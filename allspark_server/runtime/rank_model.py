"""One rank's part of a checkpoint: its types and sizes, and how it is loaded into an executor."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np

from allspark_client.config import UNQUANTIZED, AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import AsCacheMode
from allspark_server.models.adapters import Target, with_adapters
from allspark_server.models.eagle import with_joined_layers
from allspark_server.models.graph_elements import Weight
from allspark_server.models.output_rows import with_early_selection
from allspark_server.models.registry import ARCHITECTURES
from allspark_server.runtime.device import Device
from allspark_server.runtime.lowering import add_ops, check_ranks
from allspark_server.runtime.native import native_library
from allspark_server.runtime.roles import Role
from allspark_server.weights.checkpoint import OpenedModel, open_model
from allspark_server.weights.draft_head import find_layers, is_of_head, open_layer
from allspark_server.weights.eagle import open_eagle
from allspark_server.weights.formats import UNQUANTIZED_DTYPES, WeightFormat, exact, not_numbers, wanted_formats
from allspark_server.weights.loader import Loader, Progress, column_slice, unquantized_type
from allspark_server.weights.lora import LoraAdapter, open_adapter
from allspark_server.weights.quantized import ColumnSlice
from allspark_server.weights.safetensors import aligned

logger = logging.getLogger(__name__)

QUANTIZED_CACHES = {AsCacheMode.AsCacheQuantI8: "int8", AsCacheMode.AsCacheQuantU4: "uint4"}


class RankModel:
    """A rank's part of a checkpoint, with the types chosen.

    cache_dtype "auto" means the weights' type, or the type of weight_dtype "auto" if the weights are quantized. A
    quantized cache_mode overrides it.
    """

    def __init__(self, config: AsModelConfig, path: str, weights_path: str, rank: int, world: int, device: Device,
                 whole_histories: bool = False, adapters: bool = False, of: RankModel | None = None, layer: int = 0,
                 opened: OpenedModel | None = None, role: Role | None = None):
        """Opens the model.

        path: of a checkpoint, or of an .asgraph file, whose weights are in weights_path. whole_histories: the cache
        keeps spans that are before attention windows. adapters: rows may have LoRA adapters. of: the model of whose
        draft head to open layer `layer`; path is not used then. opened: a vision tower, in place of a path. role: the
        rank's in a mixed group. Raises AllSparkError if the model cannot be opened or cannot be divided among `world`
        ranks.
        """
        self.config, self.rank, self.world = config, rank, world
        self._of = of
        if opened is None:
            opened = open_model(path, weights_path) if of is None else of.open_head(layer)
        self.opened: OpenedModel = opened
        self.graph, self.source = self.opened.graph, self.opened.source
        has_eagle = of is None and config.speculation == "eagle"
        self.eagle = open_eagle(config.draft_model, self.opened) if has_eagle else None
        has_mtp = of is None and config.speculation == "mtp"
        #: the layers of the model's draft head that make drafts
        self.draft_layers = int(has_eagle)
        if has_mtp:  # without a head, opening its first layer says so
            self.draft_layers = max(1, min(len(find_layers(self.opened)), native_library().MOST_DRAFT_LAYERS))
        if whole_histories:
            self.graph = self.graph.with_whole_histories()
        #: the layers that adapters may change, by their numbers in the graph's ops
        self.targets: list[Target] = []
        if adapters and not self.graph.whole_texts:
            self.graph, self.targets = with_adapters(self.graph)
        if has_mtp:
            self.graph = self.graph.with_kept_hidden()
        elif of is None and not has_eagle:
            self.graph = with_early_selection(self.graph)
        self._slices: dict[str, ColumnSlice] = {}
        #: the graph of all ranks' parts
        self.whole = self.graph
        self._mixed = role is not None and role.mixed
        #: the type of matrices that are not quantized
        self.unquantized = unquantized_type(self.whole, self.source, device.half)
        if role is not None:
            self.graph = role.part_of(self.whole)
        check_ranks(self.graph, world, experts=role is not None and role.experts)
        self._plain = self.graph  # without what a head from elsewhere adds
        if self.eagle:
            self.source = self.eagle.source
            self.graph = with_joined_layers(self.graph, self.eagle.head.layers)
        elif of is not None and of.eagle:
            self.unquantized = of.unquantized  # they share matrices
        self._choose_types(self.unquantized, device)
        if of is None and self.graph.config.vision is None and not (role is not None and role.experts):
            self._warn_about_length()
            self._warn_about_unused()
        #: digest of the bytes that load() has read
        self.digest = ""
        #: ids of the loaded weights, by name
        self._ids: dict[str, int] = {}

    @property
    def opened_formats(self) -> dict[str, WeightFormat]:
        """The format of each matrix of the model itself."""
        return {name: form for name, form in (self._elsewhere | self.formats).items()
                if name in self.opened.graph.weights}

    @property
    def expert_formats(self) -> dict[str, WeightFormat]:
        """The format of each matrix of routed experts, of all ranks of a mixed group."""
        return {name: form for name, form in (self._elsewhere | self.formats).items()
                if name in self.whole.weights and self.whole.weights[name].experts}

    def open_head(self, layer: int) -> OpenedModel:
        """A layer of the draft head of this model, as a model of its own."""
        if self.eagle:
            return OpenedModel(self.eagle.graph, self.eagle.source, None)
        return open_layer(self.opened, self.config.model_name, layer)

    def _choose_types(self, unquantized: str, device: Device) -> None:
        graph, config, stored = self.graph, self.config, self.graph.quantization
        dtype = unquantized if config.weight_dtype == "auto" else config.weight_dtype
        form = stored.format if stored else WeightFormat(dtype, config.weight_group_size)
        if (stored is not None and stored.is_foreign) or (form.quantized and unquantized not in UNQUANTIZED_DTYPES):
            unquantized = device.unquantized_dtype(unquantized)

        head_matrices = self._head_matrices

        def form_of(weight: Weight, form: WeightFormat) -> WeightFormat:
            if weight.name in head_matrices:
                return device.head_form(form)
            if self._mixed and weight.experts:
                return exact(form)
            firsts = [weight.column_range_of(rank, self.world)[0] for rank in range(self.world)]
            return device.form_of(form, bool(weight.experts), firsts)

        #: the format of each matrix, by the weight's name
        self.formats = {name: form_of(graph.weights[name], form)
                        for name, form in wanted_formats(graph, config, unquantized).items()}
        #: the same of matrices that only ranks with another role have, which compute on CPUs
        self._elsewhere = {} if not self._mixed else {
            name: exact(form) if self.whole.weights[name].experts else form
            for name, form in wanted_formats(self.whole, config, unquantized).items() if name not in graph.weights}
        self._tell_of_cut_blocks(device)
        self.weight_dtype, self.weight_group_size = form.dtype, form.group_size
        if form.dtype == "e4m3" and config.weight_dtype == "bfloat16":  # other bits than as it is stored
            self.weight_dtype, self.weight_group_size = config.weight_dtype, 0
        self.quantize_head = stored.quantize_head if stored else config.quantize_head
        computed = unquantized if form.quantized else self.weight_dtype
        plain = computed if config.cache_dtype == "auto" else config.cache_dtype
        self.cache_dtype = QUANTIZED_CACHES.get(config.cache_mode, plain)
        if self.cache_dtype not in device.latent_caches and any(
                group.kind == "latent" for group in self.graph.cache_groups):
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"a cache of type {self.cache_dtype!r} is not available for latent attention: expected "
                                f"{' or '.join(device.latent_caches)}")
        if self.cache_dtype not in device.row_caches and any(
                op.type == "compressed_attention" for op in self.graph.ops):
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"a cache of type {self.cache_dtype!r} is not available for attention over compressed "
                                f"positions: expected {' or '.join(device.row_caches)}")
        if missing := device.missing(self.graph):
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"{self.graph.config.architecture} is not available on GPUs: its layers have "
                                f"{missing}, which only CPUs compute")
        if not (self.graph.generates or device.classifies or self.graph.config.vision):
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"{self.graph.config.architecture} as a classifier or reranker is not available on "
                                "GPUs: only CPUs compute models that generate no tokens")

    @property
    def _head_matrices(self) -> set[str]:
        """The names of stacks with a matrix for each head."""
        return {name for op in self.graph.ops if op.type == "head_linear" for name in op.weights}

    def _tell_of_cut_blocks(self, device: Device) -> None:
        """Logs which matrices of a quantized checkpoint would stay quantized if ranks' slices began elsewhere."""
        if self.rank:
            return
        for name, form in self.formats.items():
            weight = self.graph.weights[name]
            if weight.stored is None or form.quantized or self.config.weight_dtype != "auto" \
                    or name in self._head_matrices:
                continue
            whole = device.form_of(weight.stored, bool(weight.experts), [0])
            if whole.quantized:
                logger.warning("matrix %r is computed in %s, not in %s: with %d ranks, slices begin inside groups of "
                               "%d columns", name, form, whole, self.world, weight.stored.group_size)

    # -- sizes -----------------------------------------------------------------------------------------------------
    def bytes_of(self, weight: Weight, device: Device) -> int:
        """Bytes of the rank's part of a weight on the device; 0 of one that a draft head shares with its model."""
        if self._shares(weight):
            return 0
        if not weight.is_matrix:
            return 4 * weight.elements_of(self.rank, self.world)
        begin, end = weight.experts_of(self.rank, self.world) if weight.experts else (0, 1)
        return device.matrix_bytes(weight.rows_of(self.rank, self.world), self.slice_of(weight), end - begin)

    def weight_bytes(self, device: Device, experts: bool | None = None) -> int:
        """Bytes of the rank's weights on the device. experts: only of its routed experts, or only of all others."""
        routed = self.expert_weights
        return sum(self.bytes_of(weight, device) for name, weight in self.graph.weights.items()
                   if experts is None or (name in routed) == experts)

    @property
    def expert_weights(self) -> set[str]:
        """The names of the routed experts' matrices and biases."""
        return {name for op in self.graph.ops if op.type == "expert_linear" for name in op.weights}

    def span_bytes(self, device: Device, rank: int | None = None) -> int:
        """Bytes of one span: keys and values of all layers of the largest cache group, for the heads of this rank, or
        of another one.
        """
        rank, layers = self.rank if rank is None else rank, dict[tuple[int, int], int]()  # by cache group and number
        size = self.config.cache_span_size
        for op in self.graph.ops:
            place = int(op.attrs.get("cache_group", 0)), int(op.attrs.get("layer", 0))
            if op.type == "latent_attention":  # one row a token, the same on every rank
                layers[place] = device.latent_span_bytes(size, op, self.cache_dtype)
            elif op.type == "indexer" and not op.attrs.get("rate"):
                key = self.graph.tensors[op.inputs[2]].width_of(rank, self.world)
                layers[place] = device.index_span_bytes(size, key, self.cache_dtype)
            elif op.type == "compressed_attention":  # rows are the same on every rank
                kept = self.graph.tensors[op.inputs[1]].width_of(rank, self.world)
                layers[place] = device.row_span_bytes(size, kept, self.cache_dtype)
            elif op.type == "compress":
                rows, rate = self.graph.tensors[op.inputs[0]].width_of(rank, self.world), int(op.attrs["rate"])
                own = int(op.attrs["rows_group"]), int(op.attrs["rows_layer"])
                layers[own] = device.row_span_bytes(size, rows, "float32")
                entry = rows // (4 if op.attrs.get("overlapping") else 2)
                kept_as = self.cache_dtype if self.cache_dtype in UNQUANTIZED_DTYPES else "bfloat16"
                layers[place] = device.row_span_bytes(-(-size // rate), entry, kept_as)
            blocks = self.graph.tensors[op.inputs[0]].blocks if op.type == "span_attention" else ()
            if len(blocks) > 1:  # not queries that read another layer's keys
                dim, width = int(op.attrs["head_dim"]), blocks[1].width_of(rank, self.world)
                layers[place] = width // dim * device.span_bytes(size, dim, self.cache_dtype, self.graph.whole_texts)
        groups = Counter[int]()
        for (group, _), of_layer in layers.items():
            groups[group] += of_layer
        return max(groups.values(), default=0)

    def state_bytes(self, device: Device, rank: int | None = None) -> tuple[int, int]:
        """Bytes of a sequence's recurrent state, and of its recent rows, on this rank or another one: see
        docs/decisions/recurrent.md. Zeros if no layer has a state.
        """
        sizes = [device.state_bytes(self.graph, op, self.rank if rank is None else rank, self.world)
                 for op in self.graph.ops if op.type in ("causal_conv", "gated_delta", "ssd")]
        return sum(state for state, _ in sizes), sum(recent for _, recent in sizes)

    def state_spans(self, device: Device) -> int:
        """The number of spans that hold a sequence's recurrent state on every rank; 0 if no layer has one."""
        states = [(self.state_bytes(device, rank)[0], self.span_bytes(device, rank)) for rank in range(self.world)]
        return max(-(-state // span) if state else 0 for state, span in states)

    @property
    def adapter_dtype(self) -> str:
        """The type of adapters: the weights' type, or float32 if that is quantized."""
        return self.weight_dtype if self.weight_dtype in UNQUANTIZED else "float32"

    def slice_of(self, weight: Weight) -> ColumnSlice:
        """The description of this rank's columns of a matrix."""
        found = self._slices.get(weight.name)
        if found is None:
            form = self.formats[weight.name]
            found = self._slices[weight.name] = column_slice(self.source, weight, form, self.rank, self.world)
        return found

    # -- loading ---------------------------------------------------------------------------------------------------
    def load(self, executor: Any, progress: Progress | None, model: Any = None) -> None:
        """Loads weights and ops into an executor. progress: called with (elements loaded, elements in all). model: the
        executor of a draft head's model, which has loaded its weights.
        """
        shared: dict[str, int] = {}
        if self._of is None:
            self.source.verify(self.rank, self.world)
        else:
            shared = {name: executor.share_matrix(model, self._of._ids[name])
                      for name, weight in self.graph.weights.items() if self._shares(weight)}
        loader = Loader(self._plain, self.source, executor, self.rank, self.world, self.formats, progress, shared)
        self._ids = loader.load()
        self.digest = loader.digest()
        if self.graph is not self._plain:
            self._ids = Loader(self.graph, self.source, executor, self.rank, self.world, self.formats,
                               loaded=self._ids).load()
        add_ops(self.graph, executor, self._ids, self.rank, self.world)

    def _shares(self, weight: Weight) -> bool:
        """Whether a matrix of a draft head is its model's: the embedding, and the output matrix if it is no other."""
        of, name = self._of, weight.name
        return (of is not None and weight.is_matrix and of.graph.weights.get(name) == weight
                and of.formats[name] == self.formats[name])

    def open_adapter(self, directory: str) -> LoraAdapter:
        """Opens an adapter. Raises AllSparkError if it is not one for this model."""
        return open_adapter(directory, self.graph, self.targets, self.config.lora_max_rank)

    def adapter_bytes(self, device: Device, adapter: LoraAdapter) -> int:
        """Bytes of this rank's part of an adapter on the device."""
        total = 0
        for number, pair in adapter.pairs.items():
            target = self.targets[number]
            begin, end = target.weight.column_range_of(self.rank, self.world)
            rows = sum(last - first for first, last in (p.range_of(self.rank, self.world) for p in target.parts))
            total += device.adapter_bytes(pair.rank, end - begin, rows, self.adapter_dtype) if rows else 0
        return total

    def fill_adapter(self, adapter: LoraAdapter, native: Any) -> None:
        """Fills a native Adapter with this rank's part.

        If a layer's rows are divided, its rank needs all of A and its own rows of B. If its columns are divided, the
        rank needs its own columns of A and all of B; the sum over ranks then includes B A x.
        """
        for number, pair in adapter.pairs.items():
            target = self.targets[number]
            begin, end = target.weight.column_range_of(self.rank, self.world)
            ranges = [part.range_of(self.rank, self.world) for part in target.parts]
            rows = [pair.b_rows(target.row_of(part) + first, target.row_of(part) + last)
                    for part, (first, last) in zip(target.parts, ranges) if first < last]
            if not rows:
                continue
            bad = native.set(number, aligned(pair.a_columns(begin, end)), pair.a.dtype,
                             aligned(rows[0]) if len(rows) == 1 else np.concatenate(rows), pair.b.dtype, pair.scale)
            if bad:
                logger.warning("the adapter in %s holds %d values that are %s for %s; outputs with it will be wrong",
                               adapter.directory, bad, not_numbers(self.adapter_dtype), target.module)

    # -- warnings --------------------------------------------------------------------------------------------------
    def _warn_about_length(self) -> None:
        net, length = self.graph.config, self.config.engine_max_length
        limited = net.rope.type == "dynamic" or self.graph.whole_texts
        if self.rank == 0 and not limited and length > net.max_position_embeddings:
            logger.warning("engine_max_length=%d exceeds the %d positions for which model %r was made", length,
                           net.max_position_embeddings, self.config.model_name)

    def _warn_about_unused(self) -> None:
        """Warns of tensors that the model does not use, such as biases: the config may be another checkpoint's."""
        used = {part.tensor for weight in self.whole.weights.values() for part in weight.parts} | {"lm_head.weight"}
        net = self.graph.config
        known = (*ARCHITECTURES[net.architecture].unused,
                 *(f"model.layers.{layer}.self_attn.{name}_" for layer in net.reading_layers for name in "kv"))
        unused = sorted(n for n in self.opened.source.names()
                        if n not in used and not n.endswith("rotary_emb.inv_freq") and not n.startswith(known))
        if layers := find_layers(self.opened):
            unused = [name for name in unused if not is_of_head(self.opened, layers, name)]
            if self.rank == 0 and len(layers) > self.draft_layers > 0:
                logger.warning("%s holds a draft head of %d layers, of which the first %d make drafts",
                               self.source.where(), len(layers), self.draft_layers)
            if self.rank == 0 and self.config.speculation == "off":
                logger.info("%s holds a draft head, which speculation='mtp' uses", self.source.where())
        if unused and self.rank == 0:
            logger.warning("%s holds %d tensors that %s does not use: %s", self.source.where(), len(unused),
                           net.architecture, ", ".join(unused[:3]) + (", …" if len(unused) > 3 else ""))


def check_draft(draft: RankModel, model: RankModel) -> None:
    """Raises AllSparkError if `draft` cannot make drafts for `model`."""
    wanted, found = model.graph.config, draft.graph.config
    for shard in (draft, model):
        if any(op.type == "compressed_attention" for op in shard.graph.ops):  # its window is one of the cache
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"speculation='draft' is not available with {shard.graph.config.architecture}, whose "
                                "attention is over compressed positions; use speculation='prompt_lookup'")
    if found.state_layers:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"draft_model={model.config.draft_model!r} is a {found.architecture}, whose layers with a "
                            "state cannot follow drafts that are rejected; use a model with attention in all layers")
    if found.vocab_size != wanted.vocab_size:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"draft_model={model.config.draft_model!r} has a vocabulary of {found.vocab_size} tokens, "
                            f"model {model.config.model_name!r} one of {wanted.vocab_size}: they must be equal")
