"""Ctrl-C in the first moments of a command."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED = """
import sys
module = sys.argv[1]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from allspark_launch.__main__ import main
sys.argv[1:] = ["topology"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["allspark_launch.cli", "allspark_launch.commands"])
def test_an_interrupted_import_is_quiet(module):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
