"""Metrics of the HTTP server, in Prometheus' text format."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

#: buckets of the histograms, s: of whole requests, and of first tokens
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
#: of a worker's file of metrics: room for a thousand pairs of labels
_FILE_BYTES = 256 << 10
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST.encode()


def of_members(texts: dict[str, str | None]) -> bytes:
    """The groups' own metrics as one text, with the label `member`. `allspark_up` says which groups answer."""
    families: dict[str, Metric] = {}
    up = GaugeMetricFamily("allspark_up", "1 while the member answers", labels=["member"])
    for member, text in texts.items():
        up.add_metric([member], int(text is not None))
        for family in text_string_to_metric_families(text or ""):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={"member": member, **sample.labels}))
    registry = CollectorRegistry()
    registry.register(_Collected([up, *families.values()]))
    return generate_latest(registry)


def _allocate_files() -> None:
    """Allocates the files of this worker's metrics. prometheus_client maps sparse files; on a full disk the first write
    to one would end the process with a bus error. OSError if there is no room.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for kind in ("counter", "histogram", "gauge_mostrecent", "gauge_livesum") if folder else ():
        path = f"{folder}/{kind}_{os.getpid()}.db"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _FILE_BYTES)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        finally:
            os.close(file)


class _Collected:
    """A collector of metrics that exist already."""

    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> list[Metric]:
        """The metric families."""
        return self._families


class Metrics:
    """The metrics of this process. Workers share them through files in the folder $PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        _allocate_files()
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter("allspark_http_requests", "Requests by endpoint and status",
                                 ["endpoint", "status"], registry=registry)
        self._seconds = Histogram("allspark_http_request_seconds", "Time of whole requests", ["endpoint"],
                                  buckets=_WHOLE, registry=registry)
        self._first = Histogram("allspark_http_first_token_seconds", "Time to the first token", ["model"],
                                buckets=_FIRST, registry=registry)
        self._prompt = Counter("allspark_http_prompt_tokens", "Prompt tokens", ["model"], registry=registry)
        self._cached = Counter("allspark_http_cached_tokens", "Prompt tokens from the prefix cache", ["model"],
                               registry=registry)
        self._generated = Counter("allspark_http_generated_tokens", "Generated tokens", ["model"], registry=registry)
        self._waiting = Gauge("allspark_http_requests_waiting", "Requests that wait while no group takes any",
                              registry=registry, multiprocess_mode="livesum")
        self._expiry: Gauge | None = None

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an HTTP request that has ended after `seconds`."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def generated(self, model: str, prompt: int, cached: int, tokens: int, first: float) -> None:
        """Count a request to the pool that has ended. `first`: time to its first token in s, 0 if it has none."""
        self._prompt.labels(model).inc(prompt)
        self._cached.labels(model).inc(cached)
        self._generated.labels(model).inc(tokens)
        if first:
            self._first.labels(model).observe(first)

    def waiting(self) -> AbstractContextManager[None]:
        """Count a request that waits for a group, while the context is entered."""
        return self._waiting.track_inprogress()

    def certificate(self, expires: float) -> None:
        """Report when the certificate of the listener expires, Unix time, s."""
        if self._expiry is None:
            self._expiry = Gauge("allspark_http_certificate_expiry_timestamp_seconds",
                                 "When the certificate of the HTTP server's listener expires, Unix time",
                                 registry=self._registry, multiprocess_mode="mostrecent")
        self._expiry.set(expires)

    def text(self) -> bytes:
        """The metrics of all workers in Prometheus' text format."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return generate_latest(registry)
