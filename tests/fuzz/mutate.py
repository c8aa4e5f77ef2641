"""Mutators. Their results depend only on the random generator and the seeds."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (-1, 0, 1, 2, 3, 7, 8, 15, 16, 17, 64, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 10**6, 10**9,
            2**31 - 1, -2**31, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, -2**63)  # fmt: skip
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e-38, 1e-320, 3.4e38, 1e39, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "\0", "é", "🙃", "..", "/", "../x", "%s%n", "{{ x }}", "{% for i in range(9) %}{% endfor %}", "nan",
         "float32", "int8", "w4a8", "default", "x" * 300)  # fmt: skip
FIXED32 = {FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_UINT32}
SIGNED32 = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32}
UNSIGNED64 = {FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64}


def integer(rng: Random, bits: int = 64, signed: bool = True) -> int:
    """An interesting integer with this many bits."""
    value = rng.choice(INTEGERS) + rng.choice((0, 0, 0, -1, 1)) if rng.random() < 0.8 else rng.getrandbits(bits)
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def of_bytes(rng: Random, data: bytes, other: bytes = b"") -> bytes:
    """Flips, truncates, cuts, repeats, overwrites with an interesting integer, or splices with another input."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(out)) if out else 0
        end = min(len(out), at + rng.choice((1, 4, 8, 32)))
        match rng.randrange(7):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                del out[at:end]
            case 4:
                out[at:at] = out[at:end] * rng.choice((1, 2, 16))
            case 5:
                width = rng.choice((1, 2, 4, 8))
                out[at : at + width] = integer(rng, 8 * width, False).to_bytes(width, "little")
            case 6:
                out[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(out)


# -- JSON --------------------------------------------------------------------------------------------------------------
def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """All pairs (container, key) below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def _json_value(rng: Random, near: Any) -> Any:
    match rng.randrange(9):
        case 0:
            return integer(rng)
        case 1:
            return rng.choice(REALS)
        case 2:
            return rng.choice(TEXTS)
        case 3:
            return rng.choice((True, False, None, [], {}, [[]], 10**30, 10**400))
        case 4:
            return [copy.deepcopy(near)] * rng.choice((1, 2, 100))
        case 5:
            return {rng.choice(TEXTS): near}
        case 6 if isinstance(near, int):
            return near + rng.choice((-1, 1))
        case 7 if isinstance(near, str) and near:
            at = rng.randrange(len(near))
            return near[:at] + rng.choice(TEXTS) + near[at + 1 :]
        case _:
            return integer(rng, 16)


def of_json(rng: Random, value: Any) -> bytes:
    """Changes some places of a JSON value, and sometimes its bytes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        places = _places(value, [])
        if not places:
            value = _json_value(rng, value)
            break
        where, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del where[key]
            case 1 if isinstance(where, dict):
                where[rng.choice(TEXTS)] = where.pop(key)
            case 2:
                other, place = rng.choice(places)
                if (isinstance(other, dict) and place in other) or (isinstance(other, list) and place < len(other)):
                    where[key] = copy.deepcopy(other[place])
            case _:
                where[key] = _json_value(rng, where[key])
    data = json.dumps(value).encode()
    if rng.random() < 0.01:
        depth = rng.choice((50, 1000, 20_000))
        data = b'{"a":' * depth + data + b"}" * depth
    return of_bytes(rng, data, data) if rng.random() < 0.15 else data


# -- protobuf ----------------------------------------------------------------------------------------------------------
def _messages(message: Message, found: list[Message]) -> list[Message]:
    found.append(message)
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for inner in value.values():
                    _messages(inner, found)
        else:
            for inner in value if field.is_repeated else (value,):
                _messages(inner, found)
    return found


def scalar(rng: Random, field: FieldDescriptor, texts: list[str]) -> Any:
    """A value of a field's type; `texts` are strings with a meaning in the message."""
    kind = field.type
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(REALS) if rng.random() < 0.7 else rng.uniform(-10, 10)
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.TYPE_STRING:
        return rng.choice(texts) if texts and rng.random() < 0.6 else rng.choice(TEXTS)
    if kind == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 8, 100)))
    if kind in FIXED32:
        return integer(rng, 32, False)
    if kind in SIGNED32 or kind == FieldDescriptor.TYPE_ENUM:
        return integer(rng, 32) if rng.random() < 0.6 else rng.randrange(100)
    return integer(rng, 64, kind not in UNSIGNED64)


def of_message(rng: Random, message: Message, texts: list[str]) -> bytes:
    """Sets, clears, repeats and removes fields by their descriptors, and sometimes changes bytes."""
    message = copy.deepcopy(message)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        inner = rng.choice(_messages(message, []))
        fields = inner.DESCRIPTOR.fields
        if fields:
            _change(rng, inner, rng.choice(fields), texts)
    data = message.SerializeToString()
    return of_bytes(rng, data, data) if rng.random() < 0.2 else data


def _change(rng: Random, message: Message, field: FieldDescriptor, texts: list[str]) -> None:
    name = field.name
    if rng.random() < 0.2:
        message.ClearField(name)
        return
    value = getattr(message, name)
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        key, kind = scalar(rng, nested.fields_by_name["key"], texts), nested.fields_by_name["value"]
        inner = value[key] if kind.message_type is not None else None
        if inner is None:
            value[key] = scalar(rng, kind, texts)
        elif inner.DESCRIPTOR.fields:
            _change(rng, inner, rng.choice(inner.DESCRIPTOR.fields), texts)
    elif not field.is_repeated:
        if nested is not None:
            value.SetInParent()
            if nested.fields:
                _change(rng, value, rng.choice(nested.fields), texts)
        else:
            setattr(message, name, scalar(rng, field, texts))
    elif len(value) and rng.random() < 0.5:
        at = rng.randrange(len(value))
        if rng.random() < 0.5:
            del value[at]
        elif nested is None:
            value[at] = scalar(rng, field, texts)
        else:
            value.insert(rng.randrange(len(value) + 1), copy.deepcopy(value[at]))
    elif nested is None:
        value.extend(scalar(rng, field, texts) for _ in range(rng.choice((1, 2, 50))))
    else:
        value.add()
