"""A short selection of the native library's tests under AddressSanitizer and UndefinedBehaviorSanitizer.

Covers, with AVX2 alone (each further instruction set is a minute of compiling): the kernels but for the
products of every size, the quantized cache, the window between ranks, what the executor refuses, and how a failing thread ends a step.
`tests/sanitize address` covers every instruction set, quantized weights, fusion, the sampler and whole models; `tests/sanitize thread`
looks for races in the same.
"""
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SELECTED = ["test_executor.py", "test_window.py", "test_kernels.py", "test_cache_quant.py"]
LEFT_OUT = ["lower", "ranks_agree", "shipped_model", "same_request", "largest", "matmul_against_float64"]  # minutes, or servers
NO_RUNTIME = 77  # tests/sanitize's exit status where the compiler has no sanitizers


@pytest.mark.timeout(900)
@pytest.mark.skipif("ALLSPARK_SANITIZE" in os.environ, reason="this is such a run")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the selection is of x86-64's instruction sets")
def test_a_selection_of_the_native_tests_passes_in_the_sanitizers():
    environment = {**os.environ, "ALLSPARK_ISAS": "avx2", "ALLSPARK_ISA": ""}
    chosen = " and ".join(f"not {test}" for test in LEFT_OUT)
    done = subprocess.run([sys.executable, TESTS / "sanitize", "address", *(TESTS / name for name in SELECTED), "-k", chosen],
                          env=environment, capture_output=True, text=True)
    if done.returncode == NO_RUNTIME:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
