"""What rank 0 knows of the other ranks: the supervisor hears all heartbeats, and leaves a file of what they said."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

NAME = "group.json"
_LOOK_SECONDS = 1.0


class GroupReport:
    """The file beside the supervisor's socket, read at most once a second. Without a supervisor nothing is known."""

    def __init__(self) -> None:
        supervisor = os.environ.get("ALLSPARK_SUPERVISOR")
        self._path = Path(supervisor).with_name(NAME) if supervisor else None
        self._read, self._known = 0.0, {}

    def read(self) -> dict[str, Any]:
        """{"restarts": …, "ranks": [{"node", "bytes_on_node", "misplaced_bytes", "steps", "step_seconds",
        "exchange_seconds", "wait_seconds", "gpu": {"index", "free", "total"}}, …]}; keys that are not known are
        missing.
        """
        now = time.monotonic()
        if self._path is not None and now - self._read > _LOOK_SECONDS:
            self._read = now
            try:
                self._known = json.loads(self._path.read_text())
            except (OSError, ValueError):
                self._known = {}
        return self._known
