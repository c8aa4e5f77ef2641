"""Where things are in the source tree, and the import path that the generators need."""
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def import_from_source() -> None:
    """Makes the packages of this source tree importable, before any installed version of them."""
    for folder in (ROOT / "launch", ROOT):
        if str(folder) not in sys.path and (folder / "allspark_launch").is_dir() == (folder != ROOT):
            sys.path.insert(0, str(folder))
