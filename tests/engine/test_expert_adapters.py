"""Adapters of experts: equal to PEFT's and to merged weights, the same bits in any batch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from allspark_client import AllSparkError
from allspark_server.models.adapters import with_adapters
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.lora import open_adapter
from support.driver import Driver

checkpoints = pytest.importorskip("support.checkpoints")  # needs torch and transformers
adapters = pytest.importorskip("support.adapters")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine.test_lora import Adapted, check_against_peft, logits_of

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def by_peft(directory, name: str, seed: int = 0, **options):
    """An adapter that PEFT makes."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.checkpoint(name), dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options))
        for parameter, values in model.named_parameters():  # of a size that changes the logits
            if "lora_B" in parameter:
                values.normal_(0, 0.2)
        model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name, world, options", [
    ("qwen3-moe", 2, {"target_parameters": BOTH, "target_modules": ["q_proj"], "r": 3,
                      "rank_pattern": {"layers.1.mlp.experts.down_proj": 7}, "alpha_pattern": {"gate_up_proj": 5}}),
    ("gpt-oss", 1, {"target_parameters": BOTH, "target_modules": [], "r": 5}),
    pytest.param("qwen3-moe", 1, {"target_parameters": BOTH[1:], "target_modules": "all-linear"},
                 marks=pytest.mark.slow),
    pytest.param("qwen3-moe-mixed", 3, {"target_parameters": BOTH, "target_modules": []}, marks=pytest.mark.slow),
    pytest.param("qwen2-moe", 4, {"target_parameters": BOTH, "use_rslora": True, "r": 2}, marks=pytest.mark.slow),
    pytest.param("mixtral", 1, {"target_parameters": BOTH, "target_modules": []}, marks=pytest.mark.slow),
    pytest.param("mixtral-many", 3, {"target_parameters": BOTH[:1], "target_modules": ["o_proj"]},
                 marks=pytest.mark.slow),
    pytest.param("gpt-oss-plain", 3, {"target_parameters": BOTH, "target_modules": []}, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", 2, {"target_parameters": BOTH, "target_modules": []}, marks=pytest.mark.slow),
])
def test_parameters_of_all_experts_are_those_of_peft(tmp_path, name, world, options):
    check_against_peft(name, by_peft(tmp_path / "one", name, **options), world, (1, 40), tokens=2)


@torch.inference_mode()
def check_against_merged(name: str, directory, world: int, **fields) -> None:
    exact = adapters.merged(checkpoints.load_plain(checkpoints.checkpoint(name), torch.float64), directory,
                            lambda module: 16 / 8)
    with Adapted(name, directory, world, **fields) as driver:
        for length in (1, 40):
            ids = checkpoints.prompt_of(length)
            expected = exact(torch.tensor([ids])).logits[0, -1].numpy()
            checkpoints.check_logits(driver.generate(ids, 1)[1][0], expected)


@pytest.mark.parametrize("name, world", [
    ("qwen3-moe", 2),
    pytest.param("mixtral", 1, marks=pytest.mark.slow),
    pytest.param("mixtral-many", 3, marks=pytest.mark.slow),
    pytest.param("qwen2-moe-normalized", 4, marks=pytest.mark.slow),
    pytest.param("glm4-moe", 1, marks=pytest.mark.slow),
])
def test_experts_that_are_layers_are_those_of_merged_weights(tmp_path, name, world):
    base = checkpoints.checkpoint(name)
    check_against_merged(name, adapters.write_adapter(tmp_path / "one", base, adapters.EXPERTS, strength=0.15), world)


@pytest.mark.parametrize("fields", [
    {}, {"weight_dtype": "int4", "weight_group_size": 32},
    pytest.param({"weight_dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param({"weight_dtype": "w8a8"}, marks=pytest.mark.slow),
])
def test_batches_do_not_change_bits(tmp_path, fields):
    name = "qwen3-moe"
    base = checkpoints.checkpoint(name)
    one = adapters.write_adapter(tmp_path / "one", base, adapters.EXPERTS, strength=0.2)
    two = by_peft(tmp_path / "two", name, target_parameters=BOTH, target_modules=["v_proj"], r=17)
    items = [(checkpoints.prompt_of(length, i), (0, -1, 1, 0)[i % 4]) for i, length in enumerate((5, 70, 1, 41, 9, 2))]
    with Driver(base, num_threads=3, engine_max_batch=6, **fields) as driver, \
            Driver(base, num_threads=1, lora_max_num=0, **fields) as plain:
        for runner in driver.runners:
            runner.load_adapter(0, str(one)), runner.load_adapter(1, str(two))
        together = logits_of(driver, items)
        assert together == [logits_of(driver, [item])[0] for item in items]
        prompt = items[0][0]
        bare = logits_of(plain, [(prompt, -1)])
        assert logits_of(driver, [(prompt, -1)]) == bare
        found = {logits_of(driver, [(prompt, adapter)])[0][0] for adapter in (-1, 0, 1)}
        assert len(found) == 3, "each adapter changes the logits"


def test_what_is_refused(tmp_path):
    name = "qwen3-moe"
    graph, targets = with_adapters(open_model(str(checkpoints.checkpoint(name)), "").graph)
    dense = [target for target in targets if target.of_experts is None]

    def no(directory, match, max_rank: int = 16, of=targets, **config):
        adapters.change_config(directory, **config)
        with pytest.raises(AllSparkError, match=match):
            open_adapter(directory, graph, of, max_rank)

    fused = by_peft(tmp_path / "fused", name, target_parameters=BOTH, target_modules=[], r=3)
    assert len(open_adapter(fused, graph, targets, 3).pairs) == 3 * 10 * sum(
        op.type == "router" for op in graph.ops)
    no(fused, "has rank 3 for .*experts.gate_up_proj', but lora_max_rank is 2", max_rank=2)
    no(fused, r"tensors '.*layers.0.mlp.experts.*lora_A.weight' and .* shapes \[30, .*: expected \[40, 72\] and "
              r"\[400, 40\] for model.layers.0.mlp.experts.gate_up_proj, or \[40, 200\] and \[72, 40\] for "
              "model.layers.0.mlp.experts.down_proj", r=4)
    no(fused, "expected .* for model.layers.0.mlp.experts.gate_up_proj, of", r=3, target_parameters=BOTH[:1])
    no(fused, "has no parameter 'experts.other_proj' that adapters can change",
       target_parameters=[*BOTH, "experts.other_proj"])
    no(fused, "target_parameters is 'experts': it must be a list", target_parameters="experts")
    layers = adapters.write_adapter(tmp_path / "layers", checkpoints.checkpoint(name), adapters.EXPERTS)
    no(layers, r"expected \[7, 72\] of", r=7)
    no(layers, "which adapter_config.json does not ask for", r=8, target_modules=["gate_proj", "down_proj"])
    some = adapters.write_adapter(tmp_path / "some", checkpoints.checkpoint(name), ["gate_proj"])
    no(some, "has no '.*experts.0.up_proj.lora_A.weight', which adapter_config.json asks for",
       target_modules=["gate_proj", "up_proj"])
    assert not np.any([target.of_experts for target in dense])
