"""Images that requests name by http and https URLs: fetched from hosts that the operator allows.

A URL comes from whoever sends a request, and this process can reach what they may not: services of its own machine, of
its network and of its cloud. So a connection goes only to a public address, whatever names, numbers or redirects led
there. It goes to the very address that was checked: a name that is resolved again may have another one by then.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import urllib.parse
from collections.abc import Iterable
from typing import Any

import httpcore

from allspark_client.version import __version__

#: how long one image may take, and all of one request, s
SECONDS, ALL_SECONDS = 5.0, 20.0
REDIRECTS = 3
#: fetches at a time, of this process and of one request
_AT_ONCE, OF_REQUEST = 32, 4
_LONGEST_URL = 8192
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
#: characters that stay as they are in the path and the query of a URL
_PLAIN = "/?:@!$&'()*+,;=-._~%"
#: the only part of IPv6 that is public; the ranges of 6to4 and Teredo in it stand for addresses of IPv4
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")


def is_public(address: str) -> bool:
    """Whether everybody can reach an IP address: it is not private, loopback, link-local, shared or reserved."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip not in _PUBLIC_IPV6 or ip.sixtofour is not None or ip.teredo is not None:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def resolve(host: str, port: int) -> list[str]:
    """The IP addresses of a host. Raises OSError if there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for _, _, _, _, where in found))


class _PublicNetwork(httpcore.AnyIOBackend):
    """Connects to public addresses alone."""

    async def connect_tcp(self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
                          socket_options: Iterable[Any] | None = None) -> httpcore.AsyncNetworkStream:
        """As httpcore's. Raises ValueError for a host without a public address."""
        try:
            addresses = [address for address in await resolve(host, port) if is_public(address)]
        except (OSError, UnicodeError):
            raise ValueError(f"the host {host!r} is not known") from None
        if not addresses:
            raise ValueError(f"the host {host!r} has no public address")
        failure = httpcore.ConnectError()
        for address in addresses:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError as error:
                failure = error
        raise failure


class ImageFetcher:
    """Fetches images. hosts: the allowed ones, as --allow-image-hosts has them. max_bytes: of one image."""

    def __init__(self, hosts: Iterable[str] = (), max_bytes: int = 20 << 20):
        self._hosts, self.max_bytes = frozenset(host.lower() for host in hosts), max_bytes
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._ssl: ssl.SSLContext | None = None

    async def fetch(self, url: str, of_request: asyncio.Semaphore) -> bytes:
        """The content of the image at a URL. Raises ValueError, which says why there is none."""
        async with of_request, self._at_once:
            try:
                return await asyncio.wait_for(self._follow(url), SECONDS)
            except asyncio.TimeoutError:
                raise ValueError(f"it did not arrive within {SECONDS:g} s") from None
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ssl.SSLError) as error:
                why = re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__
                raise ValueError(f"it cannot be fetched: {why}") from None

    async def _follow(self, url: str) -> bytes:
        """Asks for a URL, and for those that it is redirected to."""
        if self._ssl is None:   # reads the system's certificates, which takes a while
            self._ssl = await asyncio.to_thread(ssl.create_default_context)
        for _ in range(1 + REDIRECTS):
            found = await self._ask(url)
            if isinstance(found, bytes):
                return found
            url = urllib.parse.urljoin(url, found)
        raise ValueError(f"it is redirected more than {REDIRECTS} times")

    async def _ask(self, url: str) -> bytes | str:
        """One request: the image, or where it is redirected to."""
        headers = [("User-Agent", f"allspark/{__version__}"), ("Accept", "image/*"), ("Accept-Encoding", "identity")]
        async with httpcore.AsyncConnectionPool(ssl_context=self._ssl, network_backend=_PublicNetwork()) as pool, \
                pool.stream("GET", self._checked(url), headers=headers) as response:
            given = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECT_STATUSES and b"location" in given:
                return given[b"location"].decode("latin-1")
            if response.status != 200:
                raise ValueError(f"its server answers with the status {response.status}")
            if given.get(b"content-encoding", b"identity").lower() != b"identity":
                raise ValueError("its server sends it compressed, although it was asked not to")
            length = given.get(b"content-length", b"0")
            if length.isdigit() and (len(length) > 18 or int(length) > self.max_bytes):
                raise self._too_large()
            content = bytearray()
            async for part in response.aiter_stream():
                content += part
                if len(content) > self.max_bytes:
                    raise self._too_large()
            return bytes(content)

    def _too_large(self) -> ValueError:
        return ValueError(f"it has more than the {self.max_bytes} bytes that an image may have")

    def _checked(self, url: str) -> httpcore.URL:
        """A URL that may be asked. Raises ValueError for others."""
        if len(url) > _LONGEST_URL:
            raise ValueError(f"its URL has more than {_LONGEST_URL} characters")
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
            host = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii")
        except (ValueError, UnicodeError):
            raise ValueError(f"{url[:80]!r} is no URL") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"{url[:80]!r} is neither a data URL nor one of http or https")
        if parts.username is not None or parts.password is not None:
            raise ValueError("its URL has a user's name, which is not supported")
        if not self._allows(host):
            raise ValueError(f"this server fetches no images from {host[:80]!r}: send the image itself, or let the "
                             "operator allow the host with --allow-image-hosts")
        target = urllib.parse.quote(parts.path or "/", safe=_PLAIN)
        if parts.query:
            target += "?" + urllib.parse.quote(parts.query, safe=_PLAIN)
        return httpcore.URL(scheme=parts.scheme.encode(), host=host.encode(), port=port, target=target.encode())

    def _allows(self, host: str) -> bool:
        labels = host.lower().split(".")
        return bool(self._hosts & {"*", host.lower(), *("*." + ".".join(labels[i:]) for i in range(1, len(labels)))})
