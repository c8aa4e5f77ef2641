"""The connections between hosts: only processes with the secret of the incarnation connect, and nobody else reads."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from allspark_server.runtime import hosts, tunnel
from allspark_server.runtime.hosts import HostsError, _pairs, _prove, _tunnel, new_secret


class Wire:
    """Passes a connection on to a port, and notes every byte."""

    def __init__(self, port: int):
        self.seen = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=self._copy, args=(near, far), daemon=True).start()
        self._copy(far, near)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self.seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def rank0():
    """The tunnel of rank 0 for host 1, waiting for it: its port, and a future of (socket of native code, process)."""
    secret = new_secret()
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        def begin():
            with _pairs([1]) as ((own,), ranks):
                return socket.socket(fileno=own), _tunnel(ranks, [listener.fileno()], listener=listener.fileno(),
                                                          secret=secret)

        port = listener.getsockname()[1]
        yield SimpleNamespace(secret=secret, listener=listener, port=port, ready=pool.submit(begin))


def other(secret: str, port: int, host: int = 1):
    """The other host's tunnel."""
    with _pairs([host]) as ((own,), ranks):
        return socket.socket(fileno=own), _tunnel(ranks, [], addresses=["127.0.0.1"], port=port, secret=secret)


def test_only_the_secret_opens_a_connection_and_nobody_reads_it(rank0):
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    for wrap in (lambda plain: plain, without.wrap_socket):     # without TLS, and without a certificate
        answer = b""
        with contextlib.suppress(OSError), wrap(socket.create_connection(("127.0.0.1", rank0.port), 10)) as stranger:
            stranger.sendall(struct.pack("<I", 1))
            answer = stranger.recv(1)
        assert answer != b"\1"
    with pytest.raises(HostsError, match="cannot reach rank 0 at port .*127.0.0.1: another service, or another group"):
        other(new_secret(), rank0.port)                     # of another incarnation
    wire = Wire(rank0.port)
    there, second = other(rank0.secret, wire.port)
    here, first = rank0.ready.result(20)
    message = bytes(range(256)) * 4096
    with here, there:
        for source, target in ((here, there), (there, here)):
            sender = threading.Thread(target=source.sendall, args=(message,))
            sender.start()
            got = b""
            while len(got) < len(message):
                got += target.recv(1 << 20)
            sender.join()
            assert got == message
        assert len(wire.seen) > 2 * len(message) and bytes(range(64)) not in wire.seen
        rank0.listener.close()
        with pytest.raises(ConnectionRefusedError):         # nobody else can connect later
            socket.create_connection(("127.0.0.1", rank0.port))
        here.sendall(b"bye")                                # what was written before the end arrives
        here.close()
        assert there.recv(10) == b"bye" and there.recv(10) == b""
    assert first.wait(10) == second.wait(10) == 0


def test_a_missing_host_is_named(monkeypatch):
    monkeypatch.setattr(tunnel, "CONNECT_SECONDS", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(OSError, match=r"host\(s\) \[1, 2\] of the group have not reached rank 0 within 0.3 s"):
        asyncio.run(tunnel.accept(listener, {1, 2}, new_secret()))


class World:
    """The MPI world of rank 0 whose other ranks answer with `answers`."""

    rank = 0

    def __init__(self, secret_of_other: str):
        self._secret = secret_of_other

    def allgather(self, own):
        if len(own) == 32 and not hasattr(self, "_numbers"):
            self._numbers = own + bytes(32)
            return [own, bytes(32)]
        return [own, hmac.digest(self._secret.encode(), self._numbers + struct.pack("<I", 1), "sha256")]


def test_every_rank_proves_that_it_knows_the_secret():
    _prove(World("s"), "s")
    with pytest.raises(HostsError, match=r"rank\(s\) \[1\] do not know the secret of this group"):
        _prove(World("t"), "s")


def test_a_rank_under_a_supervisor_needs_its_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLSPARK_SUPERVISOR", str(tmp_path / "heartbeat"))
    with pytest.raises(HostsError, match="secret cannot be read: No such file"):
        hosts._secret_of(World("s"))
    (tmp_path / "secret").write_text("s")
    assert hosts._secret_of(World("s")) == "s"
