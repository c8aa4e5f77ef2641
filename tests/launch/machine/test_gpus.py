"""GPUs in the launcher, on fabricated machines: topology, placement, doctor, command lines, metrics. No GPU is
needed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from allspark_launch import cli
from allspark_launch.commands import doctor, topology as topology_command
from allspark_launch.group.plan import plan_group
from allspark_launch.machine import gpus
from allspark_launch.machine.placement import place_on_gpus
from allspark_launch.machine.topology import Topology, read_topology
from allspark_launch.options import GroupOptions
from allspark_server.runtime.binding import GROUP_GPUS
from support.machines import machine

TOPO = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\t16-31\t1\t\tN/A
NIC0\tPIX\tSYS\tNODE\t X

Legend:
  X    = Self
"""


def add_gpu(root: Path, path: str, node: int, minor: int | None = None, hidden: bool = False) -> None:
    """Adds a GPU at a PCI path such as "0000:16/0000:16:01.0/0000:17:00.0". `minor` is the number of its device file
    (None: no driver); `hidden`: the file does not exist.
    """
    folder = root / "sys/devices" / f"pci{path}"
    folder.mkdir(parents=True)
    address = folder.name
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", node),
                       ("max_link_speed", "32.0 GT/s PCIe"), ("max_link_width", 16)):
        (folder / name).write_text(f"{text}\n")
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / address).symlink_to(folder)
    if minor is not None:
        told = root / "proc/driver/nvidia/gpus" / address / "information"
        told.parent.mkdir(parents=True)
        told.write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 250\nDevice Minor: \t {minor}\n"
                        f"GPU UUID: \t GPU-{minor}932f937-d72c-4106-c12f-20bd9faed9f6\n")
        if not hidden:
            (root / "dev").mkdir(exist_ok=True)
            (root / f"dev/nvidia{minor}").touch()


@pytest.fixture()
def root(tmp_path) -> Path:
    """Two nodes of four cores, with two GPUs on the first, one on the second, and a hidden one."""
    machine(tmp_path, {0: [[0], [1], [2], [3]], 1: [[4], [5], [6], [7]]})
    add_gpu(tmp_path, "0000:16/0000:16:01.0/0000:17:00.0", 0, minor=1)
    add_gpu(tmp_path, "0000:16/0000:16:01.0/0000:18:00.0", 0, minor=0)
    add_gpu(tmp_path, "0000:80/0000:80:01.0/0000:81:00.0", 1, minor=2)
    add_gpu(tmp_path, "0000:80/0000:80:02.0/0000:82:00.0", 1, minor=3, hidden=True)
    return tmp_path


def test_gpus_their_nodes_and_links(root):
    found = read_topology(root).gpus
    assert [(gpu.index, gpu.address, gpu.node) for gpu in found] == [
        (0, "0000:17:00.0", 0), (1, "0000:18:00.0", 0), (2, "0000:81:00.0", 1), (-1, "0000:82:00.0", 1)]
    assert found[0].model == "NVIDIA H200" and found[0].link == "PCIe 32.0 GT/s x16"
    assert gpus.links(found) == {(0, 1): "PIX", (0, 2): "SYS", (1, 2): "SYS"}
    assert gpus.nvlinks_of(TOPO) == {(0, 1): "NV18"} and gpus.nvlinks_of("") == {}
    assert gpus.links(found, gpus.nvlinks_of(TOPO)) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}


def test_links_by_pci_bridges(tmp_path):
    for _address, path in ((0, "0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0"),
                          (1, "0000:16/0000:16:01.0/0000:17:01.0/0000:19:00.0"),
                          (2, "0000:16/0000:16:02.0/0000:20:00.0"),
                          (3, "0000:40/0000:40:02.0/0000:41:00.0")):
        add_gpu(tmp_path, path, 0)
    found = gpus.links(gpus.read_gpus(tmp_path))
    assert found == {(0, 1): "PXB", (0, 2): "PHB", (0, 3): "NODE", (1, 2): "PHB", (1, 3): "NODE", (2, 3): "NODE"}


@pytest.mark.parametrize("visible, indices", [
    (None, [0, 1, 2, -1]), ("2,0", [1, -1, 0, -1]), ("", [-1] * 4), ("1,7,0", [-1, 0, -1, -1]),
    ("GPU-8932f937", [-1] * 4), ("GPU-2932f937,GPU-1", [1, -1, 0, -1]), ("GPU-", [-1] * 4),
    ("MIG-GPU-1932f937/1/0", [-1] * 4)])
def test_what_the_environment_hides(root, visible, indices):
    assert [gpu.index for gpu in gpus.read_gpus(root, visible)] == indices


def test_ranks_are_at_their_gpus_nodes(root):
    topology = read_topology(root)
    placement = place_on_gpus(topology, [2, 0, 1])
    assert [(r.rank, r.gpu, r.node, r.cpus) for r in placement.ranks] == [
        (0, 2, 1, (4, 5, 6, 7)), (1, 0, 0, (0, 1)), (2, 1, 0, (2, 3))]
    assert [r.memory_node for r in placement.ranks] == [1, 0, 0] and not placement.oversubscribed
    with pytest.raises(ValueError, match="names GPU 1 twice: each rank needs its own"):
        place_on_gpus(topology, [1, 1])
    with pytest.raises(ValueError, match="there is no GPU 3; this process may use 0-2"):
        place_on_gpus(topology, [0, 3])
    assert [r.node for r in place_on_gpus(topology, [1, 1], share=True).ranks] == [0, 0]
    topology.gpus = gpus.read_gpus(root, "")
    with pytest.raises(ValueError, match="there is no GPU 0; "
                       "this process may use none, because .* CUDA_VISIBLE_DEVICES hides them"):
        place_on_gpus(topology, [0])


def test_gpus_that_the_kernel_does_not_show(tmp_path):
    """As in some containers: GPUs are spread over the nodes in turn."""
    placement = place_on_gpus(read_topology(machine(tmp_path, {0: [[0], [1]], 1: [[2], [3]]})), [0, 1, 2])
    assert [(r.gpu, r.node, r.cpus) for r in placement.ranks] == [(0, 0, (0,)), (1, 1, (2, 3)), (2, 0, (1,))]


def test_a_gpu_at_a_node_without_cpus(tmp_path):
    machine(tmp_path, {0: [[0], [1]], 1: []})
    add_gpu(tmp_path, "0000:16/0000:16:01.0/0000:17:00.0", 1)
    placement = place_on_gpus(read_topology(tmp_path), [0])
    assert placement.ranks[0].node == 0 and "attached to NUMA node 1, which has no CPU" in placement.warnings[0]


def test_the_command_line_of_two_gpus(monkeypatch, root):
    monkeypatch.setattr("allspark_launch.group.plan.read_topology", lambda: read_topology(root))
    plan = plan_group(GroupOptions(models=["/m"], gpus=[1, 0]))
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan.environment[GROUP_GPUS] == "1,0"
    assert json.loads(plan.words[plan.words.index("--model") + 1])["compute_unit"] == "CUDA:1,0"
    assert plan.words.count("-np") == 2
    assert plan.describe()[0].startswith("rank 0: GPU 1, NUMA node 0, CPUs ")
    with pytest.raises(ValueError, match="there is one rank for each GPU"):
        plan_group(GroupOptions(models=["/m"], gpus=[0, 1], ranks=3))
    with pytest.raises(ValueError, match="names GPU 0 twice"):
        plan_group(GroupOptions(models=["/m"], gpus=[0, 0]))


def test_gpus_are_ranks_in_the_order_given():
    """A GPU named twice is refused; dropping it would start fewer ranks than asked for."""
    options = cli.build_parser().parse_args(["topology", "--gpus", "3,0-1,0"])
    assert options.gpus == [3, 0, 1, 0]
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["topology", "--gpus", "0,one"])


def test_what_topology_shows(monkeypatch, root, capsys):
    monkeypatch.setattr(topology_command, "read_topology", lambda: read_topology(root))
    monkeypatch.setattr(gpus, "nvidia_smi", lambda *words: TOPO if words == ("topo", "-m") else "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cli.main(["topology", "--gpus", "0,2"]) == 0
    shown = capsys.readouterr().out
    assert "0     0  0000:17:00.0   PCIe 32.0 GT/s x16 NVIDIA H200" in shown
    assert "-     1  0000:82:00.0" in shown and "GPU 0 - GPU 1: NV18 (NVLinks)" in shown
    assert "GPU 1 - GPU 2: SYS (NUMA nodes between)" in shown
    assert cli.main(["topology", "--json", "--gpus", "0,2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["gpu"], r["node"]) for r in found["ranks"]] == [(0, 0), (2, 1)]
    assert found["gpus"][0] == {"index": 0, "address": "0000:17:00.0", "node": 0, "model": "NVIDIA H200",
                                "link": "PCIe 32.0 GT/s x16"}
    assert {"gpus": [0, 1], "link": "NV18"} in found["gpu_links"]


def texts(findings) -> str:
    return "\n".join(f"{f.level}: {f.text} -> {f.remedy}" for f in findings)


def test_doctor_on_gpus(monkeypatch, root):
    topology = read_topology(root)
    assert "4 NVIDIA GPU(s), and no driver that is loaded" in texts(doctor.gpus_of(topology, str(root)))
    version = root / "proc/driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    monkeypatch.setattr(gpus, "nvidia_smi", lambda *_: "0, Enabled\n1, Disabled\n2, Disabled\n")
    found = texts(doctor.gpus_of(topology, str(root)))
    assert "ok: 0: NVIDIA H200, 1: NVIDIA H200, 2: NVIDIA H200; driver 580.95.05" in found
    assert "note: 1 of 4 are hidden from this process -> docker run --gpus all" in found
    assert "missing: there is no /dev/nvidiactl, /dev/nvidia-uvm" in found and "nvidia-modprobe" in found
    assert "persistence mode of GPU 1, 2 is off" in found
    for name in ("nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    assert "missing" not in texts(doctor.gpus_of(topology, str(root)))
    assert doctor.gpus_of(Topology([], [], [])) == []


@pytest.mark.parametrize("driver, told", [
    (0, "missing: the driver's library libcuda.so.1 cannot be loaded"),
    (12080, "missing: the driver is for CUDA 12, and this build needs one for 13"),
    (13020, "ok: built with 13, the driver is for 13 -> \nnote: GPU 0 does not reach the memory of GPU 2")])
def test_doctor_on_the_cuda_backend(monkeypatch, root, driver, told):
    def limits(index):
        raise ValueError(f"there is no GPU {index}")

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setitem(sys.modules, "allspark_server._cuda", SimpleNamespace(
        CUDA_VERSION=13000, driver_version=lambda: driver, reaches_peer=lambda a, b: b != 2,
        COSTS_VERSION=1, chip_limits=limits))
    monkeypatch.delattr("allspark_server._cuda", raising=False)
    assert told in texts(doctor._cuda([gpu for gpu in read_topology(root).gpus if gpu.index >= 0]))
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_doctor_on_what_kernels_cost(monkeypatch, tmp_path):
    from allspark_server.runtime import chip_costs

    costs = {"read": 2893.4, "graph_node": 1010, "launch": 1890}
    kept = [(tmp_path, None), (tmp_path, costs)]
    monkeypatch.setattr(chip_costs, "kept_costs", lambda library, index: kept[index])
    cuda = SimpleNamespace(chip_limits=lambda index: {"shared_bytes": 1, "sms": 132}, mma_rate=lambda *given: 499.3e12)
    assert "GPU 0: what its kernels cost is not measured yet" in doctor._costs(cuda, 0).text
    assert doctor._costs(cuda, 1).text == ("GPU 1: reads 2,893 GB/s, 499 TFLOP/s by mma.sync, 1.0 us for a kernel of a "
                                           f"graph and 1.9 us for one by itself; measured, in {tmp_path}")


def test_metrics_of_gpus():
    from allspark_server.metrics import _ranks

    rank = {"steps": 1, "gpu": {"index": 3, "free": 10, "total": 35}}
    values = {(tuple(s.labels.items()), s.value) for family in _ranks([rank, {"steps": 1}]) for s in family.samples
              if s.name == "allspark_rank_gpu_memory_bytes"}
    assert values == {((("rank", "0"), ("gpu", "3"), ("state", "used")), 25),
                      ((("rank", "0"), ("gpu", "3"), ("state", "free")), 10)}


def test_the_roofline_is_that_of_all_gpus_together(monkeypatch):
    from allspark_launch.bench.static import Meter
    from allspark_server.runtime import native

    measured = SimpleNamespace(measure_roofline=lambda gpu: (4e12 + gpu, 8e14))
    monkeypatch.setattr(native, "cuda_library", lambda: measured)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    run = SimpleNamespace(rooflines=[])
    machine = Meter(run, [], 1, [0, 2]).now()
    assert (machine.read, machine.floats, machine.int8) == (8e12 + 2, 16e14, 0) and run.rooflines == [machine]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"     # of the GPUs that the group has
