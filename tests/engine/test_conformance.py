"""One suite for all engines on a real checkpoint: Engine, and ClientEngine with groups of one and of two ranks.

Each promise of the API is tested here once. A test that needs to know which engine it talks to does not belong here.
"""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from allspark_client import (
    AbstractEngine,
    AllSparkError,
    AsEngineStat,
    ASGenerationConfigBuilder,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    AsStatus,
    GenerateConfig,
    GeneratedElements,
    GenerateRequestStatus,
    ModelInfo,
    RequestStatInfo,
    TargetDevice,
)
from support.checkpoints import prompt_of
from support.gemma4 import VOCAB
from support.greedy import check_greedy_output
from support.units import EXPERT_RANKS, UNIT

Status = GenerateRequestStatus
SUCCESS = AsStatus.ALLSPARK_SUCCESS
NAME = "conformance"
GREEDY = {"do_sample": False, "eos_token_id": -1}


@pytest.fixture(scope="module")
def engine(any_engine, tiny_model):
    """The engine under test, with a started model."""
    config = AsModelConfig(model_name=NAME, model_path=str(tiny_model), engine_max_length=512, engine_max_batch=8,
                           **UNIT)
    assert any_engine.install_model(config) is SUCCESS
    assert any_engine.start_model(NAME) is SUCCESS
    yield any_engine
    any_engine.release_model(NAME)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from allspark_server.tokenizer.tokenizer import Tokenizer

    return Tokenizer.from_dir(tiny_model)


def start(engine: AbstractEngine, prompt=None, inputs=None, **generate):
    inputs = inputs or {"input_ids": prompt_of(9) if prompt is None else prompt}
    status, handle, results = engine.start_request(NAME, inputs, generate)
    assert status is SUCCESS and isinstance(handle, int)
    return handle, results


def collect(results) -> GeneratedElements:
    whole = GeneratedElements()
    for elements in results:
        assert isinstance(elements, GeneratedElements) and elements.ids_from_generate
        whole.extend(elements)
    return whole


def run(engine: AbstractEngine, prompt=None, inputs=None, **generate) -> list[int]:
    handle, results = start(engine, prompt, inputs, **generate)
    ids = collect(results).ids_from_generate
    assert results.GenerateStatus() is Status.GenerateFinished
    assert engine.release_request(NAME, handle) is SUCCESS
    return ids


def refused(status: AsStatus, call, *args, match: str | None = None):
    with pytest.raises(AllSparkError, match=match) as caught:
        call(*args)
    assert caught.value.status is status
    assert str(caught.value).startswith(f"{status.name}: ")


# --- output ---


@pytest.mark.parametrize("length", [1, 33, 129, 300])
@pytest.mark.skipif("weight_dtype" in UNIT, reason="other weights than transformers'")
def test_greedy_output_is_that_of_transformers(engine, tiny_model, length):
    prompt = prompt_of(length)
    check_greedy_output(run(engine, prompt, **GREEDY, max_new_tokens=64), tiny_model, prompt)


def test_seed_decides(engine):
    first = run(engine, seed=5, max_new_tokens=24, eos_token_id=-1)
    assert run(engine, seed=5, max_new_tokens=24, eos_token_id=-1) == first
    assert run(engine, seed=6, max_new_tokens=24, eos_token_id=-1) != first
    free = {"temperature": 3.0, "max_new_tokens": 24, "eos_token_id": -1}
    assert run(engine, **free) != run(engine, **free)


def test_top_k_1_is_greedy(engine):
    assert run(engine, top_k=1, eos_token_id=-1, max_new_tokens=16) == run(engine, **GREEDY, max_new_tokens=16)


def test_min_p_and_logit_bias(engine):
    greedy = run(engine, do_sample=False, max_new_tokens=6)
    assert run(engine, min_p=1.0, temperature=3.0, seed=2, max_new_tokens=6) == greedy
    assert run(engine, logit_bias={7: 100}, do_sample=False, max_new_tokens=4) == [7] * 4
    assert greedy[0] not in run(engine, logit_bias={str(greedy[0]): -100}, do_sample=False, max_new_tokens=1)
    with pytest.raises(ValueError, match="logit_bias.*is not in the vocabulary"):
        run(engine, logit_bias={10**6: 1})


def test_lengths(engine):
    assert len(run(engine, prompt_of(9), eos_token_id=-1, max_length=20)) == 11
    assert len(run(engine, prompt_of(9), eos_token_id=-1, max_new_tokens=7)) == 7
    assert len(run(engine, prompt_of(500), eos_token_id=-1)) == 12  # the engine's length
    assert len(run(engine, prompt_of(500), eos_token_id=-1, max_new_tokens=50)) == 12


def test_end_of_sequence_and_stop_words(engine):
    words = run(engine, **GREEDY, max_new_tokens=40)
    cut = next(i for i in range(6, 40) if words[i] not in words[:i])
    greedy = {"do_sample": False, "max_new_tokens": 40}
    assert run(engine, **greedy, eos_token_id=words[cut]) == words[: cut + 1]
    assert run(engine, **greedy, eos_token_id=[VOCAB - 1, words[cut]])[: cut + 1] == words[: cut + 1]
    assert run(engine, **greedy, eos_token_id=words[cut], early_stopping=False) == words
    assert run(engine, **greedy, eos_token_id=-1, stop_words_ids=[words[cut - 2 : cut + 1]]) == words[: cut + 1]
    assert run(engine, **greedy, eos_token_id=-1, bad_words_ids=[[words[0]]])[0] != words[0]


def test_stop_strings(engine):
    prompt, config = {"text": "the quick brown fox"}, {"seed": 2, "temperature": 3.0, "early_stopping": False}
    text = collect(start(engine, inputs=prompt, **config, max_new_tokens=60)[1]).text
    stop = text[20:25]
    _, results = start(engine, inputs=prompt, **config, max_new_tokens=60, stop=[stop], logprobs=True)
    elements = collect(results)
    assert elements.text == text[: text.index(stop)] and (elements.finish_reason, elements.stop_string) == ("stop",
                                                                                                            stop)
    assert results.FinishReason() == "stop" and results.GenerateStatus() is Status.GenerateFinished
    assert len(elements.token_logprobs_list) == len(elements.ids_from_generate) == results.GeneratedLength() < 60
    assert collect(start(engine, **GREEDY, max_new_tokens=3)[1]).finish_reason == "length"


def test_logprobs(engine):
    _, results = start(engine, **GREEDY, max_new_tokens=10, logprobs=True, top_logprobs=4)
    elements = collect(results)
    assert len(elements.token_logprobs_list) == len(elements.log_probs_list) == 10
    for token, logprob, best in zip(elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list):
        assert len(best) == 4 and best[0] == (token, logprob) and logprob < 0
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    _, results = start(engine, max_new_tokens=3)
    plain = collect(results)
    assert plain.token_logprobs_list == [] and plain.log_probs_list == []


def test_samples_of_one_prompt(engine):
    generate = {"seed": 11, "temperature": 3.0, "max_new_tokens": 12, "eos_token_id": -1}
    alone = run(engine, **generate)
    _, results = start(engine, **generate, n=3)
    samples: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for elements in results:
        samples[elements.sample_index] += elements.ids_from_generate
    assert samples[0] == alone and len({tuple(ids) for ids in samples.values()}) == 3
    assert results.GeneratedLength() == 36


def test_prefix_cache_is_reported(engine):
    prompt = prompt_of(100, seed=42)
    first = collect(start(engine, prompt, **GREEDY, max_new_tokens=4)[1])
    second = collect(start(engine, prompt, **GREEDY, max_new_tokens=4)[1])
    salted = collect(start(engine, prompt, **GREEDY, max_new_tokens=4, cache_salt="x")[1])
    assert (first.prefix_cache_len, second.prefix_cache_len, salted.prefix_cache_len) == (0, 96, 0)
    assert first.ids_from_generate == second.ids_from_generate == salted.ids_from_generate


# --- inputs and configurations ---


def test_forms_of_input_ids(engine):
    import torch

    ids = prompt_of(12)
    expected = run(engine, ids, **GREEDY, max_new_tokens=5)
    array = np.array(ids)
    forms = [
        [ids],
        array,
        array[None].astype(np.int32),
        torch.tensor(ids),
        torch.tensor([ids]),
        torch.utils.dlpack.to_dlpack(torch.tensor([ids])),
    ]
    for form in forms:
        assert run(engine, form, **GREEDY, max_new_tokens=5) == expected
    _, _, results = engine.start_request_ids(NAME, None, array, {**GREEDY, "max_new_tokens": 5})
    assert collect(results).ids_from_generate == expected


def test_forms_of_generate_config(engine):
    wanted = {**GREEDY, "max_new_tokens": 5}
    ids = {"input_ids": prompt_of(12)}
    builder = ASGenerationConfigBuilder().do_sample(False).update({"eos_token_id": -1, "max_new_tokens": 5})
    outputs = [
        collect(engine.start_request(NAME, ids, config)[2]).ids_from_generate
        for config in (wanted, GenerateConfig(**wanted), builder, builder.build())
    ]
    assert outputs == [outputs[0]] * 4 and len(outputs[0]) == 5


def test_text(engine, tokenizer):
    text = "the quick brown fox 🙂"
    _, results = start(engine, inputs={"text": text}, seed=1, max_new_tokens=48, temperature=3.0)
    elements = collect(results)
    assert elements.text == tokenizer.decode(elements.ids_from_generate)
    ids = run(engine, tokenizer.encode(text), seed=1, max_new_tokens=48, temperature=3.0)
    assert ids == elements.ids_from_generate
    _, _, results = engine.start_request_text(NAME, None, text, {"seed": 1, "max_new_tokens": 48, "temperature": 3.0})
    assert collect(results).ids_from_generate == ids


def test_chat(engine, tokenizer):
    messages = [{"role": "user", "content": "one two three"}]
    _, results = start(engine, inputs={"messages": messages}, **GREEDY, max_new_tokens=8)
    assert collect(results).ids_from_generate == run(
        engine, tokenizer.encode_chat(messages), **GREEDY, max_new_tokens=8
    )


def test_chat_with_tools(engine, tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    options = {"tools": tools, "chat_template_kwargs": {"add_generation_prompt": False}}
    _, results = start(engine, inputs={"messages": messages, **options}, **GREEDY, max_new_tokens=8)
    rendered = tokenizer.encode_chat(
        [{"role": "user", "content": "one\ntwo"}], tools=tools, add_generation_prompt=False
    )
    assert collect(results).ids_from_generate == run(engine, rendered, **GREEDY, max_new_tokens=8)
    assert results.opened == "" and engine.get_model_info(NAME).chat_format == "hermes"
    for wrong, match in ((["x"], r"tools\[0\]"), ({"x": 1}, "tools must be a list")):
        with pytest.raises(TypeError, match=match):
            start(engine, inputs={"messages": messages, "tools": wrong})
    with pytest.raises(ValueError, match="chat_format='x' is not known; allowed: hermes"):
        start(engine, inputs={"messages": messages, "chat_format": "x"})
    with pytest.raises(ValueError, match="inputs has no key 'tools'"):
        start(engine, inputs={"text": "x", "tools": tools})


def test_config_builder(engine, tiny_model):
    builder = AsModelRuntimeConfigBuilder().model_name("built").model_dir(str(tiny_model))
    config = builder.compute_unit(TargetDevice.CPU, [0], 0).max_length(64).max_batch(2).build()
    assert engine.build_model_from_config_struct(config) is SUCCESS
    info = engine.get_model_info("built")
    assert (info.max_length, info.max_batch) == (64, 2)
    assert engine.release_model("built") is SUCCESS


@pytest.mark.skipif("weight_dtype" in UNIT, reason="the script's model has other weights")
def test_a_script_in_the_manner_of_dashinfer(engine, tiny_model, tmp_path):
    from allspark_server import HuggingFaceModel

    loader = HuggingFaceModel(str(tiny_model), "script", user_set_data_type="float32")
    loader.load_model().read_model_config().serialize_to_path(engine, str(tmp_path), skip_if_exists=True).free_model()
    builder = loader.create_reference_runtime_config_builder("script", TargetDevice.CPU, [0], max_batch=4)
    config = builder.max_length(256).build()
    assert engine.install_model(config) is SUCCESS and engine.start_model("script") is SUCCESS
    generation = loader.create_reference_generation_config_builder(config)
    generation.update({"do_sample": False, "eos_token_id": -1, "max_length": 40})
    tokenizer = loader.init_tokenizer().get_tokenizer()
    text = "the quick brown fox"
    status, handle, results = engine.start_request_text("script", loader, text, generation)
    assert status is SUCCESS
    assert engine.sync_request("script", handle) is SUCCESS
    ids = results.Get().ids_from_generate
    prompt = tokenizer.encode(text)
    prompt = list(getattr(prompt, "ids", prompt))
    assert ids == run(engine, prompt, do_sample=False, eos_token_id=-1, max_length=40)
    assert engine.release_request("script", handle) is SUCCESS
    versions = engine.get_file_information(config.model_path, config.weights_path)
    assert versions.current_version_engine == engine.get_version_full()
    assert versions.create_version_graph and versions.create_version_param
    for paths in ((tmp_path / "no", tmp_path / "no"), (config.weights_path, config.model_path)):
        refused(AsStatus.ALLSPARK_IO_ERROR, engine.get_file_information, *paths, match=str(paths[0]))
    assert engine.stop_model("script") is SUCCESS and engine.release_model("script") is SUCCESS


# --- the queue ---


def test_life_of_a_request(engine):
    handle, results = start(engine, eos_token_id=-1, max_new_tokens=20)
    assert not results.GenerateStatus().final or results.GeneratedLength() == 20
    first = results.Get()
    assert results.GenerateStatus() >= Status.ContextFinished
    rest = collect(results)
    assert len(first.ids_from_generate) + len(rest.ids_from_generate) == results.GeneratedLength() == 20
    assert results.GenerateStatus() is Status.GenerateFinished is engine.get_request_status(NAME, results)
    assert results.Get() is results.GetNoWait() is results.Get(10) is results.GetWithTimeout(10) is None
    stat = results.RequestStatInfo()
    assert isinstance(stat, RequestStatInfo)
    assert (stat.context_token_length, stat.generated_token_length) == (9, 20)
    assert 0 < stat.time_to_first_token <= stat.finish_time and abs(stat.arrival_time - time.time()) < 60
    assert engine.release_request(NAME, handle) is SUCCESS
    assert results.GenerateStatus() is Status.GenerateFinished  # the queue outlives the handle


def test_time_outs(engine):
    started = [start(engine, eos_token_id=-1) for _ in range(12)]  # more than the batch holds: the last one waits
    begin = time.monotonic()
    _, results = start(engine, eos_token_id=-1, priority=-1)
    assert results.GetNoWait() is None
    results.Get(1)
    assert time.monotonic() - begin < 5
    for handle, _ in started:
        engine.stop_request(NAME, handle)
    assert len(collect(results).ids_from_generate) > 0


def test_older_spellings(engine):
    _, results = start(engine, **GREEDY, max_new_tokens=6)
    ids = []
    while new := engine.get_wait(NAME, results):
        ids += new
    assert ids == run(engine, **GREEDY, max_new_tokens=6)
    assert engine.get_no_wait(NAME, results) == engine.get_wait(NAME, results) == []


def test_async_iteration(engine):
    async def read(results) -> list[int]:
        return [i async for elements in results for i in elements.ids_from_generate]

    async def main():
        queues = [start(engine, prompt_of(5, i), **GREEDY, max_new_tokens=9)[1] for i in range(4)]
        return await asyncio.gather(*map(read, queues))

    expected = [run(engine, prompt_of(5, i), **GREEDY, max_new_tokens=9) for i in range(4)]
    assert asyncio.run(main()) == expected


def test_results_are_streamed(engine):
    _, results = start(engine, eos_token_id=-1, max_new_tokens=400)
    pieces = sum(1 for _ in results)
    assert pieces > 10


def test_many_threads(engine):
    prompts = [prompt_of(1 + 3 * i, seed=i) for i in range(16)]
    expected = [run(engine, prompt, seed=i, max_new_tokens=16, eos_token_id=-1) for i, prompt in enumerate(prompts)]
    outputs: dict[int, list[int]] = {}

    def work(i: int) -> None:
        outputs[i] = run(engine, prompts[i], seed=i, max_new_tokens=16, eos_token_id=-1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == dict(enumerate(expected))


# --- generate ---


def generate(engine, prompt=None, inputs=None, want_text=None, **config):
    return engine.generate(NAME, inputs or {"input_ids": prompt or prompt_of(9)}, config, want_text=want_text)


def test_generate(engine, tokenizer):
    text = "the quick brown fox jumps over the lazy dog and the dog sleeps on; naïve café"
    config = {**GREEDY, "max_new_tokens": 20}
    with generate(engine, inputs={"text": text}, **config) as generation:
        pieces = list(generation)
        assert [i for e in pieces for i in e.ids_from_generate] == generation.ids
        assert "".join(e.text for e in pieces) == generation.text == tokenizer.decode(generation.ids)
        assert generation.finish_reason == "length" and generation.status is Status.GenerateFinished
        usage = generation.usage
        assert (usage.prompt_tokens, usage.generated_tokens) == (len(tokenizer.encode(text)), 20)
        handle = generation._handle
    assert generation.ids == run(engine, tokenizer.encode(text), **config)
    refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, engine.stop_request, NAME, handle)
    with generate(engine, tokenizer.encode(text), want_text=True, **config) as again:
        assert (again.read().text, again.usage.cached_tokens) == (generation.text, again.samples[0].prefix_cache_len)
    assert generate(engine, [1], **GREEDY)  # not entered: never started


def test_generate_samples(engine):
    config = {"seed": 11, "temperature": 3.0, "max_new_tokens": 12, "eos_token_id": -1}
    with generate(engine, n=3, logprobs=True, **config) as generation:
        generation.read()
    assert generation.ids == run(engine, **config)
    assert [len(sample.token_logprobs_list) for sample in generation.samples] == [12] * 3
    assert generation.usage.generated_tokens == 36


def test_generate_is_cancelled_and_left(engine):
    with generate(engine, eos_token_id=-1, seed=3) as generation:
        first = next(iter(generation))
        generation.cancel()
        generation.read()
        assert generation.status is Status.GenerateInterrupted and generation.finish_reason == "interrupted"
        assert generation.ids[: len(first.ids_from_generate)] == first.ids_from_generate
    with pytest.raises(ZeroDivisionError):
        with generate(engine, eos_token_id=-1) as generation:
            next(iter(generation))
            raise ZeroDivisionError
    refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, engine.stop_request, NAME, generation._handle)
    assert generation.status is Status.GenerateInterrupted
    with pytest.raises(ValueError, match="top_k"):
        generate(engine, top_k=-1)
    with pytest.raises(AllSparkError, match="exceeds engine_max_length"):
        with generate(engine, max_length=100_000):
            pass


# --- ending requests ---


def test_stop_request(engine):
    handle, results = start(engine, eos_token_id=-1, seed=3)
    first = results.Get()
    assert engine.stop_request(NAME, handle) is SUCCESS
    first.extend(collect(results))
    assert results.GenerateStatus() is Status.GenerateInterrupted
    got = first.ids_from_generate
    assert got == run(engine, eos_token_id=-1, seed=3)[: len(got)]
    assert engine.stop_request(NAME, handle) is SUCCESS  # harmless after the end
    assert engine.release_request(NAME, handle) is SUCCESS
    for call in (engine.stop_request, engine.release_request, engine.sync_request):
        refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, call, NAME, handle, match=str(handle))


def test_release_cancels(engine):
    handle, results = start(engine, eos_token_id=-1)
    assert engine.release_request(NAME, handle) is SUCCESS
    collect(results)
    assert results.GenerateStatus() is Status.GenerateInterrupted


def test_sync_request(engine):
    started = [start(engine, eos_token_id=-1, max_new_tokens=30) for _ in range(10)]
    assert engine.sync_request(NAME, started[0][0]) is SUCCESS
    assert started[0][1].GenerateStatus() is Status.GenerateFinished
    assert engine.sync_request(NAME) is SUCCESS
    assert {results.GenerateStatus() for _, results in started} == {Status.GenerateFinished}
    assert {results.GeneratedLength() for _, results in started} == {30}


def test_stop_model_and_start_it_again(engine):
    started = [start(engine, eos_token_id=-1)[1] for _ in range(12)]
    started[0].Get()
    assert engine.stop_model(NAME) is SUCCESS
    for results in started:
        collect(results)
    assert {results.GenerateStatus() for results in started} <= {Status.GenerateInterrupted, Status.GenerateFinished}
    assert started[-1].GenerateStatus() is Status.GenerateInterrupted
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, start, engine, match="start_model")
    assert [state.running for state in engine.list_models() if state.name == NAME] == [False]
    assert engine.start_model(NAME) is SUCCESS
    assert engine.start_model(NAME) is SUCCESS
    assert len(run(engine, eos_token_id=-1, max_new_tokens=4)) == 4


# --- information ---


def test_information(engine):
    info = engine.get_model_info(NAME)
    assert isinstance(info, ModelInfo)
    architecture = "Qwen3MoeForCausalLM" if EXPERT_RANKS else "Qwen2ForCausalLM"
    assert (info.name, info.architecture, info.vocab_size) == (NAME, architecture, VOCAB)
    assert (info.max_length, info.max_batch, info.span_size) == (512, 8, 32)
    assert info.weight_bytes > 0 and info.cache_bytes > 0 and info.ranks == engine.get_rank_nums()
    assert engine.get_rank_id() == 0
    assert isinstance(engine.is_allspark_work_as_service(), bool)
    assert engine.get_version_full()
    state = next(state for state in engine.list_models() if state.name == NAME)
    assert state.running and len(state.fingerprint) >= 16


def test_text_to_ids_and_back(engine, tokenizer):
    text = "naïve 你好 🙂"
    ids = engine.tokenize(NAME, {"text": text})
    assert ids == tokenizer.encode(text) and engine.tokenize(NAME, {"input_ids": ids}) == ids
    chat = [{"role": "user", "content": text}]
    assert engine.tokenize(NAME, {"messages": chat}) == tokenizer.encode_chat(chat)
    found = engine.detokenize(NAME, ids)
    assert found.text == text and b"".join(found.tokens) == text.encode() and len(found.tokens) == len(ids)
    with pytest.raises(ValueError, match=rf"ids\[1\]={VOCAB}.*vocabulary"):
        engine.detokenize(NAME, [1, VOCAB])
    with pytest.raises(AllSparkError, match="no model named"):
        engine.tokenize("other", {"text": text})


def test_statistics(engine):
    before = engine.get_as_engine_stat(NAME)
    run(engine, prompt_of(50, seed=77), eos_token_id=-1, max_new_tokens=30)
    after = engine.get_as_engine_stat(NAME)
    assert isinstance(after, AsEngineStat) and after.model_name == NAME
    assert after.total_generated_token - before.total_generated_token == 30
    assert after.total_prefill_token - before.total_prefill_token == 50
    assert (after.running_request, after.pendding_request, after.used_span) == (0, 0, 0)
    assert after.total_token == after.total_span * 32 and after.generate_token_persec > 0
    assert NAME in after.ToString() and after.dict()["model_name"] == NAME


def test_operator_times(engine):
    run(engine, max_new_tokens=3)
    lines = engine.get_op_profiling_info(NAME).splitlines()
    assert lines[0].split()[:7] == ["op", "count", "min", "max", "mean", "sum", "%"]
    assert {"linear", "span_attention", "sample"} <= {op for line in lines for op in line.split()[0].split("+")}
    of_group = ("rank ", "on the GPU: ", "a layer")     # lines of a mixed group, besides those of rank 0's ops
    parts = [line.split()[6] for line in lines[1:] if not line.startswith(of_group)]
    assert sum(map(float, parts)) == pytest.approx(100, abs=0.1)


def test_not_available_yet(engine, tiny_model):
    config = AsModelConfig(model_name="later", model_path=str(tiny_model), swap_threshold=0)
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.install_model, config, match="not available yet")


def test_device_memory(engine):
    if UNIT["compute_unit"].startswith("CPU:"):
        for call in (engine.unload_device_mem, engine.load_device_mem):
            refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, call, NAME, match="are for models on GPUs")
        return
    expected = run(engine, max_new_tokens=20, do_sample=False)
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.unload_device_mem, NAME, match="is running; call stop_model")
    assert engine.load_device_mem(NAME) is SUCCESS  # it is there
    engine.stop_model(NAME)
    for _ in range(2):
        assert engine.unload_device_mem(NAME) is SUCCESS
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.start_model, NAME, match="call load_device_mem first")
    assert engine.load_device_mem(NAME) is SUCCESS and engine.start_model(NAME) is SUCCESS
    assert run(engine, max_new_tokens=20, do_sample=False) == expected


def test_no_such_adapter(engine, tiny_model):
    if EXPERT_RANKS:
        refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.load_lora, NAME, "lora", match="in a mixed group is not")
        return
    for call in (engine.load_lora, engine.unload_lora):
        refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, call, NAME, "lora", match="adapter")
    args = (NAME, {"input_ids": [1]}, {"lora_name": "x"})
    refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, engine.start_request, *args, match="loaded: none")
    config = AsModelConfig(model_name="later", model_path=str(tiny_model), lora_names=["x"])
    refused(AsStatus.ALLSPARK_LORA_NOT_FOUND, engine.install_model, config, match="holds no adapter")
    assert [model.name for model in engine.list_models()] == [NAME]
