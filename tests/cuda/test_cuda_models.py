"""Whole models on the GPU: logits against transformers, greedy ids against transformers and the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402

from allspark_client.errors import AllSparkError  # noqa: E402
from allspark_launch.serving import shipped_model  # noqa: E402
from checkpoints import (CONFIGS, STORED, check_greedy, check_logits, checkpoint, prompt_of,  # noqa: E402
                         reference_greedy, reference_logits)
from driver import Driver  # noqa: E402
from published import PUBLISHED, Published, write  # noqa: E402

pytestmark = pytest.mark.cuda
UNIT = {"compute_unit": "CUDA:0"}
LENGTHS = (1, 33, 129, 300, 700)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_ids_in_float32(name):
    directory = checkpoint(name)
    with Driver(directory, weight_dtype="float32", **UNIT) as gpu:
        assert gpu.info.isa.startswith("sm_")
        for length in LENGTHS:
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference_logits(directory, prompt))
        prompt = prompt_of(64)
        check_greedy(gpu.generate(prompt, 24)[0], reference_greedy(directory, prompt, 24))


@pytest.mark.parametrize("name", PUBLISHED)
def test_families_that_transformers_does_not_have(name, tmp_path):
    """Among them ALiBi's slopes, and queries that grow with the logarithm of their position."""
    write(tmp_path / name, PUBLISHED[name], 3)
    reference = Published(tmp_path / name)
    with Driver(tmp_path / name, weight_dtype="float32", **UNIT) as gpu:
        for length in LENGTHS:
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference.logits(prompt)[-1])


@pytest.mark.parametrize("name", [name for name, spec in STORED.items() if spec.dtype == "bfloat16"])
def test_bfloat16_is_no_worse_than_transformers(name):
    """In float64 the same weights; errors as root mean squares over prompts."""
    directory = checkpoint(name)
    ours = theirs = 0.0
    with Driver(directory, **UNIT) as gpu:
        assert (gpu.info.weight_dtype, gpu.info.cache_dtype) == ("bfloat16", "bfloat16")
        for length in LENGTHS:
            prompt = prompt_of(length)
            exact = reference_logits(directory, prompt, torch.float64)
            scale = exact.std()
            found, their = gpu.generate(prompt, 1)[1][0], reference_logits(directory, prompt, torch.bfloat16)
            ours += np.mean(((found - exact) / scale) ** 2)
            theirs += np.mean(((their - exact) / scale) ** 2)
    print(f"bfloat16: {ours**0.5:.4f}, transformers {theirs**0.5:.4f}")
    assert ours <= theirs


@pytest.mark.parametrize("name", ["qwen2-gqa-tied", "llama3", "qwen3-tied"])
def test_greedy_ids_are_the_cpus(name):
    directory = checkpoint(name)
    with Driver(directory, **UNIT) as gpu, Driver(directory) as cpu:
        for length in (1, 65, 300):
            prompt = prompt_of(length)
            ids, logits = gpu.generate(prompt, 60, chunk=100)
            expected, others = cpu.generate(prompt, 60)
            for i, (a, b) in enumerate(zip(ids, expected)):
                assert np.abs(logits[i] - others[i]).max() < 1e-3 * others[i].std()
                if a != b:
                    best = np.sort(others[i])[-2:]
                    assert best[1] - best[0] < 1e-3 * others[i].std()
                    break


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_model(dtype):
    directory = shipped_model()
    exact = torch.float32 if dtype == "float32" else torch.float64
    with Driver(directory, weight_dtype=dtype, engine_max_length=512, **UNIT) as gpu:
        worst = theirs = 0.0
        for length in (1, 17, 100, 250):
            prompt = np.random.default_rng(length).integers(0, gpu.info.vocab_size, length).tolist()
            expected = reference_logits(directory, prompt, exact)
            found = gpu.generate(prompt, 1)[1][0]
            if dtype == "float32":
                check_logits(found, expected)
            else:
                worst = max(worst, float(np.abs(found - expected).max() / expected.std()))
                their = reference_logits(directory, prompt, torch.bfloat16)
                theirs = max(theirs, float(np.abs(their - expected).max() / expected.std()))
        print(f"{dtype}: {worst:.4f}, transformers {theirs:.4f}")
        assert worst <= theirs or dtype == "float32"


@pytest.mark.parametrize("fields", [{"weight_dtype": "int8"}, {"weight_dtype": "int4", "weight_group_size": 32},
                                    {"weight_dtype": "w8a8"}, {"weight_dtype": "w4a8", "weight_group_size": 64}],
                         ids=lambda fields: fields["weight_dtype"])
def test_quantized_weights_are_near_the_cpus(fields):
    """The same values, rounded to bfloat16 as activations are."""
    directory = checkpoint("qwen2-gqa-tied")
    with Driver(directory, **fields, **UNIT) as gpu, Driver(directory, **fields) as cpu:
        assert gpu.info.weight_dtype == cpu.info.weight_dtype == fields["weight_dtype"]
        for length in LENGTHS:
            prompt = prompt_of(length)
            found, expected = gpu.generate(prompt, 1)[1][0], cpu.generate(prompt, 1)[1][0]
            assert np.abs(found - expected).max() < (0.2 if "int" in fields["weight_dtype"] else 0.6) * expected.std()


def test_float8_is_near_bfloat16():
    directory = checkpoint("qwen2-gqa-tied")
    with Driver(directory, weight_dtype="float8", **UNIT) as gpu, Driver(directory, weight_dtype="float32") as cpu:
        assert gpu.info.weight_dtype == "float8"
        for length in LENGTHS:
            prompt = prompt_of(length)
            found, expected = gpu.generate(prompt, 1)[1][0], cpu.generate(prompt, 1)[1][0]
            # Three bits of weights and of activations, in every product of random layers: 0.27 was seen.
            assert np.sqrt(np.mean((found - expected)**2)) < 0.4 * expected.std()


@pytest.mark.parametrize("mode, tolerance", [("AsCacheQuantI8", 0.1), ("AsCacheQuantU4", 0.6)])
def test_quantized_caches_are_near_the_cpus(mode, tolerance):
    directory = checkpoint("qwen3-tied")
    fields = {"cache_mode": mode, "weight_dtype": "float32"}
    with Driver(directory, **fields, **UNIT) as gpu, Driver(directory, **fields) as cpu:
        assert gpu.info.cache_dtype == cpu.info.cache_dtype
        for length in LENGTHS:
            prompt = prompt_of(length)
            found, expected = gpu.generate(prompt, 1)[1][0], cpu.generate(prompt, 1)[1][0]
            assert np.abs(found - expected).max() < tolerance * expected.std()


@pytest.mark.parametrize("fields, missing", [
    ({"weight_dtype": "w8a8", "weight_group_size": 32}, "a matrix of type w8a8:32 on CUDA"),
    ({"host_cache_memory": 1 << 26, "host_cache_dir": "/tmp"}, "host_cache_dir on CUDA"),
    ({"compute_unit": "CUDA:0,1"}, "names 2 GPUs, and this group has 1 rank"),
])
def test_what_is_not_there_is_refused(fields, missing):
    with pytest.raises(AllSparkError, match=missing):
        Driver(checkpoint("qwen2-gqa-tied"), **{**UNIT, **fields})


def test_a_cache_that_does_not_fit():
    with pytest.raises(AllSparkError, match="a cache of cache_memory"):
        Driver(checkpoint("qwen2-gqa-tied"), cache_memory=1 << 41, **UNIT)
