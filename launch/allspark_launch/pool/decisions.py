"""Chooses the layout of a pool's members: from the pool file, a flag or a measurement."""
from __future__ import annotations

import argparse
import time

from ..machine.topology import Topology, read_topology
from ..options import GroupOptions
from . import layout as layouts
from .installed import installed_members
from .pool import CHOICES, Pool
from .units import is_active, target_name


def pool_with_layout(options: argparse.Namespace) -> tuple[Pool, layouts.SavedLayout]:
    """Reads the pool file and applies a layout: that of the file, of the flags, or of a measurement made now."""
    pool = Pool.from_file(options.config)
    saved = layouts.SavedLayout.read(pool.name, options.config_dir)
    for key in CHOICES:
        flag, own = getattr(options, key), getattr(pool, key)
        if flag and own not in ("", flag):
            raise ValueError(f"{options.config}: {key} is {own!r}, but --{key} is {flag!r}; leave one of them out")
        if flag:
            saved.flags[key] = flag
        elif own:
            saved.flags.pop(key, None)
    machine = read_topology()
    pool.with_layout(saved, machine)        # reports errors before anything is measured
    if (saved.flags.get("layout") or pool.layout) == "auto":
        _decide(options, pool, saved, machine)
    elif options.measure:
        raise ValueError("--measure is for layout = \"auto\"")
    saved.decisions = {name: decision for name, decision in saved.decisions.items() if name in pool.members}
    decided = pool.with_layout(saved, machine)
    decided.check_cpus(machine)
    return decided, saved


def _decide(options: argparse.Namespace, pool: Pool, saved: layouts.SavedLayout, machine: Topology) -> None:
    """Chooses a layout for each member to which one applies. Prints the choice and its reason."""
    purpose = saved.flags.get("optimize") or pool.optimize or layouts.PURPOSES[0]
    known = [] if options.measure else list(saved.decisions.values())
    for name, member in pool.members.items():
        if not layouts.uses_layout(member):
            continue
        if len(machine.default_nodes) < 2:
            print(f"{name}: layout wide without a measurement: this machine has one NUMA node with CPUs and memory")
            continue
        wanted, before = layouts.subject(member, machine, purpose), saved.decisions.get(name)
        same = next((decision for decision in known if decision.subject == wanted), None)
        if same:
            saved.decisions[name] = before = same
            print(f"{name}: layout {before.layout}, as measured at {before.time}: {before.why}")
            continue
        running = [unit for unit in installed_members(options, pool) if is_active(pool.name, unit)]
        if before and running and not options.measure:
            print(f"{name}: layout {before.layout}, as measured at {before.time} for other models, another purpose or "
                  f"machine; to measure again, stop the pool (systemctl stop {target_name(pool.name)}) and apply it")
            continue
        if running:
            raise ValueError(f"member {name!r} cannot be measured while the pool runs ({', '.join(running)}): stop it "
                             f"(systemctl stop {target_name(pool.name)}), or name a layout")
        if options.dry_run and not options.measure:
            raise ValueError(f"there is no decision for member {name!r} yet, and --dry-run measures with --measure "
                             "only")
        if not member.models:
            raise ValueError(f"{pool.places[name].at()}: layout auto measures with a member's models; this one names "
                             "none")
        saved.decisions[name] = _measure_layout(name, member, machine, purpose, wanted)
        known.append(saved.decisions[name])


def _measure_layout(name: str, member: GroupOptions, machine: Topology, purpose: str, wanted: dict) -> layouts.Decision:
    from ..bench import layouts as bench
    measured = bench.measure(layouts.candidates(member, machine), purpose,
                             lambda text: print(f"{name}: {text}", flush=True))
    print(bench.table(measured))
    layout, why = bench.choose(measured, purpose)
    print(f"{name}: layout {layout}, for {purpose}: {why}")
    return layouts.Decision(layout, why, wanted, time.strftime("%Y-%m-%d %H:%M"), [m.to_dict() for m in measured])
