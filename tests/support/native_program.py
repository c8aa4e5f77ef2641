"""Programs of tests that hold parts of the C++ core, compiled by themselves."""

from __future__ import annotations

import concurrent.futures
import os
import runpy
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.paths import NATIVE, ROOT


class NoSanitizers(Exception):
    """The compiler has no sanitizers."""


def native_program(folder: Path, main: Path, sources: Sequence[str], flags: Sequence[str] = (),
                   sanitize: bool = True) -> Path:
    """Compiles `main` and those `sources` of native/ (without suffix); returns the program, in `folder`.

    With `sanitize`, with the address and undefined-behaviour sanitizers; NoSanitizers if the compiler has none.
    """
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["COMMON"], f"-I{NATIVE}", "-pthread", *flags]
    if sanitize:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ALLSPARK_SANITIZE", "address,undefined")
            flags += setup["sanitizers"]()
        (folder / "empty.cpp").write_text("int main() {}\n")
        if subprocess.run([*compiler, *flags, "empty.cpp", "-o", "empty"], cwd=folder, capture_output=True).returncode:
            raise NoSanitizers(f"the compiler {shlex.join(compiler)} has no sanitizers")

    def compiled(source: Path) -> str:
        name = f"{source.stem}.o"
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", name], cwd=folder, check=True)
        return name

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [main, *(NATIVE / f"{name}.cpp" for name in sources)]))
    subprocess.run([*compiler, *flags, *objects, "-o", main.stem], cwd=folder, check=True)
    return folder / main.stem
