"""Experts in MXFP4 on the GPU: the bits of the same experts recovered in bfloat16, with every kernel and number of
rows; a checkpoint of gpt-oss' form on one rank and two, serialized, and against the CPU backend, which tests/models
compares with transformers.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client import AsModelConfig, ClientEngine
from allspark_client.errors import AllSparkError
from allspark_launch.group.background import background_group
from allspark_server import HuggingFaceModel
from allspark_server.runtime.device import SHARED_GPUS
from support.checkpoints import prompt_of
from support.driver import Driver, together
from support.gpu_toys import SEED, executor
from support.mxfp4_checkpoint import E2M1, mxfp4_pair, mxfp4_tensors, write
from support.quantized_checkpoints import recovered

pytestmark = pytest.mark.cuda
UNIT = {"compute_unit": "CUDA:0"}
PARTS = ((0, 1), (3, 1), (7, 2), (0, 3), (1, 8), (2, 9), (5, 16), (4, 17), (0, 32), (9, 33), (1, 61), (20, 65),
         (100, 128), (11, 190), (0, 301))  # first row, and how many
KERNELS = [("any", 0), *(("mma", rows) for rows in (8, 16, 32, 64)),
           *(("any", rows) for rows in (8, 16, 32, 48, 64, 128))]


@pytest.fixture(autouse=True)
def shared(monkeypatch, tmp_path):
    monkeypatch.setenv(SHARED_GPUS, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_rows(rng, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and scales as a checkpoint has them, and float32 values. Scales reach from the least to the greatest."""
    blocks = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    scales = rng.integers(118, 127, (rows, columns // 32)).astype(np.uint8)
    scales[0, 0], scales[-1, -1] = 0, 128
    quants = np.stack([blocks & 15, blocks >> 4], 2).reshape(rows, columns)
    powers = 2.0 ** (np.repeat(scales, 32, 1).astype(float) - 127)
    return blocks, scales, (E2M1[quants] * powers).astype(np.float32)


@pytest.mark.parametrize("n, k", [(1, 32), (41, 96), (64, 64), (130, 288), (96, 768), (200, 1120), (1536, 160),
                                  (320, 2880)])
def test_products_have_the_bits_of_recovered_weights(n, k):
    """With experts without rows, and with all rows on a few."""
    experts, top, rng, found = 9, 3, np.random.default_rng(SEED), executor()
    blocks, scales, values = random_rows(rng, experts * n, k)
    ours = found.add_matrix(experts * n, k, "mxfp4", 32, experts)
    plain = found.add_matrix(experts * n, k, "bfloat16", 0, experts)
    cut = (experts - 1) * n // 2
    assert found.fill_mx(ours, blocks[:cut], scales[:cut]) == found.fill_mx(ours, blocks[cut:], scales[cut:], cut) == 0
    np.testing.assert_array_equal(found.read_rows(ours), values)
    found.fill_rows(plain, [values], "F32")
    x = rng.normal(size=(301, k)).astype(np.float32)
    chosen = {"even": np.stack([np.sort(rng.permutation(experts)[:top]) for _ in x]).astype(np.int32),
              "few": np.tile(np.sort(rng.permutation(experts)[:top]), (len(x), 1)).astype(np.int32)}
    for kind, choice in chosen.items():
        every = found.multiply_experts(plain, x, choice)
        for first, rows in PARTS:
            one = slice(first, first + rows)
            for algo, height in KERNELS if found.capability == 90 else KERNELS[:5]:
                part = found.multiply_experts(ours, x[one], choice[one], algo, height)
                assert part.tobytes() == every[one].tobytes(), (kind, first, rows, algo, height)


def test_slices_of_rows():
    """Columns from a whole block on, of rows that are views with others between them."""
    rng, found = np.random.default_rng(SEED), executor()
    blocks, scales, values = random_rows(rng, 44, 320)
    handle = found.add_matrix(22, 224, "mxfp4", 32, 2)
    assert found.fill_mx(handle, blocks[1::2], scales[1::2], column=96) == 0
    np.testing.assert_array_equal(found.read_rows(handle), values[1::2, 96:])
    with pytest.raises(ValueError, match="from column 16 on"):
        found.fill_mx(handle, blocks[1::2], scales[1::2], column=16)
    with pytest.raises(ValueError, match=r"scales must be \[22, 10\]"):
        found.fill_mx(handle, blocks[1::2], scales[1::2, :-1])


def test_scales_that_are_counted():
    """Those above 2, and NaN."""
    rng, found = np.random.default_rng(SEED), executor()
    blocks, scales, _ = random_rows(rng, 20, 64)
    scales[3, 0], scales[7, 1], scales[8, 1] = 255, 129, 128
    assert found.fill_mx(found.add_matrix(20, 64, "mxfp4", 32), blocks, scales) == 2


def test_other_matrices_are_refused():
    found = executor()
    for args, problem in (((20, 64, "mxfp4", 64), "groups of 32"), ((20, 48, "mxfp4", 32), "rows of 48 columns")):
        with pytest.raises(ValueError, match=problem):
            found.add_matrix(*args)
    handle = found.add_matrix(20, 64, "mxfp4", 32)
    with pytest.raises(ValueError, match="come from a checkpoint in MXFP4"):
        found.fill_rows(handle, [np.zeros((20, 64), np.float32)], "F32")
    with pytest.raises(ValueError, match="for experts only"):
        found.multiply(handle, np.zeros((1, 64), np.float32), 20)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return mxfp4_pair(tmp_path_factory.mktemp("mxfp4"))


def formats_of(driver) -> set[str]:
    return {form.dtype for name, form in driver.runners[0]._model.formats.items() if "experts" in name}


def test_a_model_has_the_bits_of_recovered_experts(pair, tmp_path):
    """Decoding alone, which has kernels of its own, prompts, and several sequences; serialized, too."""
    HuggingFaceModel(pair[0], "m").serialize_to_path(None, tmp_path)
    found = []
    for directory, dtype in ((pair[0], "bfloat16"), (pair[0], "auto"), (pair[0], "mxfp4"),
                             (tmp_path / "m.asgraph", "auto")):
        with Driver(directory, weight_dtype=dtype, engine_max_batch=8, **UNIT) as gpu:
            assert formats_of(gpu) == {"bfloat16" if dtype == "bfloat16" else "mxfp4"}
            results = [gpu.generate(prompt_of(length), 5, chunk)
                       for length, chunk in ((1, None), (37, None), (300, 61))]
            results += [together(gpu, [prompt_of(n) for n in (3, 40, 129, 1, 17, 64)], 7)]
        found.append(results)
    expected, *others = found
    for results in others:
        for (ids, logits), (other_ids, other_logits) in zip(expected[:3], results[:3]):
            assert ids == other_ids
            np.testing.assert_array_equal(logits, other_logits)
        np.testing.assert_array_equal(expected[3], results[3])


def test_logits_are_those_of_the_cpu_backend(pair):
    """Of short prompts, and in most: rounded to bfloat16, a row now and then goes to another expert."""
    prompts = [prompt_of(1 + i % 3, seed=i) for i in range(24)]
    with Driver(pair[0], **UNIT) as gpu, Driver(pair[1]) as cpu:
        found, expected = ([one.generate(prompt, 1)[1][0] for prompt in prompts] for one in (gpu, cpu))
    errors = [np.sqrt(np.mean((a - b) ** 2)) / b.std() for a, b in zip(found, expected)]
    print(errors)
    assert np.median(errors) < 0.05, errors


@pytest.mark.parametrize("world", [2, 3])
def test_weights_of_ranks(pair, world):
    """Two ranks have slices of all experts, three have whole ones; nothing is computed here."""
    unit = {"compute_unit": "CUDA:" + ",".join(["0"] * world), "cache_memory": 64 << 20}
    ours, plain = (recovered(pair[0], world, weight_dtype=dtype, **unit)[0] for dtype in ("mxfp4", "bfloat16"))
    for name in ours:
        np.testing.assert_array_equal(ours[name], plain[name], err_msg=name)


def test_two_ranks_have_the_bits_of_recovered_experts(pair):
    """As processes, which may share a GPU."""
    found = []
    for dtype in ("auto", "bfloat16"):
        with background_group(["--gpus", "0,0"], timeout=120) as group, ClientEngine(group.addresses[0]) as engine:
            engine.install_model(AsModelConfig(model_name="m", model_path=str(pair[0]), engine_max_length=512,
                                               cache_memory=64 << 20, weight_dtype=dtype, compute_unit="CUDA:0,0"))
            engine.start_model("m")
            asked = [engine.start_request("m", {"input_ids": prompt_of(n)}, {
                "max_new_tokens": 12, "eos_token_id": -1, "logprobs": True, "do_sample": False})[2] for n in (1, 90)]
            answers = []
            for queue in asked:
                ids, logprobs = [], []
                for elements in queue:
                    ids += elements.ids_from_generate
                    logprobs += elements.token_logprobs_list
                answers.append((ids, logprobs))
            found.append(answers)
    assert found[0] == found[1]
    assert [len(ids) for ids, _ in found[0]] == [12, 12]


def test_scales_above_two_are_refused_by_name(pair, tmp_path):
    tensors, _ = mxfp4_tensors()
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1][2, 3, 1] = 130
    directory = write(tmp_path / "changed", tensors, json.loads((pair[0] / "config.json").read_text()))
    with pytest.raises(AllSparkError, match="down_proj_blocks.*holds 1 scales that are above 2.*'bfloat16'"):
        Driver(directory, **UNIT)
    with Driver(directory, weight_dtype="bfloat16", **UNIT) as gpu:
        assert formats_of(gpu) == {"bfloat16"}
