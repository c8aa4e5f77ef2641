"""An engine without a model, for tests of service and client: what it says depends on prompt and position alone."""

from __future__ import annotations

import itertools
import threading
import time

from allspark_client import AllSparkError, AsEngineStat, AsFileInfo, AsStatus, GeneratedElements, ModelInfo, ModelState
from allspark_client import GenerateRequestStatus as Status
from allspark_client.config import check_available
from allspark_client.errors import illegal_handle, not_available, unknown_model


def token_at(prompt: list[int], sample: int, position: int) -> int:
    """The token that the fake model generates."""
    return (sum(prompt) * 31 + 7 * sample + position * position) % 1000


class FakeCore:
    """The part of Engine that the service uses; one step every `interval` seconds while anything is live."""

    def __init__(self, interval: float = 0.005, fingerprint: str = "fp", padding: str = ""):
        self.interval, self._fingerprint, self.padding = interval, fingerprint, padding
        self.models: dict[str, bool] = {}
        self.failed: dict[str, str] = {}
        self.live: dict[int, dict] = {}
        self.handles: set[int] = set()
        self.submitted: list = []
        self.steps = 0
        self.install_seconds = 0.0
        self._next = itertools.count(100)
        self._listeners = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # models
    def install_model(self, config):
        check_available(config.validate())
        time.sleep(self.install_seconds)
        if config.model_name in self.models:
            raise AllSparkError(
                AsStatus.ALLSPARK_PARAM_ERROR, f"a model named {config.model_name!r} is installed already"
            )
        self.models[config.model_name] = False
        return AsStatus.ALLSPARK_SUCCESS

    def _check(self, name):
        if name not in self.models:
            raise unknown_model(name, self.models)

    def start_model(self, name):
        self._check(name)
        self.models[name] = True

    def stop_model(self, name):
        self._check(name)
        self.models[name] = False
        with self._lock:
            ended = list(self.live.items())
            self.live.clear()
        for handle, r in ended:
            r["sink"].on_finish(handle, Status.GenerateInterrupted, None, {})
        self._flush()

    def release_model(self, name):
        self._check(name)
        del self.models[name]

    def list_models(self):
        return [ModelState(n, running, self._fingerprint, len(self.live)) for n, running in self.models.items()]

    def failures(self):
        return dict(self.failed)

    def fingerprint(self, name):
        return self._fingerprint

    # requests
    def submit(self, spec, sink):
        self._check(spec.model)
        check_available(spec.config)
        if not self.models[spec.model]:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"model {spec.model!r} is not started")
        prompt = spec.input_ids if spec.input_ids is not None else list((spec.text or str(spec.messages)).encode())
        if prompt[0] == 666:
            raise RuntimeError("a defect")
        if max(prompt) >= 1000 and prompt[0] != 999:
            raise ValueError(f"input_ids[0]={prompt[0]} is not in the vocabulary; allowed: 0 to 999")
        handle = next(self._next)
        with self._lock:
            self.submitted.append(spec)
            self.handles.add(handle)
            self.live[handle] = {"spec": spec, "sink": sink, "prompt": prompt, "at": len(spec.generated)}
        return handle

    def cancel(self, handle):
        if handle not in self.handles:
            raise illegal_handle("any", handle)
        with self._lock:
            r = self.live.pop(handle, None)
        if r is not None:
            r["sink"].on_finish(handle, Status.GenerateInterrupted, None, {"generated_token_length": r["at"]})
            self._flush()

    def release(self, handle):
        self.cancel(handle)
        self.handles.discard(handle)

    def add_flush_listener(self, fn):
        self._listeners.append(fn)

    def _flush(self):
        for fn in self._listeners:
            fn()

    def _run(self):
        while not self._end.wait(self.interval):
            with self._lock:
                live = list(self.live.items())
            if not live:
                continue
            self.steps += 1
            for handle, r in live:
                config, sink = r["spec"].config, r["sink"]
                if r["at"] == 0:
                    sink.on_status(handle, Status.Generating)
                for sample in range(config.n):
                    token = token_at(r["prompt"], sample, r["at"])
                    e = GeneratedElements([token], sample_index=sample, prefix_cache_len=3)
                    if config.logprobs:
                        e.token_logprobs_list = [-0.5]
                        e.log_probs_list = [[(token, -0.5), (1, -1.25)][: config.top_logprobs]]
                    sink.on_elements(handle, e, f"<{token}>{self.padding}" if r["spec"].want_text else None)
                r["at"] += 1
                if r["prompt"][0] == 999 and r["at"] == 3:  # a request that fails later
                    self.live.pop(handle, None)
                    sink.on_finish(
                        handle,
                        Status.InternalError,
                        AllSparkError(AsStatus.ALLSPARK_CACHE_MEMORY_OUT, "no more spans"),
                        {},
                    )
                elif r["at"] >= (config.max_new_tokens or 10):
                    with self._lock:
                        if self.live.pop(handle, None) is None:
                            continue
                    sink.on_finish(
                        handle,
                        Status.GenerateFinished,
                        None,
                        {"generated_token_length": r["at"] - len(r["spec"].generated), "context_tps": 2.5},
                    )
            self._flush()

    # information
    def get_as_engine_stat(self, name):
        self._check(name)
        return AsEngineStat(model_name=name, running_request=len(self.live), total_token=100, free_token=50)

    def get_model_info(self, name):
        self._check(name)
        return ModelInfo(name=name, vocab_size=1000, eos_token_ids=[2, 3])

    def get_file_information(self, graph, params):
        return AsFileInfo(str(graph), str(params), "0")

    def get_op_profiling_info(self, name):
        self._check(name)
        return "op count\nlinear 1"

    def get_rank_id(self):
        return 0

    def get_rank_nums(self):
        return 1

    def get_version_full(self):
        return "0.1.0-fake"

    def load_lora(self, model, lora):
        raise not_available("LoRA")

    unload_lora = load_lora

    def unload_device_mem(self, model):
        raise not_available("unload_device_mem")

    def load_device_mem(self, model):
        raise not_available("load_device_mem")

    def close(self):
        self._end.set()
        self._thread.join()
