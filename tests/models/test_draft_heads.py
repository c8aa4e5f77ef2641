"""Drafts by the model itself: heads of GLM-4.5, DeepSeek-V3, Qwen3-Next, Qwen3.5 and MiMo against a float64
reference.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5_moe")

from support import draft_heads
from support.driver import Driver

slow = pytest.mark.slow
NAMES = [(name, world) if (name, world) in (("glm4-moe", 1), ("mimo", 2)) else pytest.param(name, world, marks=slow)
         for name in draft_heads.SPECS for world in (1, 2)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = draft_heads.write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return of


@pytest.mark.parametrize("name, world", NAMES)
def test_drafts(name, world, heads):
    """The logits of the rows of drafts are those after the reference's drafts."""
    made = heads(name)
    with Driver(made.path, world, speculation="mtp") as driver:
        draft_heads.check_drafts(driver, made, (2, 64), (40, 13), (130, 64))
        for runner in driver.runners:  # planned as loaded, without what it shares
            assert runner._draft.weight_bytes(runner._device) == runner._draft_executor.weight_bytes()
            assert runner._draft._shares(runner._draft.graph.weights["model.embed_tokens.weight"])
    with Driver(made.path, world, speculation="mtp", max_step_tokens=8) as driver:
        draft_heads.check_drafts(driver, made, (40, 1), (43, 5))  # more held states than a step has rows
