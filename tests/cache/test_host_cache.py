"""The host cache (the prefix cache's offload tier) with real spans: the restored bits, in memory and in a file, on
every rank.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct

import numpy as np
import pytest

from allspark_client import AllSparkError, AsCacheMode, AsModelConfig, AsStatus
from allspark_client.config import check_available
from allspark_server.access import ModelRoots
from allspark_server.cache.host_cache import CopyCosts
from allspark_server.engine.engine import Engine
from allspark_server.runtime.host_cache import HEADER, HostCacheFile, held_by_all, pack_held
from allspark_server.runtime.plan import COPIES, SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.checkpoints import checkpoint
from support.driver import Driver

NAME = "qwen2-gqa-tied"
MODES = {"float32": {"cache_dtype": "float32"}, "bfloat16": {"cache_dtype": "bfloat16"},
         "int8": {"cache_mode": AsCacheMode.AsCacheQuantI8}, "uint4": {"cache_mode": AsCacheMode.AsCacheQuantU4}}
KEY = bytes(range(16))


def config(spans: int = 14, host: int = 64, **fields) -> AsModelConfig:
    """A cache of `spans` spans and a host cache of about as many as `host`."""
    size = spans_bytes(fields)
    return AsModelConfig(model_name="m", model_path=str(checkpoint(NAME)), cache_span_size=16, engine_max_length=200,
                         engine_max_batch=3, num_threads=2, cache_memory=spans * size,
                         host_cache_memory=host * (size + 96) + 2 * HEADER if host else 0, **fields)


def spans_bytes(fields: dict) -> int:
    from allspark_server.runtime.runner import ModelRunner

    runner = ModelRunner(AsModelConfig(model_name="m", model_path=str(checkpoint(NAME)), cache_span_size=16,
                                       **{k: v for k, v in fields.items() if k in ("cache_dtype", "cache_mode",
                                                                                   "speculation", "draft_model")}))
    runner.load()
    size = runner._span_bytes
    runner.close()
    return size


class Serving:
    """An engine with one model, started."""

    def __init__(self, config: AsModelConfig):
        self.engine = Engine()
        try:
            self.engine.install_model(config)
        except BaseException:
            self.engine.close()
            raise
        self.engine.start_model("m")

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_) -> None:
        self.engine.close()

    def ask(self, prompt: list[int], count: int = 6) -> tuple[list[int], list[float]]:
        _, handle, results = self.engine.start_request("m", {"input_ids": prompt}, {
            "seed": 7, "max_new_tokens": count, "eos_token_id": -1, "logprobs": True})
        ids, logprobs = [], []
        while (elements := results.Get()) is not None:
            ids += elements.ids_from_generate
            logprobs += elements.token_logprobs_list
        self.engine.release_request("m", handle)
        return ids, logprobs

    @property
    def stat(self):
        return self.engine.get_as_engine_stat("m")


PROMPTS = [[(17 * i * i + 31 * seed + i) % 1000 for i in range(150)] for seed in range(4)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list]:
    """For each type of cache, the output of an engine without a prefix cache."""
    found = {}
    for name, fields in MODES.items():
        with Serving(config(40, 0, enable_prefix_cache=False, **fields)) as serving:
            found[name] = [serving.ask(prompt) for prompt in PROMPTS]
    return found


@pytest.mark.parametrize("cache", MODES)
def test_what_comes_back_has_the_same_bits(cache, expected):
    with Serving(config(**MODES[cache])) as serving:
        for _ in range(3):
            assert [serving.ask(prompt) for prompt in PROMPTS] == expected[cache]
        stat = serving.stat
        assert stat.prefix_cache_host_token >= 8 * 100 and stat.restored_host_span and stat.saved_host_span
        assert stat.total_host_span >= 64 and stat.used_host_span <= stat.total_host_span
        info = serving.engine.get_model_info("m")
        assert info.host_spans == stat.total_host_span and info.host_cache_bytes > 64 * spans_bytes(MODES[cache])


def test_the_draft_models_spans_come_back_too(expected):
    fields = {"speculation": "draft", "draft_model": str(checkpoint(NAME)), **MODES["float32"]}
    with Serving(config(**fields)) as serving:
        drafted = []
        for _ in range(2):
            before = serving.engine._models["m"].scheduler.counters.accepted_tokens
            assert [serving.ask(prompt) for prompt in PROMPTS] == expected["float32"]
            drafted.append(serving.engine._models["m"].scheduler.counters.accepted_tokens - before)
        assert serving.stat.restored_host_span and drafted[0] == drafted[1] > 0


# --- a file ---


def file_of(directory) -> str:
    (name,) = os.listdir(directory)
    return os.path.join(directory, name)


def test_a_file_outlives_the_process(tmp_path, expected, caplog, monkeypatch):
    # Otherwise a copy that was slow, because other tests run, lets spans of so small a model be computed again instead.
    monkeypatch.setattr(CopyCosts, "worthwhile", lambda self: True)
    directory = tmp_path / "spans"
    with Serving(config(host_cache_dir=str(directory))) as serving:
        assert [serving.ask(prompt) for prompt in PROMPTS] == expected["float32"]
    assert os.stat(file_of(directory)).st_mode & 0o777 == 0o600
    with caplog.at_level(logging.INFO), Serving(config(host_cache_dir=str(directory))) as serving:
        assert "spans of model 'm'; they were checked in" in caplog.text
        assert serving.stat.used_host_span >= 4 * 9
        assert [serving.ask(prompt) for prompt in PROMPTS] == expected["float32"]
        assert serving.stat.prefix_cache_host_token == 4 * 144  # all but the last span, of which a row is computed


def test_damaged_spans_of_a_file_are_dropped(tmp_path, expected, caplog):
    with Serving(config(host_cache_dir=str(tmp_path))) as serving:
        assert [serving.ask(prompt) for prompt in PROMPTS] == expected["float32"]
        held = len(serving.engine._models["m"].host_cache)
    size = os.path.getsize(file_of(tmp_path))
    with open(file_of(tmp_path), "r+b") as file:
        file.seek(size - 60 * spans_bytes({}))
        file.write(os.urandom(5))
        file.seek(HEADER + 16)  # the first one's checksum
        file.write(bytes(8))
    with caplog.at_level(logging.WARNING), Serving(config(host_cache_dir=str(tmp_path))) as serving:
        assert "damaged spans are dropped" in caplog.text
        assert held - 2 <= serving.stat.used_host_span < held
        assert [serving.ask(prompt) for prompt in PROMPTS] == expected["float32"]


@pytest.mark.parametrize("fate", ["model", "size", "torn", "header", "version"])
def test_a_file_of_something_else_is_made_anew(tmp_path, expected, caplog, fate):
    with Serving(config(host_cache_dir=str(tmp_path))) as serving:
        serving.ask(PROMPTS[0])
    path, fields = file_of(tmp_path), {}
    if fate == "model":
        fields = MODES["bfloat16"]
    elif fate == "size":
        fields = {"host": 40}
    elif fate == "torn":
        os.truncate(path, os.path.getsize(path) // 2)
    elif fate == "version":
        with open(path, "r+b") as file:
            file.write(b"ASSPANS1")
    else:
        with open(path, "r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", 1 << 31))
    with caplog.at_level(logging.WARNING), Serving(config(host_cache_dir=str(tmp_path), **fields)) as serving:
        assert "it is overwritten" in caplog.text and serving.stat.used_host_span == 0
        cache = "bfloat16" if fate == "model" else "float32"
        assert [serving.ask(prompt) for prompt in PROMPTS[:2]] == expected[cache][:2]


def test_files_that_are_refused(tmp_path):
    with Serving(config(host_cache_dir=str(tmp_path))):
        with pytest.raises(AllSparkError, match="another process uses it; each group needs its own directory") as error:
            HostCacheFile(str(tmp_path), "m", 0, 1)
        assert error.value.status is AsStatus.ALLSPARK_IO_ERROR
    path = file_of(tmp_path)
    with open(path, "wb") as file:
        file.write(b"my diary")
    with pytest.raises(AllSparkError, match="is not a prefix cache file, and is left as it is"):
        Serving(config(host_cache_dir=str(tmp_path)))
    assert open(path, "rb").read() == b"my diary"
    os.unlink(path)
    os.symlink("/etc/passwd", path)
    with pytest.raises(AllSparkError, match="host_cache_dir: the file"):
        Serving(config(host_cache_dir=str(tmp_path)))
    with pytest.raises(AllSparkError, match="host_cache_dir: the file"):
        Serving(config(host_cache_dir="/dev/null/x"))
    with pytest.raises(ValueError, match="needs host_cache_memory"):
        config(host=0, host_cache_dir=str(tmp_path)).validate()
    with pytest.raises(ValueError, match="is the prefix cache's, which is off"):
        config(enable_prefix_cache=False).validate()
    with pytest.raises(AllSparkError, match="host_cache_memory=100 holds no span of 16 tokens"):
        Serving(AsModelConfig("m", str(checkpoint(NAME)), cache_span_size=16, host_cache_memory=100))


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(AllSparkError, match=r"No space left on device \(\d+ bytes are needed\)"):
        Serving(config(host_cache_dir=str(tmp_path)))


def test_clients_may_not_name_any_directory(tmp_path):
    with pytest.raises(AllSparkError, match="host_cache_dir='/var/x' is outside of the directories"):
        named = AsModelConfig("m", str(tmp_path), host_cache_memory=1, host_cache_dir="/var/x")
        ModelRoots([tmp_path]).check_model(named)
    check_available(AsModelConfig("m", "/x", host_cache_memory=1 << 30))


def test_only_what_all_ranks_hold_counts():
    one, two, three = (bytes([i]) * 16 for i in (1, 2, 3))
    packed = [pack_held({one: 0, two: 1, three: 2}), pack_held({one: 0, two: 2, three: 2})]
    assert held_by_all(packed) == {one: 0, three: 2} and held_by_all([pack_held({})]) == {}


# --- plans ---


def words(saved, restored) -> list[int]:
    copies = [(span, host, *struct.unpack("<4i", key)) for span, host, key in (*saved, *restored)]
    return [len(saved), *(word for copy in copies for word in copy)]


@pytest.mark.parametrize("world", [1, 2])
def test_copies_of_every_rank(world):
    """A sequence's span is offloaded, overwritten and restored: the logits are the same."""
    prompt = PROMPTS[0][:40]
    with Driver(checkpoint(NAME), world, cache_span_size=16, host_cache_memory=1 << 20) as driver:
        sampling = SamplingParams(do_sample=False, prompt_len=40).encode()

        def logits_after(cached: int, rows: int, copies=()) -> np.ndarray:
            sections = [(COPIES, words(*copies))] if copies else []
            plan = StepPlan(new=[NewSlot(0, prompt, sampling, cached)],
                            work=[WorkItem(0, rows, SAMPLE, spans=[0, 1, 2])], sections=sections)
            row = driver.step(plan)[1]
            driver.step(StepPlan(free=[0]))
            return row

        expected = logits_after(0, 40)
        driver.step(StepPlan(sections=[(COPIES, words([(0, 5, KEY), (1, 6, KEY)], []))]))
        other = StepPlan(new=[NewSlot(0, PROMPTS[1][:40], sampling)], work=[WorkItem(0, 40, SAMPLE, spans=[0, 1, 2])])
        assert not np.array_equal(driver.step(other)[1], expected)
        driver.step(StepPlan(free=[0]))
        assert not np.array_equal(logits_after(32, 8), expected)
        both = [(2, 5, bytes(16)[:8] + b"otherkey")], [(6, 1, KEY)]
        back = [], [(0, 5, KEY), (1, 6, KEY)]
        assert np.array_equal(logits_after(32, 8, back), expected)
        driver.step(StepPlan(sections=[(COPIES, words(both[0], [(1, 6, KEY)]))]))
        assert np.array_equal(logits_after(32, 8), expected)


def test_copies_that_are_refused():
    with Driver(checkpoint(NAME), cache_span_size=16, host_cache_memory=1 << 20) as driver:
        spans, host = driver.info.num_spans, driver.info.host_spans
        for saved, restored, why in [
            ([(spans, 0, KEY)], [], f"a copy of span {spans} of {spans}"),
            ([(-1, 0, KEY)], [], "a copy of span -1"),
            ([(0, host, KEY)], [], f"and span {host} of the second tier's {host}"),
            ([], [(0, -1, KEY)], "and span -1 of the second tier"),
            ([(0, 1, KEY), (2, 1, KEY)], [], "two copies to span 1"),
            ([], [(3, 0, KEY), (3, 1, KEY)], "two copies to span 3"),
        ]:
            with pytest.raises(ValueError, match=why):
                driver.step(StepPlan(sections=[(COPIES, words(saved, restored))]))
        for bad in ([], [2], [0, 1, 2], [2, *range(6)], [-1, *range(6)]):
            with pytest.raises(ValueError, match="step plan"):
                driver.step(StepPlan(sections=[(COPIES, bad)]))
    with Driver(checkpoint(NAME), cache_span_size=16) as driver:
        with pytest.raises(ValueError, match="and span 0 of the second tier's 0"):
            driver.step(StepPlan(sections=[(COPIES, words([(0, 0, KEY)], []))]))


def test_what_is_not_what_was_saved_ends_the_step(tmp_path):
    fields = {"cache_span_size": 16, "host_cache_memory": 1 << 20, "host_cache_dir": str(tmp_path)}
    with Driver(checkpoint(NAME), **fields) as driver:
        driver.step(StepPlan(sections=[(COPIES, words([(0, 3, KEY)], []))]))
        with pytest.raises(RuntimeError, match="span 4 of the prefix cache's second tier differs from what was"):
            driver.step(StepPlan(sections=[(COPIES, words([], [(0, 4, KEY)]))]))
        with pytest.raises(RuntimeError, match="span 3 of the prefix"):
            driver.step(StepPlan(sections=[(COPIES, words([], [(0, 3, bytes(16))]))]))
        driver.step(StepPlan(sections=[(COPIES, words([], [(0, 3, KEY)]))]))
        path = file_of(tmp_path)
        copy = tmp_path / "copy"
        shutil.copy(path, copy)
        data = bytearray(copy.read_bytes())
        at = data.index(KEY)
        entry = at - HEADER
        assert entry == 3 * 32
        with open(path, "r+b") as file:
            file.seek(at + 16)
            file.write(b"\1" * 8)
        with pytest.raises(RuntimeError, match="span 3 of the prefix"):
            driver.step(StepPlan(sections=[(COPIES, words([], [(0, 3, KEY)]))]))
