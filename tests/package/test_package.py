"""Requirements of importing allspark_server, and the errors if one is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import allspark_server
from allspark_server.runtime.native import native_library


def test_importing_is_light():
    code = ("import sys, allspark_server; print(allspark_server.__version__);"
            "assert 'HuggingFaceModel' in dir(allspark_server);"
            "assert not {'torch', 'mpi4py', 'transformers', 'allspark_server._native'} & set(sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == allspark_server.__version__


def test_an_engine_needs_neither_torch_nor_mpi():
    code = ("import sys; from allspark_server import Engine, HuggingFaceModel;"
            "assert not {'torch', 'mpi4py', 'transformers'} & set(sys.modules), sys.modules")
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'allspark_server' has no attribute 'Motor'"):
        _ = allspark_server.Motor


@pytest.mark.parametrize("result, problem", [
    (ModuleNotFoundError("x"), "is not installed: .* Run `pip install .` with a C\\+\\+17 compiler"),
    (ImportError("wrong ELF class"), "cannot be loaded: wrong ELF class"),
    (RuntimeError("this CPU has none of the instruction sets"), "cannot be loaded: this CPU has none"),
    (SimpleNamespace(isas=lambda: []), "this CPU has none of the instruction sets"),
])
def test_native_library_that_cannot_be_had(monkeypatch, result, problem):
    def import_module(name):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(importlib, "import_module", import_module)
    native_library.cache_clear()
    with pytest.raises(ImportError, match=problem):
        native_library()


def test_every_family_is_registered():
    from allspark_server import models
    from allspark_server.models.registry import ARCHITECTURES, FAMILIES

    names = [path.stem for path in Path(models.__path__[0]).glob("*.py")]
    modules = [importlib.import_module(f"{models.__name__}.{name}") for name in names]
    declared = {m.__name__ for m in modules if getattr(m, "ARCHITECTURES", ARCHITECTURES) is not ARCHITECTURES}
    assert declared == {family.__name__ for family in FAMILIES}
    assert len(ARCHITECTURES) == sum(len(family.ARCHITECTURES) for family in FAMILIES)  # no name twice
