"""The state of all ranks for rank 0, read from the file in which the supervisor collects heartbeats."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

NAME = "group.json"
_READ_SECONDS = 1.0


class GroupReport:
    """The file beside the supervisor's socket, read at most once a second; empty without a supervisor."""

    def __init__(self) -> None:
        supervisor = os.environ.get("ALLSPARK_SUPERVISOR")
        self._path = Path(supervisor).with_name(NAME) if supervisor else None
        self._read = 0.0
        self._known: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """{"restarts": …, "ranks": [{"node", "bytes_on_node", "misplaced_bytes", "steps", "step_seconds",
        "exchange_seconds", "wait_seconds", "gpu": {"index", "free", "total"}, "expert_messages", "expert_rows",
        "expert_hits", "expert_uses", "expert_streamed_rows"}, …]}, without unknown keys.
        """
        now = time.monotonic()
        if self._path is not None and now - self._read > _READ_SECONDS:
            self._read = now
            try:
                self._known = json.loads(self._path.read_text())
            except (OSError, ValueError):
                self._known = {}
        return self._known
