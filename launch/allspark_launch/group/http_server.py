"""The HTTP server's processes: opens its socket, starts its workers, and starts them again; and `allspark http`."""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allspark_server import access

from .folders import private_folder, short_parent

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8000"
_BACKLOG = 2048
#: s until a worker that was asked to stop is killed, between two looks, and before one that failed is started again
_STOP_SECONDS, _LOOK_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 8.0, 0.2, 0.2, 10.0
_PROVEN_SECONDS = 30.0
#: after so many s without an answer a peer counts as gone
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_USER_TIMEOUT_MS = 60_000


@dataclass
class HttpOptions:
    """An HTTP server's options. `address`: host:port or unix:/path."""

    address: str = DEFAULT_ADDRESS
    workers: int = 1
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_role: str = ""
    insecure: bool = False
    socket_mode: str = ""
    socket_group: str = ""
    max_body_mib: int = 0
    log_level: str = "info"
    log_format: str = "text"
    #: of the groups behind it
    pool: list[str] = field(default_factory=list)
    pool_token_file: str = ""
    pool_tls_ca: str = ""

    def check(self) -> None:
        """Raises ValueError or OSError for what no worker could serve with; nothing is opened yet."""
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

    def words(self) -> list[str]:
        """A worker's command line, but for the socket."""
        words = [sys.executable, "-m", "allspark_server.http", "--log-level", self.log_level,
                 "--log-format", self.log_format]
        for address in self.pool:
            words += ["--address", address]
        for name in ("token_file", "tls_cert", "tls_key", "tls_ca", "tls_role", "max_body_mib", "pool_token_file",
                     "pool_tls_ca"):
            if getattr(self, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return words


def open_socket(address: str, mode: int = 0o600, group: str = "") -> tuple[socket.socket, str]:
    """A listening socket and its address, with the port that it got. ValueError or OSError name the address."""
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
            # Connections have these from the socket that they come from.
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
    """Workers on one socket, kept alive until `close`. `address`: with the port that it got."""

    def __init__(self, options: HttpOptions, folder: Path):
        """`folder`: private, where workers share their counters. Raises as HttpOptions.check and open_socket."""
        options.check()
        self._socket, self.address = open_socket(
            options.address, access.mode_of(options.socket_mode, options.socket_group), options.socket_group)
        self._socket.set_inheritable(True)
        self._words = [*options.words(), "--fd", str(self._socket.fileno())]
        self._environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder),
                             "ALLSPARK_HTTP_PARENT": str(os.getpid())}
        self._workers = [_Worker() for _ in range(options.workers)]
        self._ending = threading.Event()
        # A thread of its own starts all: a worker ends with the thread that started it.
        self._thread = threading.Thread(target=self._watch, name="allspark-http", daemon=True)

    def start(self) -> None:
        """Starts the workers; connections are taken already."""
        logger.info("HTTP on %s, %d worker%s", self.address, len(self._workers), "s" * (len(self._workers) > 1))
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def close(self) -> None:
        """Stops the workers; answers under way have some seconds."""
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
                if worker.process is not None and worker.process.poll() is not None:
                    self._note_end(worker, now)
                if worker.process is None and now >= worker.not_before:
                    worker.process = subprocess.Popen(self._words, env=self._environment, stdin=subprocess.DEVNULL,
                                                      pass_fds=[self._socket.fileno()])
                    worker.started = now
        self._stop_all()

    def _note_end(self, worker: _Worker, now: float) -> None:
        if now - worker.started > _PROVEN_SECONDS:
            worker.pause = _FIRST_PAUSE
        logger.warning("an HTTP worker ended with status %s; starting it again in %.1f s", worker.process.returncode,
                       worker.pause)
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


# --- the command -------------------------------------------------------------------------------------------------


def add_command(command) -> None:
    """`allspark http`, for build_parser."""
    p = command("http", _http, "OpenAI's API over HTTP, in front of a group or a pool", epilog="""\
Answers /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models, /v1/messages (Anthropic's),
/tokenize, /detokenize, /health, /metrics and /openapi.json. It keeps no state: run as many as you like, anywhere. Groups
may come and go; requests move on as those of any client do. Beside a group of its own, allspark serve --http does the
same.

Clients need a key of the token file, shown as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; the rules of what may be
served where are those of allspark serve.

examples:
  allspark http --address unix:/run/allspark/a --insecure
  allspark http --address 10.0.0.1:50051 --address 10.0.0.2:50051 --pool-token-file group-token \\
      --http 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --token-file keys --workers 4""")
    p.add_argument("--address", action="append", default=[],
                   help="a group's address; repeatable (default $ALLSPARK_ADDRESS, or where a group serves that was "
                        "given none)")
    p.add_argument("--pool-token-file", default="", metavar="FILE", help="groups are shown a token of this file")
    p.add_argument("--pool-tls-ca", default="", metavar="PEM", help="reach groups with TLS, trusting these")
    p.add_argument("--http", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="where to serve (default %(default)s)")
    p.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default %(default)s)")
    p.add_argument("--token-file", default="", metavar="FILE", help="clients' keys: a line 'ROLE TOKEN' for each")
    p.add_argument("--tls-cert", default="", metavar="PEM", help="the server's certificate")
    p.add_argument("--tls-key", default="", metavar="PEM", help="its key")
    p.add_argument("--tls-ca", default="", metavar="PEM", help="require client certificates signed by these")
    p.add_argument("--tls-role", choices=[role.value for role in access.Role], default="",
                   help="of clients with a certificate, where there is no token file (default admin)")
    p.add_argument("--insecure", action="store_true", help="serve though whoever reaches the address may do everything")
    p.add_argument("--socket-mode", default="", metavar="MODE", help="of a Unix socket (default 0600: only this user)")
    p.add_argument("--socket-group", default="", metavar="NAME", help="whom it belongs to (mode 0660 then)")
    p.add_argument("--max-body-mib", type=int, default=0, metavar="N", help="the largest body taken (default 16)")
    p.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    p.add_argument("--ready-file", metavar="FILE", help="written as JSON once connections are taken")


def _http(options: argparse.Namespace) -> int:
    from ..pool.members import default_address
    pool = options.address or [a for a in os.environ.get("ALLSPARK_ADDRESS", "").split(",") if a] or [default_address()]
    names = ("workers", "token_file", "tls_cert", "tls_key", "tls_ca", "tls_role", "insecure", "socket_mode",
             "socket_group", "max_body_mib", "log_level", "pool_token_file", "pool_tls_ca")
    server = HttpOptions(address=options.http, pool=pool, **{name: getattr(options, name) for name in names})
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with http_server(server) as running:
        if options.ready_file:
            path = Path(options.ready_file)
            path.with_name(path.name + ".new").write_text(json.dumps({"address": running.address}) + "\n")
            path.with_name(path.name + ".new").replace(path)
        stop.wait()
    return 0
