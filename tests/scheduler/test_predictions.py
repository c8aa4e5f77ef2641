"""Drafts from predicted texts: where they are taken, what they save, and that they change no output."""

from __future__ import annotations

import pytest

from allspark_server.runtime.plan import Flag
from allspark_server.scheduler import PredictedText, Prediction
from support.fake_group import expected_output
from support.scheduler_rig import Rig, output, prompt_of

PROMPT, TOKENS = prompt_of(5), 120
EXPECTED = expected_output(PROMPT, TOKENS)


def run(text: list[int], depth: int = 2, draft_kind: int = 0, **fields) -> tuple[int, Prediction]:
    """The number of steps of a request with this prediction, and what was accepted of it."""
    rig = Rig(num_spans=256, depth=depth, draft_kind=draft_kind)
    prediction = Prediction(PredictedText(text), len(PROMPT))
    sequence = rig.add(PROMPT, TOKENS, prediction=prediction, **fields)
    steps = rig.run()
    assert output(sequence) == EXPECTED
    counters = rig.scheduler.counters
    assert counters.accepted_tokens == prediction.accepted or draft_kind
    assert counters.computed_rows == len(PROMPT) + TOKENS - 1 and not counters.discarded_rows
    return steps, prediction


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("draft_kind", [0, Flag.LOOKUP, Flag.MODEL])
def test_a_right_prediction_saves_steps(depth, draft_kind):
    steps, prediction = run(EXPECTED, depth, int(draft_kind))
    assert steps < 20 and prediction.accepted > 100 and not prediction.rejected


def test_an_edited_text_is_followed_again_after_each_edit():
    text = EXPECTED[:30] + [1, 2, 3] + EXPECTED[30:60] + EXPECTED[75:90] + [7] + EXPECTED[91:]
    steps, prediction = run(text)
    assert steps < 60 and prediction.accepted > 65 and 0 < prediction.rejected < 64


def test_a_text_that_begins_elsewhere_is_found():
    steps, prediction = run([9] * 10 + EXPECTED[40:])
    assert steps < 70 and prediction.accepted > 65


def test_a_wrong_prediction_costs_little():
    steps, prediction = run(prompt_of(TOKENS, seed=5))
    assert steps <= TOKENS + 2 and prediction.accepted == 0 and prediction.rejected <= 16


def test_a_resumed_request_follows_its_prediction_from_where_it_is():
    steps, prediction = run(EXPECTED, generated=EXPECTED[:100])
    assert steps < 8 and prediction.accepted > 12


def test_the_longest_match_wins_then_the_next_place():
    text = PredictedText([1, 2, 3, 9, 2, 3, 8, 2, 3, 7])
    assert text.after([1, 2, 3], 9) == 3      # three tokens match there, two elsewhere
    assert text.after([5, 2, 3], 4) == 6      # the next one
    assert text.after([5, 2, 3], 7) == 9
    assert text.after([3, 2], 0) is None and text.after([2], 0) is None
    assert PredictedText([4]).after([4, 4], 0) is None
    assert PredictedText([6, 6] * 500).after([6, 6], 700) == 700
