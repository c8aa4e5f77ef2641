"""Configs, token ids, errors, and their conversion to protobuf and back."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import allspark_client as a
import allspark_client.chat as a_chat
from allspark_client import convert
from allspark_client.config import check_available
from allspark_client.environment import check_environment
from allspark_client.request import RequestSpec

# --- errors ---


def test_error_text_starts_with_the_status():
    error = a.AllSparkError(a.AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "too long")
    assert str(error) == "ALLSPARK_EXCEED_LIMIT_ERROR: too long" and isinstance(error, RuntimeError)
    copied = pickle.loads(pickle.dumps(error))
    assert copied.status is error.status and str(copied) == str(error)
    assert a.AsStatus.ALLSPARK_SUCCESS == 0 and a.AsStatus.ALLSPARK_STREAMING == 17


@pytest.mark.parametrize(
    "error",
    [
        a.AllSparkError(a.AsStatus.ALLSPARK_LORA_NOT_FOUND, "übel"),
        a.AllSparkError(a.AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "full", retryable=True),
        ValueError("top_k=-1"),
        TypeError("no int"),
    ],
)
def test_errors_cross_the_wire(error):
    back = convert.error_from_pb(convert.error_to_pb(error))
    assert type(back) is type(error) and str(back) == str(error)
    assert getattr(back, "retryable", None) == getattr(error, "retryable", None)
    assert getattr(pickle.loads(pickle.dumps(error)), "retryable", None) == getattr(error, "retryable", None)


def test_other_errors_become_unknown_and_long_ones_are_cut():
    back = convert.error_from_pb(convert.error_to_pb(KeyError("x")))
    assert str(back) == "ALLSPARK_UNKNOWN_ERROR: KeyError: 'x'"
    assert len(str(convert.error_from_pb(convert.error_to_pb(ValueError("x" * 100_000))))) < 5000


# --- GenerateConfig ---


def test_generate_config_defaults():
    c = a.GenerateConfig()
    assert (c.do_sample, c.top_k, c.top_p, c.temperature, c.early_stopping) == (True, 0, 1.0, 1.0, True)
    assert c.seed is None and c.max_length is None and c.eos_token_id is None and c.n == 1
    assert (c.repetition_penalty, c.presence_penalty, c.frequency_penalty) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "key, value, error, text",
    [
        ("top_kk", 1, ValueError, "did you mean 'top_k'"),
        ("max_lenght", 1, ValueError, "did you mean 'max_length'"),
        ("no_such_thing_at_all", 1, ValueError, "no_such_thing_at_all"),
        ("top_k", True, TypeError, "top_k must be an int, not bool"),
        ("top_k", 1.0, TypeError, "top_k"),
        ("top_k", "1", TypeError, "top_k"),
        ("top_k", -1, ValueError, "top_k=-1"),
        ("do_sample", 1, TypeError, "do_sample must be a bool"),
        ("do_sample", None, TypeError, "do_sample"),
        ("temperature", 0, ValueError, "temperature=0 .*set do_sample=False or top_k=1"),
        ("temperature", float("nan"), ValueError, "temperature=nan"),
        ("temperature", True, TypeError, "temperature must be a number"),
        ("temperature", "hot", TypeError, "'hot'"),
        ("top_p", 1.01, ValueError, "at most 1"),
        ("top_p", -0.5, ValueError, "top_p"),
        ("temperature", 1e39, ValueError, "at most 3.4e"),
        ("repetition_penalty", 0, ValueError, "at least 1e-30"),
        ("repetition_penalty", 1e-42, ValueError, "at least 1e-30"),    # 0 in single precision: it would end the step
        ("presence_penalty", float("inf"), ValueError, "at most 3.4e"),
        ("frequency_penalty", -1e39, ValueError, "at least -3.4e"),
        ("seed", -1, ValueError, "seed=-1"),
        ("seed", 2**64, ValueError, "seed"),
        ("min_length", -1, ValueError, "min_length"),
        ("max_length", 0, ValueError, "max_length=0"),
        ("max_new_tokens", 0, ValueError, "max_new_tokens"),
        ("top_logprobs", 21, ValueError, "0 to 20"),
        ("n", 0, ValueError, "n=0"),
        ("eos_token_id", -2, ValueError, "eos_token_id"),
        ("eos_token_id", [1, -1], ValueError, r"eos_token_id\[1\]"),
        ("eos_token_id", "x", TypeError, "eos_token_id"),
        ("stop_words_ids", [1], TypeError, r"stop_words_ids\[0\]"),
        ("stop_words_ids", [[]], ValueError, r"stop_words_ids\[0\] is empty"),
        ("stop_words_ids", 5, TypeError, "list"),
        ("bad_words_ids", [[1, "x"]], TypeError, r"bad_words_ids\[0\]\[1\]"),
        ("uuid", 5, TypeError, "uuid must be a str"),
        ("cache_salt", "\ud800", ValueError, "cache_salt is not valid Unicode"),
        ("vocab_type", 9, ValueError, "VOCAB_TYPE_BPE"),
        ("response_format", "json", TypeError, "dict"),
        ("response_format", {"type": "jsonobject"}, ValueError, r"response_format.type='jsonobject'.*json_object"),
        ("response_format", {"type": "json_object", "x": 1}, ValueError, "response_format.x"),
        ("response_format", {"type": "regex"}, ValueError, "response_format.regex is missing"),
        ("response_format", {"type": "regex", "regex": 5}, TypeError, "response_format.regex"),
        ("response_format", {"type": "choice", "choice": []}, TypeError, "response_format.choice"),
        ("response_format", {"type": "grammar", "grammar": "x", "syntax": "peg"}, ValueError, "lark, ebnf"),
        ("response_format", {"type": "json_schema", "json_schema": "{"}, ValueError, "json_schema is not valid JSON"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}, TypeError, r"json_schema\.schema"),
        ("min_p", 1.5, ValueError, "min_p=1.5 is out of range"),
        ("min_p", "0.1", TypeError, "min_p must be a number"),
        ("logit_bias", [1], TypeError, "logit_bias must be a dict"),
        ("logit_bias", {"a": 1}, TypeError, "a key of logit_bias must be an int"),
        ("logit_bias", {-1: 1}, ValueError, "a key of logit_bias=-1"),
        ("logit_bias", {3: 101}, ValueError, r"logit_bias\[3\]=101"),
        ("logit_bias", {3: True}, TypeError, r"logit_bias\[3\] must be a number"),
        ("logit_bias", dict.fromkeys(range(1025), 1), ValueError, "at most 1024"),
        ("prompt_logprobs", 21, ValueError, "0 to 20"),
        ("prompt_logprobs", True, TypeError, "prompt_logprobs must be an int"),
        ("pooling", "max", ValueError, "allowed: 'auto', 'cls', 'last', 'mean'"),
        ("pooling", 1, TypeError, "pooling must be a str"),
        ("num_beams", 2, ValueError, "beam search is not offered"),
        ("num_beams", True, ValueError, "beam search"),
        ("num_return_sequences", 2, ValueError, "beam search is not offered"),
        ("length_penalty", 1.5, ValueError, "beam search is not offered"),
        ("input_len", 7, ValueError, "beam search"),
        ("async", True, ValueError, "beam search"),
    ],
)
def test_bad_generate_config(key, value, error, text):
    with pytest.raises(error, match=text):
        a.GenerateConfig.parse({key: value})
    with pytest.raises(error, match=text):
        a.GenerateConfig(**{key: value})
    with pytest.raises(error, match=text):
        a.ASGenerationConfigBuilder().update({key: value})


def test_good_generate_config():
    c = a.GenerateConfig.parse(
        {
            "num_beams": 1,
            "num_return_sequences": 1,
            "length_penalty": 1.0,
            "async": False,
            "input_len": 0,
            "top_k": np.int64(3),
            "temperature": 1,
            "stop_words_ids": np.array([[1, 2]]),
            "eos_token_id": (7, 8),
            "vocab_type": "VOCAB_TYPE_BPE",
            "do_sample": np.bool_(False),
            "seed": 2**64 - 1,
        }
    )
    assert c.top_k == 3 and type(c.top_k) is int and c.temperature == 1.0 and c.stop_words_ids == [[1, 2]]
    assert c.eos_token_id == [7, 8] and c.vocab_type is a.VocabType.VOCAB_TYPE_BPE and c.do_sample is False
    with pytest.raises(ValueError, match="min_length=5 exceeds max_length=4"):
        a.GenerateConfig.parse({"min_length": 5, "max_length": 4})
    with pytest.raises(TypeError, match="generate_config"):
        a.GenerateConfig.parse([1])
    given = a.GenerateConfig(top_k=2)
    parsed = a.GenerateConfig.parse(given)
    parsed.top_k = 9
    assert given.top_k == 2
    assert given.with_seed().seed is not None and given.seed is None and a.GenerateConfig(seed=0).with_seed().seed == 0
    assert dict(given)["top_k"] == 2


def test_generation_builder():
    b = (
        a.ASGenerationConfigBuilder(seed=4)
        .update({"top_p": 0.5})
        .do_sample(False)
        .early_stopping(False)
        .log_probs(True, 3)
    )
    c = b.top_k(7).max_length(99).build()
    assert (c.seed, c.top_p, c.do_sample, c.early_stopping, c.logprobs, c.top_logprobs, c.top_k, c.max_length) == (
        4,
        0.5,
        False,
        False,
        True,
        3,
        7,
        99,
    )
    b.top_k(8)
    assert c.top_k == 7 and a.GenerateConfig.parse(b).top_k == 8
    with pytest.raises(AttributeError, match="did you mean 'top_k'"):
        b.top_kk(3)
    hf = a.ASGenerationConfigBuilder(
        {"temperature": 0.7, "top_k": 20, "eos_token_id": [1, 2], "transformers_version": "5"}
    )
    assert hf.build().temperature == 0.7 and hf.build().eos_token_id == [1, 2]


# --- AsModelConfig ---


@pytest.mark.parametrize(
    "values, error, text",
    [
        ({"engine_max_lenght": 1}, ValueError, "did you mean 'engine_max_length'"),
        ({"engine_max_length": 0}, ValueError, "engine_max_length=0"),
        ({"engine_max_batch": True}, TypeError, "an int"),
        ({"compute_unit": "GPU:0"}, ValueError, "CPU:0"),
        ({"compute_unit": 3}, TypeError, "compute_unit"),
        ({"cache_span_size": 48}, ValueError, "16, 32, 64, 128"),
        ({"cache_mode": 7}, ValueError, "AsCacheDefault"),
        ({"cache_mode": "AsCacheDefalt"}, ValueError, "did you mean 'AsCacheDefault'"),
        ({"weight_dtype": "fp32"}, ValueError, "'float32'"),
        ({"weight_group_size": 100}, ValueError, "weight_group_size"),
        ({"enable_prefix_cache": 1}, TypeError, "a bool"),
        ({"model_path": 3}, TypeError, "path"),
        ({"speculation": "magic"}, ValueError, "prompt_lookup"),
        ({"enable_sparsity_matmul": True}, ValueError, "sparse"),
        ({"target_token_latency": -1}, ValueError, "target_token_latency"),
        ({"lora_names": "x"}, TypeError, "list of str"),
    ],
)
def test_bad_model_config(values, error, text):
    with pytest.raises(error, match=text):
        a.AsModelConfig(**values)
    with pytest.raises(error, match=text):
        a.AsModelConfig.from_dict(values)
    with pytest.raises(error, match=text):
        a.AsModelRuntimeConfigBuilder().update_from_dict(values)


def test_model_config(tmp_path):
    c = a.AsModelConfig("m", tmp_path, engine_max_batch=4, enable_sparsity_matmul=False)
    assert c.model_path == str(tmp_path) and c.validate() is c and c.compute_unit == "CPU:0" and c.device_ids == [0]
    assert (c.engine_max_length, a.AsModelConfig().engine_max_batch, c.cache_span_size, c.max_queue) == (
        2048,
        32,
        32,
        10_000,
    )
    assert a.AsModelConfig.from_dict(c.to_dict()) == c and copy.deepcopy(c) == c == pickle.loads(pickle.dumps(c))
    with pytest.raises(AttributeError, match="did you mean 'cache_mode'"):
        c.cache_mod = 1
    with pytest.raises(ValueError, match="engine_max_length=-1"):
        c.engine_max_length = -1
    for bad, text in (
        (a.AsModelConfig(model_path="x"), "model_name"),
        (a.AsModelConfig(model_path="x", model_name="x" * 1025), "1025 bytes"),
        (a.AsModelConfig("m"), "model_path"),
        (a.AsModelConfig("m", "x", speculation="draft"), "draft_model"),
    ):
        with pytest.raises(ValueError, match=text):
            bad.validate()


def test_model_builder():
    b = (
        a.AsModelRuntimeConfigBuilder()
        .model_name("m")
        .model_dir("/d", "p")
        .max_length(100)
        .max_batch(3)
        .compute_unit(a.TargetDevice.CPU_NUMA, [0, 1], 4)
        .kv_cache_span_size(64)
        .prefill_cache(False)
        .prefix_cache_ttl(9)
        .kv_cache_mode(a.AsCacheMode.AsCacheQuantI8)
        .max_prefill_length(55)
        .lora_max_rank(8)
        .lora_max_num(2)
    )
    c = b.build()
    assert (c.model_path, c.weights_path) == ("/d/p.asgraph", "/d/p.asparam")
    assert (c.compute_unit, c.num_threads, c.cache_span_size, c.enable_prefix_cache) == ("CPU:0,1", 4, 64, False)
    assert b.max_batch(9).build().engine_max_batch == 9 and c.engine_max_batch == 3
    assert b.compute_unit("cuda", [1, 2]).build().compute_unit == "CUDA:1,2"
    assert b.compute_unit(a.TargetDevice.CPU, [3, 4]).build().compute_unit == "CPU:3"
    with pytest.raises(ValueError, match="CPU_NUMA"):
        b.compute_unit("tpu")
    d = (
        a.AsModelRuntimeConfigBuilder()
        .from_dict(
            {
                "model_name": "m",
                "compute_unit": {"device_type": "CPU_NUMA", "device_ids": [0, 1], "compute_thread_in_device": 2},
                "engine_max_length": 64,
                "kv_cache_mode": "AsCacheQuantU4",
                "kv_cache_span_size": 16,
                "weight_dtype": "int8",
            }
        )
        .build()
    )
    assert (d.compute_unit, d.num_threads, d.engine_max_length, d.cache_mode, d.cache_span_size, d.weight_dtype) == (
        "CPU:0,1",
        2,
        64,
        a.AsCacheMode.AsCacheQuantU4,
        16,
        "int8",
    )


#: values of DashInfer's fields that would have no effect
INERT = (
    {"matmul_precision": "medium"},
    {"prefill_mode": a.AsMHAPrefill.AsPrefillXformer},
    {"eviction_strategy": a.AsEvictionStrategy.Random},
    {"scheduling_strategy": a.AsSchedulingStrategy.Balance},
    {"swap_threshold": 0},
)


@pytest.mark.parametrize(
    "config",
    [
        *[
            a.AsModelConfig("m", "p", **v)
            for v in INERT
        ],
        *[
            a.GenerateConfig(**v)
            for v in (
                {"mm_info": object()},
            )
        ],
    ],
)
def test_what_is_not_built_yet_says_so(config):
    with pytest.raises(a.AllSparkError, match="^ALLSPARK_INVALID_CALL_ERROR: .* is not available yet$"):
        check_available(config)


def test_what_is_built_passes():
    for dtype in ("bfloat16", "int8", "int4", "w8a8", "w4a8"):
        check_available(a.AsModelConfig("m", "p", weight_dtype=dtype, weight_group_size=64))
    for dtype in ("float32", "bfloat16", "float16", "float8"):  # what they need is the device's to tell
        check_available(a.AsModelConfig("m", "p", weight_dtype=dtype, cache_dtype=dtype))
    for mode in (a.AsCacheMode.AsCacheQuantI8, a.AsCacheMode.AsCacheQuantU4):
        check_available(a.AsModelConfig("m", "p", cache_mode=mode))
    check_available(a.GenerateConfig(logprobs=True, n=2))
    defaults = {name: a.AsModelConfig()[name] for values in INERT for name in values}  # of DashInfer, given by name
    check_available(a.AsModelConfig("m", "p", **defaults))


@pytest.mark.parametrize("values", INERT)
def test_a_refusal_names_field_value_and_what_is_allowed(values):
    ((name, value),) = values.items()
    given, allowed = (getattr(v, "name", v) for v in (value, a.AsModelConfig()[name]))
    with pytest.raises(a.AllSparkError, match=rf"{name}={given} \(allowed: {allowed}; "):
        check_available(a.AsModelConfig("m", "p", **values))


@pytest.mark.parametrize(
    "name, neutral, asking, advice",
    [
        ("CPU_CACHE_RATIO", "0.0", "0.5", "cache_memory"),
        ("AS_PROFILE", "OFF", "ON", "get_op_profiling_info"),
        ("ALLSPARK_TIME_LOG", "0", "1", "RequestStatInfo"),
        ("ALLSPARK_DISABLE_WARMUP", "1", "0", "no warm-up"),
    ],
)
def test_environment_without_effect_is_refused(monkeypatch, name, neutral, asking, advice):
    monkeypatch.setenv(name, neutral)
    check_environment()
    monkeypatch.setenv(name, asking)
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    from allspark_launch.group.plan import plan_group
    from allspark_launch.options import GroupOptions
    from allspark_server import Engine

    for start in (check_environment, a.ClientEngine, Engine, lambda: plan_group(GroupOptions())):
        with pytest.raises(a.AllSparkError, match=f"^ALLSPARK_INVALID_CALL_ERROR: .*{name}={asking} .*{advice}"):
            start()


# --- token ids ---


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        [[1, 2, 3]],
        [np.int32(1), 2, 3],
        [np.array([1, 2, 3])],
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]], dtype=np.uint8),
        np.array([0, 1, 9, 2, 9, 3], np.int64)[1::2],
    ],
)
def test_token_ids(ids):
    assert a.as_token_ids(ids) == [1, 2, 3] and type(a.as_token_ids(ids)[0]) is int


class Exporter:
    """An object that offers __dlpack__ and no more."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kw):
        return self.array.__dlpack__(**kw)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_token_ids_by_dlpack():
    array = np.array([[5, 6]], dtype=np.int64)
    assert a.as_token_ids(Exporter(array)) == [5, 6]
    assert a.as_token_ids(array.__dlpack__()) == [5, 6]
    capsule = array.__dlpack__()
    assert a.as_token_ids(capsule) == a.as_token_ids(capsule) == [5, 6]  # not consumed
    np.from_dlpack(Exporter(array))
    with pytest.raises(TypeError, match="float"):
        a.as_token_ids(Exporter(array.astype(np.float32)))


def test_token_ids_by_torch():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[5, 6]])
    assert a.as_token_ids(tensor) == a.as_token_ids(torch.utils.dlpack.to_dlpack(tensor)) == [5, 6]
    assert a.as_token_ids(torch.utils.dlpack.to_dlpack(tensor.to(torch.int32)[0])) == [5, 6]
    with pytest.raises(TypeError, match="input_ids"):
        a.as_token_ids(torch.utils.dlpack.to_dlpack(tensor.to(torch.bfloat16)))


@pytest.mark.parametrize(
    "ids, error, text",
    [
        ([], ValueError, "empty"),
        ([[]], ValueError, "empty"),
        (np.array([], np.int64), ValueError, "empty"),
        ([1, -1], ValueError, r"input_ids\[1\]=-1 is negative"),
        ([2**31], ValueError, r"input_ids\[0\]=2147483648 is beyond 32 bits"),
        ([-(2**31) - 1], ValueError, "negative"),
        ([2**70], ValueError, "beyond 64 bits"),
        ([1, True], TypeError, r"input_ids\[1\] must be an int, not bool"),
        ([1.0], TypeError, "float"),
        (["a"], TypeError, "str"),
        ([[1], [2]], ValueError, "one prompt"),
        (np.zeros((2, 3), int), ValueError, r"\[2, 3\]"),
        (np.zeros((1, 1, 3), int), ValueError, "shape"),
        (np.zeros(3), TypeError, "integer type"),
        (np.array([True]), TypeError, "bool"),
        ("abc", TypeError, "str"),
        (None, TypeError, "NoneType"),
        (7, TypeError, "int"),
        ({1: 2}, TypeError, "dict"),
    ],
)
def test_bad_token_ids(ids, error, text):
    with pytest.raises(error, match=text):
        a.as_token_ids(ids)


def test_a_list_of_ids_is_copied():
    ids = [3, 0, 2**31 - 1]
    assert a.as_token_ids(ids) == ids and a.as_token_ids(ids) is not ids


# --- protobuf ---


@pytest.mark.parametrize(
    "config",
    [
        a.GenerateConfig(pooling="mean", cache_salt="s"),
        a.GenerateConfig(),
        a.GenerateConfig(eos_token_id=-1),
        a.GenerateConfig(eos_token_id=5),
        a.GenerateConfig(eos_token_id=[5, 6]),
        a.GenerateConfig(
            do_sample=False,
            seed=2**64 - 1,
            temperature=0.3,
            top_k=4,
            top_p=0.9,
            repetition_penalty=1.3,
            presence_penalty=-0.25,
            frequency_penalty=0.125,
            suppress_repetition_in_generation=True,
            no_repeat_ngram_size=3,
            min_length=2,
            max_length=77,
            max_new_tokens=9,
            early_stopping=False,
            stop_words_ids=[[1, 2], [3]],
            bad_words_ids=[[4]],
            logprobs=True,
            top_logprobs=20,
            lora_name="l",
            response_format={"type": "json_schema", "json_schema": {"enum": [1, {"ü": None}]}},
            vocab={"a": 0, "b": 1},
            vocab_type=a.VocabType.VOCAB_TYPE_BPE,
            uuid="u",
            user_request_id="r",
            priority=-3,
            cache_salt="s",
            n=2,
            min_p=0.25,
            logit_bias={"7": -100, 8: 0.5},
            prompt_logprobs=0,
        ),
    ],
)
def test_generate_config_crosses_the_wire(config):
    message = type(convert.generate_config_to_pb(config)).FromString(
        convert.generate_config_to_pb(config).SerializeToString()
    )
    assert convert.generate_config_from_pb(message) == config


def test_model_config_crosses_the_wire():
    config = a.AsModelConfig(
        "m",
        "/p",
        compute_unit="CPU:0,1",
        cache_mode="AsCacheQuantI8",
        target_token_latency=2.5,
        lora_names=["a", "b"],
        enable_prefix_cache=False,
        cache_memory=1 << 40,
    )
    assert convert.model_config_from_pb(convert.model_config_to_pb(config)) == config
    message = convert.model_config_to_pb(config)
    message.fields["engine_max_lenght"].number = 4
    with pytest.raises(ValueError, match="did you mean 'engine_max_length'"):
        convert.model_config_from_pb(message)


@pytest.mark.parametrize(
    "spec",
    [
        RequestSpec("m", input_ids=[1, 2], generated=[3], config=a.GenerateConfig(top_k=3)),
        RequestSpec("m", text="ü", want_text=True),
        RequestSpec("m", messages=[{"role": "user", "content": "x"}], want_text=True),
        RequestSpec("m", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "é"}],
                    want_text=True, chat=a_chat.ChatOptions(chat_template_kwargs={"a": [1, None]})),
        RequestSpec("m", input_ids=[1], chat=a_chat.ChatOptions(
            tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required", chat_format="hermes",
            parallel_tool_calls=False)),
    ],
)
def test_requests_cross_the_wire(spec):
    assert convert.request_from_pb(convert.request_to_pb(spec)) == spec


def test_results_cross_the_wire():
    logprob = float(np.float32(-0.1))
    e = a.GeneratedElements([1, 2], [[(1, logprob), (5, -2.0)], []], [logprob, -1.0], [], 3, 1, 2, 4, "tëxt")
    assert convert.elements_from_pb(convert.elements_to_pb(e)) == e
    info = a.ModelInfo(name="m", eos_token_ids=[1, 2], tokenizer_dir=None, weight_bytes=1 << 40,
                       sampling_defaults={"do_sample": False, "top_p": 0.8, "top_k": 20})
    assert convert.model_info_from_pb(convert.model_info_to_pb(info)) == info
    stat = a.AsEngineStat("m", total_token=10, prefix_cache_hit_rate=0.5)
    assert convert.engine_stat_from_pb(convert.engine_stat_to_pb(stat)) == stat and "total_token: 10" in stat.ToString()
    assert (
        convert.stat_from_pb(convert.stat_to_pb({"finish_time": 1.5, "context_token_length": 3.0, "?": 1}))[
            "finish_time"
        ]
        == 1.5
    )


def test_stats_of_a_pool_add_up():
    total = a.AsEngineStat.merged(
        [
            a.AsEngineStat(
                "m",
                total_token=100,
                free_token=50,
                pendding_request=1,
                prefix_cache_hit_token=3,
                prefix_cache_hit_rate=1,
            ),
            a.AsEngineStat("m", total_token=100, free_token=100, pendding_request=2, prefix_cache_miss_token=1),
        ]
    )
    assert (total.total_token, total.pending_request, total.token_usage_percentage, total.prefix_cache_hit_rate) == (
        200,
        3,
        25,
        0.75,
    )
