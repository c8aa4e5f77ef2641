"""LoRA adapters (Hu et al., 2021) as PEFT stores them: a directory with adapter_config.json and
adapter_model.safetensors.

A linear layer W of the network becomes W + scale * B A. Other features of PEFT are rejected by name, and so are
adapters whose two files disagree.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.adapters import Target
from allspark_server.models.graph import Graph
from allspark_server.weights.files import open_regular, read_json, replacing
from allspark_server.weights.safetensors import NUMPY_TYPES, SafetensorsFile, StoredTensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ALL_LINEAR = "all-linear"
# Fields of the configuration that affect the result, and fields that only training uses.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
         "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights", "bias"}
_OF_TRAINING = {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
                "lora_dropout", "megatron_core", "runtime_config", "loftq_config", "eva_config", "lora_ga_config",
                "qalora_group_size", "ensure_weight_tying"}
# Initializations that do not change the network's own weights.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraPair:
    """The matrices of a layer, a [rank, in features] and b [out features, rank], and the factor of their product."""

    a: StoredTensor
    b: StoredTensor
    scale: float


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
        self.targets = self._names("target_modules", required=True)
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
        for number, target in enumerate(targets):
            names = [f"{_PREFIX}{target.module}{suffix}" for suffix in (_A, _B)]
            wanted, found = self._config.targeted(target.module, target.module == head), unread & set(names)
            if len(found) == 1:
                raise self._error(f"{TENSORS} has {found.pop()!r} but not both of {names}")
            if wanted and not found:
                raise self._error(f"{TENSORS} has no {names[0]!r}, which {CONFIG} asks for")
            if found and not wanted:
                raise self._error(f"{TENSORS} has {names[0]!r}, which {CONFIG} does not ask for")
            if found:
                self.pairs[number] = self._pair(target, names, max_rank)
                unread -= found
        if unread:
            raise self._error(f"{sorted(unread)[0]!r} belongs to no layer that adapters can change: these are linear "
                              "layers, except experts and a head that is also the embedding")
        self.digest = self._digest()

    def _pair(self, target: Target, names: list[str], max_rank: int) -> LoraPair:
        rank, scale = self._config.rank_and_scale(target.module)
        if rank > max_rank:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR,
                                f"{self.directory} has rank {rank} for {target.module!r}, but lora_max_rank is "
                                f"{max_rank}")
        shapes = (rank, target.weight.columns), (target.rows, rank)
        tensors = [self._file.get(name) for name in names]
        for tensor, shape in zip(tensors, shapes):
            if tensor.shape != shape or tensor.dtype not in NUMPY_TYPES:
                raise self._error(f"tensor {tensor.name!r} has type {tensor.dtype} and shape {list(tensor.shape)}: "
                                  f"expected {list(shape)} of {', '.join(NUMPY_TYPES)}")
        return LoraPair(tensors[0], tensors[1], scale)

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for pair in self.pairs.values():
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


def open_adapter(directory: str | Path, graph: Graph, targets: Sequence[Target], max_rank: int) -> LoraAdapter:
    """Opens an adapter for a network. AllSparkError as in LoraAdapter."""
    head = next(op.weights[0] for op in graph.ops if "logits" in op.outputs)
    return LoraAdapter(directory, targets, head.removesuffix(".weight"), max_rank)
