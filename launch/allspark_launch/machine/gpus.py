"""NVIDIA's GPUs, as the kernel shows them: where they are attached, which this process may use, how they are linked.

All paths are read below `root`, so that tests can fabricate machines. No library is needed, but only nvidia-smi shows
NVLinks.
"""
from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from . import sysfs

NVIDIA_SMI_SECONDS = 20
#: an addition to the environment that makes CUDA number GPUs as read_gpus() does; by default the fastest GPU comes
#: first. It must be set before a process first uses CUDA.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
#: what links two GPUs, by nvidia-smi's words; NV and a number: so many NVLinks
LINKS = {"PIX": "one PCIe bridge between", "PXB": "PCIe bridges between", "PHB": "the processor's PCIe root between",
         "NODE": "both at one NUMA node", "SYS": "NUMA nodes between"}


@dataclass(frozen=True)
class Gpu:
    """A GPU, by its PCI address.

    node: the NUMA node that it is attached to, -1 if the kernel does not report it.
    index: its number in compute_unit and --gpus, -1 if this process may not use it.
    link: its PCIe link, "" if unknown. bridges: the PCI bridges from the root to it.
    model, device, uuid: the driver's name for it, its device file, its unique id; "" without a driver.
    """

    address: str
    node: int
    index: int = -1
    model: str = ""
    link: str = ""
    bridges: tuple[str, ...] = ()
    device: str = ""
    uuid: str = ""


def read_gpus(root: str | os.PathLike = "/", visible: str | None = None) -> list[Gpu]:
    """The GPUs in the order of their addresses. `visible`: $CUDA_VISIBLE_DEVICES, None if it is not set."""
    root = Path(root)
    attached = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if sysfs.text(folder / "vendor") == "0x10de" and sysfs.text(folder / "class")[:6] in ("0x0300", "0x0302"):
            attached.append(_read(root, folder))
    # A container has the device files of some GPUs. CUDA counts those.
    usable = [gpu for gpu in attached if not gpu.device or (root / gpu.device.lstrip("/")).exists()]
    indices = {gpu.address: i for i, gpu in enumerate(_chosen(usable, visible))}
    return [replace(gpu, index=indices.get(gpu.address, -1)) for gpu in attached]


def _read(root: Path, folder: Path) -> Gpu:
    information = sysfs.text(root / "proc/driver/nvidia/gpus" / folder.name / "information")
    fields = dict(re.findall(r"^([\w ]+):\s*(.*?)\s*$", information, re.M))
    minor = fields.get("Device Minor", "")
    speed, width = sysfs.text(folder / "max_link_speed"), sysfs.number(folder / "max_link_width", 0)
    real = folder.resolve().parts
    # /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0: the root complex, bridges, the GPU
    below = real[real.index("devices") + 1:-1] if "devices" in real and real[-2] != "devices" else ()
    return Gpu(folder.name, sysfs.number(folder / "numa_node", -1), -1, fields.get("Model", ""),
               f"PCIe {speed.removesuffix(' PCIe')} x{width}" if speed and width else "", tuple(below),
               f"/dev/nvidia{minor}" if minor.isdigit() else "", fields.get("GPU UUID", ""))


def _chosen(usable: list[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects by number or by the beginning of a UUID, in that order. As in CUDA,
    the first unknown one ends the list. Parts of GPUs (MIG) are not known here.
    """
    if visible is None:
        return usable
    chosen: list[Gpu] = []
    for name in map(str.strip, visible.split(",")):
        matching = usable[int(name):int(name) + 1] if name.isdigit() else [
            gpu for gpu in usable if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(matching) != 1:
            break
        chosen += matching
    return chosen


def links(gpus: list[Gpu], nvlinks: dict[tuple[int, int], str] | None = None) -> dict[tuple[int, int], str]:
    """How pairs of usable GPUs are linked (LINKS). `nvlinks`: from nvlinks_of()."""
    usable = sorted((gpu for gpu in gpus if gpu.index >= 0), key=lambda gpu: gpu.index)
    return {(a.index, b.index): (nvlinks or {}).get((a.index, b.index)) or _pci_link(a, b)
            for a, b in itertools.combinations(usable, 2)}


def _pci_link(a: Gpu, b: Gpu) -> str:
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.bridges, b.bridges)))
    if common > 1:
        return "PIX" if common == len(a.bridges) == len(b.bridges) else "PXB"
    if common:
        return "PHB"
    return "NODE" if a.node == b.node >= 0 else "SYS"


def nvidia_smi(*words: str) -> str:
    """The output of `nvidia-smi WORDS`; "" if there is none, or if it fails."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *words], capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def nvlinks_of(topology: str) -> dict[tuple[int, int], str]:
    """NVLinks between pairs of GPUs, from the output of `nvidia-smi topo -m`."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    columns = next(([int(w[3:]) for w in words if re.fullmatch(r"GPU\d+", w)] for words in lines
                    if words and re.fullmatch(r"GPU\d+", words[0])), [])
    nvlinks = {}
    for words in lines:
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or "X" not in words[1:len(columns) + 1]:
            continue        # a line without an X is the head of the table
        row = int(words[0][3:])
        for column, link in zip(columns, words[1:]):
            if row < column and re.fullmatch(r"NV\d+", link):
                nvlinks[row, column] = link
    return nvlinks
