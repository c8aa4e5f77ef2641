"""The calls of groups that have prompts computed here: Prefill computes one, ReadSpans sends the spans of its KV cache.

See engine/handover.py for the other side. Groups on the same machine need ReadSpans only if they cannot open this one's
files.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus, Draining
from allspark_client.types import GenerateRequestStatus

from ..access import Client
from ..engine.handover import KEY_BYTES, Records, machine
from .calls import abort, receive
from .methods import GATEWAYS, Methods

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.served_model import ServedModel

#: bytes of one SpanPart
PART_BYTES = 1 << 20
#: how long copies to the host cache may take after a prompt was computed, s
SAVE_SECONDS = 60.0


class _End:
    """The sink of a request whose tokens nobody wants."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()

    def on_token(self, *_: Any) -> None:
        """See Sink."""

    on_prompt = on_status = on_begun = on_token

    def on_finish(self, handle: int, status: GenerateRequestStatus, error: AllSparkError | None,
                  stat: dict[str, float], reason: str) -> None:
        """See Sink."""
        if status is GenerateRequestStatus.GenerateFinished:
            self.done.set_result(None)
        else:
            self.done.set_exception(error or AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                                           "the prompt was interrupted"))


class SpanCalls:
    """The handlers of Prefill and ReadSpans. `draining()`: whether the service takes no new requests."""

    def __init__(self, engine: Engine, methods: Methods, draining: Callable[[], bool]):
        self._engine, self._methods, self._draining = engine, methods, draining
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="allspark-spans")
        self._machine = machine()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The calls by name."""
        return {"Prefill": self._methods.method("Prefill", GATEWAYS, self._prefill),
                "ReadSpans": self._methods.method("ReadSpans", GATEWAYS, self._read_spans)}

    def shutdown(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prefill(self, context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
        loop, handle = asyncio.get_running_loop(), 0
        try:
            request = self._methods.parse(pb.PrefillRequest, await receive(context), context)
            client.check_model(request.request.model)
            if self._draining():
                raise Draining
            model, end = self._model(request.request.model), _End()
            if request.fingerprint != model.fingerprint:
                raise ValueError(f"fingerprint={request.fingerprint!r} is not that of model {model.name!r} here, "
                                 f"{model.fingerprint!r}: its spans would give other bytes")
            keys = _split(request.keys)
            spec = convert.request_from_pb(request.request)
            spec.cache_scope = request.scope
            handle = await loop.run_in_executor(self._threads, self._engine.submit, spec, end)
            await asyncio.wrap_future(end.done)
            answer = await loop.run_in_executor(self._threads, self._saved, model, keys)
            await context.write(answer.SerializeToString())
        except (AllSparkError, ValueError, TypeError, OSError) as error:
            await abort(context, error)
        finally:
            if handle:      # a request whose caller is gone is cancelled
                with contextlib.suppress(AllSparkError):
                    self._engine.release(handle)

    def _saved(self, model: ServedModel, keys: list[bytes]) -> pb.Prefilled:
        """Has the spans of a computed prompt copied to the host cache, and tells where they lie. Blocks."""
        call, until = self._engine.on_engine_thread, time.monotonic() + SAVE_SECONDS
        cache = model.host_cache
        assert model.records is not None and cache is not None

        def save() -> Future[None]:
            model.scheduler.save_spans(keys)
            return model.flush()

        # A recurrent state is copied to spans of the cache by the first step, and to the host cache by the second.
        for _ in range(2 if model.info.state_spans else 1):
            call(save).result(max(0.0, until - time.monotonic()))
        self._engine.wait_for_ranks()
        records = call(lambda: [-1 if (host := cache.host_span(key)) is None else host for key in keys])
        with model.records.open() as files:
            described = [pb.RecordsFile(path=path, facts=file.facts_text)
                         for path, file in zip(model.records.paths, files)]
        return pb.Prefilled(records=records, files=described, machine=self._machine)

    async def _read_spans(self, context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
        loop = asyncio.get_running_loop()
        try:
            request = self._methods.parse(pb.ReadSpansRequest, await receive(context), context)
            client.check_model(request.model)
            model, keys = self._model(request.model), _split(request.keys)
            assert model.records is not None
            if len(keys) != len(request.records):
                raise ValueError(f"keys has {len(keys)} keys and records {len(request.records)} numbers; each key "
                                 "needs one")
            parts = _parts(model.records, keys, list(request.records))
            while batch := await loop.run_in_executor(self._threads, _next, parts):
                for message in batch:
                    await context.write(message)
        except (AllSparkError, ValueError, TypeError, OSError) as error:
            await abort(context, error)

    def _model(self, name: str) -> ServedModel:
        """A model whose spans may be read. Raises AllSparkError."""
        model = self._engine.served_model(name)
        if model.records is None:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                f"model {name!r} keeps no spans that other groups could take: it needs host_cache_dir, "
                                "and all ranks on one host")
        return model


def _parts(records: Records, keys: list[bytes], numbers: list[int]) -> Iterator[bytes]:
    """The SpanParts of these spans, without those that have another key now."""
    for index, (key, number) in enumerate(zip(keys, numbers)):
        for rank in range(len(records.paths)):
            at, size = 0, 1
            while at < size:
                with records.open() as files:
                    checksum, size = files[rank].checksum(number, key), files[rank].bytes
                    if checksum is None:
                        break
                    content = files[rank].content(number)[at:at + PART_BYTES].tobytes()
                at += len(content)
                yield pb.SpanPart(index=index, rank=rank, content=content, checksum=checksum).SerializeToString()


def _next(parts: Iterator[bytes]) -> list[bytes]:
    """The next of these messages, together at least PART_BYTES; none after the end. Blocks."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part)
        if size >= PART_BYTES:
            break
    return batch


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys has {len(keys)} bytes; each key has {KEY_BYTES}")
    return [keys[i:i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
