"""AsyncClientEngine: ClientEngine for event loops."""
from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from . import client
from .client import ClientEngine
from .config import ASGenerationConfigBuilder, GenerateConfig
from .engine import check_handle, ids_of_text, request_spec
from .errors import AsStatus, NotLoaded, closed_engine
from .generation import AsyncGeneration
from .images import may_have_images
from .live_request import LiveRequest
from .metrics import member_metrics
from .queue import ResultQueue
from .request import RequestSpec
from .session import Unavailable
from .types import GenerateRequestStatus

T = TypeVar("T")
Config = dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None
_SUCCESS = AsStatus.ALLSPARK_SUCCESS
#: calls that wait for a server at the same time; starting, reading and ending requests need no thread
_THREADS = 16


def _in_thread(method: Callable[..., T]) -> Callable[..., Any]:
    """A coroutine that calls a method of ClientEngine on a thread."""

    @functools.wraps(method)
    async def call(self: AsyncClientEngine, *args: Any, **keywords: Any) -> T:
        return await self._run(method, await self._connected(), *args, **keywords)

    return call


class AsyncClientEngine:
    """ClientEngine's methods as coroutines. Any number of event loops may use one engine.

    Result queues are read with `async for`, or `await queue.GetAsync()`. The engine connects when it is entered
    (`async with`), or at the first call; its arguments are those of ClientEngine.

    A ClientEngine does the work: its threads read from servers, choose members of a pool and resume requests. They wake
    an event loop once per message of a server, for all requests that have new tokens in it.
    """

    def __init__(self, *args: Any, **keywords: Any):
        self._make = functools.partial(ClientEngine, *args, **keywords)
        self._engine: ClientEngine | None = None
        self._making = threading.Lock()
        self._closed = False
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="allspark-async")

    async def __aenter__(self) -> AsyncClientEngine:
        await self._connected()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    install_model = _in_thread(ClientEngine.install_model)
    build_model_from_config_struct = _in_thread(ClientEngine.build_model_from_config_struct)
    start_model = _in_thread(ClientEngine.start_model)
    stop_model = _in_thread(ClientEngine.stop_model)
    release_model = _in_thread(ClientEngine.release_model)
    load_model = _in_thread(ClientEngine.load_model)
    load_for_requests = _in_thread(ClientEngine.load_for_requests)
    unload_model = _in_thread(ClientEngine.unload_model)
    members = _in_thread(ClientEngine.members)
    _metrics = _in_thread(member_metrics)
    list_models = _in_thread(ClientEngine.list_models)
    get_as_engine_stat = _in_thread(ClientEngine.get_as_engine_stat)
    get_model_info = _in_thread(ClientEngine.get_model_info)
    tokenize = _in_thread(ClientEngine.tokenize)
    _tokenize = _in_thread(ClientEngine._tokenize)
    detokenize = _in_thread(ClientEngine.detokenize)
    get_file_information = _in_thread(ClientEngine.get_file_information)
    get_op_profiling_info = _in_thread(ClientEngine.get_op_profiling_info)
    get_rank_id = _in_thread(ClientEngine.get_rank_id)
    get_rank_nums = _in_thread(ClientEngine.get_rank_nums)
    get_version_full = _in_thread(ClientEngine.get_version_full)
    is_allspark_work_as_service = _in_thread(ClientEngine.is_allspark_work_as_service)
    load_lora = _in_thread(ClientEngine.load_lora)
    unload_lora = _in_thread(ClientEngine.unload_lora)
    unload_device_mem = _in_thread(ClientEngine.unload_device_mem)
    load_device_mem = _in_thread(ClientEngine.load_device_mem)
    embed = _in_thread(ClientEngine.embed)
    rerank = _in_thread(ClientEngine.rerank)
    classify = _in_thread(ClientEngine.classify)
    reset_prefix_cache = _in_thread(ClientEngine.reset_prefix_cache)

    # --- requests ------------------------------------------------------------------------------------------------

    async def start_request(self, model_name: str, inputs: dict[str, Any], generate_config: Config = None, *,
                            want_text: bool | None = None) -> tuple[AsStatus, int, ResultQueue]:
        """As AbstractEngine.start_request. If the call is cancelled, so is the request."""
        make = functools.partial(request_spec, model_name, inputs, generate_config, want_text)
        # Reading and encoding images takes long.
        return await self._start(await asyncio.to_thread(make) if may_have_images(inputs) else make())

    async def start_request_ids(self, model_name: str, model: Any, input_ids: Any,
                                generate_config_builder: Config = None) -> tuple[AsStatus, int, ResultQueue]:
        """As AbstractEngine.start_request_ids."""
        return await self.start_request(model_name, {"input_ids": input_ids}, generate_config_builder)

    async def start_request_text(self, model_name: str, model: Any, input_str: str,
                                 generate_config_builder: Config = None) -> tuple[AsStatus, int, ResultQueue]:
        """As AbstractEngine.start_request_text."""
        inputs = {"text": input_str} if model is None else {"input_ids": ids_of_text(model, input_str)}
        return await self.start_request(model_name, inputs, generate_config_builder)

    def generate(self, model_name: str, inputs: dict[str, Any], generate_config: Config = None, *,
                 want_text: bool | None = None) -> AsyncGeneration:
        """As AbstractEngine.generate, with `async with` and `async for`.

        Images are read and encoded in this call, which takes longer than a tick of an event loop for large ones;
        start_request does that on a thread.
        """
        return AsyncGeneration(self, request_spec(model_name, inputs, generate_config, want_text))

    async def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        engine = await self._connected()
        request = engine._register(spec)
        try:
            if not await self._start_at_once(engine, request):
                await self._run(engine._submit, request)
        except BaseException:
            engine._drop(request)
            raise
        return _SUCCESS, request.handle, request.queue

    @staticmethod
    async def _start_at_once(engine: ClientEngine, request: LiveRequest) -> bool:
        send = engine._send_at_once
        session = await asyncio.to_thread(send, request) if request.spec.large else send(request)
        if session is None:
            return False
        try:
            await session.wait_answer_async(request)
        except (Unavailable, NotLoaded):
            return False
        return True

    async def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        """As AbstractEngine.stop_request."""
        engine, request = await self._request(model_name, request_handle)
        session = engine._ask_to_stop(request)
        if session is not None and not await request.queue.wait_final_async(client.STOP_SECONDS):
            engine._stop_here(request, session)
        return _SUCCESS

    async def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        """As AbstractEngine.release_request, without waiting: tokens that have not arrived yet are lost."""
        engine, request = await self._request(model_name, request_handle)
        engine._drop(request)
        return _SUCCESS

    async def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        """As AbstractEngine.sync_request."""
        if request_handle is not None:
            requests = [(await self._request(model_name, request_handle))[1]]
        else:
            requests = await self._run((await self._connected())._requests_of, model_name)
        for request in requests:
            await request.queue.wait_final_async()
        return _SUCCESS

    async def get_no_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """As AbstractEngine.get_no_wait."""
        return (await self._connected()).get_no_wait(model_name, result_queue)

    async def get_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """As AbstractEngine.get_wait."""
        elements = await result_queue.GetAsync()
        return elements.ids_from_generate if elements is not None else []

    async def get_request_status(self, model_name: str, result_queue: ResultQueue) -> GenerateRequestStatus:
        """As AbstractEngine.get_request_status."""
        return (await self._connected()).get_request_status(model_name, result_queue)

    # --- end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """As ClientEngine.close."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        with self._making:
            self._closed = True
        if self._engine is not None:
            self._engine.close()
        self._executor.shutdown(wait=False)

    # --- the engine underneath -----------------------------------------------------------------------------------

    async def _connected(self) -> ClientEngine:
        engine = self._engine
        return engine if engine is not None else await self._run(self._connect)

    def _connect(self) -> ClientEngine:
        with self._making:
            if self._closed:
                raise closed_engine()
            if self._engine is None:
                self._engine = self._make()
            return self._engine

    async def _run(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        if self._closed:
            raise closed_engine()
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, functools.partial(function, *args, **keywords))

    async def _request(self, name: Any, handle: Any) -> tuple[ClientEngine, LiveRequest]:
        engine = await self._connected()
        request = engine._find(check_handle(handle))
        if request is None or request.spec.model != name:
            return engine, await self._run(engine._request, name, handle)   # raises the right error
        return engine, request
