"""EAGLE-3 heads against a float64 reference, and the heads that are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from allspark_client import AllSparkError, AsModelConfig
from support import draft_heads, eagle_heads
from support.checkpoints import checkpoint
from support.driver import Driver
from support.gemma4 import VOCAB

slow = pytest.mark.slow
WAYS = {"whole": ({}, "llama-linear"),
        "mapped": ({"drafted": 150, "layers": (0, 1, 3)}, "qwen2-gqa-tied"),
        "own-embedding": ({"drafted": 97, "embedding": True, "norm_before_residual": True, "layers": (1, 2, 2)},
                          "olmo2"),
        "delta": ({"drafted": 120, "layers": (1, 3, 2)}, "qwen3-next")}


def without_the_end(way: dict, name: str) -> dict:
    """The way, where `layers` does not name the end: transformers shows no residual stream after the last layer."""
    layers = way.get("layers")
    return {**way, "layers": tuple(min(layer, 2) for layer in layers)} if layers else way


@pytest.mark.parametrize("name, world", [
    ("mapped", 1), *(pytest.param(name, world, marks=slow) for name in WAYS for world in (1, 2)
                     if (name, world) != ("mapped", 1))])
def test_drafts(name, world, tmp_path):
    """The logits of the rows of drafts are those after the reference's drafts."""
    way, model = WAYS[name]
    made = eagle_heads.write(tmp_path, checkpoint(model), **without_the_end(way, model))
    fields = {"speculation": "eagle", "draft_model": str(made.head)}
    with Driver(made.path, world, **fields) as driver:
        draft_heads.check_drafts(driver, made, (2, 64), (40, 13), (130, 64))
        for runner in driver.runners:  # planned as loaded
            for model, executor in ((runner._model, runner._executor), (runner._drafts[0], runner._draft_executors[0])):
                assert model.weight_bytes(runner._device) == executor.weight_bytes()
    with Driver(made.path, world, max_step_tokens=8, **fields) as driver:
        draft_heads.check_drafts(driver, made, (40, 1), (43, 5))


def bad_offset(tensors, config):
    tensors["d2t"][7] = 5000


def twice(tensors, config):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


BAD = [
    (lambda t, c: c.update(hidden_size=64, head_dim=16),
     "field 'hidden_size' of .* is 64: it must be 112, as the model's"),
    (lambda t, c: c.update(vocab_size=91), f"field 'vocab_size' of .* is 91: it must be {VOCAB}, as the model's"),
    (lambda t, c: c.update(num_hidden_layers=2), "'num_hidden_layers' of .* is 2: it must be 1; further layers"),
    (lambda t, c: c.update(architectures=["Qwen3ForCausalLM"]), "'architectures' of .*: an EAGLE-3 head has one of"),
    (lambda t, c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
     "expected 3 layers of the model"),
    (lambda t, c: c.update(eagle_config={"use_aux_hidden_state": False}), "has use_aux_hidden_state=false"),
    (lambda t, c: c.update(draft_vocab_size=9000), f"'draft_vocab_size' of .* is 9000: expected 1 to {VOCAB}"),
    (lambda t, c: t.pop("midlayer.hidden_norm.weight"), "has no tensor 'midlayer.hidden_norm.weight'"),
    (lambda t, c: t.pop("d2t"), f"has no tensor 'd2t', but draft_vocab_size=90 of a vocabulary of {VOCAB}"),
    (lambda t, c: t.update(fc=t.pop("fc.weight")), "has no tensor 'fc.weight'"),
    (lambda t, c: t.update({"fc.weight": t["fc.weight"][:, :-8]}),
     r"has tensor 'fc.weight' of shape \[112, 328\]: expected"),
    (bad_offset, f"maps token 7 of its vocabulary to 5007 by 'd2t': the model has {VOCAB} tokens"),
    (twice, "maps several tokens of its vocabulary to one of the model"),
]


@pytest.mark.parametrize("stored, message", BAD)
def test_refused(stored, message, tmp_path, engine_of):
    made = eagle_heads.write(tmp_path, checkpoint("qwen2-gqa-tied"), drafted=90, stored=stored)
    with pytest.raises(AllSparkError, match=message):
        engine_of("engine").install_model(AsModelConfig("bad", str(made.path), speculation="eagle",
                                                        draft_model=str(made.head)))


def test_needs_a_directory(tmp_path, engine_of):
    with pytest.raises((AllSparkError, ValueError), match="needs draft_model, a checkpoint directory"):
        engine_of("engine").install_model(AsModelConfig("bad", str(checkpoint("qwen2-gqa-tied")), speculation="eagle"))
    with pytest.raises(AllSparkError, match="is no directory: expected one with an EAGLE-3 head"):
        engine_of("engine").install_model(AsModelConfig(
            "bad", str(checkpoint("qwen2-gqa-tied")), speculation="eagle", draft_model=str(tmp_path / "none")))
