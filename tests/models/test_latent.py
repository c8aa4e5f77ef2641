"""Latent attention: DeepSeek-V2, V3, Kimi-K2 and GLM-4.7-Flash, against transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from allspark_client import AsCacheMode
from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models.config import read_config
from allspark_server.runtime.native import native_library
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits
from support.driver import Driver, together
from support.greedy import check_greedy_output
from support.quantized_checkpoints import DEEPSEEK, assert_equal, float8_blocks, recovered, scheme_pair, write_pair
from support.tiny_configs import INDEXED, LATENT

RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("name", LATENT)
def test_graph_describes_the_model(name):
    runner = model_runner(checkpoint(name))
    for length in (1, 7, 90):
        prompt = prompt_of(length)
        check_logits(logits_after(runner, prompt), reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name, world", [
    pytest.param(name, world, marks=() if world in (1, RANKS[1 + i % 3]) else pytest.mark.slow)
    for i, name in enumerate(LATENT) for world in RANKS])
def test_logits(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS:
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if i in (0, 2) else pytest.mark.slow)
                                  for i, name in enumerate(LATENT)])
def test_greedy_output(name, world):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        prompt = prompt_of(90, seed=1)
        check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


# -- the same bits -----------------------------------------------------------------------------------------------------
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]
slow = pytest.mark.slow


@pytest.mark.parametrize("name, form, group", [
    (name, *form) if (name, form[0]) in (("deepseek-v3-heads", "bfloat16"), ("glm4-moe-lite", "w8a8"))
    else pytest.param(name, *form, marks=slow) for name in LATENT for form in FORMATS])
def test_the_same_bits_alone_and_in_a_batch(name, form, group):
    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 270)]
    fields = {"weight_dtype": form, "weight_group_size": group, "engine_max_batch": 4, "max_step_tokens": 1024}
    with Driver(checkpoint(name), 1, **fields) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for chunk in (1 << 20, 37):
            for row, wanted in zip(together(driver, prompts, chunk), expected):
                np.testing.assert_array_equal(row, wanted)
        tokens, logits = driver.generate(prompts[2], 40)  # decode, and the same rows as a prompt
        again = driver.generate([*prompts[2], *tokens[:33]], 1, chunk=50)[1][0]
        np.testing.assert_array_equal(again, logits[33])
    with Driver(checkpoint(name), 1, **{**fields, "num_threads": 3}) as driver:
        for row, wanted in zip(together(driver, prompts, 50), expected):
            np.testing.assert_array_equal(row, wanted)


@slow
@pytest.mark.parametrize("form, group, tolerance", [
    ("bfloat16", 0, 0.15), ("int8", 0, 0.2), ("int4", 32, 1.2), ("w8a8", 0, 0.4), ("w4a8", 32, 1.2)])
@pytest.mark.parametrize("name", LATENT)
def test_weight_formats(name, form, group, tolerance):
    prompt = prompt_of(64)
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1,) if group else (1, 2):  # ranks would cut inside groups
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            _, logits = driver.generate(prompt, 1)
        assert np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std() < tolerance


@pytest.mark.parametrize("name, form, group", [
    (name, form, group) if (name, form) == ("deepseek-v3", "auto") else pytest.param(name, form, group, marks=slow)
    for name in LATENT for form, group in (("auto", 0), *FORMATS[2:])])
def test_serialized_and_reloaded(name, form, group, tmp_path):
    """The same bits from a checkpoint as from its .asgraph and .asparam, on 1 and 2 ranks."""
    source = checkpoint(name)
    options = {} if form == "auto" else {"enable_quant": True, "customized_quant_config": {
        "weight_format": "uint4" if "4" in form else "int8", "group_size": group,
        "compute_method": "activate_quant" if form.startswith("w") else "weight_only"}}
    HuggingFaceModel(source, "m").serialize_to_path(None, tmp_path, **options)
    prompt, fields = prompt_of(100), {"weight_dtype": form, "weight_group_size": group}
    for world in (1,) if group else (1, 2):
        with Driver(source, world, **fields) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])


# -- checkpoints as they are published, and what is refused ------------------------------------------------------------
def test_the_text_of_kimi(tmp_path):
    """The names and the nested fields of Kimi-K2.5; the tower is not loaded."""
    source, text = checkpoint("deepseek-v3"), json.loads((checkpoint("deepseek-v3") / "config.json").read_text())
    shutil.copy(source / "generation_config.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {},
        "text_config": {**text, "model_type": "kimi_k2"}}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file({**tensors, "vision_tower.patch_embed.proj.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    prompt = prompt_of(129)
    with Driver(tmp_path, 1) as driver:
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(source, prompt))


@pytest.mark.parametrize("name", ["fp8-deepseek-v3", "ct-packed-4-kimi"])
def test_checkpoints_as_they_are_published(name, tmp_path):
    """DeepSeek-V3's FP8 blocks (kv_b_proj too), and Kimi-K2.5's experts in int4 with the settings in text_config: the
    weights as their producer recovers them. The rest is in tests/weights.
    """
    quantized, twin = scheme_pair(tmp_path, name)
    if "kimi" in name:
        path, prefix = quantized / "config.json", "language_model."
        (quantized / "config.json").write_text(json.dumps({
            "architectures": ["KimiK25ForConditionalGeneration"], "text_config": json.loads(path.read_text())}))
        tensors = {prefix + key: value for key, value in load_file(quantized / "model.safetensors").items()}
        save_file(tensors, quantized / "model.safetensors")
    expected, _ = recovered(twin, 1, weight_dtype="float32")
    found, info = recovered(quantized, 2)
    assert_equal(found, expected)
    assert info.weight_dtype == ("e4m3" if "fp8" in name else "int4")


def test_a_quantized_kv_b_proj_of_another_shape_is_refused(tmp_path):
    quantized, _ = scheme_pair(tmp_path, "fp8-deepseek-v3")
    file, name = quantized / "model.safetensors", "model.layers.1.self_attn.kv_b_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][:-128].contiguous()}, file)
    with pytest.raises(AllSparkError, match=rf"tensor '{name}' .* shape \[264, 144\]: expected \[392, 144\]"):
        Driver(quantized, 1)
    save_file({key: value for key, value in tensors.items() if key != f"{name}_scale_inv"}, file)
    with pytest.raises(AllSparkError, match=rf"tensor '{name}' .* has type F8_E4M3"):
        Driver(quantized, 1)


# -- indexers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fields, problem", [
    ({"index_topk": 0}, "'index_topk' .*is 0"),
    ({"index_head_dim": 7}, r"'index_head_dim' .*is 7: it must be at least qk_rope_head_dim \(8\)"),
    ({"q_lora_rank": None}, "'q_lora_rank' .*is missing"),
    ({"indexer_types": ["shared", "full", "full"]}, "'indexer_types' .*must hold 'full' or 'shared'"),
    ({"indexer_types": None, "index_topk_pattern": "FX"}, "'indexer_types' .*must hold 'full' or 'shared'"),
])
def test_fields_of_an_indexer_that_are_refused(fields, problem, tmp_path):
    config = json.loads((checkpoint("deepseek-v32") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(AllSparkError, match=problem):
        read_config(tmp_path)


def test_fp8_blocks_of_a_model_with_an_indexer(tmp_path):
    """As DeepSeek-V3.2 is published."""
    sizes = {"index_n_heads": 13, "index_head_dim": 24, "index_topk": 50}
    spec = replace(DEEPSEEK, family="deepseek_v32", fields=DEEPSEEK.fields | sizes)
    quantized, twin = write_pair(tmp_path, spec, *float8_blocks(128, 128), seed=5)
    expected, _ = recovered(twin, 1, weight_dtype="float32")
    found, info = recovered(quantized, 2)
    assert_equal(found, expected)
    assert info.weight_dtype == "e4m3" and any("indexer.wq_b" in name for name in found)


def test_layers_that_share_a_selection(tmp_path):
    config = json.loads((checkpoint("glm-moe-dsa") / "config.json").read_text())
    for fields, shared in (({"indexer_types": ["full", "shared", "full"]}, (1,)),
                           ({"index_topk_pattern": "FSS"}, (1, 2)),
                           ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (1,)), ({}, ())):
        (tmp_path / "config.json").write_text(json.dumps({**config, "indexer_types": None, **fields}))
        assert read_config(tmp_path).latent.indexer.shared == shared


# -- the cache in int8 -------------------------------------------------------------------------------------------------
INT8 = {"cache_mode": AsCacheMode.AsCacheQuantI8}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "deepseek-v3" else slow) for name in LATENT])
def test_an_int8_cache(name):
    """Close to the reference, and the same bits in chunks, in a batch and in decode. A row has scales for the latent,
    and for the rotated key.
    """
    prompts = [prompt_of(n, seed=9) for n in (1, 40, 270)]
    with Driver(checkpoint(name), 1, **INT8, engine_max_batch=4, max_step_tokens=1024) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for row, wanted in zip(together(driver, prompts, 37), expected):
            np.testing.assert_array_equal(row, wanted)
        tokens, logits = driver.generate(prompts[1], 40)
        again = driver.generate([*prompts[1], *tokens[:33]], 1, chunk=50)[1][0]
        np.testing.assert_array_equal(again, logits[33])
    reference = reference_logits(checkpoint(name), prompts[2])
    for world in (1, 2):
        with Driver(checkpoint(name), world, **INT8) as driver:
            error = driver.generate(prompts[2], 1)[1][0] - reference
        # An indexer's keys are rounded, too, so it selects some other positions.
        assert np.sqrt(np.mean(error ** 2)) / reference.std() < (0.2 if name in INDEXED else 0.05)


def test_bytes_of_an_int8_cache():
    """Of DeepSeek-V3's row: 576 values, and two scales with minima."""
    rows = {dtype: native_library().latent_span_bytes(128, 512, 64, dtype) / 128
            for dtype in ("float32", "bfloat16", "int8")}
    assert rows == {"float32": 2304, "bfloat16": 1152, "int8": 592}


def test_a_latent_cache_of_4_bits_is_refused():
    with pytest.raises(AllSparkError, match="'uint4' is not available for latent attention: expected float32 or "
                                            "bfloat16 or int8"):
        Driver(checkpoint("deepseek-v3"), 1, cache_mode=AsCacheMode.AsCacheQuantU4)
