"""Families with states (Qwen3-Next, Qwen3.5 and 3.6, LFM2, Nemotron-H, Granite 4, Bamba, Falcon-H1, Kimi Linear,
GLM-5.3-Flash) against transformers, and their properties: the same bits in every batch and however a history is cut,
checkpoints of states in the prefix cache and its host tier.

By default only a part runs; -m "slow or not slow" runs all.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import safetensors.torch

pytest.importorskip("transformers.models.qwen3_5_moe")

from allspark_client import AsCacheMode, AsModelConfig
from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.cache.host_cache import CopyCosts
from allspark_server.models import read_config
from allspark_server.runtime.host_cache import HEADER
from allspark_server.weights.checkpoint import open_model
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits
from support.driver import Driver, together
from support.greedy import check_greedy_output
from support.tiny_configs import RECURRENT

slow = pytest.mark.slow
FIRST = ("qwen3-next", "qwen3-5-moe", "kimi-linear", "glm5-next")
some = [name if name in FIRST else pytest.param(name, marks=slow) for name in RECURRENT]


# -- against transformers ----------------------------------------------------------------------------------------------
@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECURRENT)
def test_graph_describes_the_model(name, world):
    runner = model_runner(checkpoint(name), world)
    for length in (1, 7, 300) if world == 1 else (33,):
        prompt = prompt_of(length)
        check_logits(logits_after(runner, prompt), reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name", RECURRENT)
def test_logits(name):
    """Also one off a chunk of the gated delta rule, and through several."""
    with Driver(checkpoint(name), 1) as driver:
        for length in (1, 33, 63, 65, 300):
            prompt = prompt_of(length)
            check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECURRENT)
def test_logits_of_all_lengths(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in (*PROMPT_LENGTHS, 127, 128):
            prompt = prompt_of(length)
            check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name", some)
def test_ranks(name):
    prompt = prompt_of(129)
    with Driver(checkpoint(name), 3) as driver:
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECURRENT)
def test_greedy_output(name, world):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        for length in (1, 90):
            prompt = prompt_of(length, seed=1)
            check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


# -- bits --------------------------------------------------------------------------------------------------------------
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]


@pytest.mark.parametrize("name, form, group", [
    (name, *form) if (name, form[0]) in (("qwen3-next", "float32"), ("qwen3-5-moe", "w8a8"))
    else pytest.param(name, *form, marks=slow) for name in RECURRENT for form in FORMATS])
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


@pytest.mark.parametrize("name", some)
def test_a_history_may_be_cut_at_every_offset_of_a_chunk(name):
    """Token by token, and computed again from the beginning, as after a preemption or on another server."""
    with Driver(checkpoint(name), 1) as driver:
        prompt = prompt_of(60, seed=2)
        tokens, logits = driver.generate(prompt, 72)
        for offset in range(72):
            again = driver.generate([*prompt, *tokens[:offset]], 1, chunk=50)[1][0]
            np.testing.assert_array_equal(again, logits[offset])


@slow
@pytest.mark.parametrize("form, group, tolerance", [
    ("bfloat16", 0, 0.15), ("int8", 0, 0.2), ("int4", 32, 1.2), ("w8a8", 0, 0.4), ("w4a8", 32, 1.2)])
@pytest.mark.parametrize("name", RECURRENT)
def test_weight_formats(name, form, group, tolerance):
    prompt = prompt_of(64)
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1,) if group else (1, 2):  # ranks would cut inside groups
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            _, logits = driver.generate(prompt, 1)
        assert np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std() < tolerance


@pytest.mark.parametrize("name, form, group", [
    (name, form, group) if (name, form) == ("qwen3-next", "auto") else pytest.param(name, form, group, marks=slow)
    for name in RECURRENT for form, group in (("auto", 0), *FORMATS[2:])])
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


# -- checkpoints of states in the prefix cache -------------------------------------------------------------------------
NEW = 70
GREEDY = {"max_new_tokens": NEW, "eos_token_id": -1, "do_sample": False}


class Chats:
    """A model in an engine, and what it answers without a prefix cache."""

    def __init__(self, engine, name, **fields):
        self.engine, self.name = engine, name
        engine.install_model(AsModelConfig(
            model_name=name, model_path=str(checkpoint("qwen3-next")), num_threads=2, engine_max_batch=4,
            engine_max_length=1500, cache_span_size=32, **{"enable_prefix_cache": True, **fields}))
        engine.start_model(name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.release_model(self.name)

    def ask(self, prompt, **config):
        """The answer, and how many of the prompt's tokens came from the cache."""
        before = self.engine.get_as_engine_stat(self.name).prefix_cache_hit_token
        _, _, results = self.engine.start_request(self.name, {"input_ids": prompt}, {**GREEDY, **config})
        ids = [i for part in results for i in part.ids_from_generate]
        return ids, self.engine.get_as_engine_stat(self.name).prefix_cache_hit_token - before

    @property
    def restored(self):
        return self.engine.get_as_engine_stat(self.name).prefix_cache_host_token


def conversation(chats):
    """Three turns, a fork of the first, and the whole again: prompts, answers, and hits."""
    turns, history = [], prompt_of(300, seed=8)
    for turn in range(3):
        answer, hit = chats.ask(history)
        turns.append((history, answer, hit))
        history = [*history, *answer, *prompt_of(40, seed=turn)]
    fork = [*turns[0][0], *turns[0][1][:30], *prompt_of(25, seed=77)]
    turns.append((fork, *chats.ask(fork)))
    turns.append((turns[2][0], *chats.ask(turns[2][0])))
    return turns


@pytest.fixture(scope="module")
def plain(engine_of):
    with Chats(engine_of("engine"), "plain", enable_prefix_cache=False) as chats:
        return [answer for _, answer, _ in conversation(chats)]


@pytest.mark.parametrize("where, speculation", [("engine", "off"), ("engine", "prompt_lookup"), ("client-2", "off")])
def test_the_next_turn_of_a_chat_finds_the_state(where, speculation, engine_of, plain):
    with Chats(engine_of(where), f"chats-{where}-{speculation}", speculation=speculation) as chats:
        turns = conversation(chats)
    assert [answer for _, answer, _ in turns] == plain
    lengths = [len(prompt) for prompt, *_ in turns]
    hits = [hit for *_, hit in turns]
    assert hits[0] == 0
    if speculation == "off":  # the last multiple of 64 before the end of each answer
        assert hits[1:3] == [(length + NEW - 1) // 64 * 64 for length in lengths[:2]]
    else:  # drafts may hide how far the state is: then it is that of the prompt's end
        assert all(hit >= length // 64 * 64 for hit, length in zip(hits[1:3], lengths))
    assert hits[3] == (lengths[0] + 30) // 64 * 64
    assert hits[4] == lengths[2] // 64 * 64


def test_samples_of_one_prompt_share_its_state(engine_of):
    with Chats(engine_of("engine"), "shared") as chats:
        prompt = prompt_of(500, seed=3)
        chats.engine.start_request("shared", {"input_ids": prompt}, {**GREEDY, "n": 3})
        chats.engine.sync_request("shared")
        assert chats.engine.get_as_engine_stat("shared").prefix_cache_hit_token == 2 * 448


def test_long_prompts_leave_states_on_the_way(engine_of, plain):
    """A document with another question: the state is at most 1,024 positions and a chunk before the question."""
    with Chats(engine_of("engine"), "document", max_step_tokens=100) as chats:
        document = prompt_of(1300, seed=4)
        chats.ask([*document, *prompt_of(90, seed=5)], max_new_tokens=2)
        question = [*document, *prompt_of(90, seed=6)]
        answer, hit = chats.ask(question, max_new_tokens=9)
        assert 1024 <= hit < 1024 + 100
    with Chats(engine_of("engine"), "document", enable_prefix_cache=False) as chats:
        assert chats.ask(question, max_new_tokens=9)[0] == answer


def test_a_full_cache_gives_checkpoints_up_by_use(engine_of, plain):
    with Chats(engine_of("engine"), "probe") as chats:
        info = chats.engine.get_model_info("probe")
        assert info.state_spans > 0
    room = (info.cache_bytes // info.num_spans) * (1500 // 32 + 2 * info.state_spans)
    with Chats(engine_of("engine"), "small", cache_memory=room) as chats:
        for seed in range(6):
            chats.ask(prompt_of(200, seed=seed), max_new_tokens=3)
        assert [answer for _, answer, _ in conversation(chats)] == plain
        stat = chats.engine.get_as_engine_stat("small")
        assert stat.used_span == 0 and stat.free_span == stat.total_span


@pytest.mark.parametrize("lasting", [False, True])
def test_states_come_back_from_the_host_tier(lasting, engine_of, plain, tmp_path, monkeypatch):
    """Also after a restart, from the file."""
    # Rows of this model cost about as much as copies: on a busy machine the engine may choose to compute them.
    monkeypatch.setattr(CopyCosts, "worthwhile", lambda self: True)
    with Chats(engine_of("engine"), "probe") as chats:
        info = chats.engine.get_model_info("probe")
    span = info.cache_bytes // info.num_spans
    fields = {"cache_memory": span * (1500 // 32 + 2 * info.state_spans),
              "host_cache_memory": (span + 96) * 600 + 2 * HEADER}
    if lasting:
        fields["host_cache_dir"] = str(tmp_path)
    with Chats(engine_of("engine"), "host", **fields) as chats:
        turns = conversation(chats)
        for seed in range(8):
            chats.ask(prompt_of(700, seed=seed), max_new_tokens=3)
        if not lasting:
            again, hit = chats.ask(turns[2][0])
            assert again == plain[2] and hit >= len(turns[1][0]) // 64 * 64 and chats.restored > 0
        assert [answer for _, answer, _ in turns] == plain
    if lasting:
        with Chats(engine_of("engine"), "host", **fields) as chats:
            again, hit = chats.ask(turns[2][0])
            assert again == plain[2] and hit >= len(turns[1][0]) // 64 * 64 and chats.restored >= hit - 32


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, problem", [
    ({"layer_types": ["linear_attention"] * 5}, "'layer_types'.* must hold linear_attention or full_attention, which"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'.* for each of 5 layers"),
    ({"linear_num_value_heads": 7}, r"'linear_num_value_heads'.* is 7: linear_num_key_heads \(5\) must divide it"),
    ({"linear_conv_kernel_dim": 65}, "'linear_conv_kernel_dim'.* is 65: it must be positive and at most 64"),
    ({"linear_key_head_dim": 0}, "'linear_key_head_dim'.* is 0"),
    ({"layer_types": None, "full_attention_interval": 0}, "'full_attention_interval'.* is 0: it must be positive"),
    ({"shared_expert_intermediate_size": None}, "'shared_expert_intermediate_size'.* is missing"),
])
def test_configurations_that_are_refused(change, problem, tmp_path):
    refused("qwen3-next", change, problem, tmp_path)


LAYERS = {"kda_layers": [1, 3], "full_attn_layers": [2, 4]}


@pytest.mark.parametrize("change, problem", [
    ({"mla_use_nope": False}, "'mla_use_nope'.* is False: only True is served"),
    ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func'.* is 'softmax': only 'sigmoid' is"),
    ({"use_grouped_topk": False}, "'use_grouped_topk'.* is False: only True is served"),
    ({"moe_layer_freq": 2}, "'moe_layer_freq'.* is 2: only 1 is served"),
    ({"num_nextn_predict_layers": 1}, "'num_nextn_predict_layers'.* is 1: only 0 is served"),
    ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling'.* only None is served"),
    ({"hidden_act": "gelu"}, "'hidden_act'.* is 'gelu': only 'silu' is supported"),
    ({"layer_types": ["linear_attention"] * 4}, "'layer_types'.* each of the 4 layers one kind, and at least one full"),
    ({"layer_types": ["full_attention"] * 3}, "'layer_types'.* must give each of the 4 layers one kind"),
    ({"layer_types": None, "linear_attn_config": {**LAYERS, "kda_layers": [1]}},
     "'linear_attn_config.kda_layers and full_attn_layers'.* must give each of the 4 layers one kind"),
    ({"layer_types": None, "linear_attn_config": {**LAYERS, "kda_layers": [1.0, 3]}},
     "'linear_attn_config.kda_layers and full_attn_layers'.* must give each of the 4 layers one kind"),
    ({"linear_attn_config": {**LAYERS, "num_heads": 0}}, "'linear_attn_config.num_heads'.* is 0: it must be positive"),
    ({"linear_attn_config": {**LAYERS, "gate_lower_bound": -5}}, "'linear_attn_config.gate_lower_bound'.* not known"),
    ({"linear_conv_kernel_dim": 65}, "'linear_conv_kernel_dim'.* is 65: it must be positive and at most 64"),
])
def test_configurations_of_kimi_linear_that_are_refused(change, problem, tmp_path):
    refused("kimi-linear", change, problem, tmp_path)


def test_a_checkpoint_of_kimi_linear_as_published(tmp_path):
    """Layers are counted from 1 in linear_attn_config, and a dense layer's MLP has another name."""
    source, values = checkpoint("kimi-linear"), json.loads((checkpoint("kimi-linear") / "config.json").read_text())
    own = {name: values.pop(f"linear_{other}") for name, other in (
        ("num_heads", "num_heads"), ("head_dim", "head_dim"), ("short_conv_kernel_size", "conv_kernel_dim"))}
    for name in ("layer_types", "mlp_layer_types"):
        del values[name]
    values |= {"linear_attn_config": {**own, **LAYERS}, "first_k_dense_replace": 1, "mla_use_nope": True,
               "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "moe_layer_freq": 1, "head_dim": 10,
               "num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path) == read_config(source)
    stored = safetensors.torch.load_file(source / "model.safetensors")
    first = "model.layers.0.block_sparse_moe."
    safetensors.torch.save_file({name.replace(first, "model.layers.0.mlp."): tensor for name, tensor in stored.items()},
                                tmp_path / "model.safetensors")
    prompt = prompt_of(70)
    with Driver(source, 1) as a, Driver(tmp_path, 1) as b:
        np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])


def changed_text(name, change):
    """The config.json of a checkpoint with other fields of its text."""
    values = json.loads((checkpoint(name) / "config.json").read_text())
    return {**values, "text_config": {**values["text_config"], **change}}


@pytest.mark.parametrize("change, problem", [
    ({"mla_use_nope": False}, "'text_config.mla_use_nope'.* is False: only True is served"),
    ({"qk_rope_head_dim": 8}, "'text_config.qk_rope_head_dim'.* is 8: only 0 is served"),
    ({"mhc": False}, "'text_config.mhc'.* is False: only True is served"),
    ({"index_kpool_compress": False}, "'text_config.index_kpool_compress'.* is False: only True is served"),
    ({"index_kpool_always_select_tail": False}, "'text_config.index_kpool_always_select_tail'.* is False: only True"),
    ({"scoring_func": "softmax"}, "'text_config.scoring_func'.* is 'softmax': only 'sigmoid' is served"),
    ({"topk_method": "greedy"}, "'text_config.topk_method'.* is 'greedy': only 'noaux_tc' is served"),
    ({"moe_router_dtype": "bfloat16"}, "'text_config.moe_router_dtype'.* only 'float32' is served"),
    ({"rope_scaling": {"type": "yarn"}}, "'text_config.rope_scaling'.* only None is served"),
    ({"hidden_act": "gelu"}, "'hidden_act'.* is 'gelu': only 'silu' is supported"),
    ({"index_kpool": 1}, r"'index_kpool'.* is 1: it must be at least 2 and divide index_topk \(64\)"),
    ({"index_kpool": 5}, r"'index_kpool'.* is 5: it must be at least 2 and divide index_topk \(64\)"),
    ({"q_lora_rank": None}, "'q_lora_rank'.* is missing: an indexer needs the queries' latent"),
    ({"indexer_types": ["full", "shared"] * 2}, "'indexer_types'.* 'shared' for layer 1, but the layer before has no"),
    ({"linear_lower_bound": 0.5}, "'linear_lower_bound'.* is 0.5: it must be negative"),
    ({"linear_attn_config": {"safe_gate": False}}, "'linear_attn_config.safe_gate'.* is False: only True is served"),
    ({"linear_attn_config": {"sizes": 1}}, "'linear_attn_config.sizes'.* is not known, so it is not served"),
    ({"linear_attn_config": {"kda_layers": [1, 3]}}, r"'linear_attn_config.kda_layers'.* layer_types has \[0, 2\]"),
    ({"layer_types": ["linear_attention"] * 4}, "'layer_types'.* which at least one layer has, for each of 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "'layer_types'.* must hold linear_attention or deepseek_sparse_att"),
    ({"hc_mult": 65}, "'hc_mult'.* is 65: it must be positive and at most 64"),
    ({"swiglu_limit": 0}, "'swiglu_limit'.* is 0.0: it must be positive"),
])
def test_configurations_of_glm_that_are_refused(change, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed_text("glm5-next", change)))
    with pytest.raises(AllSparkError, match=problem):
        read_config(tmp_path)


def test_decays_of_glm_without_a_bound(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed_text("glm5-next", {"linear_lower_bound": None})))
    assert read_config(tmp_path).delta.lower_bound == 0
    assert read_config(checkpoint("glm5-next")).delta.lower_bound == -5


def test_a_checkpoint_of_glm_as_published(tmp_path, caplog):
    """Other names of layers, the fields of linear_attn_config, which counts them from 0, and the layer of a draft head,
    which is not read.
    """
    source, layers = checkpoint("glm5-next"), 4
    values = changed_text("glm5-next", {"first_k_dense_replace": 1, "mla_use_nope": True, "mhc": True,
                                        "index_kpool_compress": True, "scoring_func": "sigmoid",
                                        "topk_method": "noaux_tc", "moe_router_dtype": "float32",
                                        "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True})
    text = values["text_config"]
    for name in ("layer_types", "mlp_layer_types"):
        del text[name]
    text["layer_types"] = ["linear_attention", "deepseek_sparse_attention"] * 2
    text["linear_attn_config"] = {"kda_layers": [0, 2], "full_attn_layers": [1, 3], "num_heads": text.pop(
        "linear_num_heads"), "head_dim": text.pop("linear_head_dim"), "short_conv_kernel_size": text.pop(
            "linear_conv_kernel_dim"), "gate_lower_bound": text.pop("linear_lower_bound")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path) == read_config(source)
    shutil.copy(source / "generation_config.json", tmp_path)
    stored = safetensors.torch.load_file(source / "model.safetensors")
    extra = {f"model.language_model.layers.{layers}.{name}": torch.ones(3) for name in ("enorm.weight", "hc_attn_fn")}
    safetensors.torch.save_file(stored | extra, tmp_path / "model.safetensors")
    prompt = prompt_of(70)
    with Driver(source, 1) as a, Driver(tmp_path, 1) as b:
        np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])
    assert "does not use" not in caplog.text
    assert open_model(str(tmp_path)).no_images_reason == "its vision tower is not served"


@pytest.mark.parametrize("cache, tolerance", [("int8", 0.1), ("bfloat16", 0.1)])
def test_caches_of_glm(cache, tolerance):
    """Keys of an indexer are bfloat16 beside int8. The prompt is short enough for a selection of all."""
    prompt, fields = prompt_of(66), {"cache_mode": AsCacheMode.AsCacheQuantI8} if cache == "int8" else {
        "cache_dtype": cache}
    expected = reference_logits(checkpoint("glm5-next"), prompt)
    with Driver(checkpoint("glm5-next"), 1, **fields) as driver:
        logits = driver.generate(prompt, 1)[1][0]
        assert np.sqrt(np.mean((logits - expected) ** 2)) / expected.std() < tolerance
        long = prompt_of(290)
        np.testing.assert_array_equal(driver.generate(long, 1, chunk=37)[1][0], driver.generate(long, 1)[1][0])
    with pytest.raises(AllSparkError, match="a cache of type 'uint4' is not available for latent attention"):
        Driver(checkpoint("glm5-next"), 1, cache_mode=AsCacheMode.AsCacheQuantU4)


@pytest.mark.parametrize("change, problem", [
    ({"layer_types": ["conv"] * 4}, "'layer_types'.* must hold conv or full_attention, which at least one layer has"),
    ({"layer_types": ["sliding_attention"] * 4}, "'layer_types'.* must hold conv or full_attention"),
    ({"conv_L_cache": 65}, "'conv_L_cache'.* is 65: it must be positive and at most 64"),
    ({"block_multiple_of": 0}, "'block_multiple_of'.* is 0: it must be positive"),
    ({"norm_eps": "small"}, "'norm_eps'.* is 'small': expected float"),
])
def test_configurations_of_lfm2_that_are_refused(change, problem, tmp_path):
    refused("lfm2", change, problem, tmp_path)


@pytest.mark.parametrize("change, problem", [
    ({"layers_block_type": ["mamba", "mlp"]}, "'layers_block_type'.* must hold M, .* at least one attention"),
    ({"hybrid_override_pattern": "MX*"}, "'hybrid_override_pattern'.* must hold"),
    ({"mlp_hidden_act": "silu"}, "'hidden_act'.* is 'silu': only 'relu2' is supported"),
    ({"mamba_hidden_act": "gelu"}, "'mamba_hidden_act'.* is 'gelu': only 'silu' is served"),
    ({"n_groups": 3}, r"'mamba_num_heads'.* is 10: n_groups \(3\) must divide it"),
    ({"n_shared_experts": 2}, "'n_shared_experts'.* is 2: only 1 is served"),
    ({"time_step_limit": [1, 0]}, r"'time_step_limit'.* is \[1, 0\]: expected the least and the largest step"),
    ({"moe_latent_size": -1}, "'moe_latent_size'.* is -1: it must not be negative"),
])
def test_configurations_of_nemotron_h_that_are_refused(change, problem, tmp_path):
    refused("nemotron-h", change, problem, tmp_path)


@pytest.mark.parametrize("pattern", ["M*E-M", None])
def test_limits_of_steps_and_the_names_of_earlier_checkpoints(pattern, tmp_path):
    """`hybrid_override_pattern`, `attention_head_dim` and names of kinds without "linear_" and "full_"."""
    values = json.loads((checkpoint("nemotron-h") / "config.json").read_text())
    kinds = [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind)
             for kind in values.pop("layers_block_type")]
    values |= {"hybrid_override_pattern": pattern} if pattern else {"layers_block_type": kinds}
    values |= {"attention_head_dim": values.pop("head_dim"), "time_step_limit": [0.01, 0.5]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    assert config.mamba.layers == (0, 4) and config.mlp_layers == (2, 3) and config.head_dim == 20
    assert (config.mamba.least_step, config.mamba.most_step) == (0.01, 0.5)


@pytest.mark.parametrize("change, problem", [
    ({"layer_types": ["mamba"] * 3}, "'layer_types'.* must hold mamba or attention, which at least one layer has"),
    ({"layer_types": ["mamba", "attention"]}, "'layer_types'.* for each of 3 layers"),
    ({"position_embedding_type": "alibi"}, "'position_embedding_type'.* is 'alibi': expected rope or nope"),
    ({"mamba_d_head": 0}, "'mamba_d_head'.* is 0: it must be positive"),
    ({"normalization_function": "layernorm"}, "'normalization_function'.* is 'layernorm': only 'rmsnorm' is served"),
])
def test_configurations_of_granite_that_are_refused(change, problem, tmp_path):
    refused("granite-hybrid", change, problem, tmp_path)


@pytest.mark.parametrize("name, change, problem", [
    ("bamba", {"attn_layer_indices": []}, "'attn_layer_indices'.* is \\[\\]: expected numbers of layers, at least one"),
    ("bamba", {"attn_layer_indices": [4]}, "'attn_layer_indices'.* from 0 to 3"),
    ("bamba", {"attn_layer_indices": None}, "'attn_layer_indices'.* is missing"),
    ("bamba", {"mamba_n_groups": 5}, r"'mamba_n_heads'.* is 12: mamba_n_groups \(5\) must divide it"),
    ("falcon-h1", {"ssm_multipliers": [1, 2]}, r"'ssm_multipliers'.* is \[1, 2\]: expected 5 positive numbers"),
    ("falcon-h1", {"mlp_multipliers": [0, 1.0]}, "'mlp_multipliers'.* expected 2 positive numbers"),
    ("falcon-h1", {"key_multiplier": 0}, "'key_multiplier'.* is 0.0: it must be positive"),
    ("falcon-h1", {"mlp_bias": True}, "'mlp_bias'.* is True: only False is served"),
    ("falcon-h1", {"projectors_bias": True}, "'projectors_bias'.* is True: only False is served"),
    ("falcon-h1", {"mamba_d_ssm": 0}, "'mamba_d_ssm'.* is 0: it must be positive"),
    ("falcon-h1", {"mamba_rms_norm": True, "mamba_n_groups": 4},
     "'mamba_norm_before_gate'.* is True: with mamba_n_groups=4 only False is served"),
])
def test_configurations_of_bamba_and_falcon_that_are_refused(name, change, problem, tmp_path):
    refused(name, change, problem, tmp_path)


@pytest.mark.parametrize("name, field", [("bamba", "mamba_d_head"), ("falcon-h1", "mamba_d_head"),
                                         ("falcon-h1-norm", "mamba_expand")])
def test_sizes_of_heads_follow_from_other_fields(name, field, tmp_path):
    values = json.loads((checkpoint(name) / "config.json").read_text())
    values[field] = "auto" if field == "mamba_d_head" else None
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path).mamba == read_config(checkpoint(name)).mamba


def refused(name, change, problem, tmp_path):
    values = json.loads((checkpoint(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(AllSparkError, match=problem):
        read_config(tmp_path)


def test_more_ranks_than_key_heads_are_refused():
    with pytest.raises(AllSparkError, match="5 ranks: it has 4 key heads of layers with a state"):
        Driver(checkpoint("qwen3-5"), 5)


def test_a_draft_model_with_states_is_refused():
    source = str(checkpoint("qwen3-next"))
    with pytest.raises(AllSparkError, match="layers with a state cannot follow drafts that are rejected"):
        Driver(source, 1, speculation="draft", draft_model=source)


# -- with a vision tower -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3-5", pytest.param("qwen3-5-moe", marks=slow)])
def test_the_text_of_a_model_that_sees(name, tmp_path, caplog):
    """The names and the nested fields that published checkpoints have; the draft head is not loaded. Without the
    tensors of its tower the model takes text.
    """
    source, text = checkpoint(name), json.loads((checkpoint(name) / "config.json").read_text())
    shutil.copy(source / "generation_config.json", tmp_path)
    kind = "Qwen3_5MoeForConditionalGeneration" if "moe" in name else "Qwen3_5ForConditionalGeneration"
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": [kind], "model_type": text["model_type"].removesuffix("_text"), "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"], "vision_config": {"depth": 1}}))
    tensors = {}
    stored = open_model(str(source)).source
    for stored_name in stored.names():
        inner = stored_name.replace("model.", "model.language_model.", 1)
        tensors[inner if stored_name.startswith("model.") else stored_name] = torch.from_numpy(
            np.array(stored.get(stored_name).data))
    tensors |= {unused: torch.zeros(3, 3) for unused in ("mtp.fc.weight", "mtp.layers.0.input_layernorm.weight")}
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    prompt = prompt_of(129)
    with Driver(tmp_path, 1) as driver:
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(source, prompt))
    assert "does not use" not in caplog.text and "images are refused" in caplog.text
