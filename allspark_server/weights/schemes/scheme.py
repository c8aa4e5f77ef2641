"""The interface of a scheme of quantized checkpoints, and the source that presents its matrices as ordinary tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.config import Fields
from allspark_server.weights.common_form import converted
from allspark_server.weights.formats import SCALE_TYPES, SMALLEST_GROUP, WeightFormat
from allspark_server.weights.quantized import QuantizedTensor, checked_order
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.sources import Source
from allspark_server.weights.views import Changed

SCALE_NAMES = {kind: name for name, kind in SCALE_TYPES.items()}
WEIGHT = ".weight"
_EXPONENTS = {"BF16": np.uint16(0x7F80), "F16": np.uint16(0x7C00)}  # all bits of them are set in NaN and infinity


class Scheme(Protocol):
    """Reads the tensors of quantized modules. Module `m` is the module whose weight is `m.weight` in an unquantized
    checkpoint.
    """

    def __init__(self, source: Source, config: Fields): ...

    def modules(self) -> Iterable[str]:
        """The quantized modules."""

    def parts(self, module: str) -> Iterable[str]:
        """The names of a module's tensors."""

    def form(self, module: str) -> WeightFormat:
        """The format of a module's matrix. AllSparkError if kernels cannot compute with it."""

    def tensor(self, module: str, form: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """A module's matrix in the format that `form` returned. AllSparkError if a tensor has a wrong type or shape."""


class QuantizedSource(Changed):
    """The tensors of a quantized checkpoint; quantized modules have the names of the unquantized checkpoint."""

    def __init__(self, source: Source, scheme: Scheme):
        super().__init__(source)
        self.scheme = scheme
        self.modules = set(scheme.modules())
        # Cached by name: they are requested often, and some need a look at every scale.
        self._forms: dict[str, WeightFormat] = {}
        self._tensors: dict[str, tuple[tuple[WeightFormat, tuple[int, int]], QuantizedTensor]] = {}

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        own = {name for module in self.modules for name in self.scheme.parts(module)}
        return (set(self.source.names()) - own) | {module + WEIGHT for module in self.modules}

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        if name not in self._forms:
            module = name.removesuffix(WEIGHT)
            if not name.endswith(WEIGHT) or module not in self.modules:
                return None
            self._forms[name] = self.scheme.form(module)
        return self._forms[name]

    def quantized(self, name: str, form: WeightFormat, shape: tuple[int, int],
                  expert: int | None = None) -> QuantizedTensor:
        """See `Source.quantized`."""
        own = self.form(name)
        if own is None or expert is not None:
            raise KeyError(name)
        wanted, known = (form, shape), self._tensors.get(name)
        if known is None or known[0] != wanted:
            tensor = self.scheme.tensor(name.removesuffix(WEIGHT), own, shape)
            known = self._tensors[name] = wanted, converted(tensor, own, form, shape[1])
        return known[1]


# -- what schemes share ------------------------------------------------------------------------------------------------
def wrong(tensor: StoredTensor, problem: str) -> NoReturn:
    """Raises AllSparkError that names the tensor and its file; `problem` follows, as in "has shape [3]: expected
    [4]".
    """
    raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {tensor.name!r} in {tensor.file} {problem}")


def need(source: Source, name: str, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
    """The tensor `name`. AllSparkError unless it has one of these types and, if given, one of these shapes."""
    try:
        tensor = source.get(name)
    except KeyError:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{source.where()} has no tensor {name!r}") from None
    if tensor.dtype not in kinds or tensor.data is None:
        wrong(tensor, f"has type {tensor.dtype}: expected {' or '.join(kinds)}")
    if shapes and tensor.shape not in shapes:
        wrong(tensor, f"has shape {list(tensor.shape)}: expected {' or '.join(str(list(s)) for s in shapes)}")
    return tensor


def check_finite(tensor: StoredTensor) -> None:
    """AllSparkError if a scale of the tensor is NaN or infinite."""
    data = tensor.values
    exponents = _EXPONENTS.get(tensor.dtype)
    if exponents is None:
        bad = int(np.count_nonzero(~np.isfinite(data)))
    else:
        bad = int(np.count_nonzero((data.view(np.uint16) & exponents) == exponents))
    if bad:
        wrong(tensor, f"holds {bad} scales that are NaN or infinite")


def column_order(source: Source, name: str, size: int, columns: int | None) -> np.ndarray | None:
    """The order of columns that follows from the tensor `name` with the group of each column (checked_order). columns:
    their number, if known.
    """
    groups = need(source, name, ("I32",))
    if len(groups.shape) != 1 or not groups.shape[0] or columns not in (None, groups.shape[0]):
        wrong(groups, f"has shape {list(groups.shape)}: expected the group of each column"
                      + (f", [{columns}]" if columns is not None else ""))
    return checked_order(name, groups.file, groups.values, size)


def group_size(config: Fields, name: str, *, none: int | None = -1) -> int:
    """The number of columns that share a scale, from a field; 0 for whole rows, which the file writes as `none`."""
    size = config.need(name, int)
    if size == none:
        return 0
    if size < SMALLEST_GROUP or size % SMALLEST_GROUP or size > 1 << 20:
        raise config.error(name, f"is {size}: expected a multiple of {SMALLEST_GROUP}"
                                 + (f", or {none} for whole rows" if none is not None else ""))
    return size


def choice(config: Fields, name: str, allowed: dict[Any, Any] | tuple[Any, ...], default: Any = None) -> Any:
    """The value of a field. AllSparkError unless it is one of `allowed`."""
    value = config.values.get(name, default)
    if not isinstance(value, (str, int)) or value not in allowed or isinstance(value, bool):
        raise config.error(name, f"is {value!r}: allowed are {', '.join(map(repr, allowed))}")
    return value


def groups_of(columns: int, size: int) -> int:
    """The number of groups of `size` columns; 1 if size is 0."""
    return math.ceil(columns / size) if size else 1
