"""Monitoring of a pool: metrics, alert rules, a dashboard, logs."""

from __future__ import annotations

import json
import logging
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from allspark_client import ClientEngine
from allspark_client._proto import allspark_pb2 as pb
from allspark_launch import resource_folder
from allspark_launch.commands import top
from allspark_launch.pool.members import Member, Target, placed_share
from allspark_server.engine.report import GroupReport
from allspark_server.engine.statistics import Histogram
from allspark_server.http.metrics import Metrics, of_members
from allspark_server.logs import JsonFormatter, TextFormatter
from support.fake_engine import FakeEngine
from support.fake_service import serving, tokens
from support.metrics import metrics_of, samples

FOLDER = resource_folder("monitoring")
REPORT = {"restarts": 3, "ranks": [
    {"node": 0, "bytes_on_node": {"0": 900, "1": 100}, "misplaced_bytes": 100, "steps": 7, "step_seconds": 10.0,
     "exchange_seconds": 3.0, "wait_seconds": 1.0, "expert_hits": 30, "expert_uses": 40,
     "expert_streamed_rows": 500},
    {"node": 1, "bytes_on_node": {"1": 1000}, "misplaced_bytes": 0, "steps": 7, "step_seconds": 10.0,
     "exchange_seconds": 4.0, "wait_seconds": 4.0, "expert_messages": 21, "expert_rows": 84},
]}


@pytest.fixture()
def member(tmp_path, monkeypatch):
    """A group that has answered a few requests, with its supervisor's report of the ranks."""
    monkeypatch.setenv("ALLSPARK_SUPERVISOR", str(tmp_path / "heartbeat"))
    (tmp_path / "group.json").write_text(json.dumps(REPORT))
    with serving(f"unix:{tmp_path}/s", FakeEngine(0.01)) as (_, address), ClientEngine(address) as client:
        for _i in range(3):
            assert len(tokens(client.start_request("m", {"input_ids": [7] * 40}, {"max_new_tokens": 10})[2])) == 10
        yield client, address


def test_metrics_of_a_group(member):
    found = samples(metrics_of(member[1]))
    model = ("model", "m")
    assert found[("allspark_generated_tokens_total", model)] == 30
    assert found[("allspark_prompt_tokens_total", model)] == 120
    assert found[("allspark_prefix_hit_tokens_total", model, ("tier", "memory"))] == 64
    assert found[("allspark_requests_running", model)] == 0 and found[("allspark_healthy",)] == 1
    assert found[("allspark_first_token_seconds_count", model)] == 3
    assert found[("allspark_between_tokens_seconds_count", model)] == 27
    assert 0.05 < found[("allspark_between_tokens_seconds_sum", model)] < 5
    assert found[("allspark_restarts_total",)] == 3
    parts = [found[("allspark_rank_seconds_total", ("part", part), ("rank", "0"))] for part in ("compute", "exchange",
                                                                                                "wait")]
    assert parts == [7.0, 2.0, 1.0]
    assert found[("allspark_rank_misplaced_share", ("rank", "0"))] == 0.1
    assert found[("allspark_rank_memory_bytes", ("node", "1"), ("rank", "0"))] == 100


def test_metrics_of_ranks_of_experts(member):
    found = samples(metrics_of(member[1]))
    assert found[("allspark_rank_expert_messages_total", ("rank", "1"))] == 21
    assert found[("allspark_rank_expert_rows_total", ("rank", "1"))] == 84
    assert ("allspark_rank_expert_messages_total", ("rank", "0")) not in found
    assert found[("allspark_rank_expert_uses_total", ("hot", "yes"), ("rank", "0"))] == 30
    assert found[("allspark_rank_expert_uses_total", ("hot", "no"), ("rank", "0"))] == 10
    assert found[("allspark_rank_expert_streamed_rows_total", ("rank", "0"))] == 500
    assert found[("allspark_rank_seconds_total", ("part", "wait"), ("rank", "1"))] == 4


def test_top_of_a_mixed_group(member):
    with Member(Target("a", member[1])) as one:
        header, line = top._top_table([one])
        assert header.split()[-2:] == ["exchange", "wait"] and line.split()[8:10] == ["20.0%", "10.0%"]
        assert line.endswith("3 restarts, experts compute 60% of steps, 4.0 rows a layer, 75% hot")
        ranks = one.info().ranks
    assert top._shares(ranks) == (["20.0%", "10.0%"], ["experts compute 60% of steps, 4.0 rows a layer, 75% hot"])
    second = pb.RankState(compute_seconds=20.0)     # another GPU of the model
    assert top._shares([ranks[0], second, *ranks[1:]])[0] == ["20.0%", "10.0%"]
    ranks[0].exchange_seconds = ranks[0].wait_seconds = ranks[0].expert_uses = 0
    assert top._shares(ranks) == (["0.0%", "0.0%"], ["experts compute 60% of steps, 4.0 rows a layer"])
    ranks[1].expert_messages = ranks[1].expert_rows = 0
    assert top._shares(ranks) == (["0.0%", f"{100 * 4 / 17:.1f}%"], [])      # an ordinary group: of all ranks
    assert top._shares([]) == (["-", "-"], [])


def test_metrics_under_vllms_names(member):
    """What vLLM's dashboard, KEDA's rules and the inference gateway's endpoint picker read."""
    found = samples(metrics_of(member[1]))

    def value(name: str, **labels: str) -> float:
        return found[(f"vllm:{name}", *sorted({"model_name": "m", "engine": "0", **labels}.items()))]

    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 120
    assert value("generation_tokens_total") == 30 and value("prefix_cache_hits_total") == 64
    assert 0 <= value("kv_cache_usage_perc") == value("gpu_cache_usage_perc") < 1
    assert value("request_success_total", finished_reason="length") == 3
    assert value("request_success_total", finished_reason="stop") == 0
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                 "request_decode_time_seconds", "request_inference_time_seconds", "time_to_first_token_seconds",
                 "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert value(f"{name}_count") == value(f"{name}_bucket", le="+Inf") == 3, name
    assert value("inter_token_latency_seconds_count") == value("time_per_output_token_seconds_count") == 27
    assert value("request_prompt_tokens_sum") == 120 and value("request_generation_tokens_bucket", le="10.0") == 3
    assert value("e2e_request_latency_seconds_sum") >= value("request_inference_time_seconds_sum") > 0
    cache = next(key for key in found if key[0] == "vllm:cache_config_info")
    assert int(dict(cache[1:])["block_size"]) > 0 and int(dict(cache[1:])["num_gpu_blocks"]) > 0
    assert found[cache] == 1


def test_server_info_tells_of_ranks(member):
    with Member(Target("a", member[1])) as one:
        info = one.info()
        assert placed_share(info) == "95.0%" and info.restarts == 3 and info.ranks[1].steps == 7


def test_a_server_tells_of_all_members(member):
    text = of_members({"a": metrics_of(member[1]), "b": metrics_of(member[1]), "c": None}).decode()
    found = samples(text)
    assert [found[("allspark_up", ("member", m))] for m in "abc"] == [1, 1, 0]
    assert found[("allspark_generated_tokens_total", ("member", "b"), ("model", "m"))] == 30
    assert text.count("# TYPE allspark_first_token_seconds histogram") == 1


def test_histograms_count_by_bounds():
    histogram = Histogram((1.0, 2.0))
    histogram.add([0.5, 1.0, 1.5, 2.5])
    histogram.add([])
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)] and histogram.sum == 5.5


def test_a_report_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.delenv("ALLSPARK_SUPERVISOR", raising=False)
    assert GroupReport().read() == {}
    monkeypatch.setenv("ALLSPARK_SUPERVISOR", str(tmp_path / "heartbeat"))
    assert GroupReport().read() == {}


@pytest.mark.parametrize("journal", [False, True])
def test_logs(journal, monkeypatch):
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    if journal:
        monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    record = logging.LogRecord("allspark_server.x", logging.WARNING, "f.py", 1, "it is %s", ("so\nand so",), None)
    record.request = "r-1"
    text, line = TextFormatter("rank 0").format(record), JsonFormatter("rank 0").format(record)
    if journal:     # systemd reads the priority from the front of each line
        assert all(part.startswith("<4>") for part in text.split("\n")) and line.startswith("<4>{")
        line = line[3:]
    else:
        assert text.endswith("rank 0 WARNING allspark_server.x: it is so\nand so")
    entry = json.loads(line)
    assert entry["message"] == "it is so\nand so" and entry["level"] == "warning" and entry["request"] == "r-1"
    assert entry["process"] == "rank 0" and "model" not in entry and "\n" not in line


def expressions() -> dict[str, str]:
    """The expressions of alerts and panels, by their owner."""
    found = {}
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard["templating"]["list"][1:]:
        found[variable["name"]] = variable["definition"]
    yaml = pytest.importorskip("yaml")
    for rule in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert {"summary", "description"} == set(rule["annotations"])
        found[rule["alert"]] = rule["expr"]
    return found


def test_alerts_and_panels_ask_for_metrics_that_there_are(member):
    server = Metrics()
    server.request("chat", 200, 0.1)
    server.generated("m", 1, 0, 1, 0.1)
    server.certificate(1.0)
    of_tls = "allspark_certificate_expiry_timestamp_seconds 1\n"       # of a listener with a certificate
    text = of_members({"a": metrics_of(member[1]) + of_tls}).decode() + server.text().decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for where, expression in expressions().items():
        names = re.findall(r"\ballspark_\w+", expression)
        assert names and set(names) <= set(labels), where
        for name, matchers in re.findall(r"\b(allspark_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*=", matchers)) <= labels[name], where
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}"), where


def test_the_dashboard_is_one_to_grafana():
    """Checked with the types that Grafana generates from its schema."""
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    given = json.loads((FOLDER / "dashboard.json").read_text())
    read = json.loads(encoder.JSONEncoder(sort_keys=True).encode(dashboards.Dashboard.from_json(given)))
    unknown = set(given) - set(read) - {"version", "links", "weekStart", "liveNow"}
    assert not unknown and len(read["panels"]) == len(given["panels"])
    for kept, panel in zip(read["panels"], given["panels"]):
        assert set(panel) <= set(kept) and kept["gridPos"] == panel["gridPos"] and kept["title"] == panel["title"]
    ids = [panel["id"] for panel in given["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [(x, y) for panel in given["panels"] for p in [panel["gridPos"]]
             for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "no panel covers another"
