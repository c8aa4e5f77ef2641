"""The record of installed models, from which an engine that replaces this one restores them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig, check_available
from allspark_client.engine import check_config
from allspark_client.errors import AllSparkError, AsStatus

from ..weights.files import MAX_STATE_BYTES, parse_json, read_file, replacing

if TYPE_CHECKING:
    from .served_model import ServedModel

logger = logging.getLogger(__name__)

#: The version of the file's form. Version 1 is a list; later ones are objects with their number as "version".
VERSION = 1
#: the end of the name of a file that could not be read
DAMAGED = ".damaged"


def _configuration_error(name: str, error: Exception) -> Exception:
    """The error for a model of the configuration. A ValueError if the user must change the entry or its files."""
    text = f"model {name!r} of the configuration cannot be loaded: {error}"
    transient = (AsStatus.ALLSPARK_MEMORY_ERROR, AsStatus.ALLSPARK_RUNTIME_ERROR)
    return (RuntimeError if isinstance(error, AllSparkError) and error.status in transient else ValueError)(text)


class StateFile:
    """A JSON list of entries of models. Any thread. `path` None: nothing is recorded."""

    def __init__(self, path: str | None):
        self._path = path
        self._lock = threading.Lock()

    def read(self) -> dict[str, dict[str, Any]] | None:
        """The entries by model name; None if there is no file that can be read: then what there is is kept aside.
        ValueError for a file that a newer version has written.
        """
        if self._path is None or not os.path.exists(self._path):
            return None
        try:
            recorded = parse_json(read_file(self._path, MAX_STATE_BYTES))
        except (AllSparkError, ValueError) as error:
            self._keep_aside(error)
            return None
        if isinstance(recorded, dict) and isinstance(version := recorded.get("version"), int) and version > VERSION:
            raise ValueError(f"state_file: {self._path} has version {version}, written by a newer allspark; this one "
                             f"reads version {VERSION}: start the newer one, or name another file. This one is kept")
        try:
            return {entry["config"]["model_name"]: entry for entry in recorded}
        except (TypeError, KeyError) as error:
            self._keep_aside(error)
            return None

    def _keep_aside(self, error: Exception) -> None:
        """Renames a file that cannot be read, so that it is not overwritten."""
        aside = next(name for i in itertools.count(1)
                     if not os.path.exists(name := f"{self._path}{DAMAGED}{f'-{i}' * (i > 1)}"))
        logger.error("the state file %s cannot be read: %s", self._path, error)
        try:
            os.rename(str(self._path), aside)
        except OSError as problem:
            raise ValueError(f"state_file: {self._path} is damaged ({error}) and cannot be renamed "
                             f"({problem.strerror}): repair it or move it away") from error

    @property
    def damage(self) -> str:
        """What is wrong with an earlier file that could not be read, as long as it is kept; "" if there is none."""
        aside = f"{self._path}{DAMAGED}"
        if self._path is None or not os.path.exists(aside):
            return ""
        return (f"the state file was damaged and is kept as {aside}: models that clients had installed may be missing. "
                "Install them again and remove it; or repair it, move it back and start again")

    def to_restore(self, configured: Collection[AsModelConfig], again: bool) -> dict[str, dict[str, Any]]:
        """The entries to restore, by model name; see `Engine.restore`. ValueError if two models of the configuration
        have the same name, or if a newer version has written the file.
        """
        recorded = self.read()
        if again and recorded is not None:
            return recorded
        entries = {c.model_name: {"config": c.to_dict(), "started": True, "configured": True} for c in configured}
        if len(entries) < len(configured):
            raise ValueError(f"two models of the configuration have one name: {[c.model_name for c in configured]}")
        return entries | {name: entry for name, entry in (recorded or {}).items()
                          if not entry.get("configured") and name not in entries}

    def write(self, entries: Callable[[], list[dict[str, Any]]]) -> None:
        """Writes the list that `entries()` returns. The file is replaced atomically."""
        if self._path is None:
            return
        with self._lock:
            recorded = entries()
            try:
                with replacing(self._path, sync=True) as file:
                    file.write(json.dumps(recorded, indent=1).encode())
            except AllSparkError as error:
                logger.error("the list of models is not saved, and the state file is as it was: %s", error.message)


class ModelRecord:
    """Records which models of an engine are installed, and who installed them. Any thread.

    `configured`: names of models that the configuration brought, not a client. `unrestored`: models that could not be
    restored, and why.
    """

    def __init__(self, path: str | None, models: Mapping[str, ServedModel],
                 unloaded: Callable[[], list[tuple[AsModelConfig, bool, list[str]]]]):
        """`unloaded()`: the config, whether it is started, and the adapters of each model that is loaded on demand and
        is not loaded.
        """
        self.configured: set[str] = set()
        self.unrestored: dict[str, str] = {}
        self._file = StateFile(path)
        self._models, self._unloaded = models, unloaded
        self._pending: dict[str, dict[str, Any]] = {}  # entries of the file whose models are not installed yet

    def save(self) -> None:
        """Writes the file."""
        self._file.write(lambda: [
            *(self._entry(model, model.running) for model in list(self._models.values())),
            *(self._entry_of(*entry, loaded=False) for entry in self._unloaded()),
            *self._pending.values(),
        ])

    def keep(self, model: ServedModel) -> None:
        """A started model is about to be loaded again; its entry stays in the file if that fails."""
        self._pending[model.name] = self._entry(model, True)

    def installed(self, name: str) -> bool:
        """Removes an installed or released model from the pending ones. Returns whether it was pending."""
        self.unrestored.pop(name, None)
        return self._pending.pop(name, None) is not None

    def restore(
        self, configured: Collection[AsModelConfig], again: bool, check: Callable[[AsModelConfig], None],
        install: Callable[[AsModelConfig, bool, list[str] | None, bool], None],
    ) -> None:
        """See Engine.restore. `install(config, start, adapters, load)` installs a model; `load`: one on demand is
        loaded, too, since a lost group had it.
        """
        entries = self._file.to_restore(configured, again)
        self.configured = {name for name, entry in entries.items() if entry.get("configured")}
        self._pending = dict(entries)  # kept until they are installed, so that a second crash loses none
        self.save()
        for name, entry in entries.items():
            try:
                config = AsModelConfig.from_dict(entry["config"])
                check_available(check_config(config))
                if name not in self.configured:
                    check(config)
                logger.info("loading %s", name)
                install(config, bool(entry.get("started")), entry.get("adapters"), again and bool(entry.get("loaded")))
            except (AllSparkError, ValueError, TypeError) as error:
                if name in self.configured and not again:
                    raise _configuration_error(name, error) from error
                logger.error("model %r cannot be restored: %s; this group is not healthy until the model is installed "
                             "or released", name, error)
                self.unrestored[name] = str(error)

    @property
    def failures(self) -> dict[str, str]:
        """What could not be restored, by model name, and why; the state file itself counts as one of them."""
        return self.unrestored | ({"state file": damage} if (damage := self._file.damage) else {})

    def _entry(self, model: ServedModel, started: bool) -> dict[str, Any]:
        return self._entry_of(model.config, started, [adapter.lora_name for adapter in model.adapters], loaded=True)

    def _entry_of(self, config: AsModelConfig, started: bool, adapters: list[str], loaded: bool) -> dict[str, Any]:
        return {"config": config.to_dict(), "started": started, "configured": config.model_name in self.configured,
                "adapters": adapters, "loaded": loaded}
