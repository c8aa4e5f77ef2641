"""The HTTP server's client of its pool."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from allspark_client import AsyncClientEngine, ClientEngine
from allspark_client.errors import AllSparkError
from allspark_client.generation import AsyncGeneration
from allspark_client.request import RequestSpec
from allspark_client.types import (
    AsEngineStat,
    Detokenized,
    GeneratedElements,
    MemberState,
    ModelInfo,
    ModelState,
    RequestStatInfo,
    TlsConfig,
)
from allspark_client.unlike import unlike_members
from allspark_server.prompt_length import check_characters

from .errors import ApiError, from_engine
from .logprobs import TokenTexts

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: how long requests wait for a server that restarts, s
RECONNECT_SECONDS = 20.0
_RETRY_SECONDS, _CLOSE_SECONDS = 0.5, 1.0
#: how long calls wait for the first attempt to connect, s
_FIRST_SECONDS = 2.0
#: how long a call may hold the event loop before others have their turn, s
TURN_SECONDS = 0.01
#: how old the states and the descriptions of models may be, s
_MODELS_AGE, _INFO_AGE = 0.5, 5.0
#: pause between two looks at the members, and how old what `health` reports may be, s. A look takes longer if members
#: do not answer
_LOOK_SECONDS, _HEALTH_AGE = 0.5, 60.0
#: pause between two reports of a load's progress, s
_PROGRESS_SECONDS = 1.0
#: ids whose bytes are asked for together: 1 to 2 ms of a server's time
_TOKENS_AT_ONCE = 1024
#: pause between two of these questions where nobody waits for the answer, s
_TOKENS_PAUSE = 0.005


def _texts(content: Any) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


class _Load:
    """A load that requests wait for."""

    part = 0.0
    task: asyncio.Future[None] | None = None


class Pool:
    """The groups behind the HTTP server. Connects in the background, also to groups that start later.

    Methods run on the event loop, and raise ApiError.
    """

    def __init__(self, addresses: Sequence[str], token: str | None = None, tls: TlsConfig | None = None):
        self._engine = AsyncClientEngine(list(addresses), token=token or "", tls=tls,
                                         reconnect_timeout=RECONNECT_SECONDS)
        self._connected = False
        self._why = "connecting"
        self._connecting: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()   # set after the first attempt to connect
        self._watching: asyncio.Task[None] | None = None
        #: threads that no other calls use: one for the look at the members, one for the list of models
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="allspark-states")
        self._members: tuple[float, list[MemberState]] = (-_HEALTH_AGE, [])
        self._unlike: list[str] = []    # members that differ, as last logged
        self._models: tuple[float, list[ModelState]] = (0.0, [])
        self._listing: asyncio.Task[list[ModelState]] | None = None
        self._infos: dict[str, tuple[float, ModelInfo]] = {}
        self._loads: dict[str, _Load] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._tokens: dict[str, tuple[str, TokenTexts]] = {}

    async def open(self) -> None:
        """Begin to connect; does not wait."""
        self._connecting = asyncio.create_task(self._connect())
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Close the connections; servers cancel live requests."""
        for task in (self._connecting, self._watching):
            if task is not None:
                task.cancel()
        with contextlib.suppress(asyncio.TimeoutError):     # an attempt to connect takes seconds
            await asyncio.wait_for(self._engine.close(), _CLOSE_SECONDS)
        self._executor.shutdown(wait=False)

    async def _connect(self) -> None:
        while not self._connected:
            try:
                await self._engine.__aenter__()
                self._connected = True
            except AllSparkError as error:
                if error.message != self._why:
                    logger.warning("waiting for the pool: %s", error.message)
                self._why = error.message
            self._tried.set()
            if not self._connected:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self) -> None:
        """Keep the members' states for `health`."""
        while True:
            if self._connected:
                try:
                    self._members = time.monotonic(), await self._in_thread(ClientEngine.members)
                    self._tell_differences()
                except AllSparkError as error:
                    logger.warning("the members' states are not known: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    def _tell_differences(self) -> None:
        """Log once which members differ. A member that cannot be reached changes nothing."""
        members = self._members[1]
        if not all(member.connected for member in members):
            return
        unlike = unlike_members((member.address, member.models) for member in members)
        for text in unlike:
            if text not in self._unlike:
                logger.warning("%s", text)
        self._unlike = unlike

    async def _in_thread(self, method: Callable[[ClientEngine], T]) -> T:
        """Call a method of the engine on one of the threads for states."""
        engine = await self._engine._connected()
        return await asyncio.get_running_loop().run_in_executor(self._executor, method, engine)

    def health(self) -> str:
        """Why the pool cannot serve; "" if it can. Answers from memory, and names no addresses."""
        at, members = self._members
        members = [member for member in members if member.connected] if time.monotonic() - at < _HEALTH_AGE else []
        if not members:
            return "the pool cannot be reached"
        serving = [member for member in members if any(model.running or model.on_demand for model in member.models)]
        if not serving:
            return "no model runs"
        return "" if any(not member.draining for member in serving) else "the pool is draining"

    # --- models --------------------------------------------------------------------------------------------------

    async def models(self) -> list[ModelState]:
        """The models of all members, one entry per name; running if it runs on any member."""
        if time.monotonic() - self._models[0] > _MODELS_AGE:
            if self._listing is None or self._listing.done():
                self._listing = asyncio.create_task(self._ask(self._in_thread, ClientEngine.list_models))
            merged: dict[str, ModelState] = {}
            for model in await asyncio.shield(self._listing):   # other calls wait for it, too
                known = merged.setdefault(model.name, ModelState(model.name, False, model.fingerprint))
                known.running, known.load = known.running or model.running, known.load + model.load
                known.on_demand = known.on_demand or model.on_demand
                known.installed_on_demand = known.installed_on_demand or model.installed_on_demand
                known.aliases += [alias for alias in model.aliases if alias not in known.aliases]
                if model.running:
                    known.adapters |= model.adapters
            self._models = time.monotonic(), list(merged.values())
        return self._models[1]

    async def resolve(self, name: str) -> tuple[str, str]:
        """The model and the adapter ("" for none) that a client's field `model` names.

        The name is that of a model, one of its aliases, or that of an adapter, which then only one model may have.
        """
        if name in self._infos:
            return name, ""
        models = await self.models()
        if not any(model.name == name for model in models):
            name = next((model.name for model in models if name in model.aliases), name)
        bases = [model.name for model in models if name in model.adapters and model.running]
        if not bases or any(model.name == name for model in models):
            return name, ""
        if len(bases) > 1:
            raise ApiError(400, f"The adapter '{name}' is loaded for more than one model: {', '.join(bases)}", "model",
                           "invalid_value")
        return bases[0], name

    async def load(self, name: str, on_progress: Callable[[float], Awaitable[None]] | None = None) -> None:
        """Load a model on demand unless a member has loaded it. `on_progress` gets the part that is loaded, 0…1."""
        load = self._loads.get(name)
        if load is None:
            self._loads[name] = load = _Load()
            load.task = asyncio.ensure_future(
                self._ask(self._engine.load_for_requests, name, functools.partial(setattr, load, "part")))
            load.task.add_done_callback(lambda _: self._loads.pop(name, None))
        assert load.task is not None
        while not (await asyncio.wait((load.task,), timeout=_PROGRESS_SECONDS))[0]:
            if on_progress is not None:
                await on_progress(load.part)
        self._models = 0.0, []
        load.task.result()

    async def unload(self, name: str) -> None:
        """Unload a model on demand on all members."""
        await self._ask(self._engine.unload_model, name)
        self._models = 0.0, []

    async def is_unloaded(self, name: str) -> bool:
        """Whether a model is loaded on demand, and no member has loaded it."""
        return any(model.name == name and model.on_demand and not model.running for model in await self.models())

    async def info(self, name: str) -> ModelInfo:
        """The description of a model, or of the model of an adapter. A model on demand must be loaded.

        A known description is returned at once, and refreshed in the background.
        """
        name, _ = await self.resolve(name)
        at, info = self._infos.get(name, (0.0, None))
        if info is None:
            return await self._refresh(name)
        if time.monotonic() - at > _INFO_AGE:
            self._infos[name] = time.monotonic(), info
            self._keep(self._refresh_quietly(name))
        return info

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _refresh(self, name: str) -> ModelInfo:
        info = await self._ask(self._engine.get_model_info, name)
        self._infos[name] = time.monotonic(), info
        return info

    async def _refresh_quietly(self, name: str) -> None:
        try:
            await self._refresh(name)
        except ApiError as error:
            logger.debug("model %r: %s", name, error)
            self._infos.pop(name, None)

    async def members(self) -> list[MemberState]:
        """The groups behind the HTTP server."""
        return await self._ask(self._engine.members)

    async def metrics(self) -> dict[str, str | None]:
        """The metrics of each group, by its address; None for a group that does not answer."""
        return await self._ask(self._engine._metrics)

    async def stat(self, name: str) -> AsEngineStat:
        """The load and the counters of a model over all members."""
        return await self._ask(self._engine.get_as_engine_stat, name)

    def check_length(self, spec: RequestSpec) -> None:
        """Raises ApiError for a prompt that is certainly too long for its model, as the model's server would."""
        _, info = self._infos.get(spec.model, (0.0, None))
        if info is not None:
            chat = sum(len(part) for message in spec.messages or () for part in _texts(message.get("content")))
            try:
                check_characters(info, len(spec.text or ""), chat)
            except AllSparkError as error:
                raise from_engine(error) from error

    async def load_adapter(self, model: str, adapter: str) -> None:
        """Load an adapter, NAME=PATH, on all members."""
        await self._ask(self._engine.load_lora, model, adapter)
        self._models = 0.0, []

    async def unload_adapter(self, model: str, name: str) -> None:
        """Free an adapter on all members."""
        await self._ask(self._engine.unload_lora, model, name)
        self._models = 0.0, []

    async def sleep(self, model: str) -> None:
        """Stop a model and free its memory on GPUs, on all members. If that fails, it takes requests again."""
        if not (await self.info(model)).isa.startswith("sm_"):
            raise ApiError(400, f"The model '{model}' does not run on GPUs, whose memory sleep would free", "model")
        await self._ask(self._engine.stop_model, model)
        self._models = 0.0, []
        try:
            await self._ask(self._engine.unload_device_mem, model)
        except ApiError:
            await self._ask(self._engine.start_model, model)
            raise

    async def wake(self, model: str) -> None:
        """Undo `sleep`."""
        await self._ask(self._engine.load_device_mem, model)
        await self._ask(self._engine.start_model, model)
        self._models = 0.0, []

    async def reset_prefix_cache(self, model: str) -> None:
        """Forget a model's cached prefixes that no request uses, on all members."""
        await self._ask(self._engine.reset_prefix_cache, model)

    # --- text ----------------------------------------------------------------------------------------------------

    async def tokenize(self, spec: RequestSpec, bare: bool = False, places: Sequence[str] = ()) -> list[int]:
        """The ids of a request's prompt. `bare`: without tokens that the tokenizer adds to text. `places`: see
        `generate`.
        """
        spec.model, _ = await self.resolve(spec.model)
        self.check_length(spec)
        return await self._ask(self._engine._tokenize, spec, bare, places=places)

    async def detokenize(self, name: str, ids: list[int]) -> Detokenized:
        """The text of token ids, and the bytes of each."""
        return await self._ask(self._engine.detokenize, (await self.resolve(name))[0], ids)

    async def token_bytes(self, info: ModelInfo, ids: set[int]) -> dict[int, bytes]:
        """The bytes of tokens, at least of these ids. They are asked for in blocks, each once per loaded model, and all
        others then in the background: log probabilities name new tokens for a long time, and a question for each would
        hold up nearly every step.
        """
        texts = self.token_texts(info)
        unknown = [i for i in ids if i not in texts.bytes]
        blocks = {i // _TOKENS_AT_ONCE for i in unknown}
        for block in blocks - texts.asked.keys():
            end = max(info.vocab_size, max(unknown) + 1)
            texts.asked[block] = asyncio.ensure_future(self._ask_for_block(info.name, texts, block, end))
        if blocks:     # a request that is given up must not end the question of another one
            await asyncio.gather(*(asyncio.shield(texts.asked[block]) for block in blocks))
            if not texts.reading:
                texts.reading = True
                self._keep(self._ask_for_all(info, texts))
        return texts.bytes

    async def _ask_for_all(self, info: ModelInfo, texts: TokenTexts) -> None:
        """Ask for the blocks that nobody has asked for, one after the other."""
        try:
            for block in range(-(-info.vocab_size // _TOKENS_AT_ONCE)):
                if block not in texts.asked and block * _TOKENS_AT_ONCE not in texts.bytes:
                    texts.asked[block] = asyncio.ensure_future(
                        self._ask_for_block(info.name, texts, block, info.vocab_size))
                    await texts.asked[block]
                    await asyncio.sleep(_TOKENS_PAUSE)
        except ApiError as error:
            logger.debug("the tokens of model %r are not all known: %s", info.name, error)
            texts.reading = False

    async def _ask_for_block(self, name: str, texts: TokenTexts, block: int, end: int) -> None:
        """Ask for the bytes of a block of ids below `end`."""
        try:
            ids = list(range(block * _TOKENS_AT_ONCE, min((block + 1) * _TOKENS_AT_ONCE, end)))
            texts.bytes.update(zip(ids, (await self.detokenize(name, ids)).tokens))
        finally:
            del texts.asked[block]

    def token_texts(self, info: ModelInfo) -> TokenTexts:
        """The texts of the tokens that are known: those that `token_bytes` was asked for."""
        model_hash, texts = self._tokens.get(info.name, ("", None))
        if texts is None or model_hash != info.model_hash:
            texts = TokenTexts()
            self._tokens[info.name] = info.model_hash, texts
        return texts

    # --- requests ------------------------------------------------------------------------------------------------

    def generate(self, spec: RequestSpec, wait: Callable[[], Awaitable[None]] | None = None,
                 places: Sequence[str] = ()) -> Answer:
        """A request, to be entered with `async with`, which starts it and in the end releases it. `wait` waits for a
        group, or raises ApiError, if there is none any more; without it, the request is refused then. `places`: the
        fields that its images and videos have come from, for errors.
        """
        return Answer(self, spec, wait, places)

    async def attempt(self, work: Callable[[], Coroutine[Any, Any, T]],
                      wait: Callable[[], Awaitable[None]] | None) -> T:
        """The result of `work`, which asks the groups. While no group takes requests, `wait` waits for one, or raises
        ApiError. If the last group goes during `work`, it is given up, and begins anew with the next group: its own
        attempts to reach the one that has gone would last RECONNECT_SECONDS, uncounted. Without `wait`, they do.
        """
        if wait is None:
            return await work()
        while True:
            if self.health():
                await wait()
            task = asyncio.create_task(work())
            try:
                while not task.done() and not self.health():
                    await asyncio.wait((task,), timeout=_LOOK_SECONDS)
                if task.done():
                    return task.result()
            except ApiError as error:
                if error.status not in (429, 503) or not self.health():
                    raise
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def _ask(self, method: Callable[..., Awaitable[T]], *arguments: Any, places: Sequence[str] = ()) -> T:
        """Call a method of the engine; raises ApiError."""
        if not self._connected:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._tried.wait(), _FIRST_SECONDS)
            if not self._connected:
                raise ApiError(503, f"The pool cannot be reached: {self._why}", code="unavailable", retry_after=1)
        try:
            return await method(*arguments)
        except (AllSparkError, ValueError, TypeError) as error:
            raise from_engine(error, places) from error


class Answer:
    """A running request. Iteration yields its tokens as they arrive; it raises ApiError."""

    def __init__(self, pool: Pool, spec: RequestSpec, wait: Callable[[], Awaitable[None]] | None,
                 places: Sequence[str]):
        self._pool, self.spec, self._wait, self._places = pool, spec, wait, places
        self._generation = AsyncGeneration(pool._engine, spec)
        self.started = False
        self._taken = 0     # tokens that were read

    async def __aenter__(self) -> Answer:
        name = self.spec.model
        try:
            await self._pool.attempt(functools.partial(self._start, name), self._wait)
        except ApiError as error:
            if error.param == "prompt" and self.spec.messages is not None:
                error.param = "messages"
            raise
        except asyncio.CancelledError:
            if self._generation._queue is not None:     # the request had just started
                await self._generation.__aexit__()
            raise
        self.started = True
        return self

    async def _start(self, name: str) -> None:
        """Start the request with the model or the adapter of this name."""
        self.spec.model, self.spec.config.lora_name = await self._pool.resolve(name)
        self._pool.check_length(self.spec)
        self._generation = AsyncGeneration(self._pool._engine, self.spec)
        await self._pool._ask(self._generation.__aenter__, places=self._places)

    async def __aexit__(self, *_: Any) -> None:
        await self._generation.__aexit__()

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        since = time.monotonic()
        results = self._generation.queue
        try:
            while (found := results._take_or_wait()) is not None:
                if not isinstance(found, GeneratedElements):
                    await results._arrival(found)
                    continue
                self._taken += len(found.ids_from_generate)
                yield found
                if time.monotonic() - since > TURN_SECONDS:
                    await asyncio.sleep(0)      # reading what has arrived does not wait
                    since = time.monotonic()
            results._raise_error()
        except AllSparkError as error:
            raise from_engine(error, self._places) from error

    @property
    def prompt_ids(self) -> list[int]:
        """The token ids of the prompt."""
        return self.spec.input_ids or []

    @property
    def generated(self) -> int:
        """The number of generated tokens of all samples that have arrived."""
        return self._generation.queue.GeneratedLength()

    @property
    def opened(self) -> str:
        """The start of the answer that the chat template wrote."""
        return self._generation.queue.opened

    @property
    def finish_reason(self) -> str | None:
        """As ResultQueue.FinishReason; None while the request runs."""
        return self._generation.queue.FinishReason()

    @property
    def stat(self) -> RequestStatInfo:
        """The times and lengths of the request."""
        return self._generation.queue.RequestStatInfo()

    @property
    def unread(self) -> int:
        """The tokens that wait to be read, each weighted by the number of its log probabilities."""
        config = self.spec.config
        size = 1 + config.top_logprobs if config.logprobs else 1
        return size * (self._generation.queue.GeneratedLength() - self._taken)
