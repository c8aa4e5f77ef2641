"""Requests that crash their servers: each is retried alone and then refused, and no other request suffers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from allspark_client import AllSparkError, ClientEngine, GenerateRequestStatus
from allspark_client.affinity import PrefixMemory, beginnings
from allspark_client.config import GenerateConfig
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server.engine import quarantine, served_model
from allspark_server.engine.quarantine import MAX_DEATHS
from allspark_server.engine.results import QueueSink
from allspark_server.scheduler import State
from support.fake_engine import FakeEngine
from support.fake_service import expected, server_process, serving, tokens, wait_until
from support.paths import BENCHMARKS


@contextlib.contextmanager
def supervised(address):
    """A server that is restarted whenever it ends; yields the list of its incarnations."""
    incarnations, over = [], threading.Event()

    def run():
        while not over.is_set():
            with server_process(address) as (process, _):
                incarnations.append(process)
                while process.poll() is None and not over.wait(0.02):
                    pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: incarnations, 10)
        yield incarnations
    finally:
        over.set()
        thread.join()


def finish(started, count):
    for prompt, queue in started:
        assert tokens(queue) == expected(prompt, count)
        assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_request_that_crashes_servers_is_refused_and_others_finish(tmp_path, after):
    """One request crashes its server at its first token, another one later. It is retried beside others first, then
    twice alone.
    """
    address = f"unix:{tmp_path}/s"
    with supervised(address) as incarnations, contextlib.closing(connect(address)) as client:
        started = []
        for i in range(6):
            started.append(([i, 1], client.start_request("m", {"input_ids": [i, 1]}, {"max_new_tokens": 60})[2]))
        wait_until(lambda: all(queue.GeneratedLength() > 2 for _, queue in started), 10)
        poisoned = client.start_request("m", {"input_ids": [998, after]}, {"max_new_tokens": 30})[2]
        for i in range(6):      # and some that wait, or begin with it
            prompt = [i, 2]
            started.append((prompt, client.start_request("m", {"input_ids": prompt}, {"max_new_tokens": 60})[2]))
        with pytest.raises(AllSparkError, match="2 servers were lost while they ran this request alone"):
            tokens(poisoned)
        assert poisoned.GenerateStatus() is GenerateRequestStatus.InternalError
        finish(started, 60)
        # Its tokens count: dying after some of them, it is resumed beside others once more.
        assert len(incarnations) == 1 + 1 + MAX_DEATHS + (1 if after else 0)


def connect(address):
    deadline = time.monotonic() + 10
    while True:
        try:
            return ClientEngine(address, reconnect_timeout=30)
        except AllSparkError:
            assert time.monotonic() < deadline


def test_a_quarantined_request_runs_alone_until_its_first_token(tmp_path):
    core = FakeEngine(0.01)
    with serving(f"unix:{tmp_path}/s", core) as (_, address), ClientEngine(address) as client:
        running = client.start_request("m", {"input_ids": [1, 2]}, {"max_new_tokens": 100})[2]
        running.Get()
        request = client._register(RequestSpec("m", input_ids=[5, 6], deaths=1,
                                               config=GenerateConfig(max_new_tokens=50)))
        request.deaths = 1
        client._submit(request)
        assert tokens(request.queue) == expected([5, 6], 50)
        tokens(running)
        assert running.GeneratedLength() == 100 and request.begun
    plans = [plan for plan in core._group.executors["m"].plans if plan.work]
    first = next(i for i, plan in enumerate(plans) if any(new.history[:2] == [5, 6] for new in plan.new))
    assert len(plans[first].work) == 1, "nothing else is in that step"
    assert {len(plan.work) for plan in plans[first + 1:first + 20]} == {2}


def test_a_quarantined_request_needs_spans_of_others(tmp_path):
    """Other requests are preempted for it and continue afterwards."""
    from support.fake_group import FakeGroup

    core = FakeEngine(group=FakeGroup(delay=0.005, num_spans=4))
    with serving(f"unix:{tmp_path}/s", core) as (_, address), ClientEngine(address) as client:
        prompts = [[i] * 20 for i in range(2)]
        queues = [client.start_request("m", {"input_ids": p}, {"max_new_tokens": 40})[2] for p in prompts]
        for queue in queues:
            queue.Get()
        request = client._register(RequestSpec("m", input_ids=[7] * 30, config=GenerateConfig(max_new_tokens=10)))
        request.deaths = 2
        client._submit(request)
        from support.fake_group import expected_output

        assert tokens(request.queue) == expected_output([7] * 30, 10)
        for _prompt, queue in zip(prompts, queues):
            tokens(queue)
            assert queue.GeneratedLength() == 40


def suspect(deaths, tenant="", when=0.0):
    return SimpleNamespace(owner=SimpleNamespace(request=SimpleNamespace(deaths=deaths)), state=State.BLOCKED,
                           planned=0, tokens=[1, 2], slot=-1, tenant=tenant, account=SimpleNamespace(time=when))


def test_tenants_take_turns_in_quarantine(monkeypatch):
    """One that fills it does not keep others out, nor from their last attempt."""
    now = 100.0
    monkeypatch.setattr(quarantine.time, "monotonic", lambda: now)
    line = quarantine.Quarantine()
    greedy = [suspect(1, "greedy", 5.0) for _ in range(quarantine.MAX_UNPROVEN)]
    for sequence in greedy:
        assert line.has_room("greedy")
        line.add(sequence)
    assert not line.has_room("greedy") and line.has_room("other")
    other = suspect(1, "other", 3.0)
    line.add(other)
    assert line.next is other
    other.state = State.ENDED
    assert line.next is greedy[0]
    last = suspect(MAX_DEATHS, "other", 9.0)
    line.add(last)
    for sequence in greedy[:6]:     # never a calm time
        assert line.next is sequence
        sequence.planned, now = 2, now + 0.9
    assert line.next is None, "it has waited too long: others do not begin"
    now += 1
    assert line.next is last


def test_quarantine_leaves_others_most_of_the_time(tmp_path, monkeypatch):
    """Whatever one tenant says of lost servers, the requests of others are neither delayed much nor preempted."""
    monkeypatch.setattr(served_model, "ANNOUNCE_SECONDS", 0.1)
    core = FakeEngine(0.005)
    with serving(f"unix:{tmp_path}/s", core) as (_, address), ClientEngine(address) as client:
        running = client.start_request("m", {"input_ids": [1, 2]}, {"max_new_tokens": 60})[2]
        running.Get()
        plans = core._group.executors["m"].plans
        suspects = [RequestSpec("m", input_ids=[5, i], tenant="greedy", deaths=1,
                                config=GenerateConfig(max_new_tokens=1, n=4)) for i in range(6)]
        count = len(plans)
        queues = [ResultQueue() for _ in suspects]
        for spec, queue in zip(suspects, queues):
            core.submit(spec, QueueSink(queue))
        time.sleep(0.08)
        assert len(plans) - count > 5, "the engine's thread does not wait for the announcement"
        assert tokens(running) and running.GeneratedLength() == 60
        done = sum(queue.GeneratedLength() for queue in queues)
        assert 0 < done < 30, "they had a part of the time"
        assert core.get_as_engine_stat("m").preempted_request == 0
        for queue in queues:
            assert len(tokens(queue)) == 4


@pytest.mark.parametrize("proven", [True, False])
def test_only_so_many_of_a_tenant_are_in_quarantine_unproven(proven):
    with contextlib.closing(FakeEngine(0.001)) as core:
        core.interval = 0.5
        for i in range(quarantine.MAX_UNPROVEN + 3):
            core.submit(RequestSpec("m", input_ids=[i], deaths=1, proven=proven), QueueSink(ResultQueue()))
        wait_until(lambda: len(core.live) == quarantine.MAX_UNPROVEN + 3, 5)
        line = core._models["m"]._quarantine
        assert len(line._waiting[""]) >= quarantine.MAX_UNPROVEN - 1 + 3 * proven
        assert line.has_room("") is (not proven and len(line._waiting[""]) < quarantine.MAX_UNPROVEN)


def test_a_last_chance_comes_at_a_calm_time(monkeypatch):
    """A last retry runs before anything else happened, or a while after. Servers that are killed from outside often die
    when something happens, such as a first token; the request must not be blamed for that.
    """
    now = 100.0
    monkeypatch.setattr(quarantine.time, "monotonic", lambda: now)
    line = quarantine.Quarantine()
    first, one, other = (suspect(deaths) for deaths in (1, MAX_DEATHS, MAX_DEATHS))
    for sequence in (first, one, other):
        line.add(sequence)
    assert line.next is one
    one.planned = 2         # it has sampled
    assert line.next is first
    first.slot, now = 3, now + quarantine.CALM_SECONDS
    assert line.next is first, "what has begun goes on"
    first.planned = 2
    assert line.next is None and line
    now += quarantine.CALM_SECONDS
    assert line.next is other
    other.state = State.ENDED
    assert line.next is None and not line


def test_who_was_without_a_token_longest_is_resumed_first(tmp_path):
    """Otherwise servers that crash at a request's first token would never reach that request."""
    with serving(f"unix:{tmp_path}/s", FakeEngine(0.01)) as (a, address), ClientEngine(address) as client:
        queues = [client.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 200})[2] for i in range(4)]
        for queue in queues:
            queue.Get()
        session = client._pool.members[0].session()
        for request in session._live.values():
            if request.spec.input_ids[0] in (1, 3):
                request.losses, request.generated_at_start = request.spec.input_ids[0], 10 ** 6
        before = len(a.submitted)
        session._call.cancel()      # the connection breaks
        wait_until(lambda: len(a.submitted) == before + 4, 5)
        assert [spec.input_ids[0] for spec in a.submitted[before:]] == [3, 1, 0, 2]


@pytest.mark.slow
def test_killed_again_and_again():
    """Runs benchmarks/kills.py for a minute or two."""
    script = BENCHMARKS / "kills.py"
    done = subprocess.run([sys.executable, str(script), "--cycles", "12", "--starts", "2"], capture_output=True,
                          text=True)
    assert done.returncode == 0 and " 0 wrong " in done.stdout, done.stdout + done.stderr[-2000:]


def test_a_request_that_was_alone_often_enough_is_refused(tmp_path):
    with serving(f"unix:{tmp_path}/s") as (_, address), ClientEngine(address) as client:
        request = client._register(RequestSpec("m", input_ids=[5]))
        request.deaths = MAX_DEATHS + 1
        with pytest.raises(AllSparkError, match="it seems to be what ends them"):
            client._submit(request)


# --- which member of a pool gets a request ---


def test_beginnings_of_prompts():
    ids = list(range(300))
    one, other = (beginnings(RequestSpec("m", input_ids=p)) for p in (ids, ids[:200] + [7] * 100))
    assert [tokens for _, tokens in one] == [64, 128, 256]
    assert one[:2] == other[:2] and one[2] != other[2]
    salted = beginnings(RequestSpec("m", input_ids=ids, config=GenerateConfig(cache_salt="s")))
    assert not {digest for digest, _ in one} & {digest for digest, _ in salted}
    turns = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 400}]
    first, second = (beginnings(RequestSpec("m", messages=turns[:n])) for n in (1, 2))
    assert second[:len(first)] == first and len(second) == 2
    assert len(beginnings(RequestSpec("m", text="t" * 1024))) == 3 and not beginnings(RequestSpec("m", text="t"))
    memory = PrefixMemory()
    memory.note(other, "b")
    assert memory.find(one) == ("b", 128) and memory.find(salted) == ("", 0)


def test_a_pool_keeps_conversations_where_they_are_and_shares_the_rest(tmp_path):
    with serving(f"unix:{tmp_path}/a", FakeEngine(0.001)) as (a, first), \
            serving(f"unix:{tmp_path}/b", FakeEngine(0.001)) as (b, second), ClientEngine([first, second]) as client:
        def ask(prompt):
            return tokens(client.start_request("m", {"input_ids": prompt}, {"max_new_tokens": 2})[2])

        common = [i % 500 for i in range(600)]
        for i in range(8):
            assert ask(common + [i]) == expected(common + [i], 2)
        assert sorted((len(a.submitted), len(b.submitted))) == [0, 8], "the prefix is where it was computed"
        # While that member is busy, others are faster.
        home, away = (a, b) if a.submitted else (b, a)
        home.interval = 1000
        with ClientEngine(first if home is a else second) as other:
            for i in range(12):
                other.start_request("m", {"input_ids": [i]}, {"max_new_tokens": 9})
            time.sleep(0.6)     # until the member's load is asked for again
            assert ask(common + [9]) == expected(common + [9], 2) and len(away.submitted) == 1
