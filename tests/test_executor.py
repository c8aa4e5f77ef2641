"""The executor: what it must refuse and leave as it was, and what one thread's failure does to the others."""
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from allspark_server import _native

ROOT = Path(__file__).resolve().parents[1]


def test_a_thread_that_fails_before_an_inner_barrier_takes_the_others_along(tmp_path):
    program = tmp_path / "pool_failures"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    sanitize = [f"-fsanitize={names}" for names in [os.environ.get("ALLSPARK_SANITIZE")] if names]
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([*compiler, "-std=c++17", "-O1", "-pthread", *sanitize, f"-I{ROOT / 'native'}", ROOT / "tests" / "pool_failures.cpp",
                    ROOT / "native" / "pool.cpp", "-o", program], check=True, env=clean)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
