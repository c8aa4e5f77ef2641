"""Reads GGUF's container by mapping the file. The file is untrusted input: every count, length and offset is checked
before it is used.

Layout (little-endian), by ggml's docs/gguf.md: magic, version, numbers of tensors and of metadata; metadata (key, type,
value); tensors (name, dimensions, type, offset); from the next multiple of the alignment on, the tensors' data.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_server.weights.files import MIB, open_regular
from allspark_server.weights.gguf.blocks import TYPE_NAMES, TYPES, BlockType

MAGIC = b"GGUF"
_LENGTH = struct.Struct("<Q")
VERSIONS = (2, 3)
MAX_TENSORS, MAX_METADATA, MAX_DIMENSIONS, MAX_NAME = 1 << 17, 1 << 16, 4, 1 << 16
MAX_HEADER_BYTES = 256 * MIB
MAX_PARTS = 1000
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {kind: np.dtype(name) for kind, name in {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8",
    12: "<f8"}.items()}
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor of a file. shape: in NumPy's order, the longest stride first. data: uint8 [rows, bytes of a row]."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    data: np.ndarray
    file: Path


class GgufFile:
    """A mapped file: its `metadata` by key (numbers, strings, lists of strings, arrays of numbers) and its tensors.

    Raises AllSparkError if the file is not valid.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with open_regular(self.path) as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size < 24:
                raise self._broken(f"it has {self._size} bytes, but its first fields take 24")
            try:
                self._map = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise self._broken(f"it cannot be mapped: {error}") from error
        self._at = 0
        tensors, metadata = self._start()
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata):
            key = self._string("a metadata key", MAX_NAME)
            if key in self.metadata:
                raise self._broken(f"it holds the metadata {key!r} twice")
            self.metadata[key] = self._value(key, self._number("<I"))
        self._tensors = self._read_tensors(tensors)

    def _broken(self, problem: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{self.path} is not a readable GGUF file: {problem}")

    # -- the header ----------------------------------------------------------------------------------------------------
    def _start(self) -> tuple[int, int]:
        """Reads the first fields; returns the numbers of tensors and of metadata."""
        magic = self._take(4, "the magic")
        if magic != MAGIC:
            raise self._broken(f"it begins with {magic!r}: expected {MAGIC!r}")
        version = self._number("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise self._broken("it is a big-endian file: only little-endian files are supported" if swapped else
                               f"its version is {version}: versions 2 and 3 are supported")
        tensors, metadata = self._number("<Q"), self._number("<Q")
        if tensors > MAX_TENSORS or metadata > MAX_METADATA:
            raise self._broken(f"it claims {tensors} tensors and {metadata} metadata; at most {MAX_TENSORS} and "
                               f"{MAX_METADATA} are allowed")
        return tensors, metadata

    def _take(self, count: int, what: str) -> bytes:
        begin = self._skip(count, what)
        return self._map[begin:begin + count]

    def _skip(self, count: int, what: str) -> int:
        """Skips `count` bytes; returns where they begin."""
        begin, end = self._at, self._at + count
        if end > self._size:
            raise self._broken(f"truncated: {what} takes bytes {begin} to {end}, the file has {self._size}")
        if end > MAX_HEADER_BYTES:
            raise self._broken(f"its header takes more than the {MAX_HEADER_BYTES} bytes that are allowed")
        self._at = end
        return begin

    def _number(self, form: str) -> int:
        return struct.unpack_from(form, self._map, self._skip(struct.calcsize(form), "a number"))[0]

    def _string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self._number("<Q")
        if length > most:
            raise self._broken(f"{what} claims {length} bytes; at most {most} are allowed")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8: {error}") from None

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._string(f"metadata {key!r}")
        if kind == ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._broken(f"metadata {key!r} has the unknown type {kind}")
        dtype = _SCALARS[kind]
        value = np.frombuffer(self._take(dtype.itemsize, f"metadata {key!r}"), dtype)[0].item()
        return bool(value) if kind == BOOL else value

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == STRING:
            if count > self._size // 8:  # each string has a length of 8 bytes
                raise self._broken(f"truncated: metadata {key!r} claims {count} strings")
            return self._strings(key, count)
        if kind not in _SCALARS:
            raise self._broken(f"metadata {key!r} is an array of type {kind}: expected numbers or strings")
        dtype = _SCALARS[kind]
        if count > self._size:
            raise self._broken(f"truncated: metadata {key!r} claims {count} values")
        return np.frombuffer(self._take(count * dtype.itemsize, f"metadata {key!r}"), dtype)

    def _strings(self, key: str, count: int) -> list[str]:
        """`count` strings. A vocabulary and its merges have hundreds of thousands, so each takes as little as it can; a
        wrong one is left to _string, which says what is wrong.
        """
        strings: list[str] = []
        data, at, end, length_at = self._map, self._at, min(self._size, MAX_HEADER_BYTES), _LENGTH.unpack_from
        with contextlib.suppress(struct.error, UnicodeDecodeError):
            while len(strings) < count:
                (length,) = length_at(data, at)
                after = at + 8 + length
                if after > end:
                    break
                strings.append(data[at + 8:after].decode())
                at = after
        self._at = at
        while len(strings) < count:
            strings.append(self._string(f"a string of metadata {key!r}"))
        return strings

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._string("a tensor's name", MAX_NAME)
            if name in entries:
                raise self._broken(f"it holds the tensor {name!r} twice")
            entries[name] = self._entry(name)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"its general.alignment is {alignment!r}: expected a power of two, 8 to {MAX_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        tensors, end = {}, 0
        for name, (kind, shape, offset) in sorted(entries.items(), key=lambda entry: entry[1][2]):
            rows, row = math.prod(shape[:-1]), shape[-1] // kind.values * kind.bytes
            if offset % alignment:
                raise self._broken(f"tensor {name!r} begins at {offset}, no multiple of the alignment {alignment}")
            if offset < end:
                raise self._broken(f"tensor {name!r} begins at {offset}, but the one before ends at {end}")
            end = offset + rows * row
            if start + end > self._size:
                raise self._broken(f"truncated: tensor {name!r} takes bytes {start + offset} to {start + end}, the "
                                   f"file has {self._size}")
            data = np.ndarray((rows, row), np.uint8, self._map, start + offset)
            tensors[name] = GgufTensor(name, kind, shape, data, self.path)
        return tensors

    def _entry(self, name: str) -> tuple[BlockType, tuple[int, ...], int]:
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {dimensions} dimensions: expected 1 to {MAX_DIMENSIONS}")
        sizes = [self._number("<Q") for _ in range(dimensions)]
        if not all(sizes) or math.prod(sizes) > 1 << 48:
            raise self._broken(f"tensor {name!r} has the impossible dimensions {sizes}")
        number, offset = self._number("<I"), self._number("<Q")
        kind = TYPES.get(number)
        if kind is None:
            if number in TYPE_NAMES:
                raise not_available(f"Type {TYPE_NAMES[number]} of tensor {name!r} in {self.path} (known are "
                                    f"{', '.join(t.name for t in TYPES.values())})")
            raise self._broken(f"tensor {name!r} has the unknown type {number}")
        if sizes[0] % kind.values:
            raise self._broken(f"tensor {name!r} has rows of {sizes[0]} values: {kind.name} has blocks of "
                               f"{kind.values}")
        return kind, tuple(reversed(sizes)), offset

    # -- tensors -------------------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """The names of the file's tensors."""
        return list(self._tensors)

    def get(self, name: str) -> GgufTensor:
        """The tensor called `name`. Raises KeyError if the file has none."""
        return self._tensors[name]


def open_parts(path: Path) -> list[GgufFile]:
    """A model's file or, if it was split, all of its files. path: the first one.

    Raises AllSparkError if a file is not valid or `path` is not the first one.
    """
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return [first]
    found = _PART.fullmatch(path.name)
    if type(count) is not int or count > MAX_PARTS or not found or int(found["count"]) != count or \
            int(found["part"]) != 1:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{path} is one of {count} parts: give the first, "
                                                           "NAME-00001-of-COUNT.gguf")
    parts = [first]
    for i in range(2, count + 1):
        parts.append(GgufFile(path.with_name(f"{found['stem']}-{i:05d}-of-{count:05d}.gguf")))
        if parts[-1].metadata.get("split.no") != i - 1:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"{parts[-1].path} has split.no={parts[-1].metadata.get('split.no')}: expected {i - 1}")
    return parts
