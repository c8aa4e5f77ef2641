"""TLS files of a listener, which are read again when they change: certificates are renewed while a server runs."""
from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
import time
from pathlib import Path

from allspark_client.types import TlsConfig

from .access import file_version

logger = logging.getLogger(__name__)

#: how often the files are checked for changes, s
LOOK_SECONDS = 1.0


class Certificates:
    """A server's certificate with its key, and the authorities that clients' certificates must come from (tls.ca; None:
    clients need none). Any thread may call the methods.

    A pair that does not fit together, which half a renewal is, changes nothing. Raises ValueError or OSError if the
    files cannot be used from the start.
    """

    def __init__(self, tls: TlsConfig):
        if not tls.cert or not tls.key:
            raise ValueError("tls needs cert and key, two PEM files")
        self.tls = tls
        self._paths = [path for path in (tls.cert, tls.key, tls.ca) if path]
        self._lock = threading.Lock()
        self._seen, self._next_look = self._versions(), 0.0
        #: how often the files have been read
        self.version = 0
        self._read()

    def look(self) -> int:
        """Reads the files again if they have changed, checked once a second; returns `version`."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_look:
                return self.version
            self._next_look = now + LOOK_SECONDS
            seen = self._versions()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._read()
                except (OSError, ValueError) as error:
                    logger.error("the certificate stays as it was: %s", error)
                else:
                    logger.info("the TLS files were read again; the certificate is valid until %s",
                                time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires)))
        return self.version

    async def watch(self) -> None:
        """Reads the files when they have changed, though no client connects. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def _versions(self) -> list[tuple[int, ...]]:
        return [file_version(path) for path in self._paths]

    def _read(self) -> None:
        cert, key, ca = self.tls.cert, self.tls.key, self.tls.ca
        assert cert and key
        try:
            pair = Path(key).read_bytes(), Path(cert).read_bytes()
            authorities = Path(ca).read_bytes() if ca else None
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            if ca:
                context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
                # A client could resume a session that was made with an authority which is not trusted any more.
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        except ssl.SSLError as error:
            raise ValueError(f"the TLS files {', '.join(map(str, self._paths))} cannot be used: {error}") from None
        except OSError as error:
            raise OSError(error.errno, f"a TLS file cannot be read: {error}") from None
        #: the content of the files: key and certificate, and the authorities
        self.pair, self.authorities = pair, authorities
        #: when the certificate expires, Unix time, s
        self.expires = _expires(cert)
        self.context = context
        self.version += 1

    def ssl_context(self) -> ssl.SSLContext:
        """A context for a server. Each new connection uses the files' present content."""
        with self._lock:
            context = self.context

        def choose(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
            self.look()
            if connection.context is not self.context:
                connection.context = self.context

        context.sni_callback = choose       # called for clients that name no server, too
        return context


def _expires(path: str | os.PathLike[str]) -> float:
    # The standard library shows a certificate's fields only by this function, or to a peer.
    decoded = ssl._ssl._test_decode_cert(os.fspath(path))  # type: ignore[attr-defined]
    return float(ssl.cert_time_to_seconds(decoded["notAfter"]))
