"""Draft heads and EAGLE-3 heads on GPUs: their drafts against a float64 reference, on one GPU and on two."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5_moe")

from support import draft_heads, eagle_heads
from support.checkpoints import checkpoint
from support.driver import Driver

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name in draft_heads.SPECS if name != "glm5-next"])  # GPUs refuse it
def test_drafts(name, world, tmp_path):
    """The logits of the rows of drafts are those after the reference's drafts: also where hidden states are held, and
    where more are held than a step has rows.
    """
    needs(world)
    made = draft_heads.write(tmp_path, name)
    check(made, world, speculation="mtp")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name, layers", [("glm4-moe", 2), ("deepseek-v3", 3), ("qwen3-next", 3)])
def test_drafts_of_several_layers(name, layers, world, tmp_path):
    """The same of heads whose layers make a draft each."""
    needs(world)
    check(draft_heads.write(tmp_path, name, layers=layers), world, speculation="mtp")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", ["llama-linear", "qwen3-next"])
def test_eagle(model, world, tmp_path):
    """The same of EAGLE-3 heads."""
    needs(world)
    made = eagle_heads.write(tmp_path, checkpoint(model), drafted=150, layers=(1, 0, 2))
    check(made, world, speculation="eagle", draft_model=str(made.head))


def needs(gpus):
    from allspark_server import _cuda

    if _cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


def check(made, world, **fields):
    fields |= {"compute_unit": "CUDA:0" if world == 1 else "CUDA:0,1", "weight_dtype": "float32",
               "cache_memory": 64 << 20}
    with Driver(made.path, world, **fields) as driver:
        draft_heads.check_drafts(driver, made, (2, 64), (40, 13), (130, 64))
    with Driver(made.path, world, max_step_tokens=8, **fields) as driver:
        draft_heads.check_drafts(driver, made, (40, 1), (43, 5))
