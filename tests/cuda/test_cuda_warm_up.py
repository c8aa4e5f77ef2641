"""The steps that load kernels and record graphs before requests: they end, and change no request's bits."""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import GIVEN, SAMPLE
from reference.toy import item, plan, start
from support.gpu_toys import SEED, VOCAB, compiled, small_model, tokens_of, warmed

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("own, cache", [
    (lambda: small_model("float32", 8), "float32"), (lambda: small_model("bfloat16", 64), "bfloat16"),
    (lambda: small_model("bfloat16", 64), "int8"), (lambda: small_model("int4", 64), "uint4")])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 9, "top_k": 7, "logprobs": True}])
def test_the_bits_of_requests_without_a_warm_up(own, cache, sampling):
    """`long`: the sizes of steps whose sequences have several KV splits are recorded, too, with empty tiles."""
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 17, 33, 40, 2)]
    for more in ({}, {"long": True}, {"graphs": False}):
        expected = tokens_of(compiled(own(), cache, **more), prompts, **sampling)
        assert tokens_of(warmed(compiled(own(), cache, **more)), prompts, **sampling) == expected
        assert tokens_of(warmed(compiled(own(), cache, **more), 100), prompts, chunk=7, **sampling) == expected
        assert tokens_of(warmed(compiled(own(), cache, **more)), prompts, GIVEN, drafts=3, **sampling) == expected


def test_long_contexts_after_a_warm_up():
    """The recorded graphs of steps with several KV splits, replayed for sequences that have them."""
    prompts = [np.random.default_rng(SEED + n).integers(0, VOCAB, n).tolist() for n in (700, 300, 3)]

    def model():
        return compiled(small_model("bfloat16", 64), "bfloat16", long=True)
    assert long_tokens(warmed(model()), prompts) == long_tokens(model(), prompts)


def long_tokens(gpu, prompts) -> list[list[int]]:
    """Greedy tokens of prompts whose sequences have 64 spans each."""
    found, lengths = [[] for _ in prompts], [0] * len(prompts)
    for step in range(6):
        work, new = [], []
        for slot, prompt in enumerate(prompts):
            rows = len(prompt) if step == 0 else 1
            begin, end = -(-lengths[slot] // 16), -(-(lengths[slot] + rows) // 16)
            work.append(item(slot, rows, SAMPLE, spans=[64 * slot + at for at in range(begin, end)]))
            lengths[slot] += rows
            if step == 0:
                new.append(start(slot, prompt))
        for slot, token in enumerate(gpu.step(plan(work, new)).tokens.tolist()):
            found[slot].append(token)
    return found
