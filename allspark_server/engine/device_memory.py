"""Unloading and loading of models' device memory; the weights stay in host memory meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

if TYPE_CHECKING:
    from ..runtime.group import Group
    from .engine_thread import EngineThread
    from .served_model import ServedModel

logger = logging.getLogger(__name__)


def _refused(message: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, message)


class MemoryMover:
    """Unloads and loads models' device memory while other models run."""

    def __init__(self, lock: Lock, thread: EngineThread, group: Callable[[], Group],
                 check_not_released: Callable[[AsModelConfig], None]):
        """`lock`: the loader's lock. The other arguments are those of AdapterLoader."""
        self._lock, self._thread, self._group, self._check_not_released = lock, thread, group, check_not_released

    def move(self, model: ServedModel, loaded: bool) -> AsStatus:
        """AllSparkError if it fails; the model is then unchanged on all ranks."""
        with self._lock:
            self._move(model, loaded)
        return AsStatus.ALLSPARK_SUCCESS

    def _move(self, model: ServedModel, loaded: bool) -> None:
        def begin() -> bool:
            self._check_not_released(model.config)
            if not model.config.on_gpus:
                raise _refused("unload_device_mem and load_device_mem are for models on GPUs: the memory of "
                               f"{model.name!r} is in host memory; release_model frees it")
            if loaded is model.loaded:
                return False
            if model.running:
                raise _refused(f"model {model.name!r} is running; call stop_model before unload_device_mem")
            self._group()  # collects steps that wait for masks
            model.leave_memory()
            return True

        if not self._thread.call(begin):
            return
        try:
            self._move_on_ranks(model, loaded)
        except AllSparkError:
            try:
                self._move_on_ranks(model, not loaded)
            except AllSparkError as error:
                logger.error("the device memory of model %r stays unloaded in part: %s", model.name, error)
            raise

    def _move_on_ranks(self, model: ServedModel, loaded: bool) -> None:
        def poll_memory() -> bool | None:
            self._check_not_released(model.config)
            return self._group().poll_move_memory() or None

        self._thread.call(lambda: self._group().start_move_memory(model.name, loaded))
        self._thread.poll(poll_memory)
        model.loaded = loaded
