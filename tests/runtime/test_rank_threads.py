"""Agreement between the ranks of a group, without mpirun: ranks are threads, and models have no tensors."""

from __future__ import annotations

import json
import mmap
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelConfig
from allspark_server.runtime.native import DeviceLost
from allspark_server.runtime.roles import Role
from support.waiting import wait_for


class FakeStepper:
    """Replaces native.Stepper, which takes only native executors; it computes at once."""

    def __init__(self):
        self.ended: list[Future] = []

    def run(self, job) -> None:
        self.ended.append(Future())
        try:
            self.ended[-1].set_result(job())
        except Exception as error:
            self.ended[-1].set_exception(error)

    def collect(self):
        return self.ended.pop(0).result()

    def drain(self) -> None:
        pass

    @property
    def idle(self) -> bool:
        return True


class FakeRunner:
    """Replaces ModelRunner; it fails where its model's name says so, as in "load1" (rank 1, in load)."""

    tower = None
    role = Role(0, 1)

    def __init__(self, config, *, rank, world, shared_memory, cpus):
        self.name, self.rank, self.closed, self.digest = config.model_name, rank, False, f"digest {rank}"
        self.host_spans, self.held = 10 + rank, {bytes([0] * 16): 0, bytes([rank + 1] * 16): 1}
        self.placement = {}

    def _maybe_fail(self, where: str) -> None:
        if self.name in (f"{where}{self.rank}", f"{where}-all"):
            raise MemoryError(f"no memory for {self.name}")
        if self.name == f"lost-in-{where}{self.rank}":
            raise DeviceLost("the device is gone")

    threads, gpu, address = 0, None, ""
    expert_counts: ClassVar[dict[str, float]] = {}

    answers = threading.Event()     # the file system of the model "hangs" does

    def load(self) -> int:
        self._maybe_fail("load")
        if self.name == "hangs":
            self.answers.wait(60)
        return 100 - self.rank

    def connect(self, addresses: list[str]) -> None:
        self.connected = addresses

    def allocate_cache(self, spans: int, digests: list[str], host_spans: int):
        self._maybe_fail("allocate")
        return SimpleNamespace(num_spans=spans, host_spans=host_spans)

    warmed, WARM_UPS = 0, 10

    def warm_up(self, count: int) -> tuple[int, int]:
        self._maybe_fail("warm")
        self.warmed = min(self.warmed + count, self.WARM_UPS)
        return self.warmed, self.WARM_UPS

    def step(self, plan: bytes):
        self._maybe_fail("step")
        return self.rank, plan

    def submit(self, stepper: FakeStepper, plan: bytes, shared_memory, kind: int, prefix: bytes) -> None:
        def job():
            if shared_memory is not None:
                shared_memory.publish(kind, prefix + plan)
            return self.step(plan)

        stepper.run(job)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def threads(monkeypatch):
    """SharedMemoryGroup with two more ranks as threads; yields (group, failures, workers' errors)."""
    from allspark_server import _native
    from allspark_server.runtime import runner
    from allspark_server.runtime.group import SharedMemoryGroup
    from allspark_server.runtime.rank_models import RankModels
    from allspark_server.runtime.worker import serve
    monkeypatch.setattr(runner, "ModelRunner", FakeRunner)
    monkeypatch.setattr(_native, "Stepper", FakeStepper)
    step = -(-_native.SharedMemory.bytes_needed(3) // 4096) * 4096
    memory = mmap.mmap(-1, 3 * step)
    view = np.frombuffer(memory, np.uint8)
    addresses = [view.ctypes.data + i * step for i in range(3)]
    windows = [_native.SharedMemory(r, 3, addresses, False, 10.0) for r in range(3)]
    failures, errors = [], {}

    def work(rank: int) -> None:
        try:
            serve(RankModels(rank, 3, windows[rank]))
        except RuntimeError as error:
            errors[rank] = str(error)

    running = [threading.Thread(target=work, args=(r,)) for r in (1, 2)]
    for t in running:
        t.start()
    group = SharedMemoryGroup(windows[0], 3, None, failures.append)
    yield group, failures, errors
    if not failures:
        group.close()
        group.close()       # a second time does nothing
    for t in running:
        t.join(10)
        assert not t.is_alive()
    for shared_memory in windows:
        shared_memory.close()


def load(group, name: str, **more):
    """Loads a model as the engine does."""
    group.start_load(AsModelConfig(model_name=name, model_path="x", **more))
    try:
        return wait_for(group.poll_load)
    except AllSparkError:
        group.unload(name)
        raise


def step(group, name: str, plan: bytes):
    group.submit(name, plan)
    return group.collect()


def test_ranks_agree_on_the_cache(threads):
    group, failures, _ = threads
    info = load(group, "m")
    assert (info.num_spans, info.host_spans) == (98, 10)    # the least that any rank can hold
    assert group.held_spans() == {bytes(16): 0}             # what all of them have
    assert step(group, "m", b"plan" * 500_000) == (0, b"plan" * 500_000)
    group.unload("m")
    assert not failures


@pytest.mark.parametrize("name,message", [
    ("load1", "rank 1: no memory for load1"), ("load0", "rank 0: no memory for load0"),
    ("allocate2", "rank 2: no memory for allocate2"), ("load-all", "ALLSPARK_MEMORY_ERROR: no memory for load-all"),
])
def test_a_load_that_fails_anywhere_fails_as_a_whole(threads, name, message):
    group, failures, _ = threads
    with pytest.raises(AllSparkError, match=message):
        load(group, name)
    assert load(group, "m").num_spans == 98
    assert not failures


@pytest.mark.parametrize("name", ["lost-in-load1", "lost-in-allocate0"])
def test_a_load_that_loses_a_device_ends_the_group(threads, name):
    """Other models have steps on that device."""
    group, failures, errors = threads
    load(group, "m")
    group.start_load(AsModelConfig(model_name=name, model_path="x"))
    with pytest.raises(AllSparkError, match=f"rank {name[-1]}: the device is gone"):
        wait_for(group.poll_load)
    assert failures == [f"rank {name[-1]}: the device is gone"]
    wait_for(lambda: len(errors) == 2)


def test_a_step_that_fails_ends_the_group(threads):
    group, failures, errors = threads
    load(group, "step2")
    step(group, "step2", b"")                    # rank 0 has nothing to wait for in this fake step
    with pytest.raises(RuntimeError):
        for _ in range(100):
            step(group, "step2", b"")
            time.sleep(0.01)
    assert failures == ["rank 2: no memory for step2"]
    wait_for(lambda: len(errors) == 2)
    assert "rank 2" in errors[1]


def test_steps_of_gpus_are_queued_and_one_that_fails_ends_the_group(threads, monkeypatch):
    """The rank notices a failed step although no command follows it, and counts those that have ended."""
    monkeypatch.setattr(FakeRunner, "gpu", 0)
    group, failures, errors = threads
    load(group, "m")
    for number in range(5):
        assert step(group, "m", b"%d" % number) == (0, b"%d" % number)
    load(group, "step1")
    group.submit("step1", b"")
    wait_for(lambda: len(errors) == 2)
    assert errors[1] == "rank 1: step of 'step1': no memory for step1"
    with pytest.raises(RuntimeError):
        for _ in range(100):
            step(group, "m", b"")
            time.sleep(0.01)
    assert failures


def test_the_first_step_is_announced(monkeypatch):
    """The supervisor counts incarnations that served nothing."""
    from allspark_server import _native
    from allspark_server.runtime import runner
    from allspark_server.runtime.group import Group
    monkeypatch.setattr(runner, "ModelRunner", FakeRunner)
    monkeypatch.setattr(_native, "Stepper", FakeStepper)
    group, told = Group(), []
    group.models.on_served = lambda: told.append("served")
    load(group, "step0")
    with pytest.raises(MemoryError):
        step(group, "step0", b"")
    assert not told
    load(group, "m")
    step(group, "m", b"")
    step(group, "m", b"")
    assert told == ["served"]


def test_models_on_gpus_warm_up_between_steps_before_they_are_ready(threads):
    group, failures, _ = threads
    told = []
    group.models.progress = lambda name, part, what: told.append((part, what))
    load(group, "on-cpus")
    assert group.models.runners["on-cpus"].warmed == 0
    assert load(group, "m", compute_unit="CUDA:0,1,2").num_spans == 98
    assert group.models.runners["m"].warmed == FakeRunner.WARM_UPS
    assert [part for part, what in told if what == "warmed up"] == [0.4, 0.8, 1.0]
    with pytest.raises(AllSparkError, match="rank 1: no memory for warm1"):
        load(group, "warm1", compute_unit="CUDA:0,1,2")
    assert not failures


def test_a_warm_up_that_takes_too_long_ends(threads, monkeypatch, caplog):
    from allspark_server.runtime import group as module
    group, _, _ = threads
    monkeypatch.setattr(module, "WARM_UP_SECONDS", 0.0)
    caplog.set_level("INFO")
    load(group, "m", compute_unit="CUDA:0,1,2")
    assert group.models.runners["m"].warmed == 4 and "except for 6 sizes of steps" in caplog.text


def test_a_rank_connects_even_if_the_load_was_cancelled(monkeypatch):
    """Other ranks may have opened its device's memory; it is freed once they have left it."""
    from allspark_server.runtime import runner
    from allspark_server.runtime.rank_models import RankModels
    monkeypatch.setattr(runner, "ModelRunner", FakeRunner)
    models = RankModels()
    models.start_load({"model_name": "m", "model_path": "x"})
    wait_for(lambda: not models.answer().pending)
    models._cancelled.set()
    models.start_allocate("m", 1, 0, ["digest"], ["address"])
    wait_for(lambda: not models.answer().pending)
    assert "cancelled" in models.answer().message and models.runners["m"].connected == ["address"]


def test_local_group(monkeypatch):
    from allspark_server import _native
    from allspark_server.runtime import runner
    from allspark_server.runtime.group import Group
    monkeypatch.setattr(runner, "ModelRunner", FakeRunner)
    monkeypatch.setattr(_native, "Stepper", FakeStepper)
    group = Group()
    with pytest.raises(AllSparkError, match="ALLSPARK_MEMORY_ERROR: no memory"):
        load(group, "load0")
    assert load(group, "m").num_spans == 100
    group.close()


def test_a_load_that_hangs_does_not_keep_the_group_from_closing(monkeypatch, caplog):
    from allspark_server import _native
    from allspark_server.runtime import rank_models, runner
    from allspark_server.runtime.group import Group
    monkeypatch.setattr(runner, "ModelRunner", FakeRunner)
    monkeypatch.setattr(_native, "Stepper", FakeStepper)
    monkeypatch.setattr(rank_models, "CLOSE_SECONDS", 0.1)
    group = Group()
    load(group, "m")
    group.start_load(AsModelConfig(model_name="hangs", model_path="x"))
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    closing.join(5)
    FakeRunner.answers.set()
    assert not closing.is_alive() and "system of the model answers" in caplog.text


def test_config_of_a_model_argument(tmp_path):
    from allspark_server.__main__ import model_config, numbers
    assert numbers("4,0-2") == [4, 0, 1, 2]
    assert model_config(str(tmp_path)).model_name == tmp_path.name
    assert model_config(json.dumps({"model_name": "a", "model_path": "b", "engine_max_batch": 3})).engine_max_batch == 3
