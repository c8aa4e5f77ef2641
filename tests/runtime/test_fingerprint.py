"""The fingerprint's contents, and independence of results from the process's floating-point modes."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from allspark_client.types import ModelInfo
from allspark_server import HuggingFaceModel, _native
from allspark_server.engine.fingerprint import fingerprint
from allspark_server.engine.prompt_images import ImageStage
from allspark_server.images import read_processor
from allspark_server.models.graph_elements import Op
from allspark_server.runtime import digest
from allspark_server.weights.checkpoint import model_hash, open_model
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.safetensors import SafetensorsFile
from support.driver import Driver
from support.record_golden import write_model

INFO = ModelInfo(name="m", ranks=2, weight_dtype="bfloat16", cache_dtype="bfloat16", span_size=32, model_hash="abc")


def test_it_is_the_same_for_the_same():
    assert fingerprint(INFO) == fingerprint(dataclasses.replace(INFO, name="another", num_spans=5))


@pytest.mark.parametrize("field, value", [("ranks", 3), ("weight_dtype", "int8"), ("weight_group_size", 64),
                                          ("quantize_head", False), ("cache_dtype", "int8"), ("span_size", 64),
                                          ("model_hash", "abd"), ("eos_token_ids", [7])])
def test_it_changes_with_what_the_model_is(field, value):
    assert fingerprint(dataclasses.replace(INFO, **{field: value})) != fingerprint(INFO)


def test_that_of_images_changes_with_how_they_are_prepared(tmp_path):
    seen = set()
    for more in ({}, {"max_pixels": 12_000}, {"image_mean": [0.4] * 3}, {"resample": 2}):
        settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2,
                    "temporal_patch_size": 2, "image_std": [0.5] * 3, "image_mean": [0.5] * 3, **more}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        processor = read_processor(tmp_path, {"model_type": "qwen2_vl", "image_token_id": 5, "vision_config": {}})
        for tokens in (100_000, 9):
            encoder = SimpleNamespace(most_tokens=tokens, vision=SimpleNamespace(together=False))
            seen.add(ImageStage(processor, encoder, True).fingerprint)
    assert len(seen) == 7       # within 9 tokens, both bounds are the same


def test_it_changes_with_what_kernels_compute(monkeypatch):
    before = fingerprint(INFO)
    for case, found in digest.result_digests().items():
        changed = {**digest.result_digests(), case: found[::-1]}
        with monkeypatch.context() as patch:
            patch.setattr(digest, "result_digests", lambda changed=changed: changed)
            assert fingerprint(INFO) != before, case


def test_it_changes_with_tokenizer_and_template(tmp_path):
    seen = set()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text("{}")
        seen.add(fingerprint(dataclasses.replace(INFO, tokenizer_dir=str(tmp_path))))
    assert len(seen) == 3  # not with what is no part of them
    (tmp_path / "chat_template.jinja").write_text("[]")
    assert fingerprint(dataclasses.replace(INFO, tokenizer_dir=str(tmp_path))) not in seen


def test_the_model_part_covers_ops_and_rotary_frequencies(tmp_path):
    directory = write_model("qwen2-yarn", tmp_path / "a")
    formats = {"x": WeightFormat("bfloat16", 0)}

    def opened():
        return open_model(str(directory), None)

    first = model_hash(opened(), formats, ["d"])
    assert model_hash(opened(), formats, ["d"]) == first
    assert model_hash(opened(), formats, ["e"]) != first
    assert model_hash(opened(), {"x": WeightFormat("int8", 0)}, ["d"]) != first
    model = opened()
    model.graph.ops[2] = Op(**{**model.graph.ops[2].__dict__, "attrs": {"eps": 1e-5}})
    assert model_hash(model, formats, ["d"]) != first
    model = opened()
    frequencies = model.graph.weights["rotary.inv_freq"]
    values = (np.nextafter(np.float32(frequencies.values[0]), np.float32(2)).item(), *frequencies.values[1:])
    model.graph.weights["rotary.inv_freq"] = dataclasses.replace(frequencies, values=values)
    assert model_hash(model, formats, ["d"]) != first
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert model_hash(opened(), formats, ["d"]) != first


def flip_a_sign(directory, name):
    """Changes one value in the middle of a tensor."""
    file = SafetensorsFile(directory / "model.safetensors")
    begin, end = file._entries[name]["data_offsets"]
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[file.header_bytes + begin + (end - begin) // 8 * 4 + 3] ^= 0x80
    (directory / "model.safetensors").write_bytes(data)


def loaded_hash(path, world=1, **fields):
    with Driver(path, world, engine_max_length=256, cache_memory=4 << 20, **fields) as driver:
        assert len({info.model_hash for info in driver.infos}) == 1
        return driver.info.model_hash


@pytest.mark.parametrize("world", [1, 2])
def test_the_model_part_covers_every_byte_that_is_loaded(tmp_path, world):
    directory = write_model("qwen3", tmp_path / "a")
    parts = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.k_norm", "mlp.up_proj",
             "mlp.down_proj", "post_attention_layernorm")
    names = ["model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.1.{part}.weight" for part in parts)]
    for fields in ({"weight_dtype": "bfloat16"}, {"weight_dtype": "int4", "weight_group_size": 32}):
        first = loaded_hash(directory, world, **fields)
        assert first == loaded_hash(directory, world, num_threads=3, **fields)
        for name in names:
            flip_a_sign(directory, name)
            assert loaded_hash(directory, world, **fields) != first, name
            flip_a_sign(directory, name)
        assert loaded_hash(directory, world, **fields) == first


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_model_part_covers_every_byte_of_a_serialized_model(tmp_path, world, quantized):
    directory, seen = write_model("qwen3", tmp_path / "a"), []
    for name in (None, "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        if name:
            flip_a_sign(directory, name)
        model = HuggingFaceModel(directory, "m")
        model.serialize_to_path(None, tmp_path, enable_quant=quantized, weight_only_quant=quantized)
        seen.append(loaded_hash(tmp_path / "m.asgraph", world))
        if name:
            flip_a_sign(directory, name)
    assert len(set(seen)) == 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets MXCSR")
@pytest.mark.parametrize("threads", [1, 2])
def test_flushing_denormals_in_the_process_changes_nothing(threads):
    """MXCSR belongs to the calling thread, and new threads inherit it."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    x, w = np.full((3, 64), 1e-25, np.float32), np.full((40, 64), 1e-15, np.float32)

    def multiply():
        executor = _native.Executor(num_threads=threads)
        matrix = executor.add_matrix(40, 64, "float32")
        executor.fill_matrix(matrix, w, "F32")
        return executor.multiply(matrix, x, 40)

    def flushed():
        environment = (ctypes.c_uint32 * 8)()  # fenv_t: MXCSR is its last word
        assert libm.fegetenv(environment) == 0
        environment[7] |= 0x8040  # FTZ and DAZ
        assert libm.fesetenv(environment) == 0
        result = multiply()
        assert libm.fegetenv(environment) == 0
        return result, environment[7]

    expected = multiply()
    assert 0 < expected.max() < 1e-37
    with ThreadPoolExecutor(1) as pool:
        found, modes = pool.submit(flushed).result()
    assert found.tobytes() == expected.tobytes()
    assert modes & 0x8040 == 0x8040, "the caller's own modes are gone"
