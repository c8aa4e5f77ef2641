"""Models with experts (Qwen3-MoE, Mixtral and others) against transformers, and their properties: the same bits in
every batch, on ranks that divide experts' features or whole experts, in every weight format, and serialized.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models import read_config
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.safetensors import write_safetensors
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits
from support.driver import Driver, together
from support.greedy import check_greedy_output
from support.tiny_configs import EXPERTS

slow = pytest.mark.slow
QUICK = [pytest.param(name, marks=slow) if name.endswith("-plain") else name for name in EXPERTS]


# -- against transformers ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) if name == "ernie-moe" else name for name in QUICK])
def test_graph_describes_the_model(name, world):
    prompt = prompt_of(33)
    check_logits(logits_after(model_runner(checkpoint(name), world), prompt),
                 reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("name", QUICK)
def test_logits(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS if world == 1 else (1, 33, 300):
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name if name in ("qwen3-moe-mixed", "qwen2-moe") else
                                  pytest.param(name, marks=slow) for name in EXPERTS])
def test_greedy_output(name, world):
    """Prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        prompt = prompt_of(90, seed=1)
        check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


# -- ranks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, world, features, experts", [
    ("qwen3-moe", 2, [104, 96], [(0, 10), (0, 10)]), ("qwen3-moe", 3, [72, 64, 64], [(0, 10)] * 3),
    ("qwen3-moe", 4, [200] * 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
    ("qwen3-moe-mixed", 2, [37, 37], [(0, 4), (4, 7)]), ("qwen2-moe-normalized", 3, [64, 64, 64], [(0, 5)] * 3),
])  # fmt: skip
def test_what_ranks_have(name, world, features, experts):
    """Slices of every expert, or whole experts if slices would be too narrow."""
    graph = open_model(str(checkpoint(name))).graph
    down = next(w for w in graph.weights.values() if w.name.endswith("experts.down_proj"))
    ranks = range(world)
    assert [np.ptp(down.column_range_of(rank, world)) for rank in ranks] == features
    assert [down.experts_of(rank, world) for rank in ranks] == experts
    for weight in graph.weights.values():
        for rank in ranks:
            assert list(weight.ranges_of(rank, world)) == [part.range_of(rank, world) for part in weight.parts]


def test_more_ranks_than_experts_are_refused():
    with pytest.raises(AllSparkError, match="divided among 6 ranks: it has 5 experts"):
        Driver(checkpoint("qwen2-moe-normalized"), 6)


CORRECTED = [pytest.param(name, marks=slow) for name in ("glm4-moe", "minimax-m2", "ernie-moe")]


# -- bits --------------------------------------------------------------------------------------------------------------
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]


@pytest.mark.parametrize("form, group", FORMATS)
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", *CORRECTED])
def test_the_same_bits_alone_and_in_a_batch(name, form, group):
    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 111)]
    fields = {"weight_dtype": form, "weight_group_size": group, "engine_max_batch": 4}
    with Driver(checkpoint(name), 1, **fields) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for chunk in (1 << 20, 37, 1):
            for row, wanted in zip(together(driver, prompts, chunk), expected):
                np.testing.assert_array_equal(row, wanted)
    with Driver(checkpoint(name), 1, **{**fields, "num_threads": 3}) as driver:
        for row, wanted in zip(together(driver, prompts, 50), expected):
            np.testing.assert_array_equal(row, wanted)


# -- formats and files -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form, group, tolerance", [
    ("bfloat16", 0, 0.1), ("int8", 0, 0.15), ("int4", 32, 1.2), ("w8a8", 0, 0.35), ("w4a8", 32, 1.2)])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", *CORRECTED])
def test_weight_formats(name, form, group, tolerance):
    """On 1 and several ranks; routers stay float32."""
    prompt, group = prompt_of(64), group if name == "qwen3-moe" else 0  # others are cut inside groups
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1, 2 if group else 3):
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            _, logits = driver.generate(prompt, 1)
        error = np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std()
        print(f"{world} ranks: error {error:.3f}")
        assert error < tolerance


def stacked(name, directory):
    """The checkpoint in transformers 5's form in memory: all experts of a layer in one tensor."""
    source = open_model(str(checkpoint(name))).source
    tensors = {n: np.asarray(source.get(n).data) for n in source.names()}
    config = read_config(checkpoint(name))
    mixtral = config.architecture in ("MixtralForCausalLM", "MiniMaxM2ForCausalLM")
    kinds = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for layer in range(config.num_layers):
        if layer in config.experts.dense_layers:
            continue
        old = f"model.layers.{layer}." + ("block_sparse_moe" if mixtral else "mlp")
        new = f"model.layers.{layer}.mlp"
        gate, up, down = ([tensors.pop(f"{old}.experts.{e}.{kind}.weight") for e in range(config.experts.count)]
                          for kind in kinds)
        tensors[f"{new}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up)])
        tensors[f"{new}.experts.down_proj"] = np.stack(down)
        for tensor in ("gate.weight", "e_score_correction_bias"):
            if f"{old}.{tensor}" in tensors:
                tensors[f"{new}.{tensor}"] = tensors.pop(f"{old}.{tensor}")
    directory.mkdir(exist_ok=True)
    for file in ("config.json", "generation_config.json"):
        (directory / file).write_bytes((checkpoint(name) / file).read_bytes())
    write_safetensors(directory / "model.safetensors", [(n, "F32", a.shape) for n, a in tensors.items()], {},
                      [[a] for a in tensors.values()])
    return directory


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-mixed", "mixtral", "qwen2-moe", "minimax-m2"])
def test_stacked_tensors_have_the_same_bits(name, world, tmp_path):
    prompt = prompt_of(40)
    with Driver(checkpoint(name), world) as driver:
        expected = driver.generate(prompt, 2)[1]
    with Driver(stacked(name, tmp_path / "stacked"), world) as driver:
        np.testing.assert_array_equal(driver.generate(prompt, 2)[1], expected)


def changed(tmp_path, name, change):
    values = json.loads((checkpoint(name) / "config.json").read_text())
    change(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_spellings_of_config_json(tmp_path):
    """num_experts of transformers 4; a rope_theta that only the class gives."""
    def older(values):
        values["num_experts"] = values.pop("num_local_experts")

    found = read_config(changed(tmp_path, "qwen3-moe", older)).experts
    assert found == read_config(checkpoint("qwen3-moe")).experts
    bare = changed(tmp_path, "mixtral", lambda values: values.pop("rope_parameters"))
    assert read_config(bare).rope.theta == 1e6


@pytest.mark.parametrize("name, change, problem", [
    ("mixtral", {"sliding_window": 100}, "'sliding_window'.* is 100: a sliding window is not available"),
    ("qwen3-moe", {"sliding_window": 100, "use_sliding_window": True}, "a sliding window is not available"),
    ("qwen3-moe", {"num_experts_per_tok": 11}, "'num_experts_per_tok'.* is 11: it must be positive and at most 10"),
    ("qwen3-moe", {"num_local_experts": None}, "'num_local_experts'.* is missing"),
    ("qwen3-moe", {"moe_intermediate_size": 0}, "'moe_intermediate_size'.* is 0: it must be positive"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step'.* is 0: it must be positive"),
    ("qwen3-moe", {"mlp_only_layers": ["1"]}, "'mlp_only_layers'.* expected numbers of layers"),
    ("qwen2-moe", {"shared_expert_intermediate_size": None}, "'shared_expert_intermediate_size'.* is missing"),
    ("glm4-moe", {"n_group": 5}, "'n_group'.* is 5: it must divide n_routed_experts \\(12\\)"),
    ("glm4-moe", {"topk_group": 5}, "'topk_group'.* is 5: it must be from 1 to n_group \\(4\\)"),
    ("glm4-moe", {"num_experts_per_tok": 7}, "'num_experts_per_tok'.* is 7: topk_group groups have 6 experts"),
    ("glm4-moe", {"first_k_dense_replace": -1}, "'first_k_dense_replace'.* must not be negative"),
    ("glm4-moe", {"n_shared_experts": -1}, "'n_shared_experts'.* is -1: it must be from 0"),
    ("minimax-m2", {"scoring_func": "softmax"}, "'scoring_func'.* is 'softmax': only 'sigmoid' is served"),
    ("minimax-m2", {"attn_type_list": [1, 0, 1]}, "'attn_type_list'.* only full attention is served"),
    ("ernie-moe", {"use_bias": True}, "'use_bias'.* is True: only False is served"),
    ("ernie-moe", {"moe_norm_min": 1e-6}, "'moe_norm_min'.* is 1e-06: only 1e-12 is served"),
    ("ernie-moe", {"moe_k": 11}, "'moe_k'.* is 11: it must be positive and at most 10"),
    ("ernie-moe", {"moe_num_experts": None}, "'moe_num_experts'.* is missing"),
    ("ernie-moe", {"moe_layer_interval": 0}, "'moe_layer_interval'.* is 0: it must be positive"),
    ("ernie-moe", {"moe_num_shared_experts": -1}, "'moe_num_shared_experts'.* is -1: it must be from 0"),
    ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv'.* is 8.0: only None is served"),
    ("granite-moe", {"num_local_experts": None}, "'num_local_experts'.* is missing"),
    ("dots1", {"n_routed_experts": 7}, "'n_group'.* is 4: it must divide n_routed_experts \\(7\\)"),
    ("dots1", {"layer_types": ["chunked_attention"] * 4}, "4 layers of chunked_attention: expected 4"),
    ("exaone-moe", {"mlp_layer_types": ["sparse"]}, "'mlp_layer_types'.* must hold dense or sparse for each of 5"),
    ("exaone-moe", {"sliding_window": None}, "'sliding_window'.* is missing: layer_types holds sliding_attention"),
    ("afmoe", {"sliding_window": None}, "'sliding_window'.* is null: expected int"),
    ("afmoe", {"score_func": "softmax"}, "'score_func'.* is 'softmax': only 'sigmoid' is served"),
    ("afmoe", {"num_dense_layers": 6}, "'num_dense_layers'.* is 6: it must be from 0 to 5"),
    ("afmoe", {"global_attn_every_n_layers": 0}, "'global_attn_every_n_layers'.* is 0: it must be positive"),
    ("hunyuan-moe", {"moe_topk": [3, 3, 2]}, r"'moe_topk'.* is \[3, 3, 2\]: only layers of the same size are served"),
    ("hunyuan-moe", {"moe_intermediate_size": 100}, "'moe_intermediate_size'.* is 100: only 200 is served"),
    ("hunyuan-moe", {"num_shared_expert": [2, 2, 2]}, "'num_shared_expert'.* is 2: only 1 is served"),
    ("mixtral", {"num_local_experts": 1 << 20}, "'num_local_experts'.* must be positive and at most 16384"),
])  # fmt: skip
def test_configs_that_are_refused(name, change, problem, tmp_path):
    with pytest.raises(AllSparkError, match=problem):
        read_config(changed(tmp_path, name, lambda values: values.update(change)))


def test_published_spellings_of_families_with_experts(tmp_path):
    """Lists with a number for each layer (Hunyuan); dense layers and windows by numbers (dots.llm1, K-EXAONE)."""
    def read(name, change):
        return read_config(changed(tmp_path, name, change))

    def lists(values):
        values |= {"moe_topk": [3] * 3, "num_experts": 10, "moe_intermediate_size": [200] * 3,
                   "num_shared_expert": [1] * 3, "use_mixed_mlp_moe": True}

    def numbers(values):
        values.pop("layer_types")
        values.pop("mlp_layer_types", None)

    expected = {name: read(name, lambda _values: None) for name in ("hunyuan-moe", "dots1", "exaone-moe", "afmoe")}
    assert read("hunyuan-moe", lists) == expected["hunyuan-moe"]
    assert read("dots1", numbers) == expected["dots1"] and expected["dots1"].windows == (0, 0, 61, 61)
    assert read("afmoe", numbers) == expected["afmoe"] and expected["afmoe"].unrotated == (3,)
    assert read("exaone-moe", numbers) == expected["exaone-moe"] and expected["exaone-moe"].unrotated == (3,)


@pytest.mark.parametrize("form, group", [("auto", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)])
@pytest.mark.parametrize("name, layout", [("qwen2-moe", "each"), ("qwen3-moe", "stacked"), ("mixtral", "each"),
                                          pytest.param("glm4-moe", "each", marks=slow),
                                          pytest.param("ernie-moe", "each", marks=slow),
                                          pytest.param("minimax-m2", "stacked", marks=slow)])
def test_serialized_and_reloaded(name, layout, form, group, tmp_path):
    """The same bits from a checkpoint as from its .asgraph and .asparam, on 1 and 2 ranks."""
    group = group if name == "qwen3-moe" else 0  # others are cut inside groups
    source = checkpoint(name) if layout == "each" else stacked(name, tmp_path / "stacked")
    options = {} if form == "auto" else {"enable_quant": True, "customized_quant_config": {
        "weight_format": "uint4" if "4" in form else "int8", "group_size": group,
        "compute_method": "activate_quant" if form.startswith("w") else "weight_only"}}
    HuggingFaceModel(source, "m").serialize_to_path(None, tmp_path, **options)
    prompt, fields = prompt_of(50), {"weight_dtype": form, "weight_group_size": group}
    for world in (1, 2):
        with Driver(source, world, **fields) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])
