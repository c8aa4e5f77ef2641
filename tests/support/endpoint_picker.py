"""What the endpoint picker of the Gateway API's inference extension learns of a model server, read as it does.

Of each metric it takes the first series, whatever its labels are; of the adapters the one with the largest value, which
is a time (docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension, and the core
metrics extractor of llm-d's router with its mapping for the engine type "vllm").
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

#: headers that a gateway with an endpoint picker adds to requests
HEADERS = {"x-gateway-destination-endpoint": "10.0.0.1:8000", "x-gateway-inference-objective": "food-review",
           "x-llm-d-inference-objective": "food-review", "x-llm-d-inference-fairness-id": "tenant-1",
           "x-llm-d-model-name-rewrite": "fable", "x-llm-d-slo-ttft-ms": "200"}


@dataclass(frozen=True)
class Endpoint:
    """The state of a model server. The blocks are those of the KV cache; `loaded` and `waiting` are adapters."""

    queued: int
    running: int
    cache_usage: float
    block_size: int
    blocks: int
    most_adapters: int
    loaded: frozenset[str]
    waiting: frozenset[str]


def read(text: str) -> Endpoint:
    """The state that a model server's /metrics tells of. Raises LookupError if a metric is missing."""
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def first(name: str) -> Sample:
        family: Metric = families[name]
        if family.type != "gauge" or not family.samples:
            raise LookupError(f"{name} is no gauge with a series")
        return family.samples[0]

    cache = first("vllm:cache_config_info").labels
    first("vllm:lora_requests_info")
    adapters = max(families["vllm:lora_requests_info"].samples, key=lambda sample: sample.value).labels
    names = {kind: frozenset(filter(None, map(str.strip, adapters[f"{kind}_lora_adapters"].split(","))))
             for kind in ("running", "waiting")}
    return Endpoint(int(first("vllm:num_requests_waiting").value), int(first("vllm:num_requests_running").value),
                    first("vllm:kv_cache_usage_perc").value, int(cache["block_size"]), int(cache["num_gpu_blocks"]),
                    int(adapters["max_lora"]), names["running"], names["waiting"])
