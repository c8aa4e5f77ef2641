"""Servers around the fake engine, in this process or in one that a test kills; tests of service and client share
them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from allspark_client import AsModelConfig
from allspark_server.access import Access, ModelRoots
from allspark_server.rpc.service import Service
from support.fake_engine import FakeEngine, expected
from support.paths import ROOT, SUPPORT, TESTS

MODEL = AsModelConfig("m", "/none")
__all__ = ["MODEL", "expected", "server_process", "serving", "tokens", "wait_until"]


def tokens(queue):
    """All ids of a queue until its end."""
    return [t for e in queue for t in e.ids_from_generate]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time allowed"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(address="127.0.0.1:0", core=None, **options):
    """A service in this process, without access control unless `options` say otherwise; yields (engine, address)."""
    core = core or FakeEngine()
    service = Service(core, [address], **{"access": Access(insecure=True), "roots": ModelRoots(["/"]), **options})
    try:
        service.start()
        yield core, service.addresses[0]
    finally:
        service.stop()
        core.close()


@contextlib.contextmanager
def server_process(address, fingerprint="fp", of_images=""):
    """A service in a separate process; yields (process, address)."""
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "fake_server.py"), address, fingerprint, of_images],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"},
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
