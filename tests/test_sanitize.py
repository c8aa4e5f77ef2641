"""A short selection of the native library's tests under AddressSanitizer and UndefinedBehaviorSanitizer (tests/sanitize runs more)."""
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SELECTED = ["test_executor.py", "test_window.py", "test_kernels.py", "test_cache_quant.py"]
# Minutes, and of native code nothing that the others leave out.
LEFT_OUT = "not lower and not two_ranks and not ranks_agree and not largest and not against_float64"


@pytest.mark.timeout(900)
@pytest.mark.skipif("ALLSPARK_SANITIZE" in os.environ, reason="this is such a run")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the selection is of x86-64's instruction sets")
def test_a_selection_of_the_native_tests_passes_in_the_sanitizers():
    environment = {**os.environ, "ALLSPARK_ISAS": "avx2,amx", "ALLSPARK_ISA": ""}
    done = subprocess.run([sys.executable, TESTS / "sanitize", "address", *(TESTS / name for name in SELECTED), "-k", LEFT_OUT],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
