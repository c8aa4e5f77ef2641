"""A pool in a virtual machine with systemd as init and two NUMA nodes (tests/support/vm/prove.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import SUPPORT

PROVE = SUPPORT / "vm" / "prove.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]


@pytest.fixture(scope="module")
def image() -> Path:
    """The machine's image for the present sources, in $ALLSPARK_VM. Setting the variable permits using the whole
    machine.
    """
    folder = os.environ.get("ALLSPARK_VM")
    if not folder:
        pytest.skip("set ALLSPARK_VM to a folder for the machine's image; the run takes 20 minutes and all cores")
    for tool in ("mmdebstrap", "qemu-system-x86_64", "mke2fs", "openssl"):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}")
    subprocess.run([sys.executable, str(PROVE), "build", folder], check=True)
    return Path(folder)


@pytest.mark.parametrize("part", ["group", "pool", "hosts"])
@pytest.mark.parametrize("user", ["nobody", "root"])
def test_a_pool_under_systemd(image, user, part):
    done = subprocess.run([sys.executable, str(PROVE), "run", str(image), user, part], check=False)
    assert done.returncode == 0, (image / f"{user}-{part}.log").read_text()[-4000:]
