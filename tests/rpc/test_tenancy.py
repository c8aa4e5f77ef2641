"""What one tenant does must not harm others: limits, fair use of threads, and what may be learnt of others."""

from __future__ import annotations

import threading
import time

import pytest

from allspark_client import AllSparkError, AsStatus, ClientEngine
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.config import GenerateConfig
from allspark_client.request import RequestSpec
from allspark_client.session import Unavailable
from allspark_client.types import ModelInfo
from allspark_server.access import Access, Role
from allspark_server.cache import scope
from allspark_server.rpc import methods
from allspark_server.rpc.client_limits import ClientLimits
from allspark_server.rpc.request_sizes import check_sizes
from allspark_server.rpc.service import Service
from allspark_server.rpc.tenant_threads import TenantThreads
from allspark_server.rpc.tickets import Tickets
from allspark_server.rpc.wire_format import MAX_NUMBERS
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, tokens, wait_until

pytestmark = pytest.mark.usefixtures("short_first_contact")

TOKENS = {"one": Role.GENERATE, "two": Role.GENERATE, "gate": Role.DOOR}


class SlowInput:
    """Makes the engine's input stage wait, for texts that begin with "slow", until `go` is set."""

    def __init__(self, core: FakeEngine):
        self.go, self.waiting, self._lock, self._tokenize = threading.Event(), 0, threading.Lock(), None
        stage = self.stage = core._models["m"].input
        self._tokenize, stage._text_ids = stage._text_ids, self.tokenize

    def tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        if spec.text is not None and spec.text.startswith("slow"):
            with self._lock:
                self.waiting += 1
            self.go.wait(5)
        return self._tokenize(spec, bare)


@pytest.fixture
def slow():
    core = FakeEngine(0.001)
    with serving(access=Access(TOKENS), core=core) as (_, address):
        slow = SlowInput(core)
        yield slow, address
        slow.go.set()


def test_limits_count_samples():
    limits = ClientLimits(total=10, of_tenant=6)
    many = {"max_new_tokens": 10000, "early_stopping": False}
    with serving(access=Access(TOKENS), limits=limits, core=FakeEngine(0.01)) as (_, address):
        with ClientEngine(address, token="one") as first, ClientEngine(address, token="two") as second:
            handle = first.start_request("m", {"input_ids": [1]}, many | {"n": 4})[1]
            with pytest.raises(AllSparkError, match="this client has 4 requests .* n=3 counts as 3") as caught:
                first.start_request("m", {"input_ids": [1]}, many | {"n": 3})
            assert caught.value.retryable
            with pytest.raises(AllSparkError, match="and may have 6 at once; n=7 counts as 7") as caught:
                second.start_request("m", {"input_ids": [1]}, many | {"n": 7})
            assert not caught.value.retryable, "it can never be taken"
            second.start_request("m", {"input_ids": [1]}, many | {"n": 6})
            first.release_request("m", handle)
            wait_until(lambda: limits._taken.total() == 6, 5)


def test_unary_calls_are_counted_until_they_are_answered(slow, monkeypatch):
    """Otherwise any number of large messages would wait in memory for a thread."""
    slow, address = slow
    read, parse = [], methods.Methods.parse
    monkeypatch.setattr(methods.Methods, "parse", lambda self, kind, data, context: (
        read.append(kind.DESCRIPTOR.name), parse(self, kind, data, context))[1])
    with ClientEngine(address, token="one") as client:
        threads = [threading.Thread(target=client.tokenize, args=("m", {"text": "slow"})) for _ in range(40)]
        for thread in threads:
            thread.start()
        wait_until(lambda: slow.waiting == 2, 5)
        time.sleep(0.2)
        assert read.count("TokenizeRequest") == methods._AT_ONCE
        slow.go.set()
        for thread in threads:
            thread.join()
    assert read.count("TokenizeRequest") == 40


def test_starts_of_a_session_run_concurrently(slow):
    """A short prompt does not wait until the one before it is tokenized: an HTTP server has one session for all."""
    slow, address = slow
    with ClientEngine(address, token="gate") as client:
        def start(tenant: str, text: str):
            request = client._register(RequestSpec("m", text=text, tenant=tenant))
            request.spec.config.max_new_tokens = 2
            session = client._pool.members[0].session()
            session.send(request)
            return request

        held = [start("greedy", "slow") for _ in range(6)]
        wait_until(lambda: slow.waiting == 2, 5)
        time.sleep(0.1)
        assert slow.waiting == 2, "a tenant never has all threads"
        quick = start("other", "quick")
        assert quick.answered.wait(2) and not held[0].answered.is_set()
        assert tokens(quick.queue) == expected(list(b"quick"), 2)
        slow.go.set()
        assert all(tokens(request.queue) == expected(list(b"slow"), 2) for request in held)


@pytest.fixture
def small_allowance(monkeypatch):
    monkeypatch.setattr(methods, "BURST", 100_000)
    monkeypatch.setattr(methods, "RATE", 200_000)


def test_the_allowance_of_bytes_is_the_tenants(small_allowance, slow):
    """One that sends too much waits, then is refused; others of the same session do not wait."""
    _, address = slow
    with ClientEngine(address, token="gate") as client:
        def start(tenant: str, size: int):
            request = client._register(RequestSpec("m", text="x" * size, tenant=tenant))
            client._pool.members[0].session().send(request)
            return request

        greedy = [start("greedy", 60_000) for _ in range(40)]
        began = time.monotonic()
        assert start("other", 10).answered.wait(2) and time.monotonic() - began < 1
        wait_until(lambda: greedy[-1].answered.is_set(), 5)
        assert greedy[-1].refusal.retryable and "has sent more than" in str(greedy[-1].refusal)
        assert not greedy[4].answered.is_set(), "it waits for its turn"
        for request in greedy:
            client._pool.members[0].session().release(request)


def test_a_tenants_sessions_share_its_allowance(small_allowance, slow):
    _, address = slow
    with ClientEngine(address, token="one") as first, ClientEngine(address, token="one") as second:
        def seconds(client: ClientEngine, size: int) -> float:
            began = time.monotonic()
            with pytest.raises(AllSparkError) if size > 10_000 else threading.Lock():
                client.start_request("m", {"text": "x" * size}, {"max_new_tokens": 1})
            return time.monotonic() - began

        seconds(second, 10)
        seconds(first, 200_000)     # half a second too much
        seconds(second, 10)         # is read at once, and then the session waits
        assert seconds(second, 10) > 0.2


def test_threads_take_tenants_in_turn():
    threads, order, go = TenantThreads(2, 1, "test"), [], threading.Event()
    first = [threads.submit("a", lambda i=i: (go.wait(5), order.append(f"a{i}"))) for i in range(3)]
    second = [threads.submit("b", lambda i=i: order.append(f"b{i}")) for i in range(3)]
    for future in second:
        future.result(5)
    assert order == ["b0", "b1", "b2"], "a tenant has one of two threads"
    go.set()
    for future in first:
        future.result(5)
    assert order[3:] == ["a0", "a1", "a2"] and threads._free == 2 and not threads._running and not threads._waiting

    def panics():
        raise BaseException("a panic")

    with pytest.raises(RuntimeError, match="BaseException: a panic"):
        threads.submit("a", panics).result(5)
    block = threading.Event()
    running, waiting = (threads.submit("a", lambda: block.wait(5)) for _ in range(2))
    threading.Timer(0.05, block.set).start()
    threads.shutdown()
    assert running.result(5) and waiting.cancelled()


def test_grammars_of_one_tenant_do_not_keep_others_waiting(slow):
    """Two of four threads are the most that one has, and what is compiled already needs none of them."""
    slow, address = slow
    stage = slow._tokenize.__self__
    guided = {"response_format": {"type": "json_object"}, "max_new_tokens": 1}
    stage._guidances = lambda spec, form, tail, eos, histories: [None] * len(histories)
    with ClientEngine(address, token="one") as greedy, ClientEngine(address, token="two") as other:
        client = other.start_request("m", {"text": "quick"}, guided)[2]
        assert tokens(client) == expected(list(b"quick"), 1)
        for i in range(6):
            config = {"response_format": {"type": "regex", "regex": f"{i}"}}
            request = greedy._register(RequestSpec("m", text="slow"))
            request.spec.config.update(config)
            greedy._pool.members[0].session().send(request)
        wait_until(lambda: slow.waiting == 2, 5)
        began = time.monotonic()
        for config in (guided, guided | {"response_format": {"type": "regex", "regex": "b"}}):
            assert tokens(other.start_request("m", {"text": "quick"}, config)[2])
        assert time.monotonic() - began < 2 and slow.waiting == 2


# --- what a message may hold ---


def test_a_vocabulary_is_taken_from_administrators_alone():
    config = {"vocab": {"a": 1}, "response_format": {"type": "json_object"}}
    roles = TOKENS | {"rule": Role.ADMIN}
    with serving(access=Access(roles)) as (_, address):
        for token in TOKENS:
            with ClientEngine(address, token=token) as client:
                with pytest.raises(AllSparkError, match="REQUEST_DENIED: vocab needs the role admin; .* uses the"):
                    client.start_request("m", {"input_ids": [1]}, config)
        with ClientEngine(address, token="rule") as client:
            with pytest.raises(AllSparkError, match="no tokenizer.json"):   # it came that far
                client.start_request("m", {"input_ids": [1]}, config)
            config["vocab"] = {str(i): 1 for i in range(2000)}
            with pytest.raises(ValueError, match="vocab has 2000 tokens; allowed: at most 1000"):
                client.start_request("m", {"input_ids": [1]}, config)


def test_a_panic_of_a_library_is_an_error_of_its_request():
    core = FakeEngine()

    class Panic(BaseException):
        """As pyo3's."""

    def panics(spec, sink, dependency=None):
        raise Panic("assertion failed")

    core.submit = panics
    with serving(core=core) as (_, address), ClientEngine(address) as client:
        with pytest.raises(AllSparkError, match="UNKNOWN_ERROR: the request ended with Panic"):
            client.start_request("m", {"input_ids": [1]})


@pytest.mark.parametrize("fields, text", [
    ({"input_ids": pb.TokenIds(ids=[1] * 5000)}, "the prompt has 5000 tokens; engine_max_length="),
    ({"generated": [1] * 5000}, "generated has 5000 tokens; allowed: at most "),
    ({"samples": [pb.TokenIds()] * 5000}, "samples has 5000 samples; allowed: at most 1024"),
    ({"config": pb.GenerateConfig(bad_words_ids=[pb.TokenIds()] * 5000)}, "bad_words_ids has 5000 words; allowed: "),
    ({"config": pb.GenerateConfig(bad_words_ids=[pb.TokenIds(ids=[1] * 500)])}, r"bad_words_ids\[0\] has 500 ids"),
    ({"config": pb.GenerateConfig(response_format_json=" " * (2 << 20))}, "response_format has 2097152 bytes as JSON"),
    ({"chat_options": pb.ChatOptions(tools_json=" " * (2 << 20))}, "tools has 2097152 bytes as JSON; allowed: at mo"),
])
def test_lists_that_no_model_can_use_are_refused_by_their_length(fields, text):
    """Before each item becomes a Python object."""
    request = pb.GenerateRequest(model="m", **fields)
    with pytest.raises((ValueError, AllSparkError), match=text):
        check_sizes(request, ModelInfo("m", vocab_size=1000, max_length=2048), Role.GENERATE)


def test_json_is_counted_over_all_fields():
    """What is parsed later, under the interpreter lock. A text that ends within a string does not hide the next."""
    message = pb.ChatMessage(json='{"role": "user", "content": [' + "[" * 100 + "]" * 100 + "]}")
    info = ModelInfo("m", vocab_size=1000, max_length=2048)
    for options in ({}, {"chat_options": pb.ChatOptions(tools_json='"')}):
        request = pb.GenerateRequest(model="m", chat=pb.Chat(messages=[message] * 160), **options)
        check_sizes(request, info, Role.GENERATE)
        request.chat.messages.extend([message] * 10)
        with pytest.raises(ValueError, match=r"messages\[16\d\]: the fields of JSON have more than the 16384 arr"):
            check_sizes(request, info, Role.GENERATE)


@pytest.mark.parametrize("fields, kind", [
    ({"text": "x" * 101}, "a text of 101 characters: more than the 100"),
    ({"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 201)] * 2)}, "a chat of 402 .* than the 400"),
])
def test_characters_are_counted_before_anything_is_made_of_them(fields, kind):
    info = ModelInfo("m", vocab_size=1000, max_length=50, max_characters=100)
    with pytest.raises(AllSparkError, match=f"{kind} that can make 50 tokens .engine_max_length of model 'm'"):
        check_sizes(pb.GenerateRequest(model="m", **fields), info, Role.GENERATE)


def test_a_rich_message_is_refused_alone():
    """The session, which may carry other tenants' requests, continues. An administrator's message is parsed."""
    with serving(access=Access({**TOKENS, "root": Role.ADMIN}), core=FakeEngine(0.001)) as (_, address):
        def refused(client: ClientEngine, text: str) -> None:
            request = client._register(RequestSpec("m", input_ids=[1], generated=[1] * (MAX_NUMBERS + 1)))
            client._pool.members[0].session().send(request)
            assert request.answered.wait(5) and text in str(request.refusal)

        with ClientEngine(address, token="gate") as client:
            live = client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 150, "early_stopping": False})[2]
            refused(client, "more than 1048576 numbers (counted up to start.request.generated)")
            assert len(tokens(live)) == 150
        with ClientEngine(address, token="root") as client:
            refused(client, "generated has 1048577 tokens; allowed: at most")


def test_time_of_refused_requests_counts(slow):
    """It costs the tenant who sends them, and no other; what is accepted costs its bytes alone."""
    slow, address = slow
    slow.go.set()
    with ClientEngine(address, token="one") as one, ClientEngine(address, token="two") as two:
        def refused(text: str) -> float:
            began = time.monotonic()
            with pytest.raises(AllSparkError, match="takes long"):
                one.start_request("m", {"text": text}, {"max_new_tokens": 1})
            return time.monotonic() - began

        def tokenize(spec: RequestSpec, bare: bool) -> list[int]:
            if spec.text.startswith("slow"):
                time.sleep(0.3)
            if spec.text.startswith("slow refused"):
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "it takes long")
            return [1, 2]

        slow.stage._text_ids = tokenize
        for _ in range(3):      # 0.3 s each, which count as 19 MiB
            one.start_request("m", {"text": "slow"}, {"max_new_tokens": 1})
        refused("slow refused")
        one.start_request("m", {"text": "quick"}, {"max_new_tokens": 1})    # is read at once; then the session waits
        began = time.monotonic()
        two.start_request("m", {"text": "quick"}, {"max_new_tokens": 1})
        assert time.monotonic() - began < 1
        one.start_request("m", {"text": "quick"}, {"max_new_tokens": 1})
        assert time.monotonic() - began > 1


# --- what a tenant learns of others ---


@pytest.mark.parametrize("share", [False, True])
def test_prefixes_are_a_tenants_own_unless_shared(share):
    prompt = list(range(1, 200))
    with serving(access=Access(TOKENS), core=FakeEngine(0.001), share_prefixes=share) as (core, address):
        def cached(token: str, tenant: str = "", **config) -> int:
            with ClientEngine(address, token=token) as client:
                spec = RequestSpec("m", input_ids=prompt, tenant=tenant)
                spec.config.update({"max_new_tokens": 2, **config})
                request = client._register(spec)
                client._submit(request)
                return next(iter(request.queue)).prefix_cache_len

        assert cached("one") == 0 and cached("one") > 100
        assert (cached("two") > 100) is share
        assert (cached("gate", "acme") > 100) is share and cached("gate", "acme") > 100
        assert (cached("gate", "other") > 100) is share
        assert cached("one", cache_salt="s") == 0
        assert (cached("gate", "http:1.2.3.4") > 100) is share and cached("gate", "http:1.2.3.5") > 100
        assert len(core._models["m"].scheduler.prefix_cache)


def test_without_tokens_all_clients_share_prefixes():
    prompt, found = list(range(1, 200)), []
    with serving(core=FakeEngine(0.001)) as (_, address):
        for _ in range(2):
            with ClientEngine(address) as client:
                queue = client.start_request("m", {"input_ids": prompt}, {"max_new_tokens": 2})[2]
                found.append(next(iter(queue)).prefix_cache_len)
    assert found[0] == 0 and found[1] > 100


def test_scopes_do_not_collide():
    tenants, salts = ("", "a", "a b"), ("", "s", "\0", "\0adapter d s", scope("s", "", "a"))
    made = [scope(salt, adapter, tenant) for salt in salts for adapter in ("", "d") for tenant in tenants]
    assert len(set(made)) == len(made)
    assert scope("") == "" and scope("s") == "s", "as before"


# --- claims of resumed requests ---


def claim(tickets: Tickets, ticket: bytes, deaths: int = 1, tenant: str = "a", **changes) -> tuple[bool, int, bool]:
    """What is believed of a request that was resumed with this ticket: (resumed, deaths, proven)."""
    spec, request = asked(tenant, **changes)
    spec.resumed, spec.deaths, request.ticket = True, deaths, ticket
    tickets.believe(spec, request)
    return spec.resumed, spec.deaths, spec.proven


def asked(tenant: str = "a", ids=(1, 2), **config) -> tuple[RequestSpec, pb.GenerateRequest]:
    return (RequestSpec("m", input_ids=list(ids), tenant=tenant),
            pb.GenerateRequest(model="m", config=pb.GenerateConfig(seed=5, **config)))


def test_a_ticket_proves_one_loss_more_than_its_server_knew(monkeypatch):
    first, second, stranger = (Tickets(Access(tokens)) for tokens in (TOKENS, TOKENS, TOKENS | {"new": Role.READ}))
    spec, request = asked()
    ticket = first.issue(spec, request)
    unproven = (False, 1, False)
    assert claim(second, ticket) == claim(second, ticket, deaths=2) == (True, 1, True)
    assert claim(first, ticket, deaths=2) == (True, 0, True), "this server was not lost"
    assert claim(stranger, ticket, deaths=2) == unproven
    assert claim(second, b"") == claim(second, ticket[:-1] + b"x") == claim(second, b"x" * len(ticket)) == unproven
    assert claim(second, ticket, tenant="b") == claim(second, ticket, ids=(1, 3)) == unproven
    assert claim(second, ticket, max_new_tokens=5) == unproven
    raised = bytearray(ticket)
    raised[9] += 1
    assert claim(second, bytes(raised), deaths=2) == unproven
    spec, request = asked()
    spec.deaths = 1
    assert claim(first, second.issue(spec, request), deaths=2) == (True, 2, True)
    now = time.time()
    monkeypatch.setattr("allspark_server.rpc.tickets.time.time", lambda: now + 5000)
    assert claim(second, ticket) == unproven, "it is too old"


def test_tickets_outlive_a_change_of_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("allspark_server.access.TOKEN_LOOK_SECONDS", 0.0)
    file = tmp_path / "tokens"
    file.write_text("admin one\ngenerate two\n")
    tickets = Tickets(Access(token_file=file))
    ticket = tickets.issue(*asked())
    file.write_text("admin other\ngenerate two\n")
    assert claim(tickets, ticket)[2] and tickets.issue(*asked())[18:] != ticket[18:]


def test_who_says_that_a_request_was_resumed_is_not_believed(tmp_path):
    """A drain lets pass what another server has accepted, once, and nothing that a client made up."""
    services = {}
    for name in "ab":
        core = FakeEngine(0.01)
        services[name] = Service(core, [f"unix:{tmp_path}/{name}"], access=Access(TOKENS)), core
        services[name][0].start()
    first, second = (services[name][0].addresses[0] for name in "ab")

    def ask(engine: ClientEngine, ids: list[int], ticket: bytes = b""):
        request = engine._register(RequestSpec("m", input_ids=ids, resumed=True,
                                               config=GenerateConfig(seed=1, max_new_tokens=30)))
        request.ticket = ticket
        engine._pool.members[0].session().send(request)
        assert request.answered.wait(5)
        return request

    try:
        with ClientEngine([first, second], token="one", reconnect_timeout=20) as client, \
                ClientEngine(second, token="two") as liar, ClientEngine(second, token="gate") as gate:
            assert ask(liar, [3]).refusal is None, "it is a new request"
            session = client._pool.members[0].session()
            live = client._register(RequestSpec("m", text="ab", config=GenerateConfig(seed=1, max_new_tokens=60)))
            session.send(live)
            live.queue.Get()
            services["b"][0].drain_for(60)
            assert isinstance(ask(liar, [3]).refusal, Unavailable), "it passes no drain"
            assert ask(liar, list(b"ab"), live.ticket).refusal is not None, "another tenant's ticket"
            assert ask(gate, [4]).refusal is None, "an HTTP server is believed"
            services["a"][0].stop(0)            # the server is lost
            services["a"][1].close()
            tokens(live.queue)
            assert live.received[0] == expected(list(b"ab"), 60) and live.resumed, "it continued on the other one"
    finally:
        for service, core in services.values():
            service.stop()
            core.close()
