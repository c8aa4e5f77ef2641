"""The C++ client (native/client), as an installed CMake package, in front of fake and real groups."""
from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from allspark_client import AsModelConfig, ClientEngine, TlsConfig, convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.local_group import SelfStartedGroup
from allspark_launch.group.background import shipped_model
from allspark_server.access import Access
from support.certificates import make_certificate
from support.fake_engine import FakeEngine
from support.fake_service import expected, server_process, serving, wait_until
from support.pictures import encoded, pixels
from support.processes import ranks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]     # building takes a minute or two

TOKENS = "generate a-token-for-generating\n"


class Client:
    """A running driver: what it was asked for, and what it says."""

    def __init__(self, built: Path, address: str, *words: str):
        self.process = subprocess.Popen([built / "driver", address, *words], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def going(self) -> None:
        """Waits until every request has its first tokens."""
        line = self.process.stdout.readline()
        assert line == "going\n", line + self.process.stderr.read()

    def results(self, status: int = 0) -> list[dict]:
        """The lines of a driver that has ended."""
        out, self.errors = self.process.communicate(timeout=120)
        assert self.process.returncode == status, out + self.errors
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture()
def client(built):
    """Starts drivers, and ends them."""
    with contextlib.ExitStack() as stack:
        def start(address: str, *words: str) -> Client:
            found = Client(built, address, *words)
            stack.callback(found.process.communicate)
            stack.callback(found.process.kill)
            return found

        yield start


@contextlib.contextmanager
def cuttable(address: str):
    """A TCP proxy to `address`; yields its own address, and a function that breaks its connections and ends it."""
    host, port = address.rsplit(":", 1)
    listener, ends = socket.create_server(("127.0.0.1", 0)), []

    def relay(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=relay, args=pair, daemon=True).start()

    def cut():
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", cut
    finally:
        cut()


# --- requests ---

def test_tokens_samples_and_text(client, served):
    core, address = served
    plain, samples, text, chat = client(address, "max=30", "prompt=1,2", "n=2", "prompt=3", "n=1", "text=hey",
                                        "chat=you").results()
    assert plain["ids"] == [expected([1, 2], 30)] and plain["text"] == ""
    assert samples["ids"] == [expected([3], 30, 0), expected([3], 30, 1)]
    assert text["ids"] == [expected(list(b"hey"), 30)] and text["text"] == "".join(f"<{i}>" for i in text["ids"][0])
    assert len(chat["ids"][0]) == 30
    for answer, length in ((plain, 30), (samples, 60), (text, 30)):
        assert (answer["status"], answer["reason"], answer["error"]) == ("GenerateFinished", "length", "")
        assert answer["length"] == answer["told"] == length
    seeds = [spec.config.seed for spec in core.submitted]
    assert None not in seeds and len(set(seeds)) == 4  # fixed before they are sent
    wait_until(lambda: not core.handles, 5)


def test_images(client, tmp_path):
    """Of texts, ids and chats; another server gets them again when the first one is lost."""
    given = [encoded(pixels(), form) for form in ("PNG", "JPEG", "WebP")]
    for i, content in enumerate(given):
        (tmp_path / str(i)).write_bytes(content)
    words = [f"image={tmp_path / str(i)}" for i in range(3)]
    core = FakeEngine(0.005, sees_images=True)
    with serving(core=core) as (_, address), cuttable(address) as (proxy, cut):
        text, ids, chat = client(address, "max=5", *words, "text=look", "prompt=1,2", "chat=what?").results()
        assert text["ids"] == [expected(list(b"look"), 5)] and ids["ids"] == [expected([1, 2], 5)]
        assert chat["status"] == "GenerateFinished"
        images = [convert.Image(content, 0, i) for i, content in enumerate(given)]
        assert [spec.images for spec in core.submitted] == [images] * 3
        running = client(f"{proxy},{address}", "max=200", "going=5", *words, "chat=what?")
        running.going()
        cut()
        answer, = running.results()
        assert answer["status"] == "GenerateFinished" and len(answer["ids"][0]) == 200
        assert core.submitted[-1].images == images
    with serving() as (_, address):
        refused = client(address, *words, "text=look")
        assert refused.results(1) == [] and "takes no images" in refused.errors


def test_a_request_is_stopped_or_dropped(client, served):
    core, address = served
    stopped, other = client(address, "max=100000", "stop_after=5", "prompt=1", "stop_after=0", "drop_after=5",
                            "prompt=2", "max=40", "drop_after=0", "prompt=3").results()
    ids = stopped["ids"][0]
    assert (stopped["status"], stopped["reason"], stopped["error"]) == ("GenerateInterrupted", "interrupted", "")
    assert 5 <= len(ids) < 1000 and ids == expected([1], len(ids))
    assert other["ids"] == [expected([3], 40)]
    wait_until(lambda: not core.live and not core.handles, 5)


def test_a_client_that_ends_cancels_its_requests(client, served):
    core, address = served
    found = client(address, "max=100000", "going=3", "prompt=1", "prompt=2")
    found.going()
    assert len(core.live) == 2
    found.process.kill()
    wait_until(lambda: not core.live and not core.handles, 5)


def test_errors(client, served):
    _, address = served
    (failed,) = client(address, "max=30", "prompt=999").results()
    assert failed["status"] == "InternalError" and failed["error"].startswith("ALLSPARK_")
    assert failed["ids"] == [expected([999], 3)]  # what came before is read first
    wrong = client(address, "temperature=-1", "prompt=1")
    wrong.results(2)
    assert "invalid argument: temperature=-1" in wrong.errors
    full = client(address, "max=30", "prompt=" + ",".join(["1"] * 5000))
    full.results(1)
    assert "ALLSPARK_" in full.errors and "5000" in full.errors
    for given, text in (("nowhere", "address='nowhere' is not known"), (f"{address},{address}", "twice")):
        bad = client(given)
        bad.results(2)
        assert text in bad.errors
    gone = client("127.0.0.1:1")
    gone.results(1)
    assert "ALLSPARK_IO_ERROR: the server at 127.0.0.1:1 cannot be reached" in gone.errors


def test_threads_share_an_engine(client, served):
    core, address = served
    words = [f"prompt={i}" for i in range(30)]
    words[10:10] = ["stop_after=4"]
    words[21:21] = ["stop_after=0", "drop_after=4"]
    answers = client(address, "threads=1", "max=25", *words).results()
    assert [answer["ids"] for answer in answers[:10]] == [[expected([i], 25)] for i in range(10)]
    for i, answer in enumerate(answers[10:20], 10):
        assert answer["ids"] == [expected([i], len(answer["ids"][0]))] and len(answer["ids"][0]) >= 4
    assert len(answers) == 20
    wait_until(lambda: not core.handles, 5)


# --- tokens and TLS ---

def test_tokens_and_tls(client, tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path)
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    access = Access(token_file=str(path), tls=TlsConfig(cert=certificate["cert"], key=certificate["key"]))
    with serving(access=access) as (_, address):
        words = ["max=5", "prompt=1", f"ca={certificate['ca']}"]
        (answer,) = client(address, *words, "token=a-token-for-generating").results()
        assert answer["ids"] == [expected([1], 5)]
        refused = client(address, *words, "token=another")
        refused.results(1)
        assert "ALLSPARK_REQUEST_DENIED" in refused.errors
        monkeypatch.setenv("ALLSPARK_TOKEN_FILE", str(path))
        (answer,) = client(address, *words).results()
        assert answer["ids"] == [expected([1], 5)]
        plain = client(address, "max=5", "prompt=1")
        plain.results(1)
        assert "cannot be reached" in plain.errors
        named = client(address, *words, "server_name=elsewhere.example")
        named.results(1)
        assert "cannot be reached" in named.errors
    monkeypatch.delenv("ALLSPARK_TOKEN_FILE")
    with serving(access=Access(tls=TlsConfig(**certificate))) as (_, address):
        (answer,) = client(address, *words, f"cert={certificate['cert']}", f"key={certificate['key']}").results()
        assert answer["ids"] == [expected([1], 5)]
        client(address, *words).results(1)


# --- servers that are lost ---

def test_requests_continue_on_another_member(client, tmp_path):
    with server_process(f"unix:{tmp_path}/a") as (a, first), server_process(f"unix:{tmp_path}/b") as (_, second):
        found = client(f"{first},{second}", "max=60", "going=5", *(f"prompt={i}" for i in range(6)), "n=2", "prompt=7")
        found.going()
        a.kill()
        answers = found.results()
        assert [answer["ids"] for answer in answers[:6]] == [[expected([i], 60)] for i in range(6)]
        assert answers[6]["ids"] == [expected([7], 60, 0), expected([7], 60, 1)]
        assert [answer["told"] for answer in answers] == [60] * 6 + [120]
        assert found.errors.count(f"a request continues at {second}") in range(1, 7)  # they were spread over both


def test_requests_continue_on_the_same_server_once_it_is_back(client, tmp_path):
    address = f"unix:{tmp_path}/s"
    with server_process(address) as (first, _):
        found = client(address, "max=50", "going=5", "prompt=5")
        found.going()
        first.kill()
        first.wait()
    with server_process(address):
        (answer,) = found.results()
        assert answer["ids"] == [expected([5], 50)] and "continues at" in found.errors


def test_another_fingerprint_does_not_continue_it(client, tmp_path):
    with server_process(f"unix:{tmp_path}/a") as (a, first):
        with server_process(f"unix:{tmp_path}/b", "another") as (b, second):
            found = client(f"{first},{second}", "max=200", "timeout=20", "going=5", "prompt=5")
            found.going()
            with ClientEngine(first) as engine:
                busy = engine.list_models()[0].load
            (a if busy else b).kill()
            (answer,) = found.results()
            assert answer["status"] == "InternalError" and "gave up after 20" in answer["error"], answer
            assert "fingerprint differs" in answer["error"] or "cannot be reached" in answer["error"]
            assert answer["ids"] == [expected([5], len(answer["ids"][0]))] and len(answer["ids"][0]) < 200


def test_a_server_that_comes_back_with_another_fingerprint_interrupts_it(client, tmp_path):
    address = f"unix:{tmp_path}/s"
    with server_process(address) as (first, _):
        found = client(address, "max=200", "going=5", "prompt=5")
        found.going()
        first.kill()
        first.wait()
    with server_process(address, "another"):
        (answer,) = found.results()
        assert (answer["status"], answer["reason"]) == ("GenerateInterrupted", "interrupted")
        assert f"{address} would not continue it identically (its fingerprint differs)" in answer["error"]


def test_without_resumption_they_fail_at_once(client, tmp_path):
    with server_process(f"unix:{tmp_path}/a") as (a, first), server_process(f"unix:{tmp_path}/b") as (b, second):
        found = client(f"{first},{second}", "resume=0", "max=200", "going=5", "prompt=5")
        found.going()
        a.kill()
        b.kill()
        (answer,) = found.results()
        assert answer["status"] == "InternalError" and "resume=false" in answer["error"]


@pytest.mark.parametrize("prompt", ["text=hey", "chat=you"])
def test_text_is_resumed_by_its_ids(client, prompt):
    """Another server might tokenize the text differently, for example because a template asks for the time."""
    cores = [FakeEngine(interval=0.02) for _ in range(2)]
    cores[1].text_offset = 1
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(cuttable(stack.enter_context(serving(core=core))[1])) for core in cores]
        found = client(",".join(address for address, _ in proxies), "max=60", "going=5", prompt)
        found.going()
        at = 0 if cores[0].submitted else 1
        ids = cores[at].submitted[-1].input_ids
        proxies[at][1]()
        (answer,) = found.results()
        assert answer["ids"] == [expected(ids, 60)] and answer["text"] == "".join(f"<{i}>" for i in answer["ids"][0])
        assert cores[1 - at].submitted[-1].input_ids == ids


def test_a_draining_member_gets_no_new_requests_but_lost_ones(client):
    """It may be the last member that can continue them."""
    with serving(core=FakeEngine(0.02)) as (a, first), serving(core=FakeEngine(0.02)) as (b, second), \
            cuttable(second) as (cut_second, cut), ClientEngine(first) as engine:
        info = engine._pool.members[0].call("Drain", pb.DrainRequest(), pb.ServerInfo)
        assert info.draining
        found = client(f"{first},{cut_second}", "max=60", "going=5", *(f"prompt={i}" for i in range(3)))
        found.going()
        assert len(a.submitted) == 0 and len(b.submitted) == 3
        cut()
        assert [answer["ids"] for answer in found.results()] == [[expected([i], 60)] for i in range(3)]
        assert len(a.submitted) == 3 and all(spec.resumed for spec in a.submitted)
        alone = client(first, "timeout=0.5", "max=5", "prompt=1")
        alone.results(1)
        assert "takes no new requests" in alone.errors and "gave up after" in alone.errors


def test_a_new_request_goes_to_a_member_that_is_left(client, tmp_path):
    with server_process(f"unix:{tmp_path}/a") as (a, first), server_process(f"unix:{tmp_path}/b") as (_, second):
        a.kill()
        a.wait()
        (answer,) = client(f"{first},{second}", "max=5", "prompt=1").results()
        assert answer["ids"] == [expected([1], 5)]
        members = client(f"{first},{second}").results()
        assert members == [{"address": first, "connected": 0, "models": 0},
                           {"address": second, "connected": 1, "models": 1}]


# --- real groups ---

def test_log_probabilities_are_those_of_the_python_client(client, group):
    (answer,) = client(group, "max=20", "seed=3", "logprobs=2", "prompt=5,6,7").results()
    with ClientEngine(group) as engine:
        _, _, queue = engine.start_request("fable", {"input_ids": [5, 6, 7]},
                                           {"max_new_tokens": 20, "seed": 3, "logprobs": True, "top_logprobs": 2})
        ids, logprobs, tops = [], [], []
        for elements in queue:
            ids += elements.ids_from_generate
            logprobs += elements.token_logprobs_list
            tops += [[i for i, _ in pairs] for pairs in elements.log_probs_list]
    assert answer["ids"] == [ids] and answer["tops"] == tops
    assert answer["logprobs"] == pytest.approx(logprobs, rel=1e-5)


def test_a_model_on_demand_is_loaded(client, monkeypatch):
    monkeypatch.setenv("AS_NUMA_NUM", "1")
    group = SelfStartedGroup()
    try:
        address = group.wait(60)[0]
        with ClientEngine(address) as engine:
            engine.install_model(AsModelConfig("fable", str(shipped_model()), on_demand=True))
            engine.start_model("fable")
            assert engine.list_models()[0].on_demand
            (answer,) = client(address, "model=fable", "max=5", "text=Once").results()
            assert len(answer["ids"][0]) == 5 and answer["text"]
            assert engine.list_models()[0].running
    finally:
        group.stop()


def test_names_of_dashinfer(built, tmp_path, monkeypatch):
    monkeypatch.setenv("AS_NUMA_NUM", "1")
    group = SelfStartedGroup()
    try:
        done = subprocess.run([built / "dashinfer", group.wait(60)[0], shipped_model()], capture_output=True, text=True,
                              timeout=120)
        assert done.returncode == 0 and " " in done.stdout.strip(), done.stdout + done.stderr
    finally:
        group.stop()


def test_a_killed_group_is_continued_identically_by_another(client, monkeypatch):
    """Two real groups; the one that computes a request with eight samples is killed in the middle, with all its
    processes.
    """
    monkeypatch.setenv("AS_NUMA_NUM", "1")
    groups = [SelfStartedGroup(), SelfStartedGroup()]
    try:
        addresses = [group.wait(60)[0] for group in groups]
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(ClientEngine(address)) for address in addresses]
            for engine in engines:
                engine.install_model(AsModelConfig("fable", str(shipped_model())))
                engine.start_model("fable")
            config = {"max_new_tokens": 900, "seed": 11, "n": 8, "early_stopping": False}
            _, _, queue = engines[0].start_request("fable", {"input_ids": [5, 6, 7]}, config)
            undisturbed = [[] for _ in range(8)]
            for elements in queue:
                undisturbed[elements.sample_index] += elements.ids_from_generate
            found = client(",".join(addresses), "max=900", "seed=11", "n=8", "early_stopping=0", "going=80",
                           "prompt=5,6,7")
            found.going()
            loads = [engine.list_models()[0].load for engine in engines]
            assert sorted(loads) == [0, 8]
            victim = groups.pop(loads.index(8))
            ranks = ranks_of(victim._process.pid)
            victim._process.kill()
            for rank in ranks:
                rank.kill()
            victim.stop()
            (answer,) = found.results()
            assert answer["ids"] == undisturbed and len(undisturbed[7]) == 900
            assert answer["told"] == 7200
            assert f"a request continues at {addresses[loads.index(0)]}" in found.errors
    finally:
        for group in groups:
            group.stop()
