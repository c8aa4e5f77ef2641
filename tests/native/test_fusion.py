"""Fused ops have the bits of single ops, for any number of rows, threads and ranks."""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver

HIDDEN, HEADS, HEAD_DIM, VOCAB, SPAN, LAYERS = 160, 4, 40, 97, 32, 2
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int8", 64), ("w8a8", 0), ("w4a8", 64), ("int4", 32)]


class Net:
    """A two-layer model with awkward widths, with or without norms of heads."""

    def __init__(self, dtype: str, group: int, inner: int, threads: int, fused: bool, bias: bool = True,
                 heads: int = HEADS, kv_heads: int = HEADS, cache: str = "float32", layers: int = LAYERS):
        e = self.executor = _native.Executor(num_threads=threads)
        rng = np.random.default_rng(11)
        width = (heads + 2 * kv_heads) * HEAD_DIM

        def matrix(n: int, k: int) -> int:
            handle = e.add_matrix(n, k, dtype, group)
            e.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32), "F32")
            return handle

        def vector(n: int) -> int:
            return e.add_vector(rng.normal(size=n).astype(np.float32))

        x, y, normed, qkv, context, both, hidden, last, logits = (e.add_tensor(w, r) for w, r in (
            (HIDDEN, False), (HIDDEN, False), (HIDDEN, False), (width, False), (heads * HEAD_DIM, False),
            (2 * inner, False), (inner, False), (HIDDEN, True), (VOCAB, True)))

        def op(kind, inputs, outputs, weights=(), **attributes):
            e.add_op(kind, inputs, outputs, list(weights), attributes)

        head = matrix(VOCAB, HIDDEN)
        op("rotary_table", [], [], [e.add_vector((1e4 ** (-np.arange(HEAD_DIM // 2) / 20)).astype(np.float32))],
           rotary_dim=HEAD_DIM)
        op("embedding", [], [x], [head], vocab_begin=0)
        op("rms_norm", [x], [normed], [vector(HIDDEN)], eps=1e-6)
        for layer in range(layers):
            op("linear", [normed], [qkv], [matrix(width, HIDDEN), vector(width)])
            for offset, count in ((0, heads), (heads * HEAD_DIM, kv_heads)) if bias else ():
                op("head_norm", [qkv], [], [vector(HEAD_DIM)], offset=offset, heads=count, head_dim=HEAD_DIM, eps=1e-6)
            op("rope", [qkv], [], offset=0, heads=heads + kv_heads, head_dim=HEAD_DIM)
            op("span_attention", [qkv], [context], layer=layer, q_heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM,
               group=heads // kv_heads, scale=0.2)
            op("linear", [context], [y], [matrix(HIDDEN, heads * HEAD_DIM)])
            op("add", [x, y], [x])
            op("rms_norm", [x], [normed], [vector(HIDDEN)], eps=1e-6)
            op("linear", [normed], [both], [matrix(2 * inner, HIDDEN), *([vector(2 * inner)] if bias else [])])
            op("silu_mul", [both], [hidden])
            op("linear", [hidden], [y], [matrix(HIDDEN, inner)])
            op("add", [x, y], [x])
            op("rms_norm", [x], [normed], [vector(HIDDEN)], eps=1e-6)
        op("select_rows", [normed], [last])
        op("linear", [last], [logits], [head])
        op("sample", [logits], [], vocab_begin=0, vocab_size=VOCAB)
        e.allocate(512, 32, 512, SPAN, 32, cache, fused=fused)

    def logits(self, length: int, chunk: int) -> np.ndarray:
        """Logits of the last of `length` tokens, computed in chunks of `chunk`."""
        tokens = [(7 * i + 3) % VOCAB for i in range(length)]
        new = [NewSlot(0, tokens, SamplingParams(do_sample=False, prompt_len=length).encode())]
        spans = 0
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            needed = -(-(start + count) // SPAN)
            last = start + count == length
            item = WorkItem(0, count, SAMPLE if last else 0, spans=list(range(spans, needed)))
            result = self.executor.step(StepPlan(new=new, work=[item]).encode(), True)
            new, spans = [], needed
        self.executor.step(StepPlan(free=[0]).encode())
        return result.logits[0].copy()


    def barriers(self, rows: int) -> int:
        """Barriers of a step with one row of each of `rows` sequences."""
        sampling = SamplingParams(do_sample=False, prompt_len=3).encode()
        begin = StepPlan(new=[NewSlot(slot, [3, 1, 4], sampling) for slot in range(rows)],
                         work=[WorkItem(slot, 3, SAMPLE, spans=[slot]) for slot in range(rows)])
        self.executor.step(begin.encode())
        before = self.executor.barriers
        self.executor.step(StepPlan(work=[WorkItem(slot, 1, SAMPLE) for slot in range(rows)]).encode())
        return self.executor.barriers - before


@pytest.mark.parametrize("inner", [384, 272])  # whole panels of every instruction set, and of none
@pytest.mark.parametrize("dtype,group", FORMATS)
def test_fused_ops_have_the_bits_of_the_ops_one_by_one(dtype, group, inner):
    apart = Net(dtype, group, inner, 1, fused=False)
    together = [Net(dtype, group, inner, threads, fused=True) for threads in (1, 2)]
    for length, chunk in ((1, 1), (2, 2), (31, 31), (33, 33), (300, 300), (300, 33), (67, 31)):
        expected = apart.logits(length, chunk)
        assert np.isfinite(expected).all() and expected.std() > 0.1
        for net in together:
            assert net.logits(length, chunk).tobytes() == expected.tobytes(), (length, chunk)


@pytest.mark.parametrize("dtype,group", [form for form in FORMATS if form[0] != "float32"])
def test_threads_that_take_the_last_panels_as_they_become_free(dtype, group):
    """From four threads on, few rows are divided so, where a thread does not read several panels in turn."""
    apart, together = (Net(dtype, group, 384, threads, fused=True) for threads in (1, 5))
    for rows in (1, 2, 9, 32):
        assert together.logits(rows, rows).tobytes() == apart.logits(rows, rows).tobytes(), rows


@pytest.mark.parametrize("dtype,group", [("float32", 0), ("bfloat16", 0), ("w8a8", 0)])
def test_they_are_computed_together(dtype, group):
    """Ensures that the test above compares fused ops with single ones."""
    net = Net(dtype, group, 384, 1, fused=True, bias=False)
    net.executor.set_profiling(True)
    net.logits(40, 40)
    counted = {}
    for op in net.executor.profile():
        counted[op["op"]] = counted.get(op["op"], 0) + op["count"]
    assert counted == {"rotary_table": 1, "embedding": 1, "rms_norm+linear": LAYERS, "rope+span_attention": LAYERS,
                       "linear+add": 2 * LAYERS, "rms_norm+linear+silu_mul": LAYERS, "rms_norm": 1, "select_rows": 1,
                       "linear": 1, "sample": 1}


@pytest.mark.parametrize("dtype,group", [("bfloat16", 0), ("int8", 64), ("w8a8", 0)])
def test_threads_seldom_wait_for_each_other(dtype, group):
    """Barriers per layer on one rank, without those of embedding, head and sampling."""
    def barriers(rows: int) -> float:
        counts = [Net(dtype, group, 384, 2, fused=True, layers=n).barriers(rows) for n in (LAYERS, 2 * LAYERS)]
        return (counts[1] - counts[0]) / LAYERS

    assert barriers(1) <= 6
    assert max(barriers(rows) for rows in (2, 17, 32)) <= 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "w8a8"])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_a_step_do_not_matter(dtype, world):
    """Chunks of many rows and of few, with a real checkpoint."""
    prompt, results = prompt_of(300), []
    for threads in (1, 2) if world == 1 else (1,):
        with Driver(checkpoint("qwen2-gqa-tied"), world, weight_dtype=dtype, num_threads=threads,
                    max_step_tokens=300) as driver:
            for chunk in (300, 96, 32):
                tokens, logits = driver.generate(prompt, 4, chunk)
                results.append((tokens, b"".join(row.tobytes() for row in logits)))
    assert all(result == results[0] for result in results)


def test_two_ranks_share_their_sums():
    """Ranks of a group run the same fused ops; their sums still meet in all_reduce."""
    prompt = prompt_of(70)
    found = []
    for world in (1, 2):
        with Driver(checkpoint("qwen2-gqa-tied"), world, weight_dtype="float32") as driver:
            found.append(driver.generate(prompt, 4)[1])
    for one, two in zip(*found):
        assert np.abs(one - two).max() < 1e-4 * one.std()


@pytest.mark.parametrize("heads,kv_heads", [(20, 1), (38, 2), (7, 1)])
def test_prompts_of_any_length_with_more_query_heads_than_a_tile_has_rows(heads, kv_heads):
    """Attention's tiles process a prompt in groups; each position must see its whole context, whatever is in its
    group.
    """
    net = Net("float32", 0, 384, 1, fused=True, heads=heads, kv_heads=kv_heads)
    for length in (301, 298, 131):
        expected = net.logits(length, 1)
        for chunk in (length, 33):
            assert net.logits(length, chunk).tobytes() == expected.tobytes(), (length, chunk)
