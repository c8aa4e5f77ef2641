"""A model made for it finds needles at the beginning, in the middle and at the end of long contexts, through the states
of layers with the gated delta rule and through full attention.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5")

from allspark_client import AsModelConfig
from support import needles
from support.checkpoints import load_plain
from support.units import UNIT

QUESTION = [3, 4, 5]    # tokens before the one that is asked for


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return needles.write(tmp_path_factory.mktemp("needles"), 1 << 18)


def answers(engine, path, text, asked):
    """The three tokens that follow the text, a question and each of these tokens."""
    name = f"needles-{random.randrange(1 << 60)}"
    engine.install_model(AsModelConfig(name, str(path), **{
        "engine_max_batch": 2, "engine_max_length": len(text) + 64, "num_threads": 2, "enable_prefix_cache": True,
        "weight_dtype": "bfloat16", **UNIT}))
    engine.start_model(name)
    found = []
    for token in asked:
        _, handle, queue = engine.start_request(name, {"input_ids": [*text, *QUESTION, token]}, {
            "max_new_tokens": 3, "eos_token_id": -1, "do_sample": False})
        found.append([t for part in queue for t in part.ids_from_generate])
        engine.release_request(name, handle)
    hits = engine.get_as_engine_stat(name).prefix_cache_hit_token
    engine.release_model(name)
    return found, hits


@pytest.mark.parametrize("length", [4096, pytest.param(131072, marks=pytest.mark.slow)])
def test_needles(length, path, engine_of):
    """The first question computes the context; the others find it in the prefix cache, with its states."""
    text, made = needles.context(length, (0, 0.5, 1))
    found, hits = answers(engine_of("engine"), path, text, [needle[0] for needle in made])
    assert found == [needle[1:] for needle in made]
    assert hits > 0.9 * length * (len(made) - 1)


def test_each_kind_needs_its_layer(path, tmp_path):
    """In transformers, too; without the layer of its kind, no needle is found, and those of the other kind are."""
    text, made = needles.context(200, (0, 0.5, 1))
    model = load_plain(path, torch.float64)

    def finds() -> list[bool]:
        asked = torch.tensor([[*text, *QUESTION, needle[0]] for needle in made])
        with torch.inference_mode():
            found = model(asked).logits[:, -1].argmax(-1).tolist()
        return [token == needle[1] for token, needle in zip(found, made)]

    assert finds() == [True] * 6
    by_state, by_attention = [True, False] * 3, [False, True] * 3
    parts = [model.model.layers[1].linear_attn.out_proj.weight, model.model.layers[3].self_attn.o_proj.weight]
    for part, left in zip(parts, (by_attention, by_state)):
        kept = part.detach().clone()
        with torch.no_grad():
            part.zero_()
        assert finds() == left
        with torch.no_grad():
            part.copy_(kept)
