"""The host cache on the GPU: spans that are offloaded and restored keep their bits."""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import COPIES, SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
from support.gpu_sampling import LONGEST, SLOTS, SPAN, Head

pytestmark = pytest.mark.cuda
VOCAB, SPANS = 3000, LONGEST // SPAN


def key(number: int) -> list[int]:
    return [number, 7, 1, 2]


def copies(saved: list[tuple[int, int]], restored: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Pairs (span, span of the host cache), with a key for each of the latter."""
    return [(COPIES, [len(saved), *(word for span, host in saved + restored for word in (span, host, *key(host)))])]


def begin(slot: int, history: list[int], cached: int, spans: list[int], sections=()) -> bytes:
    block = SamplingParams(do_sample=False, prompt_len=len(history), logprobs=True).encode()
    return StepPlan(new=[NewSlot(slot, history, block, cached)],
                    work=[WorkItem(slot, len(history) - cached, SAMPLE, spans=spans)], sections=list(sections)).encode()


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8", "uint4", "float8"])
def test_spans_that_come_back(cache):
    rng = np.random.default_rng(0)
    head = Head(VOCAB, rng, 1.0, False, cache=cache)
    head.e.allocate_host_cache(40)
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


def test_a_span_that_was_not_saved():
    head = Head(VOCAB, np.random.default_rng(1), 1.0, False)
    head.e.allocate_host_cache(4)
    with pytest.raises(RuntimeError, match="not what was written there"):
        head.e.step(begin(0, [1] * 20, 16, [0, 1], copies([], [(0, 2)])))
    with pytest.raises(ValueError):
        head.e.step(begin(0, [1] * 20, 16, [0, 1], copies([], [(0, 9)])))
