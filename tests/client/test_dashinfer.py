"""DashInfer's API: scripts in the style of its CPU examples, run unchanged, and the helpers that they use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelRuntimeConfigBuilder, GenerateConfig, RoPEScaleMethod, as_token_ids
from allspark_client.helper import ConfigManager, EngineHelper, QuantizeConfig
from allspark_server import Engine, HuggingFaceModel
from allspark_server.weights.asgraph import read_graph
from support.checkpoints import checkpoint, prompt_of
from support.greedy import reference_greedy

MODEL_HUB = """
    import os
    def snapshot_download(model_id, revision=None, ignore_file_pattern=None):
        return os.environ["TEST_CHECKPOINT"]
"""


def script(folder: Path, model: Path, code: str, *words: str, **environment: str) -> str:
    """Output of a script under `python -m allspark_client.compat`, with a stub of its model hub."""
    hub = folder / "modelscope"
    hub.mkdir(exist_ok=True)
    (hub / "__init__.py").write_text(textwrap.dedent(MODEL_HUB))
    (folder / "script.py").write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "-m", "allspark_client.compat", "script.py", *words], cwd=folder, capture_output=True,
        text=True,
        timeout=120, env={**os.environ, "TEST_CHECKPOINT": str(model), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


BASIC = """
    import os, modelscope
    from dashinfer import allspark
    from dashinfer.allspark.engine import TargetDevice
    from dashinfer.allspark.prompt_utils import PromptTemplate
    from dashinfer.allspark._allspark import AsStatus, GenerateRequestStatus, AsCacheMode

    if __name__ == "__main__":
        in_memory = os.environ["IN_MEMORY"] == "1"
        name = "org/Tiny".replace("/", "_")
        loader = allspark.HuggingFaceModel(modelscope.snapshot_download("org/Tiny"), name, user_set_data_type="float32",
                                           in_memory_serialize=in_memory, trust_remote_code=True)
        engine = allspark.Engine()
        if in_memory:
            (loader.load_model().read_model_config()
             .serialize_to_memory(engine, enable_quant=True, weight_only_quant=True)
             .export_model_diconfig("diconfig.yaml").free_model())
        else:
            (loader.load_model().read_model_config()
             .serialize_to_path(engine, "out", enable_quant=False, weight_only_quant=True, skip_if_exists=False)
             .free_model())
        builder = loader.create_reference_runtime_config_builder(name, TargetDevice.CPU, [0], max_batch=8)
        builder.max_length(256)
        builder.kv_cache_mode(AsCacheMode.AsCacheDefault)
        runtime = builder.build()
        engine.install_model(runtime)
        if in_memory:
            loader.free_memory_serialize_file()
        engine.start_model(name)
        for text in ("你是谁？", "the quick brown fox"):
            prompt = PromptTemplate.apply_chatml_template(text)
            config = loader.create_reference_generation_config_builder(runtime)
            config.update({"top_k": 1})
            config.update({"repetition_penalty": 1.1})
            status, handle, queue = engine.start_request_text(name, loader, prompt, config)
            ids, status = [], queue.GenerateStatus()
            while status in (GenerateRequestStatus.Init, GenerateRequestStatus.Generating,
                             GenerateRequestStatus.ContextFinished):
                elements = queue.Get()
                if elements is not None:
                    ids += elements.ids_from_generate
                status = queue.GenerateStatus()
            print(len(ids) > 0, len(loader.init_tokenizer().get_tokenizer().decode(ids)) > 0)
            engine.release_request(name, handle)
        engine.stop_model(name)
        engine.release_model(name)
"""


@pytest.mark.parametrize("in_memory", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_basic(tmp_path, tiny_model, in_memory):
    assert script(tmp_path, tiny_model, BASIC, IN_MEMORY=in_memory) == "True True\nTrue True\n"


PERFORMANCE = """
    import numpy as np, torch.utils.dlpack, time, modelscope
    from dashinfer import allspark
    from dashinfer.allspark.engine import TargetDevice
    if __name__ == "__main__":
        engine = allspark.Engine()
        loader = allspark.HuggingFaceModel(modelscope.snapshot_download("x"), "m", user_set_data_type="float32")
        loader.load_model().read_model_config().serialize(engine, model_output_dir="out").free_model()
        engine.install_model(loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], max_batch=8)
                             .max_length(512).build())
        engine.start_model("m")
        config = {"uuid": "10000", "num_beams": 1, "num_return_sequences": 1, "temperature": 0.8, "do_sample": True,
                  "early_stopping": False, "top_k": 1, "top_p": 0}
        ids = np.random.randint(low=1, high=300, size=(1, 40)).astype(np.int64)
        capsule = {"input_ids": torch.utils.dlpack.to_dlpack(torch.Tensor(ids).to(torch.int64).cpu())}
        config["max_length"] = 60
        started = [engine.start_request("m", capsule, generate_config=config) for _ in range(4)]
        engine.sync_request("m", None)
        outputs = [engine.get_no_wait("m", queue) for _, _, queue in started]
        print([len(out) for out in outputs], all(out == outputs[0] for out in outputs))
        for _, handle, queue in started:
            print(int(engine.get_request_status("m", queue)), end=" ")
            engine.release_request("m", request_handle=handle)
        print(engine.get_op_profiling_info("m").split()[0])
        engine.stop_model("m"); engine.release_model("m")
"""


def test_performance_with_one_capsule_for_all(tmp_path, tiny_model):
    assert script(tmp_path, tiny_model, PERFORMANCE) == "[20, 20, 20, 20] True\n3 3 3 3 op\n"


EVALUATION = """
    import argparse, copy, os, subprocess
    from dashinfer.helper import EngineHelper, ConfigManager
    from modelscope import snapshot_download
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", default="models")
    parser.add_argument("--config_file", default="config.json")
    args = parser.parse_args()
    config = ConfigManager.get_config_from_json(args.config_file)
    where = subprocess.run("pip show dashinfer | grep Location | cut -d ' ' -f 2", shell=True, capture_output=True)
    os.environ["AS_DAEMON_PATH"] = where.stdout.decode().strip() + "/dashinfer/allspark/bin"
    os.environ["AS_NUMA_NUM"] = str(len(config["device_ids"]))
    os.environ["AS_NUMA_OFFSET"] = str(config["device_ids"][0])
    config["model_path"] = args.model_path
    config["convert_config"]["do_dynamic_quantize_convert"] = True
    helper = EngineHelper(config)
    helper.verbose = True
    path = snapshot_download("x", revision="v1")
    helper.init_tokenizer(path)
    assert not helper.check_model_exist()
    helper.convert_model(path)
    assert helper.check_model_exist()
    helper.init_engine()
    config = copy.deepcopy(helper.default_gen_cfg)
    config["max_length"], config["top_k"], config["repetition_penalty"] = 100, 1, 1.0
    request = helper.create_request(["the quick brown fox"], [config])[0]
    helper.process_one_request(request)
    print(request.out_tokens_len == len(request.out_tokens) > 0, len(request.out_text) > 0, request.in_tokens_len)
    texts = list(helper.process_one_request_stream(helper.create_request(["the quick brown fox"], [config])[0]))
    print(texts[-1] == request.out_text, len(texts) > 0)
    print("out_text" in helper.convert_request_to_jsonstr(request))
    helper.print_profiling_data([request], 1.0)
    helper.uninit_engine()
"""
CONFIG = {
    "model_name": "Tiny", "model_type": "Qwen_v20", "model_path": "~/dashinfer_models/", "data_type": "float32",
    "device_type": "CPU", "device_ids": [0], "multinode_mode": False,
    "engine_config": {"engine_max_length": 256, "engine_max_batch": 8, "do_profiling": True, "num_threads": 0,
                      "matmul_precision": "medium"},
    "generation_config": {"temperature": 1.0, "early_stopping": True, "top_k": 1024, "top_p": 0.8,
                          "repetition_penalty": 1.1, "presence_penalty": 0.0, "min_length": 0, "max_length": 256,
                          "no_repeat_ngram_size": 0, "eos_token_id": -1, "seed": 1234, "stop_words_ids": [[5, 6]]},
    "convert_config": {"do_dynamic_quantize_convert": False},
    "quantization_config": {"activation_type": "bfloat16", "weight_type": "uint8", "SubChannel": True, "GroupSize": 32},
}


@pytest.mark.parametrize("multi", [pytest.param(False, marks=pytest.mark.slow), True])
def test_evaluation(tmp_path, tiny_model, multi):
    """With several devices the helper starts a group of ranks."""
    config = json.loads(json.dumps(CONFIG))
    if multi:  # whose slices of the tiny model's matrices do not begin with a group
        config["device_ids"], config["quantization_config"]["SubChannel"] = [0, 1], False
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model_path", str(tmp_path / "converted")]
    lines = script(tmp_path, tiny_model, EVALUATION, *words).splitlines()
    assert [line.split()[0] for line in lines] == ["True", "True", "True"]
    name = f"Tiny_cpu_{'multi' if multi else 'single'}_float32_a16w8"
    graph = read_graph(tmp_path / "converted" / f"{name}.asgraph")
    assert graph.quantization.format.dtype == "int8" and graph.quantization.format.group_size == 32 * (not multi)


def test_helper_configs(tmp_path):
    path = tmp_path / "c.json"
    ConfigManager.save_config_as_json(CONFIG, path)
    assert ConfigManager.get_config_from_json(path) == CONFIG
    whole = ConfigManager.create_config({"model_name": "m", "model_type": "Qwen_v20", "device_type": None})
    assert whole["device_type"] == "CPU" and whole["engine_config"]["engine_max_batch"] == 8
    for change, text in (({"model_name": ""}, "model_name"), ({"data_type": "int7"}, "data_type"),
                         ({"device_ids": []}, "device_ids"), ({"enginge_config": {}}, "did you mean 'engine_config'")):
        with pytest.raises(ValueError, match=text):
            EngineHelper({**CONFIG, **change})
    for content in ("x", "[]"):
        path.write_text(content)
        with pytest.raises(ValueError, match="c.json"):
            ConfigManager.get_config_from_json(path)
    with pytest.raises(ValueError, match="does not exist"):
        ConfigManager.get_config_from_json(tmp_path / "none")
    assert QuantizeConfig("int8", "int8").customized() == {
        "weight_format": "int8", "group_size": 0, "compute_method": "activate_quant"}
    assert QuantizeConfig("bfloat16", "uint4", extra_option={"SubChannel": True, "GroupSize": 64}).customized() == {
        "weight_format": "uint4", "group_size": 64, "compute_method": "weight_only"}
    with pytest.raises(ValueError, match="weight_type='int3'"):
        QuantizeConfig("bfloat16", "int3")


def test_helper_requests(tmp_path, tiny_model):
    helper = EngineHelper({**CONFIG, "model_path": str(tmp_path)})
    try:
        with pytest.raises(AllSparkError, match="call convert_model first"):
            helper.init_engine()
        helper.init_tokenizer(str(tiny_model))
        for prompt, configs, text in (([], None, "is empty"), (["a"], [{}, {}], "2 configs for 1 prompts")):
            with pytest.raises(ValueError, match=text):
                helper.create_request(prompt, configs)
        with pytest.raises(TypeError, match=r"prompt\[0\]"):
            helper.create_request([5])
        request = helper.create_request([[3, 4, 5]])[0]
        assert request.in_tokens == [3, 4, 5] and request.gen_cfg is helper.default_gen_cfg
    finally:
        helper.engine.close()


# --- the loader ---


def test_rope_scaling(tmp_path):
    """Serialized with another rotary scaling, a checkpoint computes what transformers does with that scaling in
    config.json.
    """
    directory = checkpoint("qwen2-gqa-tied")
    loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32").load_model()
    made_for = loader.get_model_context_length()
    original = made_for // 4
    parameters = {"factor": 8.0, "original_max_position_embeddings": original, "type": "yarn"}
    loader.set_rope_scale_method(RoPEScaleMethod.YaRN, parameters)
    assert loader.get_model_context_length() == max(made_for, 8 * original)
    with pytest.raises(AllSparkError, match="call serialize_to_path first"):
        loader.create_reference_runtime_config_builder("m")
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    for file in Path(directory).iterdir():
        (scaled / file.name).symlink_to(file)
    (scaled / "config.json").unlink()
    config = json.loads((Path(directory) / "config.json").read_text())
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    config.pop("rope_parameters", None)
    config |= {"rope_theta": theta, "rope_scaling": parameters}
    (scaled / "config.json").write_text(json.dumps(config))
    prompt = prompt_of(90)
    outputs = []
    with Engine() as engine:
        loader.serialize_to_path(engine, tmp_path / "out")
        for name, builder in (("m", loader.create_reference_runtime_config_builder("m")),
                              ("s", HuggingFaceModel(str(scaled), "s").create_reference_runtime_config_builder("s")),
                              ("p", HuggingFaceModel(str(directory),
                                                     "p").create_reference_runtime_config_builder("p"))):
            engine.install_model(builder.max_length(256).build())
            engine.start_model(name)
            with engine.generate(name, {"input_ids": prompt}, {"do_sample": False, "max_new_tokens": 24,
                                                               "eos_token_id": -1, "logprobs": True}) as generation:
                outputs.append((generation.read().ids, generation.samples[0].token_logprobs_list))
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[2][0] == reference_greedy(directory, prompt, 24).tokens
    loader.serialize_to_path(None, tmp_path / "out", skip_if_exists=True)
    before = (tmp_path / "out" / "m.asgraph").stat().st_mtime_ns
    loader.set_rope_scale_method(RoPEScaleMethod.NO_SCALE)
    loader.serialize_to_path(None, tmp_path / "out", skip_if_exists=True)  # there is one, but of another scaling
    assert (tmp_path / "out" / "m.asgraph").stat().st_mtime_ns > before
    assert loader.set_rope_scale_method(RoPEScaleMethod.NTK, {"factor": 2.0})._config().rope.type == "dynamic"
    for method, parameters, error in ((RoPEScaleMethod.YaRN, {"type": "dynamic"}, ValueError),
                                      (RoPEScaleMethod.NTK, {"factor": -1.0}, AllSparkError), ("yarn", {}, TypeError)):
        with pytest.raises(error):
            loader.set_rope_scale_method(method, parameters)


def test_init_quantization(tmp_path):
    loader = HuggingFaceModel(str(checkpoint("qwen2-gqa-tied")), "m", user_set_data_type="float32")
    with pytest.raises(ValueError, match="has no quantization_config"):
        loader.init_quantization()
    with pytest.raises(ValueError):
        loader.init_quantization(customized_quant_config={"weight_format": "int3"})
    loader.init_quantization(customized_quant_config={"weight_format": "uint4", "group_size": 32,
                                                      "compute_method": "activate_quant"})
    loader.serialize(None, tmp_path, enable_quant=True)
    form = read_graph(tmp_path / "m.asgraph").quantization.format
    assert (form.dtype, form.group_size) == ("w4a8", 32)
    with pytest.raises(ValueError, match="model_output_dir is empty"):
        loader.serialize(None)
    memory = HuggingFaceModel(str(checkpoint("qwen2-gqa-tied")), "m", in_memory_serialize=True).serialize(None)
    assert str(memory._files[0]).startswith("/dev/shm")
    memory.free_memory_serialize_file()


def test_builder_and_values():
    builder = AsModelRuntimeConfigBuilder()
    assert builder.parse_device_type("CUDA:0,2") == ("CUDA", [0, 2])
    assert builder.set_compute_unit_from_str("CPU:0,1").set_span_init_size(0).enable_sparsity_matmul(False).build() \
        .compute_unit == "CPU:0,1"
    for call in (lambda: builder.set_span_init_size(5), lambda: builder.enable_sparsity_matmul(True),
                 lambda: builder.parse_device_type("TPU:0")):
        with pytest.raises(ValueError):
            call()
    assert GenerateConfig(top_p=0).top_p == 1.0


def test_capsules_are_left_as_they_are():
    import torch

    for tensor in (torch.arange(5), torch.arange(5)[None], torch.arange(10)[::2],
                   torch.arange(20, dtype=torch.int32)[3:7],
                   torch.arange(12).reshape(3, 4)[1]):
        capsule = torch.utils.dlpack.to_dlpack(tensor)
        assert as_token_ids(capsule) == as_token_ids(capsule) == tensor.flatten().tolist()
    array = np.arange(6)
    for capsule in (array.__dlpack__(), array[::-1].__dlpack__(), array.__dlpack__(max_version=(1, 0))):
        assert sorted(as_token_ids(capsule)) == as_token_ids(capsule)[:: 1 if as_token_ids(capsule)[0] == 0 else -1]
    taken = torch.utils.dlpack.to_dlpack(torch.arange(3))
    torch.from_dlpack(taken)
    for capsule in (taken, torch.utils.dlpack.to_dlpack(torch.ones(2)),
                    torch.utils.dlpack.to_dlpack(torch.tensor([True])),
                    torch.utils.dlpack.to_dlpack(torch.ones(2, dtype=torch.bfloat16))):
        with pytest.raises(TypeError, match="input_ids"):
            as_token_ids(capsule)


def test_numa_offset(monkeypatch):
    from allspark_launch.group.plan import _nodes_from

    assert _nodes_from("2", 0, [0, 1, 2, 3]) == [2, 3] and _nodes_from("1", 2, [0, 1, 2, 3]) == [1, 2]
    for offset, ranks, text in (("4", 1, "first NUMA node"), ("x", 1, "'x'"), ("2", 3, "needs 3 NUMA nodes")):
        with pytest.raises(ValueError, match=text):
            _nodes_from(offset, ranks, [0, 1, 2, 3])
