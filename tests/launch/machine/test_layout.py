"""How a pool uses NUMA nodes: one wide group or a group per node; the measurement, and the decision that is kept."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from allspark_launch.bench import layouts as bench
from allspark_launch.bench.latencies import Figures
from allspark_launch.bench.load import Point
from allspark_launch.cli import main
from allspark_launch.group.background import shipped_model
from allspark_launch.machine.topology import read_topology
from allspark_launch.pool import decisions, installed, units
from support.machines import machine
from support.paths import SUPPORT
from support.pool_commands import toml, words, write

FABRICATED = SUPPORT / "fabricated"
MODEL = {"model_name": "m", "model_path": "/m"}


@pytest.fixture()
def two_nodes(tmp_path, monkeypatch):
    """Two nodes with one core each, of those that this process may use, and a third with memory alone."""
    first, second = (*sorted(os.sched_getaffinity(0)), os.cpu_count())[:2]
    root = machine(tmp_path / "machine", {0: [[first]], 1: [[second]], 2: []})
    for module in (decisions, installed):
        monkeypatch.setattr(module, "read_topology", lambda: read_topology(root))
    return root


@pytest.fixture()
def measured(monkeypatch):
    """A fake measurement: nodes are better for throughput, wide for latency. Returns the purposes that were
    measured.
    """
    asked = []

    def measure(found, purpose, say):
        asked.append(([group.numa_nodes for groups in found.values() for group in groups], purpose))
        return [result("wide", 1, 100.0, 200.0), result("nodes", 2, 150.0, 300.0)]

    monkeypatch.setattr(bench, "measure", measure)
    return asked


def result(layout: str, groups: int, tokens: float, e2e: float) -> bench.Measured:
    figures = Figures(layout, Point(clients=4))
    figures.rounds.append({"requests": 1, "failed": 0, "output_tokens_per_second": tokens, "requests_per_second": 1.0,
                           "cached_tokens": 0, "prompt_tokens": 0, "late_ms": 0.0, "ttft": {}, "itl": {},
                           "e2e": {"p50": e2e}})
    return bench.Measured(layout, groups, figures)


def config_of(tmp_path: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((tmp_path / "c/default").glob("*.json"))}


# --- expansion ---


def test_a_member_is_expanded_to_one_for_each_node(tmp_path, two_nodes, systemctl, capsys):
    (tmp_path / "t").write_text("a" * 64)
    members = [
        {"name": "a", "address": ["127.0.0.1:50051", f"unix:{units.RUN_DIR}/x"], "http": "127.0.0.1:8000",
         "token_file": str(tmp_path / "t")},
        {"name": "b", "numa_nodes": [0, 1]},
        {"name": "g", "gpus": [0]},
        {"name": "h", "hosts": "here,there"},
        {"name": "c"},
    ]
    write(tmp_path, members, layout="nodes")
    assert main(words(tmp_path, "install")) == 0
    found = config_of(tmp_path)
    assert list(found) == ["a-0", "a-1", "b", "c-0", "c-1", "g", "h"]
    for node, port in ((0, 50051), (1, 50052)):
        assert found[f"a-{node}"]["address"] == [f"127.0.0.1:{port}", f"unix:{units.RUN_DIR}/x-{node}"]
        assert found[f"a-{node}"]["numa_nodes"] == [node]
    assert (found["a-0"]["http"], found["a-1"]["http"]) == ("127.0.0.1:8000", "127.0.0.1:8001")
    assert found["c-1"]["address"] == [f"unix:{units.RUN_DIR}/default/c-1/socket"]
    assert found["b"]["numa_nodes"] == [0, 1]
    capsys.readouterr()
    assert main(["pool", "status", *words(tmp_path, "status")[2:4], "--config-dir", str(tmp_path / "c")]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == \
        ["a-0", "a-1", "b", "g", "h", "c-0", "c-1"]
    write(tmp_path, members, layout="wide")
    assert main(words(tmp_path, "apply")) == 0
    assert list(config_of(tmp_path)) == ["a", "b", "c", "g", "h"]
    assert any("disable --now allspark-default@a-1.service" in call for call in systemctl())


POOL = """name = "x"
layout = "nodes"
[[member]]
name = "a"
address = "unix:/a"
[[member]]
name = "b"
numa_nodes = [0]
"""


@pytest.mark.parametrize("old, new, message", [
    ('"nodes"', '"node"', "line 2: layout is 'node'; allowed: wide, nodes, auto"),
    ('"nodes"', '"nodes"\noptimize = 3', "line 3: optimize is 3; allowed: throughput, latency"),
    ('"unix:/a"', '"unix:/a"\nranks = 2', "line 3: member 'a': layout is nodes: ranks is 2, but a group on each node"),
    ('"nodes"', '"auto"\ndefaults = {ranks = 2}', "line 4: member 'a': layout is auto: ranks is 2"),
    ('"unix:/a"', '"unix:/a"\nmodels = [{model_name = "m", model_path = "/m", host_cache_dir = "/h", '
     'host_cache_memory = 100000000}]', "line 3: member 'a': layout is nodes: host_cache_dir belongs to one group"),
    ('name = "b"', 'name = "a-1"', "line 4: member 'a': layout is nodes: 'a-1' is the name of another member"),
    ("numa_nodes = [0]", 'numa_nodes = [0]\naddress = "unix:/a-1"', "member 'b': members 'a-1' and 'b' both have"),
    ('"nodes"', '"auto"', "line 3: member 'a': layout auto measures with a member's models; this one names none"),
])  # fmt: skip
def test_impossible_layouts_are_reported_with_their_line(tmp_path, two_nodes, capsys, old, new, message):
    toml()
    path = tmp_path / "pool.toml"
    path.write_text(POOL.replace(old, new))
    arguments = words(tmp_path, "install")
    arguments[3] = str(path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and str(path) in error
    assert not (tmp_path / "c").exists()


# --- decisions ---


def test_a_decision_is_kept_until_it_is_measured_again(tmp_path, two_nodes, measured, systemctl,
                                                       capsys, monkeypatch):
    write(tmp_path, [{"name": "a", "models": [MODEL]}], layout="auto")
    assert main(words(tmp_path, "install", "--dry-run")) == 1
    assert "--dry-run measures with --measure only" in capsys.readouterr().err
    assert main(words(tmp_path, "install")) == 0
    assert measured == [([[0, 1], [0], [1]], "throughput")]
    assert "150.0 output tokens/s, against 100.0 of wide" in capsys.readouterr().out
    assert list(config_of(tmp_path)) == ["a-0", "a-1"]
    systemctl()

    assert main(words(tmp_path, "apply")) == 0
    calls, said = systemctl(), capsys.readouterr().out
    assert "a: layout nodes, as measured at " in said and len(measured) == 1
    assert not any(call.split()[0] in ("restart", "disable") for call in calls)

    # While the pool runs, its layout stays: for another purpose, and when a measurement is requested.
    write(tmp_path, [{"name": "a", "models": [MODEL]}], layout="auto", optimize="latency")
    assert main(words(tmp_path, "apply")) == 0
    assert "for other models, another purpose or machine" in capsys.readouterr().out and len(measured) == 1
    assert main(words(tmp_path, "apply", "--measure")) == 1
    assert "cannot be measured while the pool runs (a-0, a-1)" in capsys.readouterr().err
    monkeypatch.setattr(decisions, "is_active", lambda pool, member: False)
    assert main(words(tmp_path, "apply")) == 0
    assert measured[1:] == [([[0, 1], [0], [1]], "latency")] and list(config_of(tmp_path)) == ["a"]
    assert "200.0 ms per request of one client, against 300.0 of nodes" in capsys.readouterr().out
    assert main(words(tmp_path, "apply", "--measure")) == 0 and len(measured) == 3

    # Members of the same models are decided together, and a renamed one keeps what is known.
    write(tmp_path, [{"name": "b", "models": [MODEL]}, {"name": "c", "models": [MODEL]}], layout="auto",
          optimize="latency")
    assert main(words(tmp_path, "apply")) == 0 and len(measured) == 3
    assert set(json.loads((tmp_path / "c/default.layout.json").read_text())["decisions"]) == {"b", "c"}
    assert main(words(tmp_path, "uninstall")) == 0
    assert not list((tmp_path / "c").iterdir())


def test_flags_hold_until_the_file_says(tmp_path, two_nodes, measured, systemctl, capsys):
    write(tmp_path, [{"name": "a", "models": [MODEL]}])
    assert main(words(tmp_path, "install", "--layout", "auto", "--for", "latency")) == 0
    assert measured == [([[0, 1], [0], [1]], "latency")] and list(config_of(tmp_path)) == ["a"]
    assert main(words(tmp_path, "apply", "--layout", "nodes")) == 0 and list(config_of(tmp_path)) == ["a-0", "a-1"]
    assert main(words(tmp_path, "apply")) == 0 and list(config_of(tmp_path)) == ["a-0", "a-1"]
    write(tmp_path, [{"name": "a", "models": [MODEL]}], layout="wide")
    assert main(words(tmp_path, "apply", "--layout", "nodes")) == 1
    assert "layout is 'wide', but --layout is 'nodes'; leave one of them out" in capsys.readouterr().err
    assert main(words(tmp_path, "apply")) == 0 and list(config_of(tmp_path)) == ["a"]
    assert main(words(tmp_path, "apply", "--measure")) == 1
    assert "--measure is for layout" in capsys.readouterr().err
    (tmp_path / "c/default.layout.json").write_text("{")
    assert main(words(tmp_path, "apply")) == 1
    assert "default.layout.json is damaged" in capsys.readouterr().err


def test_one_node_has_nothing_to_measure(tmp_path, measured, capsys, monkeypatch):
    root = machine(tmp_path / "machine", {0: [[0], [1]], 1: []})
    monkeypatch.setattr(decisions, "read_topology", lambda: read_topology(root))
    write(tmp_path, [{"name": "a", "models": [MODEL]}], layout="auto")
    assert main(words(tmp_path, "install")) == 0
    assert "layout wide without a measurement: this machine has one NUMA node" in capsys.readouterr().out
    assert not measured and list(config_of(tmp_path)) == ["a"]


def test_the_better_layout_is_chosen():
    wide, nodes = result("wide", 1, 100, 200), result("nodes", 2, 102, 150)
    assert bench.choose([wide, nodes], "throughput") == \
        ("wide", "100.0 output tokens/s, against 102.0 of nodes: practically equal")
    assert bench.choose([wide, nodes], "latency") == \
        ("nodes", "150.0 ms per request of one client, against 200.0 of wide")
    missing = bench.Measured("wide", 1, reason="too large")
    assert bench.choose([missing, nodes], "latency") == ("nodes", "wide was left out: too large")
    with pytest.raises(RuntimeError, match="no layout could be measured: wide: too large"):
        bench.choose([missing], "latency")


# --- a real one ---


def test_two_groups_against_a_wide_one(tmp_path, two_nodes, capsys, monkeypatch):
    """Starts and loads both layouts on two nodes with one core each, and ends them."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    monkeypatch.setenv("PYTHONPATH", str(FABRICATED), prepend=":")
    monkeypatch.setenv("FABRICATED_MACHINE", str(two_nodes))
    times = bench.Times(start=60, round=0.5, rounds=1, patience=20)
    monkeypatch.setattr(bench, "measure", functools.partial(bench.measure, times=times))
    model = {"model_name": "m", "model_path": str(shipped_model()), "engine_max_batch": 2, "engine_max_length": 128}
    write(tmp_path, [{"name": "a", "models": [model]}], layout="auto")
    assert main(words(tmp_path, "install")) == 0
    said = capsys.readouterr().out
    assert "wide, 1 group: serves after" in said and "nodes, 2 groups: serves after" in said and "4 clients" in said
    kept = json.loads((tmp_path / "c/default.layout.json").read_text())["decisions"]["a"]
    assert list(config_of(tmp_path)) == (["a"] if kept["layout"] == "wide" else ["a-0", "a-1"])
    assert all(each["figures"]["output_tokens_per_second"] > 0 for each in kept["measured"])


def test_a_layout_that_does_not_fit_is_left_out(tmp_path, two_nodes, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FABRICATED), prepend=":")
    monkeypatch.setenv("FABRICATED_MACHINE", str(two_nodes))
    model = {"model_name": "m", "model_path": str(shipped_model()), "cache_memory": 1 << 50}
    write(tmp_path, [{"name": "a", "models": [model]}], layout="auto")
    assert main(words(tmp_path, "install")) == 1
    error = capsys.readouterr().err
    assert "no layout could be measured: wide: " in error and "model 'm' does not fit" in error
