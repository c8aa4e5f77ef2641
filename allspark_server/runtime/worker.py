"""The loop of a rank other than 0, which executes the commands that rank 0 publishes in shared memory, and the
heartbeat that every rank sends to the supervisor.
"""
from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from .rank_models import Command, RankModels, StepError, unpack_step

logger = logging.getLogger(__name__)

EXIT_FAILED = 3             # the group has failed; a supervisor restarts it
EXIT_SUPERVISOR_LOST = 4
HEARTBEAT_SECONDS = 1.0
PROGRESS_SECONDS = 0.1      # between two reports of a load's progress
FAILURE_SECONDS = 2.0       # that the report of a failure may wait for room in the supervisor's queue
MAX_ERROR = 8000            # characters of an error: the most that fit into a datagram in any encoding
WAIT_SECONDS = 5.0          # the longest wait before Python handles signals; waiting uses no CPU
STEP_SECONDS = 0.005        # the longest wait until a queued step that has ended is noticed


def serve(models: RankModels) -> None:
    """Execute rank 0's commands until it closes the group.

    Raises RuntimeError if the group was aborted or a step failed on this rank, which aborts the group.
    """
    shared_memory = models.shared_memory

    def checked(work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except StepError as error:
            if isinstance(error.__cause__, ValueError):     # rank 0 rejects the same plan and reports it
                logger.error("rank %d: %s", models.rank, error)
                return
            shared_memory.abort(f"rank {models.rank}: {error.__cause__}")
            raise RuntimeError(f"rank {models.rank}: {error}") from error

    while True:
        command = shared_memory.wait_command(STEP_SECONDS if models.computes else WAIT_SECONDS)
        if command is None:
            checked(models.collect_steps, False)
            continue
        kind, payload = command
        if kind != Command.STEP:
            checked(models.collect_steps, True)
        if kind == Command.STEP:
            checked(models.step, *unpack_step(payload))
        elif kind == Command.CALL:
            method, arguments = json.loads(payload)
            getattr(models, method)(**arguments)
        elif kind == Command.POLL:
            shared_memory.gather(models.answer().encode())
        elif kind == Command.PROFILE:
            shared_memory.gather(models.profile_of_experts(payload.decode()))
        elif kind == Command.CLOSE:
            models.close()
            return
        else:
            raise RuntimeError(f"rank {models.rank}: unknown command {kind}")


class Heartbeat:
    """A thread that sends the supervisor a datagram each second. It ends the process if the supervisor is gone or the
    group was aborted. Datagrams are lost while the supervisor's queue is full, which holds only ten on some systems; so
    whatever must arrive stands in all that follow, and the last one of a rank that has failed waits for room.

    path: the supervisor's Unix datagram socket. Every message is a JSON object {"rank", "pid", "state", …}.
    """

    def __init__(self, path: str, rank: int):
        self._rank, self._state = rank, "starting"
        self._reported = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._models: RankModels | None = None
        self._busy_since: Callable[[], float] = lambda: 0.0
        self._details: Callable[[], dict] = dict
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first message and start the thread."""
        self.send()
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Needed for a clean end, before the shared memory is unmapped."""
        self._stop.set()
        self._thread.join()

    def watch(self, models: RankModels, busy_since: Callable[[], float] | None = None) -> None:
        """From now on also report the models' loads, how long the main thread has been busy, whether it has computed a
        step, and the models' figures. End the process if their shared memory says that the group was aborted.

        busy_since(): when the main thread began its current work, on the monotonic clock; 0.0 while it waits. By
        default, only steps count as work.
        """
        self._busy_since = busy_since or (lambda: models.step_began)
        self._models = models
        models.progress = self.progress
        models.on_served = self.send

    def add_details(self, details: Callable[[], dict]) -> None:
        """From now on, add what `details()` returns to all messages."""
        self._details = details

    def state(self, state: str, **details: Any) -> None:
        """Report this rank's state at once: "starting", "ready", "stopping" or "failed".

        A failure has error=…, and fatal=True if a restart would not help.
        """
        self._state = state
        self.send(**details)

    def progress(self, name: str, part: float, what: str) -> None:
        """Report the part of model `name` that is loaded or warmed up, 0…1. what: which of them. At most one call in
        PROGRESS_SECONDS sends a message.
        """
        now = time.monotonic()
        if part >= 1.0 or now - self._reported > PROGRESS_SECONDS:
            self._reported = now
            self.send(loading=name, part=part, what=what)

    def send(self, **details: Any) -> None:
        """Send a message now, with these additional fields. Ends the process if the supervisor is gone."""
        began = self._busy_since()
        if began:
            details["step_seconds"] = time.monotonic() - began
        if self._models is not None and self._models.served:
            details["served"] = True
        if "error" in details:
            details["error"] = details["error"][:MAX_ERROR]
        if self._models is not None:
            details["numbers"] = self._models.numbers
        message = {"rank": self._rank, "pid": os.getpid(), "state": self._state, **self._details(), **details}
        if "error" in details:
            self._socket.settimeout(FAILURE_SECONDS)
        try:
            self._socket.send(json.dumps(message).encode())
        except (BlockingIOError, TimeoutError):
            logger.debug("the supervisor is slow to read heartbeats")
        except OSError as error:
            logger.error("the supervisor is gone (%s): rank %d ends", error, self._rank)
            os._exit(EXIT_SUPERVISOR_LOST)

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            shared_memory = self._models.shared_memory if self._models else None
            message = shared_memory.aborted() if shared_memory is not None else None
            if message:
                time.sleep(HEARTBEAT_SECONDS)       # the thread that noticed first reports more details
                logger.error("the group was aborted: %s", message)
                self.send(error=message)
                os._exit(EXIT_FAILED)
            self.send()
