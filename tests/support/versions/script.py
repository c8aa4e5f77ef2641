"""What a client does with a server of another version: run by this tree's client, and by that of an earlier version. It
uses only what every version of the client has.
"""
import threading

from allspark_client import AllSparkError, AsModelConfig


def generate(engine, prompt, stop_after=0, **config):
    """A request's ids, logprobs, statuses and finish reason."""
    _, handle, queue = engine.start_request("m", {"input_ids": prompt}, {"seed": 1, **config})
    ids, logprobs = {}, []
    for elements in queue:
        ids.setdefault(elements.sample_index, []).extend(elements.ids_from_generate)
        logprobs += elements.token_logprobs_list
        if stop_after and len(ids[0]) >= stop_after:
            engine.stop_request("m", handle)
            stop_after = 0
    found = {"ids": [ids[i] for i in sorted(ids)], "logprobs": logprobs, "status": queue.GenerateStatus().name,
             "reason": queue.FinishReason(), "length": queue.GeneratedLength()}
    engine.release_request("m", handle)
    return found


def run(engine):
    """Calls of each kind, one after the other. The fifth request loses its connection: see proxy.py."""
    found = {
        "greedy": generate(engine, [1, 2, 3], max_new_tokens=5, do_sample=False, logprobs=True, top_logprobs=2),
        "samples": generate(engine, [7, 8], max_new_tokens=4, n=2, temperature=0.5, top_p=0.9),
        "words": generate(engine, [4, 5], max_new_tokens=4, stop_words_ids=[[990, 991]], bad_words_ids=[[5]],
                          logit_bias={3: 1.5}, eos_token_id=999, priority=1, cache_salt="s"),
        "lost": generate(engine, [5, 5, 5], max_new_tokens=60, min_p=0.1),
        "failed": generate_failing(engine),
    }
    stopped = generate(engine, [6], stop_after=2, max_new_tokens=2000)
    found["stopped"] = {"status": stopped["status"], "reason": stopped["reason"]}
    try:
        engine.start_request("x", {"input_ids": [1]}, {})
    except AllSparkError as error:
        found["refused"] = error.status.name
    found["install"] = engine.install_model(AsModelConfig("other", "/none", engine_max_length=512)).name
    found["start"] = engine.start_model("other").name
    found["stop"] = engine.stop_model("other").name
    found["release"] = engine.release_model("other").name
    found["info"] = engine.get_model_info("m").num_spans
    found["stat"] = engine.get_as_engine_stat("m").model_name
    found["ranks"] = engine.get_rank_nums()
    return found


def generate_failing(engine):
    """The status of a request that the engine fails after three tokens."""
    _, handle, queue = engine.start_request("m", {"input_ids": [999]}, {"max_new_tokens": 9})
    try:
        list(queue)
    except AllSparkError:
        pass
    found = {"status": queue.GenerateStatus().name, "length": queue.GeneratedLength()}
    engine.release_request("m", handle)
    return found


def load(engine, requests, workers, on_answer):
    """Runs requests on several threads; on_answer(prompt, ids, status) gets each result."""
    left = list(requests)

    def work():
        while left:
            try:
                prompt = left.pop()
            except IndexError:
                return
            found = generate(engine, prompt, max_new_tokens=40)
            on_answer(prompt, found["ids"][0], found["status"])

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
