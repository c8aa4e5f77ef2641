"""Matrices that others quantized, in the form in which GPUs hold them: the same values up to bfloat16's rounding. CPUs
hold them here; tests/cuda/test_cuda_checkpoints.py runs on GPUs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.runtime.device import Cpus, Gpu
from allspark_server.runtime.rank_model import RankModel
from allspark_server.weights.formats import ScaleLayout, WeightFormat
from allspark_server.weights.gpu_forms import gpu_form, mxfp4_rows, recoded
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor
from support.checkpoints import checkpoint
from support.driver import Driver
from support.gguf_files import FILES
from support.gpu_checkpoints import QUICK, check_weights, pair_of
from support.mxfp4_checkpoint import mxfp4_pair
from support.quantized_checkpoints import SCHEMES, recovered

NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in (*SCHEMES, *FILES)]


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Cpus, "form_of", lambda self, form, experts, firsts: gpu_form(form, experts, 80, firsts))
    monkeypatch.setattr(Cpus, "unquantized_dtype", lambda self, dtype: "bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_producer_s_on_any_number_of_ranks(name, tmp_path):
    quantized, twin = pair_of(tmp_path, name)
    expected, _ = recovered(twin, 1, weight_dtype="float32")
    for world in (1, 2, 3):
        check_weights(recovered(quantized, world)[0], expected)


@pytest.mark.parametrize("name, formats", [("gptq-4", ["int4"]), ("fp8", []), ("q4_k_m", ["int4", "int8"])])
def test_formats_of_matrices(name, formats, tmp_path):
    with Driver(pair_of(tmp_path, name)[0]) as driver:
        found = {form.dtype for form in driver.runners[0]._model.formats.values()}
    assert found == {"bfloat16", *formats}


def opened_on_gpu(directory, world: int = 1, **fields) -> RankModel:
    """A model opened with a GPU's checks of types, without a GPU."""
    gpu = Gpu.__new__(Gpu)
    gpu.isa, gpu._capability, gpu._group = "sm_90 (without a name)", 90, [0]
    config = AsModelConfig("m", str(directory), compute_unit="CUDA:0", **fields)
    model = RankModel(config, str(directory), config.weights_path, 0, world, gpu)
    gpu.check(config, set(model.formats.values()), model.cache_dtype)
    return model


HALF, WHOLE, OTHER = "llama-fp16-sharded", "llama3", "llama-bf16"


@pytest.mark.parametrize("name, fields, weights, cache, beside", [
    (HALF, {}, "float16", "float16", []),
    (HALF, {"weight_dtype": "bfloat16"}, "bfloat16", "bfloat16", []),
    (HALF, {"weight_dtype": "float32"}, "float32", "float32", []),
    (HALF, {"cache_dtype": "bfloat16"}, "float16", "bfloat16", []),
    (HALF, {"cache_mode": "AsCacheQuantI8"}, "float16", "int8", []),
    (WHOLE, {}, "float32", "float32", []),
    (WHOLE, {"weight_dtype": "float16"}, "float16", "float16", []),
    (OTHER, {"weight_dtype": "float16", "cache_dtype": "float32"}, "float16", "float32", []),
    (OTHER, {"cache_dtype": "float16"}, "bfloat16", "float16", []),
    # Gates of experts stay float32.
    ("qwen3-moe", {"weight_dtype": "float16"}, "float16", "float16", ["float32"]),
    # GEMMs of quantized values are in bfloat16, and so is everything beside them.
    (HALF, {"weight_dtype": "int8", "quantize_head": False}, "int8", "bfloat16", ["bfloat16"]),
    (HALF, {"weight_dtype": "float8", "quantize_head": False}, "float8", "bfloat16", ["bfloat16"]),
    (HALF, {"weight_dtype": "int4", "weight_group_size": 64, "cache_dtype": "float16"}, "int4", "float16", []),
    (WHOLE, {"weight_dtype": "w8a8", "quantize_head": False}, "w8a8", "float32", ["float32"])])
def test_types_of_models(name, fields, weights, cache, beside):
    model = opened_on_gpu(checkpoint(name), **fields)
    assert (model.weight_dtype, model.cache_dtype) == (weights, cache)
    assert {form.dtype for form in model.formats.values()} == {weights, *beside}
    assert model.adapter_dtype == (weights if weights in ("bfloat16", "float16") else "float32")


def test_types_of_others_codes(tmp_path):
    """Their checkpoints mostly keep unquantized weights in float16."""
    quantized, _ = pair_of(tmp_path, "gptq-4")
    model = opened_on_gpu(quantized)
    assert (model.weight_dtype, model.cache_dtype) == ("int4", "bfloat16")
    assert {form.dtype for form in model.formats.values()} == {"int4", "bfloat16"}
    assert opened_on_gpu(quantized, cache_dtype="float16").cache_dtype == "float16"
    with pytest.raises(AllSparkError, match="'float16' .*: the model is quantized, as int4.*weight_dtype='auto'"):
        opened_on_gpu(quantized, weight_dtype="float16")


def test_types_of_both_kinds_of_16_bits(tmp_path):
    """bfloat16 covers the range of both; CPUs compute both in float32."""
    shutil.copytree(checkpoint(OTHER), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: tensor.half() if i % 2 else tensor
                                 for i, (name, tensor) in enumerate(sorted(tensors.items()))}, file)
    model = opened_on_gpu(tmp_path)
    assert model.weight_dtype == model.cache_dtype == "bfloat16"
    with Driver(tmp_path) as cpu:
        assert cpu.info.weight_dtype == cpu.info.cache_dtype == "float32"


@pytest.mark.parametrize("given, cache", [({}, "float16"), ({"weight_format": "int8"}, "float32")])
def test_types_of_serialized_models(given, cache, tmp_path):
    """A quantized model states the types beside its quantized values, as CPUs compute with them."""
    source = HuggingFaceModel(checkpoint(HALF), "m").load_model()
    source.serialize_to_path(None, str(tmp_path), enable_quant=bool(given), customized_quant_config=given or None)
    model = opened_on_gpu(tmp_path / "m.asgraph", weights_path=str(tmp_path / "m.asparam"))
    assert (model.weight_dtype, model.cache_dtype) == (given.get("weight_format", "float16"), cache)


def test_what_is_counted_as_no_number(tmp_path, caplog):
    """For float16, values beyond its range count as well."""
    class Counting:
        def __getattr__(self, name):
            return lambda *given, **_: [1] * len(given[1]) if name == "fill_rows" else 0

    for name, told in (("float16", "NaN or infinite, or beyond the range of float16; "),
                       ("bfloat16", "NaN or infinite; ")):
        opened_on_gpu(checkpoint(WHOLE), weight_dtype=name).load(Counting(), None)
        assert told in caplog.messages[-1]


@pytest.mark.parametrize("form, experts, capability, expected", [
    (WeightFormat("int4", 64), False, 80, WeightFormat("int4", 64)),
    (WeightFormat("int4", 128, ScaleLayout("float16", "points")), True, 80, WeightFormat("int4", 128)),
    (WeightFormat("int4", 48, ScaleLayout("float16", "points")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("int4", 64, ScaleLayout("float16", "none", permuted=True)), False, 80,
     WeightFormat("int4", 64, ScaleLayout(permuted=True))),
    (WeightFormat("int4", 64, ScaleLayout("float16", "none", permuted=True)), True, 80, WeightFormat("bfloat16")),
    (WeightFormat("int8", 0, ScaleLayout("float32", "none")), False, 80, WeightFormat("int8")),
    (WeightFormat("int8", 64, ScaleLayout("float16", "points")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("w8a8", 0, ScaleLayout("float32", "none")), False, 80, WeightFormat("w8a8")),
    (WeightFormat("w8a8", 64, ScaleLayout("float32", "points")), False, 80, None),
    (WeightFormat("e4m3", 0, ScaleLayout("bfloat16", "none")), False, 90, WeightFormat("float8")),
    (WeightFormat("e4m3", 0, ScaleLayout("bfloat16", "none")), True, 90, WeightFormat("float8")),
    (WeightFormat("e4m3", 0, ScaleLayout("bfloat16", "none")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("e4m3", 128, ScaleLayout("float32", "none")), False, 90, WeightFormat("float8", 128)),
    (WeightFormat("e4m3", 128, ScaleLayout("bfloat16", "none")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("e4m3", 128, ScaleLayout("float32", "none")), True, 90, WeightFormat("float8", 128)),
    (WeightFormat("e4m3", 128, ScaleLayout("float32", "none")), True, 80, WeightFormat("bfloat16")),
    (WeightFormat("e4m3", 64, ScaleLayout("float32", "none")), False, 90, WeightFormat("bfloat16")),
    (WeightFormat("e2m1", 32, ScaleLayout("bfloat16", "none")), True, 80, WeightFormat("mxfp4", 32)),
    (WeightFormat("e2m1", 32, ScaleLayout("bfloat16", "none")), False, 80, None),
    (WeightFormat("e2m1", 16, ScaleLayout("float32", "none")), False, 80,
     WeightFormat("e2m1", 16, ScaleLayout("bfloat16", "none"))),
    (WeightFormat("nf4", 64, ScaleLayout("float32", "none")), False, 80,
     WeightFormat("nf4", 64, ScaleLayout("bfloat16", "none"))),
    (WeightFormat("nf4", 32, ScaleLayout("float32", "none")), False, 80, WeightFormat("bfloat16")),
    (WeightFormat("e2m1", 16, ScaleLayout("float32", "none")), True, 90, WeightFormat("bfloat16")),
])
def test_forms(form, experts, capability, expected):
    """None: the form stays, and the backend refuses it."""
    assert gpu_form(form, experts, capability) == (expected or form)


def test_slices_inside_groups():
    """Ranks whose parts begin inside a group, or inside a part of a group that GPUs support."""
    form = WeightFormat("int4", 128, ScaleLayout("float16", "points"))
    assert gpu_form(form, False, 90, [0, 9472]) == gpu_form(form, False, 90, [0, 32]) == WeightFormat("int4", 128)
    assert gpu_form(form, False, 90, [0, 72]) == WeightFormat("bfloat16")


def test_slices_of_float8_in_blocks():
    form = WeightFormat("e4m3", 128, ScaleLayout("float32", "none"))
    for experts in (False, True):
        assert gpu_form(form, experts, 90, [0, 9472]) == WeightFormat("float8", 128)
        assert gpu_form(form, experts, 90, [0, 192]) == WeightFormat("bfloat16")


def test_slices_of_mxfp4():
    """Whole blocks stay, others become bfloat16."""
    form = WeightFormat("e2m1", 32, ScaleLayout("bfloat16", "none"))
    assert gpu_form(form, True, 90, [0, 96, 192]) == WeightFormat("mxfp4", 32)
    assert gpu_form(form, True, 90, [0, 80]) == WeightFormat("bfloat16")


def test_mxfp4_of_a_file_and_serialized():
    """A file's bytes are passed on; serialized scales are bfloat16 and must be powers of two."""
    quants, scales = np.arange(64, dtype=np.uint8).reshape(2, 32), np.uint8([[0, 90], [127, 254]])
    powers = np.uint16([[0x40, 90 << 7], [127 << 7, 254 << 7]])

    def rows(begin: int, end: int) -> QuantizedRows:
        return QuantizedRows(quants[begin:end], powers[begin:end])

    serialized = QuantizedTensor("w", Path("f"), rows)
    of_file = QuantizedTensor("w", Path("f"), rows, mxfp4=lambda begin, end: (quants[begin:end], scales[begin:end]))
    for tensor in (serialized, of_file):
        found = mxfp4_rows(tensor, 0, 2)
        assert found[0].tolist() == quants.tolist() and found[1].tolist() == scales.tolist()
    powers[1, 0] += 1
    with pytest.raises(AllSparkError, match="'w' in f is MXFP4, but 1 of its scales are not powers of two"):
        mxfp4_rows(serialized, 0, 2)


def test_experts_in_mxfp4_as_requested(tmp_path):
    quantized, _ = mxfp4_pair(tmp_path)
    for dtype, expected in (("auto", "mxfp4"), ("mxfp4", "mxfp4"), ("bfloat16", "bfloat16")):
        model = opened_on_gpu(quantized, weight_dtype=dtype)
        assert {form.dtype for name, form in model.formats.items() if "experts" in name} == {expected}
    with pytest.raises(AllSparkError, match="'int4'.*is quantized, as e2m1:32.*or 'bfloat16', which dequantizes it"):
        opened_on_gpu(quantized, weight_dtype="int4")
    with pytest.raises(AllSparkError, match="weight_dtype='mxfp4': the model is not stored in MXFP4"):
        opened_on_gpu(checkpoint(OTHER), weight_dtype="mxfp4")


def test_float8_in_blocks_as_requested(tmp_path, caplog):
    quantized, _ = pair_of(tmp_path, "fp8")
    assert "float8:128" in {str(form) for form in opened_on_gpu(quantized).formats.values()}
    assert not caplog.records
    plain = opened_on_gpu(quantized, weight_dtype="bfloat16")
    assert {str(form) for form in plain.formats.values()} == {"bfloat16"} == {plain.weight_dtype}
    cut = opened_on_gpu(quantized, world=3)
    cut_one = next(name for name in cut.formats if "o_proj" in name)
    assert str(cut.formats[cut_one]) == "bfloat16"
    told = f"matrix {cut_one!r} is computed in bfloat16, not in float8:128: with 3 ranks, slices begin inside"
    assert told in caplog.text


@pytest.mark.parametrize("groups", [1, 2])
def test_floats_keep_their_scales_and_are_numbers(groups):
    size = 0 if groups == 1 else 128
    own, scales = WeightFormat("e4m3", size, ScaleLayout("float32", "none")), np.float32([[1 / 3, 5], [-2e-30, 7]])
    scales = np.ascontiguousarray(scales[:, :groups])
    quants = np.resize(np.arange(256, dtype=np.uint8), (2, 126 * groups))

    def rows(begin: int, end: int) -> QuantizedRows:
        return QuantizedRows(quants[begin:end], scales[begin:end])

    tensor = recoded(QuantizedTensor("w", Path("f"), rows), own, WeightFormat("float8", size), 126 * groups)
    quants[(quants & 0x7F) == 0x7F] = 0
    found = tensor.rows(0, 2)
    both = found.scales.astype(np.uint32) | found.zeros.astype(np.uint32) << 16
    assert both.view(np.float32).tolist() == scales.tolist() and found.quants.tolist() == quants.tolist()
    quants[1, 7] = 0xFF
    with pytest.raises(AllSparkError, match="'w' in f holds 1 values that are NaN"):
        tensor.rows(0, 2)


def test_slices_of_permuted_columns_and_of_small_floats():
    permuted = WeightFormat("int4", 128, ScaleLayout("float16", "points", permuted=True))
    assert gpu_form(permuted, False, 90, [0, 0]) == WeightFormat("int4", 128, ScaleLayout(permuted=True))
    assert gpu_form(permuted, False, 90, [0, 1792]) == WeightFormat("bfloat16")
    nvfp4 = WeightFormat("e2m1", 16, ScaleLayout("float32", "none"))
    assert gpu_form(nvfp4, False, 90, [0, 48]).dtype == "e2m1"
    assert gpu_form(nvfp4, False, 90, [0, 40]) == WeightFormat("bfloat16")
