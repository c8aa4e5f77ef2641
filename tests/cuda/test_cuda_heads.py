"""Gemma 4's layers on the GPU: heads of several sizes and groups in one pool of spans, keys as values, normed
values, and layers that read others' keys; and the ops around them. Then whole models.
"""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server.runtime.plan import StepPlan
from reference import expert_toys
from reference.expert_toys import mlp, routed
from reference.plan import SAMPLE
from reference.toy import Toy, item, plan, spans_for, start
from support.gpu_toys import SEED, compare, compiled

pytestmark = pytest.mark.cuda

VOCAB, HIDDEN, WINDOW = 53, 24, 40
GROUPS = (("full", 0), ("sliding", WINDOW))
CACHES = [("float32", 1e-4), ("bfloat16", 5e-2), ("float16", 5e-2 / 8), ("int8", 0.1), ("uint4", 0.7), ("float8", 0.4)]
#: query heads, KV heads and features of a head, of layers with a window and of those without
HEADS = [((6, 3, 12), (6, 2, 34)), ((8, 4, 64), (8, 1, 128)), ((2, 1, 128), (2, 1, 512)), ((4, 2, 256), (4, 1, 512)),
         ((6, 2, 40), (6, 2, 24)), ((20, 20, 8), (20, 1, 24))]


@pytest.fixture(autouse=True)
def seed():
    print(f"ALLSPARK_TEST_SEED={SEED}")


def embedded(own: Toy) -> int:
    return own.embedding(VOCAB, HIDDEN, own.rng.normal(size=(VOCAB, HIDDEN)))


def layers(small: tuple[int, int, int], large: tuple[int, int, int]) -> Toy:
    """Two layers with a window, one without whose keys are its values, and layers that read the keys of the last ones;
    as cache groups hold them, with rotations.
    """
    own = Toy(SEED, GROUPS)
    tables = {large: 0, small: 1}
    for heads, table in tables.items():
        own.rotary(heads[2], table=table)
    x = embedded(own)

    def project(columns: int) -> int:
        return own.op("linear", (x,), columns, (own.matrix(columns, HIDDEN),))

    def attend(rows: int, heads: tuple[int, int, int], kept: bool, **place) -> None:
        q_heads, kv_heads, dim = heads
        blocks = [(0, q_heads), (q_heads * dim, kv_heads), ((q_heads + kv_heads) * dim, kv_heads)]
        for offset, count in blocks if kept else blocks[:1]:
            own.op("head_norm", (rows,), None, (own.vector(dim),), eps=1e-6, heads=count, head_dim=dim, offset=offset)
        own.op("rope", (rows,), None, head_dim=dim, rotary_dim=dim, offset=0, table=tables[heads],
               heads=q_heads + (kv_heads if kept else 0))
        y = own.op("span_attention", (rows,), q_heads * dim, q_heads=q_heads, head_dim=dim, group=q_heads // kv_heads,
                   scale=dim**-0.5, **({"kv_heads": kv_heads} if kept else {}), **place)
        own.op("add", (x, own.op("linear", (y,), HIDDEN, (own.matrix(HIDDEN, q_heads * dim),))))

    for layer in range(2):
        attend(project((small[0] + 2 * small[1]) * small[2]), small, True, layer=layer, cache_group=1, window=WINDOW)
    queries, keys = project(large[0] * large[2]), project(large[1] * large[2])
    attend(own.op("concat", (queries, keys, keys), (large[0] + 2 * large[1]) * large[2]), large, True, layer=0)
    attend(project(small[0] * small[2]), small, False, layer=1, cache_group=1, window=WINDOW)
    attend(project(large[0] * large[2]), large, False, layer=0)
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, HIDDEN),)))
    return own


def step(begin: int, end: int, prompt: list[int], slot: int = 0, first: int = 0) -> tuple[list, list]:
    """A chunk of a prompt, whose spans are in another part of the cache for each group."""
    fresh = [list(range(first + 60 * group + -(-begin // 16), first + 60 * group + -(-end // 16)))
             for group in range(len(GROUPS))]
    work = [item(slot, end - begin, SAMPLE if end == len(prompt) else 0, spans=fresh[0], other_spans=fresh[1:])]
    return work, [] if begin else [start(slot, prompt)]


def logits_of(gpu, prompt: list[int], chunks: list[int], beside: int = 0) -> np.ndarray:
    """Logits of the prompt's last row, in these chunks. beside: rows of another prompt in the first step; then it has
    one row in each.
    """
    begin, at, logits = 0, 0, None
    for chunk in chunks:
        work, new = step(begin, begin + chunk, prompt)
        begin += chunk
        if beside:
            end = at + (1 if at else beside)
            more = step(at, end, prompt[:beside + len(chunks)], 1, 130)
            at, work, new = end, work + more[0], new + more[1]
        logits = gpu.step(plan(work, new), True).logits
    gpu.step(StepPlan(free=[0, 1] if beside else [0], groups=len(GROUPS)).encode())
    return logits[0]


@pytest.mark.parametrize("cache, tolerance", CACHES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0][2]}-{heads[1][2]}")
def test_heads_of_two_sizes(heads, cache, tolerance):
    """At once, in chunks, and in decode, across two KV splits."""
    prompt = np.random.default_rng(SEED + 1).integers(0, VOCAB, 330).tolist()
    own = layers(*heads)
    gpu = compiled(own, cache, long=True)
    once = logits_of(gpu, prompt, [330])
    for chunks in ([133, 16, 1, 130, 49, 1], [300, *[1] * 30], [257, 73]):
        for beside in (0, 30):
            assert logits_of(gpu, prompt, chunks, beside).tobytes() == once.tobytes()
    spans = spans_for(len(prompt))
    expected = own.runner(num_spans=(64, 64), max_length=512, max_rows=512).step(
        plan([item(0, len(prompt), SAMPLE, spans=spans, other_spans=[spans])], [start(0, prompt)])).logits[0]
    error = np.abs(once - expected).max() / np.sqrt(np.mean(expected**2))
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance


def test_layers_of_three_groups_are_refused():
    own = Toy(SEED)
    x = embedded(own)
    for layer, (q_heads, kv_heads) in enumerate(((2, 2), (4, 2), (6, 2))):
        columns = (q_heads + 2 * kv_heads) * 8
        y = own.attention(own.op("linear", (x,), columns, (own.matrix(columns, HIDDEN),)), q_heads, kv_heads, 8,
                          layer=layer)
        own.op("add", (x, own.op("linear", (y,), HIDDEN, (own.matrix(HIDDEN, q_heads * 8),))))
    own.finish(x)
    with pytest.raises(ValueError, match="no layers of more than two numbers of query heads to a KV head"):
        compiled(own)


def test_layers_are_numbered_from_zero():
    own = Toy(SEED)
    x = embedded(own)
    y = own.attention(own.op("linear", (x,), 32, (own.matrix(32, HIDDEN),)), 2, 1, 8, layer=1)
    own.finish(own.op("linear", (y,), VOCAB, (own.matrix(VOCAB, 16),)))
    with pytest.raises(ValueError, match="layer 1 of a model with 1"):
        compiled(own)


# -- ops ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("widths", [(1, 1), (7, 31), (1, 5, 64), (33, 2, 300)])
def test_concat(widths):
    own = Toy(SEED)
    x = embedded(own)
    parts = [own.op("linear", (x,), width, (own.matrix(width, HIDDEN),)) for width in widths]
    own.finish(own.op("concat", tuple(parts), sum(widths)))
    compare(own)


@pytest.mark.parametrize("width, offset", [(1, 0), (7, 24), (300, 33)])
def test_products_with_some_columns(width, offset):
    own = Toy(SEED)
    x, columns = embedded(own), width + offset + 5
    y = own.op("linear", (x,), width, (own.matrix(width, HIDDEN),))
    other = own.op("linear", (x,), columns, (own.matrix(columns, HIDDEN),))
    own.finish(own.op("multiply", (y, other), offset=offset))
    compare(own)


@pytest.mark.parametrize("factor", [{}, {"factor": 0.375}])
def test_factors_of_the_checkpoint(factor):
    own = Toy(SEED)
    own.finish(own.op("scale", (embedded(own),), None, (own.vector([1.7]),), **factor))
    compare(own)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("router", [{"normalized": True}, *expert_toys.ROUTERS[-2:]])
def test_routers_with_a_scale_for_each_expert(router, corrected):
    own = Toy(SEED)
    x = embedded(own)
    correction = (own.vector(own.rng.normal(size=12) * 0.1),) if corrected else ()
    rows, scores = routed(own, x, 12, 5, (*correction, own.vector(12)), expert_scales=True, **router)
    own.finish(mlp(own, x, rows, scores, 12, 9))
    compare(own)


# -- whole models ------------------------------------------------------------------------------------------------------
GEMMA4 = ("gemma4", "gemma4-biases", "gemma4-moe", "gemma4-moe-plain", "gemma4-small", "gemma4-small-plain")


@pytest.mark.parametrize("name", GEMMA4)
def test_logits_and_greedy_ids_in_float32(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.checkpoints import check_logits, checkpoint, prompt_of, reference_logits
    from support.driver import Driver
    from support.greedy import check_greedy_output

    directory = checkpoint(name)
    with Driver(directory, weight_dtype="float32", compute_unit="CUDA:0") as gpu:
        for length in (1, 33, 129, 300, 700):
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference_logits(directory, prompt))
        prompt = prompt_of(64)
        check_greedy_output(gpu.generate(prompt, 64, chunk=48)[0], directory, prompt)


@pytest.mark.parametrize("form, tolerance", [("bfloat16", 0.15), ("float16", 0.05), ("int8", 0.2), ("w8a8", 0.4)])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe", "gemma4-small"])
def test_weight_formats(name, form, tolerance):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.checkpoints import checkpoint, prompt_of, reference_logits
    from support.driver import Driver

    directory, prompt = checkpoint(name), prompt_of(64)
    expected = reference_logits(directory, prompt)
    with Driver(directory, weight_dtype=form, compute_unit="CUDA:0") as gpu:
        logits = gpu.generate(prompt, 1)[1][0]
    error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    print(f"error {error:.3f}")
    assert error < tolerance
