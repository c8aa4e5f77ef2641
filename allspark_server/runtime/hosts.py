"""What a group that spans hosts needs besides shared memory.

This is the layout of ranks over hosts, MPI's functions for native code, and the connections between rank 0 and the
first rank of every other host, which carry commands and heartbeats.
"""
from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

CONNECT_SECONDS = 20.0      # until every host has connected to rank 0
ADDRESS_SECONDS = 3.0       # for one of rank 0's addresses
USER_TIMEOUT_MS = 5000      # unacknowledged data breaks the connection after this time
_TOKEN = 32


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
    communicator: keeps the handles alive.
    """

    first: list[int]
    mpi: list[int]
    sockets: list[int]
    communicator: Any = field(repr=False)


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
    own = world.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    functions = ctypes.CDLL(library)
    mpi: list[Any] = [ctypes.cast(getattr(functions, f"MPI_{name}"), ctypes.c_void_p).value
                      for name in ("Isend", "Irecv", "Test")]
    mpi += [ctypes.c_void_p.from_address(MPI._addressof(thing)).value for thing in (MPI.BYTE, own)]
    sockets: list[int] = []
    if world.rank == 0:
        with _listener() as listener:
            addresses = ["127.0.0.1"] if loopback else own_addresses()
            offer = addresses, listener.getsockname()[1], secrets.token_bytes(_TOKEN)
            world.bcast(offer, root=0)
            sockets = _accept(listener, len(layout.first) - 2, offer[2])
    else:
        addresses, port, token = world.bcast(None, root=0)
        if world.rank == layout.first[layout.own]:
            sockets = [_join(addresses, port, token, layout.own)]
    return Between(layout.first, mpi, sockets, own)


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


def _accept(listener: socket.socket, count: int, token: bytes) -> list[int]:
    """Connections of the other hosts, in order of hosts. Connections without the token are closed."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(found) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, count + 1)) - set(found))
            raise HostsError(f"host(s) {missing} of the group have not reached rank 0 within {CONNECT_SECONDS:g} s at "
                             f"port {listener.getsockname()[1]}: the hosts of a group must reach each other at any "
                             "port") from None
        peer.settimeout(ADDRESS_SECONDS)
        with contextlib.suppress(OSError):
            said = _receive(peer, _TOKEN + 4)
            host = struct.unpack("<I", said[_TOKEN:])[0] if hmac.compare_digest(said[:_TOKEN], token) else 0
            if 1 <= host <= count:
                peer.sendall(b"\1")
                found[host] = peer
                continue
        peer.close()
    return [_ready(found[host]) for host in range(1, count + 1)]


def _join(addresses: list[str], port: int, token: bytes, host: int) -> int:
    """Connects to rank 0 at the first address that works."""
    failed = []
    for address in addresses:
        try:
            peer = socket.create_connection((address, port), timeout=ADDRESS_SECONDS)
        except OSError as error:
            failed.append(f"{address}: {error.strerror or error}")
            continue
        with contextlib.suppress(OSError):
            peer.sendall(token + struct.pack("<I", host))
            if _receive(peer, 1) == b"\1":
                return _ready(peer)
        peer.close()
        failed.append(f"{address}: another service answers there")
    raise HostsError(f"host {socket.gethostname()} cannot reach rank 0 at port {port} "
                     f"({'; '.join(failed) or 'it has no address'}): the hosts of a group must reach each other at any "
                     "port")


def _receive(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data


def _ready(peer: socket.socket) -> int:
    """Returns the connection's descriptor, which native code then owns."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    descriptor = peer.detach()
    os.set_blocking(descriptor, False)
    return descriptor
