"""Whole models on the GPU: logits against transformers, greedy ids against transformers and the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from allspark_client.errors import AllSparkError
from allspark_launch.group.background import shipped_model
from support.checkpoints import check_logits, checkpoint, prompt_of, reference_logits
from support.driver import Driver
from support.greedy import check_greedy, reference_greedy
from support.published import PUBLISHED, Published, write
from support.tiny_configs import CONFIGS, STORED

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
    """Including ALiBi's slopes, and queries that grow with the logarithm of their position."""
    write(tmp_path / name, PUBLISHED[name], 3)
    reference = Published(tmp_path / name)
    with Driver(tmp_path / name, weight_dtype="float32", **UNIT) as gpu:
        for length in LENGTHS:
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference.logits(prompt)[-1])


DTYPES16 = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: of what is stored otherwise, in float16
ROUNDED = ("llama-bf16-heads-of-64", "qwen2-gqa-tied", "qwen2-yarn", "llama3", "mistral-window", "phi3-longrope",
           "glm4", "gemma2", "gemma3", "olmo2")


@pytest.mark.parametrize("name, dtype", [*((name, spec.dtype) for name, spec in STORED.items()),
                                         *((name, "float16") for name in ROUNDED)])
def test_16_bits_are_no_worse_than_transformers(name, dtype):
    """Against the stored weights in float64, as root mean squares over prompts. If weights are rounded, both have that
    error besides their own.
    """
    directory = checkpoint(name)
    ours = theirs = 0.0
    with Driver(directory, **({"weight_dtype": dtype} if name in ROUNDED else {}), **UNIT) as gpu:
        assert gpu.info.weight_dtype == gpu.info.cache_dtype == dtype
        for length in LENGTHS:
            prompt = prompt_of(length)
            exact = reference_logits(directory, prompt, torch.float64)
            scale = exact.std()
            found, their = gpu.generate(prompt, 1)[1][0], reference_logits(directory, prompt, DTYPES16[dtype])
            ours += np.mean(((found - exact) / scale) ** 2)
            theirs += np.mean(((their - exact) / scale) ** 2)
    print(f"{dtype}: {ours**0.5:.4f}, transformers {theirs**0.5:.4f}")
    assert ours <= theirs * (1.2 if name in ROUNDED else 1.0)


@pytest.mark.parametrize("name", ["llama-fp16-heads-of-64", "llama-fp16-sharded", "qwen3-tied", "gemma2"])
def test_greedy_ids_in_float16(name):
    """Ids equal float64's until its two best logits are nearly tied."""
    directory, compared = checkpoint(name), 0
    with Driver(directory, weight_dtype="float16", **UNIT) as gpu:
        for length in LENGTHS[:-1]:
            expected = reference_greedy(directory, prompt_of(length), 24)
            for i, found in enumerate(gpu.generate(prompt_of(length), 24, chunk=100)[0]):
                if expected.gaps[i] < 0.03:
                    break
                assert found == expected.tokens[i], (length, i)
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("fields, tolerance", [
    ({"weight_dtype": "float16", "cache_dtype": "bfloat16"}, 0.02), ({"cache_dtype": "float16"}, 0.03),
    ({"weight_dtype": "float16", "cache_dtype": "float32"}, 0.004),
    ({"weight_dtype": "float32", "cache_dtype": "float16"}, 0.004),
    ({"weight_dtype": "float16", "cache_mode": "AsCacheQuantI8"}, 0.1)], ids=str)
def test_types_of_weights_and_caches(fields, tolerance):
    """Transformers' error in bfloat16 is 0.012 of the logits' deviation, in float16 0.0016."""
    directory = checkpoint("llama-bf16-heads-of-64")
    with Driver(directory, **fields, **UNIT) as gpu:
        for length in LENGTHS:
            exact = reference_logits(directory, prompt_of(length), torch.float64)
            found = gpu.generate(prompt_of(length), 1)[1][0]
            assert np.sqrt(np.mean((found - exact)**2)) < tolerance * exact.std()


def test_codes_of_a_float16_checkpoint():
    """Everything beside quantized values is bfloat16."""
    directory, fields = checkpoint("llama-fp16-sharded"), {"weight_dtype": "int8", "quantize_head": False}
    with Driver(directory, **fields, **UNIT) as gpu, Driver(directory, **fields) as cpu:
        assert (gpu.info.weight_dtype, gpu.info.cache_dtype) == ("int8", "bfloat16")
        for length in LENGTHS:
            found, expected = (each.generate(prompt_of(length), 1)[1][0] for each in (gpu, cpu))
            assert np.abs(found - expected).max() < 0.2 * expected.std()


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
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
                their = reference_logits(directory, prompt, DTYPES16[dtype])
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
    ({"compute_unit": "CUDA:0,1"}, "names 2 GPUs, but this group has 1 rank"),
])
def test_what_is_not_there_is_refused(fields, missing):
    with pytest.raises(AllSparkError, match=missing):
        Driver(checkpoint("qwen2-gqa-tied"), **{**UNIT, **fields})


def test_a_cache_that_does_not_fit():
    with pytest.raises(AllSparkError, match="a cache of cache_memory"):
        Driver(checkpoint("qwen2-gqa-tied"), cache_memory=1 << 41, **UNIT)
