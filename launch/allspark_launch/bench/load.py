"""Puts a target under load and records every request."""
from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .targets import Answer, Conversation, Target, failures
from .workload import Arrivals, Session


@dataclass(frozen=True)
class Point:
    """A load: so many clients with one request at a time each (closed loop), or `rate` sessions per second (open loop).
    A trace has arrivals of its own, which come `rate` times as fast.
    """

    clients: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients else f"{self.rate:g}/s"

    @property
    def load(self) -> float:
        """The value on the axis of a plot."""
        return self.clients or self.rate


@dataclass(frozen=True)
class Limits:
    """When a run ends: after so many requests, or with those that were sent within so many seconds. `patience`: seconds
    that requests in progress get then. `think`: seconds between an answer and the user's next turn.
    """

    requests: int
    seconds: float
    think: float
    patience: float


class Run:
    """A target under one load. `answers`: of all sent requests, in order. `seconds`: from the begin to the last end."""

    def __init__(self, target: Target, sessions: Iterator[Session], limits: Limits, on_answer: Callable[[], None]):
        self._target, self._sessions, self._limits, self._on_answer = target, sessions, limits, on_answer
        self._failures = failures()
        self._numbers = itertools.count()
        self._left = limits.requests
        self.answers: list[Answer] = []
        self.seconds = 0.0

    async def closed(self, clients: int) -> None:
        """Each client runs one session after the other."""
        async def client() -> None:
            while not self._over:
                session = next(self._sessions, None)
                if session is None:
                    return
                await self._session(session, time.perf_counter())

        await self._all([asyncio.create_task(client()) for _ in range(clients)])

    async def open(self, arrivals: Iterator[float]) -> None:
        """Sessions begin when they are due, whether or not earlier ones have ended."""
        tasks: list[asyncio.Task] = []

        async def send() -> None:
            for session, at in zip(self._sessions, arrivals):
                due = self._begin + at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if self._over:
                    return
                tasks.append(asyncio.create_task(self._session(session, due)))
                await asyncio.sleep(0)      # lets the session count its request

        self._begin = time.perf_counter()
        try:
            await send()
        finally:
            await self._all(tasks)

    @property
    def _over(self) -> bool:
        seconds = self._limits.seconds
        return self._left <= 0 or (seconds > 0 and time.perf_counter() - self._begin > seconds)

    async def _all(self, tasks: list[asyncio.Task]) -> None:
        self._begin = getattr(self, "_begin", time.perf_counter())
        waited = 0.0
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=1.0)
            for task in done:
                task.result()       # raises only for a defect of the benchmark
            waited = waited + 1.0 if self._over and not done else 0.0
            if waited > self._limits.patience:
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)
                break
        ends = [answer.ended for answer in self.answers if answer.ended]
        self.seconds = max(ends, default=self._begin) - self._begin

    async def _session(self, session: Session, due: float) -> None:
        conversation = Conversation()
        for turn in session.turns:
            if self._over:
                return
            self._left -= 1
            answer = Answer(due)
            self.answers.append(answer)
            answer.sent = time.perf_counter()
            try:
                await self._target.ask(conversation, turn, next(self._numbers), answer)
            except asyncio.CancelledError:
                answer.error = f"no end within {self._limits.patience:g} s"
                raise
            except self._failures as error:
                answer.error = str(error) or type(error).__name__
            self._on_answer()
            if answer.error:
                return
            conversation.add(turn, answer)
            if turn is not session.turns[-1]:
                await asyncio.sleep(self._limits.think)
                due = time.perf_counter()


async def drive(target: Target, point: Point, arrivals: Arrivals, sessions: Iterator[Session], seed: list[int],
                limits: Limits, traced: bool, on_answer: Callable[[], None]) -> Run:
    """Runs a target under one load to the end."""
    if not traced:
        run = Run(target, sessions, limits, on_answer)
        await (run.closed(point.clients) if point.clients else run.open(arrivals.times(point.rate, seed)))
        return run
    listed = list(sessions)
    run = Run(target, iter(listed), limits, on_answer)
    await (run.closed(point.clients) if point.clients else
           run.open(session.arrival / point.rate for session in listed))
    return run
