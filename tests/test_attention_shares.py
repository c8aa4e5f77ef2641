"""How blocks of attention are shared out among threads (native/cpu/attention_shares.h)."""

import random

import pytest

from allspark_server import _native

RUN = 8


def check(tiles, threads):
    """Every block once, in order; balanced; the partial results that merging needs. Returns each thread's cost."""
    ranges, cuts, partials = _native.share_attention(tiles, threads)
    flat = [r for of_thread in ranges for r in of_thread]
    assert len(ranges) == threads and flat == sorted(flat)
    at = dict.fromkeys(range(len(tiles)), 0)
    for tile, first, last in flat:
        assert at[tile] == first < last
        at[tile] = last
    assert all(at[t] == blocks for t, (blocks, _, _) in enumerate(tiles))
    costs = [sum((last - first) * tiles[tile][1] for tile, first, last in of_thread) for of_thread in ranges]
    share = sum(costs) / threads
    largest = max([cost for _, cost, whole in tiles if not whole] + [b * cost for b, cost, whole in tiles if whole], default=0)
    assert max(costs) <= share * (1 + 2 / 32) + largest + 1

    owners = {}
    for thread, of_thread in enumerate(ranges):
        for tile, first, last in of_thread:
            owners.setdefault(tile, [None] * tiles[tile][0])[first:last] = [thread] * (last - first)
    assert [tile for tile, _ in cuts] == [t for t in sorted(owners) if len(set(owners[t])) > 1]
    used = 0
    for tile, runs in cuts:
        assert not tiles[tile][2], "a whole tile was cut"
        assert len(runs) == -(-tiles[tile][0] // RUN)
        for r, (partial, cut) in enumerate(runs):
            of_run = owners[tile][r * RUN:(r + 1) * RUN]
            assert partial == used and cut == (len(set(of_run)) > 1)
            used += len(of_run) if cut else 1
    longest = max((blocks for blocks, _, _ in tiles), default=0)
    assert used == partials <= (threads - 1) * (-(-longest // RUN) + RUN - 1)
    return costs


def test_one_long_sequence_among_short_ones():
    tiles = [(8, 11, False)] * 32 + [(1024, 11, False)] * 2 + [(8, 11, False)] * 32
    costs = check(tiles, 16)
    assert max(costs) <= 1.05 * sum(costs) / 16


@pytest.mark.parametrize("threads", [1, 2, 7, 16, 64])
def test_any_tiles(threads):
    rng = random.Random(threads)
    for _ in range(400):
        longest = rng.choice([1, 3, 9, 60, 1024])
        tiles = [(rng.randint(1, longest) if rng.random() < 0.9 else longest, rng.choice([1, 5, 11, 20]), rng.random() < 0.2)
                 for _ in range(rng.choice([0, 1, 2, 5, 33, 300]))]
        check(tiles, threads)


def test_equal_tiles_are_not_cut_where_threads_divide_them():
    assert _native.share_attention([(10, 7, False)] * 32, 16)[1] == []


def test_few_blocks_go_to_as_many_threads():
    ranges, cuts, partials = _native.share_attention([(9, 5, False)], 16)
    assert sum(bool(r) for r in ranges) == 9 and partials == 9 and cuts == [(0, [(0, True), (8, False)])]


def test_tiles_without_work_are_refused():
    with pytest.raises(ValueError, match="0 blocks"):
        _native.share_attention([(0, 1, False)], 2)
