"""The examples in other languages (launch/examples): each is built from proto/allspark.proto and streams from a real
group, from one with TLS and a token, and says what is wrong.
"""
from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from allspark_client import ClientEngine, TlsConfig
from allspark_server.access import Access
from support.certificates import make_signed_certificate
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, wait_until
from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-token-for-generating"
PROMPT = "Once upon a time"


@dataclass
class Example:
    """A built example. `command` is what its page tells to run, from `folder`."""

    folder: Path
    command: list[str]

    def start(self, address: str, *words: str) -> subprocess.Popen:
        return subprocess.Popen([*self.command, "--address", address, *words], cwd=self.folder, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, address: str, *words: str) -> tuple[int, str, str]:
        process = self.start(address, *words)
        out, errors = process.communicate(timeout=60)
        return process.returncode, out, errors


def do(folder: Path, *words: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def need(*programs: str) -> None:
    """Skips a test where one of these programs is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()[:200]


def typescript(folder: Path) -> list[str]:
    need("node", "npm")
    fetched = subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True,
                             timeout=300)
    if fetched.returncode:
        pytest.skip(f"npm cannot fetch the packages: {last_line(fetched.stderr)}")
    do(folder, "npm", "run", "build")
    return ["node", "build/stream.js"]


def go(folder: Path) -> list[str]:
    need("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    do(folder, "go", "generate")
    if subprocess.run(["go", "mod", "tidy"], cwd=folder, capture_output=True, timeout=300).returncode == 0:
        do(folder, "go", "build")
        return ["./allspark-stream"]
    # The proxy for modules cannot be reached: Debian has gRPC for Go, in the form that was usual before modules.
    debian = Path("/usr/share/gocode")
    if not (debian / "src/google.golang.org/grpc").exists() \
            or not (debian / "src/github.com/golang/protobuf/internal/gengogrpc").exists():    # of version 1.5
        pytest.skip("go cannot fetch modules, and Debian's golang-google-grpc-dev and "
                    "golang-github-golang-protobuf-1-5-dev are not installed")
    place = folder / "gopath" / "src" / "allspark-stream"
    shutil.copytree(folder / "allspark", place / "allspark")
    shutil.copy(folder / "stream.go", place)
    done = subprocess.run(["go", "build", "-o", folder / "allspark-stream", "allspark-stream"], cwd=folder, text=True,
                          capture_output=True, timeout=500,
                          env={**os.environ, "GO111MODULE": "off", "GOPATH": f"{folder}/gopath:{debian}"})
    assert done.returncode == 0, done.stdout + done.stderr
    return ["./allspark-stream"]


def rust(folder: Path) -> list[str]:
    need("cargo", "protoc")
    fetched = subprocess.run(["cargo", "fetch"], cwd=folder, capture_output=True, text=True, timeout=300)
    if fetched.returncode:
        pytest.skip(f"cargo cannot fetch the crates: {last_line(fetched.stderr)}")
    do(folder, "cargo", "build")
    return ["target/debug/allspark-stream"]


BUILDERS: dict[str, Callable[[Path], list[str]]] = {"go": go, "rust": rust, "typescript": typescript}


@pytest.fixture(scope="module", params=["cpp", *BUILDERS])
def example(request, tmp_path_factory) -> Example:
    """A copy of each example, at its place beside a copy of proto/: building leaves nothing in the tree. For C++, the
    program that is built with the library.
    """
    if request.param == "cpp":
        library = request.getfixturevalue("built").parent / "library"
        return Example(library, ["./allspark_stream"])
    root = tmp_path_factory.mktemp(request.param)
    shutil.copytree(ROOT / "proto", root / "proto")
    place = Path("launch", "examples", request.param)
    shutil.copytree(ROOT / place, root / place, ignore=shutil.ignore_patterns("node_modules", "build", "target"))
    return Example(root / place, BUILDERS[request.param](root / place))


def test_it_streams_what_the_python_client_gets(example, group):
    with ClientEngine(group) as engine:
        with engine.generate("fable", {"text": PROMPT}, {"max_new_tokens": 40, "do_sample": False}) as answer:
            text = answer.read().text
    status, out, errors = example.run(group, "--model", "fable", "--max-new-tokens", "40", "--greedy", PROMPT)
    assert (status, out.strip()) == (0, text.strip()) and len(text) > 80
    assert errors.split()[0] == "length"


def test_it_prints_tokens_as_they_come(example):
    with serving(core=FakeEngine(interval=0.2)) as (core, address):
        process = example.start(address, "--model", "m", "--max-new-tokens", "1000", "hey")
        try:
            first = expected(list(b"hey"), 1)[0]
            assert process.stdout.read(len(f"<{first}>")) == f"<{first}>"
            assert core.live  # it was printed long before the end
        finally:
            process.kill()
            process.communicate()
        wait_until(lambda: not core.live, 5)  # its end cancels the request


def test_tls_and_tokens(example, tmp_path):
    certificate = make_signed_certificate(tmp_path)
    (tmp_path / "tokens").write_text(f"generate {TOKEN}\n")
    access = Access(token_file=str(tmp_path / "tokens"),
                    tls=TlsConfig(cert=certificate["cert"], key=certificate["key"]))
    words = ["--model", "m", "--max-new-tokens", "5", "--ca", certificate["ca"]]
    with serving("localhost:0", access=access) as (_, address):
        address = f"localhost:{address.rpartition(':')[2]}"
        status, out, errors = example.run(address, *words, "--token", TOKEN, "hey")
        assert status == 0, errors
        assert out.strip() == "".join(f"<{i}>" for i in expected(list(b"hey"), 5))
        status, out, errors = example.run(address, *words, "--token", "another", "hey")
        assert status == 1 and out.strip() == "" and "token" in errors


def test_errors_are_told(example, group):
    status, out, errors = example.run(group, "--model", "x", PROMPT)
    assert status == 1 and out == "" and "no model named 'x' is installed; installed: 'fable'" in errors
    status, out, errors = example.run(group, "--model", "fable", "--max-new-tokens", "0", PROMPT)
    assert status == 1 and out == "" and "max_new_tokens=0" in errors
