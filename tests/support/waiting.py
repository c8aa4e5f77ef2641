"""Waits for other processes, and writes files that they wait for."""

import os
import time
from pathlib import Path


def wait_for(condition, seconds: float = 30.0):
    """Returns the first true value of `condition()`; raises AssertionError if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that another process waits for. The file appears atomically, with its whole text."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)
