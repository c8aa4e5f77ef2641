"""The chart in a cluster: a real API server with its controllers and its scheduler (support/cluster.py), and stand-ins
for the nodes, which run the pods' command lines (support/kubelet.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

helm = pytest.importorskip("helm_python", reason="Helm's library is not installed: pip install helm-python-sdk")

from test_chart import EVERYTHING, HOSTS, RELEASES

from allspark_launch.group.background import shipped_model
from support.chart import CHART, NAME, NAMESPACE, combined, render
from support.cluster import MISSING, Api, Refused, control_plane, secret
from support.endpoint_picker import read
from support.kubelet import Nodes, local, nodes
from support.metrics import samples
from support.waiting import wait_for

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(900)]

NAMED = f"{NAME}-allspark"
MEMBERS = f"{NAMED}-members"
KEY = "generate-" + "k" * 20
BODY = {"model": "fable", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SMALL = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with control_plane(tmp_path_factory.mktemp("cluster")) as found:
        found.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        yield found


@pytest.mark.parametrize("name", RELEASES)
def test_the_api_server_takes_every_object(api, name):
    """Also those of other projects, by their own definitions: unknown fields are errors, and rules in CEL are asked."""
    for each in render(RELEASES[name]):
        api.create(each, NAMESPACE, dryRun="All")


def test_a_leader_worker_set_can_be_scaled(api):
    """Its scale subresource is what KEDA and a PodDisruptionBudget use."""
    for each in render(combined(EVERYTHING, HOSTS)):
        if each["kind"] == "LeaderWorkerSet":
            api.create(each, NAMESPACE)
    api.scale("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", NAMESPACE, NAMED, 3)
    path = api.path("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", NAMESPACE, NAMED)
    assert api.call("GET", path)["spec"]["replicas"] == 3
    api.call("DELETE", path)


@pytest.mark.parametrize("version,kind,values", [
    ("apps/v1", "StatefulSet", EVERYTHING),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", combined(EVERYTHING, HOSTS))])
def test_an_upgrade_keeps_the_number_of_groups_that_keda_has_set(api, version, kind, values):
    space = f"scaling-{kind.lower()}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    with helm.Config(kubeconfig_content=api.kubeconfig, namespace=space) as config:
        config.install(CHART, NAME, values)
        api.scale(version, kind, space, NAMED, 3)
        config.upgrade(CHART, NAME, combined(values, {"podAnnotations": {"upgraded": "yes"}}))
        found = api.get(version, kind, space, NAMED)["spec"]
        assert found["replicas"] == 3 and "upgraded" in str(found)
        config.uninstall(NAME)


# --- a release that runs ---------------------------------------------------------------------------------------------


def certificates(folder: Path) -> dict[str, bytes]:
    """What cert-manager would write for the chart's Certificate."""
    names = ",".join(f"DNS:{name}" for name in (NAMED, MEMBERS, f"{NAMED}.{NAMESPACE}.svc"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", "/CN=allspark", "-addext", f"subjectAltName={names}", "-keyout",
                    f"{folder}/key", "-out", f"{folder}/cert"], check=True, capture_output=True)
    cert = (folder / "cert").read_bytes()
    return {"tls.crt": cert, "tls.key": (folder / "key").read_bytes(), "ca.crt": cert}


class Release:
    """A release of the chart with two groups of the shipped model and an HTTP server in front."""

    values: dict[str, Any] = {
        "model": {"path": "/models", "hostPath": str(shipped_model()), "name": "fable"},
        "args": ["--max-length=512", "--ranks=1", "--share-cpus", "--cpus-per-rank=1"],
        "resources": SMALL, "drainLimit": 20, "drainDelay": 1, "bindMemory": False,
        "httpServer": {"enabled": True, "replicas": 1, "waitLimit": 120, "resources": SMALL},
        "http": {"openMetrics": True},
    }

    def __init__(self, api: Api, config: Any, running: Nodes):
        self.api, self.config, self.nodes = api, config, running

    def pods(self, component: str) -> list[dict[str, Any]]:
        return self.api.list("v1", "Pod", NAMESPACE, labelSelector=f"app.kubernetes.io/component={component}")

    def ready(self, component: str) -> list[str]:
        """Names of the pods that are ready and stay."""
        return sorted(pod["metadata"]["name"] for pod in self.pods(component)
                      if "deletionTimestamp" not in pod["metadata"] and any(
                          condition["type"] == "Ready" and condition["status"] == "True"
                          for condition in pod.get("status", {}).get("conditions", ())))

    def wait(self, groups: int) -> None:
        def there() -> bool:
            assert not self.nodes.problems, self.nodes.problems
            return len(self.ready("group")) == len(self.pods("group")) == groups and len(self.ready("http-server")) == 1

        wait_for(there, 150)

    def url(self, component: str = "http-server", index: int = 0) -> str:
        pod = sorted(self.pods(component), key=lambda pod: pod["metadata"]["name"])[index]
        return f"https://{local(pod['status']['podIP'])}:8000"

    def ask(self, client: httpx.Client, **body: Any) -> httpx.Response:
        return client.post(f"{self.url()}/v1/completions", json={**BODY, **body})


@contextlib.contextmanager
def http() -> Any:
    with httpx.Client(verify=False, timeout=150, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture(scope="module")
def release(api, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    api.create(secret("allspark", {"tokens": f"door {'d' * 24}\n{KEY.partition('-')[0]} {KEY}\n".encode()}), NAMESPACE)
    api.create(secret("allspark-tls", certificates(folder)), NAMESPACE)
    with nodes(api, folder, NAMESPACE, 3) as running, \
            helm.Config(kubeconfig_content=api.kubeconfig, namespace=NAMESPACE) as config:
        config.install(CHART, NAME, Release.values)
        found = Release(api, config, running)
        found.wait(2)
        yield found


def test_members_are_found_and_answer(release):
    """HTTP servers find them by the headless Service, with TLS by the names of the certificate; gateways read each."""
    with http() as client:
        answer = wait_for(lambda: (found := release.ask(client)).status_code == 200 and found, 30)
        assert answer.json()["usage"]["completion_tokens"] == 24
        members = client.get(f"{release.url()}/pool", headers={"authorization": f"Bearer {KEY}"}).json()["members"]
        addresses = {f"{local(pod['status']['podIP'])}:50051" for pod in release.pods("group")}
        assert {member["address"] for member in members} == addresses
        for index in range(2):
            state = read(httpx.get(f"{release.url('group', index)}/metrics", verify=False).text)
            assert (state.queued, state.running) == (0, 0) and state.blocks > 0
        assert httpx.get(f"{release.url('group')}/v1/models", verify=False).status_code == 401
    nodes_of = {pod["spec"]["nodeName"] for pod in release.pods("group")}
    assert len(nodes_of) == 2, "one group a node"


def test_a_budget_keeps_one_of_two(release):
    """The drain of both nodes takes one group after the other."""
    first, second = release.ready("group")
    release.api.evict(NAMESPACE, first)
    with pytest.raises(Refused, match="disruption budget") as refusal:
        release.api.evict(NAMESPACE, second)
    assert refusal.value.status == 429
    wait_for(lambda: first not in release.ready("group"), 10)
    release.wait(2)


def test_a_rolling_update_loses_no_request(release):
    """All pods are replaced, one after the other, while clients ask without a pause."""
    before = {pod["metadata"]["uid"] for pod in release.pods("group")}
    stop = threading.Event()
    statuses: list[Any] = []

    def ask() -> None:
        with http() as client:
            url = release.url()
            while not stop.is_set():
                answer = client.post(f"{url}/v1/completions", json=BODY)
                statuses.append((answer.status_code, answer.json() if answer.status_code == 200 else answer.text))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        release.config.upgrade(CHART, NAME, combined(Release.values, {"podAnnotations": {"rolled": "yes"}}))

        def rolled() -> bool:
            assert not release.nodes.problems, release.nodes.problems
            return not before & {pod["metadata"]["uid"] for pod in release.pods("group")}

        wait_for(rolled, 240)
        release.wait(2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert len(statuses) > 20 and {status for status, _ in statuses} == {200}, [s for s in statuses if s[0] != 200][:3]
    assert len({str(answer["choices"]) for _, answer in statuses}) == 1, "with the same bits on all members"


def test_to_zero_and_back(release):
    """What KEDA does with the chart's ScaledObject, by hand: it reads the same metrics, and scales the StatefulSet."""
    def scale(replicas: int) -> None:
        release.api.scale("apps/v1", "StatefulSet", NAMESPACE, NAMED, replicas)

    scale(0)
    wait_for(lambda: not release.pods("group"), 60)
    assert release.ready("http-server"), "the HTTP server is ready without a group"
    with http() as client, http() as other:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(release.ask(other)))
        began = time.monotonic()
        thread.start()
        wait_for(lambda: samples(client.get(f"{release.url()}/metrics").text)[
            ("allspark_http_requests_waiting",)] == 1, 20)
        scale(1)
        thread.join(120)
        assert answers and answers[0].status_code == 200, answers
        assert answers[0].json()["usage"]["completion_tokens"] == 24
        print(f"the first answer after zero took {time.monotonic() - began:.1f} s")
        assert samples(client.get(f"{release.url()}/metrics").text)[("allspark_http_requests_waiting",)] == 0


def test_uninstalling_leaves_nothing(release):
    release.config.uninstall(NAME)
    wait_for(lambda: not release.api.list("v1", "Pod", NAMESPACE), 90)
    assert not release.api.list("apps/v1", "StatefulSet", NAMESPACE)
    assert not release.api.list("networking.k8s.io/v1", "NetworkPolicy", NAMESPACE)
    assert not release.nodes.problems, release.nodes.problems
