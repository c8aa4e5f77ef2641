"""How spans are read from the host cache's file while others are copied to the GPU; see fill_and_send.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.native_program import NoSanitizers, native_program


def test_items_are_filled_while_others_are_sent(tmp_path):
    main = Path(__file__).with_name("fill_and_send.cpp")
    try:
        program = native_program(tmp_path, main, [], ["-O1"])
    except NoSanitizers:
        program = native_program(tmp_path, main, [], ["-O1"], sanitize=False)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
