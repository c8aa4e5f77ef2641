"""The examples of launch/examples: `allspark` accepts their command lines, and their files are valid."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from allspark_launch import resource_folder
from allspark_launch.cli import build_parser
from allspark_launch.group.folders import trusted
from allspark_launch.options import group_options

FOLDER = resource_folder("examples")


def group(words: list[str], tmp_path: Path):
    """Options of `allspark serve` with protected listeners. Models and secrets are elsewhere on this machine."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    words = [re.sub(r"(?<=^--model=)/.*", str(model), word) for word in words]
    if "--model" in words:
        words[words.index("--model") + 1] = str(model)
    options = group_options(build_parser().parse_args(["serve", *words]))
    assert options.addresses() and options.drain_limit > 0 and not options.insecure
    return options


def test_the_container(tmp_path):
    text = (FOLDER / "Containerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M)[1])
    assert entry[:4] == ["tini", "--", "allspark", "serve"]
    run = re.search(r"podman run (.*?)# SYS_NICE", text.replace("\\\n#", ""), re.S)[1]
    words = shlex.split(run)
    words = words[words.index("allspark") + 1:]
    assert group([*entry[4:], *words], tmp_path).log_format == "json"
    user = re.search(r"^USER (\d+)$", text, re.M)[1]
    assert int(user) > 0 and f"--uid {user}" in text


def test_the_pods(tmp_path):
    yaml = pytest.importorskip("yaml")
    ready, service, pods = yaml.safe_load_all((FOLDER / "statefulset.yaml").read_text())
    assert pods["kind"] == "StatefulSet" and pods["spec"]["serviceName"] == service["metadata"]["name"]
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert labels == pods["spec"]["selector"]["matchLabels"]
    assert labels == service["spec"]["selector"] == ready["spec"]["selector"]
    # Load balancers get pods that take requests; clients with requests reach the others too.
    assert "publishNotReadyAddresses" not in ready["spec"] and "clusterIP" not in ready["spec"]
    assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"
    spec = pods["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = group(container["args"], tmp_path)
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > options.drain_limit + pause
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {f"0.0.0.0:{ports['grpc']}"} == set(options.address) and options.http == f"0.0.0.0:{ports['http']}"
    assert {port["port"] for port in service["spec"]["ports"]} == set(ports.values())
    assert {port["targetPort"]: port["port"] for port in ready["spec"]["ports"]} == ports
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert all(probe["port"] in ports for probe in probes.values())
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    own_shared_memory(spec, container, tmp_path)
    user = re.search(r"^USER (\d+)$", (FOLDER / "Containerfile").read_text(), re.M)[1]
    assert spec["securityContext"]["runAsUser"] == int(user)


def own_shared_memory(spec: dict, container: dict, tmp_path: Path) -> None:
    """Runs the init container's command as Kubernetes does: everybody may write to an emptyDir. A group did not trust
    the examples' /dev/shm.
    """
    volume = tmp_path / "emptyDir"
    volume.mkdir()
    volume.chmod(0o2777)
    (init,) = spec["initContainers"]
    (mounted,) = init["volumeMounts"]
    for _ in range(2):      # it may run again
        subprocess.run([word.replace(mounted["mountPath"], str(volume)) for word in init["command"]], check=True)
    (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert mount["name"] == mounted["name"] and "securityContext" in init and "runAsUser" not in init["securityContext"]
    assert not trusted(str(volume)) and trusted(str(volume / mount["subPath"]))


def test_the_batch_job(tmp_path):
    """Programs srun and scontrol are fakes that only record their arguments."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "srun").write_text('#!/bin/sh\nfor word; do echo "$word"; done >words\n')
    for tool in ("scontrol", "srun"):
        (tmp_path / tool).chmod(0o755)
    subprocess.run(["bash", FOLDER / "pool.sbatch", "/models/m"], check=True, cwd=tmp_path, env={
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7"})
    assert (tmp_path / "allspark-7.addresses").read_text() == "n1:50051,n2:50051\n"
    words = (tmp_path / "words").read_text().split("\n")[:-1]
    assert "--cpu-bind=none" in words
    options = group(words[words.index("serve") + 1:], tmp_path)
    text = (FOLDER / "pool.sbatch").read_text()
    assert int(re.search(r"--signal=TERM@(\d+)", text)[1]) > options.drain_limit


def test_the_job_over_nodes(tmp_path):
    """One group; `allspark` is a fake that records its arguments. tests/launch/group/test_namespaces.py runs the job
    under Slurm.
    """
    (tmp_path / "allspark").write_text('#!/bin/sh\nfor word; do echo "$word"; done >words\n')
    (tmp_path / "allspark").chmod(0o755)
    subprocess.run(["bash", FOLDER / "group.sbatch", "/models/m", "50052"], check=True, cwd=tmp_path, env={
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"})
    assert re.fullmatch(r"\S+:50052\n", (tmp_path / "allspark-7.addresses").read_text())
    options = group((tmp_path / "words").read_text().split("\n")[1:-1], tmp_path)
    assert options.hosts == "auto" and options.address == ["0.0.0.0:50052"]
    text = (FOLDER / "group.sbatch").read_text()
    assert int(re.search(r"--signal=B:TERM@(\d+)", text)[1]) > options.drain_limit and "\n#SBATCH --no-kill\n" in text
    assert "\n#SBATCH --requeue\n" in text, "the first node serves"


def test_the_mpi_job(tmp_path):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())
    assert job["apiVersion"] == "kubeflow.org/v2beta1" and job["spec"]["runLauncherAsWorker"]
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker"))
    (container,), (sshd,) = launcher["containers"], worker["containers"]
    options = group(container["args"], tmp_path)
    assert options.hosts == "auto" and launcher["terminationGracePeriodSeconds"] > options.drain_limit
    port = re.search(r"-p (\d+)", options.remote_shell)[1]
    assert f"-p {port} " in sshd["args"][0] and job["spec"]["sshAuthMountPath"] in sshd["args"][0]
    assert sshd["volumeMounts"] == container["volumeMounts"] and sshd["image"] == container["image"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in launcher["volumes"]}
    user = re.search(r"^USER (\d+)$", (FOLDER / "Containerfile").read_text(), re.M)[1]
    own_shared_memory(launcher, container, tmp_path)
    assert worker["initContainers"] == launcher["initContainers"]
    assert launcher["securityContext"]["runAsUser"] == worker["securityContext"]["runAsUser"] == int(user)
