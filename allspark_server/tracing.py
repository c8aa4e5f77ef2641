"""OpenTelemetry spans of requests (the extra "otel"), named by its conventions for generative models.

A request that was resumed has a span from each group that computed it, all children of the caller's span.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

#: the standard variables that turn tracing on
VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
#: child spans: name, and the value of RequestStatInfo (ms after arrival) at which it begins
_PARTS = (("queue", ""), ("prefill", "time_in_queue"), ("decode", "time_to_first_token"))

_tracer: Tracer | None = None  # None: tracing is off


def set_up(environ: Mapping[str, str] = os.environ) -> None:
    """Export spans if the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, …) ask for it.

    Raises ValueError for an unknown exporter, RuntimeError if OpenTelemetry is not installed.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(environ.get(name) for name in VARIABLES):
        return
    kind = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if kind == "none":
        return
    if kind not in ("otlp", "console"):
        raise ValueError(f"OTEL_TRACES_EXPORTER={kind}: known are otlp, console and none")
    try:
        export(_exporter(kind, environ))
    except ImportError as error:
        raise RuntimeError(f"{' and '.join(name for name in VARIABLES if environ.get(name))} asks for traces, which "
                           f"need more packages ({error}): pip install 'allspark-numa[otel]'") from error
    logger.info("spans of requests are exported (%s)", kind)


def export(exporter: SpanExporter) -> None:
    """Send spans to this exporter, in batches on a thread of its own; the last batch is sent at exit."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from allspark_client.version import __version__

    global _tracer
    provider = TracerProvider(resource=Resource.create({"service.version": __version__} | (
        {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "allspark"})))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("allspark_server", __version__)


def _exporter(kind: str, environ: Mapping[str, str]) -> SpanExporter:
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter
        return ConsoleSpanExporter()
    protocol = (environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
                or "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
        return HttpExporter()
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: known are http/protobuf and grpc")


def trace_request(name: str, model: str, tenant: str, parent: str, stat: dict[str, float], reason: str,
                  error: Exception | None) -> None:
    """Record the span of an ended request, with child spans for queue, prefill and decode.

    `parent`: the request's traceparent, or empty; `stat`: values of RequestStatInfo; `error`: why it failed, if it did.
    """
    if _tracer is None:
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    def ns(ms: float) -> int:
        return int(stat["arrival_time"] * 1e9 + ms * 1e6)

    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "allspark", "gen_ai.request.model": model,
        "gen_ai.response.id": name, "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": int(stat["context_token_length"]),
        "gen_ai.usage.output_tokens": int(stat["generated_token_length"]),
        "gen_ai.usage.cache_read.input_tokens": int(stat["context_cached_length"]),
        "allspark.tenant": tenant,
    }
    if "time_to_first_token" in stat:
        attributes["gen_ai.server.time_to_first_token"] = stat["time_to_first_token"] / 1e3
    context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
    span = _tracer.start_span(f"text_completion {model}", context, trace.SpanKind.SERVER, attributes,
                              start_time=ns(0))
    begins = [(part, stat.get(key, 0.0)) for part, key in _PARTS if not key or key in stat]
    ends = [begin for _, begin in begins[1:]] + [stat["finish_time"]]
    inside = trace.set_span_in_context(span)
    for (part, begin), end in zip(begins, ends):
        _tracer.start_span(part, inside, start_time=ns(begin)).end(ns(end))
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(trace.StatusCode.ERROR, str(error))
    span.end(ns(stat["finish_time"]))
