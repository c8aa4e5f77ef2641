"""Mixed groups: one rank computes the model, others hold slices of its routed experts. Ranks are threads here."""
from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelConfig
from allspark_client.errors import AsStatus
from allspark_server import _native
from allspark_server.models.roles import experts_part, model_part
from allspark_server.runtime import rank_model
from allspark_server.runtime.rank_models import RankModels
from allspark_server.runtime.roles import Role, check_first_ranks, role_of

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support import quantized_checkpoints
from support.checkpoints import checkpoint, prompt_of
from support.driver import Driver, shared_memories, together
from support.mxfp4_checkpoint import mxfp4_pair

FORMATS = {"float32": {}, "bfloat16": {"weight_dtype": "bfloat16"}, "int8": {"weight_dtype": "int8"},
           "w8a8": {"weight_dtype": "w8a8"}, "int4": {"weight_dtype": "int4", "weight_group_size": 32},
           "w4a8": {"weight_dtype": "w4a8", "weight_group_size": 32}}
PROMPT = prompt_of(75)
# Whether silu of an ordinary rank is that of the exact recipe.
EXACT_SILU = not _native.isa().startswith(("avx512", "amx"))


def mixed(experts: int) -> dict:
    return {"compute_unit": f"CPU:0+CPU:{','.join(['0'] * experts)}"}


def generated(name, world: int, chunk: int | None = None, **fields):
    """Greedy tokens and the logits of each. name: of a random checkpoint, or its folder."""
    sizes = {"engine_max_length": 256, "cache_memory": 4 << 20, "num_threads": 2}
    with Driver(checkpoint(name) if isinstance(name, str) else name, world, **sizes, **fields) as driver:
        return driver.generate(PROMPT, 6, chunk), driver.info


def check_bits(tokens, logits, own, rows, as_floats: bool) -> None:
    """Compares one rank's results with those of one rank of experts. as_floats: the experts' formats have no exact
    recipe.
    """
    if as_floats or EXACT_SILU:
        assert tokens == own
        np.testing.assert_array_equal(np.stack(logits), np.stack(rows))
    else:
        np.testing.assert_allclose(rows[0], logits[0], atol=3e-3)


@pytest.mark.parametrize("form", FORMATS)
def test_one_rank_of_experts_computes_the_bits_of_one_rank(form):
    (tokens, logits), info = generated("qwen3-moe", 1, **FORMATS[form])
    (own, rows), other = generated("qwen3-moe", 2, **mixed(1), **FORMATS[form])
    check_bits(tokens, logits, own, rows, form in ("float32", "bfloat16"))
    assert info.model_hash != other.model_hash      # the fingerprint covers the placement


FAMILIES = ("qwen2-moe", "glm4-moe", "gpt-oss", "gpt-oss-blocks", "deepseek-v2", "qwen3-5-moe", "gemma4-moe")
SLOW_FAMILIES = ("mixtral", "ernie-moe", "granite-moe", "dots1", "afmoe", "hunyuan-moe", "minimax-m2", "olmoe",
                 "exaone-moe", "qwen3-next", "lfm2-moe", "nemotron-h", "granite-hybrid", "glm-moe-dsa", "deepseek-v32",
                 "kimi-linear")


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)])
def test_every_family(name):
    (tokens, logits), _ = generated(name, 1)
    (own, rows), _ = generated(name, 2, **mixed(1))
    assert tokens == own
    np.testing.assert_array_equal(np.stack(logits), np.stack(rows))
    (divided, _), _ = generated(name, 3, **mixed(2))
    assert tokens == divided


@pytest.mark.parametrize("name", ["fp8-glm4-moe", "ct-packed-4-kimi", "gptq-4-glm4-moe", "awq-glm4-moe"])
def test_formats_of_other_programs(tmp_path, name):
    spec, producer = {"gptq-4-glm4-moe": (quantized_checkpoints.GLM, quantized_checkpoints.gptq(4, 32)),
                      "awq-glm4-moe": (quantized_checkpoints.GLM, quantized_checkpoints.awq(64)),
                      **quantized_checkpoints.SCHEMES}[name]
    path, _ = quantized_checkpoints.write_pair(tmp_path, spec, *producer, seed=5)
    (tokens, logits), _ = generated(path, 1)
    (own, rows), _ = generated(path, 2, **mixed(1))
    check_bits(tokens, logits, own, rows, name.startswith("fp8"))
    (_, near), _ = generated(path, 3, **mixed(2))
    np.testing.assert_allclose(near[0], logits[0], atol=3e-3)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_4_bit_floats_by_the_exact_recipe(tmp_path, name):
    """Other bits than an ordinary rank's floats, near them, and the same in any chunks."""
    if name == "mxfp4":
        path, _ = mxfp4_pair(tmp_path)
    else:
        path, _ = quantized_checkpoints.write_pair(tmp_path, quantized_checkpoints.GLM,
                                                   *quantized_checkpoints.float4("nvfp4-pack-quantized", 16), seed=5)
    (tokens, logits), info = generated(path, 1)
    for experts in (1, 2):
        (own, rows), other = generated(path, 1 + experts, **mixed(experts))
        np.testing.assert_allclose(rows[0], logits[0], atol=1e-3)
        assert (np.stack(rows) != np.stack(logits)).any() and own[0] == tokens[0]
        assert info.model_hash != other.model_hash
        (_, cut), _ = generated(path, 1 + experts, 17, **mixed(experts))
        np.testing.assert_array_equal(np.stack(rows), np.stack(cut))


def test_the_formats_of_experts_are_exact():
    with Driver(checkpoint("qwen3-moe"), 2, engine_max_length=256, cache_memory=4 << 20, weight_dtype="int8",
                **mixed(1)) as driver:
        model, experts = (runner._model for runner in driver.runners)
    assert {str(form) for form in experts.formats.values()} == {"int8/exact"}
    assert not any(form.exact for form in model.formats.values())
    assert {name: form for name, form in model.opened_formats.items() if form.exact} == experts.formats


@pytest.mark.parametrize("experts", [2, 3, 4])      # 9, 8 and 8 units of features on 3; whole experts on 4
@pytest.mark.parametrize("form", ["float32", "int4"])
def test_several_ranks_of_experts_are_near_and_invariant(experts, form):
    (_, near), _ = generated("qwen3-moe", 1, **FORMATS[form])
    (_, whole), _ = generated("qwen3-moe", 1 + experts, **mixed(experts), **FORMATS[form])
    np.testing.assert_allclose(whole[0], near[0], atol=2e-3 if form == "int4" else 2e-4, rtol=2e-3)
    (_, cut), _ = generated("qwen3-moe", 1 + experts, 17, **mixed(experts), **FORMATS[form])
    np.testing.assert_array_equal(np.stack(whole), np.stack(cut))


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "gpt-oss", "gemma4-moe", "qwen3-5-moe"])
def test_rows_without_outputs_are_left_out_of_the_last_layer(name, monkeypatch):
    """A prompt at once, and in chunks, most of which have no outputs: the bits are those of all rows."""
    found = [generated(name, 3, chunk, **mixed(2))[0] for chunk in (None, 16)]
    monkeypatch.setattr(rank_model, "with_early_selection", lambda graph: graph)
    tokens, logits = generated(name, 3, **mixed(2))[0]
    for own, rows in found:
        assert own == tokens
        np.testing.assert_array_equal(np.stack(rows), np.stack(logits))


@pytest.mark.parametrize("name, form", [
    *((name, {}) for name in ("qwen3-moe", "gpt-oss", "deepseek-v2", "gemma4-moe", "qwen3-5-moe")),
    *(("glm4-moe", FORMATS[form]) for form in ("float32", "bfloat16", "int8"))])
def test_several_ranks_of_the_model(name, form):
    """Near one rank's values, and the same bits in chunks: sums over the model's ranks are those of two ranks."""
    (tokens, near), info = generated(name, 1, **form)
    for models, experts in ((2, 1), (2, 2)):
        unit = {"compute_unit": f"CPU:{','.join(['0'] * models)}+CPU:{','.join(['0'] * experts)}", **form}
        (own, whole), other = generated(name, models + experts, **unit)
        np.testing.assert_allclose(whole[0], near[0], atol=2e-2 if form else 3e-4, rtol=2e-3)
        assert own[0] == tokens[0] and other.model_hash != info.model_hash
        (_, cut), _ = generated(name, models + experts, 17, **unit)
        np.testing.assert_array_equal(np.stack(whole), np.stack(cut))


def test_bits_do_not_depend_on_the_batch():
    prompts = [prompt_of(5), prompt_of(40, seed=3)]
    fields = {"engine_max_length": 256, "cache_memory": 4 << 20, "max_step_tokens": 64, **mixed(2)}
    with Driver(checkpoint("qwen2-moe"), 3, **fields) as driver:
        both = together(driver, prompts, 16)
        alone = [together(driver, [prompt], 64)[0] for prompt in prompts]
    np.testing.assert_array_equal(np.stack(both), np.stack(alone))


def test_a_rejected_plan_leaves_the_ranks_in_step():
    with Driver(checkpoint("qwen3-moe"), 3, engine_max_length=256, cache_memory=4 << 20, **mixed(2)) as driver:
        before = driver.generate(PROMPT, 2)[0]
        steps = [driver.pool.submit(runner.step, b"no plan", False) for runner in driver.runners]
        with pytest.raises(ValueError, match="plan"):
            steps[0].result()
        assert all(step.exception() is None for step in steps[1:])      # they do not read plans
        assert driver.generate(PROMPT, 2)[0] == before


def test_ranks_hold_only_their_parts():
    with Driver(checkpoint("qwen3-moe"), 3, engine_max_length=256, cache_memory=4 << 20, **mixed(2)) as driver:
        graphs = [runner._model.graph for runner in driver.runners]
        assert not any("experts" in name for name in graphs[0].weights)
        assert all("experts" in name for graph in graphs[1:] for name in graph.weights)
        assert all(runner._executor.cache_bytes() == 0 for runner in driver.runners[1:])
        whole = driver.runners[0]._model.whole
        assert set(whole.weights) == set(graphs[0].weights) | set(graphs[1].weights)


def test_messages_and_rows_are_counted():
    """By ranks of experts: each layer of a step is a message, the last one of rows with outputs, if there are any."""
    with Driver(checkpoint("qwen3-moe"), 3, engine_max_length=256, cache_memory=4 << 20, **mixed(2)) as driver:
        layers = sum(op.type == "dispatch_rows" for op in driver.runners[0]._model.graph.ops)
        none = {"expert_messages": 0, "expert_rows": 0}
        assert [runner.expert_counts for runner in driver.runners] == [{}, none, none]
        driver.generate(PROMPT, 6, 40)      # 40 and 35 rows, then 5 of one
        messages, rows = 7 * layers - 1, 80 * (layers - 1) + 6
        counted = {"expert_messages": messages, "expert_rows": rows}
        assert [runner.expert_counts for runner in driver.runners] == [{}, counted, counted]
        assert driver.runners[0]._exchange.messages == messages
        wait = [runner.shared_memory.wait_seconds for runner in driver.runners]
        models = [RankModels(rank, 3, runner.shared_memory) for rank, runner in enumerate(driver.runners)]
        for model, runner in zip(models, driver.runners):
            model.runners["m"] = runner
        assert max(wait) > 0        # on a busy machine a rank may always find its message
        assert [model.numbers.get("expert_messages") for model in models] == [None, messages, messages]
        models[1]._unload("m")      # a counter does not fall
        assert models[1].numbers["expert_rows"] == rows and not models[1].runners


def test_counters_do_not_fall_while_a_model_is_unloaded():
    asked = threading.Event()

    class Slow:
        @property
        def expert_counts(self):
            asked.set()
            time.sleep(0.1)
            return {"expert_rows": 5}

        def close(self):
            pass

    models = RankModels(1, 2, None)
    models.runners["m"] = Slow()
    unloading = threading.Thread(target=models._unload, args=("m",))
    unloading.start()
    assert asked.wait(10) and models.numbers["expert_rows"] == 5
    unloading.join()
    assert models.numbers["expert_rows"] == 5 and not models.runners


def test_a_shared_expert_is_computed_before_the_sums_are_awaited():
    with Driver(checkpoint("glm4-moe"), 2, engine_max_length=256, cache_memory=4 << 20, **mixed(1)) as driver:
        graph = driver.runners[0]._model.graph
    ops = [(op.type, *op.outputs) for op in graph.ops]
    first = next(i for i, op in enumerate(ops) if op[0] == "dispatch_rows")
    last = next(i for i, op in enumerate(ops) if op[0] == "returned_sums")
    assert ("linear", "shared") in ops[first:last]


def test_what_is_refused():
    def refused(text: str, **fields):
        config = AsModelConfig(model_name="m", model_path="/m", **fields)
        with pytest.raises(AllSparkError, match=text):
            role_of(config, 0, 3)

    refused("needs 4 ranks, one of the model and 3 of experts, but this group has 3", compute_unit="CPU:0+CPU:0,1,2")
    refused("needs 4 ranks, 2 of the model and 2 of experts, but this group has 3", compute_unit="CPU:0,1+CPU:0,1")
    refused("allspark serve --gpus 2 --experts-on cpu", compute_unit="CUDA:2+CPU:0")
    refused("allspark serve --gpus 0,1 --experts-on cpu", compute_unit="CUDA:0,1+CPU:0,1")
    refused("speculation='mtp' in a mixed group", compute_unit="CPU:0+CPU:0,1", speculation="mtp")
    refused("lora_names in a mixed group", compute_unit="CPU:0+CPU:0,1", lora_names=["a"])
    for unit in ("CPU:0+CUDA:0", "CPU:0+", "CPU:0+CPU:0+CPU:0"):
        with pytest.raises(ValueError, match="compute_unit"):
            AsModelConfig(compute_unit=unit)


def test_a_group_without_memory_for_several_ranks_of_the_model_refuses_them():
    for rank in range(3):
        role = role_of(AsModelConfig(model_name="m", model_path="/m", compute_unit="CUDA:2,3+CPU:0"), rank, 3)
        check_first_ranks(role, "CUDA:2,3+CPU:0", SimpleNamespace(first_count=2))
        with pytest.raises(AllSparkError, match="among 2 ranks, which .* no memory for: .* --gpus 2,3 --experts-on"):
            check_first_ranks(role, "CUDA:2,3+CPU:0", SimpleNamespace(first_count=0))
    check_first_ranks(Role(0, 1, mixed=True), "CPU:0+CPU:0", SimpleNamespace(first_count=0))


def test_a_model_without_experts_is_refused():
    with pytest.raises(AllSparkError, match="qwen2.*no routed experts|no routed experts") as caught:
        generated("qwen2-gqa-tied", 2, **mixed(1))
    assert caught.value.status == AsStatus.ALLSPARK_PARAM_ERROR


def test_roles():
    config = AsModelConfig(model_name="m", model_path="/m", compute_unit="CPU:0+CPU:1,2")
    assert config.device_ids == [0] and config.expert_nodes == [1, 2]
    assert role_of(config, 0, 3) == Role(0, 1, mixed=True)
    assert role_of(config, 2, 3) == Role(1, 2, mixed=True, experts=True)
    two = AsModelConfig(model_name="m", model_path="/m", compute_unit="CPU:0,1+CPU:1")
    assert role_of(two, 1, 3) == Role(1, 2, mixed=True, model_ranks=2) and not role_of(two, 1, 3).exchanges
    assert role_of(two, 2, 3) == Role(0, 1, mixed=True, experts=True, model_ranks=2) and role_of(two, 0, 3).exchanges
    assert role_of(config, 2, 3).config_of(config).compute_unit == "CPU:0"
    assert role_of(AsModelConfig(model_name="m", model_path="/m"), 1, 2) == Role(1, 2)


def test_parts_of_a_graph_need_experts():
    empty = SimpleNamespace(ops=[], config=SimpleNamespace(architecture="X"))
    for part in (model_part, experts_part):
        with pytest.raises(ValueError, match="X has no routed experts"):
            part(empty)


def test_a_wait_ends_with_the_group():
    memories = shared_memories(2)
    exchanges = [_native.ExpertExchange(memory, 4, 8, 2, 8) for memory in memories]
    addresses = [exchange.address for exchange in exchanges]
    for exchange in exchanges:
        exchange.connect(addresses)
    with pytest.raises(ValueError, match="connect once"):
        exchanges[0].connect(addresses)
    other = _native.ExpertExchange(memories[1], 5, 8, 2, 8)
    with pytest.raises(ValueError, match="rank 1 is of another build, group or model"):
        _native.ExpertExchange(memories[0], 4, 8, 2, 8).connect([addresses[0], other.address])
    three = shared_memories(3)      # the second one computes the model, too: a rank's number is that of the group
    first, last = (_native.ExpertExchange(three[rank], 4 + (rank > 0), 8, 2, 8, model_ranks=2) for rank in (0, 2))
    with pytest.raises(ValueError, match="rank 2 is of another build, group or model"):
        first.connect([first.address, last.address])
    with pytest.raises(ValueError, match="sizes must be positive"):
        _native.ExpertExchange(memories[0], 0, 8, 2, 8)


def test_a_lost_rank_ends_the_step():
    """The rank of experts aborts instead of computing: the model's rank reports it."""
    with Driver(checkpoint("qwen3-moe"), 2, engine_max_length=256, cache_memory=4 << 20, **mixed(1)) as driver:
        timer = threading.Timer(0.3, driver.runners[1].shared_memory.abort, ["rank 1 is lost"])
        driver._each = lambda work: [work(driver.runners[0])]
        timer.start()
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            driver.generate(PROMPT, 1)
        del driver._each
