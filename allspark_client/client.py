"""ClientEngine: the engine's API over gRPC, for one server group or a pool of them."""
from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import convert
from ._proto import allspark_pb2 as pb
from .config import AsModelConfig, check_available
from .connection import Member, retry_unless
from .connection_options import environment_token, server_addresses, tls_config
from .engine import AbstractEngine, check_config, check_handle, check_model_name
from .errors import AsStatus, NotLoaded, illegal_handle, unknown_model
from .live_request import LiveRequest
from .local_group import SelfStartedGroup
from .pool import Pool
from .queue import ResultQueue
from .request import RequestSpec, absolute_lora
from .resumption import Resumption
from .session import Session, Unavailable
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

_SUCCESS = AsStatus.ALLSPARK_SUCCESS
#: how long profiling a model may take, s: the first call measures the machine
_PROFILE_SECONDS = 600.0
#: how long stop_request waits for the server to confirm the end of a request, s
STOP_SECONDS = 10.0


class ClientEngine(AbstractEngine):
    """The engine's API in front of a server group, or a pool of them, over gRPC.

    All requests to a group share one stream, which a thread of the engine reads. Methods may be called from any thread;
    in an event loop, use AsyncClientEngine. An engine belongs to the process that made it: after a fork, the child must
    make another. Methods are described at AbstractEngine; on a pool, methods that change a model apply to every member,
    and a request goes to the member with the least work.

    Args:
        addresses: "host:port" or "unix:/path" of a group; several, as a list or separated by commas, for a pool. Of
            pools whose members come and go: "dns:NAME:PORT", all addresses of a name, or "file:PATH", a file with an
            address on each line. None: those of $ALLSPARK_ADDRESS if set, otherwise the engine starts a group on this
            machine (one rank per NUMA node; $AS_NUMA_NUM overrides the number) and stops it with itself.
        resume: live requests of a group that dies continue on another member with the same fingerprint, or on the same
            one once it is back; meanwhile calls wait for a server. If False, both fail at once.
        reconnect_timeout: how long requests and calls wait for a server, in seconds.
        tls: a TlsConfig or a dict of its fields, the path of a CA file, or True for the system's root certificates.
            Unix sockets never use it.
        token: the bearer token to show; None: the token in the file $ALLSPARK_TOKEN_FILE, if that is set.
        start_timeout: how long a group that the engine starts may take, in seconds.

    Raises:
        AllSparkError: ALLSPARK_IO_ERROR if no server can be reached, ALLSPARK_REQUEST_DENIED if it refuses the token,
            ALLSPARK_RUNTIME_ERROR if the group that it starts does not become ready.
        ValueError, TypeError: an argument is wrong; the text names it.
    """

    def __init__(self, addresses: str | Iterable[str] | None = None, *, resume: bool = True,
                 reconnect_timeout: float = 60.0, tls: TlsConfig | dict[str, str] | str | bool | None = None,
                 token: str | None = None, start_timeout: float = 120.0):
        if isinstance(reconnect_timeout, bool) or not isinstance(reconnect_timeout, (int, float)) \
                or not reconnect_timeout >= 0:
            raise ValueError(f"reconnect_timeout={reconnect_timeout!r} must be a number of seconds, at least 0")
        self._lock = threading.Lock()
        self._requests: dict[int, LiveRequest] = {}
        self._handles = itertools.count(1)
        self._pool = Pool(bool(resume), float(reconnect_timeout))
        tls = tls_config(tls)
        token = environment_token() if token is None else token
        given = server_addresses(addresses)
        atexit.register(self.close)
        try:
            if not given:
                self._pool.group = SelfStartedGroup()
                given = self._pool.group.wait(start_timeout)
            self._pool.connect(given, tls, token, Resumption(self._pool).on_lost)
        except BaseException:
            self.close()
            raise

    # --- models --------------------------------------------------------------------------------------------------

    def install_model(self, config: AsModelConfig) -> AsStatus:
        """As AbstractEngine.install_model, on every member of a pool.

        Paths that exist on this machine are made absolute, since servers have another working directory.
        """
        config = copy.copy(check_config(config))
        for name in ("model_path", "weights_path", "draft_model", "chat_template"):
            setattr(config, name, _absolute_path(getattr(config, name)))
        config.lora_names = [absolute_lora(lora) for lora in config.lora_names]
        request = pb.InstallModelRequest(config=convert.model_config_to_pb(config))
        again = pb.InstallModelRequest(config=request.config, retried=True)
        return self._pool.call_all("InstallModel", request, lambda member: member.call("InstallModel", again, pb.Done))

    def start_model(self, model_name: str) -> AsStatus:
        """As AbstractEngine.start_model, on every member of a pool."""
        return self._pool.call_all("StartModel", _model_request(model_name))

    def stop_model(self, model_name: str) -> AsStatus:
        """As AbstractEngine.stop_model, on every member of a pool."""
        request = _model_request(model_name)
        with self._interrupting(model_name):
            return self._pool.call_all("StopModel", request)

    def release_model(self, model_name: str) -> AsStatus:
        """As AbstractEngine.release_model, on every member of a pool."""
        request = _model_request(model_name)
        with self._interrupting(model_name):
            self._pool.call_all("ReleaseModel", request,
                                retry_unless(AsStatus.ALLSPARK_PARAM_ERROR, "ReleaseModel", request))
        with self._lock:
            self._requests = {h: r for h, r in self._requests.items() if r.spec.model != model_name}
        return _SUCCESS

    @contextlib.contextmanager
    def _interrupting(self, model_name: str) -> Iterator[None]:
        """A context manager for a call that ends this client's requests of a model: their interruption is not an error
        then.
        """
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

    def load_model(self, model_name: str, on_progress: Callable[[float], None] | None = None) -> AsStatus:
        """As AbstractEngine.load_model, on every member of a pool, one after the other."""
        def load(member: Member) -> None:
            member.load_model(model_name, on_progress)

        for member in self._pool.members:
            self._pool.retry(load, functools.partial(list, [member]))
        return _SUCCESS

    def unload_model(self, model_name: str) -> AsStatus:
        """As AbstractEngine.unload_model, on every member of a pool."""
        return self._pool.call_all("UnloadModel", _model_request(model_name))

    def load_for_requests(self, model_name: str, on_progress: Callable[[float], None] | None = None) -> None:
        """As load_model, but does nothing on a pool of which a member has loaded the model, and else loads it on the
        member with the least work.
        """
        spec = RequestSpec(model=model_name)
        states = {member: next((s for s in member.models() if s.name == model_name), None)
                  for member in self._pool.members if member.connected}
        if not any(state is not None and state.running for state in states.values()):
            self._pool.retry(lambda m: m.load_model(model_name, on_progress), lambda: self._pool.by_load(spec))

    def list_models(self) -> list[ModelState]:
        """As AbstractEngine.list_models; on a pool, the connected members' models, one member after the other."""
        if len(self._pool.members) == 1:
            return self._pool.retry(lambda member: member.models())
        return [model for models in self._pool.ask_connected(lambda member: member.models()) for model in models]

    def members(self) -> list[MemberState]:
        """The state of each group of the pool, without waiting for those that cannot be reached."""
        return [member.state() for member in self._pool.members]

    # --- requests ------------------------------------------------------------------------------------------------

    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        request = self._register(spec)
        try:
            self._submit(request)
        except BaseException:
            self._drop(request)
            raise
        return _SUCCESS, request.handle, request.queue

    def _register(self, spec: RequestSpec) -> LiveRequest:
        """A new request that was not sent to a server yet."""
        self._pool.check_open()
        if spec.config.mm_info is not None:     # the wire has no form for it yet
            check_available(spec.config)
        spec.config = spec.config.with_seed()   # another server can then continue with the same samples
        spec.cut_prompt()                       # before it is sent: servers refuse longer prompts than a model's
        request = LiveRequest(next(self._handles), spec)
        with self._lock:
            self._requests[request.handle] = request
        return request

    def _submit(self, request: LiveRequest) -> None:
        """Start a request on a server and wait until it is accepted."""
        def start(member: Member) -> None:
            session = member.session()
            if not request.dropped:     # meanwhile
                self._pool.note_choice(request.spec, member)
                self._start_loaded(request, member, session)

        self._pool.retry(start, lambda: self._pool.by_load(request.spec))
        if request.dropped:     # while it was being sent
            self._drop(request)

    @staticmethod
    def _start_loaded(request: LiveRequest, member: Member, session: Session) -> None:
        """Start a request on a server, which loads its model before if that is needed."""
        while True:
            try:
                session.start(request)
                return
            except NotLoaded as error:
                member.load_model(error.model)
                if request.dropped:     # meanwhile
                    return

    def _send_at_once(self, request: LiveRequest) -> Session | None:
        """Send a request to the server that `_submit` would try first, if that needs no waiting.

        Returns the session, which will have the answer; None if the request was not sent.
        """
        if not self._pool.knows_loads():
            return None
        members = self._pool.by_load(request.spec)
        if not members:
            return None
        member = members[0]
        session = member.live_session if self._pool.takes_at_once(request.spec, member) else None
        if session is not None:
            try:
                self._pool.note_choice(request.spec, member)
                session.send(request)
            except Unavailable as error:
                logger.debug("sending request %d: %s", request.handle, error)
                return None
        return session

    def _drop(self, request: LiveRequest) -> None:
        """Forget a request and tell its server; tokens that have not arrived yet are lost."""
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
        """As AbstractEngine.stop_request."""
        request = self._request(model_name, request_handle)
        session = self._ask_to_stop(request)
        if session is not None and not request.queue.wait_final(STOP_SECONDS):
            self._stop_here(request, session)
        return _SUCCESS

    def _ask_to_stop(self, request: LiveRequest) -> Session | None:
        """Ask the server to end a request. Returns the session that will report its end; None if it has ended."""
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
    def _stop_here(request: LiveRequest, session: Session) -> None:
        """End a request whose server has not confirmed its end in time."""
        logger.warning("the server at %s did not end request %d within %g s", session.address, request.handle,
                       STOP_SECONDS)
        session.release(request)
        request.finish(GenerateRequestStatus.GenerateInterrupted)

    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        """As AbstractEngine.release_request."""
        self.stop_request(model_name, request_handle)
        request = self._find(request_handle)
        if request is not None:
            self._drop(request)
        return _SUCCESS

    def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        """As AbstractEngine.sync_request."""
        if request_handle is not None:
            self._request(model_name, request_handle).queue.wait_final()
            return _SUCCESS
        for request in self._requests_of(model_name):
            request.queue.wait_final()
        return _SUCCESS

    def _requests_of(self, model_name: str) -> list[LiveRequest]:
        self._check_model(model_name)
        with self._lock:
            return [r for r in self._requests.values() if r.spec.model == model_name]

    def _check_model(self, name: Any) -> None:
        names = {m.name for m in self.list_models()}
        if check_model_name(name) not in names:
            raise unknown_model(name, names)

    def _request(self, name: Any, handle: Any) -> LiveRequest:
        """The request of a handle; raises an error that names what is wrong."""
        check_handle(handle)
        check_model_name(name)
        self._pool.check_open()
        request = self._find(handle)
        if request is None or request.spec.model != name:
            self._check_model(name)
            raise illegal_handle(name, handle)
        return request

    def _find(self, handle: int) -> LiveRequest | None:
        with self._lock:
            return self._requests.get(handle)

    # --- information ---------------------------------------------------------------------------------------------

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """As AbstractEngine.get_as_engine_stat; on a pool, the sum over the members that can be reached."""
        request = _model_request(model_name)
        if len(self._pool.members) == 1:
            return convert.engine_stat_from_pb(self._pool.call("GetStat", request, pb.EngineStat))
        return AsEngineStat.merged(map(convert.engine_stat_from_pb,
                                       self._pool.ask_each("GetStat", request, pb.EngineStat)))

    def get_model_info(self, model_name: str) -> ModelInfo:
        """As AbstractEngine.get_model_info; on a pool, of one member."""
        return convert.model_info_from_pb(self._pool.call("GetModelInfo", _model_request(model_name), pb.ModelInfo))

    def _tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        request = pb.TokenizeRequest(request=convert.request_to_pb(spec), bare=bare)
        return list(self._pool.call("Tokenize", request, pb.Tokenized).ids)

    def detokenize(self, model_name: str, ids: list[int]) -> Detokenized:
        """As AbstractEngine.detokenize."""
        request = pb.DetokenizeRequest(model=check_model_name(model_name), ids=as_token_ids(ids))
        answer = self._pool.call("Detokenize", request, pb.Detokenized)
        return Detokenized(answer.text, list(answer.tokens))

    def get_file_information(self, as_graph_path: str | os.PathLike[str],
                             as_param_path: str | os.PathLike[str]) -> AsFileInfo:
        """As AbstractEngine.get_file_information; the paths are on the server's machine."""
        answer = self._pool.call("GetFileInformation", pb.FileInformationRequest(
            graph_path=_absolute_path(as_graph_path), param_path=_absolute_path(as_param_path)), pb.FileInformation)
        return AsFileInfo(answer.create_version_graph, answer.create_version_param, answer.current_version_engine)

    def get_op_profiling_info(self, model_name: str) -> str:
        """As AbstractEngine.get_op_profiling_info; on a pool, of one member."""
        return self._pool.call("GetOpProfiling", _model_request(model_name), pb.OpProfiling, _PROFILE_SECONDS).table

    def _server_info(self) -> pb.ServerInfo:
        return self._pool.call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo)

    def get_rank_id(self) -> int:
        """As AbstractEngine.get_rank_id."""
        return self._server_info().rank_id

    def get_rank_nums(self) -> int:
        """As AbstractEngine.get_rank_nums; on a pool, of one member."""
        return self._server_info().rank_nums

    def is_allspark_work_as_service(self) -> bool:
        """True."""
        return True

    def get_version_full(self) -> str:
        """As AbstractEngine.get_version_full; on a pool, of one member."""
        return self._server_info().version

    # --- adapters ------------------------------------------------------------------------------------------------

    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """As AbstractEngine.load_lora, on every member of a pool. A path that exists here is made absolute."""
        request = pb.LoraRequest(model=check_model_name(model_name), lora=absolute_lora(lora_name))
        return self._pool.call_all("LoadLora", request,
                                   retry_unless(AsStatus.ALLSPARK_LORA_ALREADY_LOADED, "LoadLora", request))

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """As AbstractEngine.unload_lora, on every member of a pool."""
        request = pb.LoraRequest(model=check_model_name(model_name), lora=absolute_lora(lora_name))
        return self._pool.call_all("UnloadLora", request,
                                   retry_unless(AsStatus.ALLSPARK_LORA_NOT_FOUND, "UnloadLora", request))

    # --- device memory -------------------------------------------------------------------------------------------

    def unload_device_mem(self, model_name: str) -> AsStatus:
        """As AbstractEngine.unload_device_mem, on every member of a pool."""
        return self._pool.call_all("UnloadDeviceMem", _model_request(model_name))

    def load_device_mem(self, model_name: str) -> AsStatus:
        """As AbstractEngine.load_device_mem, on every member of a pool."""
        return self._pool.call_all("LoadDeviceMem", _model_request(model_name))

    def reset_prefix_cache(self, model_name: str) -> AsStatus:
        """As AbstractEngine.reset_prefix_cache, on every member of a pool."""
        return self._pool.call_all("ResetPrefixCache", _model_request(model_name))

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections, and stop the group that this engine has started. Servers cancel live requests.

        Idempotent. In a forked child it does nothing: connections and group belong to the parent.
        """
        if self._pool.forked:
            return
        with self._lock:
            if self._pool.closed:
                return
            self._pool.closing.set()
            requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            request.finish(GenerateRequestStatus.GenerateInterrupted)
        self._pool.close()
        atexit.unregister(self.close)


def _model_request(name: Any) -> pb.ModelRequest:
    return pb.ModelRequest(model=check_model_name(name))


def _absolute_path(path: str | os.PathLike[str]) -> str:
    """The same path, absolute if it exists on this machine."""
    path = os.fspath(path)
    return os.path.abspath(path) if path and os.path.exists(path) else path
