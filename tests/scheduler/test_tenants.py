"""Shares and limits of tenants: rows, slots, the queue, deadlines, and which clients may act for which tenants."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus, ClientEngine
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server.access import Access, Client, Role
from allspark_server.engine.engine import Engine
from allspark_server.engine.input_stage import Dependency
from allspark_server.engine.queue_limits import QueueLimits
from allspark_server.engine.results import QueueSink
from allspark_server.scheduler import State
from support.fake_group import FakeGroup, expected_output
from support.fake_service import serving, tokens
from support.scheduler_rig import Rig, output, prompt_of
from support.waiting import wait_for


def rows_of(rig: Rig, tenant: str) -> int:
    return sum(s.computed for s in rig.output if s.tenant == tenant)


# --- shares ---


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_of_prompts_are_shared_among_tenants(depth):
    rig = Rig(num_spans=4096, max_batch=8, depth=depth)
    for tenant, prompts in (("a", 12), ("b", 3), ("c", 1)):  # asking for more does not give more
        for i in range(prompts):
            rig.add(prompt_of(600, seed=hash((tenant, i))), 1, tenant=tenant)
    for _ in range(24):
        rig.step()
    rows = [rows_of(rig, tenant) for tenant in "abc"]
    assert max(rows) - min(rows) <= 2 * 64 and min(rows) >= 6 * 64
    rig.run()
    assert all(len(output(sequence)) == 1 for sequence in rig.output)


def test_one_of_many_tenants_waits_for_a_turn_of_each():
    rig = Rig(num_spans=8192, max_batch=4)
    for i in range(100):
        rig.add(prompt_of(60, seed=i), 1, tenant="flood")
    rig.step()
    late = rig.add(prompt_of(60, seed=1000), 1, tenant="late")
    steps = 0
    while late not in rig.finished:
        rig.step()
        steps += 1
    assert steps <= 2
    rig.run()


def test_generated_tokens_count():
    rig = Rig(num_spans=4096, max_batch=16)
    for i in range(6):
        rig.add(prompt_of(4, seed=i), 400, tenant="streams")
    quiet = rig.add(prompt_of(4, seed=7), 400, tenant="quiet")
    for _ in range(20):
        rig.step()
    first = rig.add(prompt_of(500, seed=8), 1, tenant="streams")
    second = rig.add(prompt_of(500, seed=9), 1, tenant="quiet")
    while second not in rig.finished:
        rig.step()
    assert first not in rig.finished
    rig.run()
    assert len(output(quiet)) == 400


def test_nobody_saves_up_by_being_away():
    rig = Rig(num_spans=4096, max_batch=4)
    busy = [rig.add(prompt_of(800, seed=i), 1, tenant="busy") for i in range(4)]
    rig.add(prompt_of(8, seed=8), 1, tenant="away")
    while busy[1] not in rig.finished:
        rig.step()
    back = [rig.add(prompt_of(800, seed=10 + i), 1, tenant="away") for i in range(4)]
    before = rows_of(rig, "busy")
    for _ in range(10):
        rig.step()
    assert rows_of(rig, "busy") - before >= 4 * 64  # not all for the one that was away
    rig.run()
    assert set(busy) | set(back) <= set(rig.finished)


def test_a_tenant_gets_its_share_of_the_slots():
    rig = Rig(num_spans=1024, max_batch=4, depth=2)
    greedy = [rig.add(prompt_of(9, seed=i), 100, tenant="greedy") for i in range(8)]
    for _ in range(6):
        rig.step()
    modest = [rig.add(prompt_of(9, seed=20 + i), 40, tenant="modest") for i in range(3)]
    for _ in range(8):
        rig.step()
    running = [[s.state for s in sequences].count(State.RUNNING) for sequences in (greedy, modest)]
    assert running == [2, 2]
    rig.run()
    for sequence in greedy + modest:
        count = 100 if sequence in greedy else 40
        assert output(sequence) == expected_output(sequence.tokens[:9], count)
    assert sum(s.preemptions for s in greedy) == 2 and not any(s.preemptions for s in modest)
    assert greedy[0].preemptions == 0


def test_who_gives_way_is_the_tenant_with_most_spans():
    rig = Rig(num_spans=16, max_batch=4, prefix=False)
    large = [rig.add(prompt_of(9, seed=i), 20, tenant="large") for i in range(3)]
    small = rig.add(prompt_of(5, seed=9), 10, tenant="small")
    rig.run()
    assert rig.scheduler.counters.preemptions and not small.preemptions and not large[0].preemptions
    for sequence in (*large, small):
        assert output(sequence) == expected_output(sequence.tokens[:sequence.prompt_len], len(output(sequence)))


def test_priorities_count_inside_a_tenant():
    rig = Rig(max_batch=1)
    names = {rig.add(prompt_of(8, seed=i), 1, tenant=tenant, priority=priority): tenant + str(priority)
             for i, (tenant, priority) in enumerate([("a", 0), ("a", 5), ("b", 0), ("b", 1)])}
    rig.run()
    assert [names[s] for s in rig.finished] == ["a5", "b1", "a0", "b0"]


def test_a_short_prompt_does_not_wait_for_another_tenants_long_one():
    rig = Rig(num_spans=4096, max_step_tokens=64)
    for i in range(20):
        rig.add(prompt_of(8, seed=i), 1, tenant="chats")
    rig.run()
    rig.add(prompt_of(3000, seed=1), 1, tenant="book")
    rig.step()
    for i in range(3):
        short = rig.add(prompt_of(20, seed=2 + i), 1, tenant="chats")
        rig.step()
        assert short in rig.finished


def test_a_short_prompt_behind_a_huge_one_waits_three_steps():
    rig = Rig(num_spans=16384, max_batch=8, max_step_tokens=64, depth=2)
    streams = [rig.add(prompt_of(8, seed=i), 1000, tenant=str(i)) for i in range(4)]
    for _ in range(5):
        rig.step()
    before = {stream: len(rig.output[stream]) for stream in streams}
    rig.add(prompt_of(50_000, seed=9), 1, tenant="book")
    for _ in range(4):
        rig.step()
    assert all(len(rig.output[stream]) == before[stream] + 4 for stream in streams)  # a token of each in every step
    for tenant in ("0", "book", "new"):
        short = rig.add(prompt_of(20, seed=len(tenant)), 1, tenant=tenant)
        for _ in range(3):
            rig.step()
        assert short in rig.finished


def test_a_flood_of_short_prompts_gets_no_more_than_its_share():
    rig = Rig(num_spans=8192, max_batch=8, max_step_tokens=64)
    for tenant in ("a", "b", "c"):
        rig.add(prompt_of(6000, seed=hash(tenant)), 1, tenant=tenant)
    for i in range(600):
        rig.add(prompt_of(16, seed=i), 1, tenant="flood")
    for _ in range(120):
        rig.step()
    rows = {tenant: rows_of(rig, tenant) for tenant in ("a", "b", "c")}
    assert min(rows.values()) >= 0.2 * 120 * 64  # a quarter each, but for what the flood got at first


def test_short_prompts_go_before_one_that_waits_for_spans_but_do_not_starve_it():
    rig = Rig(num_spans=128, span_size=4, max_batch=8, max_step_tokens=64)
    running = rig.add(prompt_of(200, seed=1), 60)
    while running in rig.scheduler._prompts or not running.computed:
        rig.step()
    large = rig.add(prompt_of(400, seed=2), 1)  # 100 spans of 128; 65 are taken by and by
    rig.step()
    assert large.state is State.WAITING
    done, steps = 0, 0
    while large not in rig.finished:
        if rig.scheduler.waiting < 3:
            rig.add(prompt_of(9, seed=steps), 2)
        before = large.state
        rig.step()
        done = len(rig.finished) if before is State.WAITING else done
        steps += 1
        assert steps < 120
    assert done > 5
    rig.run()


def test_accounts_of_many_tenants_do_not_stay():
    rig = Rig(max_batch=4)
    for i in range(3000):
        rig.scheduler.cancel(rig.add(prompt_of(4), tenant=str(i)))
    stays = rig.add(prompt_of(4), 30, tenant="stays")
    for i in range(3000):
        rig.scheduler.cancel(rig.add(prompt_of(4), tenant=str(i)))
    tenants = rig.scheduler.tenants
    assert len(tenants) == 1 and len(tenants.times) <= 16 and len(tenants._departed) <= 1024
    assert len(rig.scheduler.queue._turns) < 200
    rig.run()
    assert len(output(stays)) == 30 and len(tenants) == 0 and not tenants._departed


# --- the queue ---


def test_a_full_queue_has_room_for_tenants_that_have_little_in_it():
    rig = Rig(max_batch=1)
    limits = QueueLimits("m", rig.scheduler, 80, 1_000_000)
    for _ in range(81):  # one gets the free slot
        limits.reserve("greedy", 1, 10_000)
    with pytest.raises(AllSparkError, match="the queue of model 'm' is full: 81 requests wait, max_queue=80") as error:
        limits.reserve("greedy", 1, 10)
    assert error.value.retryable and error.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
    limits.reserve("modest", 9, 10)
    for tenant in ("modest", "late"):
        with pytest.raises(AllSparkError, match="is full"):
            limits.reserve(tenant, 2, 10)
    limits.unreserve("modest", 9, 10)
    limits.reserve("late", 1, 10)
    with pytest.raises(AllSparkError, match="takes 810010 bytes, and 200000 more would exceed max_queue_m"):
        limits.resize("late", 10, 200_010)
    limits.resize("late", 10, 100_000)
    limits.unreserve("late", 1, 100_000)
    limits.unreserve("greedy", 81, 810_000)
    assert limits.incoming == limits.incoming_bytes == 0 and not limits._of
    limits.reserve("huge", 1, 10**9)  # alone in the queue, a request of any size may wait


def make_engine(**group) -> Engine:
    engine = Engine(group=FakeGroup(**group))
    engine.install_model(AsModelConfig("m", "/none", engine_max_batch=1))
    engine.start_model("m")
    return engine


def submit(engine: Engine, dependency=None, tenant: str = "", **config) -> ResultQueue:
    results = ResultQueue()
    spec = RequestSpec("m", input_ids=[1, 2, 3], tenant=tenant)
    spec.config.update({"eos_token_id": -1, **config})
    engine.submit(spec, QueueSink(results), dependency)
    return results


def error_of(results: ResultQueue) -> AllSparkError:
    with pytest.raises(AllSparkError) as raised:
        while results.Get() is not None:
            pass
    return raised.value


def test_a_request_that_has_not_begun_in_time_ends():
    engine = make_engine(delay=0.01)
    try:
        running = submit(engine, max_new_tokens=60, queue_timeout=0.1)
        running.Get()
        began = time.monotonic()
        late = submit(engine, max_new_tokens=2, queue_timeout=0.2)
        patient = submit(engine, max_new_tokens=2, queue_timeout=100)
        error = error_of(late)
        assert 0.2 <= time.monotonic() - began < 0.45 and error.retryable
        assert error.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR and "queue_timeout" in error.message
        assert len(tokens_of(running)) == 59 and tokens_of(patient) == expected_output([1, 2, 3], 2)
        # Nothing runs and nothing can be planned, so the engine's thread sleeps until then.
        blocked = submit(engine, Dependency("a grammar", Future()), queue_timeout=0.1)
        assert "longer than its queue_timeout allows" in error_of(blocked).message
        wait_for(lambda: engine.busy_since == 0)
        assert not engine._models["m"].live and len(engine._models["m"]._deadlines) <= 2
    finally:
        engine.close()


def tokens_of(results: ResultQueue) -> list[int]:
    found = []
    while (elements := results.Get()) is not None:
        found += elements.ids_from_generate
    return found


def test_looking_at_deadlines_does_not_grow_with_the_queue():
    engine = make_engine()
    model = engine._models["m"]
    engine.close()

    def seconds(waiting: int) -> float:
        model._deadlines._heap[:] = [(time.monotonic() + 1000 + i, i, Waiting()) for i in range(waiting)]
        model.live = set(range(waiting))
        began = time.perf_counter()
        for _ in range(1000):
            model.expire()
        return time.perf_counter() - began

    assert min(seconds(100_000) for _ in range(3)) < 5 * min(seconds(10) for _ in range(3)) + 1e-3


class Waiting:
    begun = False


# --- who speaks for whom ---


def test_who_may_name_a_tenant():
    assert Client(Role.GENERATE, "token:1").tenant_of("", "session 1") == "token:1"
    assert Client(Role.GENERATE).tenant_of("", "session 1") == "session 1"
    assert Client(Role.GENERATE, "token:1").tenant_of("token:1", "session 1") == "token:1"
    for role in (Role.DOOR, Role.ADMIN):
        assert Client(role, "token:1").tenant_of("someone", "session 1") == "someone"
    for role in (Role.READ, Role.GENERATE):
        with pytest.raises(AllSparkError, match=f"tenant 'someone' needs the role door or admin; .* is {role.value}"):
            Client(role, "token:1").tenant_of("someone", "session 1")


def test_a_requests_tenant_on_the_wire():
    access = Access({"ask": Role.GENERATE, "in front": Role.DOOR})
    with serving(access=access) as (core, address):
        with ClientEngine(address, token="in front") as server, ClientEngine(address, token="ask") as client:
            for engine, tenant in ((server, "alice"), (server, ""), (client, "")):
                spec = RequestSpec("m", input_ids=[1], tenant=tenant)
                spec.config.update({"max_new_tokens": 2})
                assert len(tokens(engine._start(spec)[2])) == 2
            found = [spec.tenant for spec in core.submitted]
            assert found[0] == "alice" and found[1] != found[2]
            assert found[1:] == [access.bearer(f"Bearer {token}").tenant for token in ("in front", "ask")]
            with pytest.raises(AllSparkError, match="ALLSPARK_REQUEST_DENIED: a request for tenant 'alice' needs the "):
                client._start(RequestSpec("m", input_ids=[1], tenant="alice"))
            with pytest.raises(ValueError, match="has 300 bytes; allowed: at most 256"):
                server._start(RequestSpec("m", input_ids=[1], tenant="x" * 300))
            with pytest.raises(AllSparkError, match="DENIED: StopModel needs the role admin; this client's is door"):
                server.stop_model("m")


def test_connections_are_tenants_where_there_are_no_tokens(tmp_path):
    with serving(f"unix:{tmp_path}/s") as (core, address):
        with ClientEngine(address) as one, ClientEngine(address) as other:
            for engine in (one, other, one):
                assert len(tokens(engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 2})[2])) == 2
        first, second, third = [spec.tenant for spec in core.submitted]
        assert first == third != second
