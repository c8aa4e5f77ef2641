"""The sampling kernels on the CPU, through an emulation of CTAs, against the host's sampler."""

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
@pytest.mark.timeout(600)
def test_bits_of_the_hosts_sampler(tmp_path):
    sources = [NATIVE / "cuda/step/sample_list.cpp", NATIVE / "sampling/sampler.cpp",
               NATIVE / "sampling/sampler_shard.cpp"]
    emulated = Path(__file__).parent / "emulated"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    program = tmp_path / "samples"
    subprocess.run([*compiler, "-std=c++17", "-O2", "-ffp-contract=off", f"-I{emulated}", f"-I{NATIVE}",
                    emulated / "samples.cpp", *sources, "-o", program], check=True)
    done = subprocess.run([program, "60", str(SEED)], capture_output=True, text=True)
    assert done.returncode == 0, f"ALLSPARK_TEST_SEED={SEED}: {done.stdout}{done.stderr}"
