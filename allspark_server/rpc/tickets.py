"""Tickets: what a client that resumes a request shows, so that a server believes it.

A server gives a ticket with each request that it accepts. A resumed request passes a drain, may take longer to compile
its grammar, and is computed alone if servers were lost while they ran it. Without a ticket anybody could claim that.

The key is made from what all members of a pool have and no client knows: all tokens, of which a client has one. So a
ticket of one group is valid on another. Clients that are not known by a token get tickets that only this process reads.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from collections import deque

from allspark_client._proto import allspark_pb2 as pb
from allspark_client.request import RequestSpec

from ..access import Access
from ..runtime.native import native_library

_SECONDS, _SKEW = 3600, 300     # how long a ticket is valid, and by how much clocks of hosts may differ
_BODY = struct.Struct("<B8sBQ")     # version, incarnation, deaths, Unix time
_VERSION, _MAC_BYTES = 1, 16
_KEYS = 4                       # of earlier token files: requests that run while tokens change are still believed


class Tickets:
    """Issues and checks the tickets of a service. Any thread may call the methods."""

    def __init__(self, access: Access):
        self._access = access
        self._incarnation = os.urandom(8)
        self._keys: deque[tuple[int, bytes]] = deque(maxlen=_KEYS)     # with the version of the tokens, newest first

    def issue(self, spec: RequestSpec, request: pb.GenerateRequest) -> bytes:
        """The ticket of an accepted request, whose prompt has become ids."""
        body = _BODY.pack(_VERSION, self._incarnation, min(spec.deaths, 255), int(time.time()))
        return body + _mac(self._current_key(), body, spec, request)

    def believe(self, spec: RequestSpec, request: pb.GenerateRequest) -> None:
        """Keep of a request's claims what its ticket proves: that a server accepted it, and at most one loss more than
        that server knew of. A claim of losses without a proof counts as one, unproven.
        """
        if not (spec.resumed or spec.deaths):
            return
        body, mac = request.ticket[:_BODY.size], request.ticket[_BODY.size:]
        self._current_key()
        spec.proven = len(body) == _BODY.size and any(
            hmac.compare_digest(mac, _mac(key, body, spec, request)) for _, key in self._keys)
        if spec.proven:
            version, incarnation, deaths, issued = _BODY.unpack(body)
            spec.proven = version == _VERSION and -_SKEW <= time.time() - issued <= _SECONDS
        if spec.proven:
            # This process was not lost: the client has only lost its connection.
            spec.deaths = min(spec.deaths, deaths + (incarnation != self._incarnation))
        else:
            spec.resumed, spec.deaths = False, min(spec.deaths, 1)

    def _current_key(self) -> bytes:
        version = self._access.look()
        if not self._keys or self._keys[0][0] != version:
            tokens = sorted(self._access.tokens)
            secret = "\n".join(tokens).encode() if tokens else os.urandom(32)
            # Slow: a client that knows its own token and a ticket must not find out the others by trying.
            key = hashlib.scrypt(secret, salt=b"allspark tickets", n=1 << 14, r=8, p=1, dklen=32)
            self._keys.appendleft((version, key))
        return self._keys[0][1]


def _mac(key: bytes, body: bytes, spec: RequestSpec, request: pb.GenerateRequest) -> bytes:
    """Of the ticket, and of the request that it was given for."""
    digest = hashlib.blake2b(body, key=key, digest_size=_MAC_BYTES)
    parts = (spec.tenant.encode(), spec.model.encode(), native_library().id_bytes(spec.input_ids or []),
             request.config.SerializeToString(deterministic=True),
             request.chat_options.SerializeToString(deterministic=True))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
