"""Every op of the CUDA backend against the reference backend, like tests/reference/test_cpu_ops.py for the CPU; a row's
bits are independent of other rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server import _native
from reference.plan import GIVEN, HIDDEN, LOOKUP, PROMPT, SAMPLE
from reference.toy import Toy, item, plan, spans_for, start
from support.gpu_toys import (
    DTYPES16,
    EXACT,
    FLOAT16_FACTOR,
    HEADS,
    ROUNDED,
    SEED,
    VOCAB,
    compare,
    compiled,
    embedded,
    executor,
    logits_of_rows,
    rounded,
    small_model,
    tokens_of,
    toy,
)

pytestmark = pytest.mark.cuda


WIDTHS = (1, 7, 31, 96, 257, 1025)


@pytest.mark.parametrize("width", WIDTHS)
def test_embedding_select_rows_and_sample(width):
    own = toy()
    own.finish(own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width)), scale=1.5))
    compare(own)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("width", [*WIDTHS, 8193, 9001])
def test_rms_norm(width, unit_offset):
    own = toy()
    own.finish(own.op("rms_norm", (embedded(own, width),), width, (own.vector(width),), eps=1e-5,
                      unit_offset=unit_offset))
    compare(own)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_scale_and_silu(width):
    own = toy()
    both = own.embedding(VOCAB, 2 * width, 4 * own.rng.normal(size=(VOCAB, 2 * width)))
    x = own.op("silu_mul", (both,), width)
    own.op("scale", (x,), factor=-1.7)
    own.finish(own.op("add", (x, own.op("silu_mul", (both,), width))))
    compare(own)


@pytest.mark.parametrize("width", WIDTHS)
def test_clamped_silu(width):
    own = toy()
    both = own.embedding(VOCAB, 2 * width, 4 * own.rng.normal(size=(VOCAB, 2 * width)))
    own.finish(own.op("clamped_silu_mul", (both,), width, alpha=1.7, limit=3.0))
    compare(own)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("heads, dim, offset", [(1, 2, 0), (3, 5, 7), (2, 64, 1), (7, 16, 0)])
def test_head_norm(heads, dim, offset, unit_offset):
    own = toy()
    x = embedded(own, offset + heads * dim + 3)
    own.finish(own.op("head_norm", (x,), None, (own.vector(dim),), eps=1e-6, heads=heads, head_dim=dim, offset=offset,
                      unit_offset=unit_offset))
    compare(own)


SIZES = [(1, 1), (3, 7), (41, 31), (97, 64), (130, 257), (67, 1091), (65, 2049)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("form, tolerance", [
    ("float32", EXACT), ("bfloat16", ROUNDED), ("float16", ROUNDED * FLOAT16_FACTOR)])
def test_linear(n, k, form, tolerance, bias):
    own = toy()
    x = embedded(own, k)
    matrix = own.program.add_matrix(n, k, form, 0)
    own.weights[matrix] = own.rng.normal(size=(n, k)) * k**-0.5
    own.finish(own.op("linear", (x,), n, (matrix, own.vector(n)) if bias else (matrix,)))
    compare(own, tolerance)


@pytest.mark.parametrize("n, k", [*SIZES, (200, 4100), (128, 20000), (1030, 900), (1036, 900), (1216, 896),
                                  (4500, 3990), (9001, 300), (16500, 130), (17003, 65)])
@pytest.mark.parametrize("form", ["float32", *DTYPES16])
def test_products_of_any_number_of_rows_have_the_same_bits(n, k, form):
    """With every kernel; and against float64."""
    rng, found = np.random.default_rng(SEED), executor()
    values = (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32)
    handle = found.add_matrix(n, k, form)
    found.fill_matrix(handle, values, "F32")
    x, bias = rng.normal(size=(301, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    every = found.multiply(handle, x, n, bias)
    used = found.read_rows(handle).astype(float)
    np.testing.assert_array_equal(used, rounded(values, form))
    expected = rounded(x, form) @ used.T + bias
    error = np.abs(every - expected).max() / np.sqrt(np.mean(expected**2))
    assert error < 3e-5, error
    for first, rows in ((0, 1), (3, 1), (7, 2), (6, 5), (1, 8), (2, 9), (5, 16), (4, 17), (0, 32), (9, 33), (0, 64),
                        (20, 65), (100, 128), (3, 129), (11, 190), (40, 256)):
        for algo in ("mma", "mma_prefill", "split_k", "stream_k", "prefill") if form in DTYPES16 else ("any",):
            part = found.multiply(handle, x[first:first + rows], n, bias, algo)
            assert part.tobytes() == every[first:first + rows].tobytes(), (first, rows, algo)


@pytest.mark.parametrize("form", DTYPES16)
@pytest.mark.parametrize("n, k, rows", [(5000, 5000, 900), (17100, 2000, 700)])
def test_tiles_that_processors_share_have_the_same_bits(n, k, rows, form):
    """So many tiles that some CTAs begin the last ones and others finish them: by parts of K, and whole."""
    rng, found = np.random.default_rng(SEED), executor()
    handle = found.add_matrix(n, k, form)
    found.fill_matrix(handle, rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5), "F32")
    x, bias = rng.standard_normal((rows, k), np.float32), rng.standard_normal(n, np.float32)
    every = found.multiply(handle, x, n, bias, "prefill")
    assert every.tobytes() == found.multiply(handle, x, n, bias, "prefill").tobytes()
    for first in range(0, rows, 256):
        part = found.multiply(handle, x[first:first + 256], n, bias, "split_k")
        assert part.tobytes() == every[first:first + 256].tobytes(), first


def test_sources_of_weights_and_what_is_not_finite():
    rng, found = np.random.default_rng(SEED), executor()
    values = rng.normal(size=(70, 200)).astype(np.float16)
    handle = found.add_matrix(100, 120, "float32")
    stored = [values[:30], values[30:]]
    assert found.fill_rows(handle, stored, "F16", 20, 77) == [0, 0]
    assert found.read_row(handle, 20).tolist() == values[0, 77:197].astype(np.float32).tolist()
    assert found.read_row(handle, 89).tolist() == values[69, 77:197].astype(np.float32).tolist()
    assert not found.read_row(handle, 19).any() and not found.read_row(handle, 90).any()
    values[3, 80], values[40, 196], values[50, 10] = np.nan, np.inf, np.nan  # the last is not taken
    assert found.fill_rows(handle, stored, "F16", 20, 77) == [1, 1]
    with pytest.raises(ValueError, match="do not fit a matrix of 100 x 120"):
        found.fill_matrix(handle, values, "F16", 31, 77)
    cpu = _native.Executor()
    same = cpu.add_matrix(100, 120, "float32")
    cpu.fill_rows(same, stored, "F16", 20, 77, 0)
    transposed = [np.repeat(part.T, 2, axis=1)[:, ::2].T for part in stored]  # rows are two elements apart
    for arrays in (stored, transposed):
        other = found.add_matrix(100, 120, "float32")
        assert found.fill_rows(other, arrays, "F16", 20, 77) == [1, 1]
        assert found.source_hash(other) == cpu.source_hash(same)
        assert found.read_rows(other).tobytes() == found.read_rows(handle).tobytes()


@pytest.mark.parametrize("hidden, inner, form, tolerance", [
    *((*sizes, *form) for sizes in ((24, 37), (130, 8), (64, 200))
      for form in (("float32", EXACT), ("bfloat16", 6e-2), ("float16", 6e-2 * FLOAT16_FACTOR))),
    # Gates have more rows than a grid in its second dimension.
    (24, 33_000, "bfloat16", 6e-2), (24, 33_000, "float16", 6e-2 * FLOAT16_FACTOR)])
def test_what_is_computed_together(hidden, inner, form, tolerance):
    """Fusion of norms, gates, attention and sums with the GEMMs that read them or add to them."""
    own = toy()

    def matrix(n, k):
        handle = own.program.add_matrix(n, k, form, 0)
        own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
        return handle

    x = embedded(own, hidden)
    normed = own.op("rms_norm", (x,), hidden, (own.vector(hidden),), eps=1e-6)
    both = own.op("linear", (normed,), 2 * inner, (matrix(2 * inner, hidden), own.vector(2 * inner)))
    own.op("add", (x, own.op("linear", (own.op("silu_mul", (both,), inner),), hidden, (matrix(hidden, inner),))))
    qkv = own.op("linear", (x,), 5 * 16, (matrix(5 * 16, hidden),))
    attended = own.attention(qkv, 3, 1, 16)
    own.op("add", (x, own.op("linear", (attended,), hidden, (matrix(hidden, 48), own.vector(hidden)))))
    own.finish(x)
    compare(own, tolerance)


@pytest.mark.parametrize("dim, rotary_dim", [(2, 2), (10, 10), (64, 64), (16, 6)])
@pytest.mark.parametrize("table", [{}, {"attention_factor": 1.25},
                                   {"dynamic": True, "base": 10000.0, "factor": 2.0, "original_max": 20},
                                   {"dynamic": True, "base": 10000.0, "original_max": 17, "growth": "powers"},
                                   {"long_table": True, "original_max": 20}])
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rotary_table_and_rope(dim, rotary_dim, table, pairs):
    if table.get("dynamic") and rotary_dim == 2:
        pytest.skip("a dynamic base has the exponent dim / (dim - 2)")
    own = toy()
    x = embedded(own, 1 + 3 * dim)
    frequencies = own.vector((1e4 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32))
    tables = [frequencies] + [own.vector(rotary_dim // 2)] * ("long_table" in table)
    own.op("rotary_table", (), None, tables, rotary_dim=rotary_dim, **table)
    own.finish(own.op("rope", (x,), offset=1, heads=3, head_dim=dim, rotary_dim=rotary_dim, pairs=pairs))
    compare(own)


CACHES = [("float32", EXACT), ("bfloat16", 5e-2), ("float16", 5e-2 * FLOAT16_FACTOR)]


@pytest.mark.parametrize("cache, tolerance", CACHES)
@pytest.mark.parametrize("heads", HEADS)
def test_span_attention(heads, cache, tolerance):
    q_heads, kv_heads, dim = heads
    own = toy()
    own.finish(own.attention(embedded(own, (q_heads + 2 * kv_heads) * dim), *heads))
    compare(own, tolerance, cache=cache)


VARIANTS = [{"window": 1}, {"window": 20}, {"soft_cap": 1.5}, {"window": 33, "soft_cap": 2.0}, {"sinks": True},
            {"alibi": True}, {"logn": 20}, {"sinks": True, "alibi": True, "soft_cap": 3.0, "window": 50}]


def attention_with(own: Toy, x: int, q_heads: int, kv_heads: int, dim: int, variant) -> int:
    """Attention with random sinks, or with ALiBi's slopes."""
    weights = [own.vector(q_heads)] if variant.get("sinks") else []
    if variant.get("alibi"):
        weights.append(own.vector(2.0 ** (-8 * np.arange(1, q_heads + 1) / q_heads)))
    return own.attention(x, q_heads, kv_heads, dim, weights, **variant)


@pytest.mark.parametrize("cache, tolerance", CACHES)
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v))
def test_attention_with(variant, dim, cache, tolerance):
    own = toy()
    own.finish(attention_with(own, embedded(own, 10 * dim), 6, 2, dim, variant))
    compare(own, tolerance, cache=cache)


@pytest.mark.parametrize("cache", [cache for cache, _ in CACHES])
@pytest.mark.parametrize("dim, variant", [
    *((dim, {"window": window}) for dim in (16, 64, 128) for window in (0, 1, 100, 300, 1100)),
    *((dim, variant) for dim in (80, 256) for variant in ({}, {"window": 300, "soft_cap": 3.0})),
    *((dim, {"sinks": True, "window": window}) for dim in (16, 64, 128, 256) for window in (0, 300)),
    *((dim, {"alibi": True}) for dim in (16, 64))])
def test_bits_of_attention_do_not_depend_on_chunks(dim, variant, cache):
    """Contexts of several KV splits; a last chunk of one row is a decode step."""
    results, lengths = [], [1290, 515]
    for chunk in (1290, 333, 47, -1):
        own = Toy(7)
        own.finish(attention_with(own, embedded(own, 9 * dim), 7, 1, dim, variant))
        gpu, rng, found = compiled(own, cache, long=True), np.random.default_rng(3), []
        for slot, length in enumerate(lengths):
            prompt, new, begin = rng.integers(0, VOCAB, length).tolist(), True, 0
            while begin < length:
                count = min(length - 1 if chunk < 0 and begin == 0 else abs(chunk), length - begin)
                last = begin + count == length
                spans = list(range(100 * slot + -(-begin // 16), 100 * slot + -(-(begin + count) // 16)))
                result = gpu.step(plan([item(slot, count, SAMPLE if last else 0, spans=spans)],
                                       [start(slot, prompt)] if new else []), True)
                new, begin = False, begin + count
            found.append(result.logits.tobytes())
        results.append(found)
    assert results[0] == results[1] == results[2] == results[3]
    rng = np.random.default_rng(3)
    for slot, length in enumerate(lengths):
        prompt = rng.integers(0, VOCAB, length).tolist()
        expected = own.runner(num_spans=(128,), max_length=2048, max_rows=2048).step(
            plan([item(0, length, SAMPLE, spans=spans_for(length))], [start(0, prompt)])).logits
        error = np.abs(np.frombuffer(results[0][slot], np.float32) - expected[0]).max()
        assert error <= dict(CACHES)[cache] * np.sqrt(np.mean(expected**2))


def finish_with_rotated_attention(own: Toy, group: int, kv: int, dim: int, **options) -> None:
    x = embedded(own, (group + 2) * kv * dim)
    own.rotary(dim)
    own.op("rope", (x,), offset=0, heads=(group + 1) * kv, head_dim=dim)
    own.finish(own.attention(x, group * kv, kv, dim, **options))


@pytest.mark.parametrize("group, dim, cache", [
    *((group, dim, "bfloat16") for group in range(1, 9) for dim in (64, 128)),
    *((group, dim, "bfloat16") for group, dim in ((1, 80), (3, 96), (4, 256), (9, 64), (16, 128))),
    *((group, dim, "float16") for group, dim in (
        (1, 64), (1, 128), (2, 64), (2, 128), (7, 64), (7, 128), (8, 64), (8, 128), (9, 64), (16, 128), (1, 80),
        (7, 80), (2, 96), (3, 96), (4, 256), (7, 256))),
    *((group, dim, cache) for cache in ("int8", "uint4", "float8") for group, dim in ((7, 128), (2, 64), (3, 96)))])
def test_rows_attend_alike_in_chunks_of_any_size(group, dim, cache):
    """Several requests per step with rotated queries: chunks of one or two rows up to whole tiles and one row more."""
    own, rng = Toy(SEED), np.random.default_rng(SEED)
    kv = 1 + group % 2
    finish_with_rotated_attention(own, group, kv, dim, **({"window": 200} if group == 3 else {}))
    tile = -(-128 // group)  # rows of 128 pairs
    lengths = (700, 1, tile, tile + 1, 64, 257, 18, int(rng.integers(1, 700)))
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    expected = logits_of_rows(compiled(own, cache, long=True, outputs=2048), prompts, lambda: 16 // group)
    for rows in (lambda: 700, lambda: 47, lambda: int(rng.integers(1, 150))):
        found = logits_of_rows(compiled(own, cache, long=True, outputs=2048), prompts, rows)
        assert [len(f) for f in found] == [len(e) for e in expected]
        assert found == expected


@pytest.mark.parametrize("group, dim, cache", [
    (7, 128, "bfloat16"), (1, 80, "bfloat16"), (2, 64, "float16"), (3, 96, "bfloat16"), (4, 256, "bfloat16"),
    (9, 64, "float16"), (16, 128, "bfloat16"), (20, 64, "bfloat16"), (7, 64, "float32"), (7, 128, "int8"),
    (3, 96, "uint4"), (5, 64, "float8")])
def test_short_chunks_attend_alike_in_tiles_of_both_kinds(group, dim, cache):
    """Chunks of up to 64 rows behind contexts of several KV splits: decode tiles cut them, and graphs have the steps of
    few rows; prefill tiles take them whole. Windows are narrower than a chunk.
    """
    own, rng = Toy(SEED), np.random.default_rng(SEED)
    kv = 1 + group % 2
    finish_with_rotated_attention(own, group, kv, dim, **({"window": 11} if group == 3 else {}))
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1100, 1, 530, 257, 64, int(rng.integers(2, 96)))]
    expected = logits_of_rows(compiled(own, cache, long=True, outputs=2304), prompts, lambda: 1100)
    for kind, rows in [("decode", 3), ("decode", 11), ("decode", 16), ("decode", 17), ("decode", 64), ("prefill", 11),
                       ("fastest", 7), ("fastest", 40)]:
        gpu = compiled(own, cache, long=True, outputs=2304, short_chunks=kind)
        assert logits_of_rows(gpu, prompts, lambda rows=rows: rows) == expected, (kind, rows)


@pytest.mark.parametrize("group, cache", [(7, "bfloat16"), (7, "int8"), (7, "float32"), (20, "bfloat16")])
def test_steps_of_single_rows_that_decode_tiles_cannot_hold(group, cache):
    """There are too many KV splits for the memory of partial results, or too many query heads to a KV head. Such rows
    attend as those of prompts do, with the same bits; other rows of the step as ever.
    """
    own, rng, kv, dim = Toy(SEED), np.random.default_rng(SEED), 2, 64
    finish_with_rotated_attention(own, group, kv, dim)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1000, 990, 1003, 960)]  # 4 KV splits each, at most 12
    expected = logits_of_rows(compiled(own, cache, long=True, outputs=2048, slots=4), prompts, lambda: 500)
    for rows in (1, 2, 9):
        gpu = compiled(own, cache, long=True, outputs=2048, slots=4, partial_bytes=0, short_chunks="decode")
        assert logits_of_rows(gpu, prompts, lambda: rows) == expected


@pytest.mark.parametrize("cache", ["bfloat16", "float16", "int8", "uint4", "float8"])
@pytest.mark.parametrize("dim, longest", [(128, 12), (128, 300), (64, 12), (256, 12)])
def test_many_requests_decode_as_their_prompts_are_read(dim, longest, cache):
    """More tiles than the GPU has SMs, with one or two KV splits each: row by row, and all at once."""
    own, rng, group, kv = Toy(SEED), np.random.default_rng(SEED), 7, 2
    finish_with_rotated_attention(own, group, kv, dim)
    lengths = [longest, *rng.integers(5, 13, 139).tolist()]
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    found = []
    for first, then in ((max(lengths), 0), (2, 1)):
        counts = iter([longest - 10 if first == 2 else longest] + [first] * 139)
        gpu = compiled(own, cache, long=True, outputs=2048, slots=140)
        found.append(logits_of_rows(gpu, prompts, lambda: next(counts, then)))
    assert found[0] == found[1]


@pytest.mark.parametrize("form, dim, cache, tolerance", [
    ("float32", 8, "float32", 1e-4), ("bfloat16", 8, "float32", 0.1), ("float16", 8, "float32", 0.1 * FLOAT16_FACTOR),
    ("float16", 64, "float16", 0.1 * FLOAT16_FACTOR), ("float16", 128, "float32", 0.1 * FLOAT16_FACTOR),
    ("float32", 64, "float16", 0.1 * FLOAT16_FACTOR), ("float16", 64, "bfloat16", 0.1),
    ("bfloat16", 64, "float16", 0.1)])
def test_a_whole_model(form, dim, cache, tolerance):
    compare(small_model(form, dim), tolerance, cache)


SAMPLING = [{}, {"do_sample": True, "seed": 5, "temperature": 1.5, "top_logprobs": 4}, {"logprobs": False}]


@pytest.mark.parametrize("form, dim, cache, sampling", [
    *((form, dim, form, sampling) for form, dim in (("float32", 8), ("bfloat16", 64), ("float16", 64))
      for sampling in SAMPLING),
    *(("float16", dim, cache, {}) for dim, cache in (
        (8, "float32"), (64, "bfloat16"), (64, "int8"), (128, "uint4"), (64, "float8"), (80, "float16"),
        (96, "float16"), (128, "float16"), (256, "float16"))),
    ("bfloat16", 64, "float16", {}), ("bfloat16", 128, "float16", {}), ("float32", 64, "float16", {}),
    ("int4", 64, "float16", {}), ("float8", 64, "float16", {})])
def test_same_request_same_bytes(form, dim, cache, sampling):
    """Alone, in a batch, in chunks, with drafts, with and without recorded graphs."""
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 17, 33, 40, 2)]
    expected = []
    for _slot, prompt in enumerate(prompts):
        expected += tokens_of(compiled(small_model(form, dim), cache, graphs=False), [prompt], **sampling)
    for graphs in (True, False):
        def own():
            return compiled(small_model(form, dim), cache, graphs=graphs)
        assert tokens_of(own(), prompts, **sampling) == expected
        assert tokens_of(own(), prompts, chunk=7, **sampling) == expected
        assert tokens_of(own(), prompts, LOOKUP, drafts=3, **sampling) == expected
        assert tokens_of(own(), prompts, GIVEN, drafts=2, **sampling) == expected


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_length": 60},
                                      {"do_sample": True, "seed": 9, "top_k": 7, "top_p": 0.8, "logprobs": True},
                                      {"logprobs": False, "no_repeat_ngram_size": 2}])
def test_samples_are_the_reference_backends(sampling):
    """Tokens are equal until a choice is a near-tie."""
    own = small_model()
    gpu, runner = compiled(own), own.runner()
    prompt = np.random.default_rng(SEED).integers(0, VOCAB, 30).tolist()
    data = plan([item(0, 30, SAMPLE, spans=spans_for(30))], [start(0, prompt, **sampling)])
    for step in range(20):
        found, expected = gpu.step(data, True), runner.step(data)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4 * np.abs(expected.logits).max())
        if found.tokens.tolist() != expected.tokens.tolist():
            best = np.sort(expected.logits[0])[-2:]
            assert best[1] - best[0] < 1e-4 or sampling.get("do_sample")
            return
        data = plan([item(0, 1, SAMPLE, spans=[3] if step == 17 else [2] if step == 1 else [])])


def test_masks_hidden_states_and_prompt_logprobs():
    own = small_model()
    gpu, runner = compiled(own, masks=4), own.runner()
    mask = np.zeros((4, 2), np.uint32)
    mask[1, 1] = 1 << 9  # id 41
    gpu.masks.bits[:] = mask
    gpu.masks.publish([1])
    prompts = [np.random.default_rng(SEED + i).integers(0, VOCAB, 20).tolist() for i in range(3)]
    data = plan([item(0, 20, SAMPLE, spans=[0, 1], mask=2), item(1, 20, HIDDEN, outputs=5, spans=[2, 3]),
                 item(2, 20, PROMPT | SAMPLE, outputs=20, spans=[4, 5])], [start(i, p) for i, p in enumerate(prompts)])
    found, expected = gpu.step(data), runner.step(data, mask)
    assert found.tokens[0] == 41
    np.testing.assert_allclose(found.hidden, expected.hidden, atol=1e-4)
    np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, atol=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"logprobs": False}])
def test_logits_that_are_no_numbers_harm_nobody_else(sampling):
    own = toy()
    x = own.embedding(VOCAB, 4, np.where(np.arange(VOCAB)[:, None] == 7, np.nan, own.rng.normal(size=(VOCAB, 4))))
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 4),)))
    own.weights[0] = np.nan_to_num(own.weights[0])
    gpu = executor()
    table = gpu.add_matrix(VOCAB, 4, "float32")
    values = own.weights[0].astype(np.float32)
    values[7] = np.nan
    assert gpu.fill_matrix(table, values, "F32") == 4
    head = gpu.add_matrix(VOCAB, 4, "float32")
    gpu.fill_matrix(head, own.weights[1].astype(np.float32), "F32")
    for width, rows, _ in own.program.tensors:
        gpu.add_tensor(width, rows)
    for op in own.program.ops:
        gpu.add_op(op["name"], op["inputs"], op["outputs"], op["weights"], op["attributes"])
    gpu.allocate(64, 4, 64, 16, 16, "float32")
    work = [item(slot, 3, SAMPLE, spans=[slot]) for slot in range(3)]
    result = gpu.step(plan(work, [start(i, [5, 6, 7 if i == 1 else 8], **sampling) for i in range(3)]))
    assert result.status.tolist() == [0, 1, 0] and result.tokens[1] == -1 and result.tokens[0] == result.tokens[2] >= 0


@pytest.mark.parametrize("form", DTYPES16)
def test_rows_that_are_no_numbers_leave_nothing_behind(form):
    """Rows of two widths are converted to 16 bits in the same memory, where the narrower ones have padding."""
    own = toy()
    x = own.embedding(VOCAB, 24, np.where(np.arange(VOCAB)[:, None] == 7, np.nan, own.rng.normal(size=(VOCAB, 24))))
    for n, k in ((40, 24), (VOCAB, 40)):
        matrix = own.program.add_matrix(n, k, form, 0)
        own.weights[matrix] = own.rng.normal(size=(n, k)) * k**-0.5
        x = own.op("linear", (x,), n, (matrix,))
    own.finish(x)
    gpu = compiled(own)
    for slots, expected in (((0, 1, 2), [0, 1, 0]), ((3, 4, 5), [0, 0, 0])):
        work = [item(slot, 1, SAMPLE, spans=[8 * slot]) for slot in slots]
        new = [start(slot, [7 if wrong else 5]) for slot, wrong in zip(slots, expected)]
        assert gpu.step(plan(work, new)).status.tolist() == expected


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_what_the_backend_does_not_have_is_refused_by_name():
    with pytest.raises(ValueError, match="int3 are not available on CUDA"):
        executor().add_matrix(4, 32, "int3")
    with pytest.raises(ValueError, match="caches of type float64 are not available on CUDA"):
        compiled(small_model(), "float64")
    with pytest.raises(ValueError, match="there is no GPU 99: compute_unit may name 0 to"):
        from allspark_server import _cuda

        _cuda.Executor(99, _native.HostSampler(1))


def test_memory_that_there_is_not():
    with pytest.raises(RuntimeError, match="cannot allocate .* MiB of the GPU's memory for weights: .* are free"):
        executor().add_matrix(1 << 20, 1 << 20, "float32")
