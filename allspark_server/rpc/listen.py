"""Opens the listeners of a service: TCP ports, with or without TLS, and Unix sockets."""
from __future__ import annotations

import contextlib
import grp
import logging
import os
import socket
import stat
from collections.abc import Iterator

import grpc
import grpc.aio

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import TlsConfig

from ..access import is_unix
from ..certificates import Certificates

logger = logging.getLogger(__name__)


def listen(server: grpc.aio.Server, address: str, certificates: Certificates | None, socket_mode: int,
           socket_group: str = "") -> str:
    """Make `server` listen on an address; returns the address, with the port that was chosen.

    `certificates` (None: no TLS) apply to TCP, `socket_mode` and `socket_group` (a name; "": the process's own) to Unix
    sockets. Raises AllSparkError with the reason.
    """
    unix = is_unix(address)
    if unix:
        address = "unix:" + free_socket_path(address)
    elif ":" not in address:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"address {address!r} is neither host:port nor unix:/path")
    credentials = _credentials(certificates) if certificates is not None and not unix else None
    try:
        if credentials is not None:
            port = server.add_secure_port(address, credentials)
        else:
            with umask(0o777 & ~socket_mode):      # the socket has its mode from the start
                port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise _in_use(address) from error
    if port == 0:
        raise _in_use(address)
    if unix and socket_group:
        give_to_group(address[len("unix:"):], socket_group)
    return address if unix else f"{address.rsplit(':', 1)[0]}:{port}"


def _in_use(address: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                         f"cannot listen on {address}: the port is in use, or the host is not this machine's")


def give_to_group(path: str, group: str) -> None:
    """Let the members of a Unix group open a socket. Raises AllSparkError if this user is not one of them."""
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid, follow_symlinks=False)
    except KeyError:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"socket_group {group!r}: there is no such group") from None
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"socket_group {group!r}: {error.strerror}; this user must be a member of it") from error


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """A context manager that sets the process's umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def free_socket_path(address: str) -> str:
    """The absolute path of "unix:PATH" or "unix:///PATH", free to be bound: a stale socket is removed."""
    path = address[len("unix:"):]
    path = os.path.abspath("/" + path.lstrip("/") if path.startswith("//") else path)
    if len(os.fsencode(path)) > 107:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"the socket path {path} has {len(os.fsencode(path))} bytes; Unix allows 107")
    if not os.path.isdir(os.path.dirname(path)):
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                            f"cannot listen on unix:{path}: there is no directory {os.path.dirname(path)}")
    if not os.path.lexists(path):
        return path
    probe = socket.socket(socket.AF_UNIX)
    probe.settimeout(2.0)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        if not os.path.islink(path) and not _is_socket(path):
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                f"cannot listen on unix:{path}: the path exists and is not a socket") from None
        logger.warning("removing the stale socket %s: no process listens on it", path)
        os.unlink(path)
        return path
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"cannot listen on unix:{path}: {error}") from error
    finally:
        probe.close()
    raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                        f"cannot listen on unix:{path}: the address is in use, another server listens there")


def _is_socket(path: str) -> bool:
    return stat.S_ISSOCK(os.lstat(path).st_mode)


def open_certificates(tls: TlsConfig) -> Certificates:
    """The certificates of a listener. Raises AllSparkError."""
    try:
        return Certificates(tls)
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, error.strerror or str(error)) from error
    except ValueError as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, str(error)) from error


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that follow the files: gRPC asks before each handshake whether they have changed."""
    taken = certificates.version

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([certificates.pair], certificates.authorities)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal taken
        if certificates.look() == taken:
            return None
        taken = certificates.version
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed,  # type: ignore[arg-type]  # None: no change
                                               certificates.authorities is not None)
