"""What a group that spans hosts needs besides shared memory.

This is the layout of ranks over hosts, MPI's functions for native code, and the connections between rank 0 and the
first rank of every other host, which carry commands and heartbeats.
"""
from __future__ import annotations

import contextlib
import ctypes
import datetime
import hmac
import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .tunnel import CONNECT_SECONDS, END_SECONDS

#: the file beside the supervisor's or the agent's socket with the secret of this incarnation
SECRET_FILE = "secret"
START_SECONDS = 20.0        # until a process has started; its code may be on a slow shared file system
CLOCKS_DIFFER = datetime.timedelta(days=3650)   # a certificate's dates mean nothing: it ends with its incarnation


class HostsError(RuntimeError):
    """The hosts of a group cannot connect; the text names them and says what to check."""


@dataclass
class Layout:
    """Where ranks are. first: each host's first rank, then the number of all ranks. own: this rank's host."""

    first: list[int]
    own: int

    @property
    def here(self) -> range:
        """The ranks of this host."""
        return range(self.first[self.own], self.first[self.own + 1])

    def receiver(self, rank: int) -> int:
        """The rank of this host that receives from another host's rank and holds its mirror (native/comm/hosts.h)."""
        return self.here[rank % len(self.here)]

    def mirrors(self, receiver: int) -> list[int]:
        """The ranks of other hosts whose mirrors a rank of this host holds."""
        return [r for r in range(self.first[-1]) if r not in self.here and self.receiver(r) == receiver]


@dataclass
class Between:
    """What the native library needs to reach other hosts.

    first: as in `Layout`. mpi: addresses of MPI's functions, then its handles. sockets: descriptors of connections.
    communicator: keeps the handles alive. tunnel: the process that carries the connections to other hosts.
    """

    first: list[int]
    mpi: list[int]
    sockets: list[int]
    communicator: Any = field(repr=False)
    tunnel: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """Frees the handles and ends the process, which first sends what native code has written; a collective call."""
        self.communicator.Free()
        if self.tunnel is not None:
            try:
                self.tunnel.wait(2 * END_SECONDS)
            except subprocess.TimeoutExpired:
                self.tunnel.kill()


def layout_of(hosts: list[int], rank: int) -> Layout:
    """The layout of ranks. hosts: for each rank, a number that is equal for the ranks of one host.

    Raises HostsError if the ranks of a host are not consecutive.
    """
    first = [r for r, host in enumerate(hosts) if r == 0 or host != hosts[r - 1]]
    if len(first) != len(set(hosts)):
        raise HostsError(f"ranks of a host must be consecutive, but ranks are on hosts {hosts}: name each host once "
                         "(allspark serve --hosts does)")
    own = max(i for i, r in enumerate(first) if r <= rank)
    return Layout([*first, len(hosts)], own)


def connect(world: Any, layout: Layout, library: str, loopback: bool) -> Between:
    """Connects the hosts; a collective call.

    library: the path of the loaded MPI library. loopback: all hosts are this one (for tests). Raises HostsError if a
    host cannot be reached.
    """
    from mpi4py import MPI
    secret = _secret_of(world)
    own = world.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    functions = ctypes.CDLL(library)
    mpi: list[Any] = [ctypes.cast(getattr(functions, f"MPI_{name}"), ctypes.c_void_p).value
                      for name in ("Isend", "Irecv", "Test")]
    mpi += [ctypes.c_void_p.from_address(MPI._addressof(thing)).value for thing in (MPI.BYTE, own)]
    sockets: list[int] = []
    tunnel = None
    if world.rank == 0:
        with _listener() as listener, _pairs(range(1, len(layout.first) - 1)) as (sockets, ranks):
            world.bcast((["127.0.0.1"] if loopback else own_addresses(), listener.getsockname()[1]), root=0)
            tunnel = _tunnel(ranks, [listener.fileno()], listener=listener.fileno(), secret=secret)
    else:
        addresses, port = world.bcast(None, root=0)
        if world.rank == layout.first[layout.own]:
            with _pairs([layout.own]) as (sockets, ranks):
                tunnel = _tunnel(ranks, [], addresses=addresses, port=port, secret=secret)
    return Between(layout.first, mpi, sockets, own, tunnel)


@contextlib.contextmanager
def _pairs(hosts: Iterable[int]) -> Iterator[tuple[list[int], dict[int, socket.socket]]]:
    """A socket pair for each host: the descriptors of this side, which native code then owns, and the other ends, which
    are closed at the end of the with block.
    """
    pairs = {host: socket.socketpair() for host in hosts}
    try:
        yield [own.detach() for own, _ in pairs.values()], {host: end for host, (_, end) in pairs.items()}
    finally:
        for _, end in pairs.values():
            end.close()


def own_addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, IPv4 before IPv6."""
    found: list[tuple[bool, str]] = []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries if name in up else ():
            internet = entry.family in (socket.AF_INET, socket.AF_INET6)
            if internet and not entry.address.startswith(("127.", "::1", "fe80")):
                found.append((entry.family == socket.AF_INET6, entry.address))
    return [address for _, address in sorted(found)]


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def new_secret() -> str:
    """A key and its certificate as PEM, for one incarnation of a group: who has it may connect."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "allspark group")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
                   .serial_number(x509.random_serial_number()).not_valid_before(now - CLOCKS_DIFFER)
                   .not_valid_after(now + CLOCKS_DIFFER).sign(key, hashes.SHA256()))
    pem = serialization.Encoding.PEM
    return (key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            + certificate.public_bytes(pem)).decode()


def _secret_of(world: Any) -> str:
    """The secret of this incarnation: the supervisor's or, without one, rank 0's."""
    supervisor = os.environ.get("ALLSPARK_SUPERVISOR")
    if supervisor is None:
        return world.bcast(new_secret() if world.rank == 0 else None, root=0)
    file = Path(supervisor).with_name(SECRET_FILE)
    try:
        secret = file.read_text()
    except OSError as error:
        raise HostsError(f"the group's secret {file} cannot be read: {error.strerror}") from error
    _prove(world, secret)
    return secret


def _prove(world: Any, secret: str) -> None:
    """Raises HostsError unless every rank of the MPI world knows the secret."""
    numbers = b"".join(world.allgather(secrets.token_bytes(32)))

    def proof(rank: int) -> bytes:
        return hmac.digest(secret.encode(), numbers + rank.to_bytes(4, "little"), "sha256")

    strangers = [r for r, shown in enumerate(world.allgather(proof(world.rank)))
                 if not (isinstance(shown, bytes) and hmac.compare_digest(shown, proof(r)))]
    if strangers:
        raise HostsError(f"rank(s) {strangers} do not know the secret of this group: processes that the group did not "
                         "start have joined it")


def _tunnel(ranks: dict[int, socket.socket], descriptors: list[int], **request: Any) -> subprocess.Popen[str]:
    """Starts the process that connects these ends of socket pairs, by host, to other hosts; returns once it has."""
    inherited = [*descriptors, *(end.fileno() for end in ranks.values())]
    process = subprocess.Popen([sys.executable, "-I", str(Path(__file__).with_name("tunnel.py"))], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=inherited)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps({**request, "ranks": {h: end.fileno() for h, end in ranks.items()}}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS + CONNECT_SECONDS)
        answer = process.stdout.readline() if ready else ""
    if answer == "\n":
        return process
    process.kill()
    process.wait()
    raise HostsError(answer.strip() or "the process that connects this host to the others has ended, or does not start")
