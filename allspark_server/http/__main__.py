"""A worker of the HTTP server: `python -m allspark_server.http --fd N --address …`.

`allspark http` and `allspark serve --http` open the socket, start the workers, and restart workers that have ended.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from allspark_client.types import TlsConfig
from allspark_server import logs
from allspark_server.access import Access, Role, pool_token
from allspark_server.certificates import Certificates
from allspark_server.options import WorkerOptions, add_arguments, image_hosts, options_of
from allspark_server.runtime.binding import die_with_parent, raise_open_files, return_large_memory

from .app import Application
from .bodies import BodyReader
from .call import HttpWorker
from .counts import ConnectionCounts, make_file
from .image_urls import ImageFetcher
from .jobs import Jobs
from .listener import Server
from .metrics import Metrics
from .pool import Pool
from .protocol import Connection
from .store import Store, open_database

if TYPE_CHECKING:
    import uvicorn

#: how long a connection may wait for its next request, s
KEEP_ALIVE_SECONDS = 75
#: how long responses of a worker that another one replaces may take, s
RETIRED_SECONDS = 3600.0
#: file descriptors that are not used for connections
_OTHER_FILES = 256
_MOST_CONNECTIONS = 50_000
_BODIES_ALL_TOGETHER = 320 << 20


def parser() -> argparse.ArgumentParser:
    """The parser of a worker's command line."""
    p = argparse.ArgumentParser(prog="python -m allspark_server.http", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--fd", type=int, required=True, help="the listening socket")
    p.add_argument("--counts-fd", type=int, default=-1, help="a file with the number of connections of each worker "
                                                             "(default: there is no other)")
    p.add_argument("--number", type=int, default=0, help="this worker's number in it")
    p.add_argument("--alive-fd", type=int, default=-1, help="a pipe that gets a byte a second while the worker answers")
    add_arguments(p, [declared for declared in options_of(WorkerOptions) if declared.worker],
                  lambda declared: declared.effective_default)
    return p


def main() -> None:
    """Run a worker until it must stop."""
    import uvicorn
    parent = os.environ.get("ALLSPARK_HTTP_PARENT")
    if parent:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):     # the parent had ended before
            return
    return_large_memory()
    a = parser().parse_args()
    logs.set_up("http", a.log_level, a.log_format, a.access_log)
    for name in ("uvicorn.error", "uvicorn.access"):    # they log errors that clients could cause at any rate
        logging.getLogger(name).setLevel("CRITICAL" if a.log_level != "debug" else "DEBUG")
    tls = TlsConfig(a.tls_ca or None, a.tls_cert, a.tls_key) if a.tls_cert else None
    certificates = Certificates(tls) if tls is not None else None
    access = Access(tls=tls, tls_role=Role(a.tls_role), token_file=a.token_file or None)
    token, names_tenants = pool_token(a.pool_token_file)
    pool = Pool(a.pool, token, TlsConfig(ca=a.pool_tls_ca) if a.pool_tls_ca else None)
    worker = HttpWorker(pool, access, BodyReader(a.max_body_mib << 20, _BODIES_ALL_TOGETHER), Metrics(), names_tenants,
                        certificates=certificates, alive_fd=a.alive_fd, wait_limit=a.wait_limit, heartbeat=a.heartbeat,
                        origins=frozenset(a.allow_origin), strict_fields=a.strict_fields,
                        open_endpoints=frozenset({"metrics"} if a.open_metrics else ()),
                        max_file_bytes=a.max_file_mib << 20,
                        images=ImageFetcher(image_hosts(a.allow_image_hosts), a.max_image_mib << 20))
    if a.store:
        worker.jobs = Jobs(Store(open_database(a.store), 86400 * a.store_days, a.store_mib << 20))
    # One thread serves; the others, of the connections to the pool, must not make it wait long.
    sys.setswitchinterval(0.001)
    listener = socket.socket(fileno=a.fd)
    Connection.limit = max(raise_open_files(_MOST_CONNECTIONS + _OTHER_FILES) - _OTHER_FILES, 64)
    config = uvicorn.Config(Application(worker), http=Connection, ws="none", lifespan="on", log_config=None,
                            access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
                            proxy_headers=bool(a.trusted_proxy), forwarded_allow_ips=a.trusted_proxy)
    config.load()
    if certificates is not None:
        config.ssl = certificates.ssl_context()
    counts = ConnectionCounts(make_file(1) if a.counts_fd < 0 else a.counts_fd)
    server = Server(config, counts, a.number)
    _limit_stop(config, a.drain_limit)

    def retire(*_: Any) -> None:
        """Another worker takes over: responses may take as long as they need."""
        _limit_stop(config, RETIRED_SECONDS)
        server.should_exit = True

    def announce(*_: Any) -> None:
        """The server will stop soon."""
        worker.draining = True

    signal.signal(signal.SIGUSR1, retire)
    signal.signal(signal.SIGUSR2, announce)
    server.run([listener])


def _limit_stop(config: uvicorn.Config, seconds: float) -> None:
    """Sets how long responses may take once the worker stops; inf: any time."""
    config.timeout_graceful_shutdown = None if seconds == math.inf else seconds  # type: ignore[assignment]


if __name__ == "__main__":
    main()
