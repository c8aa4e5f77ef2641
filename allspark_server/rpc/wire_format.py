"""Reads protobuf's wire format without making messages of it.

To parse a message takes the interpreter lock for all of it, and memory for each field: 0.2 s for 8 million numbers. So
the fields and numbers of a large message are counted first, and one that has too many is refused unread.

The format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

#: the most fields and packed numbers of a message. A field takes about 1 µs to count, and 0.1 µs to parse
MAX_FIELDS, MAX_NUMBERS = 1 << 15, 1 << 20
_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED = {FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8,
          FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_SFIXED32: 4}
_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class TooManyItems(ValueError):
    """A message has more fields or numbers than any request needs."""


class _Malformed(Exception):
    """The bytes do not have the wire format; the parser says so better."""


@dataclass
class _Known:
    """What may lie in a length-delimited field: a message, or packed numbers of `width` bytes (0: varints)."""

    name: str
    message: dict[int, _Known] | None = None
    width: int | None = None


@dataclass
class _Counts:
    """What is left of the limits."""

    fields: int
    numbers: int
    path: list[str] = field(default_factory=list)


def check_items(data: bytes, message_type: type[Message], max_fields: int = MAX_FIELDS,
                max_numbers: int = MAX_NUMBERS) -> None:
    """Raises TooManyItems if a message of this type has more than `max_fields` fields, those of its messages included,
    or more than `max_numbers` packed numbers. Bytes that are no message pass: the parser refuses them.
    """
    counts = _Counts(max_fields, max_numbers)
    try:
        _count(data, 0, len(data), _layout(message_type.DESCRIPTOR), counts)
    except _Malformed:
        return
    except TooManyItems as error:
        limit = f"{max_fields} fields" if counts.fields < 0 else f"{max_numbers} numbers"
        where = f" (counted up to {'.'.join(counts.path)})" if counts.path else ""
        raise TooManyItems(f"the message has more than {limit}{where}; a long prompt may be sent as text") from error


def find_number(data: bytes, *path: int) -> int | None:
    """The value of an integer field, by the numbers of the fields that lead to it; None if it is missing. Where it
    occurs more than once, the last counts. Raises TooManyItems if it is behind more than MAX_FIELDS others.
    """
    found, left = None, MAX_FIELDS
    spans = [(0, len(data))]
    try:
        for depth, wanted in enumerate(path):
            inner: list[tuple[int, int]] = []
            for begin, end in spans:
                for number, kind, value, at in _fields(data, begin, end):
                    left -= 1
                    if left < 0:
                        raise TooManyItems(f"the message has more than {MAX_FIELDS} fields")
                    if number != wanted:
                        continue
                    if depth + 1 == len(path) and kind == _VARINT:
                        found = value
                    elif kind == _BYTES:
                        inner.append((at, at + value))
            spans = inner
    except _Malformed:
        pass
    return found


def _count(data: bytes, begin: int, end: int, layout: dict[int, _Known], counts: _Counts) -> None:
    for number, kind, value, at in _fields(data, begin, end):
        counts.fields -= 1
        if counts.fields < 0:
            raise TooManyItems
        known = layout.get(number)
        if kind != _BYTES or known is None:
            continue
        counts.path.append(known.name)
        if known.message is not None:
            _count(data, at, at + value, known.message, counts)
        elif known.width is not None:
            if known.width:
                value //= known.width
            else:       # in the last byte of a varint, the highest bit is 0
                value = int(np.count_nonzero(np.frombuffer(data, np.int8, value, at) >= 0))
            counts.numbers -= value
            if counts.numbers < 0:
                raise TooManyItems
        counts.path.pop()


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, value or length, and where the bytes begin. Those of a group follow
    its start.
    """
    while at < end:
        tag, at = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        value = 0
        if kind == _VARINT:
            value, at = _varint(data, at, end)
            yield number, kind, value, at
        elif kind == _BYTES:
            value, at = _varint(data, at, end)
            if at + value > end:
                raise _Malformed
            yield number, kind, value, at
            at += value
        elif kind in (_FIXED64, _FIXED32):
            yield number, kind, value, at
            at += 8 if kind == _FIXED64 else 4
        elif kind in (_START_GROUP, _END_GROUP):
            yield number, kind, value, at
        else:
            raise _Malformed


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _Malformed


#: the fields of message types by number
_layouts: dict[str, dict[int, _Known]] = {}


def _layout(descriptor: Any) -> dict[int, _Known]:
    """The fields of a message type by number."""
    name = descriptor.full_name
    if name not in _layouts:
        layout = _layouts[name] = {}        # entered before it is made: types may contain themselves
        for one in descriptor.fields:
            known = _Known(one.name)
            if one.message_type is not None:
                known.message = _layout(one.message_type)
            elif one.type not in _TEXT:
                known.width = _FIXED.get(one.type, 0)
            layout[one.number] = known
    return _layouts[name]
