"""Rows without outputs are left out behind the last layer's attention: bits stay, whatever the family."""
from __future__ import annotations

import numpy as np
import pytest

from allspark_server.models.graph_elements import OUTPUT_ROWS
from allspark_server.models.output_rows import with_early_selection
from allspark_server.runtime import rank_model
from allspark_server.weights.checkpoint import open_model

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver
from support.units import GPUS, UNIT

# An MLP; experts, shared ones and sinks; norms behind products; states and a gate; latent attention
FAMILIES = ["qwen2-gqa-tied", "qwen3-moe", "glm4-moe", "gpt-oss", "gemma2", "qwen3-next", "nemotron-h", "deepseek-v3",
            "kimi-linear"]
PROMPT = prompt_of(75)


def linears(graph):
    """The rows of the inputs of all products but the output matrix, in the graph's order."""
    return [graph.tensors[op.inputs[0]].rows for op in graph.ops if op.type in ("linear", "expert_linear")][:-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_layer_computes_rows_with_outputs(name):
    graph = open_model(str(checkpoint(name)), "").graph
    early = with_early_selection(graph)
    rows = linears(early)
    sets = {OUTPUT_ROWS} | {s.name for s in early.row_sets.values() if s.of == OUTPUT_ROWS}
    assert not sets.intersection(linears(graph))
    first = next(i for i, of in enumerate(rows) if of in sets)
    assert first > len(rows) // 2 and sets.issuperset(rows[first:])
    assert len(rows) - first >= (1 if name == "nemotron-h" else 2)      # whose last layer has a state and no MLP
    assert early.weights == graph.weights and with_early_selection(early) is early


def test_a_draft_head_needs_all_rows():
    graph = open_model(str(checkpoint("qwen2-gqa-tied")), "").graph.with_kept_hidden()
    assert with_early_selection(graph) is graph


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_stay(name, world, monkeypatch):
    """A prompt at once, and in chunks, most of which have no outputs."""
    if GPUS and world > len(set(GPUS)):
        pytest.skip(f"ranks that are threads need a GPU each, and ALLSPARK_TEST_UNIT names {len(set(GPUS))}")
    unit = {"compute_unit": "CUDA:" + ",".join(GPUS[:world]), "weight_dtype": "bfloat16"} if GPUS else UNIT
    fields = {**unit, "engine_max_length": 256, "cache_memory": 4 << 20, "num_threads": 2}
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(rank_model, "with_early_selection", lambda graph: graph)
        for chunk in (None, 16):
            with Driver(checkpoint(name), world, **fields) as driver:
                found.append(driver.generate(PROMPT, 6, chunk))
    for tokens, logits in found[1:]:
        assert tokens == found[0][0]
        np.testing.assert_array_equal(np.stack(logits), np.stack(found[0][1]))
