"""The engine's thread: it runs the steps, and between them the commands of callers.

It alone touches the schedulers and the group, so they need no locks. Without work it sleeps in the queue of commands.
No command takes long: threads of the group load models, and callers' threads write files.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from allspark_client.errors import AllSparkError, AsStatus, closed_engine, forked_engine

from .threads import ENGINE

if TYPE_CHECKING:
    from .pipeline import Pipeline
    from .served_model import ServedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")
ALIVE_SECONDS = 1.0  # time between a waiting caller's checks that the engine's thread is alive
_REST_SECONDS = 0.01  # pause while quarantined sequences must wait and there is no other work
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.001, 0.05


class EngineThread:
    """Runs the steps of `models` in `pipeline`.

    `closed`: it takes no more commands. `failure`: the error that ended it, if one did. `busy_since`: when it began
    its current work, on the monotonic clock; 0.0 while it waits for work. `lock` guards `closed`.
    """

    def __init__(
        self, models: Mapping[str, ServedModel], pipeline: Pipeline, on_end: Callable[[], None],
        on_failure: Callable[[str], None],
    ):
        """`on_end()` and `on_failure(message)` are called on this thread as its last action."""
        self.lock = threading.Lock()
        self.closed = False
        self.failure: str | None = None
        self.busy_since = 0.0
        self._models, self._pipeline = models, pipeline
        self._on_end, self._on_failure = on_end, on_failure
        self._owner = os.getpid()
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=ENGINE, daemon=True)

    # --- any thread ---

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that has the thread."""
        return os.getpid() != self._owner

    def check_open(self) -> None:
        """AllSparkError if the engine has failed or is closed."""
        if self.failure is not None:
            raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"the engine has failed: {self.failure}")
        if self.closed:
            raise closed_engine()

    def post(self, command: Callable[[], Any]) -> None:
        """Puts a command into the queue; the caller holds the lock. AllSparkError if no commands are taken."""
        if self.forked:
            raise forked_engine()
        self.check_open()
        self._commands.put(command)

    def post_if_open(self, command: Callable[[], Any]) -> None:
        """Puts a command into the queue; drops it if the engine has ended."""
        try:
            with self.lock:
                self.post(command)
        except AllSparkError as error:
            logger.debug("a command came too late: %s", error)

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread; waits for its result, or raises its error."""
        if threading.current_thread() is self.thread:
            return function()
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # the caller gets it
                future.set_exception(error)

        with self.lock:
            self.post(command)
        while not wait([future], ALIVE_SECONDS).done:
            if not self.thread.is_alive() and not future.done():
                self.check_open()
                raise closed_engine()
        return future.result()

    def poll(self, function: Callable[[], T | None]) -> T:
        """Calls a function on the engine's thread until it returns a value other than None, or raises."""
        pause = FIRST_POLL_SECONDS
        while (result := self.call(function)) is None:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        return result

    def close(self) -> None:
        """Ends the thread after the commands that are queued, and waits for it."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._commands.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            self._loop()
            self._on_end()
        except BaseException as error:  # a bug: report it, since nothing else would
            logger.critical("the engine's thread failed", exc_info=True)
            self.busy_since = 0.0
            message = str(error) or type(error).__name__
            with self.lock:
                self.closed, self.failure = True, message
            self._on_failure(message)

    def _loop(self) -> None:
        pipeline, resting = self._pipeline, False
        while True:
            stepping = [each for model in self._models.values() for each in model.stepping if each.has_work]
            idle = not stepping and not pipeline.busy
            if idle or resting or not self._commands.empty():
                if idle and self._commands.empty():
                    self.busy_since = 0.0
                try:
                    rest = _REST_SECONDS if resting else None
                    resting = False
                    command = self._commands.get(timeout=self._seconds_to_deadline() if idle else rest)
                except queue.Empty:
                    for model in self._models.values():
                        model.expire()
                    continue
                self.busy_since = time.monotonic()
                if command is None:
                    break
                self._execute(command)
                continue  # take all commands before the next step
            self.busy_since = time.monotonic()
            resting = not pipeline.advance(stepping)

    def _seconds_to_deadline(self) -> float | None:
        """Seconds that the thread may sleep: until the next deadline of a request that has not begun; None: without
        limit.
        """
        return min((left for model in self._models.values() if (left := model.seconds_to_deadline()) is not None),
                   default=None)

    def _execute(self, command: Callable[[], Any]) -> None:
        try:
            command()
        except Exception:  # the thread must go on; `call` passes errors to its caller
            logger.exception("a command failed in the engine's thread")
