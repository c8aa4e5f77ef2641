"""The engine's thread, requests and models, on a group without tensors."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time

import pytest

from allspark_client import AllSparkError, AsStatus
from allspark_client.config import GenerateConfig
from allspark_client.queue import ResultQueue
from allspark_client.request import RequestSpec
from allspark_server.engine.results import QueueSink
from allspark_server.runtime.native import DeviceLost
from support.engine_helpers import Status, collect, config, refused, run
from support.fake_group import expected_output


def test_many_threads_get_their_own_output(make_engine):
    engine = make_engine()
    outputs = {}

    def work(seed):
        prompt = [(seed * 31 + i) % 1000 for i in range(1 + seed * 3)]
        outputs[seed] = run(engine, prompt, max_new_tokens=10 + seed) == expected_output(prompt, 10 + seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == dict.fromkeys(range(24), True)
    stat = engine.get_as_engine_stat("m")
    assert (stat.running_request, stat.pendding_request, stat.used_span) == (0, 0, 0)
    assert stat.total_generated_token == sum(10 + seed for seed in range(24))
    assert stat.generate_token_persec > 0


def test_statuses_and_statistics_of_a_request(make_engine):
    engine = make_engine(delay=0.005)
    seen = []

    class Recorder:
        done = threading.Event()

        def on_token(self, handle, sample, token, logprob, top, text, cached, end):
            seen.append(([token], text))

        def on_begun(self, handle):
            pass

        def on_status(self, handle, status):
            seen.append(status)

        def on_finish(self, handle, status, error, stat, reason):
            seen.append(status)
            self.reason = reason
            self.stat, self.error = stat, error
            self.done.set()

    sink = Recorder()
    spec = RequestSpec("m", input_ids=[1, 2, 3], config=GenerateConfig(max_new_tokens=3, eos_token_id=-1))
    flushes = []
    engine.add_flush_listener(lambda: flushes.append(len(seen)))
    engine.submit(spec, sink)
    assert sink.done.wait(5)
    a, b, c = expected_output([1, 2, 3], 3)
    assert seen == [
        Status.ContextFinished, ([a], None), Status.Generating, ([b], None), ([c], None), Status.GenerateFinished,
    ]  # fmt: skip
    assert sink.error is None and sink.reason == "length"
    stat = sink.stat
    assert (stat["context_token_length"], stat["generated_token_length"]) == (3, 3)
    assert 5 <= stat["time_to_first_token"] <= stat["finish_time"] and stat["generate_tps"] < 400
    engine.stop_model("m")
    assert flushes[-1] == len(seen)


def test_logprobs(make_engine):
    engine = make_engine()
    _, _, results = engine.start_request(
        "m", {"input_ids": [5]}, {"max_new_tokens": 2, "logprobs": True, "top_logprobs": 3, "eos_token_id": -1}
    )
    engine.sync_request("m")
    elements = results.Get()
    assert len(elements.token_logprobs_list) == 2
    assert elements.log_probs_list == [[(0, 0.0), (1, -1.0), (2, -2.0)]] * 2
    _, _, plain = engine.start_request("m", {"input_ids": [5]}, {"max_new_tokens": 2})
    engine.sync_request("m")
    assert plain.Get().log_probs_list == []


def test_samples(make_engine):
    engine = make_engine()
    _, _, results = engine.start_request("m", {"input_ids": [1, 2]}, {"n": 3, "max_new_tokens": 4, "eos_token_id": -1})
    outputs = {0: [], 1: [], 2: []}
    for elements in results:
        outputs[elements.sample_index] += elements.ids_from_generate
    assert all(ids == expected_output([1, 2], 4) for ids in outputs.values())
    assert results.GeneratedLength() == 12


def test_stop_request_keeps_what_was_generated(make_engine):
    engine = make_engine(delay=0.002)
    _, handle, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    first = results.Get().ids_from_generate
    assert engine.stop_request("m", handle) == AsStatus.ALLSPARK_SUCCESS
    assert results.GenerateStatus() is Status.GenerateInterrupted
    out = first + collect(results)
    assert out == expected_output([1], len(out)) and results.Get() is None
    engine.stop_request("m", handle)
    engine.release_request("m", handle)
    refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, engine.stop_request, "m", handle)
    refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, engine.release_request, "m", handle)
    refused(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, engine.sync_request, "m", 12345)
    assert engine.get_as_engine_stat("m").used_span == 0


def test_stop_and_release_model(make_engine):
    engine = make_engine(delay=0.002)
    started = [engine.start_request("m", {"input_ids": [i]}, {"eos_token_id": -1}) for i in range(40)]
    started[0][2].Get()
    engine.stop_model("m")
    assert {results.GenerateStatus() for _, _, results in started} == {Status.GenerateInterrupted}
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.start_request, "m", {"input_ids": [1]}, match="start_model")
    engine.start_model("m")
    assert run(engine, [4], max_new_tokens=3) == expected_output([4], 3)
    engine.release_model("m")
    refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.start_request, "m", {"input_ids": [1]}, match="no model named 'm'")
    refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.release_model, "m")


def test_two_models_run_side_by_side(make_engine):
    engine = make_engine(delay=0.001)
    engine.install_model(config("other", cache_span_size=16))
    refused(AsStatus.ALLSPARK_PARAM_ERROR, engine.install_model, config("other"))
    engine.start_model("other")
    generate = {"max_new_tokens": 20, "eos_token_id": -1}
    queues = [engine.start_request(name, {"input_ids": [7]}, generate)[2] for name in ("m", "other")]
    assert [collect(q) for q in queues] == [expected_output([7], 20)] * 2
    states = {state.name: state for state in engine.list_models()}
    assert states["m"].running and states["m"].fingerprint != states["other"].fingerprint


def test_a_lost_rank_fails_the_live_requests(make_engine):
    engine = make_engine(fail_at=3)
    _, _, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    engine.sync_request("m")
    assert results.GenerateStatus() is Status.InternalError
    assert results.Get().ids_from_generate == expected_output([1], 3)
    with pytest.raises(AllSparkError, match="ALLSPARK_RUNTIME_ERROR: .*rank 1 was lost"):
        results.Get()
    refused(AsStatus.ALLSPARK_RUNTIME_ERROR, engine.start_request, "m", {"input_ids": [1]}, match="rank 1 was lost")
    assert not engine.list_models()[0].running
    engine.release_model("m")
    engine.install_model(config())
    engine.start_model("m")
    engine._group.fail_at = -1
    assert run(engine, [1], max_new_tokens=2) == expected_output([1], 2)


def test_a_lost_device_is_not_loaded_again(make_engine):
    """The error says that the process must be started anew, instead of start_model."""
    text = "CUDA: a step: an illegal address; this process can no longer use its GPUs and must be started anew"
    engine = make_engine(fail_at=1, failure=DeviceLost(text))
    loads = []
    engine._group.start_load = loads.append
    _, _, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    engine.sync_request("m")
    assert results.GenerateStatus() is Status.InternalError
    for call, arguments in ((engine.start_model, ()), (engine.start_request, ({"input_ids": [1]},))):
        refused(AsStatus.ALLSPARK_RUNTIME_ERROR, call, "m", *arguments, match=r"must be started anew\)$")
    assert not loads and not engine.list_models()[0].running
    engine.release_model("m")


def test_queue_limit(make_engine):
    engine = make_engine(config(engine_max_batch=2, max_queue=3), delay=0.01)
    generate = {"eos_token_id": -1, "max_new_tokens": 30}
    queues = [engine.start_request("m", {"input_ids": [i]}, generate)[2] for i in range(5)]  # a burst: 2 run, 3 wait
    one_more = ("m", {"input_ids": [9]}, generate)
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, *one_more, match="max_queue=3")
    first = queues[0].Get().ids_from_generate
    refused(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, engine.start_request, *one_more)
    outputs = [first + collect(queues[0])] + [collect(q) for q in queues[1:]]
    assert outputs == [expected_output([i], 30) for i in range(5)]
    assert run(engine, [9], max_new_tokens=1) == expected_output([9], 1)


@pytest.mark.parametrize("length, generate, status, match", [
    (64, {}, AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "64 tokens and engine_max_length=64"),
    (100, {}, AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "100 tokens"),
    (10, {"max_length": 10}, AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "max_length=10"),
    (10, {"max_length": 65}, AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "max_length=65 exceeds engine_max_length=64"),
    (50, {}, AsStatus.ALLSPARK_CACHE_MEMORY_OUT, "2 spans of 16"),
    (1, {"response_format": {"type": "json_object"}}, AsStatus.ALLSPARK_INVALID_CALL_ERROR, "cannot be guided"),
    (1, {"lora_name": "x"}, AsStatus.ALLSPARK_LORA_NOT_FOUND, "has no such adapter; loaded: none"),
])  # fmt: skip
def test_refused_requests(make_engine, length, generate, status, match):
    engine = make_engine(config(engine_max_length=64, cache_span_size=16), num_spans=2)
    refused(status, engine.start_request, "m", {"input_ids": list(range(length))}, generate, match=match)
    assert len(run(engine, [1], max_new_tokens=3)) == 3


@pytest.mark.parametrize("ids, match", [
    ([], "empty"), ([1, 1000], r"input_ids\[1\]=1000 .* 0 to 999"), ([3, -1], "-1"),
])  # fmt: skip
def test_bad_ids(make_engine, ids, match):
    engine = make_engine()
    with pytest.raises(ValueError, match=match):
        engine.start_request("m", {"input_ids": ids})
    with pytest.raises(ValueError, match=r"bad_words_ids\[0\]\[0\]=1000"):
        engine.start_request("m", {"input_ids": [1]}, {"bad_words_ids": [[1000]]})


def test_a_request_that_outgrows_the_cache_fails_alone(make_engine):
    engine = make_engine(config(cache_span_size=16), num_spans=2)
    _, _, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    engine.sync_request("m")
    assert results.Get().ids_from_generate == expected_output([1], 32)
    with pytest.raises(AllSparkError, match="ALLSPARK_CACHE_MEMORY_OUT"):
        results.Get()
    assert run(engine, [2], max_new_tokens=5) == expected_output([2], 5)


def test_eos_and_lengths(make_engine):
    words = expected_output([1], 40)
    engine = make_engine(config(engine_max_length=30))
    assert run(engine, [1]) == words[:29]
    assert run(engine, [1], max_length=12) == words[:11]
    assert run(engine, [1], max_new_tokens=100) == words[:29]
    assert run(engine, [1], eos_token_id=words[4]) == words[:5]
    assert run(engine, [1], eos_token_id=[999, words[4]]) == words[:5]
    assert run(engine, [1], eos_token_id=words[4], early_stopping=False) == words[:29]
    assert run(engine, [1], stop_words_ids=[words[2:4]]) == words[:4]


def test_resumption_emits_only_what_is_new(make_engine):
    engine = make_engine()
    words = expected_output([1], 10)
    for done in (0, 4, 10):
        results = ResultQueue()
        generate = GenerateConfig(max_new_tokens=10, eos_token_id=-1)
        engine.submit(RequestSpec("m", input_ids=[1], config=generate, generated=words[:done]), QueueSink(results))
        assert collect(results) == words[done:]
        assert results.GenerateStatus() is Status.GenerateFinished


def test_not_available_yet(make_engine):
    engine = make_engine()
    wanted = config("x", swap_threshold=0)
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.install_model, wanted, match="not available yet")


def test_state_file_restores_models(make_engine, tmp_path):
    path = str(tmp_path / "state.json")
    first = make_engine(state_file=path)
    first.install_model(config("installed", cache_span_size=64))
    first.install_model(config("released"))
    first.release_model("released")
    with open(path, encoding="utf-8") as file:
        entries = [(entry["config"]["model_name"], entry["started"]) for entry in json.load(file)]
    assert entries == [("m", True), ("installed", False)]
    first.close()
    second = make_engine(None, state_file=path)
    assert second.restore() == ["m", "installed"]
    assert [(s.name, s.running) for s in second.list_models()] == [("m", True), ("installed", False)]
    assert second.get_model_info("installed").span_size == 64
    assert run(second, [1], max_new_tokens=2) == expected_output([1], 2)
    second.close()
    with open(path, encoding="utf-8") as file:
        entries = json.load(file)
    entries[0]["config"]["swap_threshold"] = 0  # recorded by a newer version, say
    with open(path, "w", encoding="utf-8") as file:
        json.dump(entries, file)
    third = make_engine(None, state_file=path)
    assert third.restore() == ["installed"]
    third.release_model("installed")
    with open(path, encoding="utf-8") as file:
        assert json.load(file) == entries[:1]
    with open(path, "w", encoding="utf-8") as file:
        file.write("{")
    assert make_engine(None, state_file=path).restore() == []


def test_close_ends_everything(make_engine):
    engine = make_engine(delay=0.002)
    _, _, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1})
    results.Get()
    engine.close()
    engine.close()
    assert results.GenerateStatus() is Status.GenerateInterrupted and engine._group.closed
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.start_request, "m", {"input_ids": [1]}, match="closed")
    refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.stop_model, "m", match="closed")


def test_an_idle_engine_uses_no_cpu(make_engine):
    engine = make_engine()
    run(engine, [1], max_new_tokens=2)
    clock = time.pthread_getcpuclockid(engine._thread.thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.001


def test_profile_table(make_engine):
    lines = make_engine().get_op_profiling_info("m").splitlines()
    assert lines[0].split()[:7] == ["op", "count", "min", "max", "mean", "sum", "%"]
    assert lines[0].split()[7:] == ["GB", "Gop", "GB/s", "Gop/s", "roofline", "weight"]
    assert lines[1].split() == ["span_attention", "2", "1000.0000", "2000.0000", "1500.0000", "3000.000", "75.00",
                                "2.0000", "2.0000", "0.7", "0.7", "3.3%"]
    assert lines[2].split()[0] == "linear" and lines[2].split()[-2:] == ["10.0%", "mlp.down_proj"]
    assert lines[3].split()[0] == "roofline" and lines[3].split()[9:] == ["20.0", "100.0", "100.0%"]
    assert len(lines) == 4


def test_steps_run_while_the_roofline_is_measured(make_engine):
    engine = make_engine(delay=0.001)
    _, _handle, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1, "max_new_tokens": 1000})
    results.Get()
    engine.get_op_profiling_info("m")
    at = engine._group.measured_at
    assert len(at) == 5 and all(after > before for before, after in itertools.pairwise(at))
    assert results.GenerateStatus() not in (Status.GenerateFinished, Status.GenerateInterrupted)


def test_a_forked_child_cannot_use_the_engine_and_leaves_it_alone(make_engine):
    engine = make_engine()
    child = os.fork()
    if child == 0:
        try:
            refused(AsStatus.ALLSPARK_INVALID_CALL_ERROR, engine.start_request, "m", {"input_ids": [1]}, match="fork")
            engine.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run(engine, [1, 2, 3], max_new_tokens=3)


def test_limits_on_words(make_engine):
    engine = make_engine()
    for name, value, match in (
        ("stop_words_ids", [[i % 1000] for i in range(1025)], "stop_words_ids has 1025 words; allowed: at most 1024"),
        ("bad_words_ids", [[1]] * 1025, "bad_words_ids has 1025 words"),
        ("stop_words_ids", [[2], [1] * 257], r"stop_words_ids\[1\] has 257 ids; allowed: at most 256"),
        ("eos_token_id", list(range(1025)), "eos_token_id has 1025 ids"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.start_request("m", {"input_ids": [1]}, {name: value})
    with pytest.raises(ValueError, match="max_step_tokens=31 is less than engine_max_batch=32"):
        engine.install_model(config("n", max_step_tokens=31))


def test_finish_reasons(make_engine):
    words = expected_output([1], 10)
    engine = make_engine(delay=0.001)

    def reason(stop=False, **generate) -> str:
        _, handle, results = engine.start_request("m", {"input_ids": [1]}, {"eos_token_id": -1, **generate})
        if stop:
            engine.stop_request("m", handle)
        engine.sync_request("m", handle)
        return results.FinishReason()

    assert reason(max_new_tokens=5) == "length"
    assert reason(eos_token_id=words[4]) == "stop"
    assert reason(stop_words_ids=[words[2:4]]) == "stop_word"
    assert reason(stop=True) == "interrupted"
    engine._group.fail_at = engine._group.steps
    assert reason() == "error"
