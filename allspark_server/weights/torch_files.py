"""Weights in torch's own files, pytorch_model.bin."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.weights.files import open_regular
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.sources import Source


class TorchSource(Source):
    """pytorch_model.bin files, read with torch's weights-only mode, which runs no code from the file and checks its zip
    container.
    """

    def __init__(self, location: Path, files: list[Path]):
        try:
            import torch
        except ImportError:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"{location} holds torch .bin weights, and torch is not installed: install torch, or "
                                "convert the checkpoint to safetensors") from None
        self.location = location
        self.kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
                      torch.int64: "I64", torch.int32: "I32"}
        self.bits = torch.int16
        self.tensors: dict[str, tuple[Any, Path]] = {}
        for path in files:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                held = f"/proc/self/fd/{file.fileno()}"  # torch maps only files that it opens by name
                try:
                    found = torch.load(held, map_location="cpu", weights_only=True, mmap=True)
                except Exception as error:  # torch raises many types; the file is foreign input
                    raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                        f"cannot read weight file {path}: {error}") from error
            if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
                raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"weight file {path} does not hold tensors by name")
            for name, t in found.items():
                # A view can repeat stored elements; copying it could take any amount of memory.
                if t.layout != torch.strided or t.device.type != "cpu" or t.numel() * t.element_size() > size:
                    raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"tensor {name!r} in {path} is not stored whole")
            # Parameters and transposed views are allowed.
            self.tensors.update((name, (t.detach().contiguous(), path)) for name, t in found.items())

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        return self.tensors.keys()

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        tensor, path = self.tensors[name]
        kind, data = self.kinds.get(tensor.dtype), None
        if kind is not None:
            data = tensor.view(self.bits).numpy().view(np.uint16) if kind == "BF16" else tensor.numpy()
        return StoredTensor(name, kind or str(tensor.dtype), tuple(tensor.shape), data, path)
