"""Models whose device memory is given back for a while: their weights wait in the host's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

from .polling import poll

if TYPE_CHECKING:
    from ..runtime.group import Group
    from .served_model import ServedModel

logger = logging.getLogger(__name__)


def _refused(message: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, message)


class MemoryMover:
    """Gives models' device memory back and takes it again, while the steps of others go on."""

    def __init__(self, loading: Lock, call: Callable[[Callable[[], Any]], Any], group: Callable[[], Group],
                 check_there: Callable[[AsModelConfig], None]):
        """loading: that of loads, of which there is one at a time. The others: as AdapterLoader has them."""
        self._loading, self._call, self._group, self._check_there = loading, call, group, check_there

    def move(self, model: ServedModel, loaded: bool) -> AsStatus:
        """AllSparkError if it cannot be done; the model is then as it was, on all ranks."""
        with self._loading:
            self._move(model, loaded)
        return AsStatus.ALLSPARK_SUCCESS

    def _move(self, model: ServedModel, loaded: bool) -> None:
        def begin() -> bool:
            self._check_there(model.config)
            if not model.config.on_gpus:
                raise _refused("unload_device_mem and load_device_mem are for models on GPUs: the memory of "
                               f"{model.name!r} is the host's, and release_model frees it")
            if loaded is model.loaded:
                return False
            if model.running:
                raise _refused(f"model {model.name!r} is running; call stop_model before unload_device_mem")
            self._group()  # no step is under way any more
            model.leave_memory()
            return True

        if not self._call(begin):
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
        def look() -> bool | None:
            self._check_there(model.config)
            return self._group().poll_move_memory() or None

        self._call(lambda: self._group().start_move_memory(model.name, loaded))
        poll(lambda: self._call(look))
        model.loaded = loaded
