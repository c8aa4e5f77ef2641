"""The kernels' own tests for every Arm level, cross-built and run under qemu (tests/support/arm/run)."""
import platform
import runpy
import subprocess
import sys

import pytest

from support.paths import ROOT, SUPPORT

RUN = SUPPORT / "arm" / "run"
LEVELS = list(runpy.run_path(str(ROOT / "setup.py"))["ISAS"]["aarch64"])


@pytest.mark.arm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(platform.machine() == "aarch64", reason="this is an Arm machine: the usual tests are those")
@pytest.mark.parametrize("level", LEVELS)
def test_level_passes_the_tests_of_the_kernels(level):
    done = subprocess.run([sys.executable, RUN, level], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stdout.strip()[-200:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
