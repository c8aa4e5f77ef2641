"""The Helm chart, rendered by Helm's library: objects as the API server gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

CHART = ROOT / "launch" / "kubernetes" / "allspark"
NAME, NAMESPACE = "llm", "serving"
#: values that switch everything on that goes together
EVERYTHING: dict[str, Any] = {
    "httpServer": {"enabled": True, "waitLimit": 900},
    "tls": {"certManager": {"enabled": True}},
    "http": {"openMetrics": True},
    "serviceMonitor": {"enabled": True},
    "autoscaling": {"enabled": True, "minReplicas": 0},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}, "gateway": {"name": "inference"},
                      "objectives": [{"name": "chat", "priority": 10}]},
    "servingRuntime": {"enabled": True},
}
#: without TLS and tokens, as behind a gateway that speaks clear text
OPEN: dict[str, Any] = {"tls": {"enabled": False}, "auth": {"secretName": ""}}


def values_of(file: str) -> dict[str, Any]:
    """The values of a file beside the chart's own."""
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CHART / file).read_text())


def combined(*values: dict[str, Any]) -> dict[str, Any]:
    """Values as several files give them together: the later ones count."""
    found: dict[str, Any] = {}
    for given in values:
        for key, value in given.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = combined(found[key], value) if both else value
    return found


def render(values: dict[str, Any] | None = None, chart: Path = CHART) -> list[dict[str, Any]]:
    """The objects of a release. Raises what Helm raises."""
    helm, yaml = pytest.importorskip("helm_python"), pytest.importorskip("yaml")
    with helm.Chart.load(chart) as loaded:
        files = loaded.render(values or {}, name=NAME, namespace=NAMESPACE)
    return [found for path, text in sorted(files.items()) if path.endswith(".yaml")
            for found in yaml.safe_load_all(text) if found]


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name, which are unique."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The templates of pods: "group" and, where they are there, "worker" and "http-server"."""
    found = {}
    for each in objects:
        if each["kind"] == "StatefulSet":
            found["group"] = each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            pods = each["spec"]["leaderWorkerTemplate"]
            found |= {"group": pods["leaderTemplate"], "worker": pods["workerTemplate"]}
            # The controller of LeaderWorkerSets adds these labels to the pods.
            for index, kind in enumerate(("group", "worker")):
                found[kind]["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = str(index)
        elif each["kind"] == "Deployment":
            found["http-server"] = each["spec"]["template"]
    return found
