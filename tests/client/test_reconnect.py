"""Clients that vanish or stop reading, and servers that die: nothing leaks or hangs, and requests continue
elsewhere.
"""

from __future__ import annotations

import contextlib
import queue as queue_module
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from allspark_client import (
    AllSparkError,
    AsModelConfig,
    AsStatus,
    ClientEngine,
    GenerateRequestStatus as Status,
    client as client_module,
    connection,
    convert,
    session,
)
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.live_request import MAX_LOSSES
from support.fake_engine import FakeEngine
from support.fake_service import expected, server_process, serving, tokens, wait_until

pytestmark = pytest.mark.usefixtures("short_first_contact")


# --- clients that vanish, or do not read ---

VANISHING = """
import sys, time
from allspark_client import ClientEngine
e = ClientEngine(sys.argv[1])
for i in range(5):
    e.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 10**6})
print("started", flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def client_process(address):
    process = subprocess.Popen([sys.executable, "-c", VANISHING, address], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_client_is_forgotten_within_a_second(served):
    core, address = served
    with client_process(address) as process:
        wait_until(lambda: len(core.live) == 5, 5)
        process.kill()
        wait_until(lambda: not core.live and not core.handles, 1)


def test_a_silent_client_is_forgotten_within_15_seconds(tmp_path):
    with serving(f"unix:{tmp_path}/s.sock", core=FakeEngine(interval=0.05)) as (core, address):
        with client_process(address) as process:
            wait_until(lambda: len(core.live) == 5, 5)
            process.send_signal(signal.SIGSTOP)
            with ClientEngine(address) as other:  # others are served meanwhile
                _, handle, queue = other.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 5})
                assert tokens(queue) == expected([1], 5)
                other.release_request("m", handle)
                wait_until(lambda: not core.live and not core.handles, 15)


def test_a_client_that_does_not_read_is_disconnected(tmp_path):
    talkative = FakeEngine(interval=0.001, padding="x" * 10_000)
    with serving(f"unix:{tmp_path}/s.sock", core=talkative, max_pending=2000) as (core, address):
        channel = grpc.insecure_channel(address)
        call = channel.stream_stream(
            "/allspark.Allspark/Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
        )
        hold = threading.Event()

        def requests():
            yield pb.SessionRequest(hello=convert.hello("test"))
            for i in range(1, 21):
                yield pb.SessionRequest(
                    start=pb.StartRequest(
                        id=i,
                        request=pb.GenerateRequest(model="m", text="x", config=pb.GenerateConfig(max_new_tokens=10**6)),
                    )
                )
            hold.wait(20)

        stream = call(requests())
        wait_until(lambda: len(core.live) == 20, 5)
        steps = core.steps
        wait_until(lambda: not core.live and not core.handles, 10)
        assert core.steps > steps  # the engine went on meanwhile
        with pytest.raises(grpc.RpcError) as caught:
            for _ in stream:
                pass
        assert "unread" in caught.value.details()
        hold.set()
        channel.close()


# --- servers that vanish ---


def test_resume_on_another_member(tmp_path):
    with server_process(f"unix:{tmp_path}/a") as (a, address_a), server_process(f"unix:{tmp_path}/b") as (b, address_b):
        with ClientEngine([address_a, address_b], resume=True, reconnect_timeout=20) as engine:
            started = [engine.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 60}) for i in range(6)]
            samples = engine.start_request("m", {"input_ids": [7]}, {"max_new_tokens": 60, "n": 2})
            assert {engine._requests[h].session.address for _, h, _ in started} == {address_a, address_b}  # by load
            victim = engine._requests[samples[1]].session.address
            wait_until(lambda: all(q.GeneratedLength() > 5 for _, _, q in started), 10)
            (a if victim == address_a else b).kill()
            for i, (_, handle, queue) in enumerate(started):
                assert tokens(queue) == expected([i], 60)
                assert queue.GenerateStatus() is Status.GenerateFinished
                assert queue.RequestStatInfo().generated_token_length == 60
                engine.release_request("m", handle)
            of_samples = [[], []]
            for elements in samples[2]:
                of_samples[elements.sample_index] += elements.ids_from_generate
            assert of_samples == [expected([7], 60, 0), expected([7], 60, 1)]
            # Calls go to the one that is left.
            assert engine.get_model_info("m").name == "m"
            _, _, queue = engine.start_request("m", {"input_ids": [3]}, {"max_new_tokens": 4})
            assert tokens(queue) == expected([3], 4)


def test_resume_on_the_same_server_once_it_is_back(tmp_path):
    address = f"unix:{tmp_path}/s.sock"
    with contextlib.ExitStack() as stack:
        process, _ = stack.enter_context(server_process(address))
        engine = stack.enter_context(ClientEngine(address, reconnect_timeout=20))
        _, _handle, queue = engine.start_request("m", {"input_ids": [5]}, {"max_new_tokens": 50})
        _, stopped, interrupted = engine.start_request("m", {"input_ids": [6]}, {"max_new_tokens": 50_000})
        wait_until(lambda: queue.GeneratedLength() > 5, 5)
        process.kill()
        process.wait()
        waiting = threading.Thread(target=engine.get_model_info, args=("m",))  # calls wait
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive() and not queue.GenerateStatus().final
        engine.stop_request("m", stopped)
        assert interrupted.GenerateStatus() is Status.GenerateInterrupted
        stack.enter_context(server_process(address))  # a stale socket does not matter
        assert tokens(queue) == expected([5], 50)
        waiting.join(10)
        assert not waiting.is_alive()


def test_a_request_that_keeps_losing_its_server_is_given_up():
    """The request may be what crashes the servers, so it must not be retried for ever. A request that gains tokens in
    between may be.
    """
    slow = FakeEngine(interval=0.2)
    with serving(core=slow) as (core, address), ClientEngine(address, reconnect_timeout=20) as engine:
        _, handle, queue = engine.start_request("m", {"input_ids": [5]}, {"max_new_tokens": 10_000})
        request = engine._requests[handle]
        for _ in range(5):
            received = request.generated
            wait_until(lambda: request.generated > received, 5)
            break_connection(request)
        assert not queue.GenerateStatus().final
        core.interval = 1000
        time.sleep(0.5)  # the last step of the old interval, which may be later yet: then all is counted anew
        for _ in range(2 * MAX_LOSSES + 2):
            if not queue.GenerateStatus().final:
                break_connection(request)
        with pytest.raises(AllSparkError, match="without a new token"):
            tokens(queue)


def break_connection(request):
    """Breaks the session that a request runs in, and waits until it runs in another or has ended."""
    session = request.session
    session._call.cancel()
    wait_until(lambda: request.session is not session or request.queue.GenerateStatus().final, 10)


@pytest.mark.parametrize("inputs", [{"text": "hey"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_text_is_resumed_by_its_ids(inputs):
    """Another server might tokenize the text differently, for example because a template asks for the time."""
    slow = [FakeEngine(interval=0.02) for _ in range(2)]
    slow[1].text_offset = 1
    with serving(core=slow[0]) as (_, first), serving(core=slow[1]) as (_, second):
        with ClientEngine([first, second], reconnect_timeout=5) as engine:
            _, handle, queue = engine.start_request("m", inputs, {"max_new_tokens": 30})
            request = engine._requests[handle]
            at = [member.address for member in engine._pool.members].index(request.session.address)
            prompt = slow[at].submitted[-1].input_ids
            wait_until(lambda: queue.GeneratedLength() > 3, 5)
            break_connection(request)
            ids, text = [], ""
            for elements in queue:
                ids += elements.ids_from_generate
                text += elements.text
            assert ids == expected(prompt, 30) and text == "".join(f"<{i}>" for i in ids)
            assert slow[1 - at].submitted[-1].input_ids == prompt


@contextlib.contextmanager
def distant(address, seconds):
    """A TCP proxy to `address` that delays every byte by `delay` seconds; yields its own address."""
    host, port = address.rsplit(":", 1)
    listener = socket.create_server(("127.0.0.1", 0))

    def relay(source, target):
        line = queue_module.SimpleQueue()
        threading.Thread(target=write, args=(line, target), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                line.put((time.monotonic() + seconds, data))
        line.put((0, b""))

    def write(line, target):
        with contextlib.suppress(OSError):
            while (item := line.get())[1]:
                time.sleep(max(0.0, item[0] - time.monotonic()))
                target.sendall(item[1])
            target.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=relay, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def test_many_requests_are_resumed_in_one_round_trip():
    with serving(core=FakeEngine(interval=1000)) as (core, address), distant(address, 0.05) as far:
        with ClientEngine(far, reconnect_timeout=30) as engine, ThreadPoolExecutor(40) as pool:
            list(pool.map(lambda i: engine.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 9}), range(40)))
            requests = list(engine._requests.values())
            session = requests[0].session
            start = time.monotonic()
            session._call.cancel()
            wait_until(lambda: all(r.session is not session and r.answered.is_set() for r in requests), 30)
            assert time.monotonic() - start < 2  # 40 round trips of 0.1 s take 4
            assert len(core.submitted) == 80


def test_a_permanent_refusal_ends_a_request_at_once(served):
    core, address = served
    with ClientEngine(address, reconnect_timeout=20) as engine:
        _, handle, queue = engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 10_000})
        wait_until(lambda: queue.GeneratedLength() > 2, 5)
        core.refusal = AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "the prompt is too long")
        engine._requests[handle].session._call.cancel()
        start = time.monotonic()
        with pytest.raises(AllSparkError, match="ALLSPARK_EXCEED_LIMIT_ERROR: the prompt is too long"):
            tokens(queue)
        assert time.monotonic() - start < 5


def test_a_passing_refusal_is_waited_out(served):
    core, address = served
    with ClientEngine(address, reconnect_timeout=20) as engine:
        _, handle, queue = engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 40})
        wait_until(lambda: queue.GeneratedLength() > 2, 5)
        core.refusal = AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "the queue is full", retryable=True)
        engine._requests[handle].session._call.cancel()
        time.sleep(0.7)
        core.refusal = None
        assert tokens(queue) == expected([1], 40)


def test_no_resumption_where_the_fingerprint_differs(tmp_path):
    with server_process(f"unix:{tmp_path}/a", "one") as (a, address_a):
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(ClientEngine(address_a, reconnect_timeout=20))
            _, _handle, queue = engine.start_request("m", {"input_ids": [5]}, {"max_new_tokens": 10_000})
            queue.Get()
            a.kill()
            a.wait()
            stack.enter_context(server_process(address_a, "two"))
            with pytest.raises(AllSparkError, match="ALLSPARK_RUNTIME_ERROR: .*fingerprint differs"):
                tokens(queue)
            assert queue.GenerateStatus() is Status.GenerateInterrupted


def test_no_resumption_of_images_where_they_are_bounded_differently(tmp_path):
    """Texts continue there: their fingerprint is the same."""
    inputs = {"input_ids": [5]}, {"input_ids": [5], "images": [b"GIF89a"]}
    with server_process(f"unix:{tmp_path}/a", "one", "a") as (a, address_a):
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(ClientEngine(address_a, reconnect_timeout=20))
            started = [engine.start_request("m", each, {"max_new_tokens": 100}) for each in inputs]
            text, seen = (queue for _, _, queue in started)
            text.Get(), seen.Get()
            a.kill()
            a.wait()
            stack.enter_context(server_process(address_a, "one", "b"))
            with pytest.raises(AllSparkError, match="ALLSPARK_RUNTIME_ERROR: .*preparation or bound of images differs"):
                tokens(seen)
            assert seen.GenerateStatus() is Status.GenerateInterrupted
            tokens(text)
            assert text.GenerateStatus() is Status.GenerateFinished and text.GeneratedLength() == 100


def test_images_continue_where_they_are_bounded_alike(tmp_path):
    with server_process(f"unix:{tmp_path}/a", "one", "a") as (a, address_a):
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(ClientEngine(address_a, reconnect_timeout=20))
            _, _handle, queue = engine.start_request("m", {"input_ids": [5], "images": [b"GIF89a"]},
                                                     {"max_new_tokens": 100})
            first = list(queue.Get().ids_from_generate)
            a.kill()
            a.wait()
            stack.enter_context(server_process(address_a, "one", "a"))
            assert first + tokens(queue) == expected([5], 100)


@pytest.mark.parametrize(
    "options, text", [({"resume": False}, "resume=False"), ({"reconnect_timeout": 0.6}, "gave up after 0.6 s")]
)
def test_a_dead_server_is_a_clear_error(tmp_path, options, text):
    with server_process(f"unix:{tmp_path}/s") as (process, address):
        with ClientEngine(address, **options) as engine:
            _, handle, queue = engine.start_request("m", {"input_ids": [5]}, {"max_new_tokens": 10_000})
            queue.Get()
            process.kill()
            start = time.monotonic()
            with pytest.raises(AllSparkError, match=f"ALLSPARK_RUNTIME_ERROR: .*{text}"):
                tokens(queue)
            for call in (lambda: engine.get_as_engine_stat("m"), lambda: engine.start_request("m", {"input_ids": [1]})):
                with pytest.raises(AllSparkError, match=f"the server at {address} cannot be reached"):
                    call()
            engine.stop_request("m", handle)
            engine.release_request("m", handle)
            assert time.monotonic() - start < 6


def test_nobody_listens(tmp_path, monkeypatch):
    monkeypatch.undo()
    start = time.monotonic()
    with pytest.raises(AllSparkError, match=f"ALLSPARK_IO_ERROR: the server at unix:{tmp_path}/none cannot be reached"):
        ClientEngine(f"unix:{tmp_path}/none")
    assert time.monotonic() - start < 8
    for bad in ("nonsense", "host:0x1", "host:99999", ""):
        with pytest.raises(ValueError, match="allowed: 'host:port' or 'unix:/path'"):
            ClientEngine(bad)


# --- answers that are lost, or do not come ---


def lose_answers(monkeypatch, method):
    """Loses the next answer to `method`, so that the client cannot know whether the server obeyed."""
    call, lost = connection.Member.call, []

    def lossy(self, name, *args):
        try:
            answer = call(self, name, *args)
        except AllSparkError:
            if name != method or lost:
                raise
        if name == method and not lost:
            lost.append(True)
            raise session.Unavailable(self.address, "the answer was lost")
        return answer

    monkeypatch.setattr(connection.Member, "call", lossy)
    return lost


def test_a_lost_answer_to_install_and_release(served, monkeypatch):
    core, address = served
    with ClientEngine(address, reconnect_timeout=5) as engine:
        lost = lose_answers(monkeypatch, "InstallModel")
        assert engine.install_model(AsModelConfig("n", "/none", max_queue=3)) is AsStatus.ALLSPARK_SUCCESS and lost
        with pytest.raises(AllSparkError, match="installed already"):  # asked for twice, not repeated
            engine.install_model(AsModelConfig("n", "/none", max_queue=3))
        lost.clear()
        with pytest.raises(AllSparkError, match="installed already"):  # another model has that name
            engine.install_model(AsModelConfig("n", "/other"))
        lost = lose_answers(monkeypatch, "ReleaseModel")
        assert engine.release_model("n") is AsStatus.ALLSPARK_SUCCESS and lost
        assert [model.name for model in core.list_models()] == ["m"]
        with pytest.raises(AllSparkError, match="no model named 'n'"):
            engine.release_model("n")


def test_a_server_that_never_answers_a_request(served, monkeypatch):
    core, address = served
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.3)
    with ClientEngine(address, resume=False) as engine:
        core.submit_seconds = 2.0
        start = time.monotonic()
        with pytest.raises(AllSparkError, match=f"the server at {address} .*no answer to a request within 0.3 s"):
            engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 10_000})
        assert time.monotonic() - start < 1.5
        wait_until(lambda: len(core.submitted) == 1 and not core.handles, 5)  # it is told to forget it


def test_a_server_that_does_not_stop_a_request(served, monkeypatch):
    core, address = served
    monkeypatch.setattr(client_module, "STOP_SECONDS", 0.3)
    core.deaf = True
    with ClientEngine(address) as engine:
        _, handle, queue = engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 10_000})
        wait_until(lambda: queue.GeneratedLength() > 2, 5)
        assert engine.stop_request("m", handle) is AsStatus.ALLSPARK_SUCCESS
        assert queue.GenerateStatus() is Status.GenerateInterrupted
        got = tokens(queue)
        assert got == expected([1], len(got)) and len(got) > 2


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(AllSparkError, match=f"the server at {address} cannot be reached"):
            ClientEngine(address)
        assert time.monotonic() - start < 8


def test_pool_goes_on_with_the_members_there_are(served, tmp_path):
    _core, address = served
    with ClientEngine([f"unix:{tmp_path}/none", address], reconnect_timeout=1) as engine:
        _, _, queue = engine.start_request("m", {"input_ids": [3]}, {"max_new_tokens": 4})
        assert tokens(queue) == expected([3], 4)
        assert engine.get_as_engine_stat("m").total_token == 8192
        with pytest.raises(AllSparkError, match="none cannot be reached.*pool member"):
            engine.install_model(AsModelConfig("other", "/none"))


def test_address_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("ALLSPARK_ADDRESS", f" {served[1]} ")
    with ClientEngine() as engine:
        assert engine.list_models()[0].name == "m"
