"""Stand-ins for the nodes of a cluster: they run the containers of pods as processes of this machine.

Each pod has an address of 10.244.0.0/16, as Kubernetes wants none of the loopback range. Its processes serve at the
address of 127.77.0.0/16 with the same end instead of 0.0.0.0 (`local`), and names are those of that. Images are not
pulled: `allspark` is that of this source tree. Volumes are folders. Init containers, probes, preStop, SIGTERM and the
grace period are as a kubelet has them, shortened where the tests would wait for minutes. A file like /etc/hosts has the
names of Services, from the EndpointSlices that Kubernetes makes; processes see it in a mount namespace of their own.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster import Api, Refused
from support.paths import ROOT

_LOOK_SECONDS = 0.3
_ANY = ssl._create_unverified_context()
_PODS, _LOCAL = ipaddress.ip_address("10.244.0.1"), ipaddress.ip_address("127.77.0.1")


def local(address: str) -> str:
    """Where the processes of the pod with this address serve."""
    return str(_LOCAL + (int(ipaddress.ip_address(address)) - int(_PODS)))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Pod:
    """A pod that a node runs. `processes`: of its containers, by name."""

    body: dict[str, Any]
    folder: Path
    address: str
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    ready: bool = False
    stopping: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.body["metadata"]["name"]


class Nodes:
    """The nodes of a cluster. One thread looks at their pods."""

    def __init__(self, api: Api, folder: Path, namespace: str, count: int):
        self.api, self.folder, self.namespace = api, folder, namespace
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.pods: dict[str, Pod] = {}
        self.problems: list[str] = []
        self._count = 0
        self._end = threading.Event()
        for number in range(count):
            resources = {"cpu": "64", "memory": "256Gi", "pods": "20", "nvidia.com/gpu": "8"}
            node = api.create({"apiVersion": "v1", "kind": "Node", "metadata": {
                "name": f"n{number}", "labels": {"kubernetes.io/hostname": f"n{number}"}}})
            api.patch(api.path("v1", "Node", "", node["metadata"]["name"]) + "/status", {"status": {
                "capacity": resources, "allocatable": resources,
                "conditions": [{"type": "Ready", "status": "True", "reason": "StandIn", "message": "",
                                "lastHeartbeatTime": _now(), "lastTransitionTime": _now()}]}})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all processes."""
        self._end.set()
        self._thread.join(30)
        for pod in self.pods.values():
            for process in pod.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for pod in self.pods.values():
            for process in pod.processes.values():
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def log(self, pod: str) -> str:
        """What the containers of a pod have written."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.folder.glob(f"{pod}-*/*.log")))

    def _run(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            try:
                self._look()
            except (httpx.HTTPError, Refused) as error:
                if getattr(error, "status", 0) not in (404, 409):
                    self.problems.append(repr(error))
            except Exception as error:
                self.problems.append(repr(error))
                raise

    def _look(self) -> None:
        found = {each["metadata"]["uid"]: each for each in self.api.list("v1", "Pod", self.namespace)}
        for uid, body in found.items():
            if body["spec"].get("nodeName") and uid not in self.pods and "deletionTimestamp" not in body["metadata"]:
                self._begin(uid, body)
        for uid, pod in list(self.pods.items()):
            if uid not in found or "deletionTimestamp" in found[uid]["metadata"]:
                if pod.stopping is None:
                    pod.body = found.get(uid, pod.body)
                    pod.stopping = threading.Thread(target=self._stop, args=(uid, pod), daemon=True)
                    pod.stopping.start()
            self._probe(pod)
        self._name_services()

    # --- names ---------------------------------------------------------------------------------------------------

    def _name_services(self) -> None:
        """Write the names of Services: of headless ones all addresses, of others those of ready pods."""
        lines = ["127.0.0.1 localhost"]
        services = {each["metadata"]["name"]: each["spec"] for each in self.api.list("v1", "Service", self.namespace)}
        for part in self.api.list("discovery.k8s.io/v1", "EndpointSlice", self.namespace):
            name = part["metadata"]["labels"]["kubernetes.io/service-name"]
            everybody = services.get(name, {}).get("publishNotReadyAddresses", False)
            for endpoint in part.get("endpoints") or []:
                if everybody or endpoint["conditions"].get("ready"):
                    lines += [f"{local(each)} {name} {name}.{self.namespace}.svc" for each in endpoint["addresses"]]
        text = "\n".join(lines) + "\n"
        if text != self.hosts.read_text():
            self.hosts.write_text(text)     # in place: the file is mounted

    # --- a pod ---------------------------------------------------------------------------------------------------

    def _begin(self, uid: str, body: dict[str, Any]) -> None:
        self._count += 1
        pod = Pod(body, self.folder / f"{body['metadata']['name']}-{self._count}", str(_PODS + self._count))
        pod.folder.mkdir()
        folders = {}
        for volume in body["spec"]["volumes"]:
            folder = pod.folder / volume["name"]
            if "secret" in volume:
                files = self.api.get("v1", "Secret", self.namespace, volume["secret"]["secretName"])["data"]
                folder.mkdir()
                for name, text in files.items():
                    (folder / name).write_bytes(base64.b64decode(text))
                    (folder / name).chmod(volume["secret"].get("defaultMode", 0o644))
            elif "hostPath" in volume:
                folder = Path(volume["hostPath"]["path"])
                assert folder.is_dir(), "hostPath of type Directory"
            else:
                folder.mkdir()
                folder.chmod(0o2777)
            folders[volume["name"]] = folder
        for container in body["spec"].get("initContainers", ()):
            words = self._words(container["command"], container, folders, pod)
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=30)
        for container in body["spec"]["containers"]:
            command = container.get("command") or ["tini", "--", "allspark", "serve", "--log-format", "json"]
            words = self._words([*command, *container["args"]], container, folders, pod)
            assert words[:2] == ["tini", "--"]
            allspark = [sys.executable, "-m", "allspark_launch"]
            words = [word for part in words[2:] for word in (allspark if part == "allspark" else [part])]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}",
                           "TMPDIR": str(folders["tmp"]), "ALLSPARK_LOG": "info"}
            environment |= {each["name"]: self._words([each["value"]], container, folders, pod)[0]
                            for each in container.get("env", ())}
            see_names = ["unshare", "--mount", "--propagation", "private", "sh", "-c",
                         'mount --bind "$0" /etc/hosts && exec "$@"', str(self.hosts)]
            with (pod.folder / f"{container['name']}.log").open("wb") as log:
                pod.processes[container["name"]] = subprocess.Popen(
                    [*see_names, *words], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True)
        self.pods[uid] = pod
        self._report(pod)

    def _words(self, words: list[str], container: dict[str, Any], folders: dict[str, Path], pod: Pod) -> list[str]:
        """A command line with this machine's folders and the pod's address."""
        mounts = sorted(container["volumeMounts"], key=lambda mount: -len(mount["mountPath"]))
        found = []
        for word in words:
            for mount in mounts:
                at, folder = mount["mountPath"], str(folders[mount["name"]])
                head, equals, value = word.rpartition("=")
                if value == at or value.startswith(f"{at}/"):
                    word = f"{head}{equals}{folder}{value[len(at):]}"
                    break
            found.append(word.replace("0.0.0.0", local(pod.address)))
        return found

    def _probe(self, pod: Pod) -> None:
        """Ready once the containers' readiness probes succeed."""
        if pod.stopping is not None and not pod.stopping.is_alive():
            return
        ready = all(self._answers(pod, container) for container in pod.body["spec"]["containers"])
        ended = [name for name, process in pod.processes.items() if process.poll() is not None]
        if ended and pod.stopping is None:
            self.problems.append(f"{pod.name}: {ended} ended: {self.log(pod.name)[-2000:]}")
        if ready != pod.ready:
            pod.ready = ready
            self._report(pod)

    def _answers(self, pod: Pod, container: dict[str, Any]) -> bool:
        probe = container["readinessProbe"]["httpGet"]
        port = next(each["containerPort"] for each in container["ports"] if each["name"] == probe["port"])
        try:
            url = f"{probe['scheme'].lower()}://{local(pod.address)}:{port}{probe['path']}"
            with urllib.request.urlopen(url, timeout=2, context=_ANY) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _report(self, pod: Pod) -> None:
        """Write a pod's status."""
        state = "True" if pod.ready else "False"
        conditions = [{"type": kind, "status": value, "lastTransitionTime": _now()} for kind, value in (
            ("PodScheduled", "True"), ("Initialized", "True"), ("ContainersReady", state), ("Ready", state))]
        self.api.patch(self.api.path("v1", "Pod", self.namespace, pod.name) + "/status", {"status": {
            "phase": "Running", "podIP": pod.address, "podIPs": [{"ip": pod.address}], "hostIP": "127.0.0.1",
            "startTime": _now(), "conditions": conditions, "containerStatuses": [
                {"name": name, "image": "", "imageID": "", "restartCount": 0, "ready": pod.ready, "started": True,
                 "state": {"running": {"startedAt": _now()}}} for name in pod.processes]}})

    def _stop(self, uid: str, pod: Pod) -> None:
        """As a kubelet stops a pod: preStop, SIGTERM, and SIGKILL after the grace period."""
        until = time.monotonic() + pod.body["metadata"].get("deletionGracePeriodSeconds", 30)
        for container in pod.body["spec"]["containers"]:
            subprocess.run(container["lifecycle"]["preStop"]["exec"]["command"], check=True)
        for process in pod.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        for name, process in pod.processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.problems.append(f"{pod.name}: {name} did not end within its grace period")
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        del self.pods[uid]
        with contextlib.suppress(Refused):      # 404: its namespace is gone
            self.api.call("DELETE", self.api.path("v1", "Pod", self.namespace, pod.name), gracePeriodSeconds=0)


@contextlib.contextmanager
def nodes(api: Api, folder: Path, namespace: str, count: int) -> Iterator[Nodes]:
    """Nodes that run pods of a namespace. Skips where processes cannot get names of their own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("names of Services need root and unshare: processes get an /etc/hosts of their own")
    running = Nodes(api, folder, namespace, count)
    try:
        yield running
    finally:
        running.close()
