"""Fixtures of the launcher's tests."""
from __future__ import annotations

import os

import pytest

SYSTEMCTL = """#!/bin/sh
echo "$@" >>$(dirname $0)/calls
[ "$1" = is-active ] && echo active
exit 0
"""


@pytest.fixture()
def systemctl(tmp_path, monkeypatch):
    """A fake systemctl; the fixture returns the calls since the last query."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "systemctl").write_text(SYSTEMCTL)
    (folder / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def calls() -> list[str]:
        file = folder / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return found

    return calls
