"""safetensors files, read by memory mapping: tensors are views of the page cache, and nothing is copied.

Layout: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.weights.files import open_regular, parse_json, replacing

# The NumPy type of each stored type; NumPy has no bfloat16.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
              "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
# The same with the types of quantized values and their scales.
QUANTIZED_TYPES: dict[str, np.dtype[Any]] = {
    **NUMPY_TYPES, "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype("u1"), "F8_E8M0": np.dtype("u1")}
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS, MAX_ELEMENTS = 32, 1 << 48
_FIELDS = {"dtype", "shape", "data_offsets"}    # of a tensor's entry in the header


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint.

    data: an array of `shape` with the NumPy type of QUANTIZED_TYPES (BF16 is uint16, 8-bit floats are uint8); None for
    types that no model uses. It may lie at an odd address, see `aligned`. file: where it is stored, for messages.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray | None
    file: Path

    @property
    def values(self) -> np.ndarray:
        """`data` of a tensor whose type models use."""
        assert self.data is not None, f"tensor {self.name!r} has the type {self.dtype}"
        return self.data


def aligned(data: np.ndarray) -> np.ndarray:
    """`data`, or a copy if it lies at an address that the native library does not take: headers of files may have any
    length. To be called for the rows that are needed, not for a whole tensor.
    """
    return data if data.flags.aligned else np.require(data, requirements="A")


def _broken(path: Path, problem: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{path} is not a readable safetensors file: {problem}")


class SafetensorsFile:
    """One mapped file. Tensors are views of the mapping, which is freed with the last of them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _broken(self.path, f"it has {size} bytes, the header length alone takes 8")
            try:
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise _broken(self.path, f"it cannot be mapped: {error}") from error
        self.header_bytes, self.metadata, self._entries = self._read_header(size)
        self._tensors: dict[str, StoredTensor] = {}

    def _read_header(self, size: int) -> tuple[int, dict[str, str], dict[str, dict[str, Any]]]:
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise _broken(self.path, f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        if 8 + length > size:
            raise _broken(self.path, f"truncated: the header takes {8 + length} bytes, the file has {size}")
        try:
            header = parse_json(self._map[8:8 + length])
        except ValueError as error:
            raise _broken(self.path, f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise _broken(self.path, f"its header is a JSON {type(header).__name__}, not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise _broken(self.path, "its __metadata__ is not an object of strings")
        end = 0
        for (begin, after), name in sorted((self._check_entry(name, entry), name) for name, entry in header.items()):
            if begin < end:
                raise _broken(self.path, f"tensor {name!r} begins at {begin}, but the one before ends at {end}")
            end = after
        if 8 + length + end > size:
            raise _broken(self.path, f"truncated: its tensors need {8 + length + end} bytes, the file has {size}")
        return 8 + length, metadata, header

    def _check_entry(self, name: str, entry: object) -> list[int]:
        """Checks the header entry of a tensor; returns the begin and the end of its data."""
        if not isinstance(entry, dict) or not _FIELDS <= entry.keys():
            raise _broken(self.path, f"the header entry of tensor {name!r} lacks dtype, shape or data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
        if not numbers or len(shape) > MAX_DIMENSIONS or set(map(type, shape + offsets)) != {int} or \
                min(shape + offsets) < 0:
            raise _broken(self.path, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise _broken(self.path, f"tensor {name!r} has the unknown dtype {dtype!r}")
        needed = ITEM_BYTES[dtype] * math.prod(shape)
        if offsets[1] - offsets[0] != needed:
            raise _broken(self.path, f"tensor {name!r} ({dtype}, shape {shape}) needs {needed} bytes, its data_offsets "
                                     f"{offsets} span {offsets[1] - offsets[0]}")
        if not needed and math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:  # NumPy multiplies them
            raise _broken(self.path, f"tensor {name!r} has the impossible shape {shape}")
        return offsets

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._entries.keys()

    def get(self, name: str) -> StoredTensor:
        """The tensor `name` as a view. KeyError if the file has none."""
        known = self._tensors.get(name)     # a tensor is asked for several times until it is loaded
        if known is None:
            entry = self._entries[name]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            data = None
            if dtype in QUANTIZED_TYPES:
                data = np.ndarray(shape, QUANTIZED_TYPES[dtype], self._map,
                                  self.header_bytes + entry["data_offsets"][0])
            known = self._tensors[name] = StoredTensor(name, dtype, shape, data, self.path)
        return known

    def raw(self, name: str) -> memoryview:
        """The bytes of the tensor as stored."""
        begin, end = self._entries[name]["data_offsets"]
        return memoryview(self._map)[self.header_bytes + begin:self.header_bytes + end]


def write_safetensors(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str],
                      data: Iterable[Iterable[np.ndarray]], checksums: bool = False) -> None:
    """Writes a file from (name, dtype, shape) and, in the same order, the data of each tensor as contiguous pieces.

    Data is consumed one piece at a time, so a checkpoint need not fit into memory. The file appears under its name only
    when it is complete. checksums: adds "crc32:NAME" of every tensor to the metadata. AllSparkError if writing fails.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in tensors:
        size = ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    sums = {f"crc32:{name}": "0" * 8 for name in header} if checksums else {}

    def encoded() -> bytes:
        text = json.dumps({"__metadata__": {**metadata, **sums}, **header}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)  # align the tensors to cache lines
        return len(text).to_bytes(8, "little") + text

    with replacing(path) as file:
        file.write(encoded())
        for name, pieces in zip(header, data):
            crc = 0
            for piece in pieces:
                content = piece.reshape(-1).view(np.uint8).data
                file.write(content)
                crc = zlib.crc32(content, crc) if checksums else 0
            if checksums:
                sums[f"crc32:{name}"] = f"{crc:08x}"
        file.seek(0)
        file.write(encoded())
