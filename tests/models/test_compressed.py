"""Attention over compressed positions and residual streams: DeepSeek-V4, against transformers, and the same bits in
every batch and however a history is cut.

By default only a part runs; -m "slow or not slow" runs all.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.deepseek_v4")

from safetensors.numpy import load_file as load_numpy, save_file as save_numpy
from safetensors.torch import load_file, save_file

from allspark_client import AsCacheMode, AsModelConfig
from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.cache.host_cache import CopyCosts
from allspark_server.models.cache_groups import MAX_GROUPS, CacheGroup, place_rows
from allspark_server.models.config import read_config
from allspark_server.models.eagle import with_joined_layers
from allspark_server.runtime.host_cache import HEADER
from allspark_server.weights.checkpoint import open_model
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits, write_checkpoint
from support.driver import Driver, together
from support.greedy import check_greedy_output
from support.quantized_checkpoints import FP4, assert_equal, e4m3_values, pack_pairs, recovered, write_safetensors
from support.tiny_configs import COMPRESSED

slow = pytest.mark.slow
RANKS = (1, 2, 3, 4)
NAMES = tuple(COMPRESSED)


# -- against transformers ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_graph_describes_the_model(name):
    runner = model_runner(checkpoint(name))
    for length in (1, 7, 90):
        prompt = prompt_of(length)
        check_logits(logits_after(runner, prompt), reference_logits(checkpoint(name), prompt))


def can_divide(name: str, world: int) -> bool:
    return COMPRESSED[name].fields["o_groups"] >= world


@pytest.mark.parametrize("name, world", [
    pytest.param(name, world, marks=() if world in (1, 3) else slow) for name in NAMES for world in RANKS
    if can_divide(name, world)])
def test_logits(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS:
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name, world", [
    pytest.param(name, world, marks=() if world == 1 else slow) for name in NAMES for world in RANKS
    if can_divide(name, world)])
def test_greedy_output(name, world):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        for length in (1, 90):
            prompt = prompt_of(length, seed=1)
            check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


def test_more_ranks_than_groups_of_heads_are_refused():
    with pytest.raises(AllSparkError, match="among 4 ranks: it has 3 groups of heads of the output projection"):
        Driver(checkpoint("deepseek-v4"), 4)


# -- the same bits -----------------------------------------------------------------------------------------------------
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]


@pytest.mark.parametrize("name, form, group", [
    (name, *form) if (name, form[0]) in (("deepseek-v4", "bfloat16"), ("deepseek-v4-wide", "w8a8"))
    else pytest.param(name, *form, marks=slow) for name in NAMES for form in FORMATS])
def test_the_same_bits_alone_and_in_a_batch(name, form, group):
    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 270)]
    fields = {"weight_dtype": form, "weight_group_size": group, "engine_max_batch": 4, "max_step_tokens": 1024}
    with Driver(checkpoint(name), 1, **fields) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for chunk in (1 << 20, 37):
            for row, wanted in zip(together(driver, prompts, chunk), expected):
                np.testing.assert_array_equal(row, wanted)
    with Driver(checkpoint(name), 1, **{**fields, "num_threads": 3}) as driver:
        for row, wanted in zip(together(driver, prompts, 50), expected):
            np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_may_be_cut_at_every_offset(name):
    """Token by token, and computed again from the beginning, as after a preemption or on another server: at every
    offset in the positions of an entry and in a span.
    """
    with Driver(checkpoint(name), 1) as driver:
        prompt = prompt_of(60, seed=2)
        tokens, logits = driver.generate(prompt, 72)
        for offset in range(72):
            again = driver.generate([*prompt, *tokens[:offset]], 1, chunk=50)[1][0]
            np.testing.assert_array_equal(again, logits[offset])


@pytest.mark.parametrize("name", ["deepseek-v4-wide", "glm5-next-wide"])
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_any_size_of_spans_gives_the_same_bits(cache, name):
    prompt, found = prompt_of(300, seed=4), []
    for size in (16, 32, 128):
        with Driver(checkpoint(name), 1, cache_span_size=size, cache_dtype=cache) as driver:
            found.append([row.tobytes() for row in driver.generate(prompt, 3, chunk=70)[1]])
    assert found[0] == found[1] == found[2]


GREEDY = {"max_new_tokens": 60, "eos_token_id": -1, "do_sample": False}


@contextlib.contextmanager
def answering(engine, name, model, **fields):
    """A function that answers a prompt greedily, with a model in an engine; and the engine's statistics."""
    engine.install_model(AsModelConfig(model_name=name, model_path=str(checkpoint(model)), num_threads=2,
                                       engine_max_batch=2, engine_max_length=900, **fields))
    engine.start_model(name)

    def answer(prompt):
        _, _, results = engine.start_request(name, {"input_ids": prompt}, GREEDY)
        return [i for part in results for i in part.ids_from_generate]

    yield answer, lambda: engine.get_as_engine_stat(name)
    engine.release_model(name)


@pytest.mark.parametrize("model", ["deepseek-v4", "glm5-next"])
def test_drafts_and_spans_of_the_host_cache(model, engine_of, monkeypatch):
    """Answers do not change: with drafts that are accepted or not, and where a prompt's beginning was evicted."""
    monkeypatch.setattr(CopyCosts, "worthwhile", lambda self: True)
    engine, repeated = engine_of("engine"), prompt_of(40, seed=1) * 6
    prompts = [repeated, prompt_of(333, seed=2), [*repeated, *prompt_of(30, seed=3)]]
    with answering(engine, "plain", model, enable_prefix_cache=False) as (answer, _):
        expected = [answer(prompt) for prompt in prompts]
    with answering(engine, "drafts", model, speculation="prompt_lookup", enable_prefix_cache=True) as (answer, stat):
        assert [answer(prompt) for prompt in prompts] == expected
        assert stat().prefix_cache_hit_token > 0
        info = engine.get_model_info("drafts")
    span = info.cache_bytes // info.num_spans
    fields = {"cache_memory": span * 170, "host_cache_memory": (span + 96) * 900 + 2 * HEADER}
    with answering(engine, "host", model, enable_prefix_cache=True, **fields) as (answer, stat):
        assert [answer(prompt) for prompt in prompts] == expected
        for seed in range(5):
            answer(prompt_of(600, seed=seed))
        assert [answer(prompt) for prompt in prompts] == expected
        assert stat().prefix_cache_host_token > 0


@slow
@pytest.mark.parametrize("form, group, tolerance", [
    ("bfloat16", 0, 0.15), ("int8", 0, 0.2), ("int4", 32, 1.2), ("w8a8", 0, 0.4), ("w4a8", 32, 1.2)])
@pytest.mark.parametrize("name", NAMES)
def test_weight_formats(name, form, group, tolerance):
    prompt = prompt_of(64)
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1,) if group else (1, 2):  # ranks would cut inside groups
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            _, logits = driver.generate(prompt, 1)
        assert np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std() < tolerance


@pytest.mark.parametrize("name, form, group", [
    (name, form, group) if (name, form) == ("deepseek-v4", "auto") else pytest.param(name, form, group, marks=slow)
    for name in NAMES for form, group in (("auto", 0), *FORMATS[2:])])
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


# -- config.json and names, as they are published ----------------------------------------------------------------------
def test_a_checkpoint_with_the_names_and_fields_of_published_ones(tmp_path):
    """DeepSeek-V4-Flash has no prefix `model.`, a flat rotary embedding, ratios for kinds of layers, and a draft head,
    which is not read.
    """
    source = checkpoint("deepseek-v4")
    config = json.loads((source / "config.json").read_text())
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rope = config.pop("rope_parameters")
    config["rope_scaling"] = {"type": "yarn", **{name: rope["compress"][name] for name in (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}}
    config |= {"compress_ratios": [ratios[kind] for kind in config.pop("layer_types")] + [0], "num_hash_layers": 2,
               "compress_rate_hca": 10}
    for name in ("mlp_layer_types", "compress_rates", "partial_rotary_factor"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "generation_config.json", tmp_path)
    tensors = {"mtp.0.norm.weight": torch.ones(3)}
    for name, tensor in load_file(source / "model.safetensors").items():
        name = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
        tensors[name.replace("embed_tokens.", "embed.")] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_config(tmp_path) == read_config(source)
    prompt = prompt_of(129)
    with Driver(tmp_path, 1) as driver:
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(source, prompt))


PUBLISHED = replace(COMPRESSED["deepseek-v4"], fields={
    **COMPRESSED["deepseek-v4"].fields, "hidden_size": 192, "moe_intermediate_size": 160, "q_lora_rank": 160,
    "o_lora_rank": 64, "head_dim": 64})


def published_pair(root):
    """A random checkpoint as DeepSeek-V4-Flash is published: FP8 in blocks, experts in MXFP4, scales that are powers of
    two; and its twin with recovered weights.
    """
    twin = write_checkpoint(root / "twin", PUBLISHED, seed=3)
    path, rng, stored = twin / "model.safetensors", np.random.default_rng(3), {}
    plain = load_numpy(path)
    values, powers = e4m3_values(), lambda exponents: np.ldexp(np.float32(1), exponents.astype(int) - 127)
    for name, tensor in list(plain.items()):
        module = name.removesuffix(".weight")
        if not re.search(r"\.experts\.\d+\.w|\.shared_experts\.w|\.attn\.w|\.indexer\.wq_b", name):
            stored[name] = tensor
            continue
        n, k = tensor.shape
        if ".experts." in name and ".shared" not in name:
            quants, scales = rng.integers(0, 16, (n, k)).astype(np.uint8), rng.integers(118, 123, (n, k // 32))
            stored[name] = pack_pairs(quants).view(np.int8)
            plain[name] = np.repeat(powers(scales), 32, 1) * FP4[quants]
        else:
            quants = rng.integers(0, 256, (n, k)).astype(np.uint8)
            quants = np.where((quants & 0x7F) == 0x7F, 0x38, quants).astype(np.uint8)
            scales = rng.integers(115, 118, (-(-n // 128), -(-k // 128)))
            stored[name] = "F8_E4M3", quants
            plain[name] = np.repeat(np.repeat(powers(scales), 128, 0)[:n], 128, 1)[:, :k] * values[quants]
        stored[f"{module}.scale"] = "F8_E8M0", scales.astype(np.uint8)
    save_numpy({name: np.ascontiguousarray(tensor) for name, tensor in plain.items()}, path, {"format": "pt"})
    quantized = root / "quantized"
    quantized.mkdir()
    config = json.loads((twin / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "expert_dtype": "fp4", "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic"}}))
    shutil.copy(twin / "generation_config.json", quantized)
    write_safetensors(quantized / "model.safetensors", stored)
    return quantized, twin


def test_the_formats_of_published_checkpoints(tmp_path):
    """The weights as they are stored; logits are those of the twin; bits do not depend on chunks."""
    quantized, twin = published_pair(tmp_path)
    expected, _ = recovered(twin, 1)
    for world in (1, 2):
        found, info = recovered(quantized, world)
        assert_equal(found, expected)
    assert info.weight_dtype == "e2m1"
    prompt = prompt_of(140)
    with Driver(quantized, 1) as driver:
        logits = driver.generate(prompt, 1)[1][0]
        check_logits(logits, reference_logits(twin, prompt))
        np.testing.assert_array_equal(driver.generate(prompt, 1, chunk=29)[1][0], logits)
    with Driver(quantized, 2) as driver:
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(twin, prompt))


@pytest.mark.parametrize("suffix, problem", [
    (".ffn.experts.1.w2.scale", "holds scales that are NaN"), (".attn.wo_a.scale", "holds scales that are NaN")])
def test_scales_that_are_no_numbers_are_refused(suffix, problem, tmp_path):
    quantized, _ = published_pair(tmp_path)
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(suffix))
    tensors[name].view(torch.uint8)[0, 0] = 255
    save_file(tensors, file)
    with pytest.raises(AllSparkError, match=rf"tensor '{name}' in .* {problem}"):
        Driver(quantized, 1)


@pytest.mark.parametrize("fields, problem", [
    ({"o_groups": 4}, r"'o_groups' .*is 4: it must divide num_attention_heads \(6\)"),
    ({"index_topk": 0}, "'index_topk' .*is 0"),
    ({"index_head_dim": 7}, r"'index_head_dim' .*is 7: it must be at least the rotated features \(8\)"),
    ({"scoring_func": "softmax"}, "'scoring_func' .*is 'softmax': only 'sqrtsoftplus' is served"),
    ({"n_shared_experts": 2}, "'n_shared_experts' .*is 2: only 1 is served"),
    ({"attention_bias": True}, "'attention_bias' .*is True: only False is served"),
    ({"layer_types": ["full_attention"] * 5}, "'layer_types' .*must hold sliding_attention, compressed_"),
    ({"compress_rates": {"compressed_sparse_attention": 1}}, "'compress_rates' .*has 1 for compressed_"),
    ({"mlp_layer_types": ["moe"]}, "'mlp_layer_types' .*must hold 'hash_moe' or 'moe' for each of 5 layers"),
    ({"mlp_layer_types": None, "num_hash_layers": -1}, "'num_hash_layers' .*is -1: it must not be negative"),
    ({"layer_types": None, "compress_ratios": [[4]] * 5}, "'layer_types' .*or compress_ratios 0, 4 or 128"),
    ({"rope_parameters": {"main": 3, "compress": {}}}, "'rope_parameters.main' .*is 3: expected dict"),
    ({"rope_parameters": None, "rope_theta": 0}, "'rope_theta' .*is 0.0: it must be positive"),
])
def test_fields_that_are_refused(fields, problem, tmp_path):
    config = json.loads((checkpoint("deepseek-v4") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(AllSparkError, match=problem):
        read_config(tmp_path)


@pytest.mark.parametrize("mode", [AsCacheMode.AsCacheQuantI8, AsCacheMode.AsCacheQuantU4])
def test_a_quantized_cache_is_refused(mode):
    with pytest.raises(AllSparkError, match="not available for attention over compressed positions: expected float32 "
                                            "or bfloat16"):
        Driver(checkpoint("deepseek-v4"), 1, cache_mode=mode)


def test_a_draft_model_is_refused():
    source = str(checkpoint("deepseek-v4"))
    with pytest.raises(AllSparkError, match="'draft' is not available with DeepseekV4ForCausalLM"):
        Driver(source, 1, speculation="draft", draft_model=source)


def test_an_eagle_head_is_refused():
    with pytest.raises(AllSparkError, match="not served for DeepseekV4ForCausalLM: it has several residual streams"):
        with_joined_layers(open_model(str(checkpoint("deepseek-v4"))).graph, (1, 2, 3))


# -- the cache ---------------------------------------------------------------------------------------------------------
def test_the_cache_groups_of_the_published_shape():
    """43 layers: two with a window alone, then pairs with entries of 4 and of 128 positions. All that is kept of every
    position lies in one group, and the others have at most about twice its room.
    """
    rows = {(layer, "kept"): (128, 1024) for layer in range(43)}
    for layer in range(2, 43):
        rate, parts = (4, 2) if layer % 2 == 0 else (128, 1)
        for kind, dim in (("compressor", 512), ("indexer", 128))[:parts]:
            rows[layer, f"{kind} rows"] = parts * rate, 8 * parts * dim
            rows[layer, kind] = 0, 2 * dim / rate
    groups, places = place_rows(rows)
    assert len(groups) <= MAX_GROUPS and len(set(places.values())) == len(rows)
    assert groups[0] == CacheGroup() and all(group.window in (8, 128) for group in groups[1:])
    room = dict.fromkeys(range(len(groups)), 0.0)
    for key, (group, _) in places.items():
        assert groups[group].window == rows[key][0]
        room[group] += rows[key][1]
    assert max(room.values()) < 2.5 * room[0]


def test_bytes_of_a_span():
    """Rows that entries are made of are float32; entries have the cache's type."""
    config = read_config(checkpoint("deepseek-v4"))
    graph = open_model(str(checkpoint("deepseek-v4"))).graph
    assert [group.kind for group in graph.cache_groups] == ["full"] + ["sliding"] * (len(graph.cache_groups) - 1)
    with Driver(checkpoint("deepseek-v4"), 1) as driver:
        model = driver.runners[0]._shard
        layers = [op.attrs for op in graph.ops if op.type == "compress"]
        assert len(layers) == 6 and {attrs["rate"] for attrs in layers} == {4, 10}
        size = 32 * 4 * 32 * 5  # of the largest: 160 features of a position, the rows of a compressor that overlaps
        assert config.compressed.overlapping == (1, 3) and model.span_bytes(driver.runners[0]._device) >= size
