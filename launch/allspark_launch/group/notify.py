"""Reports the state of a service of Type=notify to systemd (sd_notify(3))."""
from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

STATUS_SECONDS = 1.0        # between two lines for `systemctl status`
SEND_SECONDS = 1.0          # that a message may wait for room in systemd's queue


class Notifier:
    """Sends to systemd's socket `path`; "": sends nothing. `watchdog`: the longest time in seconds
    between two notifications that systemd allows; 0: it has no watchdog.
    """

    def __init__(self, path: str = "", watchdog: float = 0.0):
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._interval = watchdog / 3
        self._next_sign = self._next_status = self._next_ready = 0.0
        self._owed = ""             # a message that must arrive, and did not yet
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Removes systemd's variables from `environment`, as they are for this process alone, and uses them."""
        path = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", "0"), environment.pop("WATCHDOG_PID", "")
        for_us = not pid or pid == str(os.getpid())
        return cls(path, int(microseconds) / 1e6 if microseconds.isdigit() and for_us else 0.0)

    def ready(self) -> None:
        """The service is ready, for the first time or after `reloading`. `alive` repeats it until systemd has it."""
        self._owed = "" if self._send("READY=1") else "READY=1"

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The service begins to stop."""
        self._owed = ""
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """Reports one line for `systemctl status`. It is sent when it changes, at most once a second."""
        now = time.monotonic()
        if text != self._status and now >= self._next_status:
            self._status, self._next_status = text, now + STATUS_SECONDS
            self._send("STATUS=" + text.replace("\n", " "))

    def alive(self) -> None:
        """Notifies the watchdog, if that is due. To be called several times a second."""
        now = time.monotonic()
        if self._owed and now >= self._next_ready:
            self._next_ready = now + STATUS_SECONDS
            self.ready()
        if self._interval and now >= self._next_sign:
            self._next_sign = now + self._interval
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> bool:
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
                s.settimeout(SEND_SECONDS)
                s.sendto(text.encode(), self._address)
                return True
        except OSError as error:        # a supervisor must not end because systemd does not read
            logger.warning("%r cannot be sent to systemd: %s", text.partition("\n")[0], error)
            return False
