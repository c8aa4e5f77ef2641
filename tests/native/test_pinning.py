"""Pinning of threads on machines with more processors than this one: CPUs that fixed-size masks cannot name."""

import shlex
import subprocess
import sysconfig

import pytest

from support.paths import NATIVE

PROGRAM = r"""
#include "cpu/pool.h"
#include <pthread.h>
#include <sched.h>
#include <cstdio>
// In the C library's place: tells which CPU of a mask is set.
extern "C" int pthread_setaffinity_np(pthread_t, size_t bytes, const cpu_set_t* set) noexcept {
  for (size_t cpu = 0; cpu < 8 * bytes; cpu++)
    if (CPU_ISSET_S(cpu, bytes, set)) printf("%zu of %d\n", cpu, CPU_COUNT_S(bytes, set));
  return 0;
}
int main() {
  for (int cpu : {0, 63, 64, 1023, 1024, 1919}) (new as::Pool(1, {cpu}, false))->run([](int) {});
}
"""


def test_cpus_beyond_1023_are_pinned_to(tmp_path):
    compiler = shlex.split(sysconfig.get_config_var("CXX") or "g++")
    (tmp_path / "pin.cpp").write_text(PROGRAM)
    command = [*compiler, "-std=c++17", f"-I{NATIVE}", str(tmp_path / "pin.cpp"), str(NATIVE / "cpu/pool.cpp"),
               "-pthread",
               "-o", str(tmp_path / "pin")]
    try:
        subprocess.run(command, check=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no C++ compiler")
    printed = subprocess.run([tmp_path / "pin"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert printed.splitlines() == [f"{cpu} of 1" for cpu in (0, 63, 64, 1023, 1024, 1919)]
