"""Bad input gets a clear error, and the server continues: after every test the engine still answers as before."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from allspark_client import (
    AllSparkError,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    AsStatus,
    ClientEngine,
    GenerateConfig,
    GenerateRequestStatus,
)
from support.checkpoints import prompt_of
from support.gemma4 import VOCAB

NAME = "bad-input"
PROMPT = prompt_of(20)
GREEDY = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def served(any_engine, tiny_model):
    """The engine, a started model, and that model's answer to a fixed request."""
    config = AsModelConfig(
        model_name=NAME, model_path=str(tiny_model), engine_max_length=128, engine_max_batch=2, max_queue=3
    )
    any_engine.install_model(config)
    any_engine.start_model(NAME)
    yield any_engine, ask(any_engine)
    any_engine.release_model(NAME)


@pytest.fixture
def engine(served):
    engine, answer = served
    yield engine
    assert ask(engine) == answer
    assert [state.name for state in engine.list_models()] == [NAME]


def ask(engine) -> list[int]:
    _, handle, results = engine.start_request(NAME, {"input_ids": PROMPT}, GREEDY)
    ids = [i for elements in results for i in elements.ids_from_generate]
    engine.release_request(NAME, handle)
    assert len(ids) == 8
    return ids


@pytest.fixture
def broken(tiny_model, tmp_path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


def install(engine, path, **fields):
    return engine.install_model(AsModelConfig(model_name="x", model_path=str(path), **fields))


def refused(status: AsStatus | tuple[AsStatus, ...], call, *args, match: str, **kwargs) -> None:
    with pytest.raises(AllSparkError, match=match) as caught:
        call(*args, **kwargs)
    assert caught.value.status in (status if isinstance(status, tuple) else (status,))
    assert str(caught.value).startswith(caught.value.status.name)


def edit_config(directory: Path, change) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    """Lets `change(header, data)` alter the safetensors header's entries and the tensors' bytes."""
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    change(header, data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(data))


# --- checkpoints ---


def test_missing_model(engine, tmp_path):
    either = (AsStatus.ALLSPARK_IO_ERROR, AsStatus.ALLSPARK_PARAM_ERROR)
    refused(either, install, engine, tmp_path / "none", match="none")


def test_missing_weight_file(engine, broken):
    (broken / "model.safetensors").unlink()
    refused(AsStatus.ALLSPARK_IO_ERROR, install, engine, broken, match=str(broken))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weight_file(engine, broken, keep):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(AsStatus.ALLSPARK_IO_ERROR, install, engine, broken, match="model.safetensors")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_config_without_a_needed_field(engine, broken, field):
    edit_config(broken, lambda config: config.pop(field))
    with pytest.raises((AllSparkError, ValueError), match=field):
        install(engine, broken)


def test_config_that_is_no_json(engine, broken):
    (broken / "config.json").write_text("{")
    with pytest.raises((AllSparkError, ValueError), match="config.json"):
        install(engine, broken)


def test_unknown_architecture(engine, broken):
    edit_config(broken, lambda config: config.update(architectures=["GuppyForCausalLM"], model_type="guppy"))
    with pytest.raises((AllSparkError, ValueError), match="GuppyForCausalLM") as caught:
        install(engine, broken)
    assert all(name in str(caught.value) for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"))


def test_tensor_of_a_wrong_shape(engine, broken):
    name = "model.layers.1.mlp.down_proj.weight"

    def change(header, data):
        header[name]["shape"].reverse()

    edit_tensors(broken, change)
    with pytest.raises((AllSparkError, ValueError), match=name):
        install(engine, broken)


def test_tensor_of_a_wrong_type(engine, broken):
    name = "model.layers.1.mlp.down_proj.weight"

    def change(header, data):
        header[name]["dtype"] = "I32"

    edit_tensors(broken, change)
    with pytest.raises((AllSparkError, ValueError), match=name):
        install(engine, broken)


def test_missing_tensor(engine, broken):
    name = "model.layers.2.self_attn.q_proj.bias"
    edit_tensors(broken, lambda header, data: header.pop(name))
    with pytest.raises((AllSparkError, ValueError), match=name):
        install(engine, broken)


def test_nan_weights_bring_a_warning(engine, broken, caplog):
    name = "model.layers.1.mlp.gate_proj.weight"

    def change(header, data):
        begin, _ = header[name]["data_offsets"]
        data[begin : begin + 4] = np.float32("nan").tobytes()

    edit_tensors(broken, change)
    with caplog.at_level(logging.WARNING):
        install(engine, broken)
    engine.start_model("x")
    _, _, results = engine.start_request("x", {"input_ids": PROMPT}, {"max_new_tokens": 3})
    engine.sync_request("x")
    assert results.GenerateStatus().final  # its output is undefined, but it must end
    engine.release_model("x")
    if not engine.is_allspark_work_as_service():
        assert any(name in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def test_cache_that_cannot_be_allocated(engine, tiny_model):
    refused(AsStatus.ALLSPARK_MEMORY_ERROR, install, engine, tiny_model, cache_memory=1 << 50, match="cache")
    refused(AsStatus.ALLSPARK_MEMORY_ERROR, install, engine, tiny_model, cache_memory=16, match="cache_memory=16")


def test_name_in_use(engine, tiny_model):
    config = AsModelConfig(model_name=NAME, model_path=str(tiny_model))
    refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.install_model, config, match="installed already")


# --- configurations ---


@pytest.mark.parametrize("values, match", [
    ({"modelname": "x"}, "modelname.*model_name"), ({"cache_span_size": 48}, "cache_span_size=48.*16, 32, 64, 128"),
    ({"engine_max_batch": 0}, "engine_max_batch=0"), ({"weight_dtype": "int7"}, "int7.*int8"),
    ({"compute_unit": "TPU:0"}, "TPU:0.*CPU:0"), ({"cache_mode": "AsCacheQuantI9"}, "AsCacheQuantI9.*AsCacheQuantI8"),
])  # fmt: skip
def test_model_config(values, match):
    with pytest.raises(ValueError, match=match):
        AsModelConfig(**values)
    with pytest.raises(ValueError, match=match):
        AsModelRuntimeConfigBuilder().from_dict(values)


def test_model_config_without_name_or_path(engine):
    with pytest.raises(ValueError, match="model_name"):
        engine.install_model(AsModelConfig(model_path="/x"))
    with pytest.raises(ValueError, match="model_path"):
        engine.install_model(AsModelConfig(model_name="x"))
    with pytest.raises(TypeError, match="AsModelConfig"):
        engine.install_model({"model_name": "x"})


@pytest.mark.parametrize("generate, error, match", [
    ({"top_k_": 1}, ValueError, "top_k_.*top_k"), ({"temprature": 1.0}, ValueError, "temprature.*temperature"),
    ({"temperature": 0.0}, ValueError, "temperature=0"), ({"temperature": float("nan")}, ValueError, "temperature=nan"),
    ({"top_p": 1.5}, ValueError, "top_p=1.5"), ({"top_p": "0.5"}, TypeError, "top_p.*str"),
    ({"top_k": -1}, ValueError, "top_k=-1"), ({"top_k": 2.5}, TypeError, "top_k"),
    ({"do_sample": 1}, TypeError, "do_sample"), ({"seed": -1}, ValueError, "seed=-1"),
    ({"num_beams": 4}, ValueError, "num_beams=4.*beam search is not offered"),
    ({"num_return_sequences": 2}, ValueError, "beam search"), ({"top_logprobs": 21}, ValueError, "top_logprobs=21"),
    ({"stop_words_ids": [[]]}, ValueError, r"stop_words_ids\[0\]"),
    ({"stop_words_ids": [5]}, TypeError, "stop_words_ids"),
    ({"bad_words_ids": [[VOCAB]]}, ValueError, f"{VOCAB}.*0 to {VOCAB - 1}"), ({"n": 0}, ValueError, "n=0"),
    ({"min_length": 30, "max_length": 25}, ValueError, "min_length=30"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
    ([1], TypeError, "generate_config"),
])  # fmt: skip
def test_generate_config(engine, generate, error, match):
    with pytest.raises(error, match=match):
        engine.start_request(NAME, {"input_ids": PROMPT}, generate)


# --- requests ---


@pytest.mark.parametrize("inputs, error, match", [
    ({"input_ids": []}, ValueError, "empty"), ({"input_ids": np.zeros((1, 0), np.int64)}, ValueError, "empty"),
    ({"input_ids": [1, VOCAB]}, ValueError, rf"input_ids\[1\]={VOCAB}.*0 to {VOCAB - 1}"),
    ({"input_ids": [1, -1]}, ValueError, r"input_ids\[1\]=-1.*negative"),
    ({"input_ids": [2**31]}, ValueError, "32 bits"),
    ({"input_ids": [1.5]}, TypeError, "float"), ({"input_ids": np.ones(3)}, TypeError, "float64"),
    ({"input_ids": [[1, 2], [3, 4]]}, ValueError, "shape"), ({"input_ids": "abc"}, TypeError, "str"),
    ({"text": ""}, ValueError, "empty"), ({"text": 5}, TypeError, "int"), ({"messages": []}, ValueError, "empty"),
    ({"messages": [{"role": "user"}]}, ValueError, "content"), ({"ids": [1]}, ValueError, "ids.*input_ids"),
    ({}, ValueError, "exactly one"), ([1], TypeError, "dict"),
    ({"input_ids": [1], "text": "a"}, ValueError, "exactly one"),
])  # fmt: skip
def test_inputs(engine, inputs, error, match):
    with pytest.raises(error, match=match):
        engine.start_request(NAME, inputs, GREEDY)


@pytest.mark.parametrize("length", [128, 129, 5000])
def test_prompt_longer_than_the_engine(engine, length):
    request = (NAME, {"input_ids": prompt_of(length)}, GREEDY)
    match = f"{length}.*engine_max_length=128"
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, *request, match=match)


def test_max_length_beyond_the_engine(engine):
    request = (NAME, {"input_ids": PROMPT}, {"max_length": 129})
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, *request, match="max_length=129")
    request = (NAME, {"input_ids": PROMPT}, {"max_length": 20})
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, *request, match="max_length=20")


def test_prompt_that_can_never_fit_the_cache(engine, tiny_model):
    info = engine.get_model_info(NAME)
    span = info.cache_bytes // info.num_spans
    install(engine, tiny_model, cache_memory=2 * span, engine_max_length=128)
    engine.start_model("x")
    assert engine.get_model_info("x").num_spans == 2
    request = ("x", {"input_ids": prompt_of(65)}, GREEDY)
    refused(AsStatus.ALLSPARK_CACHE_MEMORY_OUT, engine.start_request, *request, match="65 tokens.*2 spans of 32")
    _, _, results = engine.start_request("x", {"input_ids": PROMPT}, {"eos_token_id": -1})
    engine.sync_request("x")
    assert results.GenerateStatus() is GenerateRequestStatus.InternalError
    got = 0
    with pytest.raises(AllSparkError, match="ALLSPARK_CACHE_MEMORY_OUT"):
        for elements in results:
            got += len(elements.ids_from_generate)
    assert got == 2 * 32 + 1 - len(PROMPT)  # the last token takes no space in the cache
    engine.release_model("x")


def test_more_requests_than_the_queue_holds(engine):
    def start():
        return engine.start_request(NAME, {"input_ids": PROMPT}, {"eos_token_id": -1, "n": 1})

    started = []
    with pytest.raises(AllSparkError, match="max_queue=3") as caught:
        for _ in range(50):
            started.append(start())
    assert caught.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
    assert len(started) >= 5  # two run, three wait
    for _, handle, _results in started:
        engine.stop_request(NAME, handle)  # release alone, of an asynchronous client, does not wait for the end
        engine.release_request(NAME, handle)
    assert all(results.GenerateStatus().final for _, _, results in started)


def test_unknown_names_and_handles(engine):
    unknown = AsStatus.ALLSPARK_PARAM_ERROR
    refused(unknown, engine.start_request, "nobody", {"input_ids": [1]}, match=f"'nobody'.*'{NAME}'")
    for call in (engine.start_model, engine.stop_model, engine.release_model, engine.get_model_info):
        refused(unknown, call, "nobody", match="no model named 'nobody'")
    for call in (engine.get_as_engine_stat, engine.get_op_profiling_info, engine.sync_request):
        refused(unknown, call, "nobody", match="no model named 'nobody'")
    _, handle, _ = engine.start_request(NAME, {"input_ids": PROMPT}, GREEDY)
    engine.release_request(NAME, handle)
    for call in (engine.stop_request, engine.release_request, engine.sync_request):
        refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, call, NAME, handle, match=f"{handle}")
        with pytest.raises(TypeError, match="request_handle"):
            call(NAME, "1")


# --- servers and clients ---


@pytest.fixture(scope="module")
def service(tiny_model):
    """A service of its own in this process; the engine behind it, and its socket."""
    from allspark_server import Engine
    from allspark_server.rpc.service import Service

    folder = Path("/tmp", f"allspark-test-{os.getpid()}")
    folder.mkdir()
    engine = Engine()
    service = Service(engine, [f"unix:{folder}/socket"])
    try:
        config = AsModelConfig(model_name=NAME, model_path=str(tiny_model), engine_max_length=100_000)
        config.engine_max_batch = 4
        engine.install_model(config)
        engine.start_model(NAME)
        service.start()
        yield engine, service.addresses[0]
    finally:
        service.stop()
        engine.close()
        shutil.rmtree(folder)


def test_address_in_use(service):
    from allspark_server.access import Access
    from allspark_server.rpc.service import Service

    engine, address = service
    refused(AsStatus.ALLSPARK_IO_ERROR, Service(engine, [address]).start, match="in use")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = Service(engine, [f"127.0.0.1:{port}"], access=Access(insecure=True))
        refused(AsStatus.ALLSPARK_IO_ERROR, second.start, match=f"{port}.*in use")
    with ClientEngine(address) as client:
        ask(client)


def test_stale_unix_socket(service, tmp_path):
    from allspark_server.rpc.service import Service

    path = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    second = Service(service[0], [f"unix:{path}"])
    second.start()
    try:
        with ClientEngine(f"unix:{path}") as client:
            ask(client)
    finally:
        second.stop()


def test_dead_server(tmp_path):
    refused(AsStatus.ALLSPARK_IO_ERROR, ClientEngine, f"unix:{tmp_path}/nobody", match="nobody")


CLIENT = """
import sys, time
from allspark_client import ClientEngine
engine = ClientEngine(sys.argv[1])
for i in range(3):
    _, _, results = engine.start_request(sys.argv[2], {"input_ids": [1, 2, 3]}, {"eos_token_id": -1})
    results.Get()
print("streaming", flush=True)
time.sleep(100)
"""


@pytest.fixture
def client_process(service):
    engine, address = service
    process = subprocess.Popen([sys.executable, "-c", CLIENT, address, NAME], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "streaming\n"
    assert engine.get_as_engine_stat(NAME).running_request == 3
    yield process
    process.kill()
    process.wait()


def freed_within(engine, seconds: float) -> float:
    begin = time.monotonic()
    while engine.get_as_engine_stat(NAME).running_request or engine.get_as_engine_stat(NAME).used_span:
        assert time.monotonic() - begin < seconds, "the requests of a client that has gone still run"
        time.sleep(0.02)
    return time.monotonic() - begin


def test_client_that_is_killed(service, client_process):
    client_process.kill()
    freed_within(service[0], 1.0)
    ask(service[0])


def test_client_that_falls_silent(service, client_process):
    client_process.send_signal(signal.SIGSTOP)
    freed_within(service[0], 15.0)
    ask(service[0])


def test_generate_config_is_checked_on_assignment():
    config = GenerateConfig()
    with pytest.raises(ValueError, match="top_p=2"):
        config.top_p = 2
    with pytest.raises(AttributeError, match="topp.*top_p"):
        config.topp = 0.5
