"""Drafts by the model itself: heads of GLM-4.5, DeepSeek-V3, Qwen3-Next, Qwen3.5 and MiMo, with one layer and with
several, against a float64 reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5_moe")

from support import draft_heads
from support.checkpoints import prompt_of
from support.driver import Driver

slow = pytest.mark.slow
NAMES = [(name, world) if (name, world) == ("mimo", 2) else pytest.param(name, world, marks=slow)
         for name in draft_heads.SPECS for world in (1, 2)]

SEVERAL = [("mimo", 2, 1), *(pytest.param(*case, marks=slow) for case in (
    ("glm4-moe", 2, 1), ("glm4-moe", 3, 1), ("glm4-moe", 2, 2), ("deepseek-v3", 3, 1), ("deepseek-v3", 3, 2),
    ("deepseek-v32", 2, 1), ("qwen3-next", 3, 1), ("qwen3-next", 2, 2), ("qwen3-5", 2, 1)))]
# Of the head, given, and none for longer than hidden states are held.
ROUNDS = [3, 0, 4, 1, -3, 2, -1, 0, 4, *[0] * 20, 3, 5, -4, 5]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    made = {}

    def of(name, layers=1):
        if (name, layers) not in made:
            made[name, layers] = draft_heads.write(tmp_path_factory.mktemp(name), name, layers=layers)
        return made[name, layers]

    return of


@pytest.mark.parametrize("name, world", NAMES)
def test_drafts(name, world, heads):
    """The logits of the rows of drafts are those after the reference's drafts."""
    made = heads(name)
    with Driver(made.path, world, speculation="mtp") as driver:
        draft_heads.check_drafts(driver, made, (2, 64), (40, 13), (130, 64))
        for runner in driver.runners:  # planned as loaded, without what it shares
            assert len(runner._drafts) == len(runner._draft_executors) == driver.info.draft_layers == 1
            for draft, executor in zip(runner._drafts, runner._draft_executors):
                assert draft.weight_bytes(runner._device) == executor.weight_bytes()
                assert draft._shares(draft.graph.weights["model.embed_tokens.weight"])
    with Driver(made.path, world, speculation="mtp", max_step_tokens=8) as driver:
        draft_heads.check_drafts(driver, made, (40, 1), (43, 5))  # more held states than a step has rows


@pytest.mark.parametrize("name, layers, world", SEVERAL)
def test_drafts_of_several_layers(name, layers, world, heads):
    """Draft i comes from layer i, those after the last layer's from that layer: after prompts, and step after step,
    where rows of drafts are computed again with the tokens that came instead.
    """
    made = heads(name, layers)
    with Driver(made.path, world, speculation="mtp") as driver:
        assert driver.info.draft_layers == layers
        draft_heads.check_drafts(driver, made, (2, 64), (3, 64), (40, 13), (130, 64))
        draft_heads.check_rounds(driver, made, prompt_of(29, seed=1), ROUNDS)
        for runner in driver.runners:
            assert len(runner._drafts) == layers
            for draft, executor in zip(runner._drafts, runner._draft_executors):
                assert draft.weight_bytes(runner._device) == executor.weight_bytes()
    with Driver(made.path, world, speculation="mtp", max_step_tokens=8) as driver:
        draft_heads.check_drafts(driver, made, (40, 1), (43, 5))
        draft_heads.check_rounds(driver, made, prompt_of(2, seed=1), ROUNDS[:9])


def test_layers_differ(heads):
    """What the tests above compare with: the reference's drafts of two layers are not those of the first one alone."""
    made, tokens = heads("mimo", 2), prompt_of(40, seed=40)
    alone = replace(made, heads=made.heads[:1], names=made.names[:1])
    assert made.drafts(tokens, 2)[0][0] == alone.drafts(tokens, 2)[0][0]
    assert made.drafts(tokens, 2)[0][1] != alone.drafts(tokens, 2)[0][1]


@slow
def test_more_layers_than_are_used(tmp_path, caplog):
    """Of 9 layers 8 make drafts. A run of theirs has more rows than a step of the model."""
    made = draft_heads.write(tmp_path, "glm4-moe", layers=9)
    used = replace(made, heads=made.heads[:8], names=made.names[:8])
    with Driver(made.path, speculation="mtp", max_step_tokens=16, engine_max_batch=4) as driver:
        assert driver.info.draft_layers == 8 and driver.runners[0]._sizes.draft_rows == 32
        assert "holds a draft head of 9 layers, of which the first 8 make drafts" in caplog.text
        draft_heads.check_rounds(driver, used, prompt_of(29, seed=1), [10, 7, -3, 0, 8, 11, *[0] * 18, 9])
