"""Sampling by several GPUs: the bits of the host's sampler on the logits of all ranks, for any number of ranks, also if
steps are queued ahead. Each rank is a process; they share the GPUs that exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from support.gpu_sampling import SLOTS
from support.gpu_toys import SEED
from support.paths import TESTS
from support.rank_sampling import FIELDS, STEPS, cases_for, many_biases
from support.sampling_reference import draw

pytestmark = pytest.mark.cuda


def sampled(tmp_path, world: int, vocab: int, **asked) -> list[dict]:
    """What each rank has found."""
    from allspark_server import _cuda

    count = _cuda.device_count()
    (tmp_path / f"memory{world}").touch()
    outs = [tmp_path / f"{world}-{rank}.npz" for rank in range(world)]
    started = [subprocess.Popen(
        [sys.executable, "-m", "support.rank_sampling",
         json.dumps({"rank": rank, "world": world, "vocab": vocab, "seed": SEED, "gpu": rank % count, "biases": False,
                     "memory": str(tmp_path / f"memory{world}"), "out": str(outs[rank]), **asked})],
        cwd=TESTS, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}) for rank in range(world)]
    try:
        assert [process.wait(150) for process in started] == [0] * world
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [dict(np.load(out)) for out in outs]


@pytest.mark.parametrize("world, vocab, spread, ties, biases", [
    (2, 300, 1.0, True, False), (3, 1024, 2.0, False, False), (2, 5003, 1.0, False, False), (3, 5003, 1.0, True, False),
    (3, 40_001, 1.0, False, False), (2, 151_936, 1.0, True, True), (3, 151_936, 0.2, False, False),
    (2, 262_144, 1.5, False, False)])
def test_bits_of_any_number_of_ranks(tmp_path, world, vocab, spread, ties, biases):
    """Every processor and filter, with and without masks, log probabilities and alternatives."""
    check_bits(tmp_path, world, vocab, spread, ties, biases)


@pytest.mark.parametrize("world, vocab, biases", [(2, 151_936, True), (3, 5003, False)])
def test_bits_by_host_memory(monkeypatch, tmp_path, world, vocab, biases):
    """As if the ranks' GPUs did not reach each other."""
    monkeypatch.setenv("ALLSPARK_PEER_ACCESS", "0")
    check_bits(tmp_path, world, vocab, 1.0, True, biases)


def check_bits(tmp_path, world: int, vocab: int, spread: float, ties: bool, biases: bool) -> None:
    ranks = sampled(tmp_path, world, vocab, spread=spread, ties=ties, biases=biases)
    logits = np.concatenate([rank["logits"] for rank in ranks], axis=1)
    _, cases = cases_for(vocab, SEED)
    given = cases + (many_biases(vocab, np.random.default_rng(5)) if biases else [])
    assert logits.shape == (len(given), vocab)
    first = ranks[0]
    for i, (params, history, mask) in enumerate(given):
        expected = draw(logits[i], params, history, 1, mask)
        assert first["tokens"][i] == expected["token"], (i, params)
        assert bool(first["status"][i]) == bool(expected["status"])
        assert first["logprobs"][i].tobytes() == np.float32(expected["logprob"]).tobytes()
        assert first["top_ids"][i].tolist() == expected["top_ids"]
        assert first["top_logprobs"][i].tobytes() == np.array(expected["top_logprobs"], np.float32).tobytes()
    for rank in ranks[1:]:
        assert rank["tokens"].tobytes() == first["tokens"].tobytes()
    one, = sampled(tmp_path, 1, vocab, spread=spread, ties=ties, biases=biases)
    equal = [i for i in range(len(given)) if one["logits"][i].tobytes() == logits[i].tobytes()]
    assert len(equal) > len(given) / 2
    for field in FIELDS[:-1]:
        assert one[field][equal].tobytes() == first[field][equal].tobytes()
    for start in (0, SLOTS):
        apart = one[f"continued-{start}-False"]
        assert apart.shape == (STEPS, SLOTS)
        for found in (one, *ranks):
            assert found[f"continued-{start}-False"].tobytes() == apart.tobytes()
            assert found[f"continued-{start}-True"].tobytes() == apart.tobytes()
