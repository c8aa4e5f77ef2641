"""The source distribution builds both wheels in a clean environment; the wheels are complete; and the client runs with
the oldest versions that it allows.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(*line, **options) -> str:
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The source distribution of this tree, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def wheel_of(tree: Path, folder: Path, **environment: str) -> Path:
    """Builds a wheel in an environment that has only what pyproject.toml names."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, tree,
        env={**os.environ, **environment}, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the oldest NumPy is none of this Python's")
def test_the_server_runs_with_the_oldest_versions_that_it_asks_for(tmp_path):
    """Its Python files and this tree's native library, in an environment with the lowest versions of its ranges."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    required = [line for line in setup["requirements"]()["install_requires"] if "allspark" not in line]
    setup["sibling"].__globals__["BUILT"] = "client"
    required += setup["requirements"]()["install_requires"]
    oldest = [f"{name}=={version}.*" for name, version in re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(required), re.M)
              if name != "tomli"]
    assert len(oldest) > 15
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    tests = ["tests/engine/test_engine.py", "tests/guided/test_guided.py", "tests/http/test_http_timeouts.py",
             "tests/rpc/test_service.py", "tests/tokenizer/test_text.py"]
    run(python, "-m", "pip", "install", "-q", "--only-binary", ":all:", *oldest, "pytest", "pytest-timeout", "httpx",
        "jsonschema", "hypothesis")
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}"})


def test_removing_the_server_leaves_the_client(unpacked, tmp_path):
    """A clone has no index with the client: its server takes the tree's client. No file belongs to both."""
    (unpacked / "PKG-INFO").rename(tmp_path / "PKG-INFO")       # as in a clone
    try:
        venv.create(tmp_path / "venv", with_pip=True)
        python = tmp_path / "venv" / "bin" / "python"
        settings = {**os.environ, "ALLSPARK_CUDA": "0", "ALLSPARK_ISAS": "avx2" if os.uname().machine == "x86_64"
                    else "neon"}
        done = subprocess.run([python, "-m", "pip", "install", unpacked], env=settings, cwd=tmp_path, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    finally:
        (tmp_path / "PKG-INFO").rename(unpacked / "PKG-INFO")
    assert done.returncode == 0, done.stdout[-4000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("allspark: ")]
    assert re.match(r"allspark: built the CPU library for \w+; left out: the CUDA backend \(ALLSPARK_CUDA=0\)",
                    told[-1])
    assert len(told) > 1, "no progress"
    inside = tmp_path / "inside"
    inside.mkdir()
    run(python, "-m", "pip", "check", cwd=inside)
    assert run(python.with_name("allspark"), "run", "--max-new-tokens", "2", "Hello", cwd=inside)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "allspark-numa", cwd=inside)
    run(python, "-c", "import allspark_client._proto.allspark_pb2", cwd=inside)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return archive.read(found).decode()


def test_the_client_s_wheel_runs_with_the_oldest_versions_that_it_asks_for(unpacked, tmp_path):
    wheel = wheel_of(unpacked, tmp_path, ALLSPARK_CLIENT_ONLY="1")
    names = names_in(wheel)
    assert {"allspark_client/_proto/allspark_pb2.py", "allspark_client/py.typed"} <= names
    assert not any(name.startswith(("allspark_server", "allspark_launch")) for name in names)
    assert wheel.name.startswith("allspark_numa_client-")
    assert not any(name.endswith("/setup.py") for name in names)
    metadata = metadata_of(wheel)
    oldest = [f"{name}=={version}.*" for name, version in re.findall(r"^Requires-Dist: ([\w-]+)>=([\d.]+)$", metadata,
                                                                     re.M)]
    assert len(oldest) == 3, metadata
    if sys.version_info >= (3, 12):
        pytest.skip("the oldest NumPy is none of this Python's")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, *oldest)
    run(python, "-W", "error", "-c", """
import allspark_client as a
from allspark_client import convert
config = a.GenerateConfig(top_k=3, logit_bias={1: 2.0}, stop_words_ids=[[1, 2]])
message = convert.generate_config_to_pb(config)
assert convert.generate_config_from_pb(type(message).FromString(message.SerializeToString())) == config
try:
    a.ClientEngine("127.0.0.1:9", reconnect_timeout=0)
except a.AllSparkError as error:
    assert "127.0.0.1:9" in str(error), error
""")


def test_the_server_s_wheel_has_every_instruction_set(unpacked, tmp_path):
    wheel = wheel_of(unpacked, tmp_path)
    names = names_in(wheel)
    assert {"allspark_server/py.typed", "allspark_launch/systemd/pool.toml"} <= names
    assert not any(name.startswith("allspark_client") for name in names)
    assert "Requires-Dist: allspark-numa-client==" in metadata_of(wheel)
    assert any(name.endswith("/LICENSE") for name in names)
    assert any(name.startswith("allspark_server/assets/") and name.endswith(".safetensors") for name in names)
    with zipfile.ZipFile(wheel) as archive:
        (library,) = (archive.read(name) for name in names if re.match(r"allspark_server/_native.*\.so$", name))
    isas = runpy.run_path(str(ROOT / "setup.py"))["ISAS"][os.uname().machine]
    missing = [name for name in isas
               if f"N2as{len(name)}{name}".encode() not in library and name.encode() not in library]
    assert missing == []
