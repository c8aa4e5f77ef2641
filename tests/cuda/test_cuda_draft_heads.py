"""Draft heads on GPUs: their drafts against a float64 reference, on one GPU and on two."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5_moe")

from support import draft_heads
from support.driver import Driver

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", draft_heads.SPECS)
def test_drafts(name, world, tmp_path):
    """The logits of the rows of drafts are those after the reference's drafts: also where hidden states are held, and
    where more are held than a step has rows.
    """
    from allspark_server import _cuda

    if _cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    made = draft_heads.write(tmp_path, name)
    unit = {"compute_unit": "CUDA:0" if world == 1 else "CUDA:0,1", "weight_dtype": "float32"}
    with Driver(made.path, world, speculation="mtp", cache_memory=64 << 20, **unit) as driver:
        draft_heads.check_drafts(driver, made, (2, 64), (40, 13), (130, 64))
    with Driver(made.path, world, speculation="mtp", cache_memory=64 << 20, max_step_tokens=8, **unit) as driver:
        draft_heads.check_drafts(driver, made, (40, 1), (43, 5))
