"""The native library under AddressSanitizer and UndefinedBehaviorSanitizer.

Code that takes bytes from outside of the process (the decoder of plans and the shared memory between ranks) is tested
in a program that compiles in seconds. Marked slow, because it takes minutes to compile: a selection of the native
library's tests with AVX2 alone. It covers the kernels but for GEMM of every size, the quantized cache, shared memory,
the executor's refusals, and the end of a step when a thread fails.

`tests/sanitize address` covers every instruction set, quantized weights, fusion, the sampler and whole models;
`tests/sanitize thread` looks for races in the same tests.
"""
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from fuzz.plans import Plans
from support.native_program import NoSanitizers, native_program
from support.paths import TESTS

SELECTED = ["native/test_executor.py", "native/test_window.py", "native/test_kernels.py", "native/test_cache_quant.py"]
# What takes minutes, or servers.
LEFT_OUT = ["lower", "ranks_agree", "shipped_model", "same_request", "largest", "matmul_against_float64"]
NO_RUNTIME = 77  # tests/sanitize's exit status where the compiler has no sanitizers
SOURCES = ["batch/decoder", "batch/draft_head", "batch/draft_model", "batch/drafter", "batch/lookup", "batch/plan",
           "batch/slots", "comm/hosts", "comm/link", "comm/shared_memory", "sampling/sampler", "sampling/sampler_shard"]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """sanitized.cpp, compiled."""
    if "ALLSPARK_SANITIZE" in os.environ:
        pytest.skip("this is such a run")
    try:
        return native_program(tmp_path_factory.mktemp("sanitized"), Path(__file__).with_name("sanitized.cpp"), SOURCES)
    except NoSanitizers as error:
        pytest.skip(str(error))


class Decoder:
    """The program's decoder, as a runner."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def step(self, plan: bytes, logits: bool) -> SimpleNamespace:
        self._process.stdin.write(struct.pack("<I", len(plan)) + plan)
        self._process.stdin.flush()
        count = self._read(1)[0]
        if count < 0:
            raise ValueError("refused")
        counts = self._read(count)
        return SimpleNamespace(counts=SimpleNamespace(tolist=lambda: counts), status=[0] * sum(counts))

    def _read(self, count: int) -> list[int]:
        data = self._process.stdout.read(4 * count)
        assert len(data) == 4 * count, self._process.stderr.read().decode()[-4000:]
        return list(struct.unpack(f"<{count}i", data))


def test_plans_are_decoded(program, tmp_path):
    """Those that a scheduler could send are taken, and changed ones refused or taken, without a report."""
    accepted, rng, most = 0, Random(2026), 4000
    target = Plans(tmp_path / "target")
    with subprocess.Popen([program, "plans"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        target.runner, target.slots, target.ended = Decoder(process), {}, set()
        for _ in range(most):
            accepted += target.one(rng)
        process.stdin.close()
        assert process.wait(20) == 0, process.stderr.read().decode()[-4000:]
    assert most * 0.2 < accepted < most * 0.9


def test_windows_of_ranks(program):
    done = subprocess.run([program, "shared_memory"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("ALLSPARK_SANITIZE" in os.environ, reason="this is such a run")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the selection is of x86-64's instruction sets")
def test_a_selection_of_the_native_tests_passes_in_the_sanitizers():
    environment = {**os.environ, "ALLSPARK_ISAS": "avx2", "ALLSPARK_ISA": ""}
    chosen = " and ".join(f"not {test}" for test in LEFT_OUT)
    words = [sys.executable, TESTS / "sanitize", "address", *(TESTS / name for name in SELECTED), "-k", chosen]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode == NO_RUNTIME:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
