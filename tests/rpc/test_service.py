"""Service and ClientEngine with an engine without a model: streams, errors, addresses, tokens, TLS, other programs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import threading
import time

import grpc
import pytest

from allspark_client import (
    AllSparkError,
    AsModelConfig,
    AsStatus,
    ClientEngine,
    GenerateRequestStatus as Status,
    TlsConfig,
    convert,
)
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.version import __version__
from allspark_server.access import Access, Role
from allspark_server.engine.results import SampleEnd
from allspark_server.rpc import methods
from allspark_server.rpc.calls import ConcurrencyLimits
from allspark_server.rpc.client_stream import Backlog, ClientStream, _Pending, _RequestSink
from allspark_server.rpc.service import Service
from allspark_server.rpc.token_columns import TokenColumns
from support.fake_engine import FakeEngine
from support.fake_service import MODEL, expected, serving, tokens, wait_until

pytestmark = pytest.mark.usefixtures("short_first_contact")


@pytest.fixture
def client(served):
    with ClientEngine(served[1], reconnect_timeout=5) as engine:
        yield engine


# --- requests ---


def test_stream_and_release(served, client):
    core, _ = served
    status, handle, queue = client.start_request(
        "m", {"input_ids": [1, 2]}, {"max_new_tokens": 30, "logprobs": True, "top_logprobs": 2}
    )
    assert status is AsStatus.ALLSPARK_SUCCESS
    first = queue.Get()
    assert first.prefix_cache_len == 0 and abs(first.token_logprobs_list[0] + first.ids_from_generate[0] / 1000) < 1e-6
    assert first.log_probs_list[0] == [(0, 0.0), (1, -1.0)]
    assert client.sync_request("m", handle) is AsStatus.ALLSPARK_SUCCESS
    assert first.ids_from_generate + tokens(queue) == expected([1, 2], 30)
    assert queue.GenerateStatus() is Status.GenerateFinished and queue.GeneratedLength() == 30
    assert queue.RequestStatInfo().generated_token_length == 30 and queue.RequestStatInfo().context_tps > 0
    assert client.get_wait("m", queue) == [] and client.get_request_status("m", queue) is Status.GenerateFinished
    client.stop_request("m", handle)  # harmless after the end
    client.release_request("m", handle)
    wait_until(lambda: not core.handles, 1)
    for call in (client.stop_request, client.release_request, client.sync_request):
        with pytest.raises(AllSparkError, match="^ALLSPARK_ILLEGAL_REQUEST_ID: model 'm' has no request with handle"):
            call("m", handle)


def test_many_threads_share_one_stream(served, client):
    results = {}

    def ask(i):
        _, handle, queue = client.start_request_ids("m", None, [i, 5], {"max_new_tokens": 12})
        results[i] = tokens(queue)
        client.release_request("m", handle)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert results == {i: expected([i, 5], 12) for i in range(24)}


def test_text_messages_and_samples(client):
    _, _, queue = client.start_request_text("m", None, "hey", {"max_new_tokens": 3})
    assert "".join(e.text for e in queue) == "".join(f"<{t}>" for t in expected(list(b"hey"), 3))
    _, _, queue = client.start_request(
        "m", {"messages": [{"role": "user", "content": "x"}]}, {"max_new_tokens": 2}
    )
    assert len(tokens(queue)) == 2
    _, _handle, queue = client.start_request("m", {"input_ids": [4]}, {"max_new_tokens": 5, "n": 3})
    by_sample = {0: [], 1: [], 2: []}
    for e in queue:
        by_sample[e.sample_index] += e.ids_from_generate
    assert by_sample == {s: expected([4], 5, s) for s in range(3)}


def test_async_iteration(client):
    async def ask(i):
        _, _, queue = client.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 8})
        return [t async for e in queue for t in e.ids_from_generate]

    async def main():
        return await asyncio.gather(*(ask(i) for i in range(5)))

    assert asyncio.run(main()) == [expected([i], 8) for i in range(5)]


def test_stop_keeps_what_was_generated(served, client):
    _, handle, queue = client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 100_000})
    wait_until(lambda: queue.GeneratedLength() >= 3, 5)
    client.stop_request("m", handle)
    assert queue.GenerateStatus() is Status.GenerateInterrupted
    got = tokens(queue)
    assert len(got) >= 3 and got == expected([1], len(got)) and not served[0].live
    _, handle, queue = client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 100_000})
    client.stop_model("m")
    client.sync_request("m", None)
    assert queue.GenerateStatus() is Status.GenerateInterrupted


def test_iteration_raises_when_others_interrupt(served, client):
    core, address = served
    endless = {"max_new_tokens": 100_000}
    _, _, queue = client.start_request("m", {"input_ids": [1]}, endless)
    with ClientEngine(address) as other:
        wait_until(lambda: queue.GeneratedLength() > 2, 5)
        other.stop_model("m")
        with pytest.raises(AllSparkError, match=f"the server at {address} interrupted the request: model 'm' was stop"):
            tokens(queue)
        assert queue.GenerateStatus() is Status.GenerateInterrupted and queue.FinishReason() == "interrupted"
        other.start_model("m")
    for end in (
        lambda: client.stop_request("m", handle),
        lambda: client.release_request("m", handle),
        lambda: client.stop_model("m") or client.start_model("m"),
        lambda: client.release_model("m"),
        lambda: core.serve("m") or client.close(),
    ):
        core.serve("m")
        _, handle, queue = client.start_request("m", {"input_ids": [1]}, endless)
        wait_until(lambda: queue.GeneratedLength() > 2, 5)
        end()
        wait_until(lambda: queue.GenerateStatus().final, 5)
        assert tokens(queue) == expected([1], queue.GeneratedLength())
        assert queue.FinishReason() == "interrupted"


def test_finish_reason_reaches_the_caller(client):
    for prompt, reason in (([1], "length"), ([999], "error")):
        _, handle, queue = client.start_request("m", {"input_ids": prompt}, {"max_new_tokens": 10})
        client.sync_request("m", handle)
        assert queue.FinishReason() == reason


def test_one_message_a_step(served):
    core, address = served
    core.interval = 0.03
    channel = grpc.insecure_channel(address)
    call = channel.stream_stream(
        "/allspark.Allspark/Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
    )
    hold = threading.Event()

    def requests():
        yield pb.SessionRequest(hello=convert.hello("test"))
        for i in range(1, 9):
            yield pb.SessionRequest(
                start=pb.StartRequest(
                    id=i,
                    request=pb.GenerateRequest(
                        model="m", input_ids=pb.TokenIds(ids=[i]), config=pb.GenerateConfig(max_new_tokens=15)
                    ),
                )
            )
        hold.wait(10)

    steps, ended, with_tokens, sizes = core.steps, 0, 0, []
    for message in call(requests()):
        with_news = [event.id for event in message.events if event.elements] + list(message.tokens.requests)
        if with_news:
            with_tokens += 1
            sizes.append(len(with_news))
            assert sorted(set(with_news)) == sorted(with_news)
        ended += sum(event.status == int(Status.GenerateFinished) for event in message.events)
        if ended == 8:
            break
    wait_until(lambda: not core.handles, 5)  # all is said of them, though the client has released none
    hold.set()
    assert with_tokens <= core.steps - steps and max(sizes) == 8
    channel.close()


def test_a_step_costs_a_session_one_notice_and_a_message_what_has_changed():
    def seconds_to_take(waiting: int) -> float:
        notices = []
        session = ClientStream(None, lambda *notice: notices.append(notice))
        for i in range(waiting + 3):
            session.register(i)
            session._answer(i, pb.RequestEvent(id=i, started=pb.Started()))
        session.take()
        return min(one_time(session, notices) for _ in range(20))   # the first finds its memory far away

    def one_time(session: ClientStream, notices: list) -> float:
        notices.clear()
        for token in range(5):
            for i in range(3):
                _RequestSink(session, i).on_token(7, 0, token, None, [], None, 0, None)
        assert notices == [(session, False)]
        gc.disable()
        began = time.perf_counter()
        events = session.take()
        taken = time.perf_counter() - began
        gc.enable()
        assert [list(event.elements[0].ids) for event in events] == [[0, 1, 2, 3, 4]] * 3
        return taken

    assert seconds_to_take(20_000) < 10 * seconds_to_take(10)


def test_tokens_without_other_news_are_columns_of_one_message():
    session, columns = ClientStream(None, lambda *_: None), TokenColumns()
    for i in (1, 2, 3):
        session.register(i)
        session._answer(i, pb.RequestEvent(id=i, started=pb.Started()))
    session.take()

    def token(request, token, sample=0, logprob=None, top=(), text="t", cached=4, end=None):
        _RequestSink(session, request).on_token(7, sample, token, logprob, list(top), text, cached, end)

    def take():
        events, message = session.take(columns), pb.Tokens()
        if columns:
            columns.move_to(message)
        return [(event.id, [list(e.ids) for e in event.elements]) for event in events], message

    for i in (1, 2):
        token(i, 10 * i)
    assert take() == ([(1, [[10]]), (2, [[20]])], pb.Tokens())      # the first tokens tell of the prefix cache
    token(1, 11)
    token(2, 21, logprob=-0.5, top=[(21, -0.5), (5, -1.5)])
    token(1, 12, text=None)
    events, message = take()
    assert not events and not columns
    assert (message.requests, message.ids, message.texts) == ([1, 2, 1], [11, 21, 12], ["t", "t", ""])
    assert not message.samples and (message.top_counts, message.logprobs) == ([-1, 2, -1], [-0.5])
    assert (message.top_ids, message.top_logprobs) == ([21, 5], [-0.5, -1.5])
    rows = [(1, 11, "t", 0, None, []), (2, 21, "t", 0, -0.5, [(21, -0.5), (5, -1.5)]), (1, 12, "", 0, None, [])]
    assert list(convert.tokens_from_pb(message)) == rows

    token(1, 13)
    token(2, 22, sample=1)          # the first token of another sample
    token(2, 23)                    # comes after it
    token(3, 30, cached=0)
    token(1, 14, end=SampleEnd("length"))
    _RequestSink(session, 1).on_finish(7, Status.GenerateFinished, None, {}, "length")
    events, message = take()
    assert events == [(2, [[22], [23]]), (3, [[30]]), (1, [[14]])]  # after the tokens of the same message
    assert (message.requests, message.ids) == ([1], [13]) and not message.top_counts
    token(2, 24, sample=1)
    token(3, 31, cached=1)
    events, message = take()
    assert events == [(3, [[31]])]                                  # what it says of the prefix cache has changed
    assert (message.requests, message.samples, message.ids) == ([2], [1], [24])


def test_all_tokens_say_what_came_from_the_prefix_cache(client):
    prompt = [i % 900 for i in range(100)]
    for cached in (0, 96):
        with client.generate("m", {"input_ids": prompt}, {"max_new_tokens": 12, "n": 2}) as generation:
            found = {(elements.sample_index, elements.prefix_cache_len) for elements in generation}
        assert cached == 0 or found == {(0, cached), (1, cached)}
        assert [sample.ids_from_generate for sample in generation.samples] == [expected(prompt, 12, i) for i in (0, 1)]


def test_tokens_in_columns_count_as_unread():
    session, columns = ClientStream(None, lambda *_: None, max_pending=10), TokenColumns()
    session._pending[1] = _Pending(answered=True, cached={0: 0})
    for count, overflow in ((3, False), (4, True)):
        for token in range(count):
            _RequestSink(session, 1).on_token(7, 0, token, -1.0, [(1, -1.0), (2, -2.0)], None, 0, None)
        assert not session.take(columns) and len(columns) == count and columns.size == 3 * count
        assert session.overflow is overflow and session._shared._total == 0
        columns.move_to(pb.Tokens())


def test_who_leaves_most_unread_goes_first_when_all_together_leave_too_much():
    backlog, news = Backlog(limit=100), []
    small, large = (ClientStream(None, lambda session, now: news.append(session), 80, backlog) for _ in range(2))

    def leave_unread(session: ClientStream, count: int) -> None:
        session._pending.setdefault(1, _Pending(answered=True))
        for token in range(count):
            _RequestSink(session, 1).on_token(7, 0, token, None, [], None, 0, None)
        with session._lock:
            session._merge()

    leave_unread(large, 60)
    leave_unread(small, 40)
    assert not small.overflow and not large.overflow
    leave_unread(small, 10)
    assert large.overflow and not small.overflow and news[-1] is large
    assert len(small.take()[0].elements[0].ids) == 50 and backlog._total == 60
    leave_unread(small, 81)
    assert small.overflow  # by itself


def test_a_request_that_fails_later(client):
    _, handle, queue = client.start_request("m", {"input_ids": [999]})
    client.sync_request("m", handle)
    assert queue.GenerateStatus() is Status.InternalError
    assert queue.Get().ids_from_generate == expected([999], 3)
    with pytest.raises(AllSparkError, match="^ALLSPARK_RUNTIME_ERROR: the logits of model 'm' are not finite"):
        queue.Get()


# --- errors as in process ---


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda e: e.start_model("x"),
            AllSparkError,
            "ALLSPARK_PARAM_ERROR: no model named 'x' is installed; installed: 'm'",
        ),
        (lambda e: e.get_as_engine_stat("x"), AllSparkError, "no model named 'x'"),
        (lambda e: e.start_request("x", {"input_ids": [1]}), AllSparkError, "no model named 'x'"),
        (lambda e: e.stop_request("x", 1), AllSparkError, "no model named 'x'"),
        (lambda e: e.stop_request("m", "1"), TypeError, "request_handle must be the int"),
        (lambda e: e.stop_model(3), TypeError, "model_name must be a str"),
        (
            lambda e: e.start_request("m", {"input_ids": [1000]}),
            ValueError,
            r"input_ids\[0\]=1000 is not in the vocabulary",
        ),
        (lambda e: e.start_request("m", {"input_id": [1]}), ValueError, "did you mean 'input_ids'"),
        (lambda e: e.start_request("m", {}), ValueError, "exactly one of"),
        (lambda e: e.start_request("m", {"text": "a\ud800"}), ValueError, "text is not valid Unicode"),
        (lambda e: e.start_request("m", [1]), TypeError, "inputs must be a dict"),
        (lambda e: e.start_request("m", {"input_ids": [1]}, {"top_kk": 1}), ValueError, "did you mean 'top_k'"),
        (lambda e: e.start_request("m", {"messages": [{"role": "user"}]}), ValueError, r"messages\[0\]"),
        (
            lambda e: e.start_request("m", {"input_ids": [666]}),
            AllSparkError,
            "ALLSPARK_UNKNOWN_ERROR: RuntimeError: a defect",
        ),
        (lambda e: e.install_model(MODEL), AllSparkError, "is installed already"),
        (lambda e: e.install_model({}), TypeError, "config must be an AsModelConfig"),
        (
            lambda e: e.install_model(AsModelConfig("i", "/x", lora_names=["l"])),
            AllSparkError,
            "ALLSPARK_LORA_NOT_FOUND: .* holds no adapter",
        ),
        (lambda e: e.start_request("m", {"input_ids": [1]}, {"mm_info": 1}), AllSparkError, "is not available yet"),
        (lambda e: e.start_request("m", {"input_ids": [1]}, {"lora_name": "l"}), AllSparkError, "LORA_NOT_FOUND"),
        (lambda e: e.load_lora("m", "l"), AllSparkError, "ALLSPARK_LORA_NOT_FOUND: .* holds no adapter"),
        (lambda e: e.unload_device_mem("m"), AllSparkError, "are for models on GPUs"),
    ],
)
def test_errors_are_those_of_the_engine(client, call, error, text):
    with pytest.raises(error, match=text):
        call(client)


def test_models_and_information(client):
    assert client.install_model(AsModelConfig("m2", "/none")) is AsStatus.ALLSPARK_SUCCESS
    assert client.build_model_from_config_struct(AsModelConfig("m3", "/none")) is AsStatus.ALLSPARK_SUCCESS
    assert client.start_model("m2") is AsStatus.ALLSPARK_SUCCESS
    assert {m.name: m.running for m in client.list_models()} == {"m": True, "m2": True, "m3": False}
    assert client.stop_model("m2") is client.release_model("m2") is AsStatus.ALLSPARK_SUCCESS
    assert client.get_model_info("m").eos_token_ids == [999] and client.get_as_engine_stat("m").total_token == 8192
    assert client.get_file_information("/a.asgraph", "/a.asparam").create_version_param == "/a.asparam"
    assert "linear" in client.get_op_profiling_info("m")
    assert (client.get_rank_id(), client.get_rank_nums(), client.is_allspark_work_as_service()) == (0, 1, True)
    assert client.get_version_full() == __version__
    client.close()
    client.close()
    for call in (lambda: client.start_model("m"), lambda: client.start_request("m", {"input_ids": [1]})):
        with pytest.raises(AllSparkError, match="ALLSPARK_INVALID_CALL_ERROR: the engine is closed"):
            call()


@pytest.fixture
def small_allowance(monkeypatch):
    monkeypatch.setattr(methods, "BURST", 100_000)
    monkeypatch.setattr(methods, "RATE", 400_000)


def test_who_sends_much_is_read_slowly(small_allowance, served, client):
    """After a burst, a tenant is read at a limited rate; others do not wait for it."""
    _, address = served

    def send(engine, size: int) -> float:
        """Seconds until a text was accepted or refused; it may be too long for the model."""
        began = time.monotonic()
        with contextlib.suppress(AllSparkError):
            engine.start_request("m", {"text": "x" * size}, {"max_new_tokens": 1})
        return time.monotonic() - began

    with ClientEngine(address) as greedy:
        assert greedy.list_models()
        greedy.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 1})
        send(greedy, 300_000)                       # half a second too much
        began = time.monotonic()
        client.start_request("m", {"input_ids": [1, 2]}, {"max_new_tokens": 1})
        quick = time.monotonic() - began
        assert send(greedy, 10) > 0.3 > quick


def test_only_so_many_calls_of_one_client_are_read_at_once():
    async def calls() -> list[str]:
        concurrency, log = ConcurrencyLimits(2), []

        async def call(client: str, name: str) -> None:
            async with concurrency.enter(client):
                log.append(name)
                await asyncio.sleep(0.05)
                log.append(name)

        await asyncio.gather(*(call("a", f"a{i}") for i in range(4)), call("b", "b0"))
        assert not concurrency._semaphores and not concurrency._users
        return log

    assert asyncio.run(calls()) == ["a0", "a1", "b0", "a0", "a1", "b0", "a2", "a3", "a2", "a3"]


def test_closing_a_client_ends_its_requests(served):
    core, address = served
    engine = ClientEngine(address)
    _, _, queue = engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 100_000})
    engine.close()
    assert queue.GenerateStatus() is Status.GenerateInterrupted
    wait_until(lambda: not core.live and not core.handles, 1)


# --- addresses, tokens, TLS, other languages ---


def test_port_in_use_and_bad_addresses(served, tmp_path):
    core, address = served
    (tmp_path / "file").write_text("x")
    for wanted, text in (
        (address, f"cannot listen on {address}: the port is in use"),
        ("nonsense", "neither host:port nor unix:/path"),
        (f"unix:{tmp_path}/no/s.sock", "there is no directory"),
        (f"unix:{tmp_path}/{'x' * 120}", "Unix allows 107"),
        (f"unix:{tmp_path}/file", "is not a socket"),
    ):
        with pytest.raises(AllSparkError, match=text):
            Service(core, [wanted], access=Access(insecure=True)).start()


def test_stale_and_live_unix_sockets(tmp_path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # bound, and closed without unlink: nobody listens
    with serving(f"unix:{path}") as (core, address):
        with ClientEngine(address) as engine:
            assert engine.get_rank_nums() == 1
            with pytest.raises(AllSparkError, match="ALLSPARK_IO_ERROR: .*another server listens there"):
                Service(core, [address]).start()
            assert engine.get_rank_nums() == 1
    assert not path.exists()


def test_token():
    with serving(access=Access({"s3cret": Role.ADMIN})) as (_, address):
        for wrong in (None, "guess"):
            with pytest.raises(AllSparkError, match="ALLSPARK_REQUEST_DENIED: .*token"):
                ClientEngine(address, token=wrong)
        with ClientEngine(address, token="s3cret") as engine:
            _, _, queue = engine.start_request("m", {"input_ids": [3]}, {"max_new_tokens": 4})
            assert tokens(queue) == expected([3], 4)
        from grpc_health.v1 import health_pb2

        with grpc.insecure_channel(address) as channel:  # probes have no token
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
            assert check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING


def test_tls(tmp_path):
    made = subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            tmp_path / "key.pem",
            "-out",
            tmp_path / "cert.pem",
        ],
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("no openssl command")
    pem = {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem"), "ca": str(tmp_path / "cert.pem")}
    with serving("localhost:0", access=Access(tls=TlsConfig(**pem))) as (_, address):
        with ClientEngine(address, tls=TlsConfig(**pem), token="unneeded") as engine:
            assert engine.get_rank_nums() == 1
        with pytest.raises(AllSparkError, match="cannot be reached"):
            ClientEngine(address)
        with pytest.raises(AllSparkError, match="cannot be reached"):  # a client certificate is needed
            ClientEngine(address, tls=pem["ca"])
    with pytest.raises(AllSparkError, match="ALLSPARK_IO_ERROR: a TLS file cannot be read"):
        access = Access({"t": Role.READ}, TlsConfig(cert="/none", key="/none"))
        Service(FakeEngine(), ["127.0.0.1:0"], access=access).start()


def test_generate_health_and_reflection(served):
    core, address = served
    from grpc_reflection.v1alpha import reflection_pb2 as r

    with grpc.insecure_channel(address) as channel:
        generate = channel.unary_stream(
            "/allspark.Allspark/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        answers = list(generate(pb.GenerateRequest(model="m", text="hey", config=pb.GenerateConfig(max_new_tokens=4))))
        assert [i for m in answers for e in m.elements for i in e.ids] == expected(list(b"hey"), 4)
        assert "".join(e.text for m in answers for e in m.elements).startswith("<")
        assert answers[-1].status == pb.GENERATE_FINISHED and answers[-1].finish_reason == "length"
        for request, text in (
            (pb.GenerateRequest(model="x", text="hey"), "no model named 'x'"),
            (pb.GenerateRequest(model="m"), "no prompt"),
            (pb.GenerateRequest(model="m", text="x", config=pb.GenerateConfig(top_k=-1)), "top_k=-1"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(generate(request))
            assert text in caught.value.details()
        live = generate(pb.GenerateRequest(model="m", text="x", config=pb.GenerateConfig(max_new_tokens=10**6)))
        next(live)
        live.cancel()
        wait_until(lambda: not core.live, 1)
        info = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            r.ServerReflectionRequest.SerializeToString,
            r.ServerReflectionResponse.FromString,
        )
        listed = next(info(iter([r.ServerReflectionRequest(list_services="")])))
        assert {s.name for s in listed.list_services_response.service} >= {"allspark.Allspark", "grpc.health.v1.Health"}


@pytest.mark.parametrize(
    "messages, text",
    [
        ([pb.SessionRequest(stop=1)], "first message is hello"),
        ([pb.SessionRequest(hello=convert.hello("x")), pb.SessionRequest()], "start, stop and release"),
        (
            [pb.SessionRequest(hello=convert.hello("x"))]
            + 2 * [pb.SessionRequest(start=pb.StartRequest(id=1, request=pb.GenerateRequest(model="m", text="x")))],
            "id 1 is in use",
        ),
    ],
)
def test_what_other_programs_may_send(served, messages, text):
    core, address = served
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(
            "/allspark.Allspark/Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter(messages)))
        assert text in caught.value.details()
    wait_until(lambda: not core.live, 1)
