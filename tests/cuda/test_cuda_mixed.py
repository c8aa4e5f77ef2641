"""Mixed groups with a GPU: it computes the model, CPUs its routed experts. Ranks are threads of this process."""
from __future__ import annotations

import re
import time

import numpy as np
import pytest

from allspark_client import AllSparkError
from allspark_server.runtime import expert_streams, rank_model
from allspark_server.runtime.rank_models import RankModels

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support import quantized_checkpoints
from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver, together
from support.mxfp4_checkpoint import mxfp4_pair

pytestmark = pytest.mark.cuda

SIZES = {"engine_max_length": 512, "cache_memory": 16 << 20, "num_threads": 2, "max_step_tokens": 128}
PROMPT = prompt_of(75)


def driver(name: str, experts: int, unit: str = "CUDA:0", **fields) -> Driver:
    nodes = ",".join(["0"] * experts)
    return Driver(checkpoint(name), 1 + experts, compute_unit=f"{unit}+CPU:{nodes}", **{**SIZES, **fields})


@pytest.mark.parametrize("name, form", [
    ("qwen3-moe", {}), ("qwen3-moe", {"weight_dtype": "bfloat16"}),
    ("qwen3-moe", {"weight_dtype": "int4", "weight_group_size": 32}), ("glm4-moe", {}), ("qwen2-moe", {}),
    ("gpt-oss", {}), ("mixtral", {}), ("granite-moe", {})])
def test_a_gpu_is_near_a_cpu_and_its_bits_do_not_depend_on_chunks(name, form):
    with driver(name, 2, "CPU:0", **form) as own:
        _, near = own.generate(PROMPT, 1)
    with driver(name, 2, **form) as mixed:
        tokens, logits = mixed.generate(PROMPT, 8)
        again, rows = mixed.generate(PROMPT, 8, 17)
    spread = 0.03 if form else 0.003
    np.testing.assert_allclose(logits[0], near[0], atol=spread * np.abs(near[0]).max(), rtol=0)
    assert tokens == again
    np.testing.assert_array_equal(np.stack(logits), np.stack(rows))


def test_bits_do_not_depend_on_the_batch():
    prompts = [prompt_of(5), prompt_of(40, seed=3)]
    with driver("glm4-moe", 1) as mixed:
        both = together(mixed, prompts, 16)
        alone = [together(mixed, [prompt], 64)[0] for prompt in prompts]
    np.testing.assert_array_equal(np.stack(both), np.stack(alone))


@pytest.mark.parametrize("streaming", [0, 1, 20])
def test_rows_without_outputs_are_left_out_of_the_last_layer(streaming, monkeypatch):
    """Prompts at once and in chunks, most of which have no outputs, beside a sequence that decodes; in padded steps."""
    fields = {**STREAMED["int4"], "expert_streaming_rows": streaming}

    def run():
        with driver("glm4-moe", 2, **fields) as mixed:
            found = [mixed.generate(PROMPT, 4, chunk) for chunk in (None, 16, 3)]
            return found, together(mixed, [prompt_of(5), prompt_of(60, seed=3)], 16)

    found, several = run()
    monkeypatch.setattr(rank_model, "with_early_selection", lambda graph: graph)
    others, all_rows = run()
    for (own, rows), (tokens, logits) in zip(found, others):
        assert own == tokens
        np.testing.assert_array_equal(np.stack(rows), np.stack(logits))
    np.testing.assert_array_equal(np.stack(several), np.stack(all_rows))


def test_warm_up_and_graphs():
    with driver("qwen3-moe", 3) as mixed:
        expected = mixed.generate(PROMPT, 6)
        left = 1
        while left:
            steps = [mixed.pool.submit(runner.warm_up, 8) for runner in mixed.runners]
            done, total = steps[0].result()
            assert all(step.result() == (0, 0) for step in steps[1:])
            left = total - done
        began = time.perf_counter()
        tokens, logits = mixed.generate(PROMPT, 6)
        assert time.perf_counter() - began < 10
    assert tokens == expected[0]
    np.testing.assert_array_equal(np.stack(logits), np.stack(expected[1]))


def test_a_rejected_plan_leaves_the_ranks_in_step():
    with driver("qwen3-moe", 1) as mixed:
        before = mixed.generate(PROMPT, 2)[0]
        steps = [mixed.pool.submit(runner.step, b"no plan", False) for runner in mixed.runners]
        with pytest.raises(ValueError):
            steps[0].result()
        assert steps[1].exception() is None and mixed.generate(PROMPT, 2)[0] == before


STREAMED = {"int8": {"weight_dtype": "int8", "weight_group_size": 64}, "w8a8": {"weight_dtype": "w8a8"},
            "int4": {"weight_dtype": "int4", "weight_group_size": 32}, "mxfp4": {}, "gptq": {}}


def path_of(form: str, folder):
    """A checkpoint whose experts are in this format, or become so."""
    if form == "mxfp4":
        return mxfp4_pair(folder)[0]
    if form == "gptq":
        return quantized_checkpoints.write_pair(folder, quantized_checkpoints.GLM,
                                                *quantized_checkpoints.gptq(4, 32), seed=5)[0]
    return checkpoint("qwen3-moe")


@pytest.mark.parametrize("experts", [1, 2, 4])      # 4: whole experts
@pytest.mark.parametrize("form", STREAMED)
def test_experts_on_the_gpu_change_no_bit(form, experts, tmp_path, monkeypatch, caplog):
    """Steps from 32 rows on, in chunks around that number; copies in several parts of a matrix."""
    path, unit = path_of(form, tmp_path), "CUDA:0+CPU:" + ",".join(["0"] * experts)

    def run(first_rows: int, chunks):
        with Driver(path, 1 + experts, compute_unit=unit, expert_streaming_rows=first_rows,
                    **{**SIZES, **STREAMED[form]}) as mixed:
            found = [mixed.generate(PROMPT, 4, chunk) for chunk in chunks]
            return found, mixed.runners[0]._executor.streamed_rows, len(expert_streams.expert_ops(
                mixed.runners[0].opened[0].whole))

    ((tokens, logits),), none, layers = run(0, [None])
    assert not none
    monkeypatch.setattr(expert_streams, "PART", 1 << 12)
    caplog.set_level("INFO")
    found, rows, _ = run(32, [None, 31, 32, 33, 50])
    assert "the GPU computes experts of steps with at least 32 rows" in caplog.text, caplog.text
    assert rows == (layers - 1) * (75 + 0 + 64 + 66 + 50)       # the last layer has one row
    for own, bits in found:
        assert own == tokens
        np.testing.assert_array_equal(np.stack(bits), np.stack(logits))
    for by_ranks in (3, 1000):      # ranks compute a part, or all
        monkeypatch.setattr(expert_streams, "BY_RANKS", by_ranks)
        found += run(32, [None, 33])[0]
    for own, bits in found:
        assert own == tokens
        np.testing.assert_array_equal(np.stack(bits), np.stack(logits))
    monkeypatch.setattr(expert_streams, "BY_RANKS", 2)
    found, rows, _ = run(1, [None, 7])      # all steps
    assert rows >= (layers - 1) * 2 * (75 + 3)
    for own, bits in found:
        assert own == tokens
        np.testing.assert_array_equal(np.stack(bits), np.stack(logits))


def test_steps_are_shared_with_the_ranks(monkeypatch):
    """Up to a number of rows, and only there."""
    monkeypatch.setattr(expert_streams, "BY_RANKS", 4)
    monkeypatch.setattr(expert_streams, "SPLIT_ROWS", 40)
    with driver("qwen3-moe", 2, expert_streaming_rows=30, **STREAMED["int8"]) as mixed:
        executor, found = mixed.runners[0]._executor, []
        layers = len(expert_streams.expert_ops(mixed.runners[0].opened[0].whole))
        for chunk, streamed, shared in ((None, 75, 0), (35, 70, 70), (45, 75, 30), (29, 0, 0)):
            before = executor.streamed_rows, executor.split_rows
            found.append(mixed.generate(PROMPT, 2, chunk))
            assert (executor.streamed_rows - before[0], executor.split_rows - before[1]) == (
                streamed * (layers - 1), shared * (layers - 1))     # the last layer has one row
    for own, bits in found[1:]:
        assert own == found[0][0]
        np.testing.assert_array_equal(np.stack(bits), np.stack(found[0][1]))


@pytest.mark.parametrize("by_ranks", [0, 4])
def test_streaming_with_warm_up_and_in_a_batch(by_ranks, monkeypatch):
    monkeypatch.setattr(expert_streams, "BY_RANKS", by_ranks)
    form = STREAMED["int4"]
    prompts = [prompt_of(5), prompt_of(60, seed=3)]
    with driver("glm4-moe", 2, expert_streaming_rows=0, **form) as mixed:
        wanted = together(mixed, prompts, 64)
    with driver("glm4-moe", 2, expert_streaming_rows=2, **form) as mixed:
        left = 1
        while left:
            steps = [mixed.pool.submit(runner.warm_up, 8) for runner in mixed.runners]
            done, total = steps[0].result()
            left = total - done
        assert not mixed.runners[0]._executor.streamed_rows
        for chunk in (64, 16):
            np.testing.assert_array_equal(np.stack(together(mixed, prompts, chunk)), np.stack(wanted))
        assert mixed.runners[0]._executor.streamed_rows


def test_the_gpu_counts_its_waits():
    """From each message until all ranks have answered, which includes their computing; warm-up is counted alike."""
    with driver("qwen3-moe", 2, expert_streaming_rows=0, **STREAMED["int8"]) as mixed:
        executor = mixed.runners[0]._executor
        layers = len(expert_streams.expert_ops(mixed.runners[0].opened[0].whole))
        before = executor.expert_times
        mixed.generate(PROMPT, 5)
        after = executor.expert_times
        assert after[0] - before[0] == 5 * layers
        computed = [now - then for now, then in zip(after[2], before[2] or [0.0, 0.0])]
        assert len(computed) == 2 and after[1] - before[1] > 0.9 * max(computed) > 0
        models = RankModels(0, 3, mixed.runners[0].shared_memory)
        models.runners["m"] = mixed.runners[0]
        numbers = models.numbers
        assert numbers["exchange_seconds"] >= numbers["wait_seconds"] == pytest.approx(after[1], abs=1e-5)
        assert not numbers.get("expert_streamed_rows")


def test_rows_are_chosen_and_sent_if_the_memory_does_not_suffice(caplog, monkeypatch):
    caplog.set_level("INFO")
    form = STREAMED["int4"]
    with driver("qwen3-moe", 1, **form) as mixed:
        wanted = mixed.generate(PROMPT, 2)
    assert "the GPU computes experts of steps" in caplog.text or "huge pages" in caplog.text
    real = expert_streams.stream_bytes
    monkeypatch.setattr(expert_streams, "stream_bytes", lambda *given: real(*given) // 50)
    with driver("qwen3-moe", 1, expert_streaming_rows=1, **form) as mixed:
        tokens, logits = mixed.generate(PROMPT, 2)
        assert not mixed.runners[0]._executor.streamed_rows
    assert "KiB were announced" in caplog.text
    assert tokens == wanted[0]
    np.testing.assert_array_equal(np.stack(logits), np.stack(wanted[1]))


def room_for(count: int, name: str, experts: int, **fields) -> int:
    """hot_expert_memory for so many hot experts, as the refusal of too little tells."""
    with pytest.raises(AllSparkError, match="no expert fits") as refused:
        driver(name, experts, hot_expert_memory=1, **fields)
    fixed, each = re.search(r": (\d+) bytes are for .*, (\d+) for each", str(refused.value)).groups()
    return int(fixed) + count * int(each)


@pytest.mark.parametrize("experts", [1, 2, 4])      # 4: whole experts
@pytest.mark.parametrize("form", ["int4", "w8a8"])
def test_hot_experts_change_no_bit(form, experts, monkeypatch):
    """While experts move, in graphs and in chunks that are computed in both ways, or copied, or both."""
    form = {**STREAMED[form], "expert_streaming_rows": 48}
    with driver("qwen3-moe", experts, **{**form, "expert_streaming_rows": 0}) as mixed:
        tokens, logits = mixed.generate(PROMPT, 80)
    monkeypatch.setattr(expert_streams, "PART", 1 << 12)
    for count, by_ranks in ((5, 0), (5, 4), (1000, 0), (1000, 1)):
        monkeypatch.setattr(expert_streams, "BY_RANKS", by_ranks)
        memory = room_for(count, "qwen3-moe", experts, **form)
        with driver("qwen3-moe", experts, hot_expert_memory=memory, **form) as mixed:
            for chunk in (17, None, 50):
                own, bits = mixed.generate(PROMPT, 80, chunk)
                assert own == tokens
                np.testing.assert_array_equal(np.stack(bits), np.stack(logits))
            hits, uses = mixed.runners[0]._executor.expert_uses
            assert 0 < hits < uses and (count == 5 or hits > uses / 2)


def test_hot_experts_in_a_batch_with_warm_up():
    form, prompts = STREAMED["int4"], [prompt_of(5), prompt_of(40, seed=3)]
    with driver("glm4-moe", 2, expert_streaming_rows=0, **form) as mixed:
        wanted = together(mixed, prompts, 16)
    with driver("glm4-moe", 2, expert_streaming_rows=0, hot_expert_memory=64 << 20, **form) as mixed:
        left = 1
        while left:
            steps = [mixed.pool.submit(runner.warm_up, 8) for runner in mixed.runners]
            done, total = steps[0].result()
            left = total - done
        for chunk in (16, 3, 8, 16):
            np.testing.assert_array_equal(np.stack(together(mixed, prompts, chunk)), np.stack(wanted))
        assert mixed.runners[0].expert_counts["expert_hits"] > 0


def test_the_memory_of_experts_is_given_back():
    form = {**STREAMED["int4"], "expert_streaming_rows": 48}
    with driver("qwen3-moe", 2, hot_expert_memory=256 << 20, **form) as mixed:
        tokens, logits = mixed.generate(PROMPT, 40)
        for _ in range(2):
            before = mixed.runners[0]._executor.expert_uses[0]
            mixed.runners[0].move_memory(False)
            mixed.runners[0].move_memory(True)
            own, bits = mixed.generate(PROMPT, 40)
            assert own == tokens and mixed.runners[0]._executor.expert_uses[0] > before
            np.testing.assert_array_equal(np.stack(bits), np.stack(logits))


def test_experts_in_floats_cannot_be_hot():
    with pytest.raises(AllSparkError, match="hot_expert_memory=1048576 is not possible: experts in bfloat16"):
        driver("qwen3-moe", 1, weight_dtype="bfloat16", hot_expert_memory=1 << 20)
