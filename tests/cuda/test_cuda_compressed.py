"""DeepSeek-V4's ops on the GPU against float64: residual streams, rotations of a head's last features, routers with a
table of experts, attention over compressed positions.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import SAMPLE
from reference.toy import Toy, item, plan, start
from support.compressed_toys import limited, rotated, routers, several_streams, with_experts_of_a_token
from support.gpu_toys import EXACT, compare, compiled, embedded, tokens_of

pytestmark = pytest.mark.cuda


# -- residual streams --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [1, 7, 96, 531, 4096])
@pytest.mark.parametrize("streams, iterations", [(1, 1), (2, 1), (3, 20), (4, 2), (4, 20), (33, 3)])
def test_streams(streams, iterations, width):
    compare(several_streams(streams, iterations, min(width, 16384 // streams)), 2 * EXACT)


@pytest.mark.parametrize("width", [700, 4096, 513])
def test_bits_of_streams_do_not_depend_on_other_rows(width):
    def logits(executor, given):
        work = [item(slot, 1, SAMPLE, spans=[slot]) for slot in range(len(given))]
        return executor.step(plan(work, [start(slot, [token]) for slot, token in enumerate(given)]), True).logits

    own = Toy(5)
    x = embedded(own, 4 * width)
    weights = own.op("linear", (x,), 24, (own.matrix(24, 4 * width),))
    own.op("stream_weights", (weights,), None, (own.vector(3), own.vector(24)), streams=4, iterations=20, eps=1e-6)
    own.op("mix_streams", (x, own.op("merge_streams", (x, weights), width), weights))
    own.finish(x)
    given = np.random.default_rng(1).integers(0, 53, 40).tolist()
    several = logits(compiled(own, slots=40), given)
    for count in (1, 2, 16, 17):
        np.testing.assert_array_equal(logits(compiled(own, slots=40), given[:count]), several[:count])


def test_kernel_of_their_products():
    own = several_streams(4, 2, 4096)
    found = {row["shape"]: row["kernel"] for row in compiled(own).kernels() if row["op"] == "linear"}
    assert set(found.values()) == {"long_k"} and len(found) == 2


# -- what ops that stood before have besides ---------------------------------------------------------------------------
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("dim, rotary_dim", [(10, 10), (33, 6), (64, 16), (512, 64)])
def test_rotations_of_the_last_features_and_back(dim, rotary_dim, pairs):
    compare(rotated(dim, rotary_dim, pairs))


@pytest.mark.parametrize("width", [1, 31, 257, 2048])
def test_limited_silu_mul(width):
    compare(limited(width))


@pytest.mark.parametrize("experts, top", [(7, 3), (300, 6), (600, 32)])
@pytest.mark.parametrize("selected_first", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_routers(by_token, normalized, selected_first, experts, top):
    compare(routers(by_token, normalized, selected_first, experts, top))


@pytest.mark.parametrize("by_token", [False, True])
def test_experts_of_tokens_that_the_gpu_sampled(by_token):
    """Steps that are queued before the token of the one before is known choose by that token."""
    own, experts, top = Toy(11), 40, 4
    x = embedded(own, 32)
    routed = own.program.add_row_set(0, top)
    logits = own.op("linear", (x,), experts, (own.matrix(experts, 32, 2 * own.rng.normal(size=(experts, 32))),))
    table = own.rng.permuted(np.tile(np.arange(experts), (53, 1)), axis=1)[:, :top].ravel()
    scores = own.op("router", (logits,), 1, (own.vector(table) if by_token else own.vector(experts),), rows=routed,
                    top_k=top, scores="sqrt_softplus", normalized=True, by_token=by_token)
    y = own.op("expert_linear", (x,), 64, (own.matrix(experts * 64, 32),), rows=routed, experts=experts)
    y = own.op("limited_silu_mul", (y,), 32, limit=2.0)
    y = own.op("expert_linear", (y,), 53, (own.matrix(experts * 53, 32),), rows=routed, experts=experts)
    own.finish(own.op("combine_experts", (y, scores), 53, rows=0))
    prompts = [np.random.default_rng(n).integers(0, 53, n).tolist() for n in (1, 9)]
    found = [tokens_of(compiled(own, graphs=graphs), prompts, do_sample=False) for graphs in (True, False)]
    alone = [tokens_of(compiled(own), [prompt], do_sample=False)[0] for prompt in prompts]
    assert found[0] == found[1] == alone


@pytest.mark.parametrize("experts", [[0, 1, 5], [0, -1, 2], [0, 2, 2], [0, 1, 1.5], [0, 1, float("nan")]])
def test_experts_of_a_token_that_are_none(experts):
    with pytest.raises(ValueError, match="experts of token 2 must be 3 different numbers from 0 to 4"):
        compiled(with_experts_of_a_token(experts))
