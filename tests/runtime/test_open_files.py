"""The limit of open files."""

from __future__ import annotations

import subprocess
import sys


def test_open_files():
    """A process may raise its limit as far as the system allows, and says how far that is."""
    code = ("import resource; from allspark_server.runtime.binding import raise_open_files as raised\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100))\n"
            "print(raised(80), resource.getrlimit(resource.RLIMIT_NOFILE)[0], raised(500), raised(10))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["80", "80", "100", "10"], done.stderr
