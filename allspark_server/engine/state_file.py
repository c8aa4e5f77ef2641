"""Where an engine records which models it has installed, so that one that takes its place can restore them."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

from ..weights.files import MAX_STATE_BYTES, parse_json, read_file

if TYPE_CHECKING:
    from .served_model import ServedModel

logger = logging.getLogger(__name__)


def state_entry(model: ServedModel, started: bool, configured: Collection[str]) -> dict[str, Any]:
    """A model in the file, with what adapters it has. `configured`: names that the configuration brought, not a
    client.
    """
    return {"config": model.config.to_dict(), "started": started, "configured": model.name in configured,
            "adapters": [adapter.given for adapter in model.adapters]}


def of_configuration(name: str, error: Exception) -> Exception:
    """The error of a model of the configuration; a ValueError if its entry, or what that names, must change."""
    text = f"model {name!r} of the configuration cannot be loaded: {error}"
    passing = (AsStatus.ALLSPARK_MEMORY_ERROR, AsStatus.ALLSPARK_RUNTIME_ERROR)
    return (RuntimeError if isinstance(error, AllSparkError) and error.status in passing else ValueError)(text)


class StateFile:
    """A JSON list of models' entries. Any thread. `path` None: nothing is recorded."""

    def __init__(self, path: str | None):
        self._path = path
        self._lock = threading.Lock()

    def read(self) -> dict[str, dict] | None:
        """The entries by model name; None if there is no file that can be read."""
        if self._path is None or not os.path.exists(self._path):
            return None
        try:
            recorded = parse_json(read_file(self._path, MAX_STATE_BYTES))
            return {entry["config"]["model_name"]: entry for entry in recorded}
        except (AllSparkError, ValueError, TypeError, KeyError) as error:
            logger.error("the state file %s cannot be read: %s; no models restored", self._path, error)
            return None

    def to_restore(self, configured: Collection[AsModelConfig], again: bool) -> dict[str, dict]:
        """The entries that count, by model name: see `Engine.restore`. ValueError if two of the configuration have one
        name.
        """
        recorded = self.read()
        if again and recorded is not None:
            return recorded
        entries = {c.model_name: {"config": c.to_dict(), "started": True, "configured": True} for c in configured}
        if len(entries) < len(configured):
            raise ValueError(f"two models of the configuration have one name: {[c.model_name for c in configured]}")
        return entries | {name: entry for name, entry in (recorded or {}).items()
                          if not entry.get("configured") and name not in entries}

    def write(self, entries: Callable[[], list[dict]]) -> None:
        """Records what `entries()` gives; a reader sees the old file or the new one, never half of one."""
        if self._path is None:
            return
        temporary = f"{self._path}.new"
        with self._lock:
            recorded = entries()
            try:
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump(recorded, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self._path)
            except OSError as error:
                logger.error("the state file %s cannot be written: %s", self._path, error)
