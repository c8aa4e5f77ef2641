"""Small files of the kernel's."""
from __future__ import annotations

import re
from pathlib import Path


def text(path: Path, default: str = "") -> str:
    """A file's content without blanks around it; `default` where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return default


def number(path: Path, default: int) -> int:
    """The integer that a file holds; `default` where it holds none."""
    found = text(path)
    return int(found) if re.fullmatch(r"-?\d+", found) else default
