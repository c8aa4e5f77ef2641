"""Attention through the executor: the same bits however a step's blocks of context are split over threads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

Q_HEADS, KV_HEADS, DIM, SPAN, BLOCK, TILE_ROWS = 4, 2, 24, 32, 128, 16
VOCAB, WIDTH = 61, (Q_HEADS + 2 * KV_HEADS) * DIM
DTYPES = ("float32", "bfloat16", "int8", "uint4")
CONTEXTS = (1025, 1153, 2500)   # just past a run of blocks, past the first block of the next one, within a third run
FEW, MANY = (), (3, 40, 129, 700, 5, 64, 300, 1, 1100, 17, 90, 33)   # contexts of a step's other sequences
GREEDY = SamplingParams(do_sample=False).encode()


class Attention:
    """An executor with attention alone: a token's queries, key and value are its embedding."""

    def __init__(self, threads: int, dtype: str = "float32", max_length: int = 2560, spans: int = 400,
                 slots: int = 16):
        self.table = np.random.default_rng(5).normal(size=(VOCAB, WIDTH)).astype(np.float32)
        self.table[:, :Q_HEADS * DIM] *= 3  # weights that differ
        e = self.executor = _native.Executor(num_threads=threads)
        table = e.add_matrix(VOCAB, WIDTH, "float32")
        e.fill_matrix(table, self.table, "F32")
        qkv, out, last = e.add_tensor(WIDTH), e.add_tensor(Q_HEADS * DIM), e.add_tensor(Q_HEADS * DIM, True)
        e.add_op("embedding", [], [qkv], [table], {"vocab_begin": 0})
        e.add_op("span_attention", [qkv], [out], [], {"layer": 0, "q_heads": Q_HEADS, "kv_heads": KV_HEADS,
                                                      "head_dim": DIM, "group": Q_HEADS // KV_HEADS,
                                                      "scale": DIM**-0.5})
        e.add_op("select_rows", [out], [last], [], {})
        e.add_op("sample", [last], [], [], {"vocab_begin": 0, "vocab_size": Q_HEADS * DIM})
        e.allocate(2560, slots, max_length, SPAN, spans, dtype)
        self.spans = 0

    def step(self, plan: StepPlan) -> np.ndarray:
        """The attention of each sequence's last row: [sequences that sample, query heads x dim]."""
        return self.executor.step(plan.encode(), True).logits

    def take_spans(self, positions: int) -> list[int]:
        first, self.spans = self.spans, self.spans + -(-positions // SPAN)
        return list(range(first, self.spans))

    def last_row(self, tokens: list[int], chunks: list[int], others: tuple[int, ...]) -> np.ndarray:
        """The last token's row, computed after `chunks` rows before it, in a step with sequences of `others` tokens."""
        assert sum(chunks) == len(tokens)
        new, spans = [NewSlot(0, tokens, GREEDY)], self.take_spans(len(tokens))
        for count in chunks[:-1]:
            self.step(StepPlan(new=new, work=[WorkItem(0, count, spans=spans)]))
            new, spans = [], []
        work = [WorkItem(0, chunks[-1], SAMPLE, spans=spans)]
        if others:  # all but their last tokens first, so that theirs are single ones
            histories = [tokens_of(n, seed=n) for n in others]
            new += [NewSlot(i, history, GREEDY) for i, history in enumerate(histories, 1)]
            prompts = [WorkItem(i, n - 1, spans=self.take_spans(n)) for i, n in enumerate(others, 1) if n > 1]
            self.step(StepPlan(new=new[-len(others):], work=prompts))
            new = new[:-len(others)]
            work += [WorkItem(i, 1, SAMPLE, spans=[] if n > 1 else self.take_spans(1))
                     for i, n in enumerate(others, 1)]
        row = self.step(StepPlan(new=new, work=work))[0]
        self.step(StepPlan(free=list(range(len(others) + 1))))
        self.spans = 0
        return row


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def reference(table: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Attention of the last token over all tokens, in float64."""
    rows = table[tokens].astype(np.float64)
    q, k, v = (part.reshape(len(tokens), -1, DIM)
               for part in np.split(rows, [Q_HEADS * DIM, (Q_HEADS + KV_HEADS) * DIM], axis=1))
    out = []
    for head in range(Q_HEADS):
        scores = k[:, head * KV_HEADS // Q_HEADS] @ q[-1, head] * DIM**-0.5
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v[:, head * KV_HEADS // Q_HEADS])
    return np.concatenate(out)


def chunkings(n: int) -> list[list[int]]:
    """The last token alone, the last of 100 rows, the prompt in one chunk, and in unequal chunks."""
    return [[n - 1, 1], [n - 100, 100], [n], [700, n - 713, 13]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_bits_do_not_depend_on_how_blocks_are_shared_out(dtype, context):
    """With few sequences, threads split their contexts; with many, or one thread, a tile's blocks belong to one
    thread.
    """
    tokens, rows = tokens_of(context), {}
    for threads in (1, 2, 3, 5):
        attention = Attention(threads, dtype)
        for others in (FEW, (1200,), MANY):
            for chunks in chunkings(context):
                rows[threads, others, tuple(chunks)] = attention.last_row(tokens, chunks, others)
    first = next(iter(rows.values()))
    differing = [case for case, row in rows.items() if not np.array_equal(row.view(np.uint32), first.view(np.uint32))]
    assert not differing
    tolerance = {"float32": 2e-6, "bfloat16": 0.05, "int8": 0.05, "uint4": 0.6}[dtype]
    np.testing.assert_allclose(first, reference(attention.table, tokens), rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [2, 3, 5, 8, 13])
def test_partial_results_fit_whatever_the_contexts(threads):
    """Random sets of contexts up to the longest announced one. share_pairs() itself checks that they fit."""
    rng = np.random.default_rng(threads)
    longest = int(rng.integers(9, 40)) * BLOCK + 1
    attention = Attention(threads, max_length=longest, spans=16)
    for _ in range(150):
        sequences = int(rng.integers(1, 2 * threads))  # fewer than 4 tiles a thread: their blocks are split
        lengths = [longest if rng.random() < 0.4 else int(rng.integers(1, longest + 1)) for _ in range(sequences)]
        lengths = lengths[:15]
        new, work = [], []
        # as after a hit in the prefix cache, whose spans are all one; the last is its own
        for i, n in enumerate(lengths):
            start = (n - 1) // SPAN * SPAN
            new.append(NewSlot(i, [1] * n, GREEDY, start))
            work.append(WorkItem(i, n - start, SAMPLE, spans=[0] * (-(-n // SPAN) - 1) + [i + 1]))
        found = attention.step(StepPlan(new=new, work=work))
        assert found.shape[0] == len(lengths) and np.isfinite(found).all()
        attention.step(StepPlan(free=list(range(len(lengths)))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_partial_results_is_small(dtype):
    """One partial result per run of 8 blocks where threads' parts meet, not one of every block for each thread."""
    threads, context, dim = 64, 131_072, 128
    per_thread = _native.attention_bytes(threads, context, dim, dtype) / threads
    every_block = 4 * (context // BLOCK) * TILE_ROWS * (2 + dim) * 4
    assert per_thread < 8e6 and per_thread < every_block / 4
    assert _native.attention_bytes(1, context, dim, dtype) == _native.attention_bytes(1, BLOCK, dim, dtype)


WITHOUT_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

DIM, ROWS, WINDOW = 4096, 64, 33
greedy = SamplingParams(do_sample=False).encode()


class Model:
    def __init__(self):
        values = np.random.default_rng(1).normal(size=(9, 3 * DIM)).astype(np.float32)
        values[8, 2 * DIM:] = np.inf
        e = self.executor = _native.Executor(num_threads=1)
        table = e.add_matrix(9, 3 * DIM, "float32")
        e.fill_matrix(table, values, "F32")
        self.matrix = e.add_matrix(64, 64, "bfloat16")
        e.fill_matrix(self.matrix, values[:, :64 * 64 // 9 + 64].reshape(-1)[:4096].reshape(64, 64), "F32")
        qkv, out, last = e.add_tensor(3 * DIM), e.add_tensor(DIM), e.add_tensor(DIM, True)
        e.add_op("embedding", [], [qkv], [table], {"vocab_begin": 0})
        e.add_op("span_attention", [qkv], [out], [], {"layer": 0, "q_heads": 1, "kv_heads": 1, "head_dim": DIM,
                                                      "group": 1, "scale": DIM**-0.5, "window": WINDOW})
        e.add_op("select_rows", [out], [last], [], {})
        e.add_op("sample", [last], [], [], {"vocab_begin": 0, "vocab_size": DIM})
        e.allocate(ROWS, 1, ROWS, 32, 4, "bfloat16")

    def step(self, tokens):
        spans = list(range(-(-len(tokens) // 32)))
        plan = StepPlan(new=[NewSlot(0, tokens, greedy)], work=[WorkItem(0, len(tokens), SAMPLE, spans=spans)])
        return self.executor.step(plan.encode(), True).logits.tobytes()


models = [Model() for _ in range(3)]
wanted = models[0].step([3])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
try:
    models[1].step([8] + [i % 7 for i in range(1, ROWS)])   # rows that do not see the infinite value are mended
    sys.exit("no memory was needed")
except (MemoryError, RuntimeError) as error:
    assert "bad_alloc" in str(error), error
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
models[1].executor.multiply(models[1].matrix, np.ones((16, 64), np.float32), 64)
assert models[2].step([3]) == wanted
"""


@pytest.mark.skipif("ALLSPARK_SANITIZE" in os.environ, reason="a sanitizer ends the process where memory ends")
def test_a_thread_whose_attention_failed_computes_as_before():
    """The tiles of AMX do not stay configured."""
    no_free_memory = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}   # of the heap
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], env=no_free_memory, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
