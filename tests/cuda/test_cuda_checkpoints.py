"""Checkpoints that other programs quantized, on GPUs: their weights, logits against transformers, ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_server.runtime.device import SHARED_GPUS
from support.checkpoints import prompt_of, reference_logits
from support.driver import Driver
from support.gguf_files import FILES
from support.gpu_checkpoints import check_weights, pair_of
from support.quantized_checkpoints import SCHEMES, recovered

pytestmark = pytest.mark.cuda
UNIT = {"compute_unit": "CUDA:0"}
NAMES = [*SCHEMES, *FILES]
EIGHT_BITS = ("ct-w8a8", "ct-float8-channel", "ct-float8-tensor", "ct-float8-block", "fp8",
              "fp8-glm4-moe", "fp8-minimax-m2")  # activations, too


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def weights_of(directory, world=1, **fields):
    """All matrices but gates, whose rows are reordered at compilation; logits cover those."""
    return {name: values for name, values in recovered(directory, world, **fields)[0].items()
            if "gate_" not in name and "w1+" not in name}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_producer_s(name, tmp_path):
    quantized, twin = pair_of(tmp_path, name)
    check_weights(weights_of(quantized, **UNIT), weights_of(twin, weight_dtype="float32"))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_recovered_weights(name, tmp_path):
    """Compared with the error of the twin in bfloat16, as root mean squares over prompts."""
    quantized, twin = pair_of(tmp_path, name)
    errors = []
    for directory, dtype in ((quantized, "auto"), (twin, "bfloat16")):
        with Driver(directory, weight_dtype=dtype, **UNIT) as gpu:
            found = [gpu.generate(prompt_of(length), 1)[1][0] for length in (1, 33, 300)]
        expected = [reference_logits(twin, prompt_of(length)) for length in (1, 33, 300)]
        errors.append(np.sqrt(np.mean([np.mean(((a - b) / b.std()) ** 2) for a, b in zip(found, expected)])))
    ours, plain = errors
    print(f"{name}: {ours:.4f}, in bfloat16 {plain:.4f}")
    # fp8-minimax-m2's router chooses other experts in bfloat16, too.
    assert ours < max(2 * plain, 0.15 if name in EIGHT_BITS else 0.01)


@pytest.mark.parametrize("name", ["gptq-4-order", "awq", "fp8", "ct-float8-channel", "q4_k_m"])
def test_weights_of_two_ranks(name, tmp_path, monkeypatch):
    """Ranks may share a GPU, because nothing is computed."""
    monkeypatch.setenv(SHARED_GPUS, "1")
    quantized, twin = pair_of(tmp_path, name)
    found = weights_of(quantized, 2, compute_unit="CUDA:0,0", cache_memory=64 << 20)
    check_weights(found, weights_of(twin, weight_dtype="float32"))
