"""A group's metrics under the names that vLLM gives them, for dashboards, autoscalers and gateways that know these."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

if TYPE_CHECKING:
    from .engine.served_model import ServedModel

_LABELS = ("model_name", "engine")
#: name, description, and field of AsEngineStat
_GAUGES = (
    ("num_requests_running", "Requests that a step computes", "running_request"),
    ("num_requests_waiting", "Waiting requests", "pendding_request"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of accepted requests", "total_prefill_token"),
    ("generation_tokens", "Generated tokens", "total_generated_token"),
    ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache", "total_prefill_token"),
    ("prefix_cache_hits", "Prompt tokens that came from the prefix cache", "prefix_cache_hit_token"),
    ("num_preemptions", "Times that a running request was preempted", "preempted_request"),
)
#: name, description, and field of Timings
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from a request's arrival to its first token", "first"),
    ("inter_token_latency_seconds", "Time from a token of a request to its next", "between"),
    ("time_per_output_token_seconds", "The same, as it was named before", "between"),
    ("request_time_per_output_token_seconds", "Mean time of a request from token to token", "per_token"),
    ("e2e_request_latency_seconds", "Time of whole requests", "whole"),
    ("request_queue_time_seconds", "Time that a request waited for its first step", "queue"),
    ("request_prefill_time_seconds", "Time from a request's first step to its first token", "prefill"),
    ("request_decode_time_seconds", "Time from a request's first token to its last", "decode"),
    ("request_inference_time_seconds", "Time from a request's first step to its last token", "inference"),
    ("request_prompt_tokens", "Prompt tokens of a request", "prompt_tokens"),
    ("request_generation_tokens", "Generated tokens of a request", "generated_tokens"),
)


def families(models: list[ServedModel]) -> Iterator[Metric]:
    """The metric families of a group's models."""
    stats = [(model, model.stat()) for model in models]
    for kind, values in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, text, key in values:
            family = kind(f"vllm:{name}", text, labels=_LABELS)
            for model, stat in stats:
                family.add_metric([model.name, "0"], getattr(stat, key))
            yield family
    for name, text in (("kv_cache_usage_perc", "Used part of the KV cache; 1: all of it"),
                       ("gpu_cache_usage_perc", "The same, as it was named before")):
        usage = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for model, stat in stats:
            usage.add_metric([model.name, "0"], stat.token_usage_percentage / 100)
        yield usage
    for name, text, key in (("draft_tokens", "Tokens that were drafted", "drafted_tokens"),
                            ("accepted_tokens", "Drafted tokens that were accepted", "accepted_tokens")):
        drafts = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=_LABELS)
        for model, _ in stats:
            drafts.add_metric([model.name, "0"], getattr(model.scheduler.counters, key))
        yield drafts
    ended = CounterMetricFamily("vllm:request_success", "Requests that have ended, by reason",
                                labels=[*_LABELS, "finished_reason"])
    for model, _ in stats:
        for reason, count in model.timings.ended.items():
            ended.add_metric([model.name, "0", reason], count)
    yield ended
    for name, text, key in _HISTOGRAMS:
        histograms = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for model, _ in stats:
            histogram = getattr(model.timings, key)
            histograms.add_metric([model.name, "0"], histogram.buckets(), histogram.sum)
        yield histograms
    yield from _information(stats)


def _information(stats: list[tuple[ServedModel, Any]]) -> Iterator[Metric]:
    """What gateways read of labels: the size of the cache, and the adapters.

    The endpoint picker of the Gateway API's inference extension reads one series of adapters, the latest, and sends
    requests where their adapter is among those that are "running": loaded and ready to serve. So this is a series of
    all models, and it is there before the first adapter is: `max_lora` says that there is room.
    """
    cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's spans, which vLLM calls blocks, as labels",
                              labels=[*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"])
    adapters = GaugeMetricFamily("vllm:lora_requests_info", "When the adapters that are loaded, and those of waiting "
                                 "requests, in the labels, were looked at, Unix time",
                                 labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"])
    loaded: set[str] = set()
    waiting: set[str] = set()
    most = 0
    for model, stat in stats:
        cache.add_metric([model.name, "0", str(model.info.span_size), str(stat.total_span),
                          str(model.config.enable_prefix_cache)], 1)
        most += model.config.lora_max_num
        loaded.update(adapter.name for adapter in model.adapters)
        waiting.update(request.adapter.name for request in list(model.live)
                       if request.adapter is not None and not request.begun)
    if most:
        adapters.add_metric([str(most), ",".join(sorted(loaded)), ",".join(sorted(waiting))], time.time())
    yield from (cache, adapters)
