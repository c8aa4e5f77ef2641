"""mkdocs hook: fills the generated parts of pages when the site is built."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from documentation import reference


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for every page."""
    return reference.fill(markdown)
