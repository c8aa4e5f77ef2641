"""A group's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from . import vllm_metrics

if TYPE_CHECKING:
    from allspark_client.types import AsEngineStat

    from .engine.engine import Engine
    from .engine.served_model import ServedModel

#: name, description, and field of AsEngineStat
_GAUGES = (
    ("requests_running", "Requests that a step computes", "running_request"),
    ("requests_waiting", "Waiting requests", "pendding_request"),
    ("cache_tokens", "Tokens that the KV cache can hold", "total_token"),
    ("cache_free_tokens", "Free tokens of the KV cache", "free_token"),
    ("host_cache_spans", "Spans that the host cache can hold", "total_host_span"),
    ("host_cache_used_spans", "Spans of the host cache in use", "used_host_span"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of accepted requests", "total_prefill_token"),
    ("generated_tokens", "Generated tokens", "total_generated_token"),
    ("prefix_miss_tokens", "Prompt tokens that were computed", "prefix_cache_miss_token"),
    ("preemptions", "Times that a running request was preempted", "preempted_request"),
)


def render(engine: Engine, group: dict[str, Any], *, requests: int, draining: bool,
           certificate_expires: float = 0.0) -> str:
    """All metrics of a group. `group`: of GroupReport; `requests`: those whose end was not sent yet;
    `certificate_expires`: Unix time, 0.0 without TLS.
    """
    registry = CollectorRegistry()
    registry.register(_Group(engine, group, requests, draining, certificate_expires))
    return generate_latest(registry).decode()


class _Group:
    """A collector of a group's metrics, which is read once."""

    def __init__(self, engine: Engine, group: dict[str, Any], requests: int, draining: bool, expires: float):
        self._engine, self._group, self._requests, self._draining = engine, group, requests, draining
        self._expires = expires

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        failures = self._engine.failures()
        yield GaugeMetricFamily("allspark_requests", "Requests whose end was not sent yet", self._requests)
        yield GaugeMetricFamily("allspark_draining", "1 while no new requests are taken", int(self._draining))
        yield GaugeMetricFamily("allspark_healthy", "1 unless the engine or a model has failed", int(not failures))
        yield CounterMetricFamily("allspark_restarts", "Restarts of the group",
                                  self._group.get("restarts", 0))
        if self._expires:
            yield GaugeMetricFamily("allspark_certificate_expiry_timestamp_seconds",
                                    "When the certificate of the group's listener expires, Unix time", self._expires)
        models = self._engine.served_models()
        stats = [(model.name, model.stat()) for model in models]
        for family, values in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, key in values:
                yield _by_model(family(f"allspark_{name}", text, labels=["model"]), stats, key)
        hits = CounterMetricFamily("allspark_prefix_hit_tokens", "Prompt tokens that came from the prefix cache",
                                   labels=["model", "tier"])
        for name, stat in stats:
            hits.add_metric([name, "memory"], stat.prefix_cache_hit_token - stat.prefix_cache_host_token)
            hits.add_metric([name, "host"], stat.prefix_cache_host_token)
        yield hits
        yield from _handovers(models)
        yield from _timings(models)
        yield from vllm_metrics.families(models)
        yield from _ranks(self._group.get("ranks", []))


def _by_model(family: GaugeMetricFamily | CounterMetricFamily, stats: list[tuple[str, AsEngineStat]],
              key: str) -> Metric:
    for name, stat in stats:
        family.add_metric([name], getattr(stat, key))
    return family


def _handovers(models: list[ServedModel]) -> Iterator[Metric]:
    requests = CounterMetricFamily("allspark_handover_requests", "Prompts that other groups were asked for, by how "
                                   "their spans came", labels=["model", "outcome"])
    tokens = CounterMetricFamily("allspark_handover_tokens", "Prompt tokens that another group has computed",
                                 labels=["model"])
    size = CounterMetricFamily("allspark_handover_bytes", "Bytes of spans that came from other groups",
                               labels=["model"])
    lost = CounterMetricFamily("allspark_handover_lost_spans", "Spans that another group had but that did not come, "
                               "or differ from their checksum; they are computed here", labels=["model"])
    seconds = CounterMetricFamily("allspark_handover_seconds", "Time of waiting for other groups to compute prompts, "
                                  "and for their spans to come", labels=["model", "part"])
    for model in models:
        counters = model.handover
        for outcome, count in counters.requests.items():
            requests.add_metric([model.name, outcome], count)
        tokens.add_metric([model.name], counters.tokens)
        size.add_metric([model.name], counters.bytes)
        lost.add_metric([model.name], counters.lost_spans)
        seconds.add_metric([model.name, "prefill"], counters.prefill_seconds)
        seconds.add_metric([model.name, "copy"], counters.copy_seconds)
    yield from (requests, tokens, size, lost, seconds)


def _timings(models: list[ServedModel]) -> Iterator[Metric]:
    for name, text, key in (("first_token", "Time from a request's arrival to its first token", "first"),
                            ("between_tokens", "Time from a token of a request to its next", "between")):
        family = HistogramMetricFamily(f"allspark_{name}_seconds", text, labels=["model"])
        for model in models:
            histogram = getattr(model.timings, key)
            family.add_metric([model.name], histogram.buckets(), histogram.sum)
        yield family


def parts_of(rank: dict[str, Any]) -> dict[str, float]:
    """The time of a rank's steps in s by part: computing, exchanging partial sums, waiting for other ranks."""
    exchange, wait = rank.get("exchange_seconds", 0.0), rank.get("wait_seconds", 0.0)
    compute = rank.get("step_seconds", 0.0) - exchange
    return {"compute": max(0.0, compute), "exchange": max(0.0, exchange - wait), "wait": wait}


def _ranks(ranks: list[dict[str, Any]]) -> Iterator[Metric]:
    seconds = CounterMetricFamily("allspark_rank_seconds", "Time of steps by part", labels=["rank", "part"])
    steps = CounterMetricFamily("allspark_rank_steps", "Steps that a rank has computed", labels=["rank"])
    memory = GaugeMetricFamily("allspark_rank_memory_bytes", "A rank's memory by NUMA node", labels=["rank", "node"])
    misplaced = GaugeMetricFamily("allspark_rank_misplaced_share", "Fraction of a rank's memory on other NUMA "
                                  "nodes than its own", labels=["rank"])
    gpus = GaugeMetricFamily("allspark_rank_gpu_memory_bytes", "Memory of a rank's GPU",
                             labels=["rank", "gpu", "state"])
    messages = CounterMetricFamily("allspark_rank_expert_messages", "Messages for which a rank of experts of a mixed "
                                   "group has computed its experts: at most one for each layer of a step",
                                   labels=["rank"])
    rows = CounterMetricFamily("allspark_rank_expert_rows", "Rows of these messages", labels=["rank"])
    uses = CounterMetricFamily("allspark_rank_expert_uses", "Experts that rows have chosen, where the GPU of a mixed "
                               "group has hot experts, by whether it had them", labels=["rank", "hot"])
    streamed = CounterMetricFamily("allspark_rank_expert_streamed_rows", "Rows, over all layers, whose experts the GPU "
                                   "of a mixed group has computed from copies", labels=["rank"])
    for number, rank in enumerate(ranks):
        name = str(number)
        if count := rank.get("expert_streamed_rows"):
            streamed.add_metric([name], count)
        if count := rank.get("expert_messages"):
            messages.add_metric([name], count)
            rows.add_metric([name], rank.get("expert_rows", 0))
        if count := rank.get("expert_uses"):
            uses.add_metric([name, "yes"], rank["expert_hits"])
            uses.add_metric([name, "no"], count - rank["expert_hits"])
        if gpu := rank.get("gpu"):
            gpus.add_metric([name, str(gpu["index"]), "used"], gpu["total"] - gpu["free"])
            gpus.add_metric([name, str(gpu["index"]), "free"], gpu["free"])
        steps.add_metric([name], rank.get("steps", 0))
        for part, value in parts_of(rank).items():
            seconds.add_metric([name, part], value)
        pages = rank.get("bytes_on_node", {})
        for node, size in pages.items():
            memory.add_metric([name, str(node)], size)
        if pages:
            misplaced.add_metric([name], rank.get("misplaced_bytes", 0) / max(1, sum(pages.values())))
    yield from (seconds, steps, messages, rows, uses, streamed, memory, misplaced, gpus)
