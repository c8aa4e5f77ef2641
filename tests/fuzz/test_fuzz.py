"""A short selection of the inputs that tests/fuzz runs by the million."""

from __future__ import annotations

import contextlib
import json
import threading

import httpx
import psutil
import pytest

from fuzz.__main__ import BLOCK, Findings, run
from fuzz.bodies import MODEL, RSS_LIMIT, Bodies, peak_mib
from fuzz.targets import TARGETS

BLOCKS = {
    "plan": 12,
    "wire": 8,
    "safetensors": 6,
    "index": 4,
    "config": 4,
    "graph": 3,
    "tokenizer": 2,
    "tokenizer_config": 1,
    "http": 1,
}


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
def test_hostile_inputs(kind, tmp_path, capfd, request):
    findings = Findings(tmp_path)
    if kind is Bodies:
        kind = type("Bodies", (Bodies,), {"group": request.getfixturevalue("http_server").group})
    done, accepted = run(kind, 2026, range(BLOCKS[kind.name]), tmp_path, findings, max_rss=float("inf"))
    assert not findings.seen, capfd.readouterr()
    assert done == BLOCKS[kind.name] * BLOCK
    assert 0 < accepted < done  # the inputs are neither all invalid nor all valid


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_bodies(http_server, tmp_path, capfd):
    """More of the inputs that `python -m fuzz` leaves out under a sanitizer."""
    findings = Findings(tmp_path)
    kind = type("Bodies", (Bodies,), {"group": http_server.group})
    run(kind, 2027, range(20), tmp_path, findings, max_rss=float("inf"))
    assert not findings.seen, capfd.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["🙂" + "x" * (15 << 20), "x" * (15 << 20)], ids=["wide", "ascii"])
def test_bursts_of_large_bodies(http_server, tmp_path, monkeypatch, text):
    """Many large bodies at the same time: the worker stays small, and returns the memory."""
    monkeypatch.setattr(Bodies, "group", http_server.group)
    target = Bodies(tmp_path / "files")
    statuses = []

    def ask(path, body):
        address = f"http://{target._host}:{target._port}{path}"
        with contextlib.suppress(httpx.TransportError):     # refused while it was sent
            headers = {"content-type": "application/json"}
            statuses.append(httpx.post(address, content=body, headers=headers, timeout=120).status_code)

    try:
        for path in ("/v1/completions", "/tokenize"):
            body = json.dumps({"model": MODEL, "prompt": text}, ensure_ascii=False).encode()
            threads = [threading.Thread(target=ask, args=(path, body)) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert set(statuses) <= {400, 429, 503} and 400 in statuses
        assert peak_mib(target.worker.pid) < RSS_LIMIT
        assert psutil.Process(target.worker.pid).memory_info().rss < 300 << 20
    finally:
        target.finish()
