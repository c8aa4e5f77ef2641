"""Metrics and headers of a gateway's endpoint picker (support/endpoint_picker.py reads as it does)."""

from __future__ import annotations

import contextlib
import threading

import httpx
import pytest

from allspark_launch.group.background import background_group, shipped_model
from support.endpoint_picker import HEADERS, read
from support.http_helpers import KEYS, MODEL, http_server_for, token_file
from support.waiting import wait_for

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """An HTTP server with keys whose metrics are open; its model computes two sequences at once."""
    model = ["--model", str(shipped_model()), "--max-length", "1024", "--max-batch", "2"]
    with background_group(model, timeout=60.0) as group, \
            http_server_for(group.addresses[0], token_file=token_file(tmp_path_factory.mktemp("keys")),
                            open_metrics=True) as address:
        yield f"http://{address}"


def test_the_picker_needs_no_key_and_nothing_else_is_open(url):
    idle = read(httpx.get(f"{url}/metrics").text)
    assert (idle.queued, idle.running) == (0, 0) and idle.block_size > 0 and idle.blocks > 0
    assert (idle.most_adapters, idle.loaded, idle.waiting) == (5, set(), set()), "there is room for adapters"
    for path in ("/v1/models", "/pool", "/server_info", "/version"):
        assert httpx.get(url + path).status_code == 401, path
    assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 401


def test_the_picker_sees_requests_wait(url):
    """Four requests for two places: two run and two wait, and the cache fills."""
    headers = {"authorization": f"Bearer {KEYS['generate']}", **HEADERS}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
        release = threading.Event()

        def ask() -> None:
            with client.stream("POST", "/v1/completions", json=LONG) as answer:
                assert answer.status_code == 200
                release.wait(30)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        try:
            for thread in threads:
                thread.start()
            busy = wait_for(lambda: (found := read(httpx.get(f"{url}/metrics").text)).queued == 2 and found, 20)
            assert busy.running == 2 and busy.cache_usage > 0
        finally:
            release.set()
            for thread in threads:
                thread.join(30)
    wait_for(lambda: read(httpx.get(f"{url}/metrics").text).running == 0, 10)


def test_headers_of_a_gateway_change_nothing(url):
    """They are for the gateway and its picker; the answer's id is that of the request."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4, "temperature": 0}
    key = {"authorization": f"Bearer {KEYS['generate']}"}
    plain = httpx.post(f"{url}/v1/completions", json=body, headers=key)
    routed = httpx.post(f"{url}/v1/completions", json=body, headers={**key, **HEADERS, "x-request-id": "r-1"})
    assert routed.status_code == 200 and routed.json()["choices"] == plain.json()["choices"]
    assert routed.headers["x-request-id"] == "r-1" and "warning" not in routed.headers
