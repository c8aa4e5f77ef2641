"""From what callers have as token ids to a list of ints."""
from __future__ import annotations

from typing import Any

import numpy as np


class _Capsule:
    """Makes a DLPack capsule look like an object that offers one, which is what numpy takes."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)   # kDLCPU; numpy checks the device inside the capsule itself


def as_token_ids(ids: Any, name: str = "input_ids") -> list[int]:
    """Token ids as a list of ints, from a DLPack capsule, an object with __dlpack__, a NumPy array, or a list.

    Shape [n] or [1, n], of an integer type. Raises TypeError for other types and ValueError for other shapes, an empty
    prompt, or negative ids; the upper end of the vocabulary is the engine's to check.
    """
    if isinstance(ids, (list, tuple)):
        array = _from_list(ids, name)
    elif isinstance(ids, np.ndarray):
        array = ids
    elif type(ids).__name__ == "PyCapsule":
        array = _from_dlpack(_Capsule(ids), name, "a DLPack capsule")
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
    return array.tolist()


def _from_list(ids: list | tuple, name: str) -> np.ndarray:
    rows = ids
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


def _from_dlpack(source: Any, name: str, what: str) -> np.ndarray:
    try:
        return np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise TypeError(f"{name}: {what} cannot be read as an integer array in CPU memory: {e}") from e
