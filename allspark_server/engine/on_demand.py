"""Models that are loaded when a request names them, and unloaded when they are idle or when others need their memory.

A thread of its own loads one model after the other. It makes room by unloading the models that were not used for the
longest time: idle ones at once; one with live requests takes no new ones until these have ended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus, NotLoaded, closed_engine
from allspark_client.types import ModelState

if TYPE_CHECKING:
    from .engine_thread import EngineThread
    from .model_loader import ModelLoader
    from .served_model import ServedModel

logger = logging.getLogger(__name__)

#: how long a load waits for models in use to become idle, s
ROOM_SECONDS = 300.0
#: how long a model stays at least, so that the requests that waited for it arrive, s
STAY_SECONDS = 1.0
_LOOK_SECONDS, _IDLE_LOOK_SECONDS = 0.05, 1.0


class _Listed:
    """A model that is loaded on demand. `loaded` is its result while it is being loaded. `entering`: calls of `using`
    that have not ended. `leaving`: it takes no new requests because its memory is needed.
    """

    def __init__(self, config: AsModelConfig, started: bool, adapters: list[str]):
        self.config, self.started, self.adapters = config, started, adapters
        self.loaded: Future[None] | None = None
        self.part = 0.0
        self.entering = 0
        self.leaving = False
        self.used = time.monotonic()
        self.stays_until = 0.0      # not unloaded for others before, on the monotonic clock


class OnDemandModels:
    """The models whose config has on_demand. Any thread may call the methods.

    Of these models, `models` has those that are loaded.
    """

    def __init__(self, thread: EngineThread, loader: ModelLoader, models: Mapping[str, ServedModel],
                 unload: Callable[[str], object], save: Callable[[], None], part: Callable[[], float]):
        """`unload(name)`: frees a loaded model, on the engine's thread. `save()`: the list of models has changed.
        `part()`: how much of the current load is done, 0…1.
        """
        self._engine_thread, self._loader, self._models = thread, loader, models
        self._unload, self._save, self._part = unload, save, part
        #: the models by name; read it to ask whether a model is one of them
        self.listed: dict[str, _Listed] = {}
        self._lock = threading.Lock()
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None    # from the first model on

    # --- the list ---

    def add(self, config: AsModelConfig, started: bool, adapters: list[str] | None) -> None:
        """Adds a model, which stays unloaded. Raises AllSparkError if one of this name is installed."""
        name = config.model_name
        with self._lock:
            if name in self.listed or name in self._models:
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                    f"a model named {name!r} is installed already; release it first")
            self.listed[name] = _Listed(config, started, list(config.lora_names if adapters is None else adapters))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="allspark-on-demand", daemon=True)
                self._thread.start()

    def config(self, name: str) -> AsModelConfig:
        """The config of a model of the list."""
        return self.listed[name].config

    def start(self, name: str) -> None:
        """Requests may load the model."""
        self.listed[name].started = True

    def stop(self, name: str) -> None:
        """Requests may not load the model any more."""
        with self._lock:
            listed = self.listed[name]
            listed.started = False
            self._fail(listed, self._not_started(name))

    def remove(self, name: str) -> None:
        """Takes a model, which is not loaded, off the list."""
        with self._lock:
            listed = self.listed.pop(name)
            self._fail(listed, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                             f"model {name!r} was released while it was loaded"))

    def states(self) -> list[ModelState]:
        """The states of the models that are not loaded."""
        with self._lock:
            listed = [(name, entry) for name, entry in self.listed.items() if name not in self._models]
        return [ModelState(name, False, "", aliases=list(entry.config.aliases), on_demand=entry.started,
                           installed_on_demand=True) for name, entry in listed]

    def entries(self) -> list[tuple[AsModelConfig, bool, list[str]]]:
        """The config, whether it is started, and the adapters of each model that is not loaded."""
        with self._lock:
            return [(entry.config, entry.started, entry.adapters) for name, entry in self.listed.items()
                    if name not in self._models]

    # --- loads ---

    def load(self, name: str) -> Future[None]:
        """Asks for a model; the result is there once it is loaded. Raises AllSparkError if it is not started."""
        with self._lock:
            listed = self.listed[name]
            if not listed.started:
                raise self._not_started(name)
            if self._closed.is_set():
                raise closed_engine()
            listed.used = time.monotonic()
            if listed.loaded is None:
                listed.loaded = Future()
                if name in self._models and not listed.leaving:
                    future, listed.loaded = listed.loaded, None
                    future.set_result(None)
                    return future
                listed.part = 0.0
                self._wanted.put(name)
            return listed.loaded

    def part(self, name: str) -> float:
        """How much of a model is loaded, 0…1."""
        listed = self.listed.get(name)
        if listed is None or listed.loaded is None:
            return 1.0
        if (loading := self._loader.loading) is not None and loading.model_name == name:
            listed.part = max(listed.part, self._part())
        return listed.part

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """A context in which the model stays loaded. Raises NotLoaded if it is not."""
        with self._lock:
            listed = self.listed[name]
            if name not in self._models or listed.leaving:
                raise NotLoaded(name)
            listed.entering += 1
            listed.used = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                listed.entering -= 1

    def unload(self, name: str) -> None:
        """Unloads a model that nothing uses; the next request that names it loads it again. Raises AllSparkError."""
        if not self._engine_thread.call(lambda: self._unload_idle(name)):
            live = len(self._models[name].live)
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"model {name!r} has {live} live requests, so it is not unloaded; stop_model ends them",
                                retryable=True)
        self._save()

    def close(self) -> None:
        """Ends the thread; loads that wait fail."""
        self._closed.set()
        self._wanted.put(None)
        with self._lock:
            for listed in self.listed.values():
                self._fail(listed, closed_engine())

    # --- its thread ---

    def _run(self) -> None:
        while not self._closed.is_set():
            timed = any(entry.config.idle_timeout for name, entry in list(self.listed.items()) if name in self._models)
            try:
                name = self._wanted.get(timeout=_IDLE_LOOK_SECONDS if timed else None)
            except queue.Empty:
                self._unload_forgotten()
                continue
            listed = self.listed.get(name) if name is not None else None
            if listed is not None:
                self._load(listed)

    def _load(self, listed: _Listed) -> None:
        config, error = listed.config, None
        try:
            self._make_loaded(listed)
        except (AllSparkError, ValueError, TypeError) as failure:
            logger.error("model %r cannot be loaded: %s", config.model_name, failure)
            error = failure
        except BaseException as failure:
            logger.exception("loading model %r failed", config.model_name)
            error = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"{type(failure).__name__}: {failure}")
        with self._lock:
            future, listed.loaded = listed.loaded, None
            listed.used = time.monotonic()
            listed.stays_until = listed.used + STAY_SECONDS
        if error is None:
            self._save()
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _make_loaded(self, listed: _Listed) -> None:
        """Loads a model, and makes room for it if needed. Raises AllSparkError."""
        name, deadline, began = listed.config.model_name, time.monotonic() + ROOM_SECONDS, time.monotonic()
        if name in self._models:    # it was to leave, and did not
            return
        while True:
            try:
                self._loader.load(listed.config, listed.started, listed.adapters)
                logger.info("model %r is loaded on demand in %.2f s", name, time.monotonic() - began)
                return
            except AllSparkError as error:
                if error.status is not AsStatus.ALLSPARK_MEMORY_ERROR or not self._make_room(name, deadline):
                    raise

    def _make_room(self, wanted: str, deadline: float) -> bool:
        """Unloads another model of the list; returns whether there was one."""
        with self._lock:
            others = sorted((entry.used, name) for name, entry in self.listed.items()
                            if name != wanted and name in self._models)
            stay = max((entry.stays_until for name, entry in self.listed.items() if name in self._models), default=0.0)
        self._closed.wait(max(0.0, stay - time.monotonic()))
        for _, name in others:
            if self._engine_thread.call(functools.partial(self._unload_idle, name)):
                logger.info("model %r is unloaded to make room for %r", name, wanted)
                return True
        if not others:
            return False
        name = others[0][1]
        logger.info("model %r takes no new requests until those that run have ended, to make room for %r", name, wanted)
        with self._lock:
            self.listed[name].leaving = True
        return self._wait_idle(name, deadline)

    def _wait_idle(self, name: str, deadline: float) -> bool:
        """Waits until a model has no requests, and unloads it; False if it is in use at `deadline`."""
        try:
            while not self._engine_thread.call(lambda: self._unload_idle(name)):
                if time.monotonic() > deadline or self._closed.wait(_LOOK_SECONDS):
                    return False
            return True
        finally:
            self._stay(name)

    def _unload_forgotten(self) -> None:
        """Unloads the models that were not used for their idle_timeout."""
        now = time.monotonic()
        for name, entry in list(self.listed.items()):
            if entry.config.idle_timeout and name in self._models and now - entry.used > entry.config.idle_timeout:
                if self._engine_thread.call(functools.partial(self._unload_idle, name, now)):
                    logger.info("model %r is unloaded: it was not used for %g s", name, entry.config.idle_timeout)
                    self._save()

    # --- the engine's thread ---

    def _unload_idle(self, name: str, now: float | None = None) -> bool:
        """Unloads a loaded model unless it is in use, or was until less than its idle_timeout before `now`. Returns
        whether it is unloaded.
        """
        model, listed = self._models.get(name), self.listed[name]
        if model is None:
            return True
        with self._lock:    # `using` counts under it
            listed.used = max(listed.used, model.last_used)
            if listed.entering or model.live or model.queue.incoming:
                return False
            if now is not None and now - listed.used <= listed.config.idle_timeout:
                return False
            listed.adapters = [adapter.lora_name for adapter in model.adapters]
            listed.leaving = True
        self._unload(name)
        self._stay(name)
        return True

    # --- any thread ---

    def _stay(self, name: str) -> None:
        with self._lock:
            if (listed := self.listed.get(name)) is not None:
                listed.leaving = False

    def _fail(self, listed: _Listed, error: AllSparkError) -> None:
        """Fails the load that waits. The caller holds the lock."""
        future, listed.loaded = listed.loaded, None
        if future is not None and not future.done():
            future.set_exception(error)

    @staticmethod
    def _not_started(name: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {name!r} is not running; call start_model "
                                                                   "first")
