"""What systemd is told of a service of Type=notify, over the socket that it names (sd_notify(3))."""
from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

STATUS_SECONDS = 1.0        # between two lines for `systemctl status`


class Notifier:
    """`path`: of the socket; "": nothing is told. `watchdog`: s within which systemd wants a sign of life, 0: never."""

    def __init__(self, path: str = "", watchdog: float = 0.0):
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._interval = watchdog / 3
        self._next_sign = self._next_status = 0.0
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Takes what systemd has set out of `environment`: it is meant for this process alone."""
        path = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", "0"), environment.pop("WATCHDOG_PID", "")
        meant = not pid or pid == str(os.getpid())
        return cls(path, int(microseconds) / 1e6 if microseconds.isdigit() and meant else 0.0)

    def ready(self) -> None:
        """The service serves, for the first time or again after `reloading`."""
        self._send("READY=1")

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The service is about to end."""
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """A line for people: what the service does. Told when it changes, not more often than once a second."""
        now = time.monotonic()
        if text != self._status and now >= self._next_status:
            self._status, self._next_status = text, now + STATUS_SECONDS
            self._send("STATUS=" + text.replace("\n", " "))

    def alive(self) -> None:
        """A sign of life for the watchdog, if one is due."""
        now = time.monotonic()
        if self._interval and now >= self._next_sign:
            self._next_sign = now + self._interval
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
                s.settimeout(1.0)
                s.sendto(text.encode(), self._address)
        except OSError as error:        # whoever watches over a group must not end because nobody listens
            logger.warning("systemd cannot be told %r: %s", text.partition("\n")[0], error)
