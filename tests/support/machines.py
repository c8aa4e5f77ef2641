"""Fabricated machines: sysfs and /proc below a folder."""

from __future__ import annotations

from pathlib import Path

from allspark_launch.machine.topology import format_list

GIB = 1 << 20  # meminfo's kB


def machine(root: Path, nodes: dict[int, list[list[int]]], *, memory: dict[int, int] | None = None,
            offline: list[int] = (), allowed: str | None = None, mems: str | None = None,
            distances: list[list[int]] | None = None) -> Path:
    """Writes sysfs below `root`. `nodes` maps a node to its cores, each a list of hardware threads; `memory` a node to
    GiB.
    """
    cpus = sorted(c for cores in nodes.values() for core in cores for c in core)
    online = [c for c in cpus if c not in offline]

    def write(path: str, text: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    write("sys/devices/system/cpu/present", format_list(cpus))
    write("sys/devices/system/cpu/online", format_list(online))
    for index, (node, cores) in enumerate(nodes.items()):
        folder = f"sys/devices/system/node/node{node}"
        members = [c for core in cores for c in core if c in online]
        write(f"{folder}/cpulist", format_list(members))
        row = distances[index] if distances else [10 if other == node else 21 for other in nodes]
        write(f"{folder}/distance", " ".join(map(str, row)))
        size = (memory or {}).get(node, 64) * GIB
        write(f"{folder}/meminfo", f"Node {node} MemTotal:  {size} kB\nNode {node} MemFree:  {size // 2} kB\n"
                                   f"Node {node} Inactive(file):  {size // 4} kB")
        for number, core in enumerate(cores):
            for cpu in core:
                if cpu in online:           # an offline CPU has no topology folder
                    write(f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(number))
                    write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(node // 3))
                    write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                          format_list(c for c in core if c in online))
    write("proc/self/status", f"Cpus_allowed_list:\t{allowed or format_list(online)}\n"
                              f"Mems_allowed_list:\t{mems or format_list(nodes)}")
    return root
