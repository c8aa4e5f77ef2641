"""Fixtures of the launcher's tests."""
from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from support import fake_systemd


@pytest.fixture()
def systemd(tmp_path, monkeypatch):
    """A fake systemd for pools that are installed in tmp_path / "c"."""
    run_dir = Path(tempfile.mkdtemp(dir="/tmp"))    # the path of a socket is limited to 107 bytes
    systemd = fake_systemd.FakeSystemd(tmp_path / "c", run_dir)
    fake_systemd.install(monkeypatch, systemd, run_dir)
    yield systemd
    systemd.close()
    shutil.rmtree(run_dir)


@pytest.fixture()
def systemctl(systemd):
    """Returns the calls of systemctl since the last query."""
    def calls() -> list[str]:
        found, systemd.calls = systemd.calls, []
        return found

    return calls
