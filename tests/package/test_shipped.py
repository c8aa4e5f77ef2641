"""Quick checks of the shipped model, and of the scripts that make and evaluate it."""

from __future__ import annotations

import json
import random

import check_story
import pytest
import records
import story
import sums

from support.paths import ROOT

ASSET = ROOT / "allspark_server" / "assets" / "fable"


def test_asset_is_complete_and_small():
    names = {f.name for f in ASSET.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json"} <= names
    assert sum(f.stat().st_size for f in ASSET.iterdir()) <= 8_000_000
    config = json.loads((ASSET / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_checker_accepts_the_grammar_and_rejects_faults():
    checker, rng = check_story.Checker(), random.Random(3)
    assert all(checker.check(story.plain_story(rng)).good for _ in range(50))
    good = "Once upon a time there was a brave fox named Mia. She loved singing songs."
    assert checker.check(good).good
    assert checker.check(good.replace("She", "He").replace("songs.", "songs. Mia thanked everyone and went on. "
                                                            "She was tired, but she felt proud.")).inconsistent
    assert checker.check(good.replace("was a brave", "was an brave")).unknown
    assert checker.check(good.replace("loved singing", "love singing")).unknown
    assert checker.check(good.replace("loved", "loves")).inconsistent


def test_records_are_judged():
    rng = random.Random(4)
    for _ in range(200):
        _, answer, spec = records.request(rng)
        assert spec.problem(answer) is None
        assert spec.problem(answer[:-1]).startswith("not JSON")
        assert spec.problem("{}") is not None


def test_held_out_problems_are_not_trained_on():
    rng = random.Random(5)
    trained = {sums.problem(rng) for _ in range(20000)}
    held_out = set(sums.held_out_problems(1000))
    assert len(held_out) == 1000 and not trained & held_out
    assert not any((b, a, op) in trained for a, b, op in held_out)


def test_sums_by_transformers():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import evaluate

    model = evaluate.Model(ASSET, "float32", 40)
    assert evaluate.score_sums(model, 40, 0)["sums"] >= 0.95
