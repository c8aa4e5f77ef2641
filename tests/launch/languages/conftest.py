"""Groups with the model that ships with the package, for clients in other languages."""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from allspark_launch.group.background import background_group, shipped_model
from support.paths import NATIVE


@pytest.fixture(scope="session")
def group():
    """The address of a group that serves the model "fable"."""
    with background_group(["--ranks", "1", "--model", str(shipped_model())], timeout=60) as found:
        yield found.addresses[0]


def run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with the test programs of the C++ client, which is built, installed, and found by CMake as a package.
    Its example is in ../library.
    """
    missing = [name for name in ("cmake", "protoc", "grpc_cpp_plugin") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: cmake libgrpc++-dev protobuf-compiler-grpc)")
    folder = tmp_path_factory.mktemp("cpp")
    strict = "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"
    run("cmake", "-S", NATIVE / "client", "-B", folder / "library", strict)
    run("cmake", "--build", folder / "library", "-j2")
    run("cmake", "--install", folder / "library", "--prefix", folder / "prefix")
    run("cmake", "-S", Path(__file__).parent / "cpp", "-B", folder / "programs",
        f"-DCMAKE_PREFIX_PATH={folder}/prefix", strict)
    run("cmake", "--build", folder / "programs", "-j2")
    return folder / "programs"
