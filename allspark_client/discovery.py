"""Members of a pool that come and go: named by DNS, or listed in a file that is watched."""
from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .connection_options import DNS, FILE, check_address

logger = logging.getLogger(__name__)

#: how often a file is looked at, and a name is resolved, s
FILE_SECONDS, DNS_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class Found:
    """The address of a member. `server_name`: the name in its certificate, if that is not the address's host."""

    address: str
    server_name: str = ""


class Source:
    """Where addresses of members come from. `every`: seconds between two looks; 0: the addresses never change."""

    every = 0.0

    def find(self) -> list[Found]:
        """The addresses now. Raises OSError or ValueError if they are not known."""
        raise NotImplementedError


class Fixed(Source):
    """An address that was given."""

    def __init__(self, address: str):
        self._found = [Found(address)]

    def find(self) -> list[Found]:
        """See Source."""
        return self._found


class DnsName(Source):
    """All addresses of a name, such as that of a headless Service of Kubernetes, which has one for each pod."""

    every = DNS_SECONDS

    def __init__(self, text: str):
        """`text`: "dns:NAME:PORT"."""
        self.text = text
        self._name, _, port = text.removeprefix(DNS).rpartition(":")
        self._port = int(port)

    def find(self) -> list[Found]:
        """See Source. A name that has no addresses now has no members."""
        try:
            infos = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
                return []
            raise
        hosts = sorted({str(info[4][0]) for info in infos})
        return [Found(f"{f'[{host}]' if ':' in host else host}:{self._port}", self._name) for host in hosts]


class WatchedFile(Source):
    """A file with an address on each line; blank lines and lines that begin with # are skipped."""

    every = FILE_SECONDS

    def __init__(self, text: str):
        """`text`: "file:PATH"."""
        self.text = text
        self._path = text.removeprefix(FILE)
        self._version: tuple[int, ...] = ()
        self._found: list[Found] = []

    def find(self) -> list[Found]:
        """See Source. The file is read again once it has changed."""
        status = os.stat(self._path)
        version = status.st_mtime_ns, status.st_size, status.st_ino
        if version != self._version:
            with open(self._path, encoding="utf-8") as file:
                lines = [line.strip() for line in file if line.strip() and not line.lstrip().startswith("#")]
            self._found, self._version = [Found(check_address(line)) for line in lines], version
        return self._found


def source_of(address: str) -> Source:
    """The source that one of ClientEngine's addresses stands for."""
    if address.startswith(DNS):
        return DnsName(address)
    return WatchedFile(address) if address.startswith(FILE) else Fixed(address)


class Discovery:
    """Looks for the members of a pool, at first in the caller's thread and then in one of its own."""

    def __init__(self, addresses: Sequence[str], update: Callable[[list[Found]], None], tidy: Callable[[], None]):
        """`update(found)`: called with all members, at first and when they have changed. `tidy()`: called now and then
        if members may change.
        """
        self._sources = [source_of(address) for address in addresses]
        self._known: list[list[Found]] = [[] for _ in self._sources]
        self._due = [0.0] * len(self._sources)
        self._why: dict[Source, str] = {}
        self._update, self._tidy = update, tidy
        self._end = threading.Event()
        self._given: list[Found] | None = None
        self.look()
        if self.changes:
            threading.Thread(target=self._run, name="allspark-discovery", daemon=True).start()

    @property
    def changes(self) -> bool:
        """Whether members may come and go."""
        return any(source.every for source in self._sources)

    def close(self) -> None:
        """Stop looking."""
        self._end.set()

    def look(self) -> None:
        """Look at the sources whose time has come. One that fails keeps the members that it had."""
        now = time.monotonic()
        for index, source in enumerate(self._sources):
            if now < self._due[index]:
                continue
            self._due[index] = now + source.every if source.every else float("inf")
            try:
                self._known[index], why = source.find(), ""
            except (OSError, ValueError, TypeError) as error:
                why = str(error)
            if why and why != self._why.get(source):
                logger.warning("the members of %s stay as they were: %s", getattr(source, "text", source), why)
            self._why[source] = why
        found = list(dict.fromkeys(each for known in self._known for each in known))
        if found != self._given:
            self._given = found
            self._update(found)

    def _run(self) -> None:
        pause = min(source.every for source in self._sources if source.every)
        while not self._end.wait(pause):
            self.look()
            self._tidy()
