"""C++ programs of tests/native, for what cannot be made to happen from Python."""
from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

from support.paths import NATIVE, TESTS


def run_program(folder: Path, name: str, *sources: str, words: tuple[str, ...] = ()) -> None:
    """Compiles tests/native/`name`.cpp with these files of native/, and runs it; it must succeed."""
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    sanitize = [f"-fsanitize={names}" for names in [os.environ.get("ALLSPARK_SANITIZE")] if names]
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    files = [TESTS / "native" / f"{name}.cpp", *(NATIVE / source for source in sources)]
    subprocess.run([*compiler, "-std=c++17", "-O1", "-pthread", *sanitize, f"-I{NATIVE}", *files, "-o", folder / name],
                   check=True, env=clean)
    done = subprocess.run([folder / name, *words], capture_output=True, text=True, timeout=60, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
