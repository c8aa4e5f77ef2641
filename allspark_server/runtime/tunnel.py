"""The encrypted connections between rank 0 and the first ranks of other hosts: a process beside each of these ranks.

Connections are TLS 1.3. Both sides show the certificate of this incarnation of the group and accept no other, so only
processes that have its key can connect. Native code reads and writes a socket pair, whose other end is passed through
here. It is a process because a thread would compete with rank 0's engine for the interpreter's lock.

Standard input has a line of JSON: {"secret": the certificate and its key as PEM, "ranks": {host: descriptor}}, and
{"listener": descriptor} or {"addresses", "port"}. Standard output gets a line once the hosts are connected: it is
empty, or says what went wrong. The process ends when its connections have. Needs only the standard library.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
import sys
from typing import Any

CONNECT_SECONDS = 20.0      # until every host has connected to rank 0
ADDRESS_SECONDS = 3.0       # for one of rank 0's addresses
END_SECONDS = 3.0           # until the other side has closed, too
USER_TIMEOUT_MS = 5000      # unacknowledged data breaks the connection after this time
_PIECE = 1 << 18
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def context(secret: str, server: bool) -> ssl.SSLContext:
    """TLS with the incarnation's certificate as the only one on both sides."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=secret[secret.index("-----BEGIN CERTIFICATE"):])
    file = os.memfd_create("secret")        # the library reads a key from a file only
    try:
        os.write(file, secret.encode())
        made.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return made


async def accept(listener: socket.socket, hosts: set[int], secret: str) -> dict[int, _Connection]:
    """The connections of these hosts. Others are closed. Raises OSError if a host does not connect in time."""
    found: dict[int, _Connection] = {}
    complete = asyncio.Event()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            host = struct.unpack("<I", await asyncio.wait_for(reader.readexactly(4), ADDRESS_SECONDS))[0]
            if host in hosts and host not in found:
                writer.write(b"\1")
                found[host] = reader, writer
                if len(found) == len(hosts):
                    complete.set()
                return
        writer.close()

    server = await asyncio.start_server(accepted, sock=listener, ssl=context(secret, True), limit=_PIECE,
                                        ssl_handshake_timeout=ADDRESS_SECONDS)
    port = listener.getsockname()[1]
    try:
        await asyncio.wait_for(complete.wait(), CONNECT_SECONDS)
    except asyncio.TimeoutError:
        raise OSError(f"host(s) {sorted(hosts - set(found))} of the group have not reached rank 0 within "
                      f"{CONNECT_SECONDS:g} s at port {port}: the hosts of a group must reach each other at any "
                      "port") from None
    finally:
        server.close()
    return found


async def connect(addresses: list[str], port: int, host: int, secret: str) -> _Connection:
    """A connection to rank 0 at the first address that works. Raises OSError with the reasons of all."""
    failed = []
    for address in addresses:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(
                address, port, ssl=context(secret, False), server_hostname="", limit=_PIECE), ADDRESS_SECONDS)
        except ssl.SSLError:
            failed.append(f"{address}: another service, or another group, answers there")
            continue
        except (OSError, asyncio.TimeoutError) as error:
            failed.append(f"{address}: {getattr(error, 'strerror', None) or error or 'no answer'}")
            continue
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            writer.write(struct.pack("<I", host))
            await asyncio.wait_for(reader.readexactly(1), ADDRESS_SECONDS)
            return reader, writer
        writer.close()
        failed.append(f"{address}: another service, or another group, answers there")
    raise OSError(f"host {socket.gethostname()} cannot reach rank 0 at port {port} "
                  f"({'; '.join(failed) or 'it has no address'}): the hosts of a group must reach each other at any "
                  "port")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until the end of the stream, which it passes on."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
    writer.close()


async def join(remote: _Connection, descriptor: int) -> None:
    """Connects a rank's descriptor with another host until both have ended."""
    wire = remote[1].get_extra_info("socket")
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    local = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor), limit=_PIECE)
    copies = [asyncio.create_task(_copy(local[0], remote[1])), asyncio.create_task(_copy(remote[0], local[1]))]
    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(copies, timeout=END_SECONDS)


async def run(request: dict[str, Any]) -> None:
    """Connects, says so on standard output, and passes data on until the connections end."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)       # of strangers' failed handshakes
    ranks, secret = {int(host): fd for host, fd in request["ranks"].items()}, request["secret"]
    try:
        if "listener" in request:
            remotes = await accept(socket.socket(fileno=request["listener"]), set(ranks), secret)
        else:
            remotes = {host: await connect(request["addresses"], request["port"], host, secret) for host in ranks}
    except OSError as error:
        print(error, flush=True)
        return
    pairs = asyncio.gather(*(join(remotes[host], fd) for host, fd in ranks.items()))
    print(flush=True)
    await pairs


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.stdin.readline())))
    os._exit(0)     # whatever a lost connection still waits for
