"""The executor: what it refuses without changing anything, the effect of one thread's failure on the others, and that
streams of weights do not change bits.
"""
import os
import subprocess
import sys

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from support.programs import run_program


def test_a_thread_that_fails_before_an_inner_barrier_takes_the_others_along(tmp_path):
    """And the division of more values than 32 bits count, and of units of work."""
    run_program(tmp_path, "pool", "cpu/pool.cpp")


@pytest.mark.parametrize("x, out_features, bias", [
    ((3, 31), 5, None), ((3, 33), 5, None), ((32,), 5, None), ((1, 3, 32), 5, None), ((3, 32), 4, None),
    ((3, 32), 6, None), ((3, 32), -1, None),
    ((3, 32), 5, (4,)), ((3, 32), 5, (5, 1)),
])
def test_products_of_shapes_that_do_not_fit_are_refused(x, out_features, bias):
    executor = _native.Executor(num_threads=2)
    handle = executor.add_matrix(5, 32, "float32")
    executor.fill_matrix(handle, np.ones((5, 32), np.float32), "F32")
    with pytest.raises(ValueError, match="5 x 32"):
        executor.multiply(handle, np.ones(x, np.float32), out_features,
                          None if bias is None else np.ones(bias, np.float32))
    assert np.all(executor.multiply(handle, np.ones((2, 32), np.float32), 5) == 32)
    assert executor.multiply(handle, np.ones((0, 32), np.float32), 5).shape == (0, 5)
    with pytest.raises(IndexError):
        executor.multiply(handle + 1, np.ones((2, 32), np.float32), 5)


STREAMS = """
import numpy as np
from allspark_server import _native
rng = np.random.default_rng(int.from_bytes(__import__("os").urandom(4), "little"))
for n, k in ((1, 1), (67, 31), (129, 257), (640, 192), (1031, 896)):
    for form, group in (("bfloat16", 0), ("float32", 0), ("w8a8", 0), ("w8a8", 64), ("w4a8", 64), ("int4", 64),
                        ("int8", 0)):
        if group and k < group:
            continue
        executor = _native.Executor(num_threads=2)
        handle = executor.add_matrix(n, k, form, group)
        executor.fill_matrix(handle, rng.normal(size=(n, k)).astype(np.float32), "F32")
        x, bias, found = rng.normal(size=(1, k)).astype(np.float32), rng.normal(size=n).astype(np.float32), []
        for several in (False, True):
            _native.use_streams(several)
            found.append(executor.multiply(handle, x, n, bias).tobytes())
        assert found[0] == found[1], (n, k, form, group)
print("equal")
"""


@pytest.mark.skipif("avx2" not in _native.isas(), reason="AVX2's kernels have streams")
def test_streams_of_weights_do_not_change_bits():
    ran = subprocess.run([sys.executable, "-c", STREAMS], env=os.environ | {"ALLSPARK_ISA": "avx2"}, text=True,
                         capture_output=True, timeout=100)
    assert ran.stdout == "equal\n", ran.stderr


def small_model(executor=None, groups=(), drafts=()):
    """A vocabulary, an attention layer that changes logits, a sampler: 4 slots, 8 spans of 16 tokens, at most 64
    rows.
    """
    executor = executor or _native.Executor(num_threads=2)
    for group in groups:
        executor.add_cache_group(*group)
    rng = np.random.default_rng(0)
    weights = []
    for n, k in ((40, 16), (48, 16), (40, 16)):
        weights.append(executor.add_matrix(n, k, "float32"))
        executor.fill_matrix(weights[-1], rng.normal(size=(n, k)).astype(np.float32), "F32")
    hidden, qkv, mixed, last, logits = (executor.add_tensor(*a) for a in ((16,), (48,), (16,), (16, True), (40, True)))
    executor.add_op("embedding", [], [hidden], weights[:1], {"vocab_begin": 0})
    executor.add_op("linear", [hidden], [qkv], weights[1:2], {})
    executor.add_op("span_attention", [qkv], [mixed], [],
                    {"layer": 0, "q_heads": 1, "kv_heads": 1, "head_dim": 16, "group": 1, "scale": 0.25,
                     "window": groups[0][1] if groups else 0})
    executor.add_op("select_rows", [mixed], [last], [], {})
    executor.add_op("linear", [last], [logits], weights[2:], {})
    executor.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": 40})
    executor.allocate(64, 4, 100, 16, 8, "float32", drafts=list(drafts))
    return executor


@pytest.mark.parametrize("groups, of_draft, group", [
    ((), [("full", 0)] * 2, 1), ([("sliding", 40)], (), 0), ([("sliding", 40)], [("sliding", 40)], 0),
])
def test_a_draft_model_needs_whole_histories_of_its_cache_groups(groups, of_draft, group):
    model = _native.Executor(num_threads=2)
    draft = small_model(model.beside(), of_draft)
    with pytest.raises(ValueError, match=f"cache group {group}, of which the model does not keep every position"):
        small_model(model, groups, [draft])
    model = _native.Executor(num_threads=2)
    small_model(model, [("full", 0), ("full", 0)], [small_model(model.beside())])


def fresh(slot, prompt, cached=0):
    return NewSlot(slot, prompt, SamplingParams(do_sample=False, prompt_len=len(prompt)).encode(), cached)


HUGE = 2**31 - 1
BAD_PLANS = {
    "positions": StepPlan(free=[0], new=[fresh(0, [9] * 20, 16), fresh(1, [1] * 9)],
                          work=[WorkItem(1, 9, SAMPLE, spans=[4]), WorkItem(0, HUGE, spans=[5])]),
    "in use": StepPlan(new=[fresh(1, [7]), fresh(0, [7])]),
    "no sequence": StepPlan(free=[0], work=[WorkItem(0, 1, SAMPLE)]),
    "span 8": StepPlan(work=[WorkItem(0, 1, SAMPLE, spans=[7, 8])]),
    "span -1": StepPlan(work=[WorkItem(0, 1, SAMPLE, spans=[-1])]),
    "slot 4": StepPlan(free=[0, 4]),
    "last row": StepPlan(work=[WorkItem(0, 1, SAMPLE, [4])]),
    "65 rows": StepPlan(free=[0], new=[fresh(0, [3] * 33), fresh(1, [3] * 32)],
                        work=[WorkItem(0, 33, SAMPLE, spans=[0, 1, 2]), WorkItem(1, 32, SAMPLE, spans=[3, 4])]),
    "cached": StepPlan(free=[0], new=[fresh(0, [3] * 20, 7)], work=[WorkItem(0, 13, SAMPLE, spans=[0, 1])]),
    "drafts": StepPlan(work=[WorkItem(0, 1, Flag.LOOKUP, drafts=2)]),
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_a_refused_plan_leaves_the_executor_as_it_was(message):
    begin = StepPlan(new=[fresh(0, [5, 6, 7])], work=[WorkItem(0, 3, SAMPLE, spans=[2])]).encode()
    go_on = StepPlan(work=[WorkItem(0, 1, SAMPLE)]).encode()
    untouched, tried = small_model(), small_model()
    for executor in (untouched, tried):
        executor.step(begin)
    with pytest.raises(ValueError, match=message):
        tried.step(BAD_PLANS[message].encode())
    expected, got = (executor.step(go_on, True) for executor in (untouched, tried))
    assert np.array_equal(expected.logits, got.logits) and expected.tokens[0] == got.tokens[0]


def test_bytes_that_are_no_plan_are_refused():
    executor = small_model()
    for data in (b"", b"abc", b"abcd", bytes(400)):
        with pytest.raises(ValueError, match="step plan"):
            executor.step(data)
