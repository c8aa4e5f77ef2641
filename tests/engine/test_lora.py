"""Adapters: equal to PEFT's, several in one batch, loaded and unloaded while a model serves."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus, ClientEngine, GenerateRequestStatus as Status
from allspark_server import Engine, HuggingFaceModel
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
from support.driver import Driver
from support.tiny_configs import CONFIGS, DENSE
from support.units import UNIT
from support.waiting import wait_for

checkpoints = pytest.importorskip("support.checkpoints")  # needs torch and transformers
adapters = pytest.importorskip("support.adapters")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NAME = "qwen2-gqa-tied"
EVERY = sorted({**CONFIGS, **DENSE})
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
MLP_FUSED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]


def targets_of(name: str) -> list[str]:
    modules = {module.rsplit(".", 1)[-1] for module in adapters.modules_of(checkpoints.checkpoint(name))}
    return sorted(modules - {"lm_head"})


def peft_model(name: str, directory, dtype=torch.float32):
    """Transformers' model with a PEFT adapter."""
    peft = pytest.importorskip("peft")
    base = checkpoints.load_plain(checkpoints.checkpoint(name), dtype)
    return peft.PeftModel.from_pretrained(base, directory).eval().to(dtype)


class Adapted(Driver):
    """A Driver whose sequence uses an adapter."""

    def __init__(self, name: str, directory, world: int = 1, **fields):
        super().__init__(checkpoints.checkpoint(name), world, **fields)
        digests = {runner.load_adapter(3, str(directory)) for runner in self.runners}
        assert len(digests) == 1

    def step(self, plan):
        for item in plan.work:
            item.adapter = 3
        return super().step(plan)


@torch.inference_mode()
def check_against_peft(name: str, directory, world: int, lengths, tokens: int = 24, **fields) -> None:
    """Compares logits after prompts and greedy tokens with PEFT in float64, token by token with a cache, because
    dynamic scaling does not rotate cached keys again.
    """
    exact = peft_model(name, directory, torch.float64)
    with Adapted(name, directory, world, **fields) as driver:
        for length in lengths:
            ids, cache = checkpoints.prompt_of(length), transformers.DynamicCache()
            checkpoints.reset_rotary(exact.get_base_model())
            found, logits = driver.generate(ids, tokens)
            for i, token in enumerate(found):
                best = exact(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
                if i == 0:
                    checkpoints.check_logits(logits[0], best.numpy())
                two = torch.topk(best, 2).values
                if float((two[0] - two[1]) / best.std()) < checkpoints.NEAR_TIE:
                    break
                assert token == int(best.argmax()), (length, i)
                ids = [token]


@pytest.mark.parametrize("name, world, options", [
    pytest.param(NAME, 1, {}, marks=pytest.mark.slow),
    (NAME, 2, {"use_rslora": True, "ranks": {"q_proj": 3, "mlp.down_proj": 17}, "alpha_pattern": {"layers.1.*": 5}}),
    pytest.param("llama-biases", 3, {"targets": "all-linear", "dtype": "BF16"}, marks=pytest.mark.slow),
    ("phi3-window", 3, {"targets": FUSED, "dtype": "F16", "layers_to_transform": None}),
    pytest.param("glm4", 1, {"targets": MLP_FUSED}, marks=pytest.mark.slow),
])
def test_logits_are_those_of_peft(tmp_path, name, world, options):
    directory = adapters.write_adapter(tmp_path / "one", checkpoints.checkpoint(name), **options)
    check_against_peft(name, directory, world, (1, 40), tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_family_on_any_number_of_ranks(tmp_path, name, world):
    # Weaker than the weights: with three times their strength float32 itself is 1e-4 off.
    directory = adapters.write_adapter(tmp_path / "one", checkpoints.checkpoint(name), targets_of(name), rank=5,
                                       strength=0.15)
    check_against_peft(name, directory, world, (1, 7, 129, 300), tokens=16)


@pytest.mark.slow
def test_directories_that_peft_writes(tmp_path):
    """Directories of PEFT's own save_pretrained, for each way to name targets."""
    peft = pytest.importorskip("peft")
    for number, options in enumerate([
        {"target_modules": "all-linear", "r": 4},
        {"target_modules": r".*layers\.[02]\..*(q_proj|down_proj)", "lora_alpha": 7},
        {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1], "use_rslora": True},
        {"target_modules": ["q_proj", "gate_proj"], "exclude_modules": r".*layers\.0\..*",
         "rank_pattern": {r"layers\.2\.self_attn\.q_proj": 3}, "alpha_pattern": {"gate_proj": 40}},
    ]):
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.checkpoint(NAME), dtype=torch.float32)
        torch.manual_seed(number)
        model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options))
        model.save_pretrained(tmp_path / str(number))
        check_against_peft(NAME, tmp_path / str(number), 1, (33,), tokens=4)


@pytest.mark.parametrize("model", ["gemma4-small", pytest.param("qwen2.5-vl", marks=pytest.mark.slow)])
def test_adapters_of_models_that_see(tmp_path, model):
    """Their layers have other names in PEFT's files; prompts with images have adapters, too, in Python as elsewhere."""
    peft, vision = pytest.importorskip("peft"), pytest.importorskip("support.vision")
    reference = vision.Reference(model)
    torch.manual_seed(3)
    reference.model = peft.get_peft_model(reference.model, peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=r".*language_model.*\.(q_proj|o_proj|down_proj)"))
    reference.model.save_pretrained(tmp_path / "one")
    reference.model.eval()
    prompt, picture = [*range(11, 30), *[3, 4, 5], *range(40, 52)], [vision.picture(50, 70)]
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", str(vision.checkpoint(model)), lora_max_num=1, cache_memory=1 << 24,
                                           engine_max_length=400, num_threads=1, enable_prefix_cache=False))
        engine.start_model("m")
        engine.load_lora("m", str(tmp_path / "one"))
        inputs = {"input_ids": vision.placed(model, prompt), "images": picture}
        outputs = []
        for lora in ("", "one"):
            *_, results = engine.start_request("m", inputs, {**GENERATE, "lora_name": lora, "max_new_tokens": 12,
                                                             "eos_token_id": -1, "do_sample": False})
            outputs.append([i for elements in results for i in elements.ids_from_generate])
        expanded = reference.processor.expand(inputs["input_ids"], reference.processor.process(picture),
                                              reference.encode)
    assert outputs[0] != outputs[1]
    logits = reference.logits(expanded + outputs[1][:-1], picture)[len(expanded) - 1:]
    for token, row in zip(outputs[1], logits):
        assert row.max() - row[token] <= checkpoints.NEAR_TIE * row.std()


def logits_of(driver, items, steps: int = 3) -> list[list[bytes]]:
    """Bits of the logits of several sequences (prompt, adapter) that run in the same steps."""
    found = [[] for _ in items]
    new = [NewSlot(i, prompt, SamplingParams(do_sample=False, prompt_len=len(prompt)).encode())
           for i, (prompt, _) in enumerate(items)]
    spans, size = 0, driver.info.span_size
    lengths = [len(prompt) for prompt, _ in items]
    for step in range(steps):
        work = []
        for i, (_, adapter) in enumerate(items):
            have = 0 if not step else -(-(lengths[i] - 1) // size)
            fresh = -(-lengths[i] // size) - have
            work.append(WorkItem(i, lengths[i] if not step else 1, SAMPLE, spans=list(range(spans, spans + fresh)),
                                 adapter=adapter))
            spans, lengths[i] = spans + fresh, lengths[i] + 1
        plan = StepPlan(new=new, work=work).encode()
        results = driver._each(lambda runner: runner.step(plan, True))
        for i, row in enumerate(np.concatenate([result.logits for result in results], 1)):
            found[i].append(row.tobytes())
        new = []
    driver._each(lambda runner: runner.step(StepPlan(free=list(range(len(items)))).encode()))
    return found


@pytest.mark.parametrize("world, fields", [
    (1, {}),
    (1, {"weight_dtype": "bfloat16"}),
    pytest.param(1, {"weight_dtype": "w8a8"}, marks=pytest.mark.slow),
    pytest.param(1, {"weight_dtype": "int4", "weight_group_size": 32}, marks=pytest.mark.slow),
    (2, {}),
    pytest.param(3, {"weight_dtype": "bfloat16"}, marks=pytest.mark.slow),
])
def test_bits_depend_on_nothing_else_in_the_batch(tmp_path, world, fields):
    """Rows with an adapter have the bits that they have alone; rows without one beside them, the bits of a batch
    without adapters.
    """
    base = checkpoints.checkpoint(NAME)
    first = adapters.write_adapter(tmp_path / "first", base, rank=16)
    second = adapters.write_adapter(tmp_path / "second", base, ["q_proj", "down_proj"], rank=3)
    prompts = [checkpoints.prompt_of(length, seed) for seed, length in enumerate((1, 30, 45, 1, 17, 2))]
    which = [0, -1, 1, 0, -1, 1]
    with Driver(base, world, engine_max_batch=6, **fields) as driver:
        plain = [logits_of(driver, [(prompt, -1)])[0] for prompt in prompts]
        for runner in driver.runners:
            runner.load_adapter(0, str(first)), runner.load_adapter(1, str(second))
        alone = [logits_of(driver, [(prompt, adapter)])[0] for prompt, adapter in zip(prompts, which)]
        together = logits_of(driver, list(zip(prompts, which)))
        swapped = logits_of(driver, list(zip(prompts, [1 - a if a >= 0 else a for a in which])))
    assert together == alone
    for i, adapter in enumerate(which):
        assert (together[i] == plain[i]) == (adapter < 0), i
        assert (together[i] == swapped[i]) == (adapter < 0), i


def refused(status, call, *args, match=None):
    with pytest.raises(AllSparkError, match=match) as caught:
        call(*args)
    assert caught.value.status is status


def test_what_is_not_served_is_refused_by_name(tmp_path):
    base = checkpoints.checkpoint(NAME)
    good = adapters.write_adapter(tmp_path / "good", base, rank=4)
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", base, lora_max_rank=8, lora_max_num=2, cache_memory=1 << 22))

        def no(match, status=AsStatus.ALLSPARK_PARAM_ERROR, **config):
            directory = tmp_path / "bad"
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(good, directory)
            adapters.change_config(directory, **config)
            refused(status, engine.load_lora, "m", str(directory), match=match)

        no("use_dora is True", use_dora=True)
        no("modules_to_save is .'embed_tokens'.", modules_to_save=["embed_tokens"])
        no("bias is 'all'", bias="all")
        no("lora_bias is True", lora_bias=True)
        no("peft_type is 'LOHA'", peft_type="LOHA")
        no("fan_in_fan_out is True", fan_in_fan_out=True)
        no("init_lora_weights is 'pissa'", init_lora_weights="pissa")
        no("has no parameter 'mlp.experts.gate_up_proj' that", target_parameters=["mlp.experts.gate_up_proj"])
        no("something_new is 7", something_new=7)
        no("which adapter_config.json does not ask for", target_modules=["q_proj"])
        no("which adapter_config.json does not ask for", layers_to_transform=[0, 1])
        no(r"expected \[5, 112\]", r=5)
        no("r is -1", r=-1)
        no("target_modules is not a regular expression", target_modules="(")
        no("rank 9 for .*q_proj.*lora_max_rank is 8", AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR,
           rank_pattern={"q_proj": 9})
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, engine.load_lora, "m", str(tmp_path / "none"),
                match="holds no adapter")
        missing = adapters.write_adapter(tmp_path / "missing", base, ["q_proj"])
        adapters.change_config(missing, target_modules=["q_proj", "k_proj"])
        refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.load_lora, "m", str(missing), match="has no .*k_proj.lora_A")
        for wrong in ("", "name=", "/"):
            with pytest.raises(ValueError, match="names no adapter"):
                engine.load_lora("m", wrong)
        with pytest.raises(TypeError, match="lora_name must be a str"):
            engine.load_lora("m", 1)
        assert engine.list_models()[0].adapters == {}
        engine.load_lora("m", str(good))  # none of that is left
        assert list(engine.list_models()[0].adapters) == ["good"]
        engine.install_model(AsModelConfig("none", base, lora_max_num=0, cache_memory=1 << 22))
        refused(AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR, engine.load_lora, "none", str(good),
                match="lora_max_num is 0")


def test_clients_may_name_adapters_where_they_may_name_models(tmp_path):
    from allspark_server.access import ModelRoots
    for name in ("model/beside", "root", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    config = AsModelConfig("m", tmp_path / "model")
    roots = ModelRoots([tmp_path / "root"], [config])
    roots.check_adapter(str(tmp_path / "model/beside"), config), roots.check_adapter("beside", config)
    roots.check_adapter(str(tmp_path / "root"), config)
    (tmp_path / "model/link").symlink_to(tmp_path / "elsewhere")
    for name in ("elsewhere", "model/../elsewhere", "model/link"):
        refused(AsStatus.ALLSPARK_REQUEST_DENIED, roots.check_adapter, str(tmp_path / name), config, match="outside of")


GENERATE = {"max_new_tokens": 24, "early_stopping": False, "seed": 3, "logprobs": True}


def run(engine, prompt, lora="", name="m", **config):
    """Ids and log probabilities of each sample, and the number of prompt positions from the prefix cache."""
    _, handle, queue = engine.start_request(name, {"input_ids": prompt},
                                            {**GENERATE, **({"lora_name": lora} if lora else {}), **config})
    ids, logprobs, cached = [[] for _ in range(config.get("n", 1))], [[] for _ in range(config.get("n", 1))], 0
    for elements in queue:
        ids[elements.sample_index] += elements.ids_from_generate
        logprobs[elements.sample_index] += elements.token_logprobs_list
        cached = elements.prefix_cache_len
    assert queue.GenerateStatus() is Status.GenerateFinished
    engine.release_request(name, handle)
    return ids, logprobs, cached


def test_many_adapters_come_and_go_while_a_model_serves(tmp_path):
    base = checkpoints.checkpoint(NAME)
    for i in range(4):
        adapters.write_adapter(tmp_path / f"a{i}", base, rank=2 + 3 * i)
    prompt = checkpoints.prompt_of(70)
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", base, lora_max_num=3, engine_max_batch=16, cache_memory=1 << 24, **UNIT,
                                           enable_prefix_cache=False, lora_names=[str(tmp_path / "a0")]))
        engine.start_model("m")
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, run, engine, prompt, "a1", match="loaded: 'a0'")
        plain, first = run(engine, prompt), run(engine, prompt, "a0")
        assert run(engine, prompt, str(tmp_path / "a0")) == first != plain
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, run, engine, prompt, "/elsewhere/a0")
        ended, others = threading.Event(), []

        def serve() -> None:
            while not ended.is_set():
                others.append((run(engine, prompt), run(engine, prompt, "a0")))

        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        engine.load_lora("m", str(tmp_path / "a1"))
        engine.load_lora("m", f"second={tmp_path / 'a2'}")
        refused(AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR, engine.load_lora, "m", str(tmp_path / "a3"))
        refused(AsStatus.ALLSPARK_LORA_ALREADY_LOADED, engine.load_lora, "m", str(tmp_path / "a1"))
        _, handle, _ = engine.start_request("m", {"input_ids": prompt}, {"lora_name": "a0", "early_stopping": False})
        refused(AsStatus.ALLSPARK_LORA_IN_USE, engine.unload_lora, "m", "a0", match="in use by [1-4] requests")
        engine.release_request("m", handle)
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, engine.unload_lora, "m", "a3")
        found = {name: run(engine, prompt, name) for name in ("a1", "second")}
        engine.unload_lora("m", "a1")
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, run, engine, prompt, "a1")
        engine.load_lora("m", str(tmp_path / "a3"))  # in its place
        found["a3"] = run(engine, prompt, "a3")
        ended.set()
        for thread in threads:
            thread.join()
        assert others and set(map(repr, others)) == {repr((plain, first))}
        assert len({repr(each) for each in (plain, first, *found.values())}) == 5
        engine.unload_lora("m", "a0")
        assert run(engine, prompt, "a3") == found["a3"] and run(engine, prompt) == plain
        assert sorted(engine.list_models()[0].adapters) == ["a3", "second"]


def test_serialized_with_adapters(tmp_path):
    """Adapters beside the serialized model's files, found by name as in DashInfer, give the bits of the checkpoint's
    own.
    """
    base, chosen = checkpoints.checkpoint(NAME), {"input_base_dir": tmp_path, "lora_names": ["one", "two"]}
    for name in chosen["lora_names"]:
        adapters.write_adapter(tmp_path / name, base)
    HuggingFaceModel(base, "m").serialize_to_path(None, tmp_path / "out", lora_cfg=chosen)
    HuggingFaceModel(base, "m").serialize_to_path(None, tmp_path / "only", lora_cfg={**chosen, "lora_only": True})
    assert sorted(p.name for p in (tmp_path / "only").iterdir()) == ["one", "two"]
    prompt = checkpoints.prompt_of(30)
    with Engine() as engine:
        for name, path, loras in (("m", tmp_path / "out" / "m.asgraph", ["one", "two"]),
                                  ("base", base, [str(tmp_path / "one"), str(tmp_path / "two")])):
            engine.install_model(AsModelConfig(name, path, cache_memory=1 << 22))
            engine.start_model(name)
            for lora in loras:
                engine.load_lora(name, lora)
        found = [run(engine, prompt, lora) for lora in ("one", "two", "")]
        assert found == [run(engine, prompt, lora, "base") for lora in ("one", "two", "")]
        assert len({repr(each) for each in found}) == 3
    other = adapters.write_adapter(tmp_path / "other", checkpoints.checkpoint("llama-biases"))
    refused(AsStatus.ALLSPARK_PARAM_ERROR, lambda: HuggingFaceModel(base, "m").serialize_to_path(
        None, tmp_path / "none", lora_cfg={"input_base_dir": tmp_path, "lora_names": [other.name]}), match="expected")
    assert not (tmp_path / "none").exists()


def test_prefixes_are_an_adapters_own(tmp_path):
    base = checkpoints.checkpoint(NAME)
    for name in ("a", "b"):
        adapters.write_adapter(tmp_path / name, base)
    shutil.copytree(tmp_path / "a", tmp_path / "same")
    prompt = checkpoints.prompt_of(100)
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", base, cache_memory=1 << 24, **UNIT, lora_names=[
            str(tmp_path / name) for name in ("a", "b", "same")]))
        engine.start_model("m")
        cold = {name: run(engine, prompt, name) for name in ("", "a", "b")}
        assert [each[2] for each in cold.values()] == [0, 0, 0]
        for name in ("", "a", "b"):
            ids, logprobs, cached = run(engine, prompt, name)
            assert (ids, logprobs, cached) == (*cold[name][:2], 96)
        assert run(engine, prompt, "same") == (*cold["a"][:2], 96)  # by what it holds, not by its name
        digest = engine.list_models()[0].adapters["a"]
        assert run(engine, prompt, cache_salt=f"\0adapter {digest} ")[2] == 0
        assert run(engine, prompt, "a", cache_salt="s")[2] == 0
        assert run(engine, prompt, "a", cache_salt="s")[2] == 96


def test_speculation_and_several_samples(tmp_path):
    base = checkpoints.checkpoint(NAME)
    directory = adapters.write_adapter(tmp_path / "a", base)
    prompt = checkpoints.prompt_of(12) * 6
    found = []
    for speculation in ("off", "prompt_lookup", "draft"):
        draft = {"draft_model": str(base)} if speculation == "draft" else {}
        with Engine() as engine:
            engine.install_model(AsModelConfig("m", base, cache_memory=1 << 24, **UNIT, speculation=speculation,
                                               lora_names=[str(directory)], **draft))
            engine.start_model("m")
            found.append([run(engine, prompt, lora, n=2, top_k=3, max_new_tokens=40)[:2] for lora in ("a", "")])
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


def test_a_restarted_engine_has_its_adapters(tmp_path):
    base = checkpoints.checkpoint(NAME)
    for name in ("a", "b", "gone"):
        adapters.write_adapter(tmp_path / name, base)
    state, prompt = str(tmp_path / "state.json"), checkpoints.prompt_of(20)
    with Engine(state_file=state) as engine:
        engine.install_model(AsModelConfig("m", base, cache_memory=1 << 22, **UNIT,
                                           lora_names=[str(tmp_path / "gone")]))
        engine.start_model("m")
        engine.load_lora("m", str(tmp_path / "a"))
        engine.load_lora("m", f"other={tmp_path / 'b'}")
        engine.unload_lora("m", "gone")
        before, digests = run(engine, prompt, "other"), engine.list_models()[0].adapters
    with Engine(state_file=state) as engine:
        engine.restore()
        assert engine.list_models()[0].adapters == digests and set(digests) == {"a", "other"}
        assert run(engine, prompt, "other") == before


@pytest.mark.parametrize("victim", [0])
def test_a_request_outlives_its_server_with_its_adapter(tmp_path, monkeypatch, victim):
    """On two ranks. The group that takes over has loaded the adapter itself."""
    from support.processes import ranks_of

    base = checkpoints.checkpoint(NAME)
    directory = adapters.write_adapter(tmp_path / "a", base, rank=6)
    monkeypatch.setenv("AS_NUMA_NUM", "2")
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    prompt, config = checkpoints.prompt_of(40), {"max_new_tokens": 400}
    with ClientEngine(reconnect_timeout=60) as engine:
        engine.install_model(AsModelConfig("m", base, cache_memory=1 << 24))
        engine.start_model("m")
        plain = run(engine, prompt, **config)[:2]
        engine.load_lora("m", "a")  # it is here, not where the server is
        refused(AsStatus.ALLSPARK_LORA_ALREADY_LOADED, engine.load_lora, "m", str(directory))
        undisturbed = run(engine, prompt, "a", **config)[:2]
        assert undisturbed != plain
        _, _, queue = engine.start_request("m", {"input_ids": prompt}, {**GENERATE, **config, "lora_name": "a"})
        ids, logprobs, killed = [], [], False
        for elements in queue:
            ids += elements.ids_from_generate
            logprobs += elements.token_logprobs_list
            if not killed and len(ids) >= 50:
                killed = True
                ranks_of(engine._pool.group._process.pid)[victim].kill()
        assert ([ids], [logprobs]) == undisturbed
        assert engine.get_rank_nums() == 2 and list(engine.list_models()[0].adapters) == ["a"]
        engine.unload_lora("m", "a")
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, run, engine, prompt, "a")


def test_the_http_server_knows_adapters_as_models(tmp_path):
    httpx = pytest.importorskip("httpx")
    from allspark_launch.group.background import background_group, shipped_model
    from support.http_helpers import http_server_for

    base = shipped_model()
    adapters.write_adapter(tmp_path / "pirate", base, rank=4, strength=1.0)
    model = ["--model", str(base), "--max-length", "256", "--model-root", str(tmp_path)]
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    with background_group(model, timeout=60.0) as group, ClientEngine(group.addresses[0]) as engine, \
            http_server_for(group.addresses[0], insecure=True) as address, \
            httpx.Client(base_url=f"http://{address}/v1", timeout=60) as server:
        engine.load_lora("fable", str(tmp_path / "pirate"))

        def ask(name: str, path: str = "/completions", **more):
            answer = server.post(path, json={"model": name, **body, **more})
            return answer.status_code, answer.json()

        def listed() -> dict:
            return {card["id"]: card.get("parent") for card in server.get("/models").json()["data"]}

        wait_for(lambda: listed() == {"fable": None, "pirate": "fable"}, 10)
        (_, plain), (status, told) = ask("fable"), ask("pirate")
        assert status == 200 and told["model"] == "pirate"
        assert plain["choices"][0]["text"] != told["choices"][0]["text"]
        _, handle, queue = engine.start_request("fable", {"text": body["prompt"]}, {
            "do_sample": False, "max_new_tokens": 16, "lora_name": "pirate"})
        assert "".join(elements.text for elements in queue) == told["choices"][0]["text"]
        engine.release_request("fable", handle)
        assert server.get("/models/pirate").json()["max_model_len"] == 256
        chat = {"model": "pirate", "messages": [{"role": "user", "content": "A story"}], "max_tokens": 4}
        assert server.post("/chat/completions", json=chat).json()["model"] == "pirate"
        engine.unload_lora("fable", "pirate")
        wait_for(lambda: listed() == {"fable": None}, 10)
        status, error = ask("pirate")
        assert status == 404 and error["error"]["code"] == "model_not_found"
