"""The HTTP server's processes: opens its socket, starts its workers and restarts them."""
from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from allspark_client.types import TlsConfig
from allspark_server import access
from allspark_server.certificates import Certificates
from allspark_server.http.counts import ConnectionCounts, make_file
from allspark_server.options import WorkerOptions, option, worker_words

from .folders import make_again, private_folder, short_parent
from .processes import OutOfMemory

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8000"
_BACKLOG = 2048
#: seconds until a worker whose responses were ended is killed, between two checks, before a failed worker restarts
_STOP_SECONDS, _LOOK_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 8.0, 0.2, 0.2, 10.0
#: seconds without a sign of life after which a worker is killed: while it serves, and while it starts
_STUCK_SECONDS, _START_SECONDS = 30.0, 120.0
_PROVEN_SECONDS = 30.0
#: a peer that does not answer for so many seconds counts as gone
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_USER_TIMEOUT_MS = 60_000
#: the options of the listening socket, which a reload does not change
LISTENER = ("address", "socket_mode", "socket_group")


@dataclass
class HttpOptions(WorkerOptions):
    """Options of an HTTP server: the flags of `allspark http`."""

    address: str = option(DEFAULT_ADDRESS, "the address to serve on", flag_name="http", metavar="HOST:PORT")
    workers: int = option(1, "the number of processes", metavar="N")
    drain_delay: float = option(0.0, "how long connections are still accepted after a stop is requested, while /health "
                                "and /health/ready answer 503, so that load balancers notice it", metavar="SECONDS",
                                accepts=lambda value: 0 <= value < float("inf"), rule="a number of seconds, at least 0")

    def check(self) -> None:
        """Raises ValueError or OSError for options that no worker could serve with. Opens nothing."""
        if not 1 <= self.workers <= 256:
            raise ValueError(f"--workers {self.workers} must be 1 to 256")
        access.check_listener(self.address, token=bool(self.token_file), tls=bool(self.tls_cert),
                          client_ca=bool(self.tls_ca), insecure=self.insecure)
        if "://" in self.store:
            if importlib.util.find_spec("sqlalchemy") is None:
                raise ValueError("--store with a URL needs SQLAlchemy: pip install 'allspark-numa[store]'")
        elif self.store and not Path(self.store).absolute().parent.is_dir():
            raise ValueError(f"--store {self.store!r} is in a directory that does not exist")
        for path in filter(None, (self.token_file, self.pool_token_file)):
            access.read_tokens(path)
        for proxy in self.trusted_proxy:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"--trusted-proxy {proxy!r} is neither an address nor a network: {error}") from None
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key are needed together")
        if self.tls_cert:
            Certificates(TlsConfig(self.tls_ca or None, self.tls_cert, self.tls_key))


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
    """The place of one process: the process, and when it may be started again."""

    def __init__(self, number: int, counts: ConnectionCounts) -> None:
        self._number, self._counts = number, counts
        self.process: subprocess.Popen | None = None
        self.alive = -1             # a pipe that it writes to each second
        self.heard = 0.0            # when it last did, or was started
        self.serves = False         # whether it has ever done so
        self.started = self.not_before = 0.0
        self.pause = _FIRST_PAUSE

    def start(self, words: list[str], environment: dict[str, str], files: tuple[int, ...]) -> None:
        """`files`: descriptors that the process inherits. Raises OSError if the system has no process or descriptor
        left.
        """
        alive, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.process = subprocess.Popen(
                [*words, "--number", str(self._number), "--alive-fd", str(write_end)], env=environment,
                stdin=subprocess.DEVNULL, pass_fds=[*files, write_end])
        except BaseException:
            os.close(alive)
            raise
        finally:
            os.close(write_end)
        self.alive, self.serves = alive, False
        self.started = self.heard = time.monotonic()

    def listen(self) -> None:
        """Notes whether it is alive."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self.alive, 4096):
                self.heard, self.serves = time.monotonic(), True

    def is_stuck(self) -> bool:
        """Whether its event loop has not run for too long."""
        return time.monotonic() - self.heard > (_STUCK_SECONDS if self.serves else _START_SECONDS)

    def leave(self) -> subprocess.Popen:
        """Gives up the process, which is returned."""
        process, self.process = self.process, None
        assert process is not None
        os.close(self.alive)
        if process.returncode is not None:
            self._counts.leave(self._number)
        return process


class HttpServer:
    """Workers on one socket, kept running until `close`. `address` has the actual port. One thread starts and watches
    all workers, because a worker ends with the thread that started it.
    """

    def __init__(self, options: HttpOptions, folder: Path):
        """`folder`: a private folder for the workers' counters. Raises what HttpOptions.check and open_socket raise."""
        options.check()
        self._socket, self.address = open_socket(
            options.address, access.mode_of(options.socket_mode, options.socket_group), options.socket_group)
        self._socket.set_inheritable(True)
        self._folder = folder
        self._locks: list[int] = []
        self._environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder),
                             "ALLSPARK_HTTP_PARENT": str(os.getpid())}
        self._workers: list[_Worker] = []
        self._counts_file = -1
        self._retired: list[subprocess.Popen] = []
        self._out_of_memory = OutOfMemory()
        #: what it runs with, or will after a reload that has begun
        self.options = options
        self._take(options)
        self._fresh: HttpOptions | None = None      # to be taken over
        self._changed = threading.Event()           # wakes the thread
        self._ending = self._hurry = False
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="allspark-http", daemon=True)

    def start(self) -> None:
        """Starts the workers. The socket accepts connections already."""
        logger.info("HTTP on %s, %d worker%s", self.address, len(self._workers), "s" * (len(self._workers) > 1))
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    @property
    def serves(self) -> bool:
        """Whether a worker answers."""
        return any(worker.process is not None and worker.serves for worker in self._workers)

    @property
    def watched(self) -> bool:
        """Whether the workers are being watched."""
        return self._thread.is_alive() and time.monotonic() - self._looked < _STUCK_SECONDS

    def reload(self, options: HttpOptions) -> None:
        """Replaces the workers by new ones with these options, without losing a connection. What belongs to the socket
        stays as it is. Raises ValueError or OSError for options that no worker could serve with; then all stays.
        """
        options.check()
        stays = {name: getattr(self._options, name) for name in LISTENER}
        if left := [name for name, value in stays.items() if value != getattr(options, name)]:
            logger.warning("what has changed here needs a restart: %s", ", ".join(left))
            options = replace(options, **stays)
        self.options = self._fresh = options
        self._changed.set()

    def drain(self) -> None:
        """Begins to stop: after `drain_delay` the socket is closed, and responses in progress get `drain_limit` s.
        Returns at once; `close` waits. A second call ends the responses.
        """
        self._hurry, self._ending = self._ending, True
        self._changed.set()

    def wait(self, timeout: float) -> bool:
        """Waits for the end of all workers after `drain`; returns whether they have ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stops the workers. Responses in progress get `drain_limit` seconds."""
        if not self._ending:
            self.drain()
        self.wait(threading.TIMEOUT_MAX)
        self._socket.close()
        if self._counts_file >= 0:
            os.close(self._counts_file)
            self._counts_file = -1
        while self._locks:
            os.close(self._locks.pop())
        if access.is_unix(self.address):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    def _take(self, options: HttpOptions) -> None:
        versions, shown = self._file_versions(options), self._read_shown(options)   # may raise: before anything changes
        self._options, self._versions, self._shown = options, versions, shown
        before, self._counts_file = self._counts_file, make_file(options.workers)
        if before >= 0:
            os.close(before)
        self._words = [sys.executable, "-m", "allspark_server.http", *worker_words(options),
                       "--fd", str(self._socket.fileno()), "--counts-fd", str(self._counts_file)]
        connections = ConnectionCounts(self._counts_file)
        self._replaced = [worker for worker in self._workers if worker.process is not None]
        self._workers = [_Worker(number, connections) for number in range(options.workers)]

    def _file_versions(self, options: HttpOptions) -> list[tuple[int, ...]]:
        files = (options.pool_token_file, options.pool_tls_ca)
        return [access.file_version(path or None) for path in files]

    def _read_shown(self, options: HttpOptions) -> tuple[str, bytes]:
        """What workers read only at their start: the token that they show to groups, and whom they trust. Raises
        ValueError or OSError.
        """
        token, _ = access.pool_token(options.pool_token_file)
        return token, Path(options.pool_tls_ca).read_bytes() if options.pool_tls_ca else b""

    def _watch(self) -> None:
        while not self._ending:
            self._looked = time.monotonic()
            try:
                self._look()
            except Exception:       # one failure must not end the HTTP server
                logger.exception("watching the HTTP workers failed")
            self._changed.wait(_LOOK_SECONDS)
            self._changed.clear()
        self._stop_all()

    def _look(self) -> None:
        fresh, self._fresh = self._fresh, None
        if fresh is None and (versions := self._file_versions(self._options)) != self._versions:
            self._versions = versions
            try:
                if self._read_shown(self._options) != self._shown:
                    fresh = self._options
            except (OSError, ValueError) as error:
                logger.error("the HTTP workers stay as they were: %s", error)
        if fresh is not None:
            logger.info("the HTTP workers are replaced: their options, or what they show to groups, have changed")
            before = self._replaced
            self._take(fresh)
            self._replaced += before        # of a reload that has not ended yet
        for worker in [*self._workers, *self._replaced]:
            if worker.process is not None:
                worker.listen()
                self._check(worker)
        for worker in self._workers:
            if worker.process is None and time.monotonic() >= worker.not_before:
                self._start(worker)
        if self._replaced and all(worker.serves for worker in self._workers):
            for worker in self._replaced:
                process = worker.leave()
                process.send_signal(signal.SIGUSR1)
                self._retired.append(process)
            self._replaced = []
        for process in [process for process in self._retired if process.poll() is not None]:
            self._retired.remove(process)
            self._forget_gauges(process.pid)

    def _start(self, worker: _Worker) -> None:
        try:
            if not self._folder.is_dir():       # logind may have removed it
                self._locks.append(make_again(self._folder))
            worker.start(self._words, self._environment, (self._socket.fileno(), self._counts_file))
        except OSError as error:        # no process or descriptor is left, for example
            self._note_failure(worker, f"cannot be started: {error}")

    def _check(self, worker: _Worker) -> None:
        assert worker.process is not None
        status = worker.process.poll()
        if status is None and worker.is_stuck():
            logger.error("an HTTP worker (process %d) has not answered for %.0f s and is killed", worker.process.pid,
                         time.monotonic() - worker.heard)
            worker.process.kill()
            worker.heard = time.monotonic()
        if status is None:
            return
        self._forget_gauges(worker.leave().pid)
        if worker in self._replaced:
            self._replaced.remove(worker)
            return
        if time.monotonic() - worker.started > _PROVEN_SECONDS:
            worker.pause = _FIRST_PAUSE
        self._note_failure(worker, f"ended with status {status}{self._out_of_memory.explain()}")

    def _forget_gauges(self, pid: int) -> None:
        """Forget the gauges of a worker that has ended: the counters stay, but its requests wait no more."""
        for file in self._folder.glob(f"gauge_live*_{pid}.db"):
            file.unlink(missing_ok=True)

    def _note_failure(self, worker: _Worker, what: str) -> None:
        logger.warning("an HTTP worker %s; starting it again in %.1f s", what, worker.pause)
        worker.not_before = time.monotonic() + worker.pause
        worker.pause = min(2 * worker.pause, _LONGEST_PAUSE)

    def _stop_all(self) -> None:
        workers = [worker for worker in [*self._workers, *self._replaced] if worker.process is not None]
        _signal_all([worker.process for worker in workers if worker.process is not None], signal.SIGUSR2)
        until = time.monotonic() + self._options.drain_delay
        while not self._hurry and (pause := until - time.monotonic()) > 0:
            self._changed.wait(pause)
            self._changed.clear()
        self._socket.close()        # connections are refused from now on, and do not wait in its queue
        left = [*self._retired, *(worker.leave() for worker in workers)]
        _signal_all(left, signal.SIGTERM)
        deadline, hurried = time.monotonic() + self._options.drain_limit, False
        while left := [process for process in left if process.poll() is None]:
            now = time.monotonic()
            if not hurried and (self._hurry or now > deadline):
                _signal_all(left, signal.SIGINT)        # responses end now
                hurried, deadline = True, now + _STOP_SECONDS
            elif hurried and now > deadline:
                _signal_all(left, signal.SIGKILL)
            self._changed.wait(0.05)
            self._changed.clear()


def _signal_all(processes: list[subprocess.Popen], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


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
