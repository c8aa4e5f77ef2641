"""The engine: models, requests, and the one thread that computes.

A request passes three stages. The input stage (prepare.py) is the callers' threads: they check and tokenize. Their
calls become commands in a queue; the engine's thread takes them between steps. It alone touches schedulers and the
group, so none of that needs locks; with nothing to do it sleeps in the queue. No command takes long: models are loaded
by threads of the group, and files written by the callers' threads. The output stage (output.py) is a third thread: it
tells the sinks of requests what came of them.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from allspark_client.config import AsModelConfig, check_available
from allspark_client.engine import AbstractEngine, check_config, check_handle
from allspark_client.environment import check_environment
from allspark_client.errors import AllSparkError, AsStatus, closed_engine, forked_engine, illegal_handle, unknown_model
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_client.types import AsEngineStat, AsFileInfo, Detokenized, GenerateRequestStatus, ModelInfo, ModelState
from allspark_client.version import __version__

from ..runtime.group import Group, LocalGroup
from ..scheduler import Sequence
from ..weights.hub import with_local_paths
from .adapters import AdapterLoader, check_lora
from .device_memory import MemoryMover
from .output import End, OutputStage
from .pipeline import Pipeline
from .polling import poll
from .prepare import Obstacle, prepare, size_before
from .request import Request
from .served_model import ServedModel
from .sinks import QueueSink, Sink
from .state_file import StateFile, of_configuration, state_entry

logger = logging.getLogger(__name__)

_SUCCESS = AsStatus.ALLSPARK_SUCCESS
BETWEEN_SLICES = 0.03  # seconds for steps to run between slices of measuring (runtime/profile.py)
MAX_ENDED = 1 << 16  # ended requests that nobody has released; beyond it handles of the oldest are forgotten
ALIVE_SECONDS = 1.0  # between two looks of a waiting caller at whether the engine's thread still lives


class Engine(AbstractEngine):
    """Computes in this process, with the ranks of `group`."""

    def __init__(self, *, group: Group | None = None, state_file: str | None = None):
        """`group` None: this process alone, without MPI. `state_file`: where the installed models are recorded, so that
        an engine that takes this one's place can `restore` them.
        """
        check_environment()
        self._owner = os.getpid()
        self._group: Group = LocalGroup() if group is None else group
        self._state_file = StateFile(state_file)
        self._unrestored: dict[str, dict] = {}  # entries of the state file whose models are not back yet
        self.unrestored: dict[str, str] = {}  # of these, the models that could not be loaded, and why
        self._configured: set[str] = set()  # names of models that the configuration brought, not a client
        self._installing = threading.Lock()  # one load at a time: each plans with the memory that is left then
        self._loading: AsModelConfig | None = None  # of the load under way; set on the engine's thread
        self._models: dict[str, ServedModel] = {}
        self._requests: dict[int, tuple[ServedModel, Request]] = {}
        self._handles = itertools.count(1)
        self._forget_at = MAX_ENDED
        self._output = OutputStage(self._cancel_undeliverable, self._finish_stopped)
        self._pipeline = Pipeline(self._group)
        self._adapters = AdapterLoader(self._call, self._settled, self._check_there)
        self._memory = MemoryMover(self._installing, self._call, self._settled, self._check_there)
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _requests, and _closed against commands that would never be taken
        self._closed = False
        self._failure: str | None = None  # of the engine's thread, which then has ended
        #: when the engine's thread began what it is doing, on the monotonic clock; 0.0 while it waits for work
        self.busy_since = 0.0
        self._thread = threading.Thread(target=self._run, name="allspark-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # --- models ---

    def install_model(self, config: AsModelConfig) -> AsStatus:
        config = with_local_paths(check_config(config))
        check_available(config)
        self._install(config)
        return _SUCCESS

    def installed(self, config: AsModelConfig) -> bool:
        """Whether there is a model of this very config."""
        model = self._models.get(config.model_name)
        return model is not None and model.config == config

    def start_model(self, model_name: str) -> AsStatus:
        model = self._model(model_name)
        if model.failure is None:
            self._call(lambda: self._start_model(model_name))
            self._save()
        else:  # its cache cannot be trusted any more: load it again
            # It stays in the file should that fail.
            self._unrestored[model_name] = state_entry(model, True, self._configured)
            self._call(lambda: self._remove_model(model_name))
            self._output.flush()
            self._install(model.config, True, [adapter.given for adapter in model.adapters])
        return _SUCCESS

    def stop_model(self, model_name: str) -> AsStatus:
        self._call(lambda: self._stop_model(model_name))
        self._output.flush()
        self._save()
        return _SUCCESS

    def release_model(self, model_name: str) -> AsStatus:
        self._call(lambda: self._release_model(model_name))
        self._output.flush()
        self._save()
        return _SUCCESS

    def list_models(self) -> list[ModelState]:
        return [model.state() for model in self.served_models()]

    def served_models(self) -> list[ServedModel]:
        """All that are installed."""
        return list(self._models.values())

    def failures(self) -> dict[str, str]:
        """Why models that should serve do not, by name; "" stands for the engine itself."""
        found = dict(self.unrestored)
        found |= {model.name: model.failure for model in list(self._models.values()) if model.failure is not None}
        if self._failure is not None:
            found[""] = self._failure
        return found

    def restore(self, configured: Collection[AsModelConfig] = (), again: bool = False,
                check: Callable[[AsModelConfig], None] = lambda config: None) -> list[str]:
        """Installs and starts the models of the configuration, and those that clients had installed, which
        `state_file` records.

        At a start, models of the configuration are as it says: changed, added and removed ones; the others are
        restored, unless `check` refuses them by raising. Until the next start those of the configuration are the
        clients' to stop and release: so with `again`, when a group that was lost is replaced, the state file alone
        counts. One of the configuration that cannot be loaded at a start is raised; any other is logged, stays in the
        file, and is in `unrestored` until it is installed or released. Returns what is installed now.
        """
        entries = self._state_file.to_restore(configured, again)
        self._configured = {name for name, entry in entries.items() if entry.get("configured")}
        self._unrestored = dict(entries)  # they stay in the file until they are back, lest a second crash lose some
        self._save()
        for name, entry in entries.items():
            try:
                config = AsModelConfig.from_dict(entry["config"])
                check_available(check_config(config))
                if name not in self._configured:
                    check(config)
                logger.info("loading %s", name)
                self._install(config, bool(entry.get("started")), entry.get("adapters"))
            except (AllSparkError, ValueError, TypeError) as error:
                if name in self._configured and not again:
                    raise of_configuration(name, error) from error
                logger.error("model %r cannot be restored: %s; this group is not healthy until the model is installed "
                             "or released", name, error)
                self.unrestored[name] = str(error)
        return list(self._models)

    # --- requests ---

    def submit(self, spec: RequestSpec, sink: Sink, obstacle: Obstacle | None = None) -> int:
        """Queues a request and returns its handle. Raises ValueError, TypeError or AllSparkError if it is refused.
        `obstacle`: what it waits for before it may be computed.
        """
        model = self._model(spec.model)
        model.check_running()
        spec.check_tenant()
        adapter = model.adapters.of_request(spec)
        queue, samples, size = model.queue, spec.config.n, size_before(spec)
        queue.reserve(spec.tenant, samples, size)  # before the work of reading the prompt
        try:
            prepared = prepare(spec, model.info, model.tokenizer, model.keys, model.guide, adapter)
            prepared.obstacle = obstacle
            queue.resize(spec.tenant, size, prepared.size)
            size = prepared.size
            request = Request(next(self._handles), sink, prepared)
            with self._lock:
                self._post(functools.partial(model.enqueue, request))
                self._requests[request.handle] = (model, request)
                self._forget_old()
        except BaseException:
            queue.unreserve(spec.tenant, samples, size)
            raise
        if obstacle is not None:
            obstacle.gone.add_done_callback(lambda _: self._post_quietly(functools.partial(model.unblock, request)))
        return request.handle

    def _forget_old(self) -> None:
        """Keeps the handles that nobody releases from piling up; the caller holds the lock. What such a request has
        generated stays in its queue.
        """
        if len(self._requests) < self._forget_at:
            return
        ended = [handle for handle, (_, request) in self._requests.items() if request.done.is_set()]
        for handle in ended[: -MAX_ENDED // 2]:
            del self._requests[handle]
        self._forget_at = len(self._requests) + MAX_ENDED // 2

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
        """`listener()` is called on the output stage's thread after the tokens of each step have gone to their sinks,
        and after requests have ended otherwise.
        """
        self._output.add_flush_listener(listener)

    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        results = ResultQueue()
        handle = self.submit(spec, QueueSink(results))
        results.opened = spec.opened
        return _SUCCESS, handle, results

    def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        model, request = self._request(check_handle(request_handle), model_name)
        if not request.done.is_set():
            self._call(lambda: model.end(request, GenerateRequestStatus.GenerateInterrupted))
            self._wait(request)
        return _SUCCESS

    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        self.stop_request(model_name, request_handle)
        with self._lock:
            self._requests.pop(request_handle, None)
        return _SUCCESS

    def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        if request_handle is not None:
            self._wait(self._request(check_handle(request_handle), model_name)[1])
            return _SUCCESS
        model = self._model(model_name)
        with self._lock:
            requests = [request for owner, request in self._requests.values() if owner is model]
        for request in requests:
            self._wait(request)
        return _SUCCESS

    # --- information ---

    def fingerprint(self, name: str) -> str:
        """Equal for two engines only if a request gives the same bytes on both."""
        return self._model(name).fingerprint

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        return self._model(model_name).stat()

    def get_model_info(self, model_name: str) -> ModelInfo:
        return copy.deepcopy(self._model(model_name).info)

    def _tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        return self._model(spec.model).tokenize(spec, bare)

    def detokenize(self, model_name: str, ids: list[int]) -> Detokenized:
        return self._model(model_name).detokenize(ids)

    def get_file_information(self, as_graph_path: str | os.PathLike, as_param_path: str | os.PathLike) -> AsFileInfo:
        from ..weights.asgraph import VERSION, read_graph
        from ..weights.checkpoint import ParamSource

        read_graph(Path(as_graph_path))  # raises unless it is of the one version that this build knows
        params = ParamSource(Path(as_param_path))
        return AsFileInfo(f"asgraph-{VERSION}", params.file.metadata["format"], __version__)

    def get_op_profiling_info(self, model_name: str) -> str:
        # The first call of a process measures the machine's ceilings, in slices between the steps of running requests.
        while not self._call(lambda: self._settled().measure_ceilings(self._model(model_name).name)):
            time.sleep(BETWEEN_SLICES)
        return self._call(lambda: self._settled().profile(self._model(model_name).name)).table()

    def get_rank_id(self) -> int:
        return 0

    def get_rank_nums(self) -> int:
        return self._group.size

    def is_allspark_work_as_service(self) -> bool:
        return False

    def get_version_full(self) -> str:
        return __version__

    # --- adapters and device memory ---

    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        return self._change_adapters(model_name, lora_name, self._adapters.load)

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        return self._change_adapters(model_name, lora_name, self._adapters.unload)

    def _change_adapters(self, name: str, lora: str, change: Callable[[ServedModel, str], None]) -> AsStatus:
        model = self._model(name)
        with self._installing:
            change(model, check_lora(lora))
        self._save()
        return _SUCCESS

    def unload_device_mem(self, model_name: str) -> AsStatus:
        return self._memory.move(self._model(model_name), loaded=False)

    def load_device_mem(self, model_name: str) -> AsStatus:
        return self._memory.move(self._model(model_name), loaded=True)

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
        self._check_open()
        if (model := self._models.get(name)) is not None:
            return model
        if (loading := self._loading) is not None and loading.model_name == name:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {name!r} is still being loaded")
        raise unknown_model(name, list(self._models))

    def _request(self, handle: int, name: str | None = None) -> tuple[ServedModel, Request]:
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
        self._check_open()
        self._commands.put(command)

    def _post_quietly(self, command: Callable[[], Any]) -> None:
        """Puts a command into the queue that is of no use to an engine that has ended."""
        try:
            with self._lock:
                self._post(command)
        except AllSparkError as error:
            logger.debug("a command came too late: %s", error)

    def _cancel_undeliverable(self, request: Request) -> None:
        """On the output stage's thread: the request has ended there; what it holds is to be freed."""
        self._post_for(request, lambda model: model.end(request, GenerateRequestStatus.InternalError))

    def _finish_stopped(self, sequence: Sequence) -> None:
        """On the output stage's thread: a stop string has ended the sequence."""
        self._post_for(sequence.owner.request, lambda model: model.finish_stopped(sequence))

    def _post_for(self, request: Request, command: Callable[[ServedModel], None]) -> None:
        with self._lock:
            model, _ = self._requests.get(request.handle, (None, None))
        if model is not None:
            self._post_quietly(functools.partial(command, model))

    def _wait(self, request: Request) -> None:
        """Waits until the request's sink was told of its end."""
        while not request.done.wait(ALIVE_SECONDS):
            if not self._output.alive and not request.done.is_set():
                self._check_open()
                raise closed_engine()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"the engine has failed: {self._failure}")
        if self._closed:
            raise closed_engine()

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
        while not wait([future], ALIVE_SECONDS).done:
            if not self._thread.is_alive() and not future.done():
                self._check_open()
                raise closed_engine()
        return future.result()

    def _install(self, config: AsModelConfig, start: bool = False, adapters: list[str] | None = None) -> None:
        """Loads a model while the others' steps go on. adapters: that are loaded with it; None: as its config says."""
        name = config.model_name
        with self._installing:
            self._call(lambda: self._start_load(config))
            try:
                info = poll(lambda: self._call(lambda: self._poll_load(config)))
                masks = self._call(lambda: self._group.masks(name))
                model = ServedModel.open(config, info, self._output, self._group.held_spans(), masks,
                                         self._post_quietly)
                for lora in config.lora_names if adapters is None else adapters:
                    self._adapters.load(model, check_lora(lora))
                model.running = start
                self._call(lambda: self._publish(config, model))
            except BaseException:
                try:
                    self._call(lambda: self._give_up_load(config))
                except AllSparkError as error:  # the engine was closed meanwhile
                    logger.debug("giving up the load of model %r: %s", name, error)
                raise
        self._save()

    def _save(self) -> None:
        """Records the installed models."""
        self._state_file.write(lambda: [
            *(state_entry(model, model.running, self._configured) for model in list(self._models.values())),
            *self._unrestored.values(),
        ])

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            self._loop()
            self._shut_down()
        except BaseException as error:  # a defect; without this thread nothing computes, and nobody would say so
            logger.critical("the engine's thread failed", exc_info=True)
            self._perish(str(error) or type(error).__name__)

    def _loop(self) -> None:
        pipeline = self._pipeline
        while True:
            stepping = [model for model in self._models.values() if model.has_work]
            idle = not stepping and not pipeline.busy
            if idle or not self._commands.empty():
                if idle and self._commands.empty():
                    self.busy_since = 0.0
                try:
                    command = self._commands.get(timeout=self._seconds_to_deadline() if idle else None)
                except queue.Empty:
                    for model in self._models.values():
                        model.expire()
                    continue
                self.busy_since = time.monotonic()
                if command is None:
                    break
                self._execute(command)
                continue  # all that is known goes into the next step
            self.busy_since = time.monotonic()
            pipeline.advance(stepping)

    def _seconds_to_deadline(self) -> float | None:
        """How long the thread may sleep: until a request that cannot begin must end."""
        return min((left for model in self._models.values() if (left := model.seconds_to_deadline()) is not None),
                   default=None)

    def _perish(self, message: str) -> None:
        """The end of the engine's thread by an error."""
        self.busy_since = 0.0
        with self._lock:
            self._closed, self._failure = True, message
        self._group.fail(f"the engine's thread failed: {message}")  # a supervised process ends here
        error = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"the engine has failed: {message}")
        with self._lock:
            requests = [request for _, request in self._requests.values()]
        for model in self._models.values():
            model.failure = model.failure or message
        try:
            for request in requests:
                self._output.put(End(request, GenerateRequestStatus.InternalError, error))
        except RuntimeError:  # that thread was the one that failed: nobody else tells them
            for request in requests:
                request.finish(GenerateRequestStatus.InternalError, error)
        self._output.close()
        self._close_group()

    def _execute(self, command: Callable[[], Any]) -> None:
        try:
            command()
        except Exception:  # the thread must live; commands with a caller hand their errors to it
            logger.exception("a command failed in the engine's thread")

    def _shut_down(self) -> None:
        for model in self._models.values():
            model.running = False
            model.end_all(GenerateRequestStatus.GenerateInterrupted)
        self._output.close()
        self._close_group()

    def _settled(self) -> Group:
        """The group, with no step under way: for calls that wait for it."""
        self._pipeline.settle()
        return self._group

    def _close_group(self) -> None:
        for model in self._models.values():
            model.give_up_masks()
        try:
            self._group.close()
        except RuntimeError as error:
            logger.warning("closing the group: %s", error)
        for model in self._models.values():
            model.close()

    def _start_load(self, config: AsModelConfig) -> None:
        name = config.model_name
        if name in self._models:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"a model named {name!r} is installed already; release it first")
        # [0] is what nobody chose; ids of GPUs are told as an error where they are not as many as ranks
        if not config.on_gpus and config.device_ids not in ([0], list(range(self._group.size))):
            logger.warning("compute_unit=%r of model %r: the group's %d rank(s) decide where it runs, not these ids",
                           config.compute_unit, name, self._group.size)
        self._settled().start_load(config)
        self._loading = config

    def _poll_load(self, config: AsModelConfig) -> ModelInfo | None:
        self._check_there(config)
        return self._settled().poll_load()

    def _check_there(self, config: AsModelConfig) -> None:
        """Raises AllSparkError unless the model of this very config is being loaded, or is installed."""
        model = self._models.get(config.model_name)
        if self._loading is not config and (model is None or model.config is not config):
            raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                f"model {config.model_name!r} was released while it was loaded")

    def _publish(self, config: AsModelConfig, model: ServedModel) -> None:
        self._check_there(config)
        self._loading = None
        self._models[model.name] = model
        self._output.inline = self._group.depth == 1
        self._forget_unrestored(model.name)

    def _give_up_load(self, config: AsModelConfig) -> None:
        if self._loading is config:
            self._loading = None
            self._settled().unload(config.model_name)

    def _start_model(self, name: str) -> None:
        model = self._model(name)
        model.check_loaded()
        model.running = True

    def _stop_model(self, name: str) -> None:
        model = self._model(name)
        model.running = False
        model.end_all(GenerateRequestStatus.GenerateInterrupted)

    def _forget_unrestored(self, name: str) -> bool:
        self.unrestored.pop(name, None)
        return self._unrestored.pop(name, None) is not None

    def _release_model(self, name: str) -> None:
        self._configured.discard(name)
        if name not in self._models and self._forget_unrestored(name):
            return
        if self._loading is not None and self._loading.model_name == name:
            self._give_up_load(self._loading)
            return
        model = self._remove_model(name)
        with self._lock:
            self._requests = {h: entry for h, entry in self._requests.items() if entry[0] is not model}

    def _remove_model(self, name: str) -> ServedModel:
        self._stop_model(name)
        model = self._models.pop(name)
        self._settled().unload(name)
        model.close()
        return model
