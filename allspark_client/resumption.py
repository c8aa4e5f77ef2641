"""Resumption: when a client's server is lost, another one continues its requests with identical results."""
from __future__ import annotations

import logging
import threading
import time

from .errors import AllSparkError, AsStatus
from .live_request import LiveRequest
from .pool import LOAD_AGE_SECONDS, RETRY_SECONDS, Pool
from .session import Session, Unavailable
from .types import GenerateRequestStatus

logger = logging.getLogger(__name__)


class Resumption:
    """Sends requests of lost servers to members of a pool that give them the same continuation."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def on_lost(self, session: Session, requests: list[LiveRequest], error: Unavailable | AllSparkError) -> None:
        """End the requests of a broken session, or start a thread that resumes them. Called on its reading thread."""
        if self._pool.closed:
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
            elif not self._pool.resume:
                _fail(request, f"{error}; the engine was made with resume=False")
            elif why := request.note_loss():
                _fail(request, f"{error}; {why}")
            else:
                resumable.append(request)
        # Requests that got no token from the last servers go first on the next one.
        resumable.sort(key=lambda request: -request.losses)
        if resumable:
            threading.Thread(target=self._resume, args=(resumable, session.address, str(error)), daemon=True,
                             name="allspark-resume").start()

    def _resume(self, requests: list[LiveRequest], lost: str, why: str) -> None:
        """Send requests with their tokens to members that continue them identically, up to reconnect_timeout."""
        pool = self._pool
        deadline = time.monotonic() + pool.reconnect_timeout
        for request in requests:
            request.resumed = True
        while requests and not pool.closed:
            # The lost member comes last: it needs time to restart.
            members = sorted(pool.members, key=lambda member: (member.draining, member.address == lost))
            different = dict.fromkeys(requests, 0)      # members that can never continue a request
            for member in members:
                try:
                    session = member.session()
                    models = {m.name: m for m in member.models(LOAD_AGE_SECONDS)}
                    for name in {request.spec.model for request in requests}:
                        if name in models and models[name].on_demand:
                            member.load_model(name)
                            models = {m.name: m for m in member.models()}
                except (Unavailable, AllSparkError) as error:
                    why = str(error)
                    continue
                suited = []
                for request in requests:
                    reason, permanent = request.why_not_resumable(models.get(request.spec.model), member.address)
                    why, different[request] = reason or why, different[request] + permanent
                    if not reason:
                        suited.append(request)
                settled = self._send_again(suited, session)
                requests = [request for request in requests if request not in settled]
            for request in [r for r in requests if different[r] == len(members) and not pool.changes]:
                requests.remove(request)
                _fail(request, f"the connection to {lost} was lost; {why}", GenerateRequestStatus.GenerateInterrupted)
            failure = pool.failure()
            if requests and (failure is not None or time.monotonic() >= deadline):
                why = failure or f"{why}; gave up after {pool.reconnect_timeout:g} s"
                break
            if requests:
                pool.closing.wait(RETRY_SECONDS)
        for request in requests:
            _fail(request, f"the connection to {lost} was lost; {why}")

    @staticmethod
    def _send_again(requests: list[LiveRequest], session: Session) -> set[LiveRequest]:
        """Send requests to a server; returns those that run again or have ended.

        All are sent before the first answer is awaited: many requests take no longer than a few.
        """
        settled: set[LiveRequest] = set()
        sent = []
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
                logger.info("request %d continues at %s after %d tokens", request.handle, session.address,
                            request.generated)
                if request.stopped:     # while it was being sent
                    session.stop(request)
            settled.add(request)
        return settled


def _fail(request: LiveRequest, message: str,
          status: GenerateRequestStatus = GenerateRequestStatus.InternalError) -> None:
    request.finish(status, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, message))
