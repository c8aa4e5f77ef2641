"""`allspark topology`: the machine, how ranks will be placed on it, and what a model would take of it (--plan)."""
from __future__ import annotations

import argparse
import json
import os

from ..machine import drawing, gpus
from ..machine.placement import place, place_mixed, place_on_gpus
from ..machine.topology import Topology, format_list, read_topology
from ..options import NUMA_NUM, PLACEMENT, ModelOptions, add_flags
from . import AddCommand, model_plan


def add_command(command: AddCommand) -> None:
    """Adds `topology` to the parser."""
    p = command("topology", topology, "what this machine has, and how ranks will be placed on it")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--plot", metavar="FILE", help="draw it: an SVG file")
    p.add_argument("--plan", metavar="MODEL", help="also what each rank would take of its memory for this model (a "
                   "directory, or a .gguf or .asgraph file), whether it fits, and the tokens/s that the measured "
                   "memory bandwidth allows; loads nothing; exit status 1 if it does not fit")
    add_flags(p, PLACEMENT)
    add_flags(p, ModelOptions)


def topology(options: argparse.Namespace) -> int:
    """Runs the command."""
    machine = read_topology()
    if options.experts_on:
        placement = place_mixed(machine, options.ranks, options.numa_nodes, options.gpus, options.cpus_per_rank,
                                options.use_siblings, options.memory_nodes)
    elif options.gpus and options.numa_nodes is None:
        placement = place_on_gpus(machine, options.gpus, options.cpus_per_rank, options.use_siblings)
    else:
        placement = place(machine, options.ranks or int(os.environ.get(NUMA_NUM) or 0), options.numa_nodes,
                          options.cpus_per_rank, options.use_siblings, options.memory_nodes)
    # nvidia-smi's numbers are not CUDA's if the environment hides some GPUs.
    matrix = "" if "CUDA_VISIBLE_DEVICES" in os.environ or not machine.gpus else gpus.nvidia_smi("topo", "-m")
    links = gpus.links(machine.gpus, gpus.nvlinks_of(matrix))
    if options.plot:
        drawing.save(options.plot, machine, placement)
    plan = model_plan.plan(options, placement) if options.plan else None
    status = 0 if plan is None or plan.fits else 1
    if options.json:
        ranks = [{"rank": r.rank, "node": r.node, "cpus": list(r.cpus), "bound_cpus": list(r.bound_cpus),
                  "memory_node": r.memory_node, "memory_nodes": list(r.memory_nodes), "gpu": r.gpu}
                 for r in placement.ranks]
        print(json.dumps({**machine.to_dict(), "gpu_links": [{"gpus": pair, "link": link}
                                                                  for pair, link in links.items()],
                          "ranks": ranks, "oversubscribed": placement.oversubscribed,
                          "warnings": placement.warnings, **({"plan": plan.to_dict()} if plan else {})}, indent=2))
        return status
    print_topology(machine)
    print_gpus(machine, links)
    print(f"\n{'rank':>4}  {'node':>4}  {'threads':>7}  CPUs")
    for r in placement.ranks:
        print(f"{r.rank:>4}  {r.node:>4}  {len(r.cpus):>7}  {format_list(r.cpus)}")
    for warning in placement.warnings:
        print(f"note: {warning}")
    if plan is not None:
        print("", *plan.lines(), sep="\n")
    return status


def print_gpus(machine: Topology, links: dict[tuple[int, int], str]) -> None:
    """Prints the GPUs as a table, and how pairs of them are linked."""
    if not machine.gpus:
        return
    print(f"\n{'GPU':>4}  {'node':>4}  {'address':<14} {'link':<18} model")
    for gpu in machine.gpus:
        print(f"{gpu.index if gpu.index >= 0 else '-':>4}  {gpu.node if gpu.node >= 0 else '-':>4}  {gpu.address:<14} "
              f"{gpu.link or '-':<18} {gpu.model or 'no driver'}")
    for (a, b), link in links.items():
        print(f"GPU {a} - GPU {b}: {link} ({gpus.LINKS.get(link, 'NVLinks')})")


def unplugged(machine: Topology) -> str:
    """Why nodes have more memory here than the kernel says."""
    return (f"{machine.unplugged_memory / 2**30:.1f} GiB of this machine's memory are reported of no node, as in "
            "virtual machines whose memory grows with its use; they are counted as free, in equal parts on the nodes")


def print_topology(machine: Topology) -> None:
    """Prints the nodes as a table, and the limits of this process."""
    print(f"{'node':>4}  {'cores':>5}  {'usable CPUs':<16} {'all CPUs':<16} {'memory':>9}  {'free':>9}  distances")
    for n in machine.nodes:
        memory = f"{n.memory_total / 2**30:.1f} GiB" if n.memory_total else "none"
        free = f"{n.memory_free / 2**30:.1f} GiB" if n.memory_total else ""
        print(f"{n.id:>4}  {len(n.cores):>5}  {format_list(n.usable_cpus) or '-':<16} {format_list(n.cpus) or '-':<16} "
              f"{memory:>9}  {free:>9}  {' '.join(str(d) for d in n.distances.values())}")
    if machine.offline_cpus:
        print(f"offline CPUs: {format_list(machine.offline_cpus)}")
    if machine.cpu_quota:
        print(f"cgroup quota: {machine.cpu_quota:g} CPUs")
    if machine.unplugged_memory:
        print(f"note: {unplugged(machine)}")
    if machine.memory_limit:
        print(f"cgroup memory limit: {machine.memory_limit / 2**30:.1f} GiB")
