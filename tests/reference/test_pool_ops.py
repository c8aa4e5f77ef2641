"""Latent attention to pools of positions that an indexer selects by compressed keys (GLM-5.3-Flash), on the CPU against
the reference backend.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import GIVEN, SAMPLE
from reference.test_compressed_ops import bits_do_not_depend_on_chunks
from reference.test_cpu_ops import EXACT, compare, compiled, embedded, prompts, toy
from reference.toy import Toy, item, plan, start
from support.latent_toys import POOL_GROUPS, VOCAB, pool_spans, pooled
from support.seed import SEED


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_the_mean_of_streams(streams):
    own = toy()
    own.finish(own.op("merge_streams", (embedded(own, streams * 37),), 37))
    compare(own, threads=3)


@pytest.mark.parametrize("cache, tolerance", [("float32", EXACT), ("bfloat16", 4e-2), ("int8", 8e-2)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, latent, rope, pool, selected", [
    (3, 24, 0, 4, 300), (17, 33, 6, 3, 1000), (19, 64, 0, 2, 700), (2, 20, 0, 7, 200)])
def test_attention_to_all_pools(heads, latent, rope, pool, selected, threads, cache, tolerance):
    """Without a selection, the positions of all pools and the last ones are all positions."""
    own = Toy(SEED, groups=POOL_GROUPS)
    own.finish(pooled(own, heads, latent, rope, pool, selected))
    executor, given = compiled(own, threads, dtype=cache, num_spans=128), prompts()
    work = [item(slot, len(p), SAMPLE, **pool_spans(slot, 0, len(p), 8)) for slot, p in enumerate(given)]
    data = plan(work, [start(slot, p) for slot, p in enumerate(given)])
    expected = own.runner(num_spans=(128,) * 2).step(data).logits
    error = np.abs(executor.step(data, True).logits - expected).max() / np.sqrt(np.mean(expected ** 2))
    assert error <= tolerance


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("heads, rope, pool, selected", [(3, 0, 4, 1), (19, 0, 5, 40), (2, 6, 7, 3), (5, 0, 2, 300)])
def test_bits_do_not_depend_on_chunks(heads, rope, pool, selected, cache, threads):
    """Also where chunks end within a pool. Near the reference with a cache of floats."""
    def build() -> Toy:
        own = Toy(7, groups=POOL_GROUPS)
        own.finish(pooled(own, heads, 20, rope, pool, selected))
        return own

    bits_do_not_depend_on_chunks(build, lambda begin, end: pool_spans(0, begin, end, 100), cache, threads)



def test_rows_may_lie_beside_the_latents():
    """As in draft heads: with the same bits."""
    prompt, found = np.random.default_rng(6).integers(0, VOCAB, 210).tolist(), []
    for groups, rows in ((POOL_GROUPS, (1, 0)), (POOL_GROUPS[:1], (0, 2))):
        own = Toy(5, groups=groups)
        own.finish(pooled(own, 5, 12, 0, 4, 20, rows))
        executor, new = compiled(own, 2, num_spans=64, long=True), [start(0, prompt)]
        for begin in range(0, 210, 35):
            fresh = pool_spans(0, begin, begin + 35, 16)
            if len(groups) < 2:
                del fresh["other_spans"]
            result, new = executor.step(plan([item(0, 35, SAMPLE if begin == 175 else 0, **fresh)], new), True), []
        found.append(result.logits.tobytes())
    assert found[0] == found[1]


def test_rejected_drafts_leave_no_pools():
    """Drafts complete pools; other tokens than these come, and have the bits that they have without drafts."""
    prompt = np.random.default_rng(4).integers(0, VOCAB, 41).tolist()
    found = []
    for drafts in ([], [1, 2, 3, 4, 5, 6]):
        own = Toy(9, groups=POOL_GROUPS)
        own.finish(own.op("linear", (pooled(own, 4, 12, 0, 5, 3),), VOCAB, (own.matrix(VOCAB, 48),)))
        executor, tokens, rows, new, have = compiled(own, 2, num_spans=128), [], [], [start(0, prompt)], 0
        for step in range(12):
            begin, count = (len(prompt) + len(tokens) - 1, 1) if step else (0, len(prompt))
            given = [(draft + tokens[-1]) % VOCAB for draft in drafts] if step else []
            end = begin + count + len(given)
            fresh, have = pool_spans(0, 16 * have, max(end, 16 * have), 12), max(have, -(-end // 16))
            flags = SAMPLE | (GIVEN if given else 0)
            work = [item(0, count, flags, known=given, drafts=len(given), **fresh)]
            result, new = executor.step(plan(work, new), True), []
            tokens += result.tokens[:result.counts[0]].tolist()
            rows += list(result.logits[:result.counts[0]])
        found.append((tokens[:12], [row.tobytes() for row in rows[:12]]))
    assert found[0] == found[1]


@pytest.mark.parametrize("rate", [0, 3])
def test_programs_that_are_refused(rate):
    own = Toy(groups=POOL_GROUPS)
    x = own.embedding(VOCAB, 24)
    place = {"rate": 4, "layer": 1, "cache_group": 0}
    own.op("compress", (x,), None, (own.vector(48),), eps=0, rows_layer=0, rows_group=1, **place)
    with pytest.raises(ValueError, match="its rows and its entries have one place"):
        own.op("compress", (x,), None, (own.vector(48),), eps=0, rate=4, rows_layer=3, rows_group=0, layer=3,
               cache_group=0)
    asked, weights = (own.op("linear", (x,), width, (own.matrix(width, 24),)) for width in (24, 2))
    with pytest.raises(ValueError, match="12 columns, expected positions of entries of `rate` each, and rate - 1 more"):
        own.op("indexer", (asked, weights), 12, positions=True, **place)
    seen = own.op("indexer", (asked, weights), 11, positions=True, **place)
    rows = [own.op("linear", (x,), width, (own.matrix(width, 24),)) for width in (24, 3, 12)]
    sizes = {"latent_dim": 12, "rope_dim": 0, "scale": 1.0}
    with pytest.raises(ValueError, match="its fourth input is that of an indexer with another rate, or other outputs"):
        own.op("latent_attention", (*rows, seen), 24, layer=0, rate=rate, **sizes)
    with pytest.raises(ValueError, match="a rate needs an indexer's output"):
        own.op("latent_attention", rows, 24, layer=0, rate=4, **sizes)
    with pytest.raises(ValueError, match="layer 1 of cache group 0 is taken"):
        own.op("latent_attention", (*rows, seen), 24, layer=1, rate=4, **sizes)
