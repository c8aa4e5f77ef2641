"""LoRA adapters: those that a model has loaded, and how they are found and loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec, adapter_name, adapter_path

if TYPE_CHECKING:
    from ..runtime.group import Group
    from .engine_thread import EngineThread
    from .served_model import ServedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter. `index`: its number in step plans. `digest`: of everything that its results depend on."""

    name: str
    directory: str
    index: int
    digest: str

    @property
    def lora_name(self) -> str:
        """The `lora_name` argument that loads this adapter, for the state file."""
        return f"{self.name}={self.directory}"


def check_lora(name: Any) -> str:
    """A lora_name; TypeError or ValueError if it cannot be one."""
    if not isinstance(name, str):
        raise TypeError(f"lora_name must be a str, not {type(name).__name__}")
    if not adapter_name(name) or not adapter_path(name):
        raise ValueError(f"lora_name={name!r} names no adapter: expected NAME, PATH or NAME=PATH")
    return name


def adapter_directory(config: AsModelConfig, lora: str) -> str:
    """The absolute directory of an adapter: below the model's directory if it exists there, otherwise its path."""
    path, model = adapter_path(lora), Path(config.model_path)
    beside = (model if model.is_dir() else model.parent) / path
    return os.path.abspath(beside if not os.path.isabs(path) and beside.is_dir() else path)


class Adapters:
    """The adapters of one model, at most `most`. The engine's thread changes them; any thread reads them."""

    def __init__(self, model: str, most: int):
        self._model, self._most = model, most
        self._loaded: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._loaded.values()))

    def __contains__(self, adapter: Adapter) -> bool:
        """Whether exactly this adapter is loaded."""
        return self._loaded.get(adapter.name) is adapter

    def find(self, lora: str) -> Adapter:
        """The adapter of a lora_name. AllSparkError if it is not loaded."""
        found = self._loaded.get(adapter_name(lora))
        path = adapter_path(lora)
        if found is None or (path != found.name and os.path.isabs(path) and not _same(path, found.directory)):
            names = ", ".join(map(repr, self._loaded)) or "none"
            raise AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND,
                                f"lora_name={lora!r}: model {self._model!r} has no such adapter; loaded: {names}")
        return found

    def of_request(self, spec: RequestSpec) -> Adapter | None:
        """The adapter that a request names, whose digest is stored in `spec`; None if it names none. AllSparkError if
        it is not loaded, or differs from the one with which a resumed request began.
        """
        if not spec.config.lora_name:
            return None
        found = self.find(spec.config.lora_name)
        if spec.adapter and spec.adapter != found.digest:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_NOT_FOUND,
                                f"lora_name={spec.config.lora_name!r}: model {self._model!r} has another adapter of "
                                "this name than the one that the request was begun with", retryable=True)
        spec.adapter = found.digest
        return found

    def next_index(self, name: str) -> int:
        """The index for an adapter that is about to be loaded. AllSparkError if it cannot be loaded."""
        if name in self._loaded:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_ALREADY_LOADED,
                                f"model {self._model!r} has an adapter named {name!r}; unload it first, or load this "
                                "one as NAME=PATH")
        if len(self._loaded) >= self._most:
            raise AllSparkError(AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR,
                                f"model {self._model!r} has {len(self._loaded)} adapters: lora_max_num is {self._most}")
        used = {adapter.index for adapter in self._loaded.values()}
        return next(index for index in range(self._most) if index not in used)

    def add(self, adapter: Adapter) -> None:
        """Takes an adapter that is loaded."""
        self._loaded[adapter.name] = adapter

    def remove(self, adapter: Adapter) -> None:
        """Removes an adapter that is about to be freed."""
        del self._loaded[adapter.name]


def _same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


class AdapterLoader:
    """Loads and unloads adapters while steps run. One at a time: the caller holds the loader's lock."""

    def __init__(self, thread: EngineThread, group: Callable[[], Group],
                 check_not_released: Callable[[AsModelConfig], None]):
        """`group()`: the group, ready for calls that block until its steps have ended. `check_not_released(config)`:
        raises if the model of this config was released. Both run on the engine's thread.
        """
        self._thread, self._group, self._check_not_released = thread, group, check_not_released

    def load(self, model: ServedModel, lora: str) -> None:
        """AllSparkError if the adapter cannot be loaded."""
        directory, name = adapter_directory(model.config, lora), adapter_name(lora)

        def start() -> int:
            self._check_not_released(model.config)
            index = model.adapters.next_index(name)
            self._group().start_load_adapter(model.name, index, directory)
            return index

        def add(digest: str) -> None:
            self._check_not_released(model.config)
            model.adapters.add(Adapter(name, directory, index, digest))

        index = self._thread.call(start)
        try:
            digest = self._thread.poll(lambda: self._group().poll_load_adapter())
            self._thread.call(lambda: add(digest))
        except BaseException:
            try:
                self._thread.call(lambda: self._group().unload_adapter(model.name, index))
            except AllSparkError as error:  # the engine was closed meanwhile
                logger.debug("giving up the load of adapter %r: %s", name, error)
            raise
        logger.info("model %r has the adapter %r, of %s", model.name, name, directory)

    def unload(self, model: ServedModel, lora: str) -> None:
        """AllSparkError if it is not loaded, or in use."""
        def free() -> None:
            self._check_not_released(model.config)
            adapter = model.adapters.find(lora)
            model.remove_adapter(adapter)
            self._group().unload_adapter(model.name, adapter.index)

        self._thread.call(free)
