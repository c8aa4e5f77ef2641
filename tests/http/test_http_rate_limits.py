"""Limits of keys on requests and tokens a minute, with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from allspark_server.access import RateLimit
from allspark_server.http.errors import ApiError
from allspark_server.http.rate_limits import RateLimits, _duration
from support.fake_engine import FakeEngine
from support.fake_service import serving
from support.http_helpers import http_server_for

LINES = """admin key-of-the-operator-00
generate key-of-few-requests-00 requests_per_minute=3
generate key-of-few-tokens-0000 tokens_per_minute=600
generate key-of-both-0000000000 requests_per_minute=1000 tokens_per_minute=100000
"""


@pytest.fixture
def server(tmp_path: Path):
    """An HTTP server of two workers."""
    keys = tmp_path / "keys"
    keys.write_text(LINES)
    keys.chmod(0o600)
    with serving(core=FakeEngine(0.0005)) as (_, group), \
            http_server_for(group, token_file=str(keys), workers=2) as address:
        yield f"http://{address}", keys


def ask(client: openai.OpenAI, **fields):
    return client.completions.with_raw_response.create(model="m", prompt="x", **{"max_tokens": 4, **fields})


@contextlib.contextmanager
def client_of(server, key: str, **options):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key=key, **{"max_retries": 0, **options}) as client:
        yield client


def test_requests_a_minute_over_all_workers(server):
    with client_of(server, "key-of-few-requests-00") as client:
        left = []
        for _ in range(3):
            answer = ask(client, extra_headers={"connection": "close"})     # so that any worker answers
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert "x-ratelimit-limit-tokens" not in answer.headers
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        with pytest.raises(openai.RateLimitError, match="3 requests per minute. Please try again in ") as refused:
            ask(client)
        headers = refused.value.response.headers
        assert refused.value.code == "rate_limit_exceeded" and 1 <= int(headers["retry-after"]) <= 20
        assert 0 < int(headers["retry-after-ms"]) <= 20_000 and headers["x-ratelimit-remaining-requests"] == "0"
        client.models.list()        # looking costs nothing
        count = client.get("/models", cast_to=httpx.Response)
        assert "x-ratelimit-limit-requests" not in count.headers
    with anthropic.Anthropic(base_url=server[0], api_key="key-of-few-requests-00", max_retries=0) as client, \
            pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        client.messages.create(model="m", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    with client_of(server, "key-of-the-operator-00") as client:
        for _ in range(5):
            assert "x-ratelimit-limit-requests" not in ask(client).headers


def test_tokens_a_minute(server):
    """A client that waits as it is told gets its answer. 100 tokens too many take ten seconds, in which a machine with
    other work refuses, too.
    """
    with client_of(server, "key-of-few-tokens-0000") as client:
        first = ask(client, max_tokens=200)
        used = first.parse().usage.total_tokens
        assert 600 - used <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 600 - used + 10
        assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
        with client.completions.with_streaming_response.create(model="m", prompt="x", max_tokens=500,
                                                               stream=True) as answer:
            assert 390 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 410    # its prompt is counted
            for _ in answer.iter_lines():
                pass
        with pytest.raises(openai.RateLimitError, match="600 tokens per minute") as refused:
            ask(client)
        assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    with client_of(server, "key-of-few-tokens-0000", max_retries=3) as client:
        began = time.monotonic()
        assert ask(client, max_tokens=1).parse().choices
        assert time.monotonic() - began < 30


def test_limits_follow_the_file(server):
    with client_of(server, "key-of-both-0000000000") as client:
        assert ask(client).headers["x-ratelimit-limit-tokens"] == "100000"
        server[1].write_text(LINES.replace("tokens_per_minute=100000", "tokens_per_minute=50000"))
        deadline = time.monotonic() + 10
        while ask(client).headers["x-ratelimit-limit-tokens"] != "50000":
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_buckets_fill_evenly(monkeypatch, tmp_path):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limits, limit = RateLimits(str(tmp_path)), RateLimit(requests=60, tokens=600)
    others = RateLimits(str(tmp_path))          # another worker
    for i in range(60):
        (limits, others)[i % 2].take("a", limit)
    with pytest.raises(ApiError) as refused:
        others.take("a", limit)
    assert (refused.value.retry_after, refused.value.retry_after_ms) == (1, 1000)
    others.take("b", limit)
    now += 0.5
    with pytest.raises(ApiError, match="in 500ms"):
        limits.take("a", limit)
    now += 0.5
    limits.take("a", limit)
    others.charge("a", limit, 700)
    assert dict(limits.headers("a", limit))[b"x-ratelimit-reset-tokens"] == b"1m10s"
    now += 10
    with pytest.raises(ApiError, match="600 tokens per minute. Please try again in 100ms"):
        limits.take("a", limit)
    now += 0.11
    limits.take("a", limit)
    for i in range(5000):                       # more keys than places
        limits.take(f"key {i}", limit)
    assert [_duration(seconds) for seconds in (0.0204, 1.2, 59.9999, 360, 61.5)] == \
        ["21ms", "1.2s", "1m0s", "6m0s", "1m1.5s"]
