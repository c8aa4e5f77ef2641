"""The HTTP server's processes: opens its socket, starts its workers and restarts them."""
from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allspark_server import access
from allspark_server.options import WorkerOptions, option, worker_words

from .folders import private_folder, short_parent

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8000"
_BACKLOG = 2048
#: seconds until a worker that was asked to stop is killed, between two checks, and before a failed worker restarts
_STOP_SECONDS, _LOOK_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 8.0, 0.2, 0.2, 10.0
_PROVEN_SECONDS = 30.0
#: a peer that does not answer for so many seconds counts as gone
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_USER_TIMEOUT_MS = 60_000


@dataclass
class HttpOptions(WorkerOptions):
    """Options of an HTTP server: the flags of `allspark http`."""

    address: str = option(DEFAULT_ADDRESS, "the address to serve on", flag_name="http", metavar="HOST:PORT")
    workers: int = option(1, "the number of processes", metavar="N")

    def check(self) -> None:
        """Raises ValueError or OSError for options that no worker could serve with. Opens nothing."""
        if not 1 <= self.workers <= 256:
            raise ValueError(f"--workers {self.workers} must be 1 to 256")
        access.check_listener(self.address, token=bool(self.token_file), tls=bool(self.tls_cert),
                          client_ca=bool(self.tls_ca), insecure=self.insecure)
        for path in filter(None, (self.token_file, self.pool_token_file)):
            access.read_tokens(path)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key are needed together")
        if self.tls_cert:
            try:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.tls_ca or None)
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except ssl.SSLError as error:
                raise ValueError(f"the TLS files cannot be used: {error}") from None


def open_socket(address: str, mode: int = 0o600, group: str = "") -> tuple[socket.socket, str]:
    """A listening socket and its address with the actual port. ValueError and OSError name the address."""
    if access.is_unix(address):
        return _open_unix(address, mode, group)
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--http {address!r} is neither HOST:PORT nor unix:/path")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit these options.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in {**_KEEPALIVE, socket.TCP_USER_TIMEOUT: _USER_TIMEOUT_MS}.items():
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
            listener.bind(where)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror or error}") from None
    return listener, f"{host}:{listener.getsockname()[1]}"


def _open_unix(address: str, mode: int, group: str) -> tuple[socket.socket, str]:
    from allspark_server.rpc.listen import free_socket_path, give_to_group, umask
    path = free_socket_path(address)
    listener = socket.socket(socket.AF_UNIX)
    with umask(0o777 & ~mode):
        listener.bind(path)
    if group:
        give_to_group(path, group)
    listener.listen(_BACKLOG)
    return listener, f"unix:{path}"


class _Worker:
    """One process, and when it may be started again."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.started = self.not_before = 0.0
        self.pause = _FIRST_PAUSE


class HttpServer:
    """Workers on one socket, kept running until `close`. `address` has the actual port."""

    def __init__(self, options: HttpOptions, folder: Path):
        """`folder`: a private folder for the workers' counters. Raises what HttpOptions.check and open_socket raise."""
        options.check()
        self._socket, self.address = open_socket(
            options.address, access.mode_of(options.socket_mode, options.socket_group), options.socket_group)
        self._socket.set_inheritable(True)
        self._words = [sys.executable, "-m", "allspark_server.http", *worker_words(options),
                       "--fd", str(self._socket.fileno())]
        self._environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder),
                             "ALLSPARK_HTTP_PARENT": str(os.getpid())}
        self._workers = [_Worker() for _ in range(options.workers)]
        self._ending = threading.Event()
        # One thread starts all workers, because a worker ends with the thread that started it.
        self._thread = threading.Thread(target=self._watch, name="allspark-http", daemon=True)

    def start(self) -> None:
        """Starts the workers. The socket accepts connections already."""
        logger.info("HTTP on %s, %d worker%s", self.address, len(self._workers), "s" * (len(self._workers) > 1))
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def close(self) -> None:
        """Stops the workers. Responses in progress get some seconds."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        if access.is_unix(self.address):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK_SECONDS if self._workers[0].process else 0.0):
            now = time.monotonic()
            for worker in self._workers:
                if worker.process is not None and (status := worker.process.poll()) is not None:
                    self._note_end(worker, status, now)
                if worker.process is None and now >= worker.not_before:
                    worker.process = subprocess.Popen(self._words, env=self._environment, stdin=subprocess.DEVNULL,
                                                      pass_fds=[self._socket.fileno()])
                    worker.started = now
        self._stop_all()

    def _note_end(self, worker: _Worker, status: int, now: float) -> None:
        if now - worker.started > _PROVEN_SECONDS:
            worker.pause = _FIRST_PAUSE
        logger.warning("an HTTP worker ended with status %s; starting it again in %.1f s", status, worker.pause)
        worker.process, worker.not_before = None, now + worker.pause
        worker.pause = min(2 * worker.pause, _LONGEST_PAUSE)

    def _stop_all(self) -> None:
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def http_server(options: HttpOptions) -> Iterator[HttpServer]:
    """An HTTP server for the length of a with block."""
    with private_folder(short_parent()) as folder:
        server = HttpServer(options, folder)
        try:
            server.start()
            yield server
        finally:
            server.close()
