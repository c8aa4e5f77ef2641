"""Opens a model: a Hugging Face directory (safetensors or torch .bin), .asgraph + .asparam, or GGUF."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models import Graph, ModelConfig, build_graph, read_config
from allspark_server.models.registry import ARCHITECTURES
from allspark_server.models.vision import build_tower
from allspark_server.tokenizer.vocabularies import vocabulary_file
from allspark_server.weights.asgraph import TOWER, read_graphs
from allspark_server.weights.common_form import common_form
from allspark_server.weights.files import read_json, without_collections
from allspark_server.weights.formats import StoredQuantization, WeightFormat, stream_matrices
from allspark_server.weights.sources import ParamSource, Source, open_weights
from allspark_server.weights.views import VIEWS, DenseModules, UnitHead, VisionPart

logger = logging.getLogger(__name__)

GGUF_IMAGES = ("it was loaded from a GGUF file, which holds no vision tower, and mmproj files are not read; load its "
               "Hugging Face directory, or what `allspark convert` made of that")


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


@without_collections()
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
    plain, always_float = set(), stream_matrices(graph)
    for name, form in formats.items():
        for part in graph.weights[name].parts if form is None and name not in always_float else ():
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
