"""A pool under a real systemd, in namespaces of this machine (tests/support/systemd)."""
from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, SUPPORT

FOLDER = SUPPORT / "systemd"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def boot(out: Path, script: str) -> str:
    """Runs a script under systemd; returns what it prints."""
    (out / "proof.sh").write_text(script)
    done = subprocess.run([FOLDER / "boot.sh", out], capture_output=True, text=True, check=False, timeout=1400)
    log = out / "log"
    return log.read_text() if log.exists() else done.stdout + done.stderr


def test_a_pool_from_installation_to_removal(tmp_path):
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "systemctl", "findmnt", "useradd"))):
        pytest.skip("needs root, systemd, unshare and useradd")
    if "it runs" not in (said := boot(tmp_path, "echo it runs\n")):
        pytest.skip(f"systemd does not run in namespaces here: {said[-500:]}")
    (tmp_path / "log").unlink()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'launch'}", "ALLSPARK_CUDA": "0"}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    said = boot(tmp_path, f"{exports}exec {shlex.quote(sys.executable)} {FOLDER / 'proof.py'}\n")
    print(said)
    assert said.rstrip().endswith("PROVEN"), said[-4000:]
