"""The host cache of a GPU in a file, with an emulated stream and random copies: on the CPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from support.paths import NATIVE
from support.seed import SEED


@pytest.mark.slow
def test_spans_come_back_from_the_file_or_the_buffer(tmp_path):
    emulated, program = Path(__file__).parent / "emulated", tmp_path / "spans"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    subprocess.run([*compiler, "-std=c++17", "-O1", "-pthread", f"-I{emulated / 'runtime'}", f"-I{NATIVE}",
                    emulated / "spans.cpp", NATIVE / "cuda/memory/host_spans.cpp", NATIVE / "batch/span_records.cpp",
                    "-o", program], check=True)
    done = subprocess.run([program, "3000", str(SEED)], capture_output=True, text=True)
    assert done.returncode == 0, f"ALLSPARK_TEST_SEED={SEED}: {done.stdout}{done.stderr}"
