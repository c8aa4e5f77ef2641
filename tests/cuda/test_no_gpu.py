"""What needs no GPU: a CPU installation neither needs nor loads the CUDA backend, and errors say what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus
from allspark_launch.serving import shipped_model
from allspark_server import Engine
from allspark_server.runtime import device, native


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
    with pytest.raises(AllSparkError, match="no CUDA backend: build it where there is an nvcc") as caught:
        native.cuda_library()
    assert caught.value.status is AsStatus.ALLSPARK_INVALID_CALL_ERROR
    engine = Engine()
    with pytest.raises(AllSparkError, match="no CUDA backend"):
        engine.install_model(config(compute_unit="CUDA:0"))
    engine.close()


def test_a_machine_without_a_gpu_is_told_of():
    cuda = pytest.importorskip("allspark_server._cuda")
    try:
        cuda.device_count()
    except ValueError as error:
        assert "driver" in str(error) and "CPU:0" in str(error) or "too old" in str(error)
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
    with pytest.raises(AllSparkError, match="'CUDA:0,1' names 2 GPUs, and this group has 1 rank: .*--gpus 0,1") as caught:
        engine.install_model(config(compute_unit="CUDA:0,1"))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR
    engine.close()
    with pytest.raises(AllSparkError, match="names 1 GPU, and this group has 2 ranks"):
        device.gpu_of(config(compute_unit="CUDA:0"), 1, 2)
    with pytest.raises(AllSparkError, match="names GPU 3 twice: each rank needs its own"):
        device.gpu_of(config(compute_unit="CUDA:3,1,3"), 0, 3)
    assert [device.gpu_of(config(compute_unit="CUDA:3,1"), rank, 2) for rank in range(2)] == [3, 1]


def test_gpus_of_a_group_are_its_ranks():
    line = subprocess.run([sys.executable, "-m", "allspark_launch", "serve", "--model", str(shipped_model()), "--gpus",
                           "0", "--dry-run"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "CUDA:0" in line and "--ranks 1" in line


def test_memory_is_counted_without_a_gpu():
    cuda = pytest.importorskip("allspark_server._cuda")
    assert cuda.matrix_bytes(3584, 18944, "bfloat16") == 2 * 3584 * 18944
    assert cuda.matrix_bytes(1, 1, "bfloat16") == 8192 and cuda.matrix_bytes(3, 7, "float32") == 84
    assert cuda.span_bytes(32, 128, "bfloat16") == 2 * 32 * 128 * 2 and cuda.span_bytes(16, 5, "float32") == 1024
    with pytest.raises(ValueError, match="weights of type int4 are not available on CUDA yet"):
        cuda.matrix_bytes(4, 4, "int4")
