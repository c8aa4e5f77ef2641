"""Many rows: CTAs process several tiles one after the other, and each row has the bits that it has among few."""

from __future__ import annotations

import numpy as np
import pytest

from reference.toy import Toy
from support.gpu_toys import SEED, VOCAB, compiled, embedded, executor, logits_of_rows, small_model, tokens_of

pytestmark = pytest.mark.cuda
FORMS = [("bfloat16", 0), ("float16", 0), ("float8", 0), ("float8", 128), ("w8a8", 0), ("w4a8", 128), ("int4", 64)]
ROWS, COLUMNS = 997, 251  # that differ; they come again and again, at distances that no tile has


def again(values: np.ndarray, count: int) -> np.ndarray:
    return values[np.arange(count) % len(values)]


# Shapes of a model of 7 billion weights: sums in pieces and in one, tiles beyond the last column and the last row, and
# fewer tiles than clusters of CTAs, which share them.
@pytest.mark.parametrize("n, k, rows", [(3584, 3584, 8300), (3584, 18944, 1100), (3584, 18944, 766), (37888, 896, 2100),
                                        (17004, 1000, 4100)])
@pytest.mark.parametrize("form, group", FORMS)
def test_products(form, group, n, k, rows):
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, form, group)
    weights = rng.standard_normal((COLUMNS, k), np.float32) * np.float32(k**-0.5)
    assert gpu.fill_matrix(handle, again(weights, n), "F32") == 0
    x, bias = rng.standard_normal((ROWS, k), np.float32), rng.standard_normal(n, np.float32)
    few = gpu.multiply(handle, x, n, bias, "stream_k" if form == "float8" else "mma")
    many = gpu.multiply(handle, again(x, rows), n, bias)
    for first in range(0, rows, ROWS):
        part = many[first:first + ROWS]
        assert np.array_equal(part.view(np.uint32), few[:len(part)].view(np.uint32)), first


def check_tiles(form: str, n: int, k: int, rows: int, algo: str = "prefill", of_few: str = "mma") -> None:
    """Multiplies rows by a matrix [n, k] with the kernels of many rows and with those of few: the bits are equal."""
    rng, gpu = np.random.default_rng(SEED), executor()
    handle = gpu.add_matrix(n, k, form)
    assert gpu.fill_matrix(handle, again(rng.standard_normal((COLUMNS, k), np.float32), n), "F32") == 0
    x, bias = rng.standard_normal((rows, k), np.float32), rng.standard_normal(n, np.float32)
    few, many = (gpu.multiply(handle, x, n, bias, kernel) for kernel in (of_few, algo))
    assert np.array_equal(many.view(np.uint32), few.view(np.uint32))


# With 132 SMs each CTA has one tile: of 144, 192 or 224 columns, and 64, 128, 192 or 256 rows, the last ones not full.
# 16,400 columns at 300 rows are computed in two waves.
@pytest.mark.parametrize("n, rows", [(18944, 33), (18904, 65), (18944, 129), (18944, 250), (24576, 60), (24572, 100),
                                     (28672, 64), (28672, 128), (16400, 300)])
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_a_tile_for_each_cta(form, n, rows):
    check_tiles(form, n, 1000, rows)


# Narrow tiles whose CTAs add all split-K parts, and wider ones.
@pytest.mark.parametrize("n, k, rows", [(3584, 1792, 100), (3584, 1792, 130), (4608, 3584, 120), (2304, 3584, 256),
                                        (3580, 3584, 200), (4608, 3584, 380)])
def test_narrow_tiles(n, k, rows):
    check_tiles("bfloat16", n, k, rows)


# Of one of two ranks of a model of 70 billion weights: whole sums, split-K parts beside and after one another.
@pytest.mark.parametrize("n, rows", [(28672, 100), (28672, 250), (5120, 120), (5120, 250), (5120, 500), (8192, 120),
                                     (8184, 70)])
def test_tiles_of_float8(n, rows):
    check_tiles("float8", n, 4096, rows, of_few="stream_k")


# With 132 SMs these are tiles of 64, 128, 192, 128 and 256 rows. 192 and 256 have two stages where a CTA may have no
# more than 99 KiB of shared memory, otherwise three.
@pytest.mark.parametrize("n, rows", [(3584, 130), (3600, 400), (4597, 500), (16389, 120), (16389, 250)])
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_tiles_of_mma_sync(form, n, rows):
    check_tiles(form, n, 500, rows, "mma_prefill")


@pytest.mark.parametrize("inner", [8520, 4872])  # sums in one piece, and in several
@pytest.mark.parametrize("form, group", FORMS)
def test_gates_and_sums(form, group, inner):
    """Four prompts in a step: rows are normed, and gated values are added to them."""
    own, rng = Toy(SEED), np.random.default_rng(SEED)

    def matrix(n, k):
        handle = own.program.add_matrix(n, k, form, group)
        own.weights[handle] = again(rng.normal(size=(COLUMNS, k)) * k**-0.5, n)
        return handle

    x = embedded(own, 384)
    normed = own.op("rms_norm", (x,), 384, (own.vector(384),), eps=1e-6)
    both = own.op("linear", (normed,), 2 * inner, (matrix(2 * inner, 384),))
    down = own.op("linear", (own.op("silu_mul", (both,), inner),), 384, (matrix(384, inner),))
    own.op("add", (x, down))
    own.finish(x)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1025, 700, 257, 60)]
    found = [logits_of_rows(compiled(own, long=True, outputs=2048), prompts, lambda: rows) for rows in (2048, 129, 31)]
    assert [len(each) for each in found[0]] == [len(prompt) * 384 * 4 for prompt in prompts]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("form, cache", [("bfloat16", "bfloat16"), ("float16", "float16"), ("float8", "float8"),
                                         ("w8a8", "int8"), ("int4", "uint4")])
def test_a_batch_of_512(form, cache):
    """Decode with and without recorded graphs: each sequence has the bits that it has among eight."""
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in rng.integers(1, 20, 512)]
    found = [tokens_of(compiled(small_model(form, 64), cache, graphs=graphs, long=True, outputs=512, slots=512),
                       prompts, chunk=4, steps=8) for graphs in (True, False)]
    assert found[0] == found[1]
    for first in (0, 8, 248, 504):
        some = slice(first, first + 8)
        assert tokens_of(compiled(small_model(form, 64), cache), prompts[some], steps=8) == found[0][some]
