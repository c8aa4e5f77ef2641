"""Fixtures that the HTTP server's tests share."""

from __future__ import annotations

import contextlib

import pytest

from support.fake_service import serving
from support.http_helpers import http_server_for
from support.script_engine import ScriptEngine


@pytest.fixture(scope="session")
def scripted():
    """HTTP servers by chat format whose model "m" writes what its prompt says: (address, engine)."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for kind in ("hermes", "harmony"):
            engine, group = stack.enter_context(serving(core=ScriptEngine(kind)))
            servers[kind] = stack.enter_context(http_server_for(group, insecure=True)), engine
        yield servers
