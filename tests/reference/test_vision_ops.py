"""Ops of vision towers, and of models that take their rows: against the reference backend, and bit for bit in any batch
and in parts.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from allspark_server.runtime.plan import OP_POSITIONS, StepPlan
from reference.backend import compile
from reference.batch import Limits
from reference.plan import HIDDEN, IMAGES, PART, POSITIONS, SEGMENTS
from reference.test_cpu_ops import EXACT, SEED, VOCAB, compiled
from reference.toy import ALL, OUTPUTS, Toy, embedded, item, plan, spans_for, start

GRIDS = ((2, 2), (2, 14), (8, 6), (18, 16))     # patches by height and width, of each image
WIDTH = 24      # values of a patch


def raster(height: int, width: int, merge: int = 2) -> np.ndarray:
    """The places (time, height, width) of patches: blocks of merge x merge patches follow one another."""
    y, x = np.mgrid[:height, :width]
    both = np.stack([np.zeros_like(y), y, x], -1).reshape(height // merge, merge, width // merge, merge, 3)
    return both.transpose(0, 2, 1, 3, 4).reshape(-1, 3)


class Images:
    """Random images of these sizes, and the steps that compute them."""

    def __init__(self, grids=GRIDS, merge: int = 4, seed: int = SEED):
        rng = np.random.default_rng(seed)
        self.places = [raster(*grid) for grid in grids]
        self.patches = [rng.normal(size=(len(places), WIDTH)).astype(np.float32) for places in self.places]
        self.ends = [sorted({len(p), *rng.integers(1, len(p) + 1, 3).tolist()}) for p in self.places]
        self.merge = merge

    def step(self, which, cuts=()) -> list[bytes]:
        """The plan of a step with these images, or those of its parts: cuts are where they end, by op."""
        work, sections, new, spans = [], [], [], 0
        for slot, i in enumerate(which):
            rows = len(self.places[i])
            work.append(item(slot, rows, HIDDEN, outputs=rows // self.merge, spans=spans_for(rows, spans)))
            spans += len(work[-1].spans)
            new.append(start(slot, [0] * rows))
            sections += [(POSITIONS, [slot, rows, 0, *self.places[i].ravel().tolist()]),
                         (SEGMENTS, [slot, *self.ends[i]]), embedded(slot, 0, self.patches[i])]
        if not len(cuts):
            return [plan(work, new, sections=sections)]
        begin, *rest = (round(cut * OP_POSITIONS) for cut in cuts)
        return [plan(work, new, sections=[*sections, (PART, [0, begin])]),
                *(plan([], sections=[(PART, [*pair])]) for pair in itertools.pairwise([begin, *rest]))]


def toy() -> Toy:
    return Toy(SEED)


def given(own: Toy) -> int:
    return own.op("given_rows", (), WIDTH, (), ALL)


def merged(own: Toy, x: int, count: int = 4, how: str = "concat") -> None:
    width = own.program.tensors[x][0] * (1 if how == "mean" else count)
    own.op("hidden_states", (own.op("merge_rows", (x,), width, rows=OUTPUTS, count=count, how=how),))


def attended(own: Toy, x: int, q_heads: int, kv_heads: int, dim: int, **attributes) -> int:
    width = own.program.tensors[x][0]
    qkv = own.op("linear", (x,), (q_heads + 2 * kv_heads) * dim, (own.matrix((q_heads + 2 * kv_heads) * dim, width),))
    own.op("rope", (qkv,), None, head_dim=dim, offset=0, heads=q_heads + kv_heads)
    return own.attention(qkv, q_heads, kv_heads, dim, bidirectional=True, **attributes)


def outputs_of(executor, plans) -> np.ndarray:
    for one in plans[:-1]:
        assert executor.step(one, False).hidden is None
    return executor.step(plans[-1], False).hidden


def built(own: Toy, threads: int = 2, fused: bool = True):
    return compiled(own, threads, long=True, max_outputs=2048, fused=fused)


def compare(own: Toy, images: Images, tolerance: float = EXACT, threads: int = 2):
    plans = images.step(range(len(images.places)))
    found = outputs_of(built(own, threads), plans)
    expected = compile([own.program], [own.weights],
                       Limits(max_rows=2048, max_length=2048, num_spans=(256,))).step(plans[0]).hidden
    assert found.shape == expected.shape
    scale = np.sqrt((expected ** 2).mean())
    assert np.abs(found - expected).max() <= tolerance * scale, np.abs(found - expected).max() / scale


@pytest.mark.parametrize("how", ["concat", "interleave", "mean"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_merged_rows(how, count, threads):
    own = toy()
    x = given(own)
    attended_once(own, x)
    merged(own, x, count, how)
    compare(own, Images(merge=count), threads=threads)


def attended_once(own: Toy, x: int) -> None:
    """An attention without use: it says that a step has whole images."""
    own.rotary(2)
    attended(own, x, 1, 1, 2)


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


@pytest.mark.parametrize("threads", [1, 3])
def test_limits_shifts_and_factors_of_values(threads):
    own = toy()
    x = given(own)
    attended_once(own, x)
    own.op("clamp", (x,), None, (own.vector([-0.5]), own.vector([1.25])))
    own.op("standardize", (x,), None, (own.vector(WIDTH), own.vector(WIDTH)))
    merged(own, x)
    compare(own, Images(), threads=threads)


def test_limits_that_limit_nothing_and_values_that_are_no_numbers():
    own, images = toy(), Images(((2, 2),))
    x = given(own)
    attended_once(own, x)
    own.op("clamp", (x,), None, (own.vector([-np.inf]), own.vector([np.inf])))
    merged(own, x)
    images.patches[0][0, :3] = np.nan, np.inf, -np.inf
    found = outputs_of(built(own), images.step([0]))
    np.testing.assert_array_equal(found.reshape(-1), images.patches[0].reshape(-1))


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("heads", [(1, 1, 8), (3, 3, 20), (4, 2, 36)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attention_within_images_and_segments(heads, segments, threads):
    own, pairs = toy(), heads[2] // 2
    own.rotary(heads[2], temporal=0, height=pairs // 2, width=pairs - pairs // 2)
    merged(own, attended(own, given(own), *heads, segments=segments))
    compare(own, Images(), threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_of_an_image_depend_neither_on_its_batch_nor_on_parts(threads):
    own, images = toy(), Images()
    own.rotary(12, temporal=0, height=3, width=3)
    x = own.op("linear", (given(own),), 48, (own.matrix(48, WIDTH),))
    for segments in (True, False):
        own.op("add", (x, own.op("linear", (attended(own, x, 4, 4, 12, segments=segments),), 48,
                                 (own.matrix(48, 48),))))
    merged(own, x)
    whole = outputs_of(built(own, threads), images.step(range(len(GRIDS))))
    begin = np.cumsum([0, *(len(p) // 4 for p in images.places)])
    for order, parts in (([3, 1, 0, 2], 0), ([2], 0), ([0], 3), ([1, 3], 2), ([3], 64)):
        found = outputs_of(built(own, threads), images.step(order, even(own, parts)))
        assert found.tobytes() == np.concatenate([whole[begin[i]:begin[i + 1]] for i in order]).tobytes()


def even(own: Toy, parts: int) -> list[float]:
    """Where so many equal parts of a program end."""
    return [len(own.program.ops) * (i + 1) / parts for i in range(parts)]


def layers(own: Toy, x: int) -> int:
    """Two layers with every op of towers, and mergers of each kind."""
    own.op("grid_embedding", (x,), None, (own.vector(16 * 48),), side=4)
    for segments in (True, False):
        normed = own.op("rms_norm", (x,), 48, (own.vector(48),), eps=1e-6)
        context = attended(own, normed, 4, 4, 12, segments=segments)
        own.op("add", (x, own.op("linear", (context,), 48, (own.matrix(48, 48), own.vector(48)))))
        normed = own.op("rms_norm", (x,), 48, (own.vector(48),), eps=1e-6)
        both = own.op("linear", (normed,), 128, (own.matrix(128, 48), own.vector(128)))
        own.op("add", (x, own.op("linear", (own.op("silu_mul", (both,), 64),), 48, (own.matrix(48, 64),))))
        normed = own.op("layer_norm", (x,), 48, (own.vector(48), own.vector(48)), eps=1e-5)
        inner = own.op("linear", (normed,), 80, (own.matrix(80, 48),))
        own.op("activate", (inner,), None, function="gelu")
        own.op("add", (x, own.op("linear", (inner,), 48, (own.matrix(48, 80),))))
    both = own.op("linear", (x,), 64, (own.matrix(64, 48),))
    x = own.op("linear", (own.op("gelu_mul", (both,), 32),), 48, (own.matrix(48, 32),))
    one, two = (own.op("merge_rows", (x,), 48 * 4, rows=OUTPUTS, count=4, how=how) for how in ("concat", "interleave"))
    return own.op("concat", (one, own.op("linear", (two,), 20, (own.matrix(20, 192),))), 212)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_where_ops_are_cut(threads, fused):
    """Between ops, and between rows of one."""
    own, images = toy(), Images(((2, 2), (20, 34)))
    own.rotary(12, temporal=0, height=3, width=3)
    x = own.op("linear", (given(own),), 48, (own.matrix(48, WIDTH),))
    own.op("hidden_states", (layers(own, x),))
    executor, rng, count = built(own, threads, fused), np.random.default_rng(SEED + 4), len(own.program.ops)
    whole = outputs_of(executor, images.step([1, 0], ()))

    def again(cuts) -> bytes:
        first, *rest = images.step([1, 0], cuts)
        return outputs_of(executor, [free(first), *rest]).tobytes()

    def random(n: int) -> list[float]:
        """N cuts at most, at positions of their own."""
        positions = {*rng.integers(1, count * OP_POSITIONS, n).tolist(), count * OP_POSITIONS}
        return [position / OP_POSITIONS for position in sorted(positions)]

    for cuts in ([count], even(own, 7), even(own, 500), *map(random, (1, 2, 10, 100, 1000))):
        assert again(cuts) == whole.tobytes(), cuts
    assert again(()) == whole.tobytes()


def free(step: bytes) -> bytes:
    """The plan of a step that also frees the slots of the one before."""
    decoded = StepPlan.decode(step)
    return dataclasses.replace(decoded, free=[0, 1]).encode()


def test_other_steps_do_not_come_between_parts():
    own, images = toy(), Images()
    own.rotary(12)
    merged(own, attended(own, given(own), 2, 2, 12))
    executor = built(own)
    first, second, third = images.step([1], even(own, 3))
    executor.step(first, False)
    ends = [round(end * OP_POSITIONS) for end in even(own, 3)]
    with pytest.raises(ValueError, match=f"from {ends[1]} to {ends[2]} of {ends[2]}, expected one from {ends[0]}"):
        executor.step(third, False)
    executor.step(second, False)    # a plan that is refused changes nothing
    assert len(executor.step(third, False).hidden) == len(images.places[1]) // 4
    with pytest.raises(ValueError, match=f"a part from {ends[0]} to .*, expected a first part"):
        executor.step(second, False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_parts_of_prompts_with_images(interleaved):
    """As Qwen's models have it: text, an image whose rows have places of their own, and text that continues behind."""
    own = Toy(SEED)
    own.rotary(16, temporal=4, height=2, width=2, interleaved_sections=interleaved)
    x = own.embedding(VOCAB, 31, own.rng.normal(size=(VOCAB, 31)))
    own.op("add", (x, own.embedding(VOCAB, 31, own.rng.normal(size=(VOCAB, 31)), given_id=5, scale=0.5)))
    for offset in (31, 62):
        own.op("add_given", (x,), None, offset=offset)
    qkv = own.op("linear", (x,), 4 * 16, (own.matrix(4 * 16, 31),))
    own.op("rope", (qkv,), None, head_dim=16, offset=0, heads=3)
    own.emit(own.attention(qkv, 2, 1, 16))
    rng = np.random.default_rng(SEED + 2)
    ids, rows = rng.integers(0, VOCAB, 200).tolist(), rng.normal(size=(120, 93)).astype(np.float32)
    places = np.concatenate([np.arange(37)[:, None].repeat(3, 1), 37 + raster(12, 10)])
    more = [(POSITIONS, [0, len(places), 12 - 120, *places.ravel().tolist()])]

    def steps(chunks):
        at, plans = 0, []
        for rows_of in chunks:
            begin, end = max(at, 37), min(at + rows_of, 157)
            sections = [embedded(0, begin, rows[begin - 37:end - 37])] if begin < end else []
            spans = [s for s in spans_for(at + rows_of) if s not in spans_for(at)]
            plans.append(plan([item(0, rows_of, HIDDEN, outputs=rows_of, spans=spans)],
                              [] if at else [start(0, ids)], sections=sections + ([] if at else more)))
            at += rows_of
        return plans

    reference = compile([own.program], [own.weights], Limits(max_rows=256, num_spans=(256,)))
    expected = reference.step(steps([200])[0]).hidden
    bits = []
    for chunks in ([200], [37, 120, 43], [50, 1, 99, 50]):
        executor = built(own)
        found = np.concatenate([executor.step(one, False).hidden for one in steps(chunks)])
        assert np.abs(found - expected).max() <= EXACT * np.sqrt((expected ** 2).mean())
        bits.append(found.tobytes())
    assert len(set(bits)) == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("heads", [(1, 1, 8), (6, 2, 20)])
def test_rows_of_an_image_see_each_other(heads, window, threads):
    """In prompts of Gemma 3, also where a prefix of the image is cached. The bits do not depend on chunks."""
    own = Toy(SEED)
    x = own.embedding(VOCAB, 31, own.rng.normal(size=(VOCAB, 31)))
    qkv = own.op("linear", (x,), (heads[0] + 2 * heads[1]) * heads[2], (
        own.matrix((heads[0] + 2 * heads[1]) * heads[2], 31),))
    own.emit(own.attention(qkv, *heads, window=window, images=True))
    ids = np.random.default_rng(SEED + 3).integers(0, VOCAB, 250).tolist()
    more = [(IMAGES, [0, 0, 7, 20, 21, 100, 170, 170, 190])]

    def steps(chunks):
        at, plans = 0, []
        for count in chunks:
            spans = [s for s in spans_for(at + count) if s not in spans_for(at)]
            plans.append(plan([item(0, count, HIDDEN, outputs=count, spans=spans)], [] if at else [start(0, ids)],
                              sections=[] if at else more))
            at += count
        return plans

    reference = compile([own.program], [own.weights], Limits(max_rows=256, num_spans=(256,)))
    expected, bits = reference.step(steps([250])[0]).hidden, []
    for chunks in ([250], [7, 93, 70, 80], [20, 1, 60, 19, 90, 1, 59]):
        executor = compiled(own, threads, long=True, max_outputs=2048)
        found = np.concatenate([executor.step(one, False).hidden for one in steps(chunks)])
        assert np.abs(found - expected).max() <= EXACT * np.sqrt((expected ** 2).mean())
        bits.append(found.tobytes())
    assert len(set(bits)) == 1
    with pytest.raises(ValueError, match=r"rows up to 130, within an image at 100\.\.\.170"):
        compiled(own, long=True, max_outputs=2048).step(steps([130])[0], False)


def test_wrong_sections_are_refused():
    own, images = toy(), Images()
    own.rotary(12)
    merged(own, attended(own, given(own), 2, 2, 12))
    executor = built(own)
    rows, patches = len(images.places[0]), images.patches[0]
    work = [item(0, rows, HIDDEN, outputs=rows // 4, spans=spans_for(rows))]
    new = [start(0, [0] * rows)]
    for sections, reason in (
            ([embedded(0, 0, patches[:, :-1])], "given rows of 23 values, this program takes rows of 24"),
            ([embedded(0, 1, patches)], "given rows for positions 1...5, which the step does not compute"),
            ([embedded(1, 0, patches)], "slot 1 is given rows for positions 0...4"),
            ([(SEGMENTS, [0, 3, 3, 4])], "has a segment of positions 3...3"),
            ([(SEGMENTS, [0, 3])], "has segments up to position 3 of 4"),
            ([(POSITIONS, [1, 1, 0, 0, 0, 0])], "slot 1 is given rotary positions, and does not enter"),
            ([(POSITIONS, [0, 2, 0, 0, 0, 0])], "2 rotary positions in 3 words"),
            ([(PART, [2, 2])], "a part from 2 to 2"),
            ([(PART, [2, 3])], "a part from 2 to 3 has work of its own"),
            ([(PART, [0, 1 << 20])], "a part from 0 to 1048576 of 458752, expected a first part"),
            ([(IMAGES, [0, 0, 4])], "images, whose rows do not see each other in this program"),
            ([(9, [])], "a section of kind 9")):
        with pytest.raises(ValueError, match=reason):
            executor.step(plan(work, new, sections=sections), False)
    with pytest.raises(ValueError, match="an output for each 4 rows"):
        executor.step(plan([item(0, rows, HIDDEN, outputs=rows, spans=spans_for(rows))], new), False)
