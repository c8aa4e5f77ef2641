"""The members of a client's pool: which one a call goes to, and how long it is retried."""
from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import Message

from ._proto import allspark_pb2 as pb
from .affinity import PrefixMemory, beginnings
from .connection import Member
from .discovery import Discovery, Found
from .errors import AllSparkError, AsStatus, NotLoaded, closed_engine, forked_engine
from .live_request import has_adapter
from .local_group import SelfStartedGroup
from .request import RequestSpec
from .session import OnLost, Unavailable
from .types import ModelState, TlsConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
#: pause between attempts while no member can be reached, s
RETRY_SECONDS = 0.2
#: how old the load of the members may be when a request chooses one, s
LOAD_AGE_SECONDS = 0.5
#: how long a new client waits for its servers to accept connections, s
_FIRST_CONTACT_SECONDS = 5.0
#: prompt tokens waiting to be computed that cost a member about as much work as one running request
_TOKENS_PER_REQUEST = 256
#: how long a server may take to answer a question, s
_ANSWER_SECONDS = 30.0


#: how well a member suits a request
_RUNS, _LOADS, _UNSUITED, _UNREACHED = range(4)


def _rank(state: ModelState | None, spec: RequestSpec) -> int:
    if state is None:
        return _UNSUITED
    if state.running and has_adapter(state, spec):
        return _RUNS
    return _LOADS if state.on_demand else _UNSUITED


class Pool:
    """One server group or several, and a client's calls to them. Any thread may call the methods."""

    def __init__(self, resume: bool, reconnect_timeout: float):
        """`resume`: calls wait for a server up to `reconnect_timeout` seconds; without, they fail at once."""
        self.members: list[Member] = []     #: replaced as a whole when members come or go
        self._leaving: list[Member] = []    # not used for new requests; closed once they have no live ones
        self._discovery: Discovery | None = None
        self.group: SelfStartedGroup | None = None      #: the group that this client has started, if any
        self.resume, self.reconnect_timeout = resume, reconnect_timeout
        self.closing = threading.Event()
        self._owner = os.getpid()
        self._prefixes = PrefixMemory()
        self._requests = itertools.count(1)

    def connect(self, addresses: list[str], tls: TlsConfig | None, token: str | None, on_lost: OnLost) -> None:
        """Connect to these groups, and follow those that come and go.

        Raises AllSparkError if none of them can be reached within seconds.
        """
        deadline = time.monotonic() + _FIRST_CONTACT_SECONDS
        self._discovery = Discovery(addresses, functools.partial(self._update, tls, token, on_lost), self._tidy)
        while True:
            failures, members = [], self.members
            for member in members:
                try:
                    member.session(max(0.5, deadline - time.monotonic()))
                except Unavailable as error:
                    failures.append(str(error))
            if len(failures) < len(members):
                for failure in failures:
                    logger.warning("%s; the pool continues without it", failure)
                return
            if time.monotonic() >= deadline:
                raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                    "; ".join(failures) or f"no server is named by {', '.join(addresses)}")
            time.sleep(RETRY_SECONDS)

    @property
    def changes(self) -> bool:
        """Whether members may come and go."""
        return self._discovery is not None and self._discovery.changes

    def _update(self, tls: TlsConfig | None, token: str | None, on_lost: OnLost, found: list[Found]) -> None:
        """Replace the members. One that has gone keeps its connection until its requests have ended."""
        known = {member.address: member for member in (*self.members, *self._leaving)}
        members = []
        for each in found:
            member = known.get(each.address)
            if member is None:
                own = replace(tls, server_name=tls.server_name or each.server_name) if tls is not None else None
                member = Member(each.address, own, token, on_lost)
            members.append(member)
        gone = [member for member in known.values() if member not in members]
        if self.members or self._leaving:
            for member in members:
                if member not in self.members:
                    logger.info("%s has come to the pool", member.address)
                    member.reconnect_soon()
            for member in gone:
                if member not in self._leaving:
                    logger.info("%s has left the pool", member.address)
        self.members, self._leaving = members, gone

    def _tidy(self) -> None:
        """Close members that have left and have no live requests."""
        for member in self._leaving:
            session = member.live_session
            if session is None or not session.live:
                member.close()
                self._leaving = [other for other in self._leaving if other is not member]

    def close(self) -> None:
        """Close the connections, and stop the group that this client has started."""
        self.closing.set()
        if self._discovery is not None:
            self._discovery.close()
        for member in (*self.members, *self._leaving):
            member.close()
        if self.group is not None:
            self.group.stop()

    @property
    def closed(self) -> bool:
        """Whether the client is closed, or being closed."""
        return self.closing.is_set()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the client: it has none of the client's threads."""
        return os.getpid() != self._owner

    def check_open(self) -> None:
        """Raises AllSparkError on a closed client, and in a forked child."""
        if self.forked:
            raise forked_engine()
        if self.closed:
            raise closed_engine()

    def failure(self) -> str | None:
        """Why the group that this client has started cannot come back; None while it may."""
        return self.group.failure() if self.group is not None else None

    # --- calls ---------------------------------------------------------------------------------------------------

    def retry(self, attempt: Callable[[Member], T], candidates: Callable[[], list[Member]] | None = None) -> T:
        """The result of `attempt` with the first member that can be reached, retried up to reconnect_timeout.

        `candidates`: the members in the order in which they are tried; by default, connected ones first. Raises what
        `attempt` raises, and AllSparkError once no member could be reached.
        """
        deadline = time.monotonic() + self.reconnect_timeout
        while True:
            self.check_open()
            unavailable: list[Unavailable] = []
            for member in candidates() if candidates else self._connected_first():
                try:
                    return attempt(member)
                except Unavailable as error:
                    unavailable.append(error)
            self.check_open()
            details = "; ".join(map(str, unavailable)) or "the pool has no members now"
            failure = self.failure()
            if failure is not None:
                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"{details}: {failure}")
            if not self.resume:
                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, details)
            if time.monotonic() >= deadline:
                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                    f"{details}; gave up after {self.reconnect_timeout:g} s")
            self.closing.wait(RETRY_SECONDS)

    def call(self, method: str, request: Message, response_type: type[M], timeout: float = _ANSWER_SECONDS) -> M:
        """A unary call to one member, which may take `timeout` seconds. If it names a model on demand, the member has
        loaded it.
        """
        try:
            return self.retry(lambda member: member.call(method, request, response_type, timeout))
        except NotLoaded:
            for member in self.members:
                with contextlib.suppress(NotLoaded, Unavailable):
                    return member.call(method, request, response_type, timeout)
            raise

    def call_all(self, method: str, request: Message, again: Callable[[Member], object] | None = None) -> AsStatus:
        """A call that every member must carry out; the first refusal is raised once all have answered.

        There is no time limit, since loading a model takes long; the call fails if its connection breaks. Once a
        member's answer was lost, `again` is called instead: the member may have carried out the call.
        """
        self.check_open()

        def first(member: Member) -> None:
            member.call(method, request, pb.Done)

        def carry_out(member: Member) -> None:
            attempts = itertools.chain([first], itertools.repeat(again or first))
            self.retry(lambda m: next(attempts)(m), lambda: [member])

        members = self.members
        if len(members) == 1:
            carry_out(members[0])
            return AsStatus.ALLSPARK_SUCCESS
        with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="allspark-pool") as pool:
            futures = [pool.submit(carry_out, member) for member in members]
        for member, future in zip(members, futures):
            error = future.exception()
            if isinstance(error, AllSparkError):
                raise AllSparkError(error.status, f"{error.message} (pool member {member.address})", error.retryable)
            if error is not None:
                raise error
        return AsStatus.ALLSPARK_SUCCESS

    def ask_connected(self, attempt: Callable[[Member], T]) -> list[T]:
        """The results of `attempt` with each connected member; if there is none, waits for the first."""
        self.check_open()
        answers = []
        for member in self.members:
            if not member.connected:
                member.reconnect_soon()
                continue
            try:
                answers.append(attempt(member))
            except Unavailable as error:
                logger.warning("%s", error)
        return answers or [self.retry(attempt)]

    def ask_each(self, method: str, request: Message, response_type: type[M]) -> list[M]:
        """A unary call to each connected member, but for those that have not loaded a model on demand that it names."""
        def ask(member: Member) -> M | NotLoaded:
            try:
                return member.call(method, request, response_type, _ANSWER_SECONDS)
            except NotLoaded as error:
                return error

        answers = self.ask_connected(ask)
        found = [answer for answer in answers if not isinstance(answer, NotLoaded)]
        if not found and isinstance(answers[0], NotLoaded):
            raise answers[0]
        return found

    def _connected_first(self) -> list[Member]:
        return sorted(self.members, key=lambda member: not member.connected)

    # --- choosing a member for a request -------------------------------------------------------------------------

    def note_choice(self, spec: RequestSpec, member: Member) -> None:
        """Remember that a member gets this request: its prompt's prefixes will be cached there."""
        if len(self.members) > 1:
            member.last_request = next(self._requests)
            prompt = beginnings(spec)
            familiar, saved = self._prefixes.find(prompt)
            if prompt:
                member.sent_work += prompt[-1][1] - (saved if familiar == member.address else 0)
                self._prefixes.note(prompt, member.address)

    def _learn_prefixes(self, member: Member) -> None:
        """Learn what a member has computed for other clients, if its models are to be asked for anyway."""
        if member.connected and not member.knows_models(LOAD_AGE_SECONDS):
            with contextlib.suppress(Unavailable):
                restarted, digests = member.new_prefixes()
                if restarted:
                    self._prefixes.forget(member.address)
                self._prefixes.learn(digests, member.address)

    def knows_loads(self) -> bool:
        """Whether `by_load` would have to ask no member for its load."""
        return len(self.members) == 1 or all(member.knows_models(LOAD_AGE_SECONDS)
                                             for member in self.members if member.connected)

    def takes_at_once(self, spec: RequestSpec, member: Member) -> bool:
        """Whether a member has loaded a request's model, as far as this client knows."""
        return not any(state.name == spec.model and state.on_demand for state in member.known_models)

    def by_load(self, spec: RequestSpec) -> list[Member]:
        """Members in the order in which a new request should try them.

        Members that run the model and take new requests come first, then those that load it on demand; among these, the
        one with the least work left. A prompt's prefix that a member has computed before counts as no work there. Of
        members with equal work it comes first, then those which this client has not sent a request for longest.
        """
        members = self.members
        if len(members) == 1:
            return members
        ranked: list[tuple[int, float, bool, int, Member]] = []
        prompt = beginnings(spec)
        for member in members:
            self._learn_prefixes(member)
        familiar, saved = self._prefixes.find(prompt)
        for member in members:
            order = member.address != familiar, member.last_request
            if not member.connected:    # tried only if all others fail: connecting to a dead server takes seconds
                member.reconnect_soon()
                ranked.append((_UNREACHED, 0, *order, member))
                continue
            try:
                live = member.session().live
                state = next((m for m in member.models(LOAD_AGE_SECONDS) if m.name == spec.model), None)
            except (Unavailable, AllSparkError) as error:
                logger.debug("not a candidate: %s", error)
                ranked.append((_UNREACHED, 0, *order, member))
                continue
            # The member counts this client's requests as well, but its figure may be older than the latest of them.
            load: float = max(live, state.load) if state is not None else live
            work = member.sent_work + (state.work if state is not None else 0)
            load += (work - (saved if member.address == familiar else 0)) / _TOKENS_PER_REQUEST
            ranked.append((_UNSUITED if member.draining else _rank(state, spec), load, *order, member))
        return [entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:-1])]
