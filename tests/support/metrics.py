"""Metrics as a Prometheus server reads them."""
from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from allspark_launch.pool.members import Member, Target


def samples(text: str) -> dict:
    return {(sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def metrics_of(address: str) -> str:
    from allspark_client._proto import allspark_pb2 as pb

    with Member(Target("a", address)) as member:
        return member._call("GetMetrics", pb.MetricsRequest(), pb.Metrics).text
