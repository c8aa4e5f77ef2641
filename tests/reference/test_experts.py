"""Routers and experts of the reference backend, against transformers' modules in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from reference.toy import ALL, Toy

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROWS, WIDTH, INNER, EXPERTS, TOP = 17, 12, 7, 10, 3


def rows(seed=3):
    return np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32).astype(float)


def expert_mlp(toy, x, gate, up_gate, down, bias=None, first=0, count=EXPERTS, **router):
    """The router -> gate and up of each entry -> silu_mul -> down -> weighted sum, of experts [first, first +
    count).
    """
    routed = toy.program.add_row_set(ALL, TOP)
    logits = toy.op("linear", (x,), EXPERTS, (toy.matrix(EXPERTS, WIDTH, gate),))
    weights = () if bias is None else (toy.vector(bias),)
    scores = toy.op("router", (logits,), 1, weights, routed, top_k=TOP, **router)
    own = slice(first, first + count)
    stack = toy.matrix(count * 2 * INNER, WIDTH, up_gate[own].reshape(-1, WIDTH))
    both = toy.op("expert_linear", (x,), 2 * INNER, (stack,), routed, experts=count, expert_begin=first)
    y = toy.op("expert_linear", (toy.op("silu_mul", (both,), INNER),), WIDTH,
               (toy.matrix(count * WIDTH, INNER, down[own].reshape(-1, INNER)),), experts=count, expert_begin=first)
    return toy.op("combine_experts", (y, scores), WIDTH, rows=ALL)


def weights(seed=1):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(EXPERTS, WIDTH)), rng.normal(size=(EXPERTS, 2 * INNER, WIDTH)) * 0.4,
            rng.normal(size=(EXPERTS, WIDTH, INNER)) * 0.4)


def through(x, *args, **router):
    toy = Toy()
    toy.emit(expert_mlp(toy, toy.embedding(3, WIDTH), *args, **router))
    return toy.emitted(embeddings=x)


def by_hand(x, chosen, shares, up_gate, down):
    """Computes every row's experts one by one."""
    out = np.zeros_like(x)
    for row in range(len(x)):
        for expert, share in sorted(zip(chosen[row], shares[row])):
            gate, up = np.split(up_gate[expert] @ x[row], 2)
            out[row] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("normalized", [True, False])
def test_qwen3_moe(normalized):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    gate, up_gate, down = weights()
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS,
                            num_experts_per_tok=TOP, norm_topk_prob=normalized)
    block = Qwen3MoeSparseMoeBlock(config).double()
    block.gate.weight.data = torch.tensor(gate)
    block.experts.gate_up_proj.data, block.experts.down_proj.data = torch.tensor(up_gate), torch.tensor(down)
    x = rows()
    expected = block(torch.tensor(x)[None])[0].detach().numpy()
    found = through(x, gate, up_gate, down, normalized=normalized)
    np.testing.assert_allclose(found, expected.reshape(ROWS, WIDTH), rtol=1e-5, atol=1e-6)  # its softmax is in float32


def test_mixtral_and_the_softmax_over_the_chosen_are_the_normalized_softmax():
    gate, up_gate, down = weights()
    x = rows()
    logits = x @ gate.T
    chosen = np.argsort(-logits, 1)[:, :TOP]
    best = np.take_along_axis(logits, chosen, 1)
    shares = np.exp(best) / np.exp(best).sum(1, keepdims=True)
    found = through(x, gate, up_gate, down, normalized=True)
    np.testing.assert_allclose(found, by_hand(x, chosen, shares, up_gate, down), rtol=1e-12, atol=1e-13)


def test_deepseek_v3_chooses_groups_by_corrected_scores_and_weighs_by_the_scores():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    gate, up_gate, down = weights()
    bias = np.random.default_rng(6).normal(size=EXPERTS)
    config = DeepseekV3Config(hidden_size=WIDTH, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, n_group=5,
                              topk_group=2, num_experts_per_tok=TOP, norm_topk_prob=True, routed_scaling_factor=2.5,
                              n_shared_experts=1)
    block = DeepseekV3MoE(config).double()
    block.gate.weight.data = torch.tensor(gate)
    block.gate.e_score_correction_bias.data = torch.tensor(bias)
    x = rows()
    _, shares, chosen = block.gate(torch.tensor(x))
    found = through(x, gate, up_gate, down, bias, scores="sigmoid", normalized=True, scale=2.5, groups=5, top_groups=2)
    expected = by_hand(x, chosen.numpy(), shares.detach().numpy(), up_gate, down)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_biases_of_experts_and_rows_that_are_routed_already():
    toy, x = Toy(), rows()
    gate = np.random.default_rng(2).normal(size=(EXPERTS, WIDTH))
    w, bias = np.zeros((EXPERTS * 2, WIDTH)), np.arange(20.0)
    hidden, routed = toy.embedding(3, WIDTH), toy.program.add_row_set(ALL, 1)
    logits = toy.op("linear", (hidden,), EXPERTS, (toy.matrix(EXPERTS, WIDTH, gate),))
    scores = toy.op("router", (logits,), 1, (), routed, top_k=1, normalized=True)
    y = toy.op("expert_linear", (hidden,), 2, (toy.matrix(20, WIDTH, w), toy.vector(bias)), routed, experts=EXPERTS)
    toy.emit(toy.op("combine_experts", (y, scores), 2, rows=ALL))
    best = (x @ gate.T).argmax(1)
    np.testing.assert_array_equal(toy.emitted(embeddings=x), np.stack([2.0 * best, 2.0 * best + 1], 1))


@pytest.mark.parametrize("cuts", [(0, 10), (0, 4, 10), (0, 1, 2, 10)])
def test_whole_experts_per_rank_add_up(cuts):
    """Each rank computes the entries of its own experts; all_reduce adds up the rest of a row's sum."""
    gate, up_gate, down = weights()
    x = rows()
    parts = [through(x, gate, up_gate, down, None, first, last - first, normalized=True)
             for first, last in itertools.pairwise(cuts)]
    np.testing.assert_allclose(sum(parts), through(x, gate, up_gate, down, normalized=True), rtol=1e-12, atol=1e-13)


def test_a_row_does_not_see_what_others_route_to():
    gate, up_gate, down = weights()
    x = rows()
    together = through(x, gate, up_gate, down, normalized=True)
    alone = [through(x[i:i + 1], gate, up_gate, down, normalized=True)[0] for i in range(ROWS)]
    np.testing.assert_allclose(together, alone, rtol=1e-12, atol=1e-14)


def test_a_row_s_sum_is_in_ascending_order_of_experts():
    """In whatever order they were chosen: here the last first, and (large - large) + 1 is not (1 - large) + large."""
    toy = Toy()
    hidden, routed = toy.embedding(3, WIDTH), toy.program.add_row_set(ALL, 3)
    logits = toy.op("linear", (hidden,), 3, (toy.matrix(3, WIDTH, np.zeros((3, WIDTH))),))
    scores = toy.op("router", (logits,), 1, (toy.vector([0.0, 1.0, 2.0]),), routed, top_k=3, scores="sigmoid")
    stack, biases = toy.matrix(3, WIDTH, np.zeros((3, WIDTH))), toy.vector([1e16, -1e16, 1.0])
    y = toy.op("expert_linear", (hidden,), 1, (stack, biases), routed, experts=3)
    toy.emit(toy.op("combine_experts", (y, scores), 1, rows=ALL))
    assert (toy.emitted(embeddings=rows()) == 0.5).all()


def test_equal_scores_go_to_the_lowest_expert():
    gate, up_gate, down = np.zeros((EXPERTS, WIDTH)), *weights()[1:]
    x = rows()
    expected = by_hand(x, [[0, 1, 2]] * ROWS, [[1 / 3] * 3] * ROWS, up_gate, down)
    np.testing.assert_allclose(through(x, gate, up_gate, down, normalized=True), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("change, problem", [
    ({"top_k": 4}, "top_k 4 of 10 experts, and a row set of 3 entries"),
    ({"top_k": 3, "groups": 3}, "1 of 3 groups of 10 experts"),
    ({"top_k": 3, "groups": 5, "top_groups": 1}, "1 of 5 groups of 10 experts"),
    ({"top_k": 3, "scores": "tanh"}, "scores is 'tanh': expected one of softmax, sigmoid"),
])  # fmt: skip
def test_refusals(change, problem):
    toy = Toy()
    x = toy.embedding(3, EXPERTS)
    routed = toy.program.add_row_set(ALL, 3)
    with pytest.raises(ValueError, match=problem):
        toy.op("router", (x,), 1, (), routed, **change)
    with pytest.raises(ValueError, match="must have a row set formed of its input's rows"):
        toy.op("router", (x,), 1, (), ALL, top_k=3)
    scores = toy.op("router", (x,), 1, (), routed, top_k=3)
    with pytest.raises(ValueError, match="25 rows do not divide by 10 experts"):
        toy.op("expert_linear", (x,), 2, (toy.matrix(25, EXPERTS),), routed, experts=10)
    with pytest.raises(ValueError, match="its output must have the rows that its input's were formed of"):
        toy.op("combine_experts", (scores, scores), 1)
