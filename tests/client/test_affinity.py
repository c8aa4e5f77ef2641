"""Several gateways in front of one pool send a conversation to the member that has computed its beginning."""

from __future__ import annotations

import contextlib
import random

import pytest

from allspark_client import ClientEngine, pool
from allspark_client.affinity import beginnings
from allspark_client.request import RequestSpec
from allspark_server.access import Access, Role
from allspark_server.rpc import prefix_log
from allspark_server.rpc.prefix_log import PrefixLog
from support.fake_engine import FakeEngine, token_after
from support.fake_group import FakeGroup
from support.fake_service import serving


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(pool, "LOAD_AGE_SECONDS", 0.0)


def spec(length: int, first: int = 1) -> RequestSpec:
    return RequestSpec("m", input_ids=[first] * length)


def digests(answer) -> list[bytes]:
    return [answer.digests[i:i + 12] for i in range(0, len(answer.digests), 12)]


def test_what_a_server_tells(monkeypatch):
    log = PrefixLog()
    log.note(spec(200))
    first = log.since("", 0)
    assert not first.digests, "nobody had asked"
    log.note(spec(200))
    log.note(spec(130, first=2))
    second = log.since(first.epoch, first.number)
    both = [*beginnings(spec(200)), *beginnings(spec(130, first=2))]
    assert digests(second) == [digest for digest, _ in both]
    log.note(spec(64))
    third = log.since(first.epoch, second.number)
    assert digests(third) == [beginnings(spec(64))[0][0]]
    assert set(digests(log.since("of a lost server", 99))) == {*digests(second)}
    monkeypatch.setattr(prefix_log, "MOST_DIGESTS", 2)
    log.note(spec(200, first=3))
    assert digests(log.since(first.epoch, 0)) == [digest for digest, _ in beginnings(spec(200, first=3))]


def conversations(tmp_path, clients: int, members: int, count: int, turns: int, token: str = "gateway"):
    """Cached and all prompt tokens of conversations whose turns any client sends, and requests by member."""
    rng = random.Random(1)
    access = {"access": Access({"gateway": Role.DOOR, "user": Role.GENERATE})}
    with contextlib.ExitStack() as stack:
        # So slow that the requests of a turn run at the same time, also where starting one takes long.
        groups = [FakeGroup(num_spans=4096, token=token_after, delay=0.02) for _ in range(members)]
        servers = [stack.enter_context(serving(f"unix:{tmp_path}/{i}", FakeEngine(group=group), **access))
                   for i, group in enumerate(groups)]
        engines = [stack.enter_context(ClientEngine([address for _, address in servers], token=token))
                   for _ in range(clients)]
        histories = [[rng.randrange(1, 600) for _ in range(100)] for _ in range(count)]
        cached = total = 0
        for _ in range(turns):
            queues = [rng.choice(engines).start_request("m", {"input_ids": history},
                                                        {"max_new_tokens": 4, "eos_token_id": -1})[2]
                      for history in histories]
            for history, queue in zip(histories, queues):
                total += len(history)
                found = list(queue)
                cached += max(elements.prefix_cache_len for elements in found)
                history += [i for elements in found for i in elements.ids_from_generate]
                history += [rng.randrange(1, 600) for _ in range(60)]
        return cached, total, [len(engine.submitted) for engine, _ in servers]


def test_gateways_know_what_others_have_sent(tmp_path):
    def folder(name: str):
        (tmp_path / name).mkdir()
        return tmp_path / name

    alone = conversations(folder("alone"), 1, 1, 12, 5)
    shared = conversations(folder("shared"), 3, 4, 12, 5)
    apart = conversations(folder("apart"), 3, 4, 12, 5, "user")
    assert shared[0] >= 0.9 * alone[0] > 0, (shared, alone)
    assert apart[0] < shared[0], "without digests clients know only what they have sent themselves"
    assert max(shared[2]) <= 2 * sum(shared[2]) / 4, shared


def test_a_server_that_has_started_anew_is_forgotten(tmp_path):
    with serving(f"unix:{tmp_path}/a") as (_, a), ClientEngine([a, a.replace("/a", "/b")]) as client:
        member = client._pool.members[0]
        assert member.new_prefixes() == (False, [])
        client._pool._prefixes.learn([b"x" * 12], a)
        member._prefixes = "another", 7
        client._pool._learn_prefixes(member)
        assert not client._pool._prefixes._members


def test_idle_members_take_turns(tmp_path):
    """Requests that come one at a time find all members idle."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(f"unix:{tmp_path}/{i}", FakeEngine())) for i in range(3)]
        client = stack.enter_context(ClientEngine([address for _, address in servers]))
        for i in range(6):
            list(client.start_request("m", {"input_ids": [i + 1] * 8}, {"max_new_tokens": 2, "eos_token_id": -1})[2])
        assert [len(engine.submitted) for engine, _ in servers] == [2, 2, 2]
