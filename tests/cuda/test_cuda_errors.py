"""Errors after which a process can no longer use its GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cuda

LOSES = """
import pytest
from allspark_server import _cuda, _native
from allspark_server.runtime.native import DeviceLost
lost, other = (_cuda.Executor(0, _native.HostSampler(1)) for _ in range(2))
with pytest.raises(DeviceLost, match="gemm_stream_k waited half a minute for a CTA .* must be started anew"):
    lost.stall()
for call in (other.stall, lambda: _cuda.memory_info(0), lambda: _cuda.Executor(0, _native.HostSampler(1))):
    with pytest.raises(DeviceLost, match="must be started anew"):
        call()
del lost, other
print("reported")
"""


def test_a_wait_of_a_kernel_is_bounded_and_named():
    """By the report that the kernel leaves in host memory; the process ends in order."""
    done = subprocess.run([sys.executable, "-c", LOSES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "reported" in done.stdout, done.stderr
