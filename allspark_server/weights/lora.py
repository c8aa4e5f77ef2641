"""LoRA adapters (Hu et al., 2021) as PEFT stores them: a directory with adapter_config.json and
adapter_model.safetensors.

A linear layer W of the network becomes W + scale * B A. Experts are layers of their own (PEFT's target_modules with
transformers 4), or a parameter has the weights of all of a layer's experts (PEFT's target_parameters with transformers
5): then A has the rows of expert 0's matrix, then those of expert 1's; B's columns are those of rank 0 of all experts,
then those of rank 1. Other features of PEFT are rejected by name, and so are
adapters whose two files disagree.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.adapters import ExpertRows, Target
from allspark_server.models.graph import Graph
from allspark_server.weights.files import open_regular, read_json, replacing
from allspark_server.weights.safetensors import NUMPY_TYPES, SafetensorsFile, StoredTensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# How models that see call the layers of their text part: transformers 5, and 4.
_OF_TEXT = (("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head"))
_ALL_LINEAR = "all-linear"
# Fields of the configuration that affect the result, and fields that only training uses.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
         "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights", "bias"}
_OF_TRAINING = {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
                "lora_dropout", "megatron_core", "runtime_config", "loftq_config", "eva_config", "lora_ga_config",
                "qalora_group_size", "ensure_weight_tying"}
# Initializations that do not change the network's own weights.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraPair:
    """The matrices of a layer, a [rank, in features] and b [out features, rank], and the factor of their product.

    rows: if set, the tensors have the matrices of all experts, and those of one are wanted.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    rank: int
    rows: ExpertRows | None = None

    def a_columns(self, begin: int, end: int) -> np.ndarray:
        """Columns of a, as stored."""
        first = self.rows.expert * self.rank if self.rows else 0
        return self.a.values[first:first + self.rank, begin:end]

    def b_rows(self, begin: int, end: int) -> np.ndarray:
        """Rows of b, as stored."""
        if self.rows is None:
            return self.b.values[begin:end]
        first, step = self.rows.first, self.rows.step
        own = self.b.values[first + step * begin:first + step * end:step, self.rows.expert::self.rows.experts]
        return np.ascontiguousarray(own)


class _Config:
    """adapter_config.json. AllSparkError names a field that is not served."""

    def __init__(self, path: Path):
        self.path, self.values = path, read_json(path)
        if (kind := self.values.get("peft_type")) != "LORA":
            raise self.error("peft_type", f"is {kind!r}: only 'LORA' is served")
        for name, value in self.values.items():
            if name not in _READ | _OF_TRAINING and value not in (None, False, [], {}, ""):
                raise self.error(name, f"is {value!r}, which is not served: merge the adapter into its model")
        if (bias := self.values.get("bias", "none")) != "none":
            raise self.error("bias", f"is {bias!r}: adapters that change biases are not served")
        if (begun := self.values.get("init_lora_weights", True)) not in _PLAIN_BEGINNINGS:
            raise self.error("init_lora_weights", f"is {begun!r}, which changes the model's own weights: convert the "
                                                  "adapter (PEFT: save_pretrained with path_initial_model_for_weight_"
                                                  "conversion)")
        self.rank, self.alpha = self._number("r", int, 8), self._number("lora_alpha", (int, float), 8)
        self.patterns = {name: self._pattern(name) for name in ("rank_pattern", "alpha_pattern")}
        self.parameters = self._names("target_parameters")
        if isinstance(self.parameters, str):
            raise self.error("target_parameters", f"is {self.parameters!r}: it must be a list of names")
        self.targets = self._names("target_modules", required=not self.parameters)
        self.excluded = self._names("exclude_modules")
        self.layers = self.values.get("layers_to_transform")
        if isinstance(self.layers, int):
            self.layers = [self.layers]

    def error(self, name: str, problem: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{self.path}: {name} {problem}")

    def _number(self, name: str, kind: Any, default: int) -> Any:
        value = self.values.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, f"is {value!r}: it must be a positive number")
        return value

    def _pattern(self, name: str) -> dict[str, Any]:
        found = self.values.get(name) or {}
        if not isinstance(found, dict) or not all(isinstance(v, (int, float)) and v > 0 for v in found.values()):
            raise self.error(name, f"is {found!r}: it must map patterns of names to positive numbers")
        return found

    def _names(self, name: str, required: bool = False) -> str | list[str]:
        found = self.values.get(name) or []
        if not isinstance(found, str) and not (isinstance(found, list) and all(isinstance(n, str) for n in found)):
            raise self.error(name, f"is {found!r}: it must be a pattern, or a list of names")
        if required and not found:
            raise self.error(name, "names no module")
        return found

    def targeted(self, module: str, is_head: bool) -> bool:
        """Whether the adapter changes a module, by PEFT's rules."""
        if isinstance(self.targets, str) and self.targets.lower() == _ALL_LINEAR:
            return not is_head and not (self.excluded and self._matches(self.excluded, module))
        if (self.excluded and self._matches(self.excluded, module)) or not self._matches(self.targets, module):
            return False
        if isinstance(self.targets, str) or not self.layers:
            return True
        names = self.values.get("layers_pattern") or []
        for name in [names] if isinstance(names, str) else names or [r"[^.]*"]:
            found = re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module)
            if found:
                return int(found[1]) in self.layers
        return False

    def targeted_parameter(self, name: str) -> bool:
        """Whether the adapter changes a parameter, by PEFT's rules."""
        return self._matches(self.parameters, name)

    def _matches(self, names: str | list[str], module: str) -> bool:
        if isinstance(names, list):
            return any(module == name or module.endswith(f".{name}") for name in names)
        try:
            return re.fullmatch(names, module) is not None
        except re.error as error:
            raise self.error("target_modules", f"is not a regular expression: {error}") from None

    def _by_pattern(self, name: str, module: str, default: Any) -> Any:
        for pattern, value in self.patterns[name].items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise self.error(name, f"has {pattern!r}, which is not a regular expression: {error}") from None
        return default

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """The rank and the factor for a module."""
        rank = self._by_pattern("rank_pattern", module, self.rank)
        alpha = self._by_pattern("alpha_pattern", module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.values.get("use_rslora") else rank)


class LoraAdapter:
    """An adapter for a network. `pairs`: its matrices by the index of the target. `digest`: of everything that its
    results depend on; adapters with equal digests are equal.
    """

    def __init__(self, directory: str | Path, targets: Sequence[Target], head: str, max_rank: int):
        """head: the module that computes logits.

        AllSparkError: ALLSPARK_LORA_NOT_FOUND if the directory holds no adapter, ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR
        if a rank is above max_rank, ALLSPARK_PARAM_ERROR if the adapter does not fit the network.
        """
        self.directory = Path(directory)
        for name in (CONFIG, TENSORS):
            if not (self.directory / name).is_file():
                raise AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND,
                                    f"{self.directory} holds no adapter: there is no {name}")
        self._config = _Config(self.directory / CONFIG)
        self._file = SafetensorsFile(self.directory / TENSORS)
        self.pairs: dict[int, LoraPair] = {}
        unread = set(self._file.names())
        for prefix, name in _OF_TEXT:
            if any(tensor.startswith(_PREFIX + prefix) for tensor in unread):
                targets = [_renamed(target, head, prefix, name) for target in targets]
                head = name
                break
        for number, target in enumerate(targets):
            if target.of_experts is not None:
                continue
            names = [f"{_PREFIX}{target.module}{suffix}" for suffix in (_A, _B)]
            wanted, found = self._is_wanted(target, head), unread & set(names)
            if len(found) == 1:
                raise self._error(f"{TENSORS} has {found.pop()!r} but not both of {names}")
            if wanted and not found:
                raise self._error(f"{TENSORS} has no {names[0]!r}, which {CONFIG} asks for")
            if found and not wanted:
                raise self._error(f"{TENSORS} has {names[0]!r}, which {CONFIG} does not ask for")
            if found:
                self.pairs[number] = self._pair(target, target.module, names, max_rank)
                unread -= found
        experts = {number: target for number, target in enumerate(targets) if target.of_experts is not None}
        self._check_parameters(targets)
        self._read_layers(experts, unread, max_rank)
        self._read_parameters(experts, unread, max_rank)
        if unread:
            raise self._error(f"{sorted(unread)[0]!r} belongs to no layer that adapters can change: these are linear "
                              "layers of the language model, except a head that is also the embedding")
        self.digest = self._digest()

    def _is_wanted(self, target: Target, head: str) -> bool:
        return (self._config.targeted(target.module, target.module == head)
                or self._config.targeted_parameter(f"{target.module}.weight"))

    def _check_parameters(self, targets: Sequence[Target]) -> None:
        known = {f"{target.module}.weight" for target in targets if target.of_experts is None}
        known |= {f"{name}.{target.of_experts.parameter}" for target in targets if target.of_experts is not None
                  for name in target.of_experts.names}
        for name in self._config.parameters:
            if not any(each == name or each.endswith(f".{name}") for each in known):
                raise self._config.error("target_parameters", f"is {self._config.parameters!r}: the model has no "
                                                              f"parameter {name!r} that adapters can change")

    def _read_layers(self, experts: Mapping[int, Target], unread: set[str], max_rank: int) -> None:
        """Reads the matrices of experts that are layers of their own; removes the tensors from `unread`.

        An adapter that was made with transformers 5 has none, although its target_modules match their names.
        """
        names_of = {number: (target.module, *target.aliases) for number, target in experts.items()}
        found = {number: module for number, modules in names_of.items() for module in modules
                 if unread & {f"{_PREFIX}{module}{_A}", f"{_PREFIX}{module}{_B}"}}
        for number, modules in names_of.items():
            module = found.get(number, modules[0])
            names = [f"{_PREFIX}{module}{suffix}" for suffix in (_A, _B)]
            wanted = bool(found) and self._config.targeted(module, False)
            if number not in found:
                if wanted:
                    raise self._error(f"{TENSORS} has no {names[0]!r}, which {CONFIG} asks for")
                continue
            if not set(names) <= unread:
                raise self._error(f"{TENSORS} has one, but not both of {names}")
            if not wanted:
                raise self._error(f"{TENSORS} has {names[0]!r}, which {CONFIG} does not ask for")
            self.pairs[number] = self._pair(experts[number], module, names, max_rank)
            unread.difference_update(names)

    def _read_parameters(self, experts: Mapping[int, Target], unread: set[str], max_rank: int) -> None:
        """Reads the matrices of parameters with all of a layer's experts; removes the tensors from `unread`.

        PEFT wraps the module once for each parameter, and only the shapes say which wrapper is whose.
        """
        layers: dict[tuple[str, ...], dict[str, list[int]]] = {}
        for number, target in experts.items():
            if (rows := target.of_experts) is not None:
                layers.setdefault(rows.names, {}).setdefault(rows.parameter, []).append(number)
        for names, parameters in layers.items():
            found = set()
            for module in (f"{name}{wrapped}" for name in names for wrapped in ("", ".base_layer")):
                tensors = [f"{_PREFIX}{module}{suffix}" for suffix in (_A, _B)]
                if not unread & set(tensors):
                    continue
                if not set(tensors) <= unread:
                    raise self._error(f"{TENSORS} has one, but not both of {tensors}")
                parameter = self._parameter_of(module, tensors, names, parameters, experts, max_rank)
                if parameter in found:
                    raise self._error(f"{TENSORS} has two pairs of matrices for {module!r}'s {parameter}")
                found.add(parameter)
                unread.difference_update(tensors)
            for parameter in parameters:
                if parameter not in found and any(self._config.targeted_parameter(f"{n}.{parameter}") for n in names):
                    raise self._error(f"{TENSORS} has no matrices for {names[0]}.{parameter}, which {CONFIG} asks for")

    def _parameter_of(self, module: str, tensors: list[str], names: tuple[str, ...],
                      parameters: Mapping[str, list[int]], experts: Mapping[int, Target], max_rank: int) -> str:
        """Finds the parameter that the tensors fit, sets its pairs and returns its name."""
        a, b = (self._file.get(name) for name in tensors)
        expected = []
        for parameter, numbers in parameters.items():
            wanted = next((f"{n}.{parameter}" for n in names if self._config.targeted_parameter(f"{n}.{parameter}")),
                          None)
            if wanted is None:
                continue
            rank, scale = self._config.rank_and_scale(wanted)
            self._check_rank(rank, wanted, max_rank)
            target = experts[numbers[0]]
            rows = target.of_experts
            assert rows is not None
            shapes = (rank * rows.experts, target.weight.columns), (rows.rows, rank * rows.experts)
            if (a.shape, b.shape) == shapes and {a.dtype, b.dtype} <= set(NUMPY_TYPES):
                self.pairs |= {number: LoraPair(a, b, scale, rank, experts[number].of_experts) for number in numbers}
                return parameter
            expected.append(f"{list(shapes[0])} and {list(shapes[1])} for {wanted}")
        if not expected:
            raise self._error(f"{TENSORS} has {tensors[0]!r}, but {CONFIG} has no parameter of {module!r} in its "
                              "target_parameters")
        raise self._error(f"tensors {a.name!r} and {b.name!r} have types {a.dtype} and {b.dtype} and shapes "
                          f"{list(a.shape)} and {list(b.shape)}: expected {', or '.join(expected)}, of "
                          f"{', '.join(NUMPY_TYPES)}")

    def _check_rank(self, rank: int, module: str, max_rank: int) -> None:
        if rank > max_rank:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR,
                                f"{self.directory} has rank {rank} for {module!r}, but lora_max_rank is {max_rank}")

    def _pair(self, target: Target, module: str, names: list[str], max_rank: int) -> LoraPair:
        wanted = module
        if self._config.targeted_parameter(f"{module}.weight"):
            wanted = f"{module}.weight"
        rank, scale = self._config.rank_and_scale(wanted)
        self._check_rank(rank, module, max_rank)
        shapes = (rank, target.weight.columns), (target.rows, rank)
        tensors = [self._file.get(name) for name in names]
        for tensor, shape in zip(tensors, shapes):
            if tensor.shape != shape or tensor.dtype not in NUMPY_TYPES:
                raise self._error(f"tensor {tensor.name!r} has type {tensor.dtype} and shape {list(tensor.shape)}: "
                                  f"expected {list(shape)} of {', '.join(NUMPY_TYPES)}")
        return LoraPair(tensors[0], tensors[1], scale, rank)

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        seen = set()    # a parameter of all experts has the pairs of many targets
        for pair in self.pairs.values():
            if pair.a.name in seen:
                continue
            seen.add(pair.a.name)
            digest.update(f"{pair.scale!r} ".encode())
            for tensor in (pair.a, pair.b):
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode())
                digest.update(self._file.raw(tensor.name))
        return digest.hexdigest()

    def copy_to(self, directory: Path) -> None:
        """Copies the adapter's files into a directory; creates it if needed."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, TENSORS):
            target = directory / name
            if not (target.exists() and os.path.samefile(target, self.directory / name)):
                with open_regular(self.directory / name) as source, replacing(target) as file:
                    shutil.copyfileobj(source, file)

    def _error(self, problem: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"the adapter in {self.directory} is not served: {problem}")


def _renamed(target: Target, head: str, prefix: str, name: str) -> Target:
    """The target with the names that a model that sees has for it: `prefix` before layers, and `name` for the head."""
    def of(module: str) -> str:
        return name if module == head else prefix + module.removeprefix("model.")

    rows = target.of_experts
    return replace(target, module=of(target.module), aliases=tuple(map(of, target.aliases)),
                   of_experts=rows and replace(rows, names=tuple(map(of, rows.names))))


def open_adapter(directory: str | Path, graph: Graph, targets: Sequence[Target], max_rank: int) -> LoraAdapter:
    """Opens an adapter for a network. AllSparkError as in LoraAdapter."""
    head = next(op.weights[0] for op in graph.ops if "logits" in op.outputs)
    return LoraAdapter(directory, targets, head.removesuffix(".weight"), max_rank)
