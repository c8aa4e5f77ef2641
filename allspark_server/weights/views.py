"""Views of a source: tensors under the names, and in the form, that a graph wants.

`Architecture.stored_as` names the view of a checkpoint; a vision tower has `VisionPart`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from allspark_server.weights.asgraph import STORED_TYPES, from_float32, to_float32
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.quantized import QuantizedTensor
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.sources import Source, open_weights


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


class EachRenamed(Renamed):
    """A view that derives the name of each tensor from its name in the source: the base class of such views."""

    def __init__(self, source: Source):
        super().__init__(source, {self.own_name(stored): stored for stored in source.names()})

    def own_name(self, stored: str) -> str:
        """The view's name of a tensor."""
        raise NotImplementedError


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


class BareEncoder(EachRenamed):
    """An encoder's checkpoint without the name of the base model before its tensors, which checkpoints with a head
    have; norms of checkpoints that came from TensorFlow have `gamma` and `beta`.
    """

    PREFIXES = ("bert.", "roberta.", "model.", "new.", "gte.", "nomic_bert.")
    ENDS = ((".gamma", ".weight"), (".beta", ".bias"))

    def own_name(self, stored: str) -> str:
        """See EachRenamed."""
        name = next((stored[len(prefix):] for prefix in self.PREFIXES if stored.startswith(prefix)), stored)
        for old, new in self.ENDS:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name


class PrefixedModel(EachRenamed):
    """A checkpoint of a base model, whose names lack the `model.` that those of its model with a head have."""

    def own_name(self, stored: str) -> str:
        """See EachRenamed."""
        return stored if stored.startswith("model.") else f"model.{stored}"


class BlockSparseMoe(EachRenamed):
    """A checkpoint of Kimi Linear with DeepSeek's names for MLPs and experts."""

    PARTS = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."),
             (".self_attn.forget_gate.", ".self_attn."))

    def own_name(self, stored: str) -> str:
        """See EachRenamed."""
        for old, new in self.PARTS:
            stored = stored.replace(old, new)
        return stored


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


class DeepseekNames(EachRenamed):
    """DeepSeek-V4 with the names of published checkpoints. transformers writes some of its own. Experts of tokens are
    floats, which hold their numbers exactly.
    """

    OWN = (("embed_tokens.weight", "embed.weight"), ("lm_head.weight", "head.weight"), ("hc_head.hc_", "hc_head_"))
    EXPERTS = ".tid2eid"

    def own_name(self, stored: str) -> str:
        """See EachRenamed."""
        name = stored.removeprefix("model.")
        for written, published in self.OWN:
            name = published + name[len(written):] if name.startswith(written) else name
        return name.replace(".attn.norm.", ".attn.kv_norm.")

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        tensor = super().get(name)
        if not name.endswith(self.EXPERTS) or tensor.dtype not in ("I64", "I32") or tensor.data is None:
            return tensor
        return dataclasses.replace(tensor, dtype="F32", data=tensor.data.astype(np.float32))


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
    "deepseek_names": DeepseekNames, "bare_encoder": BareEncoder, "block_sparse_moe": BlockSparseMoe,
    "prefixed_model": PrefixedModel}
