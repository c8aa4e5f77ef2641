"""Tracing: the spans of requests that an OpenTelemetry collector receives."""

from __future__ import annotations

import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from allspark_client import ClientEngine
from allspark_client.request import RequestSpec, current_trace
from allspark_server import tracing
from support.fake_service import serving, tokens
from support.http_helpers import http_server_for
from support.waiting import wait_for

pytest.importorskip("opentelemetry.sdk.trace")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(BaseHTTPRequestHandler):
    """An OTLP receiver over HTTP."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip
            body = gzip.decompress(body)
        message = trace_service.ExportTraceServiceRequest.FromString(body)
        assert self.path == "/v1/traces"
        for resource in message.resource_spans:
            self.server.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture()
def collector(monkeypatch):
    """A collector that receives this process's spans."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.spans, server.resources = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr(tracing, "_tracer", None)
    tracing.set_up()
    yield server
    tracing._tracer.span_processor.shutdown()
    server.shutdown()
    thread.join(10)
    server.server_close()


def spans(collector, count: int) -> list:
    return wait_for(lambda: len(collector.spans) >= count and sorted(
        collector.spans, key=lambda s: (s.start_time_unix_nano, -s.end_time_unix_nano)))


def attributes(span) -> dict:
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    return {a.key: plain(a.value) for a in span.attributes}


def test_a_request_is_a_span_with_its_parts(collector, tmp_path):
    with serving(f"unix:{tmp_path}/s") as (_, address), ClientEngine(address) as client:
        config = {"max_new_tokens": 5, "user_request_id": "r-1"}
        assert len(tokens(client.start_request("m", {"input_ids": [7] * 20}, config)[2])) == 5
        found = spans(collector, 4)
    whole = next(s for s in found if s.name == "text_completion m")
    parts = [s for s in found if s is not whole]
    assert collector.resources[0]["service.name"] == "allspark"
    values = attributes(whole)
    assert values["gen_ai.usage.input_tokens"] == 20 and values["gen_ai.usage.output_tokens"] == 5
    assert values["gen_ai.response.id"] == "r-1" and values["gen_ai.response.finish_reasons"] == ["length"]
    assert values["gen_ai.request.model"] == "m" and values["gen_ai.server.time_to_first_token"] > 0
    assert [s.name for s in parts] == ["queue", "prefill", "decode"] and not whole.parent_span_id
    assert all(s.parent_span_id == whole.span_id and s.trace_id == whole.trace_id for s in parts)
    assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano
    assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in itertools.pairwise(parts))


def test_the_span_of_who_asks_is_the_parent_through_the_http_server(collector, tmp_path):
    with (serving(f"unix:{tmp_path}/s") as (_, address), http_server_for(address, insecure=True) as server,
          httpx.Client() as client):
        for header in (f"00-{TRACE}-{SPAN}-01", "of no form"):
            answer = client.post(f"http://{server}/v1/completions", headers={"traceparent": header},
                                 json={"model": "m", "prompt": [1, 2, 3], "max_tokens": 2})
            assert answer.status_code == 200, answer.text
        found = [s for s in spans(collector, 8) if s.name == "text_completion m"]
    assert sorted((s.trace_id.hex() == TRACE, s.parent_span_id.hex()) for s in found) == [(False, ""), (True, SPAN)]


def test_the_span_that_a_program_is_in_is_the_parent():
    from opentelemetry.sdk.trace import TracerProvider

    assert current_trace() == ""
    with TracerProvider().get_tracer("x").start_as_current_span("asking") as span:
        context = span.get_span_context()
        assert RequestSpec("m").trace .startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")


def test_a_request_that_fails_has_a_span_that_says_why(collector, tmp_path):
    from allspark_client import GenerateRequestStatus

    with serving(f"unix:{tmp_path}/s") as (core, address), ClientEngine(address) as client:
        core.interval = 0.05
        _, _handle, queue = client.start_request("m", {"input_ids": [7]}, {"max_new_tokens": 500})
        queue.Get()
        core.release_model("m")
        assert wait_for(lambda: queue.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted)
        whole = next(s for s in spans(collector, 4) if s.name == "text_completion m")
    assert attributes(whole)["gen_ai.response.finish_reasons"] == ["interrupted"]


def test_what_the_variables_ask_for(monkeypatch):
    monkeypatch.setattr(tracing, "_tracer", None)
    for environ in ({}, {"OTEL_TRACES_EXPORTER": "none"},
                    {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}):
        tracing.set_up(environ)
        assert tracing._tracer is None
    with pytest.raises(ValueError, match="OTEL_TRACES_EXPORTER=zipkin: known are otlp, console and none"):
        tracing.set_up({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL=x: known are"):
        tracing.set_up({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "x"})
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(RuntimeError, match="pip install 'allspark-numa\\[otel\\]'"):
        tracing.set_up({"OTEL_TRACES_EXPORTER": "console"})
    assert tracing._tracer is None
