"""Runs many clients in one process: connections to a group with a minimal HTTP/2 implementation, each with an open
Session call. A gRPC channel for each would need hundreds of kilobytes, and could not misbehave.

    crowd.py ADDRESS KIND --clients N [--each N] [--seconds S] [--tokens N] [--prompt N]

Kinds: `idle` only says hello and answers pings; `busy` always runs --each requests; `deaf` is like `busy` but does not
read; `keeps` is like `busy` but never releases a request; `large` repeatedly sends the largest message. The script
prints a line of JSON when all clients are connected, and one at the end.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import selectors
import socket
import struct
import sys
import time

import numpy as np

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.config import GenerateConfig

MODEL = "m"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_WINDOW = 1 << 30
_LARGEST = (16 << 20) - 1024


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _hpack_text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


#: HPACK literals without indexing, so that no side needs a dynamic table (RFC 7541)
_HEADERS = (b"\x83\x86\x04" + _hpack_text("/allspark.Allspark/Session") + b"\x01" + _hpack_text("localhost")
            + b"\x0f\x10" + _hpack_text("application/grpc") + b"\x00" + _hpack_text("te") + _hpack_text("trailers"))


def _preface(window: int) -> bytes:
    return (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window))
            + (_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", window - 65535)) if window > 65535 else b"")
            + _frame(HEADERS, 4, 1, _HEADERS))


def _grpc_frame(request: pb.SessionRequest) -> bytes:
    """A gRPC message as the content of HTTP/2 frames."""
    data = request.SerializeToString()
    return b"\0" + struct.pack(">I", len(data)) + data


@functools.cache
def _large() -> bytes:
    """A request with more text than the context holds, which the server rejects after reading it. It always has the
    same id, which is free again after the rejection.
    """
    request = pb.GenerateRequest(model=MODEL, text="a b " * (_LARGEST // 4))
    return _grpc_frame(pb.SessionRequest(start=pb.StartRequest(id=1, request=request)))


class Client:
    """One connection. `answered` is true once the server has answered its hello."""

    def __init__(self, address: str, options: argparse.Namespace, number: int):
        self.options, self.random, self.answered, self.closed = options, random.Random(number), False, False
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address.removeprefix("unix:"))
        self.socket.setblocking(False)
        self._in, self._body, self._out = bytearray(), bytearray(), bytearray()
        self._id = 0
        self._send_window = [65535, 65535]  # bytes that the client may send now: on the stream, on the connection
        self._initial = 65535
        self._held = bytearray()            # data that waits for flow control
        self._read = 0
        self.first: list[float] = []        # s to first tokens
        self.gaps: list[float] = []
        self.tokens = self.requests = 0
        #: id -> time of its last tokens, or of its start, and whether it has tokens
        self._since: dict[int, tuple[float, bool]] = {}
        self.send(_preface(0 if options.kind == "deaf" else _WINDOW))
        self._send_message(pb.SessionRequest(hello=convert.hello("crowd")))

    def _send_message(self, request: pb.SessionRequest) -> None:
        self._held += _grpc_frame(request)
        self._send_held()

    def send(self, data: bytes) -> None:
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Writes as much as the socket takes."""
        while self._out:
            try:
                del self._out[:self.socket.send(self._out[:1 << 20])]
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def receive(self) -> None:
        """Reads and handles what has come."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self._in += data
        at = 0
        while len(self._in) - at >= 9:
            length = int.from_bytes(self._in[at:at + 3], "big")
            if len(self._in) - at < 9 + length:
                break
            self._frame(self._in[at + 3], self._in[at + 4], bytes(self._in[at + 9:at + 9 + length]),
                        int.from_bytes(self._in[at + 5:at + 9], "big"))
            at += 9 + length
        del self._in[:at]

    def _frame(self, kind: int, flags: int, payload: bytes, stream: int) -> None:
        if kind == SETTINGS and not flags & 1:
            for at in range(0, len(payload), 6):
                key, value = struct.unpack_from(">HI", payload, at)
                if key == 4:
                    self._send_window[0] += value - self._initial
                    self._initial = value
            self.send(_frame(SETTINGS, 1, 0, b""))
        elif kind == PING and not flags & 1:
            self.send(_frame(PING, 1, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._send_window[0 if stream else 1] += int.from_bytes(payload, "big")
            self._send_held()
        elif kind in (RST_STREAM, GOAWAY):
            self.closed = True
        elif kind == HEADERS and self.options.kind == "deaf":
            self._on_hello()                # it does not read the message
        elif kind == HEADERS and flags & 1:
            self.closed = True
        elif kind == DATA:
            self._read += len(payload)
            if self._read > _WINDOW // 2:
                for where in (0, 1):
                    self.send(_frame(WINDOW_UPDATE, 0, where, struct.pack(">I", self._read)))
                self._read = 0
            self._body += payload
            while len(self._body) >= 5 and len(self._body) >= 5 + (size := int.from_bytes(self._body[1:5], "big")):
                body = bytes(self._body[5:5 + size])
                del self._body[:5 + size]
                self._message(body)

    def _send_held(self) -> None:
        """Sends held data in frames, as far as the server's windows allow."""
        while len(self._held) and min(self._send_window) > 0:
            part = bytes(self._held[:min(16384, *self._send_window)])
            del self._held[:len(part)]
            self._send_window = [window - len(part) for window in self._send_window]
            self.send(_frame(DATA, 0, 1, part))
        if not self._held and self.options.kind == "large" and self.answered:
            self._start_request()

    def _message(self, body: bytes) -> None:
        if not self.answered:
            self._on_hello()
            return
        if self.options.kind in ("idle", "large"):
            return
        now, response = time.perf_counter(), pb.SessionResponse.FromString(body)
        for request in response.tokens.requests:
            self.gaps.append(now - self._since[request][0])
            self._since[request] = now, True
        self.tokens += len(response.tokens.ids)
        for event in response.events:
            count = sum(len(elements.ids) for elements in event.elements)
            if count:
                since, begun = self._since[event.id]
                (self.gaps if begun else self.first).append(now - since)
                self._since[event.id] = now, True
                self.tokens += count
            if event.HasField("refused"):
                raise SystemExit(event.refused.message)
            if event.HasField("stat"):
                self.requests += 1
                del self._since[event.id]
                if self.options.kind != "keeps":
                    self._send_message(pb.SessionRequest(release=event.id))
                self._start_request()

    def _on_hello(self) -> None:
        self.answered = True
        if self.options.kind != "idle":
            for _ in range(self.options.each):
                self._start_request()

    def _start_request(self) -> None:
        self._id += 1
        self._since[self._id] = time.perf_counter(), False
        options = self.options
        if options.kind == "large":         # the message is made once, because only the server's work is measured
            self._held += _large()
            self._send_held()
            return
        ids = [self.random.randrange(10, 1000) for _ in range(options.prompt)]
        more = {"logprobs": True, "top_logprobs": options.top} if options.top else {}
        config = GenerateConfig(max_new_tokens=options.tokens, early_stopping=False, seed=1, **more)
        self._send_message(pb.SessionRequest(start=pb.StartRequest(id=self._id, request=pb.GenerateRequest(
            model=MODEL, input_ids=pb.TokenIds(ids=ids), want_text=options.text,
            config=convert.generate_config_to_pb(config)))))


def percentiles(values: list[float]) -> dict[str, float]:
    """In ms."""
    return {f"p{p}": 1e3 * float(np.percentile(values, p)) for p in (50, 99)} if values else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("kind", choices=["idle", "busy", "deaf", "keeps", "large"])
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--each", type=int, default=1, help="requests at once")
    parser.add_argument("--seconds", type=float, default=0.0, help="after the greeting; 0: until its input ends")
    parser.add_argument("--warm", type=float, default=0.0, help="first part of --seconds, not counted")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--top", type=int, default=0, help="logprobs with each token")
    parser.add_argument("--text", action="store_true", help="ask for text with the tokens")
    options = parser.parse_args()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    waiting = list(range(options.clients))
    clients: list[Client] = []
    began, ends, reconnected, greeted, warmed = time.perf_counter(), None, 0, False, False
    while ends is None or time.perf_counter() < ends:
        while waiting and sum(not client.answered for client in clients) < 200:     # at most so many at once
            client = Client(options.address, options, waiting.pop())
            clients.append(client)
            selector.register(client.socket, selectors.EVENT_READ, client)
        for key, mask in selector.select(0.2):
            client = key.data
            if client is None:
                ends = 0.0
                continue
            if mask & selectors.EVENT_READ:
                client.receive()
            client.flush()
            if client.closed:
                selector.unregister(client.socket)
                client.socket.close()
                clients.remove(client)
                waiting.append(options.clients + (reconnected := reconnected + 1))
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.wants_write else 0)
            if key.events != wanted:
                selector.modify(client.socket, wanted, client)
        if not greeted and not waiting and all(client.answered for client in clients):
            greeted = True
            print(json.dumps({"greeted": len(clients), "seconds": time.perf_counter() - began}), flush=True)
            began = time.perf_counter()
            ends = began + options.seconds if options.seconds else None
        if greeted and not warmed and time.perf_counter() - began > options.warm:
            warmed, began = True, time.perf_counter()
            for client in clients:
                client.gaps, client.first, client.tokens, client.requests = [], [], 0, 0
    seconds = time.perf_counter() - began
    gaps, first = ([value for client in clients for value in getattr(client, name)] for name in ("gaps", "first"))
    print(json.dumps({
        "clients": len(clients), "lost": reconnected, "requests": sum(client.requests for client in clients),
        "sent": sum(client._id for client in clients),
        "tokens_per_second": sum(client.tokens for client in clients) / seconds, "gaps": percentiles(gaps),
        "first": percentiles(first)}), flush=True)


if __name__ == "__main__":
    main()
