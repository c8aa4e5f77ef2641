"""Predicted outputs change no bit: with any kind of speculation, greedy and sampled, right, edited and wrong. Counters
prove that drafts of predictions were accepted and rejected.
"""

from __future__ import annotations

from typing import Any

import pytest

from allspark_client import AbstractEngine, AsModelConfig
from allspark_launch.group.background import shipped_model
from allspark_server import Engine
from support.invariance import PENALTIES, bits
from support.units import UNIT

PROMPTS = ("Once upon a time there was a fox", "The bear said", "A short story of a bird:")
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False}, {"seed": 3, "temperature": 0.8}, {"seed": 5, "temperature": 0.9, "top_k": 8, "n": 2},
    {"seed": 7, "temperature": 0.4, **PENALTIES}, {"do_sample": False, "stop": [" and"]},
    {"do_sample": False, "response_format": {"type": "regex", "regex": "[A-Za-z ,.]{40,}"}},
)


def run(engine: AbstractEngine, predictions: dict[tuple[int, int], str] | None = None) -> tuple[dict, int, int]:
    """By prompt, way and sample: text, ids and bits of the log probabilities; and what was accepted and rejected."""
    started, found, accepted, rejected = {}, {}, 0, 0
    for p, prompt in enumerate(PROMPTS):
        for w, way in enumerate(WAYS):
            config = {"max_new_tokens": 60, "logprobs": True, **way, "prediction": (predictions or {}).get((p, w), "")}
            started[p, w] = engine.start_request("m", {"text": prompt}, config)[1:]
    for (p, w), (handle, queue) in started.items():
        for elements in queue:
            text, ids, logprobs = found.setdefault((p, w, elements.sample_index), ([], [], []))
            text.append(elements.text)
            ids += elements.ids_from_generate
            logprobs += bits(elements.token_logprobs_list)
        stat = queue.RequestStatInfo()
        accepted, rejected = accepted + stat.accepted_prediction_tokens, rejected + stat.rejected_prediction_tokens
        assert stat.accepted_prediction_tokens <= stat.generated_token_length
        engine.release_request("m", handle)
    return {key: ("".join(text), ids, logprobs) for key, (text, ids, logprobs) in found.items()}, accepted, rejected


@pytest.mark.parametrize("kind", ["off", "prompt_lookup", "draft"])
def test_predictions_change_no_bit(kind):
    draft = str(shipped_model()) if kind == "draft" else ""
    with Engine() as engine:
        engine.install_model(AsModelConfig(
            "m", str(shipped_model()), num_threads=1, engine_max_batch=12, engine_max_length=512, speculation=kind,
            draft_model=draft, **UNIT))
        engine.start_model("m")
        expected, *none = run(engine)
        assert none == [0, 0]
        right = {(p, w): text for (p, w, sample), (text, *_) in expected.items() if sample == 0}
        found, accepted, rejected = run(engine, right)
        assert found == expected and accepted > 300
        edited = {key: text[:60] + " zebra" + text[80:] for key, text in right.items()}
        assert run(engine, edited)[0] == expected
        # They begin right: a text that differs from the first token on is drafted only if that token is not known yet.
        wrong = {key: text[:20] + right[(key[0] + 1) % len(PROMPTS), key[1]] for key, text in right.items()}
        found, _, rejected = run(engine, wrong)
        assert found == expected and rejected > 20
