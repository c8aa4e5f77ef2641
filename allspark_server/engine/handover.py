"""Prefill apart from decode: this group takes the spans of long prompts from other groups, which compute them.

Spans go from host cache to host cache, by their keys. A request waits for them as for any dependency, and then finds
them as a prefix that the host cache holds. So its bits are those of a prefix hit, and whatever fails on the way only
means that this group computes the prompt itself. docs/decisions/serving.md says why it is done like this.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.config import GenerateConfig
from allspark_client.connection import Member
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.session import Unavailable
from allspark_client.types import TlsConfig

from ..cache import STATE_STEP
from ..runtime.host_cache import SpanRecords, records_path
from .input_stage import Dependency, PreparedRequest

if TYPE_CHECKING:
    from .engine import Engine
    from .served_model import ServedModel

logger = logging.getLogger(__name__)

KEY_BYTES = 16
_AT_ONCE = 16           # requests for which spans are awaited at the same time; further ones wait for these
_COPIERS = 2            # threads that copy spans on one machine: they take time from the compute threads
_BATCH = 16             # spans that one of them copies in one go
_LOST_SECONDS = 10.0    # that a group which cannot be reached is not asked again
_CLOSE_SECONDS = 30.0   # that a released model waits for copies of a few spans


def machine() -> str:
    """Names this boot of this machine: processes with the same name can open the same files, except in containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class HandoverCounters:
    """What a model has taken from other groups. requests: by outcome, "file", "stream", "none" or "failed". seconds: of
    waiting until prompts were computed, and of copying.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("file", "stream", "none", "failed"), 0))
    tokens: int = 0
    bytes: int = 0
    lost_spans: int = 0
    prefill_seconds: float = 0.0
    copy_seconds: float = 0.0


class Records:
    """The host cache files of all ranks of a model, which rank 0 maps. Any thread."""

    def __init__(self, directory: str, model: str, ranks: int):
        self._paths = [records_path(directory, model, rank, ranks) for rank in range(ranks)]
        self._files: list[SpanRecords] = []
        self._change = threading.Condition()
        self._users, self._closed = 0, False

    @property
    def paths(self) -> list[str]:
        """The files' paths, by rank."""
        return self._paths

    @contextlib.contextmanager
    def open(self) -> Iterator[list[SpanRecords]]:
        """The files, by rank, which stay this model's for the length of the block: keep it short. Raises OSError or
        ValueError if they cannot be mapped, or the model was released.
        """
        with self._change:
            if self._closed:
                raise ValueError("the model was released")
            if not self._files:
                self._files = [SpanRecords(path, writable=True) for path in self._paths]
            self._users += 1
        try:
            yield self._files
        finally:
            with self._change:
                self._users -= 1
                self._change.notify_all()

    def close(self) -> None:
        """Waits until nobody uses the files, at most _CLOSE_SECONDS; from now on nobody can."""
        with self._change:
            self._closed = True
            if not self._change.wait_for(lambda: not self._users, _CLOSE_SECONDS):
                # Whoever it is keeps its mapping. A span that it writes later has a checksum of its own key.
                logger.error("%s: %d copies of spans have not ended within %g s of the model's release; the release "
                             "goes on without them", self._paths[0], self._users, _CLOSE_SECONDS)
            self._files = []


class Handover:
    """Takes spans from groups at `addresses`.

    tokens: the least number of prompt tokens that this group would have to compute otherwise. timeout: seconds after
    which it computes them itself. token, tls: to connect with.
    """

    def __init__(self, engine: Engine, addresses: Sequence[str], tokens: int, timeout: float, token: str | None = None,
                 tls: TlsConfig | None = None):
        self._engine, self._tokens, self._timeout = engine, tokens, timeout
        self._members = [Member(address, tls, token, lambda *_: None) for address in addresses]
        self._unable: set[str] = set()      # models that cannot take spans
        self._lock = threading.Lock()
        self._asked = dict.fromkeys(self._members, 0)               # requests that each computes for this group
        self._lost_until = dict.fromkeys(self._members, 0.0)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="allspark-handover")
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="allspark-span-copies")

    def dependency(self, model: ServedModel, prepared: PreparedRequest, spec: RequestSpec) -> Dependency | None:
        """What a request waits for until spans of its prompt have arrived; None if it should not wait. Any thread."""
        sequence, size = prepared.sequences[0], model.info.span_size
        positions = (sequence.prompt_len - 1) // size * size    # at least one row is computed here
        if model.info.state_spans:
            positions = positions // max(size, STATE_STEP) * max(size, STATE_STEP)
        keys = sequence.keys[:positions // size]
        # An image's rows would have to be computed here and there.
        if spec.deaths or spec.images or sequence.outputs_every_row or not keys or positions < self._tokens:
            return None
        if model.records is None:
            if model.name not in self._unable:
                self._unable.add(model.name)
                logger.warning("model %r: its prompts are computed here: taking spans of other groups needs "
                               "host_cache_memory and host_cache_dir, and all ranks on one host", model.name)
            return None
        done: Future[bool] = Future()
        request = _request(spec, model, positions)
        self._threads.submit(self._run, model, request, keys, time.monotonic() + self._timeout, done)
        return Dependency("spans of another group", done)

    def close(self) -> None:
        """Ends the threads; requests that wait are ended by the engine."""
        for member in self._members:
            member.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._copiers.shutdown(wait=False, cancel_futures=True)

    def _run(self, model: ServedModel, request: pb.PrefillRequest, keys: list[bytes], until: float,
             done: Future[bool]) -> None:
        try:
            outcome = self._fetch(model, request, keys, until)
        except Exception as error:      # whatever it is, the prompt can be computed here
            logger.warning("model %r: a prompt is computed here, not by another group: %s", model.name,
                           str(error) or type(error).__name__)
            outcome = "failed"
        if outcome:
            with self._lock:
                model.handover.requests[outcome] += 1
        done.set_result(outcome in ("file", "stream"))

    def _fetch(self, model: ServedModel, request: pb.PrefillRequest, keys: list[bytes], until: float) -> str:
        """Brings spans of a prompt into the host cache. Returns the outcome; "" if nothing was to be done."""
        call, size = self._engine.on_engine_thread, model.info.span_size
        held, wanted = call(lambda: model.scheduler.lacking_spans(keys))
        if len(keys) * size - held < self._tokens:
            return ""
        request.keys = b"".join(wanted)
        failures = []
        for member in self._by_load():
            if (left := until - time.monotonic()) <= 0:
                failures.append(f"no answer within {self._timeout:g} s")
                break
            began = time.monotonic()
            with self._lock:
                self._asked[member] += 1
            try:
                answer = member.call("Prefill", request, pb.Prefilled, left)
                seconds = time.monotonic() - began
                outcome, count = _Taking(self, model, member, keys, wanted, until).take(answer)
            except (Unavailable, AllSparkError, OSError, ValueError) as error:
                failures.append(f"{member.address}: {error}")
                if isinstance(error, Unavailable):
                    self._lost_until[member] = time.monotonic() + _LOST_SECONDS
                continue
            finally:
                with self._lock:
                    self._asked[member] -= 1
            now, _ = call(lambda: model.scheduler.lacking_spans(keys))
            with self._lock:
                counters = model.handover
                counters.prefill_seconds += seconds
                counters.copy_seconds += time.monotonic() - began - seconds
                counters.tokens += max(0, now - held)
            logger.info("model %r: %d of %d prompt tokens were computed by %s in %.2f s, and came in %.3f s (%s, %d "
                        "spans)", model.name, max(0, now - held), len(keys) * size - held, member.address, seconds,
                        time.monotonic() - began - seconds, outcome, count)
            return outcome
        raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, "; ".join(failures) or "no group can be reached")

    def _by_load(self) -> list[Member]:
        """The groups that may be reached, those that compute the fewest prompts for this one first."""
        now = time.monotonic()
        with self._lock:
            return sorted((member for member in self._members if self._lost_until[member] <= now),
                          key=self._asked.__getitem__)


class _Taking:
    """Takes the spans of one prompt from one group."""

    def __init__(self, handover: Handover, model: ServedModel, member: Member, keys: list[bytes], wanted: list[bytes],
                 until: float):
        self._handover, self._model, self._member, self._until = handover, model, member, until
        self._keys, self._wanted = keys, wanted
        self._filled: dict[int, bytes] = {}     # keys by span of the host cache

    def take(self, answer: pb.Prefilled) -> tuple[str, int]:
        """Fills spans of the host cache. Returns the outcome and the number of spans."""
        model, call = self._model, self._handover._engine.on_engine_thread
        cache = model.host_cache
        assert model.records is not None and cache is not None
        offered = [(key, record) for key, record in zip(self._wanted, answer.records) if record >= 0]
        if not offered:
            return "none", 0
        with model.records.open() as own:
            _check_facts(own, [file.facts for file in answer.files])
            size = sum(each.bytes for each in own)
        hosts = call(lambda: cache.reserve(len(offered), self._keys))
        try:
            # Steps that are planned already may still use what these spans held.
            call(model.flush).result(self._left())
            self._handover._engine.wait_for_ranks()
            wanted = [(host, *each) for host, each in zip(hosts, offered)]
            sources = _opened(answer)
            if sources is not None:
                self._copy(sources, wanted)
            else:
                self._receive(wanted)
        finally:
            call(lambda: cache.commit(hosts, self._filled))
        with self._handover._lock:
            model.handover.lost_spans += len(wanted) - len(self._filled)
            model.handover.bytes += size * len(self._filled)
        return "file" if sources is not None else "stream", len(self._filled)

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _copy(self, sources: list[SpanRecords], wanted: list[tuple[int, bytes, int]]) -> None:
        """Copies spans from files of the same machine."""
        records = self._model.records
        assert records is not None

        def copy(part: list[tuple[int, bytes, int]]) -> None:
            with records.open() as own:
                for host, key, record in part:
                    for source, target in zip(sources, own):
                        checksum = source.checksum(record, key)
                        if checksum is None or not self._write(target, host, key, source.content(record), checksum):
                            break
                    else:
                        self._filled[host] = key

        parts = [wanted[i:i + _BATCH] for i in range(0, len(wanted), _BATCH)]
        copied = [self._handover._copiers.submit(copy, part) for part in parts]
        _, late = wait(copied, self._left())
        for future in late:
            future.cancel()
        wait(copied)    # none may write any more once the spans are free again
        for future in copied:
            if not future.cancelled():
                future.result()

    def _receive(self, wanted: list[tuple[int, bytes, int]]) -> None:
        """Receives spans over the network."""
        records = self._model.records
        assert records is not None
        with records.open() as own:
            sizes = [each.bytes for each in own]
        request = pb.ReadSpansRequest(model=self._model.name, keys=b"".join(key for _, key, _ in wanted),
                                      records=[record for *_, record in wanted])
        current, content = (-1, -1), bytearray()
        whole = -1      # the last rank whose part of the current span was written, as those of all ranks before it
        for part in self._member.stream("ReadSpans", request, pb.SpanPart, self._left()):
            if (part.index, part.rank) != current:
                whole = whole if part.index == current[0] else -1
                current, content = (part.index, part.rank), bytearray()
            content += part.content
            if part.index >= len(wanted) or part.rank >= len(sizes) or len(content) > sizes[part.rank]:
                raise ValueError(f"{self._member.address} sent span {part.index} of rank {part.rank}, "
                                 f"{len(content)} bytes; wanted are {len(wanted)} spans of {len(sizes)} ranks")
            if len(content) == sizes[part.rank]:
                host, key, _ = wanted[part.index]
                with records.open() as own:
                    if whole == part.rank - 1 and self._write(own[part.rank], host, key, content, part.checksum):
                        whole = part.rank
                if whole == len(sizes) - 1:
                    self._filled[host] = key

    def _write(self, target: SpanRecords, host: int, key: bytes, content: memoryview | bytearray,
               checksum: int) -> bool:
        written = target.write(host, key, content, checksum)
        if not written:
            logger.warning("model %r: a span from %s differs from its checksum; it is computed here",
                           self._model.name, self._member.address)
        return written


def _opened(answer: pb.Prefilled) -> list[SpanRecords] | None:
    """The files of a group on this machine; None if they cannot be opened here."""
    if answer.machine != machine():
        return None
    try:
        return [SpanRecords(file.path) for file in answer.files]
    except (OSError, ValueError) as error:
        logger.debug("spans come over the network: %s", error)
        return None


def _check_facts(own: list[SpanRecords], theirs: Sequence[str]) -> None:
    """Raises ValueError unless spans of both groups are interchangeable."""
    if len(own) != len(theirs):
        raise ValueError(f"it has {len(theirs)} ranks, this group {len(own)}")
    for rank, (mine, text) in enumerate(zip(own, theirs)):
        facts = json.loads(text)
        unlike = [name for name, value in mine.spans_depend_on.items() if facts.get(name) != value]
        if unlike:
            raise ValueError(f"spans of rank {rank} are of another kind: {', '.join(unlike)}")


def _request(spec: RequestSpec, model: ServedModel, positions: int) -> pb.PrefillRequest:
    """What asks another group to compute the first positions of a request's prompt."""
    info, ids = model.info, list(spec.input_ids or ())
    if not (info.dynamic_rope_original or info.long_rope_original):     # else keys and values depend on the length
        ids = ids[:positions]
    config = GenerateConfig(max_new_tokens=1, cache_salt=spec.config.cache_salt, lora_name=spec.config.lora_name,
                            priority=spec.config.priority)
    asked = RequestSpec(spec.model, input_ids=ids, config=config, tenant=spec.tenant, trace=spec.trace)
    return pb.PrefillRequest(request=convert.request_to_pb(asked), scope=spec.cache_scope,
                             fingerprint=model.fingerprint)
