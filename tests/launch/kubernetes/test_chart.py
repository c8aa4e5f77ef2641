"""The Helm chart: what Helm renders is valid to Kubernetes, `allspark` accepts its command lines, and its objects fit
each other. test_cluster.py runs it in an API server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

helm = pytest.importorskip("helm_python", reason="Helm's library is not installed: pip install helm-python-sdk")
yaml = pytest.importorskip("yaml")

from documentation.reference import metric_families

from allspark_launch import resource_folder
from allspark_launch.cli import build_parser
from allspark_launch.group.folders import trusted
from allspark_launch.group.http_server import HttpOptions
from allspark_launch.options import given_flags, group_options
from support import conformity
from support.chart import CHART, EVERYTHING, NAME, NAMESPACE, OPEN, by_name, combined, render, templates, values_of

NAMED = f"{NAME}-allspark"
MEMBERS = f"{NAMED}-members"
GPU, HOSTS = values_of("values-gpu.yaml"), values_of("values-hosts.yaml")
RELEASES: dict[str, dict[str, Any]] = {
    "default": {}, "gpu": GPU, "hosts": HOSTS, "everything": EVERYTHING, "open": OPEN,
    "everything-on-gpus": combined(EVERYTHING, GPU), "everything-over-hosts": combined(EVERYTHING, HOSTS),
    "runtime-alone": {"groups": False, "servingRuntime": {"enabled": True, "cluster": True}, "gpus": 1},
}


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    """(values, objects) of a release."""
    values = RELEASES[request.param]
    return values, render(values)


# --- what Helm and Kubernetes say ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASES)
def test_lint(name):
    report = helm.lint(CHART, RELEASES[name], strict=True, kube_version="v1.36.0")
    assert not report["errors"] and all(message["severity"] < 2 for message in report["messages"]), report


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_objects_are_valid_to_kubernetes(release, version):
    """By the schemas of its API, without unknown fields. Objects of other projects: test_cluster.py."""
    validate = pytest.importorskip("kubernetes_validate")
    for each in release[1]:
        group = each["apiVersion"].rpartition("/")[0]
        if "." not in group or group == "networking.k8s.io":
            validate.validate(each, version, strict=True)
    for pod in templates(release[1]).values():      # also of a LeaderWorkerSet
        validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **pod["metadata"]},
                           "spec": pod["spec"]}, version, strict=True)


@pytest.fixture(scope="module", params=["1.28.0", "1.37.0"])
def conform(request, tmp_path_factory):
    """Runs kubeconform on objects: (exit status, its summary)."""
    if conformity.PROGRAM is None:
        pytest.skip("kubeconform is neither on the PATH nor in $ALLSPARK_KUBERNETES")
    definitions = Path(os.environ.get("ALLSPARK_KUBERNETES", "/none")) / "crds"
    flags = conformity.write_schemas(tmp_path_factory.mktemp("schemas"), request.param, definitions)
    if not definitions.is_dir():
        flags.append("-ignore-missing-schemas")

    def run(objects: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        done = subprocess.run([conformity.PROGRAM, "-strict", "-summary", "-output", "json", *flags, "-"], text=True,
                              input=yaml.safe_dump_all(objects), capture_output=True)
        return done.returncode, json.loads(done.stdout)

    return run


def test_kubeconform(release, conform):
    """Objects of other projects, too, where their definitions are there."""
    _, objects = release
    status, report = conform(objects)
    assert status == 0 and not report["resources"], report
    assert report["summary"]["valid"] + report["summary"]["skipped"] == len(objects)
    if "spec" in objects[0]:
        wrong = [{**objects[0], "spec": {**objects[0]["spec"], "unknown": 1}}]
        assert conform(wrong)[0] == (0 if conform([objects[0]])[1]["summary"]["skipped"] else 1)


def test_the_schema_of_the_values_has_every_key():
    """And a misspelled key is an error, at each depth."""
    schema, values = json.loads((CHART / "values.schema.json").read_text()), values_of("values.yaml")

    def compare(table: dict[str, Any], part: dict[str, Any], where: str) -> None:
        if part.get("additionalProperties") is not False:
            return
        assert set(table) == set(part["properties"]) - {"global"} - (
            {"claims"} if where.endswith("resources") else {"name", "kind", "group"} if where.endswith("Ref") else set()
        ), where
        for key, value in table.items():
            if isinstance(value, dict):
                compare(value, part["properties"][key], f"{where}.{key}")

    compare(values, schema, "")
    for wrong in ({"replica": 2}, {"httpServer": {"enable": True}}, {"tls": {"certManager": {"issuer": {}}}},
                  {"replicas": "2"}, {"args": ["-"]}, {"inferencePool": {"objectives": [{"name": "a"}]}}):
        with pytest.raises(helm.HelmValuesError, match="at '"):
            render(wrong)


@pytest.mark.parametrize("values,message", [
    ({"hosts": 2}, "ssh.secretName"),
    (combined(HOSTS, {"gpus": 1}), "computes on CPUs"),
    (combined(EVERYTHING, {"httpServer": {"waitLimit": 0}}), "needs httpServer.enabled and httpServer.waitLimit"),
    (combined(EVERYTHING, {"httpServer": {"enabled": False}}), "needs httpServer.enabled and httpServer.waitLimit"),
    (combined(EVERYTHING, {"autoscaling": {"minReplicas": 9}}), "must not be above"),
    (combined(EVERYTHING, {"serviceMonitor": {"enabled": False}}), "needs serviceMonitor.enabled"),
    ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.tokenSecret.name"),
    (combined(EVERYTHING, {"http": {"openMetrics": False}, "serviceMonitor": {"tokenSecret": {"name": "t"}}}),
     "the endpoint picker has no token"),
    ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
    ({"groups": False}, "leaves nothing"),
])
def test_values_that_do_not_go_together(values, message):
    with pytest.raises(helm.HelmRenderError, match=message):
        render(values)


# --- what allspark says ----------------------------------------------------------------------------------------------


def mounted(words: list[str], folder) -> list[str]:
    """Arguments with a model and secrets that are there on this machine."""
    folder.mkdir(exist_ok=True)
    for name, text in (("tokens", f"door {'d' * 20}\ngenerate {'g' * 20}\n"), ("ca.crt", "x")):
        (folder / name).write_text(text)
    return [re.sub(r"=/tokens/", f"={folder}/", re.sub(r"(?<=^--model=)/.*", str(folder), word)) for word in words]


def test_command_lines(release, tmp_path):
    """What pods run is accepted, and guarded where the values say so."""
    values, objects = release
    tls = values.get("tls", {}).get("enabled", True)
    tokens = values.get("auth", {}).get("secretName", "allspark") != ""
    for kind, pod in templates(objects).items():
        (container,) = pod["spec"]["containers"]
        if kind == "worker":
            continue
        assert container.get("command", []) == (["tini", "--", "allspark", "http"] if kind == "http-server" else [])
        words = mounted(container["args"], tmp_path / "mounted")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if kind == "group":
            options = group_options(build_parser().parse_args(["serve", *words]))
            assert options.addresses() == [f"0.0.0.0:{ports['grpc']}"] and options.http == f"0.0.0.0:{ports['http']}"
            assert options.http_options("unix:g").open_metrics == values.get("http", {}).get("openMetrics", False)
            assert (options.gpus or []) == list(range(values.get("gpus", 0)))
            assert options.hosts == ("auto" if values.get("hosts", 1) > 1 else "")
        else:
            options = HttpOptions(**given_flags(HttpOptions, build_parser().parse_args(["http", *words])))
            assert options.address == f"0.0.0.0:{ports['http']}" and options.pool == [f"dns:{MEMBERS}:50051"]
            assert options.wait_limit == values["httpServer"]["waitLimit"]
            assert bool(options.pool_tls_ca) == tls and bool(options.pool_token_file) == tokens
        assert (bool(options.token_file), bool(options.tls_cert), options.insecure) == (
            tokens, tls, not (tokens and tls))
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["spec"]["terminationGracePeriodSeconds"] > options.drain_limit + pause
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("readiness", "liveness")}
        assert {probe["scheme"] for probe in probes.values()} == {"HTTPS" if tls else "HTTP"}
        assert {probe["port"] for probe in probes.values()} == {"http"}
        # An HTTP server that waits for the first group must get requests while there is none.
        waits = kind == "http-server" and options.wait_limit > 0
        assert probes["readiness"]["path"] == ("/health/live" if waits else "/health/ready")
        assert probes["liveness"]["path"] == "/health/live"


def test_the_runtime_of_kserve(tmp_path):
    """KServe replaces {{.Name}}; the group's own socket is the pod's, so HTTP alone is open."""
    (runtime,) = render(RELEASES["runtime-alone"])
    assert runtime["kind"] == "ClusterServingRuntime" and runtime["metadata"]["name"] == NAMED
    (container,) = runtime["spec"]["containers"]
    words = [word.replace("{{.Name}}", "qwen") for word in mounted(container["args"], tmp_path / "mounted")]
    options = group_options(build_parser().parse_args(["serve", *words]))
    assert options.addresses() == ["unix:/tmp/group.sock"] and options.gpus == [0]
    assert options.http == f"0.0.0.0:{container['ports'][0]['containerPort']}" and options.insecure
    assert options.models[0]["model_name"] == "qwen"
    assert container["name"] == "kserve-container" and container["resources"]["limits"]["nvidia.com/gpu"] == 1


# --- whether objects fit each other ----------------------------------------------------------------------------------


def selected(objects: list[dict[str, Any]], selector: dict[str, str]) -> set[str]:
    """The kinds of pods that a selector matches."""
    return {kind for kind, pod in templates(objects).items() if selector.items() <= pod["metadata"]["labels"].items()}


def test_selectors(release):
    _, objects = release
    found, pods = by_name(objects), templates(objects)
    if not pods:
        return
    servers = {"http-server"} & set(pods)
    groups = set(pods) - servers
    ready, members = found["Service", NAMED]["spec"], found["Service", MEMBERS]["spec"]
    assert selected(objects, ready["selector"]) == (servers or {"group"})
    assert "publishNotReadyAddresses" not in ready and "clusterIP" not in ready
    # Clients with requests must still reach members that drain; of a group over pods, only the first one serves.
    assert selected(objects, members["selector"]) == {"group"}
    assert members["publishNotReadyAddresses"] and members["clusterIP"] == "None"
    for service in (ready, members):
        for kind in selected(objects, service["selector"]):
            (container,) = pods[kind]["spec"]["containers"]
            assert {port["targetPort"] for port in service["ports"]} <= {port["name"] for port in container["ports"]}
    assert selected(objects, found["PodDisruptionBudget", NAMED]["spec"]["selector"]["matchLabels"]) == groups
    policy = found["NetworkPolicy", NAMED]["spec"]
    assert selected(objects, policy["podSelector"]["matchLabels"]) == set(pods)
    own, clients = policy["ingress"][:2]
    assert selected(objects, own["from"][0]["podSelector"]["matchLabels"]) == set(pods)
    assert ("ports" in own) == ("worker" not in pods), "MPI uses any port"
    assert {port["port"] for port in clients["ports"]} == {"http", "grpc"}
    for (kind, _), each in found.items():
        if kind in ("StatefulSet", "Deployment"):
            wanted = each["spec"]["selector"]["matchLabels"]
            assert selected(objects, wanted) == {"group" if kind == "StatefulSet" else "http-server"}
            assert each["spec"]["template"]["metadata"]["labels"].items() >= wanted.items()
        elif kind == "InferencePool":
            assert selected(objects, each["spec"]["selector"]["matchLabels"]) == {"group"}
            assert {pods["group"]["metadata"]["labels"][label] for label in (
                "llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")} == {"vllm"}
        elif kind == "ServiceMonitor":
            services = [s for (k, _), s in found.items() if k == "Service"
                        and each["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()]
            assert len(services) == 1 and each["spec"]["endpoints"][0]["port"] in {
                port["name"] for port in services[0]["spec"]["ports"]}
            assert selected(objects, services[0]["spec"]["selector"]) == (
                {"http-server"} if each["metadata"]["name"].endswith("-http-server") else {"group"})
        elif kind == "ScaledObject":
            target = each["spec"]["scaleTargetRef"]
            scaled = found[target["kind"], target["name"]]
            assert scaled["apiVersion"] == target["apiVersion"] and "replicas" not in scaled["spec"]


def test_volumes(release, tmp_path):
    """Mounts have volumes. The group trusts its shared memory: the init container makes it in what Kubernetes gives."""
    for kind, pod in templates(release[1]).items():
        spec = pod["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounts = [mount["name"] for container in (*spec["containers"], *spec.get("initContainers", ()))
                  for mount in container["volumeMounts"]]
        assert volumes == set(mounts), kind
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"]["drop"] == ["ALL"]
        user = re.search(r"^USER (\d+)$", (resource_folder("examples") / "Containerfile").read_text(), re.M)[1]
        assert spec["securityContext"]["runAsUser"] == int(user)
        if kind == "http-server":
            continue
        volume = tmp_path / kind
        volume.mkdir()
        volume.chmod(0o2777)
        init = spec["initContainers"][0]
        subprocess.run([word.replace("/shm", str(volume)) for word in init["command"]], check=True)
        (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm")
        assert not trusted(str(volume)) and trusted(str(volume / mount["subPath"]))


@pytest.mark.parametrize("issuer", [{}, {"name": "internal", "kind": "ClusterIssuer"}])
def test_certificates_are_for_the_names_that_clients_use(issuer):
    objects = render(combined(EVERYTHING, {"tls": {"certManager": {"issuerRef": issuer}}}))
    found = by_name(objects)
    certificate = found["Certificate", NAMED]["spec"]
    names = set(certificate["dnsNames"])
    server = templates(objects)["http-server"]["spec"]["containers"][0]
    dialed = {re.fullmatch(r"--address=dns:(.*):\d+", word)[1] for word in server["args"] if "dns:" in word}
    scraped = {each["spec"]["endpoints"][0]["tlsConfig"]["serverName"] for each in objects
               if each["kind"] == "ServiceMonitor"}
    assert dialed | scraped | {NAMED, f"{NAMED}.{NAMESPACE}.svc"} <= names
    for pod in templates(objects).values():
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls")
        assert volume["secret"]["secretName"] == certificate["secretName"]
    if issuer:
        assert certificate["issuerRef"] == issuer and not any(each["kind"] == "Issuer" for each in objects)
        return
    issued = found["Issuer", certificate["issuerRef"]["name"]]["spec"]["ca"]["secretName"]
    authority = found["Certificate", f"{NAMED}-ca"]["spec"]
    assert authority["isCA"] and authority["secretName"] == issued
    assert found["Issuer", authority["issuerRef"]["name"]]["spec"] == {"selfSigned": {}}


def test_what_keda_asks_prometheus_for():
    """Metrics that there are, of the services that are scraped. What an HTTP server passes on is not counted twice."""
    objects = render(EVERYTHING)
    found = by_name(objects)
    scaled = found["ScaledObject", NAMED]["spec"]
    known = set(metric_families())
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in scaled["triggers"]}
    asked = {name: re.findall(r"sum\(([\w:]+)\{([^}]*)\}\)", query) for name, query in queries.items()}
    assert [metric for metric, _ in asked["waiting"]] == ["vllm:num_requests_waiting", "allspark_http_requests_waiting"]
    assert [metric for metric, _ in asked["running"]] == ["vllm:num_requests_running"]
    for query in queries.values():
        assert query.count("or vector(0)") == query.count("sum("), "no group, no series"
    for metric, labels in (*asked["waiting"], *asked["running"]):
        assert metric in known
        service = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert service == {"namespace": NAMESPACE, "service": MEMBERS if metric.startswith("vllm") else NAMED}
        assert ("Service", service["service"]) in found
    (relabeling,) = found["ServiceMonitor", f"{NAMED}-http-server"]["spec"]["endpoints"][0]["metricRelabelings"]
    kept = {name for name in known if re.fullmatch(relabeling["regex"], name)}
    assert relabeling["action"] == "keep" and "allspark_http_requests_waiting" in kept
    assert not any(name.startswith("vllm:") for name in kept)
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 8)


def test_gpus():
    (container,) = templates(render(GPU))["group"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "16", "memory": "96Gi"},
                                      "limits": {"cpu": "16", "memory": "96Gi", "nvidia.com/gpu": 2}}
    spec = templates(render(GPU))["group"]["spec"]
    assert spec["runtimeClassName"] == "nvidia" and "affinity" not in spec and spec["tolerations"]
    (container,) = templates(render())["group"]["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"], "CPUs of its own"


def test_the_model_is_one_volume():
    """A claim replaces the directory of the node; Helm would merge the two."""
    def models(**model: Any) -> list[dict[str, Any]]:
        spec = templates(render({"model": model}))["group"]["spec"]
        return [volume for volume in spec["volumes"] if volume["name"] == "models"]

    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    assert models(volume=claim) == [{"name": "models", **claim}]
    assert models(hostPath="/m") == [{"name": "models", "hostPath": {"path": "/m", "type": "Directory"}}]
    assert models(hostPath="", path="org/name") == []


def test_hosts_know_each_other_by_their_key(tmp_path):
    """The init container of a leader, run with folders of this test: ssh finds each worker's key in what it writes."""
    pods = templates(render(HOSTS))
    init = pods["group"]["spec"]["initContainers"][1]
    script = re.sub(r'"/(ssh|tmp)/', f'"{tmp_path}/', init["command"][2])
    public = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMLm0mBwPAFBo2VUX6nUHCy3CdLbQrbQ4rBUQsKTjd1h"
    (tmp_path / "authorized_keys").write_text(f"{public} root@admin\n")
    assert init["command"][:2] == ["python", "-c"]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30,
                   env={"LWS_LEADER_ADDRESS": "llm-0.llm.serving", "LWS_GROUP_SIZE": "1"})
    assert (tmp_path / "known_hosts").read_text() == f"* {public}\n"
    (leader,), (worker,) = pods["group"]["spec"]["containers"], pods["worker"]["spec"]["containers"]
    options = group_options(build_parser().parse_args(["serve", *mounted(leader["args"], tmp_path / "mounted")]))
    assert "UserKnownHostsFile=/tmp/known_hosts" in options.remote_shell
    assert worker["command"][worker["command"].index("-p") + 1] == re.search(r"-p (\d+)", options.remote_shell)[1]
    assert worker["command"][worker["command"].index("-h") + 1] == re.search(r"-i (\S+)", options.remote_shell)[1]
    if keygen := shutil.which("ssh-keygen"):
        found = subprocess.run([keygen, "-F", "[llm-0-1.llm.serving]:2222", "-f", tmp_path / "known_hosts"],
                               capture_output=True, text=True, check=True)
        assert public in found.stdout


def test_an_upgrade_of_the_chart_alone_restarts_nothing(tmp_path):
    """Pods get no label with the chart's version, and their template is the same."""
    copy = shutil.copytree(CHART, tmp_path / "allspark")
    text = (copy / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(re.sub(r"(?m)^version: .*$", "version: 9.9.9", text))
    for values in (EVERYTHING, combined(EVERYTHING, HOSTS)):
        assert templates(render(values, copy)) == templates(render(values))
    assert render({}, copy) != render({}), "the objects themselves have it"


def test_the_chart_is_of_this_version():
    from allspark_client.version import __version__
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
