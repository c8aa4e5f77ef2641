"""A GPU's memory is released and taken again: weights wait in host memory, and bits stay the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from reference.plan import SAMPLE
from reference.toy import OUTPUTS, item, plan, start
from support.gpu_toys import executor

pytestmark = pytest.mark.cuda
UNIT = {"compute_unit": "CUDA:0"}
ALONE = os.environ.get("ALLSPARK_TEST_WHOLE_GPU") == "1"  # then what is free says what these tests have given back


def free() -> int:
    from allspark_server import _cuda

    return _cuda.memory_info(0)[0]


def test_gigabytes_go_and_come_back_at_the_links_speed():
    """Recorded graphs remain valid."""
    width, layers = 8192, 12
    gpu, rng = executor(), np.random.default_rng(0)
    before = free()
    table = gpu.add_matrix(53, width, "float32")
    gpu.fill_matrix(table, rng.normal(size=(53, width)).astype(np.float32), "F32")
    matrices = []
    for _ in range(layers):
        matrices.append(gpu.add_matrix(width, width, "bfloat16"))
        values = rng.integers(0, 1 << 16, (64, width)).astype(np.uint16) & 0xBFFF  # below 2
        for first in range(0, width, 64):
            gpu.fill_matrix(matrices[-1], values, "BF16", first)
    gpu.add_cache_group("full", 0)
    x = gpu.add_tensor(width)
    gpu.add_op("embedding", [], [x], [table], {"vocab_begin": 0})
    gpu.add_op("scale", [x], [], [], {"factor": 1e-3})
    for matrix in matrices:
        y = gpu.add_tensor(width)
        gpu.add_op("linear", [x], [y], [matrix], {})
        gpu.add_op("scale", [y], [], [], {"factor": 1e-3})
        x = y
    out = gpu.add_tensor(width, OUTPUTS)
    gpu.add_op("select_rows", [x], [out], [], {})
    gpu.add_op("sample", [out], [], [], {"vocab_begin": 0, "vocab_size": width})
    gpu.allocate(max_rows=64, max_slots=8, max_length=64, span_size=16, num_spans=32, cache_dtype="float32",
                 max_outputs=8)

    def step(at: int) -> bytes:
        work = [item(slot, 1, SAMPLE, spans=[slot] if at == 0 else []) for slot in range(8)]
        entering = [start(slot, [slot + 1], logprobs=False) for slot in range(8)] if at == 0 else []
        return gpu.step(plan(work, entering), True).logits.tobytes()

    first = [step(at) for at in range(3)]  # the third is replayed
    gpu.step(plan([], free=range(8)))
    weights, taken = gpu.weight_bytes(), before - free()
    assert weights > 1.5e9 and (taken >= weights or not ALONE)
    for _ in range(2):
        began = time.perf_counter()
        gpu.unload()
        gone = time.perf_counter() - began
        assert before - free() < 0.1 * weights or not ALONE
        gpu.unload()  # its memory is free
        with pytest.raises(ValueError, match="the GPU's memory was given back: load.. before steps"):
            step(0)
        began = time.perf_counter()
        gpu.load()
        back = time.perf_counter() - began
        print(f"{weights / 1e9:.2f} GB: to the host {weights / gone / 1e9:.1f} GB/s, back {weights / back / 1e9:.1f}")
        assert abs(before - free() - taken) < 0.05 * weights or not ALONE
        gpu.load()
        assert [step(at) for at in range(3)] == first
        gpu.step(plan([], free=range(8)))


def test_other_gpus_are_left_alone():
    """A model on the second GPU takes no memory of the first, whichever thread loads, moves and releases it."""
    from allspark_server import _cuda

    if _cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    program = """if True:
        import ctypes
        from allspark_client import AsModelConfig
        from allspark_launch.group.background import shipped_model
        from allspark_server import Engine

        with Engine() as engine:
            for _ in range(2):
                engine.install_model(AsModelConfig("m", str(shipped_model()), compute_unit="CUDA:1",
                                                   cache_memory=64 << 20))
                engine.unload_device_mem("m")
                engine.load_device_mem("m")
                engine.release_model("m")
        driver, contexts = ctypes.CDLL("libcuda.so.1"), []
        for gpu in range(2):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            assert driver.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active)) == 0
            contexts.append(active.value)
        assert contexts == [0, 1], contexts
        """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.skipif(not ALONE, reason="ALLSPARK_TEST_WHOLE_GPU=1 says that nobody else needs the GPU's memory")
def test_memory_that_others_have_taken():
    """The failure changes nothing, and once memory is free the model is as before."""
    gpu = executor()
    table = gpu.add_matrix(53, 4 << 20, "float32")  # 848 MiB
    x = gpu.add_tensor(4 << 20)
    gpu.add_cache_group("full", 0)
    gpu.add_op("embedding", [], [x], [table], {"vocab_begin": 0})
    out = gpu.add_tensor(4 << 20, OUTPUTS)
    gpu.add_op("select_rows", [x], [out], [], {})
    gpu.add_op("sample", [out], [], [], {"vocab_begin": 0, "vocab_size": 4 << 20})
    gpu.allocate(max_rows=1, max_slots=1, max_length=16, span_size=16, num_spans=1, cache_dtype="float32")
    gpu.unload()
    other = executor()
    other.add_matrix(1 << 18, (free() - (256 << 20)) // (2 << 18), "bfloat16")
    left = free()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot allocate .* MiB of the GPU's memory for .*: .* are free"):
            gpu.load()
        assert abs(free() - left) < 16 << 20
    del other
    gpu.load()
    assert gpu.step(plan([item(0, 1, SAMPLE, spans=[0])], [start(0, [7])])).tokens.tolist() == [0]


def all_of_it() -> list:
    """Takes all of the GPU's memory but a few MiB for as long as it is kept."""
    found = [executor()]
    for wanted in (1 << 30, 64 << 20, 4 << 20):
        while free() > 2 * wanted:
            found[0].add_matrix(1 << 11, wanted >> 12, "bfloat16")
    return found


@pytest.mark.skipif(not ALONE, reason="ALLSPARK_TEST_WHOLE_GPU=1 says that nobody else needs the GPU's memory")
def test_without_memory_models_go_on_and_others_are_refused():
    """Also with new batch sizes; a refused model can be loaded once memory is free."""
    lora = pytest.importorskip("test_lora")
    from allspark_client import AllSparkError, AsModelConfig, AsStatus
    from allspark_server import Engine

    base, prompt = lora.checkpoints.checkpoint(lora.NAME), lora.checkpoints.prompt_of(70)

    def refused(call, *arguments) -> None:
        with pytest.raises(AllSparkError) as caught:
            call(*arguments)
        assert caught.value.status is AsStatus.ALLSPARK_MEMORY_ERROR, caught.value

    with Engine() as engine:
        engine.install_model(AsModelConfig("m", base, cache_memory=1 << 28, engine_max_batch=64, **UNIT))
        engine.start_model("m")
        others = all_of_it()
        refused(engine.install_model, AsModelConfig("n", base, cache_memory=1 << 28, **UNIT))
        ways = [{}, {"n": 9}, {"n": 30, "top_p": 0.9, "seed": 3}, {"do_sample": False}]
        crowded = [lora.run(engine, prompt, **way)[:2] for way in ways]
        engine.stop_model("m")
        engine.unload_device_mem("m")
        more = all_of_it()
        refused(engine.load_device_mem, "m")
        refused(engine.load_device_mem, "m")
        del others, more
        engine.load_device_mem("m")
        engine.start_model("m")
        engine.install_model(AsModelConfig("n", base, cache_memory=1 << 28, engine_max_batch=64, **UNIT))
        engine.start_model("n")
        for name in ("m", "n"):
            assert [lora.run(engine, prompt, name=name, **way)[:2] for way in ways] == crowded


def test_a_draft_model_goes_and_comes_back_too():
    """The host cache holds both models' spans."""
    lora = pytest.importorskip("test_lora")
    from allspark_client import AsModelConfig
    from allspark_server import Engine

    base, prompt = lora.checkpoints.checkpoint(lora.NAME), lora.checkpoints.prompt_of(12) * 8
    found = []
    for fields in ({}, {"speculation": "draft", "draft_model": str(base), "host_cache_memory": 64 << 20}):
        with Engine() as engine:
            engine.install_model(AsModelConfig("m", base, cache_memory=1 << 26, **fields, **UNIT))
            engine.start_model("m")
            found.append(lora.run(engine, prompt)[:2])
            engine.stop_model("m")
            engine.unload_device_mem("m")
            engine.load_device_mem("m")
            engine.start_model("m")
            assert lora.run(engine, prompt)[:2] == found[-1]
            if fields:
                counters = engine._models["m"].scheduler.counters
                assert counters.accepted_tokens == counters.drafted_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("tier", [0, 64 << 20])
def test_an_engine_goes_on_with_the_same_bits(tmp_path, tier):
    """With an adapter and a prefix cache; the host cache keeps what it holds."""
    lora = pytest.importorskip("test_lora")
    from allspark_client import AsModelConfig
    from allspark_server import Engine

    base, prompt = lora.checkpoints.checkpoint(lora.NAME), lora.checkpoints.prompt_of(100)
    directory = lora.adapters.write_adapter(tmp_path / "a", base)
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", base, cache_memory=1 << 28, lora_names=[str(directory)],
                                           host_cache_memory=tier, engine_max_batch=256, **UNIT))
        engine.start_model("m")
        before = free()
        cold = {name: lora.run(engine, prompt, name) for name in ("", "a")}
        assert lora.run(engine, prompt)[2] == 96
        for _ in range(2):
            engine.stop_model("m")
            engine.unload_device_mem("m")
            assert free() > before + (100 << 20) or not ALONE
            engine.load_device_mem("m")
            engine.start_model("m")
            for name in ("", "a"):
                assert lora.run(engine, prompt, name) == cold[name]  # the prefix cache had nothing
                assert lora.run(engine, prompt, name)[2] == 96
        engine.stop_model("m")
        engine.unload_device_mem("m")
        engine.release_model("m")
