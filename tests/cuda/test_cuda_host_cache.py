"""The host cache on the GPU: spans that are offloaded and restored keep their bits."""

from __future__ import annotations

import os

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import COPIES, SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
from support.gpu_sampling import LONGEST, SLOTS, SPAN, Head

pytestmark = pytest.mark.cuda
VOCAB, SPANS, OFFSET = 3000, LONGEST // SPAN, 4096


def key(number: int) -> list[int]:
    return [number, 7, 1, 2]


def copies(saved: list[tuple[int, int]], restored: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Pairs (span, span of the host cache), with a key for each of the latter."""
    return [(COPIES, [len(saved), *(word for span, host in saved + restored for word in (span, host, *key(host)))])]


def begin(slot: int, history: list[int], cached: int, spans: list[int], sections=()) -> bytes:
    block = SamplingParams(do_sample=False, prompt_len=len(history), logprobs=True).encode()
    return StepPlan(new=[NewSlot(slot, history, block, cached)],
                    work=[WorkItem(slot, len(history) - cached, SAMPLE, spans=spans)], sections=list(sections)).encode()


def file_for(head: Head, path, spans: int) -> int:
    """The descriptor of an allocated file; an existing one keeps its content."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, OFFSET + head.e.host_cache_bytes(spans))
    return fd


def allocate(head: Head, spans: int, path=None) -> None:
    if path is None:
        head.e.allocate_host_cache(spans)
        return
    fd = file_for(head, path, spans)
    head.e.allocate_host_cache(spans, fd, OFFSET)
    os.close(fd)


@pytest.mark.parametrize("stored", ["memory", "file"])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8", "uint4", "float8"])
def test_spans_that_come_back(cache, stored, tmp_path):
    rng = np.random.default_rng(0)
    head = Head(VOCAB, rng, 1.0, False, cache=cache)
    allocate(head, 40, tmp_path / "spans" if stored == "file" else None)
    assert head.e.host_cache_bytes(40) > 0
    prompt, other = rng.integers(1, VOCAB, 100).tolist(), rng.integers(1, VOCAB, 110).tolist()
    spans = list(range(SPANS))
    expected = head.e.step(begin(0, prompt, 0, spans), True)
    saved = [(span, 30 - span) for span in range(6)]
    # The spans are saved, and written to in the same step.
    head.e.step(StepPlan(free=[0]).encode())
    head.e.step(begin(0, other, 0, spans, copies(saved, [])))
    restored = [(50 - i, 30 - i) for i in range(6)]
    table = [span for span, _ in restored] + [60, 61]
    stepper = _native.Stepper()
    stepper.submit(head.e, begin(1, prompt, 96, table, copies([], restored)))
    found = stepper.collect()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()
    # A restored span may overwrite one that is saved in the same step.
    head.e.step(StepPlan(free=[1]).encode())
    swapped = [(span, host - 20) for span, host in restored]
    found = head.e.step(begin(1, prompt, 96, table, copies(swapped, restored)), True)
    assert found.logits.tobytes() == head.e.step(begin(2, prompt, 96, [*(span for span, _ in restored), 58, 59],
                                                       copies([], swapped)), True).logits.tobytes()
    assert SLOTS > 2


@pytest.mark.parametrize("stored", ["memory", "file"])
def test_a_span_that_was_not_saved(stored, tmp_path):
    head = Head(VOCAB, np.random.default_rng(1), 1.0, False)
    allocate(head, 4, tmp_path / "spans" if stored == "file" else None)
    with pytest.raises(RuntimeError, match="not what was written there|differs from what was saved"):
        head.e.step(begin(0, [1] * 20, 16, [0, 1], copies([], [(0, 2)])))
    with pytest.raises(ValueError):
        head.e.step(begin(0, [1] * 20, 16, [0, 1], copies([], [(0, 9)])))


def saved_keys(head: Head) -> dict[int, bytes]:
    held, dropped = head.e.verify_host_cache()
    assert not dropped
    return {host: identity for identity, host in held.items()}


@pytest.mark.parametrize("cache", ["bfloat16", "uint4"])
def test_a_file_outlives_the_executor(cache, tmp_path):
    """Also more copies in a step than the buffer holds, and a damaged span."""
    prompt = np.random.default_rng(2).integers(1, VOCAB, 100).tolist()
    head = Head(VOCAB, np.random.default_rng(0), 1.0, False, cache=cache)
    allocate(head, 50, tmp_path / "spans")
    assert saved_keys(head) == {}
    expected = head.e.step(begin(0, prompt, 0, list(range(SPANS))), True)
    saved = [(i % 6, i) for i in range(40)]  # each of six spans several times, under other keys
    head.e.step(StepPlan(free=[0]).encode())
    head.e.step(begin(1, prompt[:5], 0, [60], copies(saved, [])))
    assert saved_keys(head) == {i: np.array(key(i), np.int32).tobytes() for i in range(40)}
    del head

    head = Head(VOCAB, np.random.default_rng(0), 1.0, False, cache=cache)
    with open(tmp_path / "spans", "r+b") as file:   # the last byte of span 39's content
        stride = (head.e.host_cache_bytes(50) - head.e.host_cache_bytes(49))
        file.seek(OFFSET + 4096 + 39 * stride + 8)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    allocate(head, 50, tmp_path / "spans")
    held, dropped = head.e.verify_host_cache()
    assert sorted(held.values()) == list(range(39)) and dropped == 1
    restored = [(20 + i, i) for i in range(36)]      # the last six are those that the prompt uses
    table = [20 + i for i in range(30, 36)] + [60, 61]
    found = head.e.step(begin(0, prompt, 96, table, copies([], restored)), True)
    assert found.logits.tobytes() == expected.logits.tobytes()
    with pytest.raises(RuntimeError, match="differs from what was saved"):
        head.e.step(begin(1, prompt, 96, table, copies([], [(10, 39)])))


def test_a_restore_before_the_save_is_in_the_file(tmp_path):
    """Two steps are queued: the second restores what the first saves."""
    prompt = np.random.default_rng(3).integers(1, VOCAB, 100).tolist()
    head = Head(VOCAB, np.random.default_rng(0), 1.0, False)
    allocate(head, 40, tmp_path / "spans")
    expected = head.e.step(begin(0, prompt, 0, list(range(SPANS))), True)
    head.e.step(StepPlan(free=[0]).encode())
    stepper = _native.Stepper()
    stepper.submit(head.e, begin(1, prompt[:5], 0, [60], copies([(i, i) for i in range(6)], [])))
    stepper.submit(head.e, begin(2, prompt, 96, [*range(30, 36), 61, 62], copies([], [(30 + i, i) for i in range(6)])))
    stepper.collect()
    found = stepper.collect()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert sorted(saved_keys(head)) == list(range(6))


def test_an_engine_finds_its_prefixes_again(tmp_path):
    """A model is installed twice with the same directory; the second time it restores its prompt's spans."""
    checkpoints = pytest.importorskip("support.checkpoints")
    from allspark_client import AsModelConfig
    from allspark_server.engine.engine import Engine

    prompt, answers = list(range(5, 150)), []
    for _ in range(2):
        engine = Engine()
        try:
            engine.install_model(AsModelConfig(
                model_name="m", model_path=str(checkpoints.checkpoint("qwen2-gqa-tied")), compute_unit="CUDA:0",
                cache_span_size=16, engine_max_length=200, engine_max_batch=3, host_cache_memory=1 << 22,
                host_cache_dir=str(tmp_path)))
            engine.start_model("m")
            for number in range(3):   # saves follow in later steps
                _, handle, results = engine.start_request("m", {"input_ids": prompt}, {
                    "seed": 7, "max_new_tokens": 6, "eos_token_id": -1})
                ids = []
                while (elements := results.Get()) is not None:
                    ids += elements.ids_from_generate
                engine.release_request("m", handle)
                if number == 0:
                    answers.append((ids, engine.get_as_engine_stat("m").used_host_span))
        finally:
            engine.close()
    assert answers[0][0] == answers[1][0]
    assert answers[1][1] >= 9, "the spans were there after the restart"
