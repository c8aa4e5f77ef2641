"""Drafts by the model itself: heads of GLM-4.5, DeepSeek-V3, Qwen3-Next and Qwen3.5 against a float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5_moe")

from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from support import draft_heads
from support.checkpoints import NEAR_TIE, check_logits, prompt_of, reference_logits
from support.driver import Driver

slow = pytest.mark.slow
DRAFTS = 3
NAMES = [(name, world) if (name, world) == ("glm4-moe", 1) else pytest.param(name, world, marks=slow)
         for name in draft_heads.SPECS for world in (1, 2)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = draft_heads.write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return of


def verified(driver, tokens: list[int], chunk: int) -> np.ndarray:
    """The logits of the step after `tokens` that verifies drafts."""
    new = [NewSlot(0, tokens, SamplingParams(do_sample=False, prompt_len=len(tokens)).encode())]
    spans = list(range(-(-(len(tokens) + DRAFTS) // driver.info.span_size)))
    for begin in range(0, len(tokens) - 1, chunk):
        count = min(chunk, len(tokens) - 1 - begin)
        driver.step(StepPlan(new=new, work=[WorkItem(0, count, 0, spans=spans)]))
        new, spans = [], []
    plan = StepPlan(new=new, work=[WorkItem(0, 1, SAMPLE | int(Flag.MODEL), spans=spans, drafts=DRAFTS)]).encode()
    results = driver._each(lambda runner: runner.step(plan, True))
    driver.step(StepPlan(free=[0]))
    return np.concatenate([result.logits for result in results], axis=1)


@pytest.mark.parametrize("name, world", NAMES)
def test_drafts(name, world, heads):
    """The logits of the rows of drafts are those after the reference's drafts."""
    made = heads(name)
    with Driver(made.path, world, speculation="mtp") as driver:
        check_drafts(driver, made, (2, 64), (40, 13), (130, 64))
        for runner in driver.runners:  # planned as loaded, without what it shares
            assert runner._draft.weight_bytes(runner._device) == runner._draft_executor.weight_bytes()
            assert runner._draft._shares(runner._draft.graph.weights["model.embed_tokens.weight"])
    with Driver(made.path, world, speculation="mtp", max_step_tokens=8) as driver:
        check_drafts(driver, made, (40, 1), (43, 5))  # more held states than a step has rows


def check_drafts(driver, made, *cases) -> None:
    """Compares the logits of drafts after prompts of (length, rows of a step)."""
    for length, chunk in cases:
        tokens = prompt_of(length, seed=length)
        logits = verified(driver, tokens, chunk)
        drafts, gap = made.drafts(tokens, DRAFTS)
        assert gap > NEAR_TIE and len(logits) == 1 + DRAFTS
        for row, found in enumerate(logits):
            check_logits(found, reference_logits(made.path, [*tokens, *drafts[:row]]))
