"""Fixtures that several folders of tests share: a checkpoint with a tokenizer, and the engines that a suite runs
against.

Each is made on first use and lives for the whole session, because a server group takes seconds to start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Some tests fork while gRPC has threads, for example to become another user. gRPC's fork handlers cannot cope with
# that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc is first imported

# Servers choose the instruction set that this process has, however busy the machine is.
os.environ.setdefault("ALLSPARK_CPU_COSTS", "off")

from allspark_client import AbstractEngine
from allspark_server.engine import threads
from support import seed  # noqa: F401  before processes of pytest-xdist start, which inherit it
from support.tiny_tokenizer import add_tokenizer

threads.enabled = True  # before the modules that check their threads are imported

# nohup and shells that run something in the background have signals ignored, which whatever tests start would inherit;
# a handler ends with exec.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

ENGINES = ("engine", "client-1", "client-2", "async-1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 checkpoint (in mixed groups, a Qwen3-MoE's) with awkward sizes and a tokenizer."""
    from support.checkpoints import checkpoint
    from support.gemma4 import VOCAB
    from support.units import EXPERT_RANKS

    directory = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(checkpoint("qwen3-moe" if EXPERT_RANKS else "qwen2-gqa-tied"), directory)
    add_tokenizer(directory, VOCAB)
    return directory


@pytest.fixture(scope="session")
def engine_of() -> Iterator[Callable[[str], AbstractEngine]]:
    """`engine_of(name)` returns the session's engine of one kind of ENGINES, without models.

    "client-2" is a ClientEngine connected to a group of two ranks that the launcher started; "async-1" is an
    AsyncClientEngine whose coroutines run to completion.
    """
    with contextlib.ExitStack() as stack:
        engines: dict[str, AbstractEngine] = {}

        def get(name: str) -> AbstractEngine:
            if name not in engines:
                engines[name] = stack.enter_context(_start(name, stack))
            return engines[name]

        yield get


def _start(name: str, stack: contextlib.ExitStack) -> AbstractEngine:
    from support.units import EXPERT_RANKS, GPUS, MODELS

    if name == "engine":
        from allspark_server import Engine

        if len(GPUS) > 1 or EXPERT_RANKS:
            pytest.skip("an Engine computes in this process, on one GPU or on CPUs")
        return Engine()
    from allspark_client import ClientEngine
    from allspark_launch.group.background import background_group
    from allspark_server.runtime.binding import MODEL_RANKS
    from support.blocking import BlockingEngine

    kind, ranks = name.split("-")
    if MODELS and int(ranks) != MODELS:
        pytest.skip(f"ALLSPARK_TEST_UNIT names {MODELS} ranks of the model")
    words = ["--gpus", ",".join(GPUS)] if GPUS else [] if EXPERT_RANKS else ["--ranks", ranks]
    words += ["--experts-on", "cpu", "--ranks", str(MODELS + EXPERT_RANKS)] if EXPERT_RANKS else []
    with pytest.MonkeyPatch.context() as environment:
        if EXPERT_RANKS and MODELS > 1:     # the launcher sets it for GPUs alone
            environment.setenv(MODEL_RANKS, str(MODELS))
        group = stack.enter_context(background_group(words, timeout=60.0))
    return (BlockingEngine if kind == "async" else ClientEngine)(group.addresses[0])


@pytest.fixture(scope="session")
def http_server(tmp_path_factory: pytest.TempPathFactory):
    """A running HTTP server (RunningServer of support/http_helpers.py)."""
    from support.http_helpers import serving

    with serving(tmp_path_factory.mktemp("http")) as server:
        yield server


@pytest.fixture(scope="session")
def api(http_server):
    """OpenAI's own client of the HTTP server, with the key that may generate."""
    import openai

    from support.http_helpers import KEYS

    with openai.OpenAI(base_url=http_server.url + "/v1", api_key=KEYS["generate"], max_retries=0) as found:
        yield found


@pytest.fixture()
def http_client(http_server):
    """An httpx.Client of the HTTP server, with the key that may generate."""
    with http_server.client() as client:
        yield client


@pytest.fixture(scope="session", params=ENGINES)
def any_engine(request: pytest.FixtureRequest, engine_of: Callable[[str], AbstractEngine]) -> AbstractEngine:
    """Each kind of engine in turn. What is tested with this fixture holds for all of them."""
    return engine_of(request.param)


@pytest.fixture()
def served():
    """The fake engine, and the address of a service around it in this process."""
    from support.fake_service import serving

    with serving() as (engine, address):
        yield engine, address


@pytest.fixture()
def short_first_contact(monkeypatch):
    """Shortens the wait for a server that is not there; one test covers its full length."""
    from allspark_client import pool

    monkeypatch.setattr(pool, "_FIRST_CONTACT_SECONDS", 1.0)


def _why_no_gpu() -> str:
    try:
        from allspark_server import (
            _cuda,
            _native,  # noqa: F401
        )
    except ImportError as error:
        return f"no CUDA backend: {error}"
    try:
        return "" if _cuda.device_count() else "no GPU"
    except ValueError as error:
        return str(error)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    number, _, parts = os.environ.get("ALLSPARK_TEST_PART", "0/1").partition("/")    # of tests/gpu: tests in turn
    others = [item for i, item in enumerate(items) if i % int(parts) != int(number)]
    if others and int(parts) > 1:
        config.hook.pytest_deselected(items=others)
        items[:] = items[int(number)::int(parts)]
    wanted = [item for item in items if item.get_closest_marker("cuda")]
    if wanted and (why := _why_no_gpu()):
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason=why))
