"""Draws from sets wider than the candidates, through the executor: several rounds, on several threads."""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

DIM, VOCAB, ROWS, STEPS = 16, 2600, 3, 120


def run(threads: int) -> list[list[int]]:
    """The tokens of every step of three sequences, whose searches end after different numbers of rounds."""
    rng = np.random.default_rng(1)
    e = _native.Executor(num_threads=threads)
    qkv, out, last = e.add_tensor(3 * DIM), e.add_tensor(DIM), e.add_tensor(DIM, True)
    logits = e.add_tensor(VOCAB, True)
    table, head = e.add_matrix(VOCAB, 3 * DIM, "float32"), e.add_matrix(VOCAB, DIM, "float32")
    e.fill_matrix(table, rng.normal(size=(VOCAB, 3 * DIM)).astype(np.float32), "F32")
    e.fill_matrix(head, rng.normal(size=(VOCAB, DIM)).astype(np.float32), "F32")
    e.add_op("embedding", [], [qkv], [table], {"vocab_begin": 0})
    e.add_op("span_attention", [qkv], [out], [], {"layer": 0, "q_heads": 1, "kv_heads": 1, "head_dim": DIM, "group": 1,
                                                  "scale": 0.25})
    e.add_op("select_rows", [out], [last], [], {})
    e.add_op("linear", [last], [logits], [head], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    spans = -(-STEPS // 16)
    e.allocate(ROWS, ROWS, STEPS, 16, ROWS * spans, "float32")
    draws = [SamplingParams(seed=i, top_p=p, top_k=k, temperature=9.0)
             for i, (p, k) in enumerate(((0.99, 0), (0.97, 2000), (1.0, 1500)))]
    tokens = []
    new = [NewSlot(i, [i], draw.encode()) for i, draw in enumerate(draws)]
    for step in range(STEPS):
        work = [WorkItem(i, 1, SAMPLE, spans=[] if step else list(range(i * spans, (i + 1) * spans)))
                for i in range(ROWS)]
        tokens.append(e.step(StepPlan(new=new, work=work).encode()).tokens.tolist())
        new = []
    return tokens


@pytest.mark.timeout(120)
def test_threads_agree_on_the_rounds():
    """A thread that comes late to the end of a round must not miss that the next one begins."""
    alone = run(1)
    assert all(0 <= token < VOCAB for row in alone for token in row)
    for threads in (2, 3, 5):
        assert run(threads) == alone
