"""The draft head's bookkeeping against a model of it, under AddressSanitizer and UndefinedBehaviorSanitizer.

draft_layers.cpp runs random steps of random sequences: prompts in chunks, drafts of the head, of others, and none,
tokens from elsewhere, and sequences that end. Instead of networks it has hashes of all that a row depends on, so each
draft is compared with one that is made anew from its sequence's tokens.
"""

from __future__ import annotations

import concurrent.futures
import os
import runpy
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from support.paths import NATIVE, ROOT

SOURCES = ["batch/draft_head", "batch/draft_model", "batch/drafter", "batch/lookup", "batch/plan", "batch/slots",
           "sampling/sampler", "sampling/sampler_shard"]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """draft_layers.cpp, compiled; with sanitizers if the compiler has them."""
    folder = tmp_path_factory.mktemp("layers")
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLSPARK_SANITIZE", "address,undefined")
        flags = [*setup["COMMON"], f"-I{NATIVE}", "-pthread", "-O1"]
        sanitized = [*flags, *setup["sanitizers"]()]
    (folder / "empty.cpp").write_text("int main() {}\n")
    tried = subprocess.run([*compiler, *sanitized, "empty.cpp", "-o", "empty"], cwd=folder, capture_output=True)
    flags = flags if tried.returncode else sanitized

    def compiled(source: Path) -> str:
        name = f"{source.stem}.o"
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", name], cwd=folder, check=True)
        return name

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [Path(__file__).with_name("draft_layers.cpp"),
                                           *(NATIVE / f"{name}.cpp" for name in SOURCES)]))
    subprocess.run([*compiler, *flags, *objects, "-o", "draft_layers"], cwd=folder, check=True)
    return folder / "draft_layers"


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_drafts_are_those_of_the_sequence_alone(program, layers):
    for seed in range(3):
        done = subprocess.run([program, str(seed), str(layers), "1000"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        drafts, right = map(int, done.stdout.split())
        assert drafts > 2000 and right > 500
