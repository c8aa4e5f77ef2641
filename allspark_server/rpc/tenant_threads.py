"""Threads that tenants share fairly."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

#: how long a thread sleeps after each call, s. Waking, another thread gets the interpreter lock, which one that goes on
#: to its next call would take again
_PAUSE = 50e-6


class TenantThreads:
    """A thread pool that takes work of each tenant in turn. Any thread may call the methods.

    Args:
        threads: how many calls run at the same time.
        of_tenant: how many of them may be one tenant's, so that another tenant's short work need not wait for them.
        name: of the threads.
    """

    def __init__(self, threads: int, of_tenant: int, name: str):
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free, self._of_tenant = threads, of_tenant
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def submit(self, tenant: str, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` when it is the tenant's turn. RuntimeError once the threads have ended."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, call))
            self._run_waiting()
        return future

    def shutdown(self) -> None:
        """End the threads after what has begun; what waits for its tenant's turn is cancelled."""
        with self._lock:
            waiting, self._waiting = self._waiting, OrderedDict()
        for queue in waiting.values():
            for future, _ in queue:
                future.cancel()
        # What the executor holds has a free thread: cancelled there, its caller would wait for ever.
        self._executor.shutdown()

    def _run_waiting(self) -> None:
        """Start as many calls as may run now. The caller holds the lock."""
        while self._free:
            tenant = next((t for t in self._waiting if self._running[t] < self._of_tenant), None)
            if tenant is None:
                return
            queue = self._waiting[tenant]
            future, call = queue.popleft()
            self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
            self._executor.submit(self._run, tenant, future, call)
            self._running[tenant] += 1
            self._free -= 1

    def _run(self, tenant: str, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
                except BaseException as error:     # a panic of a library in Rust
                    future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._free += 1
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                try:
                    self._run_waiting()
                except RuntimeError:    # the threads are ending; what waits is cancelled
                    pass
            time.sleep(_PAUSE)
