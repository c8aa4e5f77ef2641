"""The engine: models, requests and the API of one process.

A request passes three stages. Callers' threads run the input stage (input_stage.py) and post commands to the engine's
thread (engine_thread.py), which runs the steps. The output stage (output.py) is a third thread: it hands results to the
requests' sinks. docs/architecture/threads.md says which thread runs what.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from allspark_client.config import AsModelConfig, check_available
from allspark_client.engine import AbstractEngine, check_config, check_handle
from allspark_client.environment import check_environment
from allspark_client.errors import AllSparkError, AsStatus, NotLoaded, closed_engine, illegal_handle, unknown_model
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_client.tokens import as_token_ids
from allspark_client.types import AsEngineStat, AsFileInfo, Detokenized, GenerateRequestStatus, ModelInfo, ModelState
from allspark_client.version import __version__

from ..runtime.group import Group
from ..runtime.native import native_library
from ..scheduler import Sequence
from ..weights.hub import with_local_paths
from .adapters import check_lora
from .engine_thread import ALIVE_SECONDS, EngineThread
from .handover import Handover
from .input_stage import Dependency
from .model_loader import ModelLoader
from .on_demand import OnDemandModels
from .output import End, OutputStage
from .pipeline import Pipeline
from .queue_limits import estimated_size
from .request import Request
from .results import QueueSink, Sink
from .served_model import ServedModel
from .state_file import ModelRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SUCCESS = AsStatus.ALLSPARK_SUCCESS
SLICE_PAUSE = 0.03  # seconds between slices of the roofline measurement, in which steps run (runtime/profile.py)
MAX_ENDED = 1 << 16  # ended requests kept until they are released; beyond this number the oldest handles are forgotten


class Engine(AbstractEngine):
    """Computes in this process, with the ranks of `group`."""

    def __init__(self, *, group: Group | None = None, state_file: str | None = None):
        """`group`: None for this process alone, without MPI. `state_file`: records the installed models, so that an
        engine that replaces this one can `restore` them.
        """
        check_environment()
        self._group: Group = Group() if group is None else group
        self._models: dict[str, ServedModel] = {}
        self._record = ModelRecord(state_file, self._models, lambda: self._on_demand.entries())
        self._requests: dict[int, tuple[ServedModel, Request]] = {}  # guarded by the thread's lock
        self._handles = itertools.count(1)
        self._forget_at = MAX_ENDED
        self._output = OutputStage(self._cancel_undeliverable, self._finish_stopped)
        self._pipeline = Pipeline(self._group)
        self._thread = EngineThread(self._models, self._pipeline, self._shut_down, self._fail_all)
        self._loader = ModelLoader(
            self._thread, self._group, self._waitable_group, self._models, self._output, self._publish)
        self._on_demand = OnDemandModels(self._thread, self._loader, self._models, self._unload_model,
                                         self._record.save, lambda: self._group.loaded_part)
        self.handover: Handover | None = None   # takes spans of long prompts from other groups
        self._thread.thread.start()
        atexit.register(self.close)

    @property
    def busy_since(self) -> float:
        """When the engine's thread began its current work, on the monotonic clock; 0.0 while it waits for work."""
        return self._thread.busy_since

    @property
    def unrestored(self) -> dict[str, str]:
        """Models of the state file that could not be loaded, and why."""
        return self._record.unrestored

    # --- models ---

    def install_model(self, config: AsModelConfig) -> AsStatus:
        """See AbstractEngine."""
        config = with_local_paths(check_config(config))
        check_available(config)
        self._install(config)
        return _SUCCESS

    def installed(self, config: AsModelConfig) -> bool:
        """Whether a model of exactly this config is installed."""
        name = config.model_name
        if name in self._on_demand.listed:
            return self._on_demand.config(name) == config
        model = self._models.get(name)
        return model is not None and model.config == config

    def start_model(self, model_name: str) -> AsStatus:
        """See AbstractEngine. A model that has failed is loaded again, since its cache cannot be trusted."""
        if model_name in self._on_demand.listed:
            self._on_demand.start(model_name)
            if model_name not in self._models:
                self._record.save()
                return _SUCCESS
        model = self._model(model_name)
        if model.failure is None:
            self._thread.call(lambda: self._start_model(model_name))
            self._record.save()
        elif model.lost:
            raise model.not_running()
        else:
            self._record.keep(model)
            self._thread.call(lambda: self._remove_model(model_name))
            self._output.flush()
            self._load(model.config, True, [adapter.lora_name for adapter in model.adapters])
        return _SUCCESS

    def stop_model(self, model_name: str) -> AsStatus:
        """See AbstractEngine. A model on demand is also unloaded."""
        if model_name in self._on_demand.listed:
            self._on_demand.stop(model_name)
            self._thread.call(lambda: self._unload_if_loaded(model_name))
        else:
            self._thread.call(lambda: self._stop_model(model_name))
        self._output.flush()
        self._record.save()
        return _SUCCESS

    def release_model(self, model_name: str) -> AsStatus:
        """See AbstractEngine."""
        self._thread.call(lambda: self._release_model(model_name))
        self._output.flush()
        self._record.save()
        return _SUCCESS

    def load_model(self, model_name: str, on_progress: Callable[[float], None] | None = None) -> AsStatus:
        """See AbstractEngine."""
        future = self.load_later(model_name)
        while not wait([future], ALIVE_SECONDS).done:
            self._thread.check_open()
            if on_progress is not None:
                on_progress(self.loaded_part(model_name))
        future.result()
        return _SUCCESS

    def load_later(self, model_name: str) -> Future[None]:
        """As load_model, without waiting: the future ends when load_model would."""
        if model_name in self._on_demand.listed:
            return self._on_demand.load(model_name)
        self._model(model_name)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def loaded_part(self, model_name: str) -> float:
        """How much of a model on demand is loaded, 0…1."""
        return self._on_demand.part(model_name)

    def unload_model(self, model_name: str) -> AsStatus:
        """See AbstractEngine."""
        if model_name not in self._on_demand.listed:
            self._model(model_name)
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"model {model_name!r} is not installed with on_demand; release_model frees it")
        self._on_demand.unload(model_name)
        return _SUCCESS

    def list_models(self) -> list[ModelState]:
        """See AbstractEngine."""
        return [model.state() for model in self.served_models()] + self._on_demand.states()

    def served_models(self) -> list[ServedModel]:
        """All installed models."""
        return list(self._models.values())

    def failures(self) -> dict[str, str]:
        """The failures of models that should serve, by model name; "" stands for the engine itself."""
        failures = self._record.failures
        failures |= {model.name: model.failure for model in self.served_models() if model.failure is not None}
        if self._thread.failure is not None:
            failures[""] = self._thread.failure
        return failures

    def restore(self, configured: Collection[AsModelConfig] = (), again: bool = False,
                check: Callable[[AsModelConfig], None] = lambda config: None) -> list[str]:
        """Installs and starts the models of the configuration, and those that clients had installed, which `state_file`
        records. Returns the names of the installed models.

        At a first start (`again` is False) the configuration overrides the state file for its own models. Models that
        clients had installed are restored unless `check` raises. Clients may later stop and release models of the
        configuration. A group that replaces a lost one (`again` is True) therefore follows only the state file. Raises
        if a model of the configuration cannot be loaded at a first start. Any other model that cannot be loaded is
        logged, stays in the file, and counts as unrestored until it is installed or released.
        """
        self._record.restore(configured, again, check, self._install)
        return list(self._models)

    def _install(self, config: AsModelConfig, start: bool = False, adapters: list[str] | None = None,
                 load: bool = False) -> None:
        """Installs a model. `load`: one on demand is loaded at once."""
        if not config.on_demand:
            self._load(config, start, adapters)
            return
        self._on_demand.add(config, start, adapters)
        self._record.installed(config.model_name)
        self._record.save()
        if load:
            self.load_model(config.model_name)

    def _load(self, config: AsModelConfig, start: bool, adapters: list[str] | None) -> None:
        self._loader.load(config, start, adapters)
        self._record.save()

    # --- requests ---

    def submit(self, spec: RequestSpec, sink: Sink, dependency: Dependency | None = None) -> int:
        """Queues a request and returns its handle. `dependency`: what it waits for before it may be computed.

        Raises ValueError, TypeError or AllSparkError if the request is refused.
        """
        if spec.model in self._on_demand.listed:
            with self._on_demand.using(spec.model):
                return self._submit(spec, sink, dependency)
        return self._submit(spec, sink, dependency)

    def _submit(self, spec: RequestSpec, sink: Sink, dependency: Dependency | None) -> int:
        model = self._model(spec.model)
        if model.failure is not None or not model.running:
            raise model.not_running()
        spec.check_tenant()
        adapter = model.adapters.of_request(spec) if spec.config.lora_name else None
        samples, size = spec.config.n, estimated_size(spec)
        model.queue.reserve(spec.tenant, samples, size)  # before the work of reading the prompt
        prepared = None
        try:
            prepared = model.input.prepare(spec, adapter)
            dependency = dependency or prepared.dependency
            if dependency is None and self.handover is not None:
                dependency = self.handover.dependency(model, prepared, spec)
            prepared.dependency = dependency
            model.queue.resize(spec.tenant, size, prepared.size)
            size = prepared.size
            request = Request(next(self._handles), sink, prepared, model.timings)
            with self._thread.lock:
                self._thread.post(functools.partial(model.enqueue, request))
                self._requests[request.handle] = (model, request)
                self._forget_old()
        except BaseException:
            model.queue.unreserve(spec.tenant, samples, size)
            if prepared is not None:
                prepared.interest.ended = True
            raise
        if dependency is not None:
            unblock = functools.partial(model.unblock, request)
            dependency.done.add_done_callback(lambda _: self._thread.post_if_open(unblock))
        return request.handle

    def _forget_old(self) -> None:
        """Forgets the oldest ended handles that were not released; their results stay readable. The caller holds the
        lock.
        """
        if len(self._requests) < self._forget_at:
            return
        ended = [handle for handle, (_, request) in self._requests.items() if request.done.is_set()]
        for handle in ended[: -MAX_ENDED // 2]:
            del self._requests[handle]
        self._forget_at = len(self._requests) + MAX_ENDED // 2

    def cancel(self, handle: int) -> None:
        """Ends the request as GenerateInterrupted, without waiting for that. Does nothing if it has ended."""
        model, request = self._request(handle)
        with self._thread.lock:
            self._thread.post(functools.partial(model.end, request, GenerateRequestStatus.GenerateInterrupted))

    def release(self, handle: int) -> None:
        """Forgets the handle; a live request is cancelled."""
        _, request = self._request(handle)
        if not request.done.is_set():
            self.cancel(handle)
        with self._thread.lock:
            self._requests.pop(handle, None)

    def add_flush_listener(self, listener: Callable[[], None]) -> None:
        """The output stage's thread calls `listener()` after the tokens of a step have gone to their sinks, and after
        requests have ended without a step.
        """
        self._output.add_flush_listener(listener)

    @staticmethod
    def _token_ids(ids: Any) -> list[int]:
        if type(ids) is list and ids and native_library().ids_below(ids, 1 << 31):  # 38,000 ids: 0.1 ms, not 1.3
            return ids.copy()
        return as_token_ids(ids)

    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        results = ResultQueue()
        while True:
            try:
                handle = self.submit(spec, QueueSink(results))
                break
            except NotLoaded:
                self.load_model(spec.model)
        results.opened = spec.opened
        return _SUCCESS, handle, results

    def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        """See AbstractEngine."""
        model, request = self._request(check_handle(request_handle), model_name)
        if not request.done.is_set():
            self._thread.call(lambda: model.end(request, GenerateRequestStatus.GenerateInterrupted))
            self._wait(request)
        return _SUCCESS

    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        """See AbstractEngine."""
        self.stop_request(model_name, request_handle)
        with self._thread.lock:
            self._requests.pop(request_handle, None)
        return _SUCCESS

    def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        """See AbstractEngine."""
        if request_handle is not None:
            self._wait(self._request(check_handle(request_handle), model_name)[1])
            return _SUCCESS
        model = self._model(model_name)
        with self._thread.lock:
            requests = [request for owner, request in self._requests.values() if owner is model]
        for request in requests:
            self._wait(request)
        return _SUCCESS

    # --- information ---

    def fingerprint(self, name: str) -> str:
        """Equal for two engines only if a request gives the same bytes on both."""
        return self._model(name).fingerprint

    def image_fingerprint(self, name: str) -> str:
        """Equal for two engines only if an image in a request is prepared and bounded alike; "": it takes none."""
        return self._model(name).image_fingerprint

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """See AbstractEngine."""
        return self._model(model_name).stat()

    def get_model_info(self, model_name: str) -> ModelInfo:
        """See AbstractEngine."""
        return copy.deepcopy(self._model(model_name).info)

    def served_model(self, name: str) -> ServedModel:
        """An installed model. Raises AllSparkError for an unknown one."""
        return self._model(name)

    def on_engine_thread(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread between steps; waits for its result, or raises its error."""
        return self._thread.call(function)

    def wait_for_ranks(self) -> None:
        """Waits until every rank has ended the steps that are under way."""
        self._thread.call(lambda: self._waitable_group().synchronize())

    def info(self, model_name: str) -> ModelInfo:
        """A model's information; do not change it."""
        return self._model(model_name).info

    def _tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        return self._model(spec.model).input.tokenize(spec, bare)

    def detokenize(self, model_name: str, ids: list[int]) -> Detokenized:
        """See AbstractEngine."""
        return self._model(model_name).input.detokenize(ids)

    def get_file_information(self, as_graph_path: str | os.PathLike, as_param_path: str | os.PathLike) -> AsFileInfo:
        """See AbstractEngine."""
        from ..weights.asgraph import VERSION, read_graph
        from ..weights.sources import ParamSource

        read_graph(Path(as_graph_path))  # raises if this build does not read its version
        params = ParamSource(Path(as_param_path))
        return AsFileInfo(f"asgraph-{VERSION}", params.file.metadata["format"], __version__)

    def get_op_profiling_info(self, model_name: str) -> str:
        """See AbstractEngine."""
        call = self._thread.call
        # The first call of a process measures the machine's roofline, in slices between the steps of running requests.
        while not call(lambda: self._waitable_group().measure_roofline(self._model(model_name).name)):
            time.sleep(SLICE_PAUSE)
        return call(lambda: self._waitable_group().profile(self._model(model_name).name)).table()

    def get_rank_id(self) -> int:
        """See AbstractEngine."""
        return 0

    def get_rank_nums(self) -> int:
        """See AbstractEngine."""
        return self._group.size

    def is_allspark_work_as_service(self) -> bool:
        """See AbstractEngine."""
        return False

    def get_version_full(self) -> str:
        """See AbstractEngine."""
        return __version__

    # --- adapters and device memory ---

    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """See AbstractEngine."""
        return self._change_adapters(model_name, lora_name, self._loader.adapters.load)

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """See AbstractEngine."""
        return self._change_adapters(model_name, lora_name, self._loader.adapters.unload)

    def _change_adapters(self, name: str, lora: str, change: Callable[[ServedModel, str], None]) -> AsStatus:
        model = self._model(name)
        with self._loader.lock:
            change(model, check_lora(lora))
        self._record.save()
        return _SUCCESS

    def unload_device_mem(self, model_name: str) -> AsStatus:
        """See AbstractEngine."""
        return self._loader.memory.move(self._model(model_name), loaded=False)

    def load_device_mem(self, model_name: str) -> AsStatus:
        """See AbstractEngine."""
        return self._loader.memory.move(self._model(model_name), loaded=True)

    def reset_prefix_cache(self, model_name: str) -> AsStatus:
        """See AbstractEngine."""
        model = self._model(model_name)
        self._thread.call(model.reset_prefix_cache)
        return _SUCCESS

    # --- end ---

    def close(self) -> None:
        """See AbstractEngine."""
        if self._thread.forked:  # the thread belongs to the parent
            return
        if self.handover is not None:
            self.handover.close()
        self._on_demand.close()
        self._thread.close()
        atexit.unregister(self.close)

    # --- any thread ---

    def _model(self, name: str) -> ServedModel:
        if not isinstance(name, str):
            raise TypeError(f"model_name must be a str, not {type(name).__name__}")
        if self._thread.closed:
            self._thread.check_open()
        if (model := self._models.get(name)) is not None:
            return model
        if name in self._on_demand.listed:
            raise NotLoaded(name)
        if (loading := self._loader.loading) is not None and loading.model_name == name:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {name!r} is still being loaded")
        raise unknown_model(name, [state.name for state in self.list_models()])

    def _request(self, handle: int, name: str | None = None) -> tuple[ServedModel, Request]:
        if name is not None:
            self._model(name)
        with self._thread.lock:
            entry = self._requests.get(handle)
        if entry is None or (name is not None and entry[0].name != name):
            raise illegal_handle(name or "any", handle)
        return entry

    def _wait(self, request: Request) -> None:
        """Waits until the request's sink has received its end."""
        while not request.done.wait(ALIVE_SECONDS):
            if not self._output.alive and not request.done.is_set():
                self._thread.check_open()
                raise closed_engine()

    # --- the output stage's thread ---

    def _cancel_undeliverable(self, request: Request) -> None:
        """Frees, on the engine's thread, a request that has ended because it could not be delivered."""
        self._post_for(request, lambda model: model.end(request, GenerateRequestStatus.InternalError))

    def _finish_stopped(self, sequence: Sequence) -> None:
        """A stop string has ended the sequence."""
        self._post_for(sequence.owner.request, lambda model: model.finish_stopped(sequence))

    def _post_for(self, request: Request, command: Callable[[ServedModel], None]) -> None:
        with self._thread.lock:
            entry = self._requests.get(request.handle)
        if entry is not None:
            self._thread.post_if_open(functools.partial(command, entry[0]))

    # --- the engine's thread ---

    def _waitable_group(self) -> Group:
        """The group, ready for calls that block until its steps have ended; see `Pipeline.collect_masked`."""
        self._pipeline.collect_masked()
        return self._group

    def _publish(self, config: AsModelConfig, model: ServedModel) -> None:
        """Adds a loaded model."""
        self._models[model.name] = model
        self._output.inline = self._group.depth == 1
        self._record.installed(model.name)

    def _start_model(self, name: str) -> None:
        model = self._model(name)
        model.check_loaded()
        model.running = True

    def _stop_model(self, name: str) -> None:
        model = self._model(name)
        model.running = False
        model.end_all(GenerateRequestStatus.GenerateInterrupted)

    def _release_model(self, name: str) -> None:
        self._record.configured.discard(name)
        if name not in self._models and self._record.installed(name):
            return
        on_demand = name in self._on_demand.listed
        if on_demand:
            self._on_demand.remove(name)
        loading = self._loader.loading
        if loading is not None and loading.model_name == name:
            self._loader.give_up(loading)
            return
        if on_demand and name not in self._models:
            return
        self._unload_model(name)

    def _unload_if_loaded(self, name: str) -> None:
        loading = self._loader.loading
        if loading is not None and loading.model_name == name:
            self._loader.give_up(loading)
        if name in self._models:
            self._unload_model(name)

    def _unload_model(self, name: str) -> None:
        """Frees a model on demand, which stays in the list."""
        model = self._remove_model(name)
        with self._thread.lock:
            self._requests = {h: entry for h, entry in self._requests.items() if entry[0] is not model}

    def _remove_model(self, name: str) -> ServedModel:
        self._stop_model(name)
        model = self._models.pop(name)
        self._waitable_group().unload(name)
        model.close()
        return model

    def _shut_down(self) -> None:
        for model in self._models.values():
            model.running = False
            model.end_all(GenerateRequestStatus.GenerateInterrupted)
        self._output.close()
        self._close_group()

    def _fail_all(self, message: str) -> None:
        """Ends all requests after an error of the engine's thread."""
        self._group.fail(f"the engine's thread failed: {message}")  # a supervised process ends here
        error = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"the engine has failed: {message}")
        with self._thread.lock:
            requests = [request for _, request in self._requests.values()]
        for model in self._models.values():
            model.failure = model.failure or message
        try:
            for request in requests:
                self._output.put(End(request, GenerateRequestStatus.InternalError, error))
        except RuntimeError:  # the output stage's thread has failed, so this thread ends the requests
            for request in requests:
                request.finish(GenerateRequestStatus.InternalError, error)
        self._output.close()
        self._close_group()

    def _close_group(self) -> None:
        for model in self._models.values():
            model.release_masks()
        try:
            self._group.close()
        except RuntimeError as error:
            logger.warning("closing the group: %s", error)
        for model in self._models.values():
            model.close()
