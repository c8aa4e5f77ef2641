"""The tensors of a model by name, as its files have them: safetensors, torch .bin, and .asparam.

Every format is presented as a `Source` of named, whole tensors. The loader decides which part of each a rank keeps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.runtime.native import native_library
from allspark_server.weights.asgraph import PARAM_FORMAT, TOWER
from allspark_server.weights.files import MAX_INDEX_BYTES, read_json
from allspark_server.weights.formats import OFFSET, ORDER, SCALE, SUPER_OFFSET, SUPER_SCALE, WeightFormat
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor
from allspark_server.weights.safetensors import SafetensorsFile, StoredTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


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
