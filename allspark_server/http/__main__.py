"""A worker of the HTTP server: `python -m allspark_server.http --fd N --address …`.

`allspark http` and `allspark serve --http` open the socket, start the workers, and restart workers that have ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import ssl
from typing import Any

from allspark_client.types import TlsConfig
from allspark_server import logs
from allspark_server.access import Access, Role, read_tokens
from allspark_server.options import WorkerOptions, add_arguments, options_of
from allspark_server.runtime.binding import die_with_parent, raise_open_files

from .app import Application
from .bodies import BodyReader
from .call import HttpWorker
from .metrics import Metrics
from .pool import Pool
from .protocol import Connection

#: how long answers may take once the worker must stop, and how long a connection may wait for its next request, s
GRACE_SECONDS, KEEP_ALIVE_SECONDS = 5, 75
BACKLOG = 2048
#: file descriptors that are not used for connections
_OTHER_FILES = 256
_MOST_CONNECTIONS = 50_000
_BODIES_ALL_TOGETHER = 256 << 20


def parser() -> argparse.ArgumentParser:
    """The parser of a worker's command line."""
    p = argparse.ArgumentParser(prog="python -m allspark_server.http", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--fd", type=int, required=True, help="the listening socket")
    add_arguments(p, [declared for declared in options_of(WorkerOptions) if declared.worker],
                  lambda declared: declared.effective_default)
    return p


def pool_token(path: str | None) -> tuple[str, bool]:
    """The token that is shown to groups, and whether it may name tenants.

    The file's first token of the role door is taken; without one the first of admin, then the first of generate.
    """
    tokens = read_tokens(path) if path else {}
    for role in (Role.DOOR, Role.ADMIN, Role.GENERATE):
        for token, its_role in tokens.items():
            if its_role is role:
                return token, role is not Role.GENERATE
    if tokens:
        raise ValueError(f"the token file {path} has no token of the role door, admin or generate")
    return "", True


def main() -> None:
    """Run a worker until it must stop."""
    import uvicorn
    parent = os.environ.get("ALLSPARK_HTTP_PARENT")
    if parent:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):     # the parent had ended before
            return
    a = parser().parse_args()
    logs.set_up("http", a.log_level, a.log_format)
    for name in ("uvicorn.error", "uvicorn.access"):    # they log errors that clients could cause at any rate
        logging.getLogger(name).setLevel("CRITICAL" if a.log_level != "debug" else "DEBUG")
    tls = TlsConfig(a.tls_ca or None, a.tls_cert, a.tls_key) if a.tls_cert else None
    access = Access(tls=tls, tls_role=Role(a.tls_role), token_file=a.token_file or None)
    token, names_tenants = pool_token(a.pool_token_file)
    pool = Pool(a.pool, token, TlsConfig(ca=a.pool_tls_ca) if a.pool_tls_ca else None)
    worker = HttpWorker(pool, access, BodyReader(a.max_body_mib << 20, _BODIES_ALL_TOGETHER), Metrics(), names_tenants)
    listener = socket.socket(fileno=a.fd)
    Connection.limit = max(raise_open_files(_MOST_CONNECTIONS + _OTHER_FILES) - _OTHER_FILES, 64)
    secure: dict[str, Any] = {} if tls is None else {
        "ssl_certfile": tls.cert, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.ca,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE}
    config = uvicorn.Config(Application(worker), http=Connection, ws="none", lifespan="on", log_config=None,
                            access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
                            timeout_graceful_shutdown=GRACE_SECONDS, backlog=BACKLOG, proxy_headers=False, **secure)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
