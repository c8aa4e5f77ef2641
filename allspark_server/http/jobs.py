"""Work that goes on without a connection: background responses and batches, whose state is in the store.

A job belongs to the worker process that has touched its object last. An object that nobody has touched for a while, as
its process has ended, is taken over by another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from allspark_server.access import Client, Role

from .errors import ApiError
from .store import Store, Stored
from .store.store import LIVE

if TYPE_CHECKING:
    from .call import HttpWorker
    from .internal import Application

logger = logging.getLogger(__name__)

_LOOK_SECONDS, _PURGE_SECONDS = 1.0, 60.0
#: an object that was not touched for so many seconds has no process any more
ABANDONED_SECONDS = 30.0
#: jobs of a process; more are refused, or wait in the store
MOST_RESPONSES, MOST_BATCHES = 256, 4

TakeOver = Callable[["Jobs", Stored], Awaitable[None]]


class Jobs:
    """The jobs of a worker process, and the store of all."""

    def __init__(self, store: Store):
        self.store = store
        self.worker: HttpWorker
        self.application: Application
        #: what continues or ends an abandoned object, by its kind
        self.take_over: dict[str, TakeOver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()   # names of tasks that end
        self._watch: asyncio.Task[None] | None = None
        self._look = asyncio.Event()

    def open(self, worker: HttpWorker, application: Application) -> None:
        """Begin to look for work."""
        from .batches import continue_batch
        from .files import drop_upload
        from .responses import continue_response

        self.worker, self.application = worker, application
        self.take_over = {"response": continue_response, "batch": continue_batch, "file": drop_upload}
        self._watch = asyncio.create_task(self._run())

    def client_of(self, tenant: str) -> Client:
        """The client of a stored object's work, with what its key allows now."""
        return Client(Role.GENERATE, tenant, models=self.worker.access.models_of(tenant))

    async def close(self) -> None:
        """End the jobs. Another process continues those that can be continued."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        tasks = dict(self._tasks)
        for name in tasks:
            self.cancel(name)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of the object `name`."""
        task = asyncio.ensure_future(work)
        self._tasks[name] = task

        def ended(_: object) -> None:
            if self._tasks.get(name) is task:
                del self._tasks[name]
                self._cancelled.discard(name)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("the work on %s failed", name, exc_info=error)

        task.add_done_callback(ended)

    def count(self, prefix: str) -> int:
        """The number of jobs whose names begin so."""
        return sum(name.startswith(prefix) for name in self._tasks)

    def cancel(self, name: str) -> None:
        """End a job, if it is one of this process; others notice by the state of the object."""
        if (task := self._tasks.get(name)) is not None and name not in self._cancelled:
            self._cancelled.add(name)   # a second time would end the work on its end
            task.cancel()

    def look_now(self) -> None:
        """Look for work at once."""
        self._look.set()

    async def _run(self) -> None:
        purged = 0.0
        while True:
            try:
                if self._tasks:
                    for name in await self.store.touch(self._tasks):
                        self.cancel(name)
                for kind in self.take_over:
                    await self._take_over(kind)
                if time.monotonic() - purged > _PURGE_SECONDS and not await self.store.purge():
                    purged = time.monotonic()
            except ApiError as error:
                logger.debug("looking for work in the store: %s", error)
            except Exception:   # a bug: the other objects are still looked at
                logger.exception("looking for work in the store failed")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look.wait(), _LOOK_SECONDS)
            self._look.clear()

    async def _take_over(self, kind: str) -> None:
        if kind == "batch" and self.count("batch_") >= MOST_BATCHES:
            return
        found = await self.store.claim(kind, LIVE, time.time() - ABANDONED_SECONDS)
        if found is not None and found.id not in self._tasks:
            await self.take_over[kind](self, found)
            self._look.set()    # there may be more
