"""Ids of requests, origins of web pages, and streams that are silent for long."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from allspark_launch.group.http_server import HttpOptions
from support.fake_engine import FakeEngine
from support.fake_service import serving
from support.http_helpers import http_server_for

PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def served():
    """The engine, and a client of an HTTP server in front of it."""
    engine = FakeEngine(0.001)
    with serving(core=engine) as (_, group), \
            http_server_for(group, insecure=True, heartbeat=1.0, allow_origin=[PAGE]) as address, \
            httpx.Client(base_url=f"http://{address}", timeout=30) as client:
        yield engine, client


def ask(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 2}, headers=headers)


def test_ids_of_requests(served):
    engine, client = served
    answer = ask(client, **{"x-request-id": "shop-17"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "shop-17"
    assert engine.submitted[-1].config.user_request_id == "shop-17"
    own = [ask(client, **{"x-request-id": given}).headers["x-request-id"] for given in ("", "a b", "x" * 129)]
    assert len(set(own)) == 3 and all(one.startswith("req_") for one in own)
    assert engine.submitted[-1].config.user_request_id == own[-1]
    for path, status in (("/nothing", 404), ("/health", 200)):
        answer = client.get(path, headers={"x-request-id": "me"})
        assert answer.status_code == status and answer.headers["x-request-id"] == "me"


def test_pages_of_an_allowed_origin_may_read(served):
    _, client = served
    answer = ask(client, origin=PAGE)
    assert answer.headers["access-control-allow-origin"] == PAGE and answer.headers["vary"] == "Origin"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for origin in ("https://other.example", "null"):
        assert "access-control-allow-origin" not in ask(client, origin=origin).headers
    assert "access-control-allow-origin" not in ask(client).headers


def test_browsers_ask_first(served):
    _, client = served

    def preflight(origin: str, wanted: str) -> httpx.Response:
        return client.options("/v1/chat/completions", headers={
            "origin": origin, "access-control-request-method": "POST", "access-control-request-headers": wanted})

    answer = preflight(PAGE, "authorization,content-type,x-stainless-os")
    assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert preflight(PAGE, "a;b").headers["access-control-allow-headers"] == "authorization, content-type"
    assert preflight("https://other.example", "authorization").status_code == 405


def test_silent_streams_get_comments(served):
    """Clients skip them; the text is the same."""
    engine, client = served

    def text(of: list[str]) -> str:
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in of
                       if line.startswith("data: {"))

    def lines() -> list[str]:
        body = {"model": "m", "prompt": "x", "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            return [line for line in answer.iter_lines() if line]

    quick = lines()
    engine.interval = 1.6
    try:
        began = time.monotonic()
        slow = lines()
    finally:
        engine.interval = 0.001
    comments = [line for line in slow if line.startswith(":")]
    assert 1 <= len(comments) <= time.monotonic() - began
    assert not any(line.startswith(":") for line in quick)
    assert text(slow) == text(quick) != "" and slow[-1] == quick[-1] == "data: [DONE]"


def test_unknown_fields_are_ignored_and_named(served):
    """Those of the body; a strict server and what lies deeper is in test_http_bad_input.py."""
    _, client = served
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    plain = client.post("/v1/completions", json=body)
    assert plain.status_code == 200 and "warning" not in plain.headers
    more = client.post("/v1/completions", json={**body, "chat_id": 1, "nonsense\r\nx: y": None, "z" * 99: []})
    assert more.json()["choices"] == plain.json()["choices"]
    names = f"chat_id, nonsense??x??y, {'z' * 40}"
    assert more.headers["warning"] == f'299 - "unknown fields are ignored: {names}"'
    many = client.post("/v1/completions", json={**body, **{f"a{i}": i for i in range(3000)}})
    assert many.status_code == 200 and many.headers["warning"].count("a") < 20
    deeper = client.post("/v1/completions", json={**body, "stream": True, "stream_options": {"other": 1}})
    assert deeper.status_code == 400 and deeper.json()["error"]["code"] == "unknown_parameter"
    wrong = client.post("/v1/completions", json={**body, "temperature": "x", "chat_id": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("trusted, seen", [(["127.0.0.0/8"], "203.0.113.7"), ([], "127.0.0.1")])
def test_the_access_log_names_clients_behind_a_trusted_proxy(capfd, trusted, seen):
    with serving(core=FakeEngine(interval=0.001)) as (_, group), http_server_for(
            group, insecure=True, access_log=True, trusted_proxy=trusted, log_format="json") as address:
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            headers = {"x-forwarded-for": "198.51.100.1, 203.0.113.7", "x-request-id": "mine"}
            assert ask(client, **headers).status_code == 200
            assert client.get("/nowhere", headers={**headers, "x-request-id": "other"}).status_code == 404
    log = capfd.readouterr().err    # the worker has ended: reading while it writes loses lines
    lines = [json.loads(line) for line in log.splitlines() if '"allspark_server.http.requests"' in line]
    found = {line["request"]: line for line in lines}
    assert found["mine"]["client"].startswith(seen) and found["mine"]["tenant"] == f"http:{seen}"
    assert (found["mine"]["method"], found["mine"]["path"], found["mine"]["status"]) == ("POST", "/v1/completions", 200)
    assert found["other"]["status"] == 404 and 0 <= found["other"]["seconds"] < 30


def test_wrong_proxies_are_refused():
    with pytest.raises(ValueError, match="--trusted-proxy 'proxy.example' is neither an address nor a network"):
        HttpOptions(trusted_proxy=["proxy.example"], insecure=True).check()
