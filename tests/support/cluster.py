"""A control plane of Kubernetes: etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes of this
machine, and a client. support/kubelet.py stands in for the nodes.

$ALLSPARK_KUBERNETES names a folder with these four programs, and in `crds` the definitions of other projects' objects
(cert-manager, KEDA, LeaderWorkerSet, Prometheus' operator, KServe, the Gateway API and its inference extension). Those
of envtest do, with a kube-controller-manager and a kube-scheduler of the same version; or build them from a tree of
Kubernetes, or of a project that vendors it, with Go.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.waiting import wait_for

FOLDER = os.environ.get("ALLSPARK_KUBERNETES", "")
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
MISSING = "" if FOLDER and all((Path(FOLDER) / program).exists() for program in PROGRAMS) else (
    f"$ALLSPARK_KUBERNETES names no folder with {', '.join(PROGRAMS)}")
_TOKEN = "an-administrator-of-the-tests"


class Refused(Exception):
    """The API server's answer to a call that failed."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(f"{status}: {message}")


class Api:
    """A client of an API server."""

    def __init__(self, url: str):
        self.url = url
        self._http = httpx.Client(base_url=url, verify=False, timeout=30, headers={"authorization": f"Bearer {_TOKEN}"})
        self._kinds: dict[tuple[str, str], tuple[str, bool]] = {}

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of an answer. Raises Refused."""
        kind = options.pop("kind", "application/json")
        answer = self._http.request(method, path, content=None if body is None else json.dumps(body),
                                    headers={"content-type": kind}, params=options)
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json().get("message", answer.text) if answer.text else "")
        return answer.json()

    def path(self, version: str, kind: str, namespace: str = "", name: str = "") -> str:
        """The path of an object, or of all objects of a kind in a namespace."""
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._kinds:
            for each in self.call("GET", root)["resources"]:
                if "/" not in each["name"]:
                    self._kinds[version, each["kind"]] = each["name"], each["namespaced"]
        plural, namespaced = self._kinds[version, kind]
        middle = f"/namespaces/{namespace}" if namespaced and namespace else ""
        return f"{root}{middle}/{plural}" + (f"/{name}" if name else "")

    def create(self, body: dict[str, Any], namespace: str = "", **options: Any) -> dict[str, Any]:
        """Make an object; unknown fields are errors."""
        path = self.path(body["apiVersion"], body["kind"], namespace)
        return self.call("POST", path, body, fieldValidation="Strict", **options)

    def get(self, version: str, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """An object."""
        return self.call("GET", self.path(version, kind, namespace, name))

    def list(self, version: str, kind: str, namespace: str = "", **options: Any) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return self.call("GET", self.path(version, kind, namespace), **options)["items"]

    def patch(self, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Merge a part into an object."""
        return self.call("PATCH", path, body, kind="application/merge-patch+json", **options)

    def scale(self, version: str, kind: str, namespace: str, name: str, replicas: int) -> None:
        """What KEDA and autoscalers do."""
        self.patch(self.path(version, kind, namespace, name) + "/scale", {"spec": {"replicas": replicas}})

    def evict(self, namespace: str, pod: str) -> None:
        """What the drain of a node does. Raises Refused (429) if a PodDisruptionBudget does not allow it."""
        self.call("POST", self.path("v1", "Pod", namespace, pod) + "/eviction", {
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}})

    @property
    def kubeconfig(self) -> str:
        """A kubeconfig of this client."""
        return json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]})


def secret(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    """A secret with these files."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
            "data": {key: base64.b64encode(value).decode() for key, value in files.items()}}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[Api]:
    """A running control plane with the definitions of `crds`. Skips without the programs."""
    if MISSING:
        pytest.skip(MISSING)
    etcd, peers, secure, manager, scheduler = _free_ports(5)
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
    api = Api(f"https://127.0.0.1:{secure}")
    (folder / "kubeconfig").write_text(api.kubeconfig)
    kubeconfig = [f"--kubeconfig={folder}/kubeconfig", "--leader-elect=false", "--bind-address=127.0.0.1"]
    for flag in ("authentication", "authorization"):
        kubeconfig.append(f"--{flag}-kubeconfig={folder}/kubeconfig")
    commands = {
        "etcd": [f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{etcd}",
                 f"--advertise-client-urls=http://127.0.0.1:{etcd}", f"--listen-peer-urls=http://127.0.0.1:{peers}"],
        "kube-apiserver": [
            f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={secure}", "--bind-address=127.0.0.1",
            f"--cert-dir={folder}/certificates", "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={folder}/tokens.csv",
            "--authorization-mode=RBAC", "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"],
        # No kubelet renews the leases of these nodes.
        "kube-controller-manager": [*kubeconfig, f"--secure-port={manager}",
                                    "--controllers=*,-node-lifecycle-controller",
                                    f"--service-account-private-key-file={key}"],
        "kube-scheduler": [*kubeconfig, f"--secure-port={scheduler}"],
    }
    running: list[subprocess.Popen] = []
    with contextlib.ExitStack() as stack:
        try:
            for program, words in commands.items():
                log = stack.enter_context((folder / f"{program}.log").open("wb"))
                process = subprocess.Popen([Path(FOLDER) / program, *words], stdin=subprocess.DEVNULL, stdout=log,
                                           stderr=log, cwd=folder)
                running.append(process)
                if program == "kube-apiserver":
                    wait_for(lambda process=process: _serves(api, process, folder), 120)
            _define(api)
            yield api
        finally:
            for process in reversed(running):
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _serves(api: Api, process: subprocess.Popen, folder: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError((folder / "kube-apiserver.log").read_text()[-3000:])
    with contextlib.suppress(httpx.HTTPError, Refused, ValueError):
        return api._http.get("/readyz").text == "ok"
    time.sleep(0.3)
    return False


def _define(api: Api) -> None:
    """Install the definitions of other projects' objects, and wait until the API server serves them."""
    yaml = pytest.importorskip("yaml")
    names = []
    for file in sorted((Path(FOLDER) / "crds").glob("*.yaml")):
        for body in yaml.safe_load_all(file.read_text()):
            if body:
                # Conversion needs the project's own webhook.
                body["spec"].pop("conversion", None)
                names.append(api.create(body)["metadata"]["name"])

    def established() -> bool:
        found = {each["metadata"]["name"]: each.get("status", {}).get("conditions") or []
                 for each in api.list("apiextensions.k8s.io/v1", "CustomResourceDefinition")}
        return all(any(condition["type"] == "Established" and condition["status"] == "True"
                       for condition in found[name]) for name in names)

    wait_for(established, 60)
