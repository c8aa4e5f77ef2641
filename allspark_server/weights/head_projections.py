"""Latent attention's projections as a matrix for each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models import ModelConfig
from allspark_server.weights.asgraph import from_float32
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.gpu_forms import recovered
from allspark_server.weights.safetensors import NUMPY_TYPES, StoredTensor
from allspark_server.weights.sources import Source
from allspark_server.weights.views import Changed


class HeadProjections(Changed):
    """A view of a checkpoint with latent attention, with a matrix for each head.

    `kv_b_proj.weight` [heads x (keys + values), latent] becomes `kv_b_proj.keys` [heads, latent, keys], by which
    queries are multiplied, and `kv_b_proj.values` [heads, values, latent]. A quantized one is dequantized to bfloat16,
    as in DeepSeek's own code.
    """

    STORED = ".kv_b_proj.weight"

    def __init__(self, source: Source, config: ModelConfig):
        super().__init__(source)
        assert config.latent is not None
        self.latent, self.heads = config.latent, config.num_heads
        self._last: tuple[str, StoredTensor] | None = None  # asked for once a head

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        for name in self.source.names():
            if name.endswith(self.STORED):
                yield from (name.removesuffix("weight") + part for part in ("keys", "values"))
            else:
                yield name

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        return None if self._stored(name) else self.source.form(name)

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        stored = self._stored(name)
        if stored is None:
            return self.source.get(name)
        if self._last is None or self._last[0] != stored:
            self._last = stored, self._whole(stored)
        tensor, latent = self._last[1], self.latent
        rows = latent.nope_dim + latent.value_dim
        shape = (self.heads * rows, latent.latent_dim)
        if tensor.dtype not in NUMPY_TYPES or tensor.data is None or tensor.shape != shape:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"tensor {stored!r} in {tensor.file} has type {tensor.dtype} and shape {tensor.shape}: "
                                f"expected one of {', '.join(NUMPY_TYPES)} and {shape}")
        heads = tensor.data.reshape(self.heads, rows, latent.latent_dim)
        keys, values = np.split(heads, [latent.nope_dim], axis=1)
        data = keys.transpose(0, 2, 1) if name.endswith(".keys") else values
        return dataclasses.replace(tensor, name=name, shape=data.shape, data=data)

    def _stored(self, name: str) -> str | None:
        """The tensor that one of the view's own is a part of."""
        prefix, dot, part = name.rpartition(".kv_b_proj.")
        return prefix + self.STORED if dot and part in ("keys", "values") else None

    def _whole(self, name: str) -> StoredTensor:
        form = self.source.form(name)
        if form is None:
            return self.source.get(name)
        shape = (self.heads * (self.latent.nope_dim + self.latent.value_dim), self.latent.latent_dim)
        tensor = self.source.quantized(name, form, shape)
        data = np.empty(shape, np.uint16)
        for row, values in recovered(tensor, form, 0, *shape):
            data[row:row + len(values)] = from_float32(values, "BF16")
        return StoredTensor(name, "BF16", shape, data, tensor.file)
