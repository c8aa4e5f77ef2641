"""The models against transformers: the graphs through a NumPy interpreter, and the native executor's numbers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_server.models.config import read_config  # noqa: E402
from allspark_server.models.rotary import rotary_of  # noqa: E402
from allspark_server.runtime.lowering import add_ops  # noqa: E402
from allspark_server.weights.checkpoint import open_model  # noqa: E402
from allspark_server.weights.loader import Loader  # noqa: E402
from checkpoints import CONFIGS, checkpoint, check_logits, prompt_of, reference_logits, reference_model  # noqa: E402
from numpy_executor import NumpyExecutor, forward  # noqa: E402


def numpy_logits(directory, prompt, world):
    """Logits of a model divided among `world` ranks, by the interpreter."""
    model = open_model(str(directory))
    ranks = []
    for rank in range(world):
        executor = NumpyExecutor()
        weights = Loader(model.graph, model.source, executor, rank, world, "float32").load()
        add_ops(model.graph, executor, weights, rank, world)
        ranks.append(executor)
    return forward(ranks, prompt)


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name):
    rotary = rotary_of(read_config(checkpoint(name)))
    expected = reference_model(checkpoint(name)).model.rotary_emb
    np.testing.assert_array_max_ulp(rotary.inv_freq, expected.inv_freq.numpy(), 2)
    assert rotary.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_graph_describes_the_model(name):
    for length in (1, 7, 300):
        prompt = prompt_of(length)
        check_logits(numpy_logits(checkpoint(name), prompt, 1), reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_add_up_to_the_model(name, world):
    prompt = prompt_of(33)
    check_logits(numpy_logits(checkpoint(name), prompt, world), reference_logits(checkpoint(name), prompt))
