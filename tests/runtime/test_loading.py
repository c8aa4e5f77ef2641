"""Groups whose ranks load slowly or fail in a step: other streams and cancellations continue, and no failure is
silent.
"""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine, GenerateRequestStatus as Status
from allspark_launch.group.background import background_group
from support.paths import SUPPORT
from support.waiting import write_whole

MISBEHAVING = SUPPORT / "misbehaving"
FOREVER = {"top_k": 1, "eos_token_id": -1}
BOUND = 1.5  # seconds; a load takes 4


@pytest.fixture(params=[pytest.param("1", marks=pytest.mark.slow), "2"])
def group(request, monkeypatch, tmp_path):
    """A group of one or two ranks that misbehave (support/misbehaving/sitecustomize.py)."""
    monkeypatch.setenv("PYTHONPATH", str(MISBEHAVING), prepend=":")
    monkeypatch.setenv("FAIL_STEP", str(tmp_path / "fail"))
    monkeypatch.setenv("FAIL_LOAD", str(tmp_path / "fail-load"))
    with background_group(["--ranks", request.param], timeout=60) as started:
        yield started


@pytest.fixture
def engine(group, tiny_model):
    with ClientEngine(group.addresses[0]) as engine:
        install(engine, "m", tiny_model)
        yield engine


def ranks_of(group) -> set[int]:
    return {process.pid for process in psutil.Process(group.supervisor_pid).children(recursive=True)
            if process.cmdline()[1:3] == ["-m", "allspark_server"]}


def install(engine, name: str, path) -> None:
    engine.install_model(AsModelConfig(name, str(path), engine_max_length=4096, num_threads=1))
    engine.start_model(name)


def test_streams_and_cancels_go_on_while_a_model_is_loaded(engine, tiny_model):
    _, streaming, queue = engine.start_request("m", {"input_ids": [5, 6]}, FOREVER)
    _, cancelled, other = engine.start_request("m", {"input_ids": [7]}, FOREVER)
    queue.Get()
    loading = threading.Thread(target=install, args=(engine, "slow", tiny_model))
    loading.start()
    time.sleep(0.5)  # it is under way
    began = time.monotonic()
    engine.stop_request("m", cancelled)
    assert time.monotonic() - began < BOUND and other.GenerateStatus() is Status.GenerateInterrupted
    with pytest.raises(AllSparkError, match="'slow' is still being loaded"):
        engine.start_request("slow", {"input_ids": [1]}, FOREVER)
    gaps, last = [], time.monotonic()
    while loading.is_alive() and queue.GenerateStatus() is Status.Generating:
        queue.Get(BOUND * 1000)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    assert max(gaps) < BOUND and len(gaps) > 10
    engine.stop_request("m", streaming)
    loading.join(20)
    prompt, config = {"input_ids": [8, 9]}, {"top_k": 1, "max_new_tokens": 5}
    ids = [[i for e in engine.start_request(n, prompt, config)[2] for i in e.ids_from_generate] for n in ("m", "slow")]
    assert len(ids[0]) == 5 and ids[0] == ids[1]


def test_a_load_can_be_given_up(engine, tiny_model):
    errors = []

    def load() -> None:
        try:
            install(engine, "slow", tiny_model)
        except AllSparkError as error:
            errors.append(str(error))

    loading = threading.Thread(target=load)
    loading.start()
    time.sleep(0.5)
    began = time.monotonic()
    engine.release_model("slow")
    loading.join(20)
    assert time.monotonic() - began < BOUND and "'slow' was released while it was loaded" in errors[0]
    install(engine, "other", tiny_model)
    assert {state.name for state in engine.list_models()} == {"m", "other"}


def test_a_failed_step_ends_the_group_and_requests_continue_on_the_next(engine, tmp_path):
    config = {"top_k": 1, "eos_token_id": -1, "max_new_tokens": 3500}
    undisturbed = [i for e in engine.start_request("m", {"input_ids": [5, 6]}, config)[2] for i in e.ids_from_generate]
    _, _, queue = engine.start_request("m", {"input_ids": [5, 6]}, config)
    found = queue.Get().ids_from_generate
    write_whole(tmp_path / "fail", "RuntimeError")
    found += [i for e in queue for i in e.ids_from_generate]
    assert not (tmp_path / "fail").exists()
    assert queue.GenerateStatus() is Status.GenerateFinished and found == undisturbed


def test_a_load_that_loses_the_device_ends_the_group_alone(group, engine, tiny_model, tmp_path):
    """Requests of other models continue on the next one."""
    config = {"top_k": 1, "eos_token_id": -1, "max_new_tokens": 3500}
    undisturbed = [i for e in engine.start_request("m", {"input_ids": [5, 6]}, config)[2] for i in e.ids_from_generate]
    _, _, queue = engine.start_request("m", {"input_ids": [5, 6]}, config)
    found = queue.Get().ids_from_generate
    write_whole(tmp_path / "fail-load", "DeviceLost")
    pids = ranks_of(group)
    install(engine, "other", tiny_model)  # the client repeats the call
    assert not (tmp_path / "fail-load").exists() and not pids & ranks_of(group)
    found += [i for e in queue for i in e.ids_from_generate]
    assert queue.GenerateStatus() is Status.GenerateFinished and found == undisturbed


def test_a_refused_plan_fails_the_model_alone(engine, tmp_path):
    if engine.get_rank_nums() == 2:
        pytest.skip("the file fails a step of one rank alone, a plan is refused by all")
    _, _, queue = engine.start_request("m", {"input_ids": [5, 6]}, FOREVER)
    write_whole(tmp_path / "fail", "ValueError")
    with pytest.raises(AllSparkError, match="ALLSPARK_RUNTIME_ERROR: a step of model 'm' failed: a defect"):
        list(queue)
    assert not engine.list_models()[0].running
    with pytest.raises(AllSparkError, match="has failed.*start_model"):
        engine.start_request("m", {"input_ids": [5]}, FOREVER)
    engine.start_model("m")
    _, handle, queue = engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3, "eos_token_id": -1})
    engine.sync_request("m", handle)
    assert queue.GeneratedLength() == 3
