"""Finds and opens the files of a model: a Hugging Face directory (safetensors or torch .bin), .asgraph + .asparam, or
GGUF.

Every format is presented as a `Source` of named, whole tensors. The loader decides which part of each a rank keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models import Graph, ModelConfig, build_graph, read_config
from allspark_server.models.registry import ARCHITECTURES
from allspark_server.models.vision import build_tower
from allspark_server.runtime.native import native_library
from allspark_server.tokenizer.vocabularies import vocabulary_file
from allspark_server.weights.asgraph import PARAM_FORMAT, STORED_TYPES, TOWER, from_float32, read_graphs, to_float32
from allspark_server.weights.common_form import common_form
from allspark_server.weights.files import MAX_INDEX_BYTES, read_json
from allspark_server.weights.formats import (
    OFFSET,
    ORDER,
    SCALE,
    SUPER_OFFSET,
    SUPER_SCALE,
    StoredQuantization,
    WeightFormat,
)
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor
from allspark_server.weights.safetensors import SafetensorsFile, StoredTensor

logger = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
GGUF_IMAGES = ("it was loaded from a GGUF file, which holds no vision tower, and mmproj files are not read; load its "
               "Hugging Face directory, or what `allspark convert` made of that")


class Source:
    """Named tensors of a model. The defaults are those of files without quantized matrices and checksums."""

    location: Path

    def names(self) -> Iterable[str]:
        """The names of all tensors, quantized matrices counted once."""
        raise NotImplementedError

    def get(self, name: str) -> StoredTensor:
        """The tensor as a view. KeyError if there is none."""
        raise NotImplementedError

    def form(self, name: str) -> WeightFormat | None:
        """The format of a quantized tensor that is an ordinary tensor in the graph; None if the tensor is not
        quantized.
        """
        return None

    def quantized(self, name: str, form: WeightFormat, shape: tuple[int, int],
                  expert: int | None = None) -> QuantizedTensor:
        """A quantized matrix of `shape` in this format. With `expert`, that expert's matrix in a tensor of several.

        KeyError if there is none, AllSparkError if it has another shape or format.
        """
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{self.where()} is not an .asparam file, but the graph's weights are quantized")

    def verify(self, rank: int, world: int) -> None:
        """Compares checksums if the format has any. The ranks of a group share the work. Of other formats, lengths were
        compared when the files were opened.
        """

    def where(self) -> str:
        """The name of the source in messages."""
        return str(self.location)

    def checksum(self) -> str:
        """A digest of the checksums that verify() compares, and so of all tensors; "" if the format has none."""
        return ""


class SafetensorsSource(Source):
    """One or several safetensors files of a directory."""

    def __init__(self, location: Path, files: Mapping[str, SafetensorsFile]):
        """files: the file of each tensor, by the tensor's name."""
        self.location, self.files = location, files

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        return self.files.keys()

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        return self.files[name].get(name)


class ParamSource(SafetensorsSource):
    """The tensors of a model, or of its vision tower, in an .asparam file: safetensors with a crc32 of every tensor in
    its metadata. A quantized matrix consists of several tensors; see quantized().
    """

    def __init__(self, path: Path, prefix: str = ""):
        """prefix: TOWER for the tower's tensors, whose names then lack it."""
        self.file, self.prefix = SafetensorsFile(path), prefix
        if self.file.metadata.get("format") != PARAM_FORMAT:
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                f"{path} is not an .asparam file: its metadata has format "
                                f"{self.file.metadata.get('format')!r}, expected {PARAM_FORMAT!r}")
        own = [name[len(prefix):] for name in self.file.names() if name.startswith(TOWER) == bool(prefix)]
        super().__init__(path, dict.fromkeys(own, self.file))

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        return self.file.get(self.prefix + name)

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        quantized = [name for name in self.files if f"format:{self.prefix}{name}" in self.file.metadata]
        suffixes = SCALE, OFFSET, SUPER_SCALE, SUPER_OFFSET, ORDER
        return self.files.keys() - {name + suffix for name in quantized for suffix in suffixes}

    def quantized(self, name: str, form: WeightFormat, shape: tuple[int, int],
                  expert: int | None = None) -> QuantizedTensor:
        """See `Source.quantized`."""
        q, found = self.get(name), self.file.metadata.get(f"format:{self.prefix}{name}")
        if found != str(form):
            raise AllSparkError(
                AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {name!r} in {q.file} has the format {found}: expected {form}"
            )
        rows = (shape[0],) if expert is None else (max(q.shape[:1] + (expert + 1,)), shape[0])
        one, arrays = slice(None) if expert is None else expert, dict[str, np.ndarray]()
        for suffix, (kind, width) in {"": ("U8", form.row_bytes(shape[1])), **form.scale_tensors(shape[1])}.items():
            arrays[suffix] = self._checked(name + suffix, kind, (*rows, width), f"{form} of {list(shape)}").values[one]
        order = None
        if form.layout.permuted:
            order = self._checked(name + ORDER, "I32", shape[1:], f"{form} of {list(shape)}").values
            if not np.array_equal(np.sort(order), np.arange(shape[1])):
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                    f"tensor {name + ORDER!r} in {q.file} is not a permutation of {shape[1]} columns")

        def some(begin: int, end: int) -> QuantizedRows:
            found = {suffix: array[begin:end] for suffix, array in arrays.items()}
            return QuantizedRows(found[""], found.get(SCALE), found.get(OFFSET), found.get(SUPER_SCALE),
                                 found.get(SUPER_OFFSET))

        return QuantizedTensor(name, q.file, some, order, mapped=True)

    def _checked(self, name: str, kind: str, shape: tuple[int, ...], what: str) -> StoredTensor:
        tensor = self.get(name)
        if (tensor.dtype, tensor.shape) != (kind, shape):
            raise AllSparkError(
                AsStatus.ALLSPARK_PARAM_ERROR,
                f"tensor {tensor.name!r} in {tensor.file} has type {tensor.dtype} and shape {list(tensor.shape)}: "
                f"expected {kind} and {list(shape)}, for {what}",
            )
        return tensor

    def verify(self, rank: int, world: int) -> None:
        """See `Source.verify`."""
        names = [self.prefix + name for name in sorted(self.files)[rank::world]]
        crc32 = native_library().crc32
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # crc32 runs without the GIL
            for name, found in zip(names, pool.map(lambda n: crc32(self.file.raw(n)), names)):
                expected = self.file.metadata.get(f"crc32:{name}")
                if expected != f"{found:08x}":
                    raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                        f"tensor {name!r} of {self.file.path} is damaged: its crc32 is {found:08x}, "
                                        f"expected {expected}")

    def checksum(self) -> str:
        """See `Source.checksum`."""
        facts = [(name, self.get(name).dtype, self.file.metadata.get(f"crc32:{self.prefix}{name}"))
                 for name in sorted(self.files)]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class _UnitRows:
    """A stored matrix whose rows are scaled to length 1 when they are read, in the stored type."""

    def __init__(self, data: np.ndarray, dtype: str):
        self.data, self.dtype = data, dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        values = to_float32(self.data[rows], self.dtype)
        lengths = np.sqrt(np.square(values, dtype=np.float64).sum(1, keepdims=True))
        return from_float32((values / np.maximum(lengths, 1e-12)).astype(np.float32), self.dtype)

    def reshape(self, *shape: int) -> np.ndarray:
        return self[:].reshape(*shape)


class Changed(Source):
    """A view of another source: the base class of views that change one thing."""

    def __init__(self, source: Source):
        self.source = source

    def stored_name(self, name: str) -> str:
        """The tensor's name in the source. KeyError if there is none."""
        return name

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        return self.source.names()

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        return self.source.get(self.stored_name(name))

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        return self.source.form(self.stored_name(name))

    def quantized(self, name: str, form: WeightFormat, shape: tuple[int, int],
                  expert: int | None = None) -> QuantizedTensor:
        """See `Source.quantized`."""
        return self.source.quantized(self.stored_name(name), form, shape, expert)

    def verify(self, rank: int, world: int) -> None:
        """See `Source.verify`."""
        self.source.verify(rank, world)

    def where(self) -> str:
        """See `Source.where`."""
        return self.source.where()

    def checksum(self) -> str:
        """See `Source.checksum`."""
        return self.source.checksum()


class UnitHead(Changed):
    """A view whose head has rows of length 1 (Baichuan 2's NormHead)."""

    HEAD = "lm_head.weight"

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        tensor = self.source.get(name)
        if name != self.HEAD or tensor.dtype not in STORED_TYPES.values() or len(tensor.shape) != 2:
            return tensor
        rows: Any = _UnitRows(tensor.values, tensor.dtype)  # stands for an array
        return dataclasses.replace(tensor, data=rows)

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        form = self.source.form(name)
        if form is not None and name == self.HEAD:
            raise ValueError(f"{name} is quantized ({form}), but its rows must be scaled to length 1: only an "
                             "unquantized head is served for this architecture")
        return form


class Renamed(Changed):
    """A view with other names for some tensors. renamed: the name in the source, for each name."""

    def __init__(self, source: Source, renamed: Mapping[str, str]):
        super().__init__(source)
        self.inner = renamed

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        return self.inner.keys()

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the inner source."""
        return self.inner[name]

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        return self.source.form(self.inner[name]) if name in self.inner else None


class TextPart(Renamed):
    """The text part of a multimodal checkpoint, with the names of a text-only checkpoint."""

    PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."),  # transformers 4, and 5
                ("language_model.lm_head.", "lm_head."), ("lm_head.", "lm_head."), ("mtp.", "mtp."),
                *((name, name) for name in ("model.layers.", "model.embed_tokens.", "model.norm.")))  # Qwen2-VL

    def __init__(self, source: Source):
        super().__init__(source, {own + name[len(prefix):]: name for prefix, own in self.PREFIXES
                                  for name in source.names() if name.startswith(prefix)})


class TextPartWithExperts(TextPart):
    """The text part of Qwen3-VL with experts. Published checkpoints have each expert's matrices transposed:
    gate_up_proj [experts, inputs, 2 features] and down_proj [experts, features, outputs].
    """

    STACKS = (".experts.gate_up_proj", ".experts.down_proj")

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        tensor = super().get(name)
        if not name.endswith(self.STACKS) or len(tensor.shape) != 3 or not self._transposed(name):
            return tensor
        count, inputs, outputs = tensor.shape
        return dataclasses.replace(tensor, shape=(count, outputs, inputs), data=None if tensor.data is None else
                                   tensor.data.transpose(0, 2, 1))

    def _transposed(self, name: str) -> bool:
        layer = name[:name.rindex(".")]
        gate_up, down = (super(TextPartWithExperts, self).get(f"{layer}.{stack.rsplit('.', 1)[1]}").shape
                         for stack in self.STACKS)
        return (gate_up[1], gate_up[2]) == (down[2], 2 * down[1]) and gate_up[1] != 2 * down[2]


class VisionPart(Renamed):
    """The vision tower of a multimodal checkpoint, as the graph's matrices and vectors: the convolution that embeds
    patches is a matrix, Gemma 3's projection [inputs, outputs] is transposed, and a single value is a vector.
    """

    ROW_END = "image_newline"
    PREFIXES = (("visual.", ""), ("vision_tower.", ""), ("multi_modal_projector.", "projector."),
                ("embed_vision.", "embed_vision."), ("image_newline", ROW_END))
    CONVOLUTIONS = ("patch_embed.proj.weight", "patch_conv.weight", "embeddings.patch_embedding.weight")
    TRANSPOSED = ("projector.mm_input_projection_weight",)
    FIRST = "embeddings.class_embedding"    # a second row follows it, of zeros

    def __init__(self, source: Source):
        # transformers 5 has the first prefix, and no longer the second.
        names = {name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower."): name
                 for name in source.names()}
        super().__init__(source, {own + name[len(prefix):]: stored for prefix, own in self.PREFIXES
                                  for name, stored in names.items() if name.startswith(prefix)})

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        tensor = super().get(name)
        if name in self.TRANSPOSED:
            return dataclasses.replace(tensor, shape=tensor.shape[::-1], data=None if tensor.data is None else
                                       np.ascontiguousarray(tensor.data.T))
        if not tensor.shape:
            return dataclasses.replace(tensor, shape=(1,), data=None if tensor.data is None else
                                       tensor.data.reshape(1))
        if name == self.FIRST:
            return dataclasses.replace(tensor, shape=(2, *tensor.shape), data=None if tensor.data is None else
                                       np.stack([tensor.data, np.zeros_like(tensor.data)]))
        if name not in self.CONVOLUTIONS or len(tensor.shape) < 3:
            return tensor
        shape = tensor.shape[0], math.prod(tensor.shape[1:])
        return dataclasses.replace(tensor, shape=shape, data=tensor.data if tensor.data is None else
                                   tensor.data.reshape(shape))


class BareEncoder(Renamed):
    """An encoder's checkpoint without the name of the base model before its tensors, which checkpoints with a head
    have; norms of checkpoints that came from TensorFlow have `gamma` and `beta`.
    """

    PREFIXES = ("bert.", "roberta.", "model.", "new.", "gte.", "nomic_bert.")
    ENDS = ((".gamma", ".weight"), (".beta", ".bias"))

    def __init__(self, source: Source):
        found = {}
        for stored in source.names():
            name = next((stored[len(prefix):] for prefix in self.PREFIXES if stored.startswith(prefix)), stored)
            for old, new in self.ENDS:
                name = name.removesuffix(old) + new if name.endswith(old) else name
            found[name] = stored
        super().__init__(source, found)


class PrefixedModel(Renamed):
    """A checkpoint of a base model, whose names lack the `model.` that those of its model with a head have."""

    def __init__(self, source: Source):
        super().__init__(source, {name if name.startswith("model.") else f"model.{name}": name
                                  for name in source.names()})


class DenseModules(Renamed):
    """A checkpoint with the tensors of the dense layers that sentence-transformers keeps in folders of their own."""

    def __init__(self, source: Source, directory: Path, folders: Iterable[str]):
        self.folders = {folder: open_weights(directory / folder) for folder in folders}
        super().__init__(source, {name: name for name in source.names()} | {
            f"{folder}.{name}": f"{folder}.{name}" for folder, own in self.folders.items() for name in own.names()})

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        for folder, own in self.folders.items():
            if name.startswith(f"{folder}."):
                return own.get(name[len(folder) + 1:])
        return self.source.get(name)

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        dense = any(name.startswith(f"{folder}.") for folder in self.folders)
        return None if dense else self.source.form(name)


class InterleavedExperts(Changed):
    """A view of gpt-oss's experts with one tensor for each expert.

    `experts.gate_up_proj` [experts, inputs, 2 outputs], whose even columns are gate's, becomes
    `experts.E.gate_proj.weight` and `experts.E.up_proj.weight` [outputs, inputs]. `experts.down_proj` and the `_bias`
    tensors are treated likewise.
    """

    KINDS = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}
    EXPERT = re.compile(r"(.*\.experts)\.([0-9]{1,9})\.(gate_proj|up_proj|down_proj)\.(weight|bias)")

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        names = set(self.source.names())
        found = set(names)
        for kind, (stored, *_) in self.KINDS.items():
            for suffix, value in (("", "weight"), ("_bias", "bias")):
                for name in [name for name in names if name.endswith(f".experts.{stored}{suffix}")]:
                    found.discard(name)
                    prefix, experts = name.removesuffix(f".{stored}{suffix}"), self.source.get(name).shape[:1]
                    found.update(f"{prefix}.{e}.{kind}.{value}" for e in range(*experts))
        return found

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        match = self.EXPERT.fullmatch(name)
        if match is None:
            return self.source.get(name)
        prefix, number, kind, value = match[1], int(match[2]), match[3], match[4]
        stored, first, step = self.KINDS[kind]
        tensor = self.source.get(f"{prefix}.{stored}" + ("_bias" if value == "bias" else ""))
        if len(tensor.shape) != (2 if value == "bias" else 3) or number >= tensor.shape[0] or tensor.data is None:
            raise KeyError(name)
        data = tensor.data[number, ..., first::step].T
        return dataclasses.replace(tensor, name=name, shape=data.shape, data=data)


#: views of a checkpoint by the name that Architecture.stored_as has
VIEWS: dict[str, Callable[[Source], Changed]] = {
    "text_part": TextPart, "text_part_with_experts": TextPartWithExperts, "interleaved_experts": InterleavedExperts,
    "bare_encoder": BareEncoder,
    "prefixed_model": PrefixedModel}


@dataclass(frozen=True)
class OpenedModel:
    """The op list of a model and its weights. tokenizer_dir: the directory of tokenizer.json, None if there is none.
    tower: the vision tower; None if the model takes no images. no_images_reason: why it takes none, where another form
    of the model may.
    """

    graph: Graph
    source: Source
    tokenizer_dir: str | None
    tower: OpenedModel | None = None
    no_images_reason: str = ""

    @property
    def row_end(self) -> str | None:
        """Of a vision tower: the tensor of the embedding row that ends a row of an image (LLaVA-NeXT); None if
        there is none.
        """
        vision, name = self.graph.config.vision, VisionPart.ROW_END
        return name if vision is not None and name in self.source.names() else None


def open_model(model_path: str, weights_path: str = "", rope_scaling: dict[str, Any] | None = None) -> OpenedModel:
    """Opens a Hugging Face directory, a GGUF file, or an .asgraph file with its .asparam (by default the file beside
    it).

    rope_scaling: for a directory, see read_config. AllSparkError names the file and the problem.
    """
    path = Path(model_path)
    if os.path.isdir(path):
        source = open_weights(Path(weights_path) if weights_path else path)
        source = _quantized_source(source, path)
        try:
            config = read_config(path, rope_scaling)
            tower = _open_tower(config, source)
            without_tower = ARCHITECTURES[config.architecture].no_images_reason
            if tower is None and config.tower is not None:
                without_tower = f"{source.where()} has no tensors of a vision tower"
                config = dataclasses.replace(config, tower=None)
            if view := ARCHITECTURES[config.architecture].stored_as:
                source = VIEWS[view](source)
            if config.encoder and config.encoder.dense:
                source = DenseModules(source, path, [layer.name for layer in config.encoder.dense])
            config = _tied_as_stored(config, source)
            if config.latent:
                from allspark_server.weights.head_projections import HeadProjections

                source = HeadProjections(source, config)
            if config.unit_head:
                source = UnitHead(source)
            graph = quantized_graph(build_graph(_experts_as_stored(config, source)), source)
        except ValueError as error:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"{path / 'config.json'} describes no network: {error}") from None
        return OpenedModel(graph, source, _tokenizer(path), tower, without_tower)
    if not os.path.lexists(path):
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"model_path {model_path!r} does not exist: expected a Hugging "
                                                        "Face directory, a .gguf file or an .asgraph file")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    graph, of_tower = read_graphs(path)
    params = Path(weights_path) if weights_path else path.with_suffix(".asparam")
    tower = None if of_tower is None else OpenedModel(of_tower, ParamSource(params, TOWER), None)
    architecture = ARCHITECTURES[graph.config.architecture]
    without_tower = architecture.no_images_reason
    if tower is None and architecture.tower is not None:
        without_tower = f"{path.name} has no vision tower; serialize a checkpoint that has one"
    return OpenedModel(graph, ParamSource(params),
                       _tokenizer(path.with_suffix(".tokenizer")) or _tokenizer(path.parent), tower, without_tower)


def _open_tower(config: ModelConfig, source: Source) -> OpenedModel | None:
    """The vision tower of a checkpoint; None if it has none."""
    if config.tower is None:
        return None
    part = VisionPart(source)
    if not part.names():
        logger.warning("%s has a vision_config, but no tensors of a vision tower: images are refused", source.where())
        return None
    return OpenedModel(quantized_graph(build_tower(config.tower), part), part, None)


def _open_gguf(path: Path) -> OpenedModel:
    from allspark_server.weights.gguf import GgufSource, model_config, open_parts, tokenizer_directory

    files = open_parts(path)
    config = model_config(files)
    source = GgufSource(files, config)
    try:
        graph = quantized_graph(build_graph(config), source)
    except ValueError as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{path} describes no network: {error}") from None
    return OpenedModel(graph, source, tokenizer_directory(files[0]), no_images_reason=GGUF_IMAGES)


def _quantized_source(source: Source, directory: Path) -> Source:
    """The source of a checkpoint whose config.json (or quantize_config.json, in older ones) says how it is quantized;
    the source itself if it is not. Kimi-K2.5 says it among the fields of its text part.
    """
    from allspark_server.weights.schemes import quantized_source

    path = directory / "config.json"
    values = read_json(path)
    text = values.get("text_config")
    config = values.get("quantization_config") or values.get("compression_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None)
    if not config and os.path.lexists(directory / "quantize_config.json"):
        path = directory / "quantize_config.json"
        config = read_json(path)
    if not config:
        return source
    if not isinstance(config, dict):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"field 'quantization_config' of {path} is a {type(config).__name__}: expected an object")
    return quantized_source(source, config, path)


def quantized_graph(graph: Graph, source: Source) -> Graph:
    """The graph with the formats of the source's matrices, if any is quantized. ValueError if tensors that are computed
    as one matrix have no common format.
    """
    formats: dict[str, WeightFormat | None] = {}
    for weight in graph.weights.values():
        if weight.is_matrix:
            found = {part.tensor: source.form(part.tensor) for part in weight.parts}
            formats[weight.name] = None
            if any(form is not None for form in found.values()):
                forms = [form for form in found.values() if form is not None]
                formats[weight.name] = common_form(forms) if len(forms) == len(found) else None
                if formats[weight.name] is None:
                    raise ValueError("these tensors are computed as one matrix and must have one format: " + ", ".join(
                        f"{name} ({form or 'not quantized'})" for name, form in found.items()))
    sizes: Counter[WeightFormat] = Counter()
    for name, form in formats.items():
        if form is not None:
            sizes[form] += graph.weights[name].elements_of(0, 1)
    if not sizes:
        return graph
    plain = set()
    for name, form in formats.items():
        for part in graph.weights[name].parts if form is None else ():
            with contextlib.suppress(KeyError):  # the loader reports missing tensors
                plain.add(source.get(part.tensor).dtype)
    unquantized = "bfloat16" if plain == {"BF16"} else "float32"
    head = {name for op in graph.ops if op.type in ("embedding", "linear") for name in op.weights
            if op.type == "embedding" or graph.tensors[op.outputs[0]].name == "logits"}
    how = StoredQuantization(sizes.most_common(1)[0][0], all(formats[name] for name in head), unquantized)
    return graph.quantized({name: form or WeightFormat(unquantized) for name, form in formats.items()}, how)


def _tied_as_stored(config: ModelConfig, source: Source) -> ModelConfig:
    """The config, untied if the checkpoint stores a head that differs from the embedding, as in transformers 5."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    names = source.names()
    if not config.tie_word_embeddings or embedding not in names or head not in names:
        return config
    if source.form(embedding) or source.form(head):
        return dataclasses.replace(config, tie_word_embeddings=False)
    a, b = source.get(embedding), source.get(head)
    if a.dtype == b.dtype and a.shape == b.shape and (a.data is None or np.array_equal(a.data, b.values)):
        return config
    logger.warning("config.json of %s ties the head to the embedding, but the stored %r differs from it and is used",
                   source.where(), head)
    return dataclasses.replace(config, tie_word_embeddings=False)


def _experts_as_stored(config: ModelConfig, source: Source) -> ModelConfig:
    """The config, with stacked experts if the checkpoint stores them stacked (transformers 5 can)."""
    if config.experts is None or not any(name.endswith(".experts.gate_up_proj") for name in source.names()):
        return config
    return dataclasses.replace(config, experts=dataclasses.replace(config.experts, stacked=True))


def _tokenizer(directory: Path) -> str | None:
    return str(directory) if vocabulary_file(directory) is not None else None


def open_weights(path: Path) -> Source:
    """The weights of a Hugging Face directory or of one safetensors file."""
    if not os.path.isdir(path):
        return _single(path)
    if os.path.lexists(path / SINGLE):
        return _single(path / SINGLE)
    if os.path.lexists(path / INDEX):
        return _indexed(path)
    from allspark_server.weights.torch_files import TorchSource

    if os.path.lexists(path / TORCH_SINGLE):
        return TorchSource(path, [path / TORCH_SINGLE])
    if os.path.lexists(path / TORCH_INDEX):
        return TorchSource(path, [path / name for name in sorted(set(_weight_map(path / TORCH_INDEX).values()))])
    raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{path} holds no weights: looked for {SINGLE}, {INDEX}, "
                                                    f"{TORCH_SINGLE} and {TORCH_INDEX}")


def _single(path: Path) -> SafetensorsSource:
    file = SafetensorsFile(path)
    return SafetensorsSource(path, dict.fromkeys(file.names(), file))


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"field 'weight_map' of {path} is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"field 'weight_map' of {path} places {tensor!r} in "
                                                               f"{name!r}: expected a file name")
    return weight_map


def _indexed(directory: Path) -> SafetensorsSource:
    weight_map = _weight_map(directory / INDEX)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not os.path.exists(directory / name)]
    if missing:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{directory} lacks {len(missing)} of the {len(shards)} weight "
                                                        f"files that {INDEX} names: {', '.join(missing[:5])}")
    files = {name: SafetensorsFile(directory / name) for name in shards}
    for tensor, name in weight_map.items():
        if tensor not in files[name].names():
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"tensor {tensor!r} is not in {directory / name}, where {INDEX} places it")
    return SafetensorsSource(directory, {tensor: files[name] for tensor, name in weight_map.items()})


def model_hash(model: OpenedModel, formats: Mapping[str, WeightFormat], digests: Sequence[str],
               tower: Sequence[str] = (), placement: str = "") -> str:
    """A digest of everything that a model computes with: config, ops, all bytes of its tensors, and the formats of its
    matrices (by the weight's name).

    digests: Loader.digest() of every rank. tower: what the bits of images depend on besides the weights. Copies of a
    checkpoint, or of its serialized form, have the same hash on the same number of ranks. placement: which ranks
    compute what, if not all compute the same.
    """
    graph = model.graph
    ops = [(op.type, op.inputs, op.outputs, op.weights, sorted(op.attrs.items())) for op in graph.ops]
    constants = sorted((name, weight.values) for name, weight in graph.weights.items() if weight.values)
    splits = sorted({repr(split) for weight in graph.weights.values()
                     for split in (weight.column_split, *(part.units for part in weight.parts)) if split is not None})
    read: str | list[str] = model.source.checksum() or list(digests)
    if model.tower is not None and tower:
        read = [*([read, model.tower.source.checksum()] if isinstance(read, str) else read), *tower]
    facts = (repr(graph.config), ops, constants, splits, read,
             sorted((name, str(form)) for name, form in formats.items()), *([placement] if placement else []))
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
