"""Ops of vision towers on the GPU, and of models that take their rows: against the reference backend, bit for bit in
any batch, in parts and in chunks.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.backend import compile
from reference.batch import Limits
from reference.plan import IMAGES, POSITIONS, PROMPT, SAMPLE
from reference.test_vision_ops import WIDTH, Images, attended, attended_once, even, given, merged, outputs_of, raster
from reference.toy import ALL, OUTPUTS, Toy, embedded, item, plan, spans_for, start
from support.gpu_toys import EXACT, FLOAT16_FACTOR, SEED, compiled, toy

pytestmark = pytest.mark.cuda
GRIDS = ((2, 2), (2, 14), (8, 6), (18, 16), (30, 22))   # the last two are longer than a KV split
ROUNDED = {"float32": EXACT, "bfloat16": 0.15, "float16": 0.15 * FLOAT16_FACTOR}   # of the worst of 1e5 values
FUNCTIONS = ("gelu", "gelu_tanh", "silu", "tanh", "relu", "quick_gelu")


def matrix(own: Toy, n: int, k: int, form: str) -> int:
    handle = own.program.add_matrix(n, k, form, 0)
    own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
    return handle


def built(own: Toy, cache: str = "float32"):
    return compiled(own, cache, long=True, outputs=2048)


def compare(own: Toy, images: Images, tolerance: float = EXACT, cache: str = "float32") -> None:
    plans = images.step(range(len(images.places)))
    found = outputs_of(built(own, cache), plans)
    expected = compile([own.program], [own.weights],
                       Limits(max_rows=2048, max_length=2048, num_spans=(256,))).step(plans[0]).hidden
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.sqrt((expected ** 2).mean())
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance


@pytest.mark.parametrize("how", ["concat", "interleave", "mean"])
@pytest.mark.parametrize("count", [1, 4])
def test_merged_rows(how, count):
    own = toy()
    x = given(own)
    attended_once(own, x)
    merged(own, x, count, how)
    compare(own, Images(GRIDS, merge=count))


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", ["concat", "interleave"])
def test_rows_in_16_bits(how, form):
    """Given rows, and merged ones, that only GEMMs read; widths end within a block."""
    own = toy()
    x = given(own)
    attended_once(own, own.op("linear", (x,), WIDTH, (matrix(own, WIDTH, WIDTH, form),)))
    x = own.op("linear", (x,), 31, (matrix(own, 31, WIDTH, form),))
    x = own.op("merge_rows", (x,), 124, rows=OUTPUTS, count=4, how=how)
    own.op("hidden_states", (own.op("linear", (x,), 40, (matrix(own, 40, 124, form),)),))
    compare(own, Images(GRIDS), ROUNDED[form])


@pytest.mark.parametrize("side", [1, 2, 7, 16])
def test_grid_embedding(side):
    own = toy()
    x = given(own)
    attended_once(own, x)
    own.op("grid_embedding", (x,), None, (own.vector(side * side * WIDTH),), side=side)
    merged(own, x)
    compare(own, Images(((2, 2), (2, 14), (8, 16))))


@pytest.mark.parametrize("side", [1, 7, 16])
def test_tables_of_rows_and_columns(side):
    """Gemma 4's: places beyond a table's last row have that one."""
    own = toy()
    x = given(own)
    attended_once(own, x)
    own.op("grid_embedding", (x,), None, (own.vector(2 * side * WIDTH),), side=side, axes=True)
    merged(own, x)
    compare(own, Images(((2, 2), (2, 14), (8, 16))))


@pytest.mark.parametrize("positions, offset", [(660, 0), (2000, 7)])
def test_tables_of_positions(positions, offset):
    own = toy()
    x = given(own)
    attended_once(own, x)
    own.op("position_embedding", (x,), None, (own.vector(positions * WIDTH),), positions=positions, offset=offset)
    merged(own, x)
    compare(own, Images(GRIDS))


def test_positions_beyond_a_table_have_its_last_row():
    table, images, found = np.random.default_rng(SEED).normal(size=(700, WIDTH)), Images(GRIDS), []
    table[8:] = table[8]
    for positions in (9, 700):
        own = toy()
        x = given(own)
        attended_once(own, x)
        own.op("position_embedding", (x,), None, (own.vector(table[:positions].ravel()),), positions=positions)
        merged(own, x)
        found.append(outputs_of(built(own), images.step(range(len(GRIDS)))).tobytes())
    assert found[0] == found[1]


def segmented(own: Toy, x: int, separator: int) -> int:
    tables = own.vector(700 * WIDTH), own.vector(2 * WIDTH)
    return own.op("position_embedding", (x,), None, tables, positions=700, separator=separator)


def test_tables_of_segments():
    """CLIP's first row has an embedding of its own: the rows behind it follow a separator."""
    own = toy()
    x = given(own)
    attended_once(own, x)
    segmented(own, segmented(own, x, 0), 0)
    merged(own, x)
    compare(own, Images(GRIDS))


def test_tables_of_segments_that_are_missing_are_named():
    own = toy()
    x = given(own)
    attended_once(own, x)
    segmented(own, segmented(own, x, 0), 1)
    merged(own, x)
    with pytest.raises(ValueError, match="no ops position_embedding with several separators"):
        built(own)
    own = toy()
    x = own.embedding(53, WIDTH)
    own.finish(segmented(own, x, 1))
    with pytest.raises(ValueError, match="a table of segments beside attention in one direction"):
        built(own)


@pytest.mark.parametrize("low, high", [(-0.5, 1.25), (-np.inf, np.inf)])
def test_limits_shifts_and_factors_of_values(low, high):
    own = toy()
    x = given(own)
    attended_once(own, x)
    own.op("clamp", (x,), None, (own.vector([low]), own.vector([high])))
    own.op("standardize", (x,), None, (own.vector(WIDTH), own.vector(WIDTH)))
    merged(own, x)
    compare(own, Images(GRIDS))


def test_limits_keep_what_is_no_number():
    own, images = toy(), Images(((2, 2),))
    x = given(own)
    attended_once(own, x)
    own.op("clamp", (x,), None, (own.vector([-np.inf]), own.vector([np.inf])))
    merged(own, x)
    images.patches[0][0, :3] = np.nan, np.inf, -np.inf
    found = outputs_of(built(own), images.step([0]))
    np.testing.assert_array_equal(found.reshape(-1), images.patches[0].reshape(-1))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [7, 24, 260, 1152, 2051, 6200])
def test_layer_norm(width, form):
    """Also of rows far from zero, and as 16-bit rows for a GEMM, as float32, and as both."""
    own = toy()
    x = given(own)
    attended_once(own, x)
    x = own.op("linear", (x,), width, (own.matrix(width, WIDTH), own.vector(np.full(width, 30.0))))
    normed = own.op("layer_norm", (x,), width, (own.vector(width), own.vector(width)), eps=1e-5)
    y = own.op("linear", (normed,), 30, (matrix(own, 30, width, form),))
    if width < 100:
        own.op("add", (y, own.op("linear", (normed,), 30, (own.matrix(30, width),))))
    merged(own, y)
    compare(own, Images(((2, 2), (8, 6))), max(ROUNDED[form], 2e-4))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations(function, form):
    """In place, and as a GEMM's rows are converted to 16 bits."""
    own = toy()
    x = given(own)
    attended_once(own, x)
    y = own.op("linear", (x,), 131, (matrix(own, 131, WIDTH, form), own.vector(131)))
    own.op("activate", (y,), None, function=function)
    y = own.op("linear", (y,), 50, (matrix(own, 50, 131, form), own.vector(50)))
    own.op("activate", (y,), None, function=function)
    merged(own, y)
    compare(own, Images(GRIDS), ROUNDED[form])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_gelu_mul(form):
    own = toy()
    x = given(own)
    attended_once(own, x)
    y = own.op("gelu_mul", (own.op("linear", (x,), 262, (matrix(own, 262, WIDTH, form),)),), 131)
    merged(own, own.op("linear", (y,), 50, (matrix(own, 50, 131, form),)))
    compare(own, Images(GRIDS), ROUNDED[form])


HEADS = [(1, 1, 8), (3, 3, 20), (4, 2, 36), (2, 2, 64), (3, 3, 72), (2, 2, 80), (2, 1, 88), (1, 1, 104), (2, 2, 128),
         (1, 1, 200)]


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_within_images_and_segments(heads, segments, cache):
    """Heads of towers; for 16 bits they are padded to sizes that mma kernels have."""
    own, pairs = toy(), heads[2] // 2
    own.rotary(heads[2], temporal=0, height=pairs // 2, width=pairs - pairs // 2)
    merged(own, attended(own, given(own), *heads, segments=segments))
    compare(own, Images(GRIDS), ROUNDED[cache], cache)


def tower(form: str, dim: int) -> Toy:
    own, width = toy(), 4 * dim
    own.rotary(dim, temporal=0, height=dim // 4, width=dim // 4)
    x = own.op("linear", (given(own),), width, (matrix(own, width, WIDTH, form),))
    for segments in (True, False):
        normed = own.op("layer_norm", (x,), width, (own.vector(width), own.vector(width)), eps=1e-6)
        qkv = own.op("linear", (normed,), 3 * width, (matrix(own, 3 * width, width, form), own.vector(3 * width)))
        own.op("rope", (qkv,), None, head_dim=dim, offset=0, heads=8)
        seen = own.attention(qkv, 4, 4, dim, bidirectional=True, segments=segments)
        own.op("add", (x, own.op("linear", (seen,), width, (matrix(own, width, width, form), own.vector(width)))))
        normed = own.op("layer_norm", (x,), width, (own.vector(width), own.vector(width)), eps=1e-6)
        inner = own.op("linear", (normed,), 300, (matrix(own, 300, width, form), own.vector(300)))
        own.op("activate", (inner,), None, function="gelu_tanh")
        own.op("add", (x, own.op("linear", (inner,), width, (matrix(own, width, 300, form),))))
    merged(own, x)
    return own


TOWERS = [("float32", 12), ("bfloat16", 64), ("bfloat16", 72), ("bfloat16", 80), ("float16", 128), ("float16", 88)]


@pytest.mark.parametrize("form, dim", TOWERS)
def test_a_whole_tower(form, dim):
    compare(tower(form, dim), Images(GRIDS), 2 * ROUNDED[form], form)


@pytest.mark.parametrize("form, dim", TOWERS)
def test_bits_of_an_image_depend_neither_on_its_batch_nor_on_parts(form, dim):
    own, images = tower(form, dim), Images(GRIDS)
    whole = outputs_of(built(own, form), images.step(range(len(GRIDS))))
    begin = np.cumsum([0, *(len(p) // 4 for p in images.places)])
    gpu = built(own, form)
    for order, parts in (([3, 1, 0, 4, 2], 0), ([2], 0), ([4], 0), ([0], 3), ([1, 3], 2), ([4, 3], 64)):
        found = outputs_of(gpu, images.step(order, even(own, parts)))
        assert found.tobytes() == np.concatenate([whole[begin[i]:begin[i + 1]] for i in order]).tobytes()
        gpu.step(plan([], free=range(len(order))), False)


def test_other_steps_do_not_come_between_parts():
    own, images = tower("float32", 12), Images(GRIDS)
    gpu = built(own)
    first, second, third = images.step([1], even(own, 3))
    gpu.step(first, False)
    with pytest.raises(ValueError, match="a part from .*, expected one from"):
        gpu.step(third, False)
    gpu.step(second, False)
    assert len(gpu.step(third, False).hidden) == len(images.places[1]) // 4
    with pytest.raises(ValueError, match="a part from .*, expected a first part"):
        gpu.step(second, False)


@pytest.mark.parametrize("width, bias", [(1, True), (9, False)])
def test_what_is_missing_is_named(width, bias):
    own = toy()
    x = given(own)
    own.rotary(2)
    merged(own, attended(own, x, 1, 1, 2, window=width))
    with pytest.raises(ValueError, match="in both directions with a window"):
        built(own)


# -- models that take rows ---------------------------------------------------------------------------------------------
def seeing(form: str, dim: int, interleaved: bool = False, **attributes) -> Toy:
    """A text model with added rows, places of three parts, or rows of images that see each other."""
    own, sees = Toy(SEED), "images" in attributes
    if not sees:
        own.rotary(dim, temporal=dim // 2 - 2 * (dim // 8), height=dim // 8, width=dim // 8,
                   interleaved_sections=interleaved)
    x = own.op("embedding", (), 31, (matrix(own, 53, 31, form),), rows=ALL, vocab_begin=0)
    table = matrix(own, 53, 31, form)   # given rows have the row of an id, as in Gemma 4
    own.op("add", (x, own.op("embedding", (), 31, (table,), rows=ALL, vocab_begin=0, given_id=5, scale=0.5)))
    for offset in () if sees else (31, 62):
        own.op("add_given", (x,), None, offset=offset)
    qkv = own.op("linear", (x,), 4 * dim, (matrix(own, 4 * dim, 31, form),))
    if not sees:
        own.op("rope", (qkv,), None, head_dim=dim, offset=0, heads=3)
    seen = own.attention(qkv, 2, 1, dim, **attributes)
    own.finish(own.op("linear", (seen,), 53, (matrix(own, 53, 2 * dim, form),)))
    return own


IDS = np.random.default_rng(SEED + 2).integers(0, 53, 600).tolist()


def steps(chunks, sections_of, length: int = 0):
    """Plans of a prompt of IDS in chunks; sections_of(begin, end): of a chunk. length: of a longer prompt."""
    at, plans, length = 0, [], length or sum(chunks)
    for count in chunks:
        spans = [s for s in spans_for(at + count) if s not in spans_for(at)]
        flags = PROMPT | (SAMPLE if at + count == length else 0)
        plans.append(plan([item(0, count, flags, outputs=count, spans=spans)],
                          [] if at else [start(0, IDS[:length])], sections=sections_of(at, at + count)))
        at += count
    return plans


def logits_in(own: Toy, plans, cache: str, **more) -> np.ndarray:
    gpu = compiled(own, cache, long=True, outputs=2048, **more)
    return np.concatenate([gpu.step(one, True).logits for one in plans])


def check(own: Toy, sections_of, length: int, chunkings, form: str, **more) -> None:
    reference = compile([own.program], [own.weights], Limits(max_rows=1024, num_spans=(256,)))
    expected, bits = np.array(reference.step(steps([length], sections_of)[0]).logits), []
    for chunks in ([length], *chunkings):
        found = logits_in(own, steps(chunks, sections_of), form, **more)
        error = np.abs(found - expected).max() / np.sqrt((expected ** 2).mean())
        assert error <= ROUNDED[form], (chunks, error)
        bits.append(found.tobytes())
    assert len(set(bits)) == 1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form, dim", [("float32", 16), ("bfloat16", 64), ("float16", 128), ("bfloat16", 256)])
def test_places_and_rows_of_prompts_with_images(form, dim, interleaved):
    """As Qwen's models have it: text, an image whose rows have places of their own, and text that continues behind.
    Steps of single rows are replayed as graphs, also those whose rows are given.
    """
    rows = np.random.default_rng(SEED + 3).normal(size=(120, 93)).astype(np.float32)
    places = np.concatenate([np.arange(37)[:, None].repeat(3, 1), 37 + raster(12, 10)])

    def sections(begin, end):
        first, last = max(begin, 37), min(end, 157)
        found = [embedded(0, first, rows[first - 37:last - 37])] if first < last else []
        return found + ([] if begin else [(POSITIONS, [0, len(places), 12 - 120, *places.ravel().tolist()])])

    own = seeing(form, dim, interleaved)
    check(own, sections, 330, ([37, 120, 173], [50, 1, 99, 180], [30, *[1] * 130, 170], [300, *[1] * 30]), form)


@pytest.mark.parametrize("form, dim", [("float32", 8), ("bfloat16", 64), ("bfloat16", 256), ("float16", 128),
                                       ("bfloat16", 24)])
@pytest.mark.parametrize("window", [0, 70])
def test_rows_of_an_image_see_each_other(form, dim, window):
    """In prompts of Gemma 3, with and without given rows, also where a prefix of the image is cached."""
    ranges = [0, 7, 20, 21, 100, 170, 170, 190, 200, 470]
    rows = np.random.default_rng(SEED + 4).normal(size=(270, 31)).astype(np.float32)

    def sections(begin, end):
        found = [] if begin else [(IMAGES, [0, *ranges])]
        return found + ([embedded(0, 200, rows)] if begin <= 200 < end else [])

    own = seeing(form, dim, images=True, window=window)
    chunkings = ([7, 93, 70, 20, 280, 60], [20, 1, 60, 19, 90, 1, 9, 270, 1, 59], [190, 280, *[1] * 60])
    check(own, sections, 530, chunkings, form, given_rows=True)
    with pytest.raises(ValueError, match=r"rows up to 130, within an image at 100\.\.\.170"):
        logits_in(own, steps([130], sections, 530), form, given_rows=True)


def test_plans_give_rows_only_where_the_model_takes_them():
    own = toy()
    own.finish(own.embedding(53, 31, own.rng.normal(size=(53, 31))))
    work, new = [item(0, 4, PROMPT | SAMPLE, outputs=4, spans=spans_for(4))], [start(0, [1, 2, 3, 4])]
    step = plan(work, new, sections=[embedded(0, 1, np.ones((2, 31)))])
    with pytest.raises(ValueError, match="given rows of 31 values, this program takes rows of 0"):
        compiled(own).step(step, True)
    expected, found = (compiled(own, given_rows=True).step(each, True).logits for each in (plan(work, new), step))
    assert (found[1:3] == 1).all() and found[[0, 3]].tobytes() == expected[[0, 3]].tobytes()
