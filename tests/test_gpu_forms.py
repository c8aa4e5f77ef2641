"""What GPUs make of matrices that others have quantized: the same values, but for bfloat16's rounding. Held by CPUs here;
tests/cuda/test_cuda_checkpoints.py has them on GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from allspark_client.errors import AllSparkError  # noqa: E402
from allspark_server.runtime.device import Cpus  # noqa: E402
from allspark_server.weights.formats import ScaleLayout, WeightFormat  # noqa: E402
from allspark_server.weights.gpu_forms import gpu_form, recoded  # noqa: E402
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor  # noqa: E402
from checkpoints import checkpoint  # noqa: E402
from driver import Driver  # noqa: E402
from gpu_checkpoints import QUICK, check_weights, pair_of  # noqa: E402
from quantized_checkpoints import SCHEMES  # noqa: E402
from test_gguf import FILES  # noqa: E402
from test_serialized_quantization import recovered  # noqa: E402

NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in (*SCHEMES, *FILES)]


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Cpus, "form_of", lambda self, form, experts, firsts: gpu_form(form, experts, 80, firsts))
    monkeypatch.setattr(Cpus, "beside_codes", lambda self, dtype: "bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_producer_s_on_any_number_of_ranks(name, tmp_path):
    quantized, twin = pair_of(tmp_path, name)
    expected, _ = recovered(twin, 1, weight_dtype="float32")
    for world in (1, 2, 3):
        check_weights(recovered(quantized, world)[0], expected)


@pytest.mark.parametrize("name, codes", [("gptq-4", ["int4"]), ("fp8", []), ("q4_k_m", ["int4", "int8"])])
def test_formats_of_matrices(name, codes, tmp_path):
    with Driver(pair_of(tmp_path, name)[0]) as driver:
        found = {form.dtype for form in driver.runners[0]._model.formats.values()}
    assert found == {"bfloat16", *codes}


def test_float16_is_computed_in_bfloat16(monkeypatch):
    monkeypatch.setattr(Cpus, "half", "bfloat16")
    for name, dtype in (("llama-fp16-sharded", "bfloat16"), ("llama3", "float32")):
        with Driver(checkpoint(name)) as driver:
            assert driver.info.weight_dtype == driver.info.cache_dtype == dtype


@pytest.mark.parametrize("form, experts, capability, expected", [
    (WeightFormat("int4", 64), False, 80, WeightFormat("int4", 64)),
    (WeightFormat("int4", 128, ScaleLayout("float16", "points")), True, 80, WeightFormat("int4", 128)),
    (WeightFormat("int4", 48, ScaleLayout("float16", "points")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("int4", 64, ScaleLayout("float16", "none", permuted=True)), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("int8", 0, ScaleLayout("float32", "none")), False, 80, WeightFormat("int8")),
    (WeightFormat("int8", 64, ScaleLayout("float16", "points")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("w8a8", 0, ScaleLayout("float32", "none")), False, 80, WeightFormat("w8a8")),
    (WeightFormat("w8a8", 64, ScaleLayout("float32", "points")), False, 80, None),
    (WeightFormat("e4m3", 0, ScaleLayout("bfloat16", "none")), False, 90, WeightFormat("float8")),
    (WeightFormat("e4m3", 0, ScaleLayout("bfloat16", "none")), True, 90, WeightFormat("bfloat16")),
    (WeightFormat("e4m3", 0, ScaleLayout("bfloat16", "none")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("e4m3", 128, ScaleLayout("float32", "none")), False, 90, WeightFormat("bfloat16")),
])
def test_forms(form, experts, capability, expected):
    """None: it stays, for the backend to refuse."""
    assert gpu_form(form, experts, capability) == (expected or form)


def test_slices_inside_groups():
    """Of ranks whose parts begin where a group does not, or a part of one that GPUs have."""
    form = WeightFormat("int4", 128, ScaleLayout("float16", "points"))
    assert gpu_form(form, False, 90, [0, 9472]) == gpu_form(form, False, 90, [0, 32]) == WeightFormat("int4", 128)
    assert gpu_form(form, False, 90, [0, 72]) == WeightFormat("bfloat16")


def test_floats_keep_their_scales_and_are_numbers():
    own, scales = WeightFormat("e4m3", 0, ScaleLayout("float32", "none")), np.float32([[1 / 3], [-2e-30]])
    codes = np.arange(252, dtype=np.uint8).reshape(2, 126)

    def rows(begin: int, end: int) -> QuantizedRows:
        return QuantizedRows(codes[begin:end], scales[begin:end])

    tensor = recoded(QuantizedTensor("w", Path("f"), rows), own, WeightFormat("float8"), 126)
    codes[codes == 0x7F] = 0
    found = tensor.rows(0, 2)
    both = found.scales.astype(np.uint32) | found.zeros.astype(np.uint32) << 16
    assert both.view(np.float32).tolist() == scales.tolist() and found.codes.tolist() == codes.tolist()
    codes[1, 7] = 0xFF
    with pytest.raises(AllSparkError, match="'w' in f holds 1 values that are NaN"):
        tensor.rows(0, 2)
