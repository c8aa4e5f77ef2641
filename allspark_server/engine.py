"""The engine: models, requests, and the one thread that computes.

Calls of any thread become commands in a queue; the engine's thread takes them between steps. It alone touches
schedulers and the group, so none of that needs locks; with nothing to do it sleeps in the queue.
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import itertools
import json
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Optional

from allspark_client.config import AsModelConfig, check_available
from allspark_client.engine import AbstractEngine, check_config, check_handle
from allspark_client.errors import (
    AllSparkError,
    AsStatus,
    closed_engine,
    forked_engine,
    illegal_handle,
    not_available,
    unknown_model,
)
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_client.types import (
    AsEngineStat,
    AsFileInfo,
    GeneratedElements,
    GenerateRequestStatus,
    ModelInfo,
    ModelState,
)
from allspark_client.version import __version__

from .request import Request, Sink, build_request
from .runtime.digest import results_digest
from .runtime.group import Group, LocalGroup
from .served_model import ServedModel

logger = logging.getLogger(__name__)

_SUCCESS = AsStatus.ALLSPARK_SUCCESS
BETWEEN_SLICES = 0.03  # seconds for steps to run between slices of measuring (runtime/profile.py)


class QueueSink:
    """Feeds a ResultQueue."""

    def __init__(self, results: ResultQueue):
        self._results = results

    def on_elements(self, handle: int, elements: GeneratedElements, text: Optional[str]) -> None:
        self._results.put(elements)

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        self._results.set_status(status)

    def on_finish(
        self, handle: int, status: GenerateRequestStatus, error: Optional[AllSparkError], stat: dict[str, float]
    ) -> None:
        self._results.update_stat(stat)
        self._results.finish(status, error)


class Engine(AbstractEngine):
    """Computes in this process, with the ranks of `group`."""

    def __init__(self, *, group: Optional[Group] = None, state_file: Optional[str] = None):
        """`group` None: this process alone, without MPI. `state_file`: where the installed models are recorded, so that
        an engine that takes this one's place can `restore` them."""
        self._owner = os.getpid()
        self._group: Group = LocalGroup() if group is None else group
        self._state_file = state_file
        self._unrestored: dict[str, dict] = {}  # entries of the state file whose models are not back yet
        self._models: dict[str, ServedModel] = {}
        self._requests: dict[int, tuple[ServedModel, Request]] = {}
        self._handles = itertools.count(1)
        self._listeners: list[Callable[[], None]] = []
        self._commands: queue.SimpleQueue[Optional[Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _requests, and _closed against commands that would never be taken
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="allspark-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # --- models ---

    def install_model(self, config: AsModelConfig) -> AsStatus:
        config = copy.deepcopy(check_config(config))
        check_available(config)
        self._call(lambda: self._install(config))
        return _SUCCESS

    def start_model(self, model_name: str) -> AsStatus:
        self._call(lambda: self._start_model(model_name))
        return _SUCCESS

    def stop_model(self, model_name: str) -> AsStatus:
        self._call(lambda: self._stop_model(model_name))
        return _SUCCESS

    def release_model(self, model_name: str) -> AsStatus:
        self._call(lambda: self._release_model(model_name))
        return _SUCCESS

    def list_models(self) -> list[ModelState]:
        return [
            ModelState(
                model.name,
                model.running and model.failure is None,
                model.fingerprint,
                model.scheduler.waiting + model.scheduler.running,
            )
            for model in list(self._models.values())
        ]

    def restore(self) -> list[str]:
        """Installs, and starts, the models that `state_file` records; returns the names of those now installed.

        One that cannot be installed now is logged and skipped, and stays in the file.
        """
        if self._state_file is None or not os.path.exists(self._state_file):
            return []
        try:
            with open(self._state_file, encoding="utf-8") as file:
                entries = {entry["config"]["model_name"]: entry for entry in json.load(file)}
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.error("the state file %s cannot be read: %s; no models restored", self._state_file, error)
            return []
        self._unrestored = dict(entries)  # they stay in the file until they are back, lest a second crash lose some
        for name, entry in entries.items():
            try:
                config = AsModelConfig.from_dict(entry["config"])
                check_available(check_config(config))
                self._call(functools.partial(self._install, config, bool(entry.get("started"))))
            except (AllSparkError, ValueError, TypeError) as error:
                logger.error("model %r, recorded in %s, cannot be restored: %s", name, self._state_file, error)
        return list(self._models)

    # --- requests ---

    def submit(self, spec: RequestSpec, sink: Sink) -> int:
        """Queues a request and returns its handle. Raises ValueError, TypeError or AllSparkError if it is refused."""
        model = self._model(spec.model)
        model.check_running()
        request = build_request(next(self._handles), spec, sink, model.info, model.tokenizer)
        model.reserve(len(request.sequences))
        try:
            with self._lock:
                self._post(functools.partial(model.enqueue, request))
                self._requests[request.handle] = (model, request)
        except AllSparkError:
            model.unreserve(len(request.sequences))
            raise
        return request.handle

    def cancel(self, handle: int) -> None:
        """Asks for the request's end as GenerateInterrupted, and returns at once. Harmless after the end."""
        model, request = self._request(handle)
        with self._lock:
            self._post(functools.partial(model.end, request, GenerateRequestStatus.GenerateInterrupted))

    def release(self, handle: int) -> None:
        """Forgets the handle; a live request is cancelled."""
        model, request = self._request(handle)
        if not request.done.is_set():
            self.cancel(handle)
        with self._lock:
            self._requests.pop(handle, None)

    def add_flush_listener(self, listener: Callable[[], None]) -> None:
        """`listener()` is called on the engine's thread after each step, and after commands that end requests."""
        self._listeners.append(listener)

    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        results = ResultQueue()
        return _SUCCESS, self.submit(spec, QueueSink(results)), results

    def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        model, request = self._request(check_handle(request_handle), model_name)
        if not request.done.is_set():
            self._call(lambda: model.end(request, GenerateRequestStatus.GenerateInterrupted))
        return _SUCCESS

    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        self.stop_request(model_name, request_handle)
        with self._lock:
            self._requests.pop(request_handle, None)
        return _SUCCESS

    def sync_request(self, model_name: str, request_handle: Optional[int] = None) -> AsStatus:
        if request_handle is not None:
            self._request(check_handle(request_handle), model_name)[1].done.wait()
            return _SUCCESS
        model = self._model(model_name)
        with self._lock:
            requests = [request for owner, request in self._requests.values() if owner is model]
        for request in requests:
            request.done.wait()
        return _SUCCESS

    # --- information ---

    def fingerprint(self, name: str) -> str:
        """Equal for two engines only if a request gives the same bytes on both."""
        return self._model(name).fingerprint

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        return self._model(model_name).stat()

    def get_model_info(self, model_name: str) -> ModelInfo:
        return copy.deepcopy(self._model(model_name).info)

    def get_file_information(self, as_graph_path: str | os.PathLike, as_param_path: str | os.PathLike) -> AsFileInfo:
        from .weights.asgraph import VERSION, read_graph
        from .weights.checkpoint import ParamSource

        read_graph(Path(as_graph_path))  # raises unless it is of the one version that this build knows
        params = ParamSource(Path(as_param_path))
        return AsFileInfo(f"asgraph-{VERSION}", params.file.metadata["format"], __version__)

    def get_op_profiling_info(self, model_name: str) -> str:
        # The first call of a process measures the machine's ceilings, in slices between the steps of running requests.
        while not self._call(lambda: self._group.measure_ceilings(self._model(model_name).name)):
            time.sleep(BETWEEN_SLICES)
        return self._call(lambda: self._group.profile(self._model(model_name).name)).table()

    def get_rank_id(self) -> int:
        return 0

    def get_rank_nums(self) -> int:
        return self._group.size

    def is_allspark_work_as_service(self) -> bool:
        return False

    def get_version_full(self) -> str:
        return __version__

    # --- what is not built yet ---

    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        raise not_available("LoRA")

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        raise not_available("LoRA")

    def unload_device_mem(self, model_name: str) -> AsStatus:
        raise not_available("unload_device_mem")

    def load_device_mem(self, model_name: str) -> AsStatus:
        raise not_available("load_device_mem")

    # --- end ---

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child: the engine's thread is the parent's
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    # --- any thread ---

    def _model(self, name: str) -> ServedModel:
        if not isinstance(name, str):
            raise TypeError(f"model_name must be a str, not {type(name).__name__}")
        if self._closed:
            raise closed_engine()
        model = self._models.get(name)
        if model is None:
            raise unknown_model(name, list(self._models))
        return model

    def _request(self, handle: int, name: Optional[str] = None) -> tuple[ServedModel, Request]:
        if name is not None:
            self._model(name)
        with self._lock:
            entry = self._requests.get(handle)
        if entry is None or (name is not None and entry[0].name != name):
            raise illegal_handle(name or "any", handle)
        return entry

    def _post(self, command: Callable[[], Any]) -> None:
        """Puts a command into the queue; the caller holds the lock."""
        if os.getpid() != self._owner:
            raise forked_engine()
        if self._closed:
            raise closed_engine()
        self._commands.put(command)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the engine's thread and waits for what it returns or raises."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # the caller gets it, whatever it is
                future.set_exception(error)

        with self._lock:
            self._post(command)
        return future.result()

    # --- the engine's thread ---

    def _run(self) -> None:
        while True:
            stepping = [model for model in self._models.values() if model.has_work]
            if not stepping or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    break
                self._execute(command)
                if not self._commands.empty():
                    continue  # all that is known goes into the next step
                stepping = [model for model in self._models.values() if model.has_work]
            for model in stepping:
                self._step(model)
            self._flush()
        self._shut_down()

    def _execute(self, command: Callable[[], Any]) -> None:
        try:
            command()
        except Exception:  # the thread must live; commands with a caller hand their errors to it
            logger.exception("a command failed in the engine's thread")

    def _step(self, model: ServedModel) -> None:
        try:
            model.step(self._group)
        except Exception as error:  # a lost rank, or a defect: this model's cache is no longer what we think it is
            logger.exception("a step of model %r failed", model.name)
            model.failure = str(error) or type(error).__name__
            message = f"a step of model {model.name!r} failed: {model.failure}"
            model.end_all(GenerateRequestStatus.InternalError, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, message))

    def _flush(self) -> None:
        for listener in self._listeners:
            try:
                listener()
            except Exception:  # a client's trouble is not the engine's
                logger.exception("a flush listener failed")

    def _shut_down(self) -> None:
        for model in self._models.values():
            model.running = False
            model.end_all(GenerateRequestStatus.GenerateInterrupted)
        self._flush()
        try:
            self._group.close()
        except RuntimeError as error:
            logger.warning("closing the group: %s", error)

    def _install(self, config: AsModelConfig, start: bool = False) -> None:
        name = config.model_name
        if name in self._models:
            raise AllSparkError(
                AsStatus.ALLSPARK_PARAM_ERROR, f"a model named {name!r} is installed already; release it first"
            )
        if config.device_ids not in ([0], list(range(self._group.size))):  # [0] is what nobody chose
            logger.warning(
                "compute_unit=%r of model %r: the group's %d rank(s) decide where it runs, not these ids",
                config.compute_unit,
                name,
                self._group.size,
            )
        info = self._group.load(config)
        try:
            tokenizer = None
            if info.tokenizer_dir:
                from .text import Tokenizer  # `tokenizers` and jinja2 are not needed to serve ids

                tokenizer = Tokenizer.from_dir(info.tokenizer_dir)
            self._models[name] = ServedModel(config, info, tokenizer, _fingerprint(info))
        except Exception:
            self._group.unload(name)
            raise
        self._models[name].running = start
        self._unrestored.pop(name, None)
        self._save()

    def _start_model(self, name: str) -> None:
        model = self._model(name)
        if model.failure is not None:
            model.check_running()
        model.running = True
        self._save()

    def _stop_model(self, name: str) -> None:
        model = self._model(name)
        model.running = False
        model.end_all(GenerateRequestStatus.GenerateInterrupted)
        self._save()

    def _release_model(self, name: str) -> None:
        model = self._model(name)
        model.running = False
        model.end_all(GenerateRequestStatus.GenerateInterrupted)
        del self._models[name]
        with self._lock:
            self._requests = {h: entry for h, entry in self._requests.items() if entry[0] is not model}
        self._save()
        self._group.unload(name)

    def _save(self) -> None:
        """Records the installed models; a reader sees the old file or the new one, never half of one."""
        if self._state_file is None:
            return
        entries = [{"config": m.config.to_dict(), "started": m.running} for m in self._models.values()]
        entries += self._unrestored.values()
        temporary = f"{self._state_file}.new"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(entries, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._state_file)
        except OSError as error:
            logger.error("the state file %s cannot be written: %s", self._state_file, error)


def _fingerprint(info: ModelInfo) -> str:
    # Not in it: engine_max_length. Dynamic rotary scaling goes by a prompt's length and a row's position, nothing else
    # by any length.
    facts = (results_digest(), info.ranks, info.weight_dtype, info.weight_group_size, info.quantize_head,
             info.cache_dtype, info.span_size, info.model_hash, _tokenizer_digest(info.tokenizer_dir))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _tokenizer_digest(directory: str) -> str:
    """Of the files that text becomes ids and ids become text by, the chat template among them."""
    digest = hashlib.sha256()
    files = sorted(Path(directory).glob("*")) if directory else []
    for path in files:
        if path.name.startswith(("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")):
            if path.is_file():
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()
