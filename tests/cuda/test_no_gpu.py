"""Tests that need no GPU: a CPU installation neither needs nor loads the CUDA backend, and errors name the remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus, __version__
from allspark_launch.group.background import shipped_model
from allspark_server import Engine
from allspark_server.runtime import device, native
from allspark_server.weights.formats import WeightFormat


def config(**fields) -> AsModelConfig:
    return AsModelConfig(model_name="m", model_path=str(shipped_model()), **fields)


def test_cpu_models_do_not_load_it():
    program = ("import sys\nfrom allspark_server import Engine\nfrom allspark_client import AsModelConfig\n"
               f"e = Engine()\ne.install_model(AsModelConfig(model_name='m', model_path={str(shipped_model())!r}))\n"
               "maps = open('/proc/self/maps').read()\n"
               "assert 'allspark_server._cuda' not in sys.modules and '_cuda.' not in maps and 'libcuda' not in maps\n"
               "e.close()")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_installation_without_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "allspark_server._cuda", None)
    with pytest.raises(AllSparkError, match=r"no CUDA backend: run pip install 'allspark-numa\[cuda\]', or") as caught:
        native.cuda_library()
    assert caught.value.status is AsStatus.ALLSPARK_INVALID_CALL_ERROR
    engine = Engine()
    with pytest.raises(AllSparkError, match="no CUDA backend"):
        engine.install_model(config(compute_unit="CUDA:0"))
    engine.close()


def test_the_backend_may_be_a_distribution_of_its_own(monkeypatch, tmp_path):
    """If the server's own has none, it is taken from allspark-numa-cuda of the same version."""
    monkeypatch.setitem(sys.modules, "allspark_server._cuda", None)
    package = SimpleNamespace(__version__=__version__)
    backend = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "allspark_cuda", package)
    monkeypatch.setitem(sys.modules, "allspark_cuda._cuda", backend)
    assert native.cuda_library() is backend
    package.__version__ = "0.0.9"
    with pytest.raises(AllSparkError, match=f"allspark-numa-cuda has version 0.0.9, .*=={__version__}"):
        native.cuda_library()


def test_a_machine_without_a_gpu_is_reported():
    cuda = pytest.importorskip("allspark_server._cuda")
    try:
        cuda.device_count()
    except ValueError as error:
        assert ("driver" in str(error) and "CPU:0" in str(error)) or "too old" in str(error)
    else:
        pytest.skip("there is a GPU")
    engine = Engine()
    with pytest.raises(AllSparkError, match="compute_unit='CUDA:0': .*driver") as caught:
        engine.install_model(config(compute_unit="CUDA:0"))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR
    engine.install_model(config())  # the engine goes on
    engine.close()


def test_each_rank_has_a_gpu():
    engine = Engine()
    with pytest.raises(AllSparkError,
                       match="'CUDA:0,1' names 2 GPUs, but this group has 1 rank and each rank needs one; "
                             ".*--gpus 0,1") as caught:
        engine.install_model(config(compute_unit="CUDA:0,1"))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR
    engine.close()
    with pytest.raises(AllSparkError, match="names 1 GPU, but this group has 2 ranks"):
        device.gpu_of(config(compute_unit="CUDA:0"), 1, 2)
    with pytest.raises(AllSparkError, match="names GPU 3 twice: each rank needs its own"):
        device.gpu_of(config(compute_unit="CUDA:3,1,3"), 0, 3)
    assert [device.gpu_of(config(compute_unit="CUDA:3,1"), rank, 2) for rank in range(2)] == [3, 1]


def test_a_group_has_the_gpus_that_it_was_started_for(monkeypatch):
    monkeypatch.setenv(device.GROUP_GPUS, "2,3")
    assert device.gpu_of(config(compute_unit="CUDA:2,3"), 1, 2) == 3
    with pytest.raises(AllSparkError,
                       match="'CUDA:0,1' names other GPUs than .*: use compute_unit='CUDA:2,3'") as caught:
        device.gpu_of(config(compute_unit="CUDA:0,1"), 0, 2)
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR


@pytest.mark.parametrize("fields, rows", [
    ({"max_step_tokens": 70_000}, 70_000), ({"engine_max_prefill_length": 65_500, "engine_max_batch": 64}, 65_564),
    ({"max_step_tokens": 65_500, "engine_max_batch": 64, "speculation": "draft",
      "draft_model": str(shipped_model())}, 65_564)])
def test_steps_are_no_longer_than_a_grid(monkeypatch, fields, rows):
    from allspark_server.runtime import runner

    gpu = device.Gpu.__new__(device.Gpu)  # without one
    gpu.isa, gpu._capability, gpu._group = "sm_90 (without a name)", 90, [0]
    monkeypatch.setattr(runner, "device_of", lambda *_: gpu)
    with pytest.raises(AllSparkError, match=f"a step of {rows} tokens .*'CUDA:0' takes at most 65535") as caught:
        runner.ModelRunner(config(compute_unit="CUDA:0", **fields)).load()
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR


def test_the_ids_of_gpus_are_not_said_to_be_ignored(caplog):
    engine = Engine()
    with pytest.raises(AllSparkError, match="CUDA"):
        engine.install_model(config(compute_unit="CUDA:77"))  # there are not so many, if there is one
    assert "decide where it runs" not in caplog.text
    engine.close()


def test_a_group_has_no_more_gpus_than_kernels_can_add_up(monkeypatch):
    monkeypatch.setattr(device, "cuda_library", lambda: SimpleNamespace(MOST_RANKS=8))
    with pytest.raises(AllSparkError, match="a group has up to 8 GPUs, but compute_unit names 9") as caught:
        device.Gpu(0, 1, range(9))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR


def test_gpus_of_a_group_are_its_ranks(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # the launcher refuses GPUs that are hidden
    line = subprocess.run([sys.executable, "-m", "allspark_launch", "serve", "--model", str(shipped_model()), "--gpus",
                           "0", "--dry-run"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "CUDA:0" in line and "--ranks 1" in line


def test_memory_is_counted_without_a_gpu():
    cuda = pytest.importorskip("allspark_server._cuda")
    assert cuda.matrix_bytes(3584, 18944, "bfloat16") == 2 * 3584 * 18944
    assert cuda.matrix_bytes(1, 1, "bfloat16") == 8192 and cuda.matrix_bytes(3, 7, "float32") == 84
    assert cuda.matrix_bytes(9 * 65, 64, "bfloat16", experts=9) == 9 * 2 * 8192  # whole blocks for each
    for rows, columns in ((3584, 18944), (1, 1), (70, 129)):
        assert cuda.matrix_bytes(rows, columns, "float16") == cuda.matrix_bytes(rows, columns, "bfloat16")
    for count in (lambda dtype: cuda.span_bytes(32, 96, dtype), lambda dtype: cuda.adapter_bytes(21, 300, 70, dtype),
                  lambda dtype: cuda.exchange_bytes(3, 200, 3584, dtype)):
        assert count("float16") == count("bfloat16") < count("float32")
    with pytest.raises(ValueError, match="a matrix of 10 rows is no stack of 3 experts"):
        cuda.matrix_bytes(10, 64, "bfloat16", experts=3)
    assert cuda.span_bytes(32, 128, "bfloat16") == 2 * 32 * 128 * 2 and cuda.span_bytes(16, 5, "float32") == 1024
    assert cuda.span_bytes(32, 128, "int8") == 2 * 32 * 128 + 16 * 32
    assert cuda.span_bytes(32, 128, "uint4") == 32 * 128 + 16 * 32
    assert cuda.matrix_bytes(3584, 18944, "int4", 64) == 3584 * 18944 // 2 + 4 * 3584 * 18944 // 64
    assert cuda.matrix_bytes(1, 1, "int8", 0) == 4096 + 256
    assert cuda.widened_bytes(64, 64, False, 8) == 0 and cuda.widened_bytes(64, 64, False, 4096) == 8192


@pytest.mark.parametrize("given, refused", [
    (("int3",), "weights of type int3 are not available on CUDA yet"),
    (("int4", 24), "weights of type int4 in groups of 24 are not available on CUDA"),
    (("float8", 64), "weights of type float8 have a scale for each row or for groups of 128 columns: got groups of 64"),
    (("w4a8", 32), "weights of type w4a8 in groups of 32 are not available on CUDA"),
])
def test_formats_that_there_are_not_are_refused_by_name(given, refused):
    cuda = pytest.importorskip("allspark_server._cuda")
    with pytest.raises(ValueError, match=refused):
        cuda.matrix_bytes(64, 96, *given)
    with pytest.raises(ValueError, match="scales of weights of type int4 with scales=float16 are not available"):
        cuda.matrix_bytes(64, 96, "int4", 32, scales="float16")


def test_float8_is_for_gpus():
    engine = Engine()
    with pytest.raises(AllSparkError, match="weight_dtype='float8' is for GPUs") as caught:
        engine.install_model(config(weight_dtype="float8"))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR
    with pytest.raises(AllSparkError, match="cache_dtype='float8' is for GPUs"):
        engine.install_model(config(cache_dtype="float8"))
    engine.close()
    with pytest.raises(ValueError, match="weight_group_size=64 is for quantized weights, and weight_dtype is 'float8'"):
        config(weight_dtype="float8", weight_group_size=64).validate()


@pytest.mark.parametrize("fields", [{"weight_dtype": "float16"}, {"cache_dtype": "float16"},
                                    {"weight_dtype": "int8", "cache_dtype": "float16"}])
def test_float16_is_for_gpus(fields):
    """On a GPU it is not refused by name, whatever else is missing."""
    name, engine = next(name for name, value in fields.items() if value == "float16"), Engine()
    refused = f"{name}='float16' is for GPUs .*; on CPUs use 'float32' or 'bfloat16'"
    with pytest.raises(AllSparkError, match=refused) as caught:
        engine.install_model(config(**fields))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR
    engine.install_model(config())  # the engine goes on
    with pytest.raises(AllSparkError) as caught:
        engine.install_model(config(compute_unit="CUDA:77", **fields))
    assert "float16" not in str(caught.value)
    engine.close()
    with pytest.raises(ValueError, match="weight_group_size=64 is for quantized weights, .* is 'float16'"):
        config(weight_dtype="float16", weight_group_size=64).validate()


def test_what_a_gpu_has_of_formats():
    from allspark_server.weights.formats import ScaleLayout
    from allspark_server.weights.gpu_forms import on_gpu

    assert on_gpu(WeightFormat("bfloat16")) and on_gpu(WeightFormat("int4", 64)) and on_gpu(WeightFormat("int8", 0))
    assert on_gpu(WeightFormat("float8")) and on_gpu(WeightFormat("float16"))
    assert on_gpu(WeightFormat("float8", 128)) and not on_gpu(WeightFormat("float8", 64))
    assert on_gpu(WeightFormat("w8a8", 64)) and not on_gpu(WeightFormat("w8a8", 32))
    assert not on_gpu(WeightFormat("e4m3")) and not on_gpu(WeightFormat("int4", 24))
    assert not on_gpu(WeightFormat("int4", 128, ScaleLayout("float16", "points")))
    assert on_gpu(WeightFormat("int4", 128, ScaleLayout(permuted=True)))
    assert on_gpu(WeightFormat("e2m1", 16, ScaleLayout("bfloat16", "none"))) and not on_gpu(WeightFormat("e2m1", 16))
    assert on_gpu(WeightFormat("nf4", 128, ScaleLayout("bfloat16", "none")))


def test_what_a_gpu_lacks_is_named():
    gpu = device.Gpu.__new__(device.Gpu)  # without one
    gpu.isa, gpu._capability = "sm_80 (without a name)", 80
    for forms, cache, refused in ((["e4m3"], "bfloat16", "a matrix of type e4m3 on CUDA"),
                                  (["float8"], "bfloat16", "a matrix of type float8 on sm_80 .*, which is not sm_90"),
                                  (["float16"], "nf4", "a cache of type nf4 on CUDA")):
        with pytest.raises(AllSparkError, match=refused):
            gpu.check(config(), {WeightFormat(form) for form in forms}, cache)
    gpu._group = [0]
    gpu.check(config(), {WeightFormat("float16"), WeightFormat("float32")}, "float16")


def test_errors_after_which_a_gpu_cannot_be_used_have_a_type():
    cuda = pytest.importorskip("allspark_server._cuda")
    for error in (700, 702, 719):
        with pytest.raises(native.DeviceLost, match="CUDA: a call: .*; this process .* must be started anew"):
            cuda.check(error)
    cuda.check(0)
    with pytest.raises(RuntimeError, match="CUDA: a call: ") as caught:
        cuda.check(2)  # there is no memory
    assert not isinstance(caught.value, native.DeviceLost)


def test_memory_for_partial_results_is_bounded():
    cuda = pytest.importorskip("allspark_server._cuda")
    split = 4 * cuda.partial_bytes(128)
    assert cuda.most_kv_splits(256, 4096, split) == 256 * 16  # every sequence may have its full length
    assert (1 << 30) - split < cuda.most_kv_splits(256, 131_072, split) * split <= 1 << 30  # it would take 4 GiB
    assert cuda.most_kv_splits(1, 4096, split) == 8 * 16  # rows with drafts have several tiles
    assert cuda.most_kv_splits(4, 1 << 20, 1 << 30) == 4 + (1 << 12)  # one of full length, beside short ones


@pytest.mark.parametrize("most", [1, 5, 33, 200, 256, 1000])
def test_every_decode_step_has_the_size_of_a_graph(most):
    """Also the largest ones of a batch size that is no multiple of the steps between sizes."""
    cuda = pytest.importorskip("allspark_server._cuda")
    sizes = [cuda.padded_rows(rows, most) for rows in range(1, most + 1)]
    assert all(rows <= size <= most for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) <= 10 + 4 * max(0, most.bit_length() - 4)  # few graphs
    if most == 1000:
        assert [cuda.padded_rows(rows, most) for rows in (1, 4, 5, 17, 33, 65, 129, 200, 257, 999)] == [
            1, 4, 6, 20, 40, 80, 160, 224, 320, 1000]


AMPERE = dict(capability=80, sms=108, shared_bytes=163 << 10, prefill_clusters=0)
ADA = dict(capability=89, sms=142, shared_bytes=99 << 10, prefill_clusters=0)
SLOW_MEMORY = {"read": 800, "widen": [14, 13]}  # GDDR


@pytest.mark.parametrize("chip, shape, options, expected", [
    ({}, (4608, 3584, "bfloat16"), {"normed": True}, [(1, "gemv, norms"), (128, "split_k"), (None, "prefill")]),
    ({}, (3584, 3584, "float16"), {}, [(1, "gemv"), (128, "split_k"), (None, "prefill")]),
    ({}, (2048, 4096, "bfloat16"), {}, [(1, "gemv"), (8, "mma"), (128, "split_k"), (None, "prefill")]),
    ({}, (3584, 18944, "bfloat16"), {"pushed": True}, [(256, "split_k"), (None, "prefill")]),
    ({}, (4608, 3584, "bfloat16"), {"normed": True, "pushed": True}, [(128, "split_k"), (None, "prefill")]),
    ({}, (2304, 3584, "bfloat16"), {"normed": True}, [(8, "mma"), (128, "split_k"), (None, "prefill")]),
    ({}, (3584, 1792, "bfloat16"), {"pushed": True}, [(8, "mma"), (128, "split_k"), (None, "prefill")]),
    ({}, (37888, 3584, "bfloat16"), {"gated": True, "normed": True}, [(16, "stream_k"), (None, "prefill")]),
    ({}, (18944, 3584, "bfloat16"), {"gated": True}, [(16, "stream_k"), (None, "prefill")]),
    ({}, (152064, 3584, "bfloat16"), {}, [(128, "stream_k"), (None, "prefill")]),  # more than four waves of tiles
    ({}, (70, 300, "bfloat16"), {}, [(8, "mma"), (None, "split_k")]),  # prefill writes 16 bytes at a time
    ({}, (3584, 3584, "int4", 64), {"normed": True}, [(1, "gemv, norms"), (256, "stream_k"), (None, "prefill")]),
    ({}, (3584, 3584, "w8a8"), {}, [(1, "gemv, quantizes"), (2, "small_m"), (64, "stream_k"), (None, "prefill")]),
    ({}, (4608, 3584, "float8"), {"normed": True},
     [(1, "gemv, norms"), (2, "small_m"), (64, "stream_k"), (None, "prefill")]),
    ({}, (4608, 3584, "float8", 128), {"normed": True}, [(1, "gemv, norms"), (24, "stream_k"), (None, "prefill")]),
    ({}, (6400, 8192, "float8", 128), {}, [(112, "stream_k"), (None, "prefill")]),
    ({}, (37888, 3584, "float8", 128), {"gated": True}, [(64, "stream_k"), (None, "prefill")]),
    ({}, (3584, 3584, "float8", 128), {}, [(1, "gemv, quantizes"), (24, "stream_k"), (None, "prefill")]),
    ({}, (3584, 18944, "float8", 128), {}, [(1, "gemv, quantizes"), (48, "stream_k"), (None, "prefill")]),
    # Steps of prefill are whole groups.
    ({}, (3584, 1344, "float8", 128), {}, [(1, "gemv, quantizes"), (None, "stream_k")]),
    ({}, (4608, 3584, "w4a8", 64), {"normed": True}, [(1, "stream_k, norms"), (None, "stream_k")]),
    (AMPERE, (3584, 3584, "bfloat16"), {}, [(64, "mma"), (None, "mma_prefill")]),
    (AMPERE, (3584, 3584, "bfloat16"), {"pushed": True}, [(256, "mma"), (None, "mma_prefill")]),
    (AMPERE, (37888, 3584, "float16"), {"gated": True}, [(32, "mma"), (None, "mma_prefill")]),
    (AMPERE, (512, 3584, "bfloat16"), {}, [(832, "mma"), (None, "mma_prefill")]),  # tiles for half of the SMs
    (AMPERE, (4608, 3584, "int4", 64), {}, [(128, "mma"), (None, "prefill")]),
    (ADA, (4608, 3584, "int4", 64), {}, [(320, "mma"), (None, "prefill")]),
    (AMPERE, (37888, 3584, "float16"), {"gated": True, "floats": True}, [(None, "mma")]),  # written in 16 bits alone
    (AMPERE, (37888, 3584, "int4", 64), {"gated": True, "floats": True}, [(None, "mma")]),
    (AMPERE, (3584, 3584, "w8a8"), {}, [(None, "mma")]),
    ({}, (256, 64, "float32"), {}, [(None, "simt")]),
])
def test_which_kernel_serves_a_linear(chip, shape, options, expected):
    cuda = pytest.importorskip("allspark_server._cuda")
    costs = {**cuda.default_costs(), **SLOW_MEMORY} if chip is ADA else {}
    rows = cuda.gemm_kernels(cuda.Chip(**chip, costs=costs), *shape, **options)
    assert [(row["last"], row["kernel"]) for row in rows] == expected
    assert [row["first"] for row in rows] == [1, *(last + 1 for last, _ in expected[:-1])]


def test_choices_follow_what_kernels_cost():
    cuda = pytest.importorskip("allspark_server._cuda")
    costs = cuda.default_costs()

    def last_of_mma(chip=AMPERE, shape=(3584, 3584, "bfloat16"), **changed):
        rows = cuda.gemm_kernels(cuda.Chip(**chip, costs={**costs, **changed}), *shape)
        return next(row["last"] for row in rows if row["kernel"].startswith("mma"))

    faster = [0.4 * each for each in costs["mma_prefill"]]
    assert last_of_mma(mma_prefill=faster, mma_prefill_row=20) < last_of_mma() < last_of_mma(mma=[90, 300, 310])
    assert last_of_mma(mma_prefill=[1e6] * 6) is None
    int4 = (4608, 3584, "int4", 64)
    assert last_of_mma(shape=int4) < last_of_mma(shape=int4, widen=[30, 30])
    assert last_of_mma(shape=int4, widen=[0.1, 0.1]) == 128  # there is memory for dequantized weights from 129 rows on
    # Hopper's kernels do not follow them.
    assert cuda.gemm_kernels(cuda.Chip(costs={**costs, "mma_prefill": faster}), *int4) == cuda.gemm_kernels(
        cuda.Chip(), *int4)
    assert cuda.mma_rate(costs, 163 << 10, 132) == pytest.approx(132 * 2 * 128 * 128 * 64 / 620e-9)
    for wrong, told in ({"read": 1}, "graph_node must be 1 number"), ({**costs, "read": -1}, "read must be 1 number"), (
            {**costs, "mma": [1, 2]}, "mma must be 3 numbers"), ({**costs, "new": 1}, "unknown name"):
        with pytest.raises(ValueError, match=told):
            cuda.Chip(costs=wrong)


def test_costs_that_no_such_chip_has():
    cuda = pytest.importorskip("allspark_server._cuda")
    costs, h100 = cuda.default_costs(), dict(capability=90, sms=132, shared_bytes=227 << 10, clock=1.98, memory=3352)
    assert cuda.why_implausible(costs, **h100) == ""
    for changed, told in [({"read": 700}, "read of 700, which should be 1173 to 4022"), ({"launch": 5}, "launch of 5"),
                          ({"graph_node": 1e5}, "graph_node of 1e"), ({"mma_prefill": [9000] * 6}, ".* the best tile"),
                          ({"mma_prefill": [0] * 6}, "mma_prefill"), ({"mma": [144, 300, 9e4]}, "mma.2."),
                          ({"widen": [4.6, 900]}, "widen.1."), ({"mma_prefill_row": 9000}, "mma_prefill_row")]:
        assert re.match(told, cuda.why_implausible({**costs, **changed}, **h100)), changed


def test_which_kernels_serve_experts_and_attention():
    cuda = pytest.importorskip("allspark_server._cuda")

    def kernels(rows):
        return [row["kernel"] for row in rows]

    hopper, ampere = cuda.Chip(), cuda.Chip(**AMPERE)
    assert kernels(cuda.expert_kernels(hopper, 768, 2048, "bfloat16", experts=128)) == [
        "mma, tiles of 8", "mma, tiles of 16", "mma, tiles of 32", "prefill, tiles of 64", "prefill, tiles of 128"]
    assert kernels(cuda.expert_kernels(hopper, 768, 2048, "int4", 64, experts=128))[-1] == "mma, tiles of 64"
    assert kernels(cuda.expert_kernels(hopper, 5760, 2880, "mxfp4", 32, experts=32)) == [
        f"prefill, tiles of {rows}" for rows in (8, 16, 32, 48, 64, 128)]
    eight = cuda.expert_kernels(hopper, 768, 2048, "float8", 128, experts=128)
    assert [(row["last"], row["kernel"]) for row in eight[-2:]] == [
        (97 * 128 - 1, "prefill, tiles of 64"), (None, "prefill, tiles of 128")]
    assert kernels(cuda.attention_kernels(hopper, "bfloat16", 128, 7)) == ["mma, stores", "wgmma"]
    assert kernels(cuda.attention_kernels(hopper, "bfloat16", 256, 8)) == ["mma, stores", "wgmma"]
    assert kernels(cuda.attention_kernels(hopper, "float8", 128, 7)) == ["mma, stores", "wgmma"]
    assert kernels(cuda.attention_kernels(hopper, "float8", 256, 8)) == ["mma, stores", "mma"]
    assert kernels(cuda.attention_kernels(hopper, "int8", 256, 8))[1] == "mma"
    assert kernels(cuda.attention_kernels(hopper, "bfloat16", 128, 7, biased=True)) == ["mma, stores", "mma"]
    assert kernels(cuda.attention_kernels(ampere, "int8", 96, 4)) == ["mma, stores", "mma"]
    assert kernels(cuda.attention_kernels(hopper, "bfloat16", 512, 4)) == ["mma", "mma"]
    assert kernels(cuda.attention_kernels(hopper, "int8", 512, 4)) == ["simt", "simt"]
    assert kernels(cuda.attention_kernels(ampere, "float32", 128, 4)) == ["simt", "simt"]
    rows = [(chip, cache, latent) for chip in (hopper, ampere) for cache in ("float32", "bfloat16")
            for latent in (512, 256)]
    assert [kernels(cuda.latent_kernels(chip, cache, latent, 64, 20)) for chip, cache, latent in rows] == [
        ["mma"] if row[1:] == ("bfloat16", 512) else ["simt"] for row in rows]


def test_ops_that_only_cpus_have_are_named():
    assert set(device.Gpu.missing_ops) == {"pool_rows"}
    assert not device.Cpus.missing_ops
    assert set(device.Gpu.missing_attributes) == {("latent_attention", "rate")} and not device.Cpus.missing_attributes
