"""Reads small files of the kernel."""
from __future__ import annotations

import re
from pathlib import Path


def text(path: Path, default: str = "") -> str:
    """A file's content without surrounding blanks; `default` if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return default


def number(path: Path, default: int) -> int:
    """The integer in a file; `default` if there is none."""
    content = text(path)
    return int(content) if re.fullmatch(r"-?\d+", content) else default
