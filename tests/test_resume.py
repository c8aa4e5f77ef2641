"""A request outlives its server: real groups are killed, and the continuation is the same bits."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_client import GenerateRequestStatus as Status
from allspark_client.local_group import SelfStartedGroup
from checkpoints import checkpoint

CONFIG = {"max_length": 1800, "seed": 5, "logprobs": True, "top_logprobs": 3, "early_stopping": False}


def install(engine: ClientEngine) -> None:
    engine.install_model(AsModelConfig("m", Path(checkpoint("qwen2-gqa-tied"))))
    engine.start_model("m")


def generate(engine: ClientEngine, prompt: list[int], after: int = 0, then=lambda: None):
    """(ids, logprobs, alternatives) of a request; `then()` is called once `after` tokens have come."""
    _, handle, queue = engine.start_request("m", {"input_ids": prompt}, CONFIG)
    ids, logprobs, top = [], [], []
    called = not after
    for elements in queue:
        ids += elements.ids_from_generate
        logprobs += elements.token_logprobs_list
        top += elements.log_probs_list
        if not called and len(ids) >= after:
            called = True
            then()
    assert queue.GenerateStatus() is Status.GenerateFinished and called
    assert queue.RequestStatInfo().generated_token_length == len(ids)
    engine.release_request("m", handle)
    return ids, logprobs, top


def ranks_of(pid: int) -> list[psutil.Process]:
    """The server processes of a group, by its supervisor's pid."""
    return [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if process.cmdline()[1:3] == ["-m", "allspark_server"]
    ]


@pytest.mark.parametrize("ranks, victim", [(2, -1), (1, 0)])
def test_on_the_same_group_once_it_is_back(monkeypatch, ranks, victim):
    monkeypatch.setenv("AS_NUMA_NUM", str(ranks))
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    with ClientEngine(reconnect_timeout=60) as engine:
        install(engine)
        undisturbed = generate(engine, [1, 2, 3])
        pid = engine._group._process.pid
        assert len(ranks_of(pid)) == ranks
        assert generate(engine, [1, 2, 3], 200, lambda: ranks_of(pid)[victim].kill()) == undisturbed
        assert engine.get_rank_nums() == ranks


def test_on_another_group_and_none_left(monkeypatch):
    monkeypatch.setenv("AS_NUMA_NUM", "1")
    groups = [SelfStartedGroup(), SelfStartedGroup()]
    try:
        addresses = [group.wait(60)[0] for group in groups]
        with ClientEngine(addresses, reconnect_timeout=30) as engine:
            install(engine)
            undisturbed = generate(engine, [4, 5])

            def kill() -> None:
                busy = max(range(2), key=lambda i: engine._members[i].session().live)
                victim = groups.pop(busy)
                ranks = ranks_of(victim._process.pid)
                victim._process.kill()  # all of it: it will not come back
                for rank in ranks:
                    rank.kill()
                victim.stop()

            start = time.monotonic()
            assert generate(engine, [4, 5], 200, kill) == undisturbed
            assert time.monotonic() - start < 20
            groups.pop().stop()
        with pytest.raises(AllSparkError, match="cannot be reached"):
            ClientEngine(addresses)
    finally:
        for group in groups:
            group.stop()
