"""A request outlives its server: real groups are killed, and the continuation has the same bits."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine, GenerateRequestStatus as Status
from allspark_client.local_group import SelfStartedGroup
from allspark_launch.group.background import background_group
from allspark_server import Engine
from allspark_server.rpc.service import Service
from support import vision
from support.checkpoints import checkpoint
from support.http_helpers import http_server_for
from support.pictures import data_url
from support.processes import ranks_of
from support.units import GPUS, UNIT
from support.waiting import wait_for

FIELDS = {**UNIT, "cache_memory": 256 << 20} if GPUS else {}    # two groups may share GPUs
CONFIG = {"max_length": 1800, "seed": 5, "logprobs": True, "top_logprobs": 3, "early_stopping": False}


def install(engine: ClientEngine) -> None:
    engine.install_model(AsModelConfig("m", Path(checkpoint("qwen2-gqa-tied")), **FIELDS))
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


@pytest.mark.parametrize("ranks, victim", [(2, -1), pytest.param(1, 0, marks=pytest.mark.slow)])
def test_on_the_same_group_once_it_is_back(monkeypatch, ranks, victim):
    if GPUS and ranks != len(GPUS):
        pytest.skip(f"each rank has a GPU, and ALLSPARK_TEST_UNIT names {len(GPUS)}")
    monkeypatch.setenv("AS_NUMA_NUM", str(ranks))
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    with ClientEngine(reconnect_timeout=60) as engine:
        install(engine)
        undisturbed = generate(engine, [1, 2, 3])
        pid = engine._pool.group._process.pid
        assert len(ranks_of(pid)) == ranks
        assert generate(engine, [1, 2, 3], 200, lambda: ranks_of(pid)[victim].kill()) == undisturbed
        assert engine.get_rank_nums() == ranks


def test_on_another_group_and_none_left(monkeypatch):
    monkeypatch.setenv("AS_NUMA_NUM", str(len(GPUS) or 1))
    groups = [SelfStartedGroup(), SelfStartedGroup()]
    try:
        addresses = [group.wait(60)[0] for group in groups]
        with ClientEngine(addresses, reconnect_timeout=30) as engine:
            install(engine)
            start = time.monotonic()
            undisturbed = generate(engine, [4, 5])
            whole = time.monotonic() - start

            def kill() -> None:
                busy = max(range(2), key=lambda i: engine._pool.members[i].session().live)
                victim = groups.pop(busy)
                ranks = ranks_of(victim._process.pid)
                victim._process.kill()  # all of it: it will not come back
                for rank in ranks:
                    rank.kill()
                victim.stop()

            start = time.monotonic()
            assert generate(engine, [4, 5], 200, kill) == undisturbed
            assert time.monotonic() - start < whole + 15  # on a busy machine, too: the other group is asked at once
            groups.pop().stop()
        with pytest.raises(AllSparkError, match="cannot be reached"):
            ClientEngine(addresses)
    finally:
        for group in groups:
            group.stop()


def test_a_chat_whose_template_tells_the_time(tiny_model, tmp_path):
    """Rendered again, the prompt would differ: the continuation follows the ids of the first rendering."""
    directory = shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[0].content }}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with Engine() as server:
        server.install_model(AsModelConfig("m", directory))
        server.start_model("m")
        service = Service(server, [f"unix:{tmp_path}/s.sock"])
        try:
            with ClientEngine(service.start()[0]) as engine:
                _, handle, queue = engine.start_request(
                    "m", {"messages": [{"role": "user", "content": "hi"}]}, {**CONFIG, "max_length": 1000}
                )
                request = engine._requests[handle]
                first = queue.Get()
                ids, text = list(first.ids_from_generate), first.text
                request.session._call.cancel()
                for elements in queue:
                    ids += elements.ids_from_generate
                    text += elements.text
                assert request.resumed
                _, _, whole = server.start_request(
                    "m", {"input_ids": request.spec.input_ids}, {**CONFIG, "max_length": 1000}
                )
                assert ids == [i for elements in whole for i in elements.ids_from_generate]
                assert text == server._models["m"].input.tokenizer.decode(ids)
        finally:
            service.stop()


@pytest.mark.slow
def test_chats_with_images():
    """Their images are sent again, by a client of the groups and by the HTTP server: rank 0 of the group that answers
    is killed, and the other one goes on.
    """
    openai = pytest.importorskip("openai")
    pictures = [vision.picture(60, 90, 1), vision.picture(31, 140, 2)]
    words = ["--model", str(vision.checkpoint("qwen2.5-vl")), "--model-name", "m", "--ranks", "1"]
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(background_group(words, timeout=60.0)) for _ in range(2)]
        addresses = [group.addresses[0] for group in groups]
        observers = [stack.enter_context(ClientEngine(address)) for address in addresses]
        pool = stack.enter_context(ClientEngine(addresses, reconnect_timeout=60))
        url = f"http://{stack.enter_context(http_server_for(addresses[0], pool=addresses, insecure=True))}/v1"
        api = stack.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60))

        def by_client():
            content = [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "or"},
                       {"type": "image", "image": pictures[1]}]
            with pool.generate("m", {"messages": [{"role": "user", "content": content}]}, CONFIG) as results:
                for elements in results:
                    yield from zip(elements.ids_from_generate, elements.token_logprobs_list)

        def by_http():
            first, second = ({"type": "image_url", "image_url": {"url": data_url(each.content)}} for each in pictures)
            content = [first, {"type": "text", "text": "or"}, second]
            for chunk in api.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": content}], stream=True, seed=5, max_tokens=1600,
                    logprobs=True, extra_body={"ignore_eos": True, "return_token_ids": True}):
                choice, = chunk.choices
                if choice.logprobs is not None:
                    yield from zip(choice.token_ids, [entry.logprob for entry in choice.logprobs.content], strict=True)

        def busy() -> list[int]:
            return [i for i, observer in enumerate(observers) if observer.get_as_engine_stat("m").running_request]

        def serves(observer) -> bool:
            with contextlib.suppress(AllSparkError):
                return observer.get_model_info("m").sees_images
            return False

        for stream in (by_client, by_http):
            wait_for(lambda: all(map(serves, observers)), 60)
            undisturbed = list(stream())
            assert len(undisturbed) > 1500
            found = []
            for token in stream():
                found.append(token)
                if len(found) == 100:
                    victim, = wait_for(busy, 10)
                    ranks_of(groups[victim].supervisor_pid)[0].kill()
            assert found == undisturbed
