"""The exact kernels of experts on the CPU, through an emulation of CTAs, against tests/reference/exact.py: all formats,
in the panels of all instruction sets.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from support.exact_cases import write
from support.exact_matrices import CASES, adversarial, chosen_experts, matrix
from support.paths import NATIVE
from support.seed import SEED

GATES = ("silu_mul", "gelu_tanh_mul", "clamped_silu_mul", "none")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bits_of_the_recipe(tmp_path):
    rng, cases = np.random.default_rng(SEED), tmp_path / "cases"
    with cases.open("wb") as file:
        for i, case in enumerate(CASES):
            # Panels of AVX2, AVX-512 and Arm; entries that fill no tile, one and two.
            for n, k, panel, rows, experts, top in ((26, 321, 24, 3, 2, 1), (70, 1031, 32, 9, 2, 2),
                                                    (130, 72, 16, 66, 1, 1)):
                own, gate = matrix(case, n, k, experts=experts), GATES[(i + n) % 4]
                x = rng.normal(size=(rows, k)).astype(np.float32)
                write(file, f"{case}, {n} x {k}", own, x, chosen_experts(rng, rows, experts, top), panel, gate=gate,
                      bias=rng.normal(size=(experts, n)).astype(np.float32) if n != 70 else None,
                      alpha=1.702, limit=7, gathers=n != 70)
            x = adversarial(40)
            write(file, f"{case}, adversarial", matrix(case, 9, 40), x, np.zeros((len(x), 1), np.int32), 24)
        for powers in ((-127, -120), (120, 128)):
            x = adversarial(64)
            write(file, f"scales of {powers}", matrix("MXFP4", 30, 64, powers=powers), x,
                  np.zeros((len(x), 1), np.int32), 32)
    emulated = Path(__file__).parent / "emulated"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    program = tmp_path / "exact"
    subprocess.run([*compiler, "-std=c++17", "-O1", "-ffp-contract=off", f"-I{emulated}", f"-I{NATIVE}",
                    f"-I{emulated.parents[1]}", emulated / "exact.cpp", "-o", program], check=True)
    done = subprocess.run([program, cases], capture_output=True, text=True)
    assert done.returncode == 0, f"ALLSPARK_TEST_SEED={SEED}: {done.stdout[-3000:]}{done.stderr[-1000:]}"
