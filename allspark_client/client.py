"""ClientEngine: the engine's API over gRPC, for one server group or a pool of them."""
from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from . import convert
from ._proto import allspark_pb2 as pb
from .affinity import PrefixMemory, beginnings
from .config import AsModelConfig, check_available
from .connection import Member, Request, Session, Unavailable, has_adapter, unless
from .connection_options import environment_token, server_addresses, tls_config
from .engine import AbstractEngine, check_config, check_handle
from .errors import AllSparkError, AsStatus, closed_engine, forked_engine, illegal_handle, unknown_model
from .local_group import SelfStartedGroup
from .queue import ResultQueue
from .request import RequestSpec, absolute_lora
from .tokens import as_token_ids
from .types import (
    AsEngineStat,
    AsFileInfo,
    Detokenized,
    GenerateRequestStatus,
    MemberState,
    ModelInfo,
    ModelState,
    TlsConfig,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SUCCESS = AsStatus.ALLSPARK_SUCCESS
_RETRY_SECONDS = 0.2
#: how long a client that is being made waits for a server that does not listen, s
_FIRST_CONTACT_SECONDS = 5.0
#: how old the load of a pool's members may be when a request chooses one, s
_LOAD_AGE_SECONDS = 0.5
#: so many tokens of a prompt that wait to be computed keep a member as busy as a request that runs, about
_TOKENS_PER_REQUEST = 256
#: how long a server may take to answer a question, s, and to profile a model, which measures the machine
_ANSWER_SECONDS, _PROFILE_SECONDS = 30.0, 600.0
#: how long stop_request waits for the server's word that a request has ended, s
STOP_SECONDS = 10.0


class ClientEngine(AbstractEngine):
    """An engine that computes elsewhere. All requests share one stream to their server, and threads the engine."""

    def __init__(self, addresses: str | Iterable[str] | None = None, *, resume: bool = True,
                 reconnect_timeout: float = 60.0, tls: TlsConfig | dict[str, str] | str | bool | None = None,
                 token: str | None = None, start_timeout: float = 120.0):
        """Connect to a group ("host:port", "unix:/path") or a pool of them (a list, or commas).

        Without addresses: $ALLSPARK_ADDRESS if set, otherwise a group is started on this machine (within
        `start_timeout` seconds) and stopped with the engine. With `resume`, live requests of a group that dies continue
        on another one with the same fingerprint, or on the same once it is back, and calls wait for a server, both up
        to `reconnect_timeout` seconds; without, both fail at once. `tls`: a TlsConfig (or dict of its fields), a CA
        file, or True for the system's roots; Unix sockets never use it. `token`: the server's bearer token; None: what
        the file $ALLSPARK_TOKEN_FILE holds, if that is set.
        """
        if isinstance(reconnect_timeout, bool) or not isinstance(reconnect_timeout, (int, float)) \
                or not reconnect_timeout >= 0:
            raise ValueError(f"reconnect_timeout={reconnect_timeout!r} must be a number of seconds, at least 0")
        self._resume_requests = bool(resume)
        self._reconnect_timeout = float(reconnect_timeout)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._handles = itertools.count(1)
        self._closed = False
        self._closing = threading.Event()
        self._members: list[Member] = []
        self._prefixes = PrefixMemory()
        self._group: SelfStartedGroup | None = None
        tls = tls_config(tls)
        token = environment_token() if token is None else token
        given = server_addresses(addresses)
        atexit.register(self.close)
        try:
            if not given:
                self._group = SelfStartedGroup()
                given = self._group.wait(start_timeout)
            self._members = [Member(address, tls, token, self._on_lost) for address in given]
            self._first_contact()
        except BaseException:
            self.close()
            raise

    def _first_contact(self) -> None:
        deadline = time.monotonic() + _FIRST_CONTACT_SECONDS
        while True:
            failures = []
            for member in self._members:
                try:
                    member.session(max(0.5, deadline - time.monotonic()))
                except Unavailable as error:
                    failures.append(str(error))
            if len(failures) < len(self._members):
                for failure in failures:
                    logger.warning("%s; the pool goes on without it", failure)
                return
            if time.monotonic() >= deadline:
                raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, "; ".join(failures))
            time.sleep(_RETRY_SECONDS)

    # --- models --------------------------------------------------------------------------------------------------

    def install_model(self, config: AsModelConfig) -> AsStatus:
        """On a pool: on every member. Paths that exist here are sent absolute: servers have another directory."""
        config = copy.copy(check_config(config))
        for name in ("model_path", "weights_path", "draft_model"):
            setattr(config, name, _path(getattr(config, name)))
        config.lora_names = [absolute_lora(lora) for lora in config.lora_names]
        request = pb.InstallModelRequest(config=convert.model_config_to_pb(config))
        again = pb.InstallModelRequest(config=request.config, retried=True)
        return self._everywhere("InstallModel", request, lambda member: member.call("InstallModel", again, pb.Done))

    def start_model(self, model_name: str) -> AsStatus:
        return self._everywhere("StartModel", pb.ModelRequest(model=_name(model_name)))

    def stop_model(self, model_name: str) -> AsStatus:
        with self._interrupting(_name(model_name)):
            return self._everywhere("StopModel", pb.ModelRequest(model=model_name))

    def release_model(self, model_name: str) -> AsStatus:
        request = pb.ModelRequest(model=_name(model_name))
        with self._interrupting(model_name):
            self._everywhere("ReleaseModel", request, unless(AsStatus.ALLSPARK_PARAM_ERROR, "ReleaseModel", request))
        with self._lock:
            self._requests = {h: r for h, r in self._requests.items() if r.spec.model != model_name}
        return _SUCCESS

    @contextlib.contextmanager
    def _interrupting(self, model_name: str) -> Iterator[None]:
        """Around a call that ends this client's requests of a model: it asks for their interruption."""
        with self._lock:
            ending = [r for r in self._requests.values() if r.spec.model == model_name and not r.stopped]
        for request in ending:
            request.stopped = True
        try:
            yield
        except BaseException:
            for request in ending:
                request.stopped = False
            raise

    def list_models(self) -> list[ModelState]:
        """On a pool: each member's, one after the other."""
        if len(self._members) == 1:
            return self._retry(lambda member: member.models())
        return [model for models in self._from_each(lambda member: member.models()) for model in models]

    def members(self) -> list[MemberState]:
        """The groups of the pool; those that cannot be reached are not waited for."""
        return [member.state() for member in self._members]

    # --- requests ------------------------------------------------------------------------------------------------

    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        request = self._register(spec)
        try:
            self._submit(request)
        except BaseException:
            self._drop(request)
            raise
        return _SUCCESS, request.handle, request.queue

    def _register(self, spec: RequestSpec) -> Request:
        """A new request, of which no server knows yet."""
        self._check_open()
        if spec.config.mm_info is not None:     # has no form on the wire yet
            check_available(spec.config)
        spec.config = spec.config.with_seed()   # so that another server can continue with the same draws
        request = Request(next(self._handles), spec)
        with self._lock:
            self._requests[request.handle] = request
        return request

    def _submit(self, request: Request) -> None:
        """Start a request on some server and wait for its word."""
        def start(member: Member) -> None:
            session = member.session()
            if not request.dropped:     # meanwhile
                self._note_choice(request.spec, member)
                session.start(request)

        self._retry(start, lambda: self._by_load(request.spec))
        if request.dropped:     # while it was on its way
            self._drop(request)

    def _send_at_once(self, request: Request) -> Session | None:
        """Send a request to the server that `_submit` would try first, if that is known and connected: then nothing has
        to be waited for. The session has its answer; None if it was not sent.
        """
        if len(self._members) > 1 and not all(member.knows_models(_LOAD_AGE_SECONDS)
                                              for member in self._members if member.connected):
            return None
        member = self._by_load(request.spec)[0]
        session = member.live_session
        if session is not None:
            try:
                self._note_choice(request.spec, member)
                session.send(request)
            except Unavailable as error:
                logger.debug("sending request %d: %s", request.handle, error)
                return None
        return session

    def _drop(self, request: Request) -> None:
        """Forget a request; its server is told, and what it has not sent yet is lost."""
        request.dropped = True
        if not request.queue.GenerateStatus().final:
            request.stopped = True
        with self._lock:
            self._requests.pop(request.handle, None)
        session = request.session
        if session is not None and session.broken is None:
            session.release(request)
        request.finish(GenerateRequestStatus.GenerateInterrupted)

    def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        request = self._request(model_name, request_handle)
        session = self._ask_to_stop(request)
        if session is not None and not request.queue.wait_final(STOP_SECONDS):
            self._stop_here(request, session)
        return _SUCCESS

    def _ask_to_stop(self, request: Request) -> Session | None:
        """The session that will tell of the request's end, unless it has ended."""
        if request.queue.GenerateStatus().final:
            return None
        request.stopped = True
        session = request.session
        if session is None or session.broken is not None:
            request.finish(GenerateRequestStatus.GenerateInterrupted)
            return None
        session.stop(request)
        return session

    @staticmethod
    def _stop_here(request: Request, session: Session) -> None:
        logger.warning("the server at %s did not end request %d within %g s", session.address, request.handle,
                       STOP_SECONDS)
        session.release(request)
        request.finish(GenerateRequestStatus.GenerateInterrupted)

    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        self.stop_request(model_name, request_handle)
        request = self._find(request_handle)
        if request is not None:
            self._drop(request)
        return _SUCCESS

    def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        if request_handle is not None:
            self._request(model_name, request_handle).queue.wait_final()
            return _SUCCESS
        for request in self._requests_of(model_name):
            request.queue.wait_final()
        return _SUCCESS

    def _requests_of(self, model_name: str) -> list[Request]:
        self._check_model(model_name)
        with self._lock:
            return [r for r in self._requests.values() if r.spec.model == model_name]

    # --- information ---------------------------------------------------------------------------------------------

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """On a pool: the sum over the members that can be reached."""
        request = pb.ModelRequest(model=_name(model_name))
        if len(self._members) == 1:
            return convert.engine_stat_from_pb(self._call("GetStat", request, pb.EngineStat))
        stats = self._from_each(lambda member: member.call("GetStat", request, pb.EngineStat, _ANSWER_SECONDS))
        return AsEngineStat.merged(map(convert.engine_stat_from_pb, stats))

    def get_model_info(self, model_name: str) -> ModelInfo:
        return convert.model_info_from_pb(
            self._call("GetModelInfo", pb.ModelRequest(model=_name(model_name)), pb.ModelInfo))

    def _tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        request = pb.TokenizeRequest(request=convert.request_to_pb(spec), bare=bare)
        return list(self._call("Tokenize", request, pb.Tokenized).ids)

    def detokenize(self, model_name: str, ids: list[int]) -> Detokenized:
        request = pb.DetokenizeRequest(model=_name(model_name), ids=as_token_ids(ids))
        answer = self._call("Detokenize", request, pb.Detokenized)
        return Detokenized(answer.text, list(answer.tokens))

    def get_file_information(self, as_graph_path: str | os.PathLike, as_param_path: str | os.PathLike) -> AsFileInfo:
        answer = self._call("GetFileInformation", pb.FileInformationRequest(
            graph_path=_path(as_graph_path), param_path=_path(as_param_path)), pb.FileInformation)
        return AsFileInfo(answer.create_version_graph, answer.create_version_param, answer.current_version_engine)

    def get_op_profiling_info(self, model_name: str) -> str:
        return self._call("GetOpProfiling", pb.ModelRequest(model=_name(model_name)), pb.OpProfiling,
                          _PROFILE_SECONDS).table

    def get_rank_id(self) -> int:
        return self._call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo).rank_id

    def get_rank_nums(self) -> int:
        return self._call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo).rank_nums

    def is_allspark_work_as_service(self) -> bool:
        return True

    def get_version_full(self) -> str:
        return self._call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo).version

    # --- adapters ------------------------------------------------------------------------------------------------

    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """On a pool: on every member. A path that exists here is sent absolute."""
        request = pb.LoraRequest(model=_name(model_name), lora=absolute_lora(lora_name))
        return self._everywhere("LoadLora", request,
                                unless(AsStatus.ALLSPARK_LORA_ALREADY_LOADED, "LoadLora", request))

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        request = pb.LoraRequest(model=_name(model_name), lora=absolute_lora(lora_name))
        return self._everywhere("UnloadLora", request, unless(AsStatus.ALLSPARK_LORA_NOT_FOUND, "UnloadLora", request))

    # --- what is not built yet (the server says so) --------------------------------------------------------------

    def unload_device_mem(self, model_name: str) -> AsStatus:
        return self._everywhere("UnloadDeviceMem", pb.ModelRequest(model=_name(model_name)))

    def load_device_mem(self, model_name: str) -> AsStatus:
        return self._everywhere("LoadDeviceMem", pb.ModelRequest(model=_name(model_name)))

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections (the server cancels what is live), and stop the group that this engine started. In a
        forked child this does nothing: all that is the parent's.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            requests, self._requests = list(self._requests.values()), {}
        self._closing.set()
        for request in requests:
            request.finish(GenerateRequestStatus.GenerateInterrupted)
        for member in self._members:
            member.close()
        if self._group is not None:
            self._group.stop()
        atexit.unregister(self.close)

    # --- calling servers -----------------------------------------------------------------------------------------

    def _retry(self, attempt: Callable[[Member], T], candidates: Callable[[], list[Member]] | None = None) -> T:
        """`attempt` with the first member that can be reached, again and again up to reconnect_timeout."""
        deadline = time.monotonic() + self._reconnect_timeout
        while True:
            self._check_open()
            unavailable: list[Unavailable] = []
            for member in candidates() if candidates else self._healthy_first():
                try:
                    return attempt(member)
                except Unavailable as error:
                    unavailable.append(error)
            self._check_open()
            details = "; ".join(map(str, unavailable))
            failure = self._group.failure() if self._group is not None else None
            if failure is not None:
                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"{details}: {failure}")
            if not self._resume_requests:
                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, details)
            if time.monotonic() >= deadline:
                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                    f"{details}; gave up after {self._reconnect_timeout:g} s")
            self._closing.wait(_RETRY_SECONDS)

    def _call(self, method: str, request: Any, response_type: Any, timeout: float = _ANSWER_SECONDS) -> Any:
        return self._retry(lambda member: member.call(method, request, response_type, timeout))

    def _everywhere(self, method: str, request: Any, again: Callable[[Member], Any] | None = None) -> AsStatus:
        """A call that every member must obey; the first refusal is raised once all have answered. It may take long (a
        load does), so it ends with the connection only. `again` is called instead once a member's answer was lost: it
        may have obeyed.
        """
        self._check_open()

        def first(member: Member) -> None:
            member.call(method, request, pb.Done)

        def obey(member: Member) -> None:
            attempts = itertools.chain([first], itertools.repeat(again or first))
            self._retry(lambda m: next(attempts)(m), lambda: [member])

        if len(self._members) == 1:
            obey(self._members[0])
            return _SUCCESS
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="allspark-pool") as pool:
            futures = [pool.submit(obey, member) for member in self._members]
        for member, future in zip(self._members, futures):
            error = future.exception()
            if isinstance(error, AllSparkError):
                raise AllSparkError(error.status, f"{error.message} (pool member {member.address})", error.retryable)
            if error is not None:
                raise error
        return _SUCCESS

    def _from_each(self, attempt: Callable[[Member], T]) -> list[T]:
        """What the members that are connected answer; waits for a first one if there is none."""
        self._check_open()
        answers = []
        for member in self._members:
            if not member.connected:
                member.reconnect_soon()
                continue
            try:
                answers.append(attempt(member))
            except Unavailable as error:
                logger.warning("%s", error)
        return answers or [self._retry(attempt)]

    def _healthy_first(self) -> list[Member]:
        return sorted(self._members, key=lambda member: not member.connected)

    def _note_choice(self, spec: RequestSpec, member: Member) -> None:
        """A member of the pool gets a request."""
        if len(self._members) > 1:
            prompt = beginnings(spec)
            familiar, saved = self._prefixes.find(prompt)
            if prompt:
                member.sent_work += prompt[-1][1] - (saved if familiar == member.address else 0)
                self._prefixes.note(prompt, member.address)

    def _by_load(self, spec: RequestSpec) -> list[Member]:
        """Members in the order in which a new request should try them: those that run the model and take new requests
        first, of these the one with the least to do; where it was computed before, the prompt's beginning is not.
        """
        if len(self._members) == 1:
            return self._members
        ranked, (familiar, saved) = [], self._prefixes.find(beginnings(spec))
        for order, member in enumerate(self._members):
            if not member.connected:    # tried only if all others fail: connecting to a dead server takes seconds
                member.reconnect_soon()
                ranked.append((2, 0, order, member))
                continue
            try:
                live = member.session().live
                state = next((m for m in member.models(_LOAD_AGE_SECONDS) if m.name == spec.model), None)
            except (Unavailable, AllSparkError) as error:
                logger.debug("not a candidate: %s", error)
                ranked.append((2, 0, order, member))
                continue
            # The member's own count has this client's requests, but may be older than the latest of them.
            load = max(live, state.load) if state is not None else live
            work = member.sent_work + (state.work if state is not None else 0)
            load += (work - (saved if member.address == familiar else 0)) / _TOKENS_PER_REQUEST
            takes = state is not None and state.running and not member.draining and has_adapter(state, spec)
            ranked.append((0 if takes else 1, load, order, member))
        return [entry[3] for entry in sorted(ranked, key=lambda entry: entry[:3])]

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise forked_engine()
        if self._closed:
            raise closed_engine()

    def _check_model(self, name: Any) -> None:
        names = {m.name for m in self.list_models()}
        if _name(name) not in names:
            raise unknown_model(name, names)

    def _request(self, name: Any, handle: Any) -> Request:
        check_handle(handle)
        _name(name)
        self._check_open()
        request = self._find(handle)
        if request is None or request.spec.model != name:
            self._check_model(name)
            raise illegal_handle(name, handle)
        return request

    def _find(self, handle: int) -> Request | None:
        with self._lock:
            return self._requests.get(handle)

    # --- when a server is lost -----------------------------------------------------------------------------------

    def _on_lost(self, session: Session, requests: list[Request], error: Unavailable | AllSparkError) -> None:
        """A session broke (called on its reading thread): end its live requests, or have them resumed."""
        if self._closed:
            for request in requests:
                request.finish(GenerateRequestStatus.GenerateInterrupted)
            return
        if requests:
            logger.warning("%s; %d live requests", error, len(requests))
        resumable = []
        for request in requests:
            if request.stopped:
                request.finish(GenerateRequestStatus.GenerateInterrupted)
            elif isinstance(error, AllSparkError):      # the server ended the session on purpose
                request.finish(GenerateRequestStatus.InternalError, error)
            elif not self._resume_requests:
                _fail(request, f"{error}; the engine was made with resume=False")
            elif why := request.note_loss():
                _fail(request, f"{error}; {why}")
            else:
                resumable.append(request)
        resumable.sort(key=lambda request: -request.losses)     # who got nothing of the last ones is first at the next
        if resumable:
            threading.Thread(target=self._resume, args=(resumable, session.address, str(error)), daemon=True,
                             name="allspark-resume").start()

    def _resume(self, requests: list[Request], lost: str, why: str) -> None:
        """Hand requests, with the tokens they have, to whichever server gives them the same continuation."""
        deadline = time.monotonic() + self._reconnect_timeout
        for request in requests:
            request.resumed = True
        # Another member is as good at once as the lost one is when it is back.
        members = sorted(self._members, key=lambda member: (member.draining, member.address == lost))
        while requests and not self._closed:
            different = dict.fromkeys(requests, 0)
            for member in members:
                try:
                    session = member.session()
                    models = {m.name: m for m in member.models(_LOAD_AGE_SECONDS)}
                except (Unavailable, AllSparkError) as error:
                    why = str(error)
                    continue
                suited = []
                for request in requests:
                    obstacle, lasting = request.obstacle(models.get(request.spec.model), member.address)
                    why, different[request] = obstacle or why, different[request] + lasting
                    if not obstacle:
                        suited.append(request)
                settled = self._hand_over(suited, session)
                requests = [request for request in requests if request not in settled]
            for request in [r for r in requests if different[r] == len(members)]:
                requests.remove(request)
                _fail(request, f"the connection to {lost} was lost; {why}", GenerateRequestStatus.GenerateInterrupted)
            failure = self._group.failure() if self._group is not None else None
            if requests and (failure is not None or time.monotonic() >= deadline):
                why = failure or f"{why}; gave up after {self._reconnect_timeout:g} s"
                break
            if requests:
                self._closing.wait(_RETRY_SECONDS)
        for request in requests:
            _fail(request, f"the connection to {lost} was lost; {why}")

    @staticmethod
    def _hand_over(requests: list[Request], session: Session) -> set[Request]:
        """Re-send requests; returns those that are done with: they run again, or have ended. All are sent before the
        first answer is awaited, so that many take no longer than a few.
        """
        settled, sent = set(), []
        for request in requests:
            if request.stopped:
                request.finish(GenerateRequestStatus.GenerateInterrupted)
                settled.add(request)
                continue
            try:
                session.send(request)
            except Unavailable as error:
                logger.debug("resuming request %d: %s", request.handle, error)
                break
            sent.append(request)
        for request in sent:
            try:
                session.wait_answer(request)
            except Unavailable as error:
                logger.debug("resuming request %d: %s", request.handle, error)
                continue
            except AllSparkError as error:
                if error.retryable:
                    logger.debug("resuming request %d: %s", request.handle, error)
                    continue
                request.finish(GenerateRequestStatus.InternalError, error)
            except (ValueError, TypeError) as error:
                _fail(request, f"resuming on {session.address} was refused: {error}")
            else:
                logger.info("request %d goes on at %s after %d tokens", request.handle, session.address,
                            request.generated)
                if request.stopped:     # stopped while it was on its way
                    session.stop(request)
            settled.add(request)
        return settled


def _fail(request: Request, message: str, status: GenerateRequestStatus = GenerateRequestStatus.InternalError) -> None:
    request.finish(status, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, message))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"model_name must be a str, not {type(name).__name__}")
    return name


def _path(path: str | os.PathLike) -> str:
    path = os.fspath(path)
    return os.path.abspath(path) if path and os.path.exists(path) else path
