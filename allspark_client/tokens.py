"""Token ids of any form that callers have them in, as a list of ints."""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np


def as_token_ids(ids: Any, name: str = "input_ids") -> list[int]:
    """Token ids as a list of ints.

    Args:
        ids: a DLPack capsule, an object with __dlpack__, a NumPy array or a list of ints, of shape [n] or [1, n]. A
            capsule is not consumed: it may be given again.
        name: the argument's name in errors.

    Raises:
        TypeError: another type, elements that are not integers, or memory of a GPU.
        ValueError: another shape, no ids, a negative id, or one beyond 32 bits. That ids are smaller than the
            vocabulary is checked by the engine.
    """
    if type(ids) is list and _is_plain(ids):
        return ids.copy()
    if isinstance(ids, (list, tuple)):
        array = _from_list(ids, name)
    elif isinstance(ids, np.ndarray):
        array = ids
    elif type(ids).__name__ == "PyCapsule":
        array = _from_capsule(ids, name)
    elif hasattr(ids, "__dlpack__"):
        array = _from_dlpack(ids, name, f"the {type(ids).__name__}")
    else:
        raise TypeError(f"{name} must be a DLPack capsule, an object with __dlpack__, a NumPy array or a list of ints, "
                        f"not {type(ids).__name__}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be of an integer type, not {array.dtype}")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}; allowed: [n] or [1, n] (one prompt a request)")
    if array.size == 0:
        raise ValueError(f"{name} is empty; a prompt needs at least one token id")
    wrong = np.flatnonzero((array < 0) | (array > 2**31 - 1))
    if wrong.size:
        value = int(array[wrong[0]])
        raise ValueError(f"{name}[{wrong[0]}]={value} is {'negative' if value < 0 else 'beyond 32 bits'}; "
                         "token ids start at 0 and end below the vocabulary's size")
    values: list[int] = array.tolist()
    return values


def _is_plain(ids: list[Any]) -> bool:
    """Whether a list has only valid ids of the type int, and at least one. Its passes are in C: prompts may have
    100,000 tokens.
    """
    if not ids or list(map(type, ids)).count(int) != len(ids):
        return False
    try:
        packed = struct.pack(f"<{len(ids)}i", *ids)
    except struct.error:    # beyond 32 bits
        return False
    return bool(np.frombuffer(packed, "<i4").min() >= 0)


def _from_list(ids: Sequence[Any], name: str) -> np.ndarray[Any, Any]:
    rows: Sequence[Any] | np.ndarray[Any, Any] = ids
    if len(ids) == 1 and isinstance(ids[0], (list, tuple, np.ndarray)):
        rows = ids[0]
    for i, value in enumerate(rows):
        if isinstance(value, (list, tuple, np.ndarray)):
            raise ValueError(f"{name} is a list of {len(rows)} lists; allowed: shape [n] or [1, n], one prompt")
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}[{i}] must be an int, not {type(value).__name__} ({value!r:.80})")
    try:
        return np.array(rows, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{name} holds a value beyond 64 bits; token ids end below the vocabulary's size") from None


def _from_dlpack(source: Any, name: str, what: str) -> np.ndarray[Any, Any]:
    try:
        return np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise TypeError(f"{name}: {what} cannot be read as an integer array in CPU memory: {e}") from e


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


#: by a capsule's name, the offset of its DLTensor in bytes: behind a version, a pointer to the owner, a deleter, flags
_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 8 + 2 * ctypes.sizeof(ctypes.c_void_p) + 8}
_CPU, _KINDS = 1, {0: "i", 1: "u", 2: "f", 4: "V", 6: "b"}


def _from_capsule(capsule: Any, name: str) -> np.ndarray[Any, Any]:
    """A copy of a capsule's tensor. The capsule is not consumed: DashInfer's scripts use one for several requests."""
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    kind = get_name(capsule)
    if kind not in _OFFSETS:
        given = (kind or b"").decode(errors="replace")
        raise TypeError(f"{name}: a DLPack capsule of the name {given!r} holds no tensor: another consumer has "
                        "taken it over")
    tensor = _Tensor.from_address(get_pointer(capsule, kind) + _OFFSETS[kind])
    if tensor.device_type != _CPU or tensor.lanes != 1 or tensor.code not in _KINDS \
            or tensor.bits not in (8, 16, 32, 64):
        raise TypeError(f"{name}: a DLPack capsule cannot be read as an integer array in CPU memory (device type "
                        f"{tensor.device_type}, type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)")
    dtype = np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")
    shape = tensor.shape[:tensor.ndim]
    if 0 in shape:
        return np.zeros(shape, dtype)
    strides = [n * dtype.itemsize for n in tensor.strides[:tensor.ndim]] if tensor.strides \
        else np.zeros(shape, dtype).strides
    reach = [(n - 1) * stride for n, stride in zip(shape, strides)]
    before, after = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + dtype.itemsize
    data = (ctypes.c_char * (before + after)).from_address(tensor.data + tensor.byte_offset - before)
    copy: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, before, strides).copy()
    return copy
