"""Messages that are wrong, large or slow to read, what health tells, and the limits of clients."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from allspark_client import AllSparkError, AsStatus, ClientEngine, convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_server.access import Access, Role
from allspark_server.rpc.client_limits import ClientLimits
from support.calls import ADMIN_CALLS, CALLS_OF_ALL, REFLECTION, TOKENS, call
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, tokens, wait_until


@pytest.fixture
def served():
    with serving() as (core, address), grpc.insecure_channel(address) as channel:
        yield core, channel


def test_invalid_messages_are_reported(served, caplog):
    """With the right code, and with one line in the log however many there are."""
    _, channel = served
    hostile = b"\xff" * 10
    methods = [*ADMIN_CALLS, *CALLS_OF_ALL, "Generate", "Session", "/grpc.health.v1.Health/Check",
               "/grpc.health.v1.Health/Watch", REFLECTION]
    for method in methods:
        assert call(channel, method, hostile) is grpc.StatusCode.INVALID_ARGUMENT, method
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be decoded" in caplog.text and "Traceback" not in caplog.text
    for method in ("GetServerInfo", "Session"):
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(channel.stream_stream(f"/allspark.Allspark/{method}")(iter([]), timeout=10)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_bad_message_ends_its_stream_alone(served, size):
    core, channel = served
    hello = pb.SessionRequest(hello=convert.hello("test")).SerializeToString()
    start = pb.SessionRequest(start=pb.StartRequest(id=1, request=pb.GenerateRequest(model="m", text="x")))
    session = channel.stream_stream("/allspark.Allspark/Session")
    with pytest.raises(grpc.RpcError) as caught:
        list(session(iter([hello, start.SerializeToString(), b"\xff" * size]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a SessionRequest message" in caught.value.details()
    wait_until(lambda: not core.live, 2)
    assert isinstance(call(channel, "GetServerInfo", b""), bytes)


def test_a_refused_call_is_not_parsed():
    with serving(access=Access(TOKENS)) as (_, address), grpc.insecure_channel(address) as channel:
        assert call(channel, "InstallModel", b"\xff" * 10) is grpc.StatusCode.UNAUTHENTICATED
        assert call(channel, "InstallModel", b"\xff" * 10, "ask") is grpc.StatusCode.PERMISSION_DENIED
        assert call(channel, "Generate", b"\xff" * (12 << 20)) is grpc.StatusCode.UNAUTHENTICATED


def test_messages_are_limited():
    with serving(max_message=1 << 20) as (_, address):
        with grpc.insecure_channel(address) as channel:
            assert call(channel, "GetStat", bytes(2 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        with ClientEngine(address) as client:
            _, _, queue = client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 200})
            for inputs in ({"text": "x" * (1 << 20)}, {"input_ids": [999] * 600_000}):
                match = r"a message of 1\d{6} bytes, .* takes at most 1048576"
                with pytest.raises(AllSparkError, match=match) as caught:
                    client.start_request("m", inputs)
                assert caught.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
            assert tokens(queue) == expected([1], 200)      # the stream of the others goes on


def test_long_texts_hold_up_nobody(served, monkeypatch):
    """They delay neither requests of others, nor statistics, nor the cleanup after a client."""
    core, channel = served
    gate, submit = threading.Event(), core.submit

    def slow(spec, sink):
        if spec.text is not None:
            gate.wait(20)
        return submit(spec, sink)

    monkeypatch.setattr(core, "submit", slow)
    text = pb.GenerateRequest(model="m", text="x" * 100_000).SerializeToString()
    live = [channel.unary_stream("/allspark.Allspark/Generate")(text) for _ in range(8)]
    try:
        time.sleep(0.3)
        begin = time.monotonic()
        assert isinstance(call(channel, "GetStat", pb.ModelRequest(model="m").SerializeToString(), timeout=5), bytes)
        ids = pb.GenerateRequest(model="m", input_ids=pb.TokenIds(ids=[1]), config=pb.GenerateConfig(max_new_tokens=9))
        asked = channel.unary_stream("/allspark.Allspark/Generate")(ids.SerializeToString(), timeout=5)
        assert list(asked)
        wait_until(lambda: not core.handles, 5)     # its request is freed
        assert time.monotonic() - begin < 5
    finally:
        gate.set()
        for one in live:
            one.cancel()


# --- health ---


def test_health_tells_what_does_not_serve(served):
    from grpc_health.v1 import health_pb2

    core, channel = served

    def health(service):
        data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        answer = call(channel, "/grpc.health.v1.Health/Check", data)
        return health_pb2.HealthCheckResponse.FromString(answer).status if isinstance(answer, bytes) else answer

    status = health_pb2.HealthCheckResponse
    assert health("") == health("allspark.Allspark") == health("allspark.Model/m") == status.SERVING
    assert health("allspark.Model/x") is grpc.StatusCode.NOT_FOUND
    core.unrestored["y"] = "it could not be restored"
    wait_until(lambda: health("") == health("allspark.Allspark") == status.NOT_SERVING, 5)
    assert health("allspark.Model/m") == status.SERVING
    core.unrestored.clear()
    wait_until(lambda: health("") == status.SERVING, 5)
    core.stop_model("m")
    wait_until(lambda: health("allspark.Model/m") == status.NOT_SERVING, 5)
    assert health("") == status.SERVING
    core.serve("n")
    core.release_model("m")
    wait_until(lambda: health("allspark.Model/m") == status.SERVICE_UNKNOWN, 5)
    assert health("allspark.Model/n") == status.SERVING


# --- limits of clients ---


def test_limits_of_tenants_and_of_the_server(tmp_path):
    limits = ClientLimits(total=3, of_tenant=2)
    many = {"max_new_tokens": 10000, "early_stopping": False}
    with serving(access=Access({"one": Role.GENERATE, "two": Role.GENERATE}), limits=limits,
                 core=FakeEngine(0.01)) as (_, address):
        with ClientEngine(address, token="one") as first, ClientEngine(address, token="two") as second:
            handles = [first.start_request("m", {"input_ids": [1]}, many)[1] for _ in range(2)]
            with pytest.raises(AllSparkError, match="EXCEED_LIMIT_ERROR: this client has 2 requests") as caught:
                first.start_request("m", {"input_ids": [1]}, many)
            assert caught.value.retryable
            other = second.start_request("m", {"input_ids": [1]}, many)[1]
            with pytest.raises(AllSparkError, match="EXCEED_LIMIT_ERROR: the server has 3 requests"):
                second.start_request("m", {"input_ids": [1]}, many)
            second.release_request("m", other)
            with pytest.raises(ValueError):     # refused for another reason: its place is free again
                second.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3, "stop_words_ids": [[10 ** 6]]})
            first.release_request("m", handles[0])
            assert tokens(first.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3})[2]) == expected([1], 3)
        wait_until(lambda: not limits._taken, 5)    # also of those whose client has left
