"""The instruction sets of this machine except the best one. By default only the lowest of them is tested."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from allspark_server import _native

LOWER = [pytest.param(isa, marks=() if isa == _native.isas()[-1] else pytest.mark.slow) for isa in _native.isas()[1:]]


def run_again(file: str, isa: str, *arguments: str) -> None:
    """Runs a test file again in a process that uses this instruction set; its tests must pass."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, *arguments],
                          env={**os.environ, "ALLSPARK_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
