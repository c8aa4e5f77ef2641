"""What setup.py builds and requires."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.paths import ROOT


def setup(monkeypatch, **environment) -> dict:
    """The names of setup.py in an environment."""
    for name in ("ALLSPARK_CUDA", "ALLSPARK_CUDA_CHIPS", "ALLSPARK_CLIENT_ONLY", "ALLSPARK_DISTRIBUTION",
                 "ALLSPARK_EDITABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    return runpy.run_path(str(ROOT / "setup.py"))


def set_global(names: dict, **values) -> None:
    names["sibling"].__globals__.update(values)


def test_the_client_s_files_belong_to_one_distribution(monkeypatch):
    server = setup(monkeypatch, ALLSPARK_CUDA="0")
    assert not [name for name in server["options"]()["packages"] if name.startswith("allspark_client")]
    uri = f"allspark-numa-client @ {(ROOT / 'allspark_client').as_uri()}"
    assert uri in server["requirements"]()["install_requires"]
    set_global(server, RELEASED=True)       # an unpacked source distribution
    required = server["requirements"]()
    assert f"allspark-numa-client=={server['VERSION']}" in required["install_requires"]
    assert required["extras_require"]["cuda"] == [f"allspark-numa-cuda=={server['VERSION']}"]
    client = setup(monkeypatch, ALLSPARK_CLIENT_ONLY="1")
    assert client["options"]()["packages"] == ["allspark_client", "allspark_client._proto"]
    assert not [name for name in client["requirements"]()["install_requires"] if "allspark" in name]


def test_an_editable_installation_is_the_whole_tree(monkeypatch):
    whole = setup(monkeypatch, ALLSPARK_CUDA="0", ALLSPARK_EDITABLE="1")
    assert {"allspark_client", "allspark_server", "allspark_launch"} <= set(whole["options"]()["packages"])
    required = whole["requirements"]()["install_requires"]
    assert not [name for name in required if "allspark" in name]
    assert [name for name in required if name.startswith("grpcio>")]


def test_the_cuda_backend_is_a_distribution_of_its_own(monkeypatch):
    cuda = setup(monkeypatch, ALLSPARK_DISTRIBUTION="cuda", ALLSPARK_CUDA="1")
    found = cuda["options"]()
    assert found["packages"] == ["allspark_cuda"]
    assert [ext.name for ext in found["ext_modules"]] == ["allspark_cuda._cuda"]
    assert cuda["requirements"]() == {"install_requires": [f"allspark-numa=={cuda['VERSION']}"]}
    assert len(cuda["nvcc_wheels"]()) == 5


@pytest.mark.parametrize("wanted, gpus, chips, why", [
    ("", "9.0\n9.0\n", ["9.0"], "the GPUs here"), ("native", "8.9\n9.0\n", ["8.9", "9.0"], "the GPUs here"),
    ("", "", ["9.0"], "no GPU from 8.0 on is visible here"), ("", "7.5\n", ["9.0"], "no GPU from 8.0 on"),
    ("", "[N/A]\n", ["9.0"], "no GPU"), ("8.0, 12.0", "9.0\n", ["8.0", "12.0"], "as ALLSPARK_CUDA_CHIPS says"),
    ("all", "", ["8.0", "9.0"], "and later ones")])
def test_chips_are_those_of_the_machine(monkeypatch, tmp_path, wanted, gpus, chips, why):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = setup(monkeypatch, ALLSPARK_CUDA="0", ALLSPARK_CUDA_CHIPS=wanted)["cuda_chips"]()
    assert found[0] == chips and why in found[1]


def test_urls_are_those_of_the_release_s_repository(monkeypatch, tmp_path):
    names = setup(monkeypatch, ALLSPARK_CUDA="0", GITHUB_REPOSITORY="a/b", GITHUB_SERVER_URL="https://c.example")
    assert names["project_urls"]()["Source"] == "https://c.example/a/b"
    monkeypatch.delenv("GITHUB_REPOSITORY")
    assert names["project_urls"]() == {}
    (tmp_path / "PKG-INFO").write_text("Name: x\nProject-URL: Source, https://c.example/a/b\n\nProject-URL\n")
    set_global(names, ROOT=tmp_path, RELEASED=True)
    assert names["project_urls"]() == {"Source": "https://c.example/a/b"}


@pytest.mark.parametrize("wanted", ["7.5", "sm_90", "9.0;8.0", "90"])
def test_wrong_chips_are_refused(monkeypatch, wanted):
    with pytest.raises(SystemExit, match=f"ALLSPARK_CUDA_CHIPS={wanted}: allowed are native, all, or"):
        setup(monkeypatch, ALLSPARK_CUDA_CHIPS=wanted)["cuda_chips"]()


def test_code_for_chips(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho sm_80 sm_89 sm_90\n")
    nvcc.chmod(0o755)
    gencode = setup(monkeypatch, ALLSPARK_CUDA="0")["gencode"]
    ptx = ["-gencode", "arch=compute_80,code=compute_80"]
    assert gencode(nvcc, ["8.9", "9.0"]) == ["-gencode", "arch=compute_80,code=sm_89",
                                             "-gencode", "arch=compute_90a,code=sm_90a"]
    assert gencode(nvcc, ["12.0"]) == ptx       # this compiler does not know it
    monkeypatch.setenv("ALLSPARK_CUDA_CHIPS", "all")
    assert gencode(nvcc, ["8.0"]) == ["-gencode", "arch=compute_80,code=sm_80", *ptx]


def test_nothing_is_compiled_twice(monkeypatch, tmp_path):
    """Plain, editable and in-place builds share objects; those of other flags, of other contents of what they include,
    and broken ones are not taken.
    """
    names = setup(monkeypatch, ALLSPARK_CUDA="0")
    set_global(names, ROOT=tmp_path, PROGRESS_SECONDS=-1)
    (tmp_path / "native").mkdir()
    header, other = tmp_path / "native" / "a.h", tmp_path / "native" / "b.h"
    header.write_text("")
    other.write_text("")
    source = tmp_path / "native" / "a.cpp"
    source.write_text("int f() { return 1; }\n")
    spawned, told = [], []
    set_global(names, tell=told.append)

    def compiled(*flags, fail=False):
        from setuptools import Distribution

        command = names["BuildExt"](Distribution())
        command.finalize_options()
        assert command.objects == tmp_path / "build" / "objects"

        def spawn(words):
            spawned.append(words)
            Path(words[words.index("-o") + 1]).write_text("an object")
            Path(words[words.index("-MF") + 1]).write_text(f"a.o: {source} \\\n /usr/include/stdio.h {header}\n")
            if fail:
                raise RuntimeError("the compiler has failed")

        command.spawn = spawn
        names["content_digest"].cache_clear()
        return command.compiled([(source, [sys.executable, *flags])], [])

    with pytest.raises(RuntimeError):
        compiled("-O3", fail=True)
    first = compiled("-O3")
    assert compiled("-O3") == first and len(spawned) == 2
    assert compiled("-O1") != first and len(spawned) == 3
    os.utime(header, (header.stat().st_mtime + 60,) * 2)
    other.write_text("int g();\n")
    assert compiled("-O3") == first and len(spawned) == 3
    header.write_text("int f();\n")
    assert compiled("-O3") == first and len(spawned) == 4
    assert compiled("-O3") == first and len(spawned) == 4
    header.unlink()
    assert compiled("-O3") == first and len(spawned) == 5
    assert compiled("-O3") == first and len(spawned) == 6  # what is gone never counts as current
    assert any(text.startswith("1 of 1 files are compiled") for text in told)


def test_a_build_says_what_it_left_out(monkeypatch):
    names = setup(monkeypatch, ALLSPARK_CUDA="0")
    told = []
    set_global(names, tell=told.append)
    command = SimpleNamespace(extensions=[SimpleNamespace(name=names["NATIVE"])], left_out=["amx (no)"],
                              summary={names["NATIVE"]: "the CPU library for avx2"})
    names["BuildExt"].tell_outcome(command)
    assert told == ["built the CPU library for avx2; left out: amx (no), the CUDA backend (ALLSPARK_CUDA=0)"]
