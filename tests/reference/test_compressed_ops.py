"""Ops of DeepSeek-V4 on the CPU against the reference backend: attention over compressed positions, residual streams,
rotations of a head's last features, and routers with a table of experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reference.plan import GIVEN, SAMPLE
from reference.test_cpu_ops import EXACT, WIDTHS, compare, compiled, embedded, prompts, toy
from reference.toy import ALL, Toy, item, plan, start
from support.compressed_toys import (
    GROUPS,
    compressed,
    limited,
    rotated,
    routers,
    several_streams,
    spans_of,
    with_entries,
    with_experts_of_a_token,
)
from support.latent_toys import VOCAB
from support.seed import SEED


# -- residual streams --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [1, 7, 96, 531])
@pytest.mark.parametrize("streams, iterations", [(1, 1), (2, 1), (3, 20), (4, 2), (4, 20)])
def test_streams(streams, iterations, width, threads):
    compare(several_streams(streams, iterations, width), threads=threads)


def test_one_row_of_streams_is_divided_by_columns():
    """The same bits as among other rows."""
    def logits(executor, given):
        work = [item(slot, 1, SAMPLE, spans=[slot]) for slot in range(len(given))]
        return executor.step(plan(work, [start(slot, [token]) for slot, token in enumerate(given)]), True).logits

    own, width = Toy(5), 700
    x = embedded(own, 4 * width)
    weights = own.op("linear", (x,), 24, (own.matrix(24, 4 * width),))
    own.op("stream_weights", (weights,), None, (own.vector(3), own.vector(24)), streams=4, iterations=20, eps=1e-6)
    own.op("mix_streams", (x, own.op("merge_streams", (x, weights), width), weights))
    own.finish(x)
    alone, together = (logits(compiled(own, 3), given) for given in ([9], [9, 3, 4, 5]))
    np.testing.assert_array_equal(alone[0], together[0])


# -- what ops that stood before have besides ---------------------------------------------------------------------------
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("dim, rotary_dim", [(10, 10), (33, 6), (64, 16)])
def test_rotations_of_the_last_features_and_back(dim, rotary_dim, pairs):
    compare(rotated(dim, rotary_dim, pairs))


@pytest.mark.parametrize("width", WIDTHS)
def test_limited_silu_mul(width):
    compare(limited(width))


@pytest.mark.parametrize("selected_first", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_routers(by_token, normalized, selected_first):
    compare(routers(by_token, normalized, selected_first))


@pytest.mark.parametrize("attributes, weights, problem", [
    ({"by_token": True}, 1, "by_token needs a table as its only weight, and excludes softmax"),
    ({"by_token": True, "scores": "sigmoid"}, 0, "by_token needs a table"),
    ({"by_token": True, "scores": "sigmoid", "groups": 7, "top_groups": 6}, 1, "by_token needs a table"),
])
def test_tables_of_experts_that_are_refused(attributes, weights, problem):
    own = toy()
    x = embedded(own, 7)
    routed = own.program.add_row_set(ALL, 3)
    with pytest.raises(ValueError, match=problem):
        own.op("router", (x,), 1, [own.vector(3 * VOCAB)] * weights, rows=routed, top_k=3, **attributes)


@pytest.mark.parametrize("experts", [[0, 1, 5], [0, -1, 2], [0, 2, 2], [0, 1, 1.5], [0, 1, float("nan")]])
def test_experts_of_a_token_that_are_none(experts):
    own = with_experts_of_a_token(experts)
    with pytest.raises(ValueError, match="experts of token 2 must be 3 different numbers from 0 to 4"):
        compiled(own, 1)


# -- attention over compressed positions -------------------------------------------------------------------------------
@pytest.mark.parametrize("cache, tolerance", [("float32", EXACT), ("bfloat16", 8e-2)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, dim, rate, overlapping, selected", [
    (1, 4, 0, False, 0), (3, 20, 4, False, 0), (17, 33, 3, True, 0), (5, 131, 37, False, 0), (6, 64, 5, True, 300),
    (2, 16, 2, True, 1)])
def test_compressed_attention(heads, dim, rate, overlapping, selected, threads, cache, tolerance):
    """An indexer that selects one of many entries takes another where the cache rounds its keys. Scores of heads of 131
    reach 10, of which bfloat16 rounds queries, keys and weights where products have it: 0.06 at most on AMX.
    """
    if selected == 1 and cache == "bfloat16":
        pytest.skip("other entries have nearly the same score")
    own = Toy(SEED, groups=GROUPS)
    own.finish(compressed(own, heads, dim, rate, selected, overlapping))
    executor, given = compiled(own, threads, dtype=cache, num_spans=128), prompts()
    work = [item(slot, len(p), SAMPLE, **spans_of(slot, 0, len(p), 8)) for slot, p in enumerate(given)]
    data = plan(work, [start(slot, p) for slot, p in enumerate(given)])
    expected = own.runner(num_spans=(128,) * 3).step(data).logits
    error = np.abs(executor.step(data, True).logits - expected).max() / np.sqrt(np.mean(expected ** 2))
    assert error <= tolerance


def bits_do_not_depend_on_chunks(build: Callable[[], Toy], spans: Callable[[int, int], dict[str, list]], cache: str,
                                 threads: int) -> None:
    """A prompt in chunks of several sizes. Near the reference with a cache of floats. spans: those of positions
    [begin, end).
    """
    results, length = [], 1290
    prompt = np.random.default_rng(3).integers(0, VOCAB, length).tolist()
    for chunk in (length, 333, 47, 5):
        own = build()
        executor, new = compiled(own, threads, dtype=cache, long=True, num_spans=512), [start(0, prompt)]
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            work = item(0, end - begin, SAMPLE if end == length else 0, **spans(begin, end))
            result = executor.step(plan([work], new), True)
            new = []
        results.append(result.logits.tobytes())
    assert all(found == results[0] for found in results)
    if cache == "float32":
        runner = own.runner(num_spans=(400,) * own.groups, max_length=2048, max_rows=2048)
        expected = runner.step(plan([item(0, length, SAMPLE, **spans(0, length))], [start(0, prompt)])).logits
        error = np.abs(np.frombuffer(results[0], np.float32) - expected[0]).max()
        assert error <= EXACT * np.sqrt(np.mean(expected ** 2))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate, overlapping, selected", [(0, False, 0), (4, True, 150), (37, False, 0), (7, False, 20)])
def test_bits_of_compressed_positions_do_not_depend_on_chunks(rate, overlapping, selected, cache, threads):
    """Also where chunks end within the positions of an entry. Near the reference with a cache of floats."""
    def build() -> Toy:
        own = Toy(7, groups=GROUPS)
        own.finish(compressed(own, 20, 12, rate, selected, overlapping))
        return own

    bits_do_not_depend_on_chunks(build, lambda begin, end: spans_of(0, begin, end, 100), cache, threads)



def test_rejected_drafts_leave_no_entries():
    """Drafts complete entries; other tokens than these come, and have the bits that they have without drafts."""
    prompt = np.random.default_rng(4).integers(0, VOCAB, 41).tolist()
    found = []
    for drafts in ([], [1, 2, 3, 4, 5, 6]):
        own = Toy(9, groups=GROUPS)
        x = compressed(own, 4, 12, 4, 5, True)
        own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 48),)))
        executor, tokens, rows, new, have = compiled(own, 2, num_spans=128), [], [], [start(0, prompt)], 0
        for step in range(12):
            count = len(prompt) if step == 0 else 1
            begin = 0 if step == 0 else len(prompt) + len(tokens) - 1
            given = [] if step == 0 else [(draft + tokens[-1]) % VOCAB for draft in drafts]
            end = begin + count + len(given)
            fresh, have = spans_of(0, 16 * have, max(end, 16 * have), 12), max(have, -(-end // 16))
            flags, new_slots, new = SAMPLE | (GIVEN if given else 0), new, []
            result = executor.step(plan([item(0, count, flags, known=given, drafts=len(given), **fresh)], new_slots),
                                   True)
            tokens += result.tokens[:result.counts[0]].tolist()
            rows += list(result.logits[:result.counts[0]])
        found.append((tokens[:12], [row.tobytes() for row in rows[:12]]))
    assert found[0] == found[1]


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_entries_that_are_refused():
    own = Toy(groups=(*GROUPS, ("sliding", 5)))
    x = own.embedding(VOCAB, 24)
    own.rotary(4)
    place = {"rate": 4, "eps": 1e-6, "rotary_dim": 4, "rows_layer": 0, "rows_group": 1, "layer": 0, "cache_group": 0}

    def refuses(problem: str, weights=(4 * 12, 12), **other):
        with pytest.raises(ValueError, match=problem):
            own.op("compress", (x,), None, [own.vector(n) for n in weights], **{**place, **other})

    refuses("vector of 47 values, expected 48", (47, 12))
    refuses("cache group 0 is full, expected sliding", rows_group=0)
    refuses("cache group 1 is sliding, expected full", cache_group=1)
    refuses("no cache group 9", cache_group=9)
    refuses("cache group 3 keeps 5 positions, an entry is of 8", (4 * 12, 6), rows_group=3, overlapping=True)
    refuses("it needs a rotary table with its rotary_dim", rotary_dim=6)
    own.op("compress", (x,), None, (own.vector(48), own.vector(12)), **place)
    refuses("layer 0 of cache group 1 is taken", layer=1)
    refuses("layer 0 of cache group 0 is taken", rows_layer=1)


@pytest.mark.parametrize("attributes, problem", [
    ({"cache_group": 0}, "cache group 0 is full, expected sliding"),
    ({"window": 31}, "a window of 31 over a cache group that keeps 30"),
    ({"rate": 4, "entry_layer": 3}, "no earlier op keeps entries in layer 3 of cache group 0"),
    ({"rate": 5}, "the entries in layer 0 of cache group 0 have another rate"),
])
def test_attention_over_entries_that_is_refused(attributes, problem):
    own = Toy(groups=GROUPS)
    x = own.embedding(VOCAB, 31)
    own.rotary(4)
    with_entries(own, x, 12, 4, False, 4, 0)
    queries, kept = (own.op("linear", (x,), width, (own.matrix(width, 31),)) for width in (24, 12))
    with pytest.raises(ValueError, match=problem):
        own.op("compressed_attention", (queries, kept), 24, (own.vector(2),), **{
            "layer": 0, "cache_group": 1, "window": 29, "scale": 1.0, "rate": 0, **attributes})
    with pytest.raises(ValueError, match="it takes either a key or a rate"):
        own.op("indexer", (queries, own.op("linear", (x,), 2, (own.matrix(2, 31),))), 5, layer=0)


def test_a_quantized_cache_is_refused():
    own = Toy(groups=GROUPS)
    own.finish(compressed(own, 2, 12, 4))
    with pytest.raises(ValueError, match="a cache of compressed positions must have type float32 or bfloat16"):
        compiled(own, dtype="int8")
