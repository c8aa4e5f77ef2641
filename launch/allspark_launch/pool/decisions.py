"""Decides on the layout of a pool's members: by the file, by a flag, or by a measurement."""
from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..machine.topology import Topology, read_topology
from ..options import GroupOptions
from . import layout as layouts
from .pool import CHOICES, Pool
from .units import is_active, target_name


def installed_pool(options: argparse.Namespace) -> Pool:
    """The pool of the file, with the layout that was decided when it was installed."""
    pool = Pool.from_file(options.config)
    return pool.laid_out(layouts.Kept.read(pool.name, options.config_dir), read_topology())


def laid_out_pool(options: argparse.Namespace) -> tuple[Pool, layouts.Kept]:
    """The pool of the file, with the layout of the file or the flags, or with one that is measured now."""
    pool = Pool.from_file(options.config)
    kept = layouts.Kept.read(pool.name, options.config_dir)
    for key in CHOICES:
        flag, own = getattr(options, key), getattr(pool, key)
        if flag and own not in ("", flag):
            raise ValueError(f"{options.config}: {key} is {own!r}, but --{key} is {flag!r}; leave one of them out")
        if flag:
            kept.flags[key] = flag
        elif own:
            kept.flags.pop(key, None)
    machine = read_topology()
    pool.laid_out(kept, machine)        # reports errors before anything is measured
    if (kept.flags.get("layout") or pool.layout) == "auto":
        _decide(options, pool, kept, machine)
    elif options.measure:
        raise ValueError("--measure is for layout = \"auto\"")
    kept.decisions = {name: decision for name, decision in kept.decisions.items() if name in pool.members}
    return pool.laid_out(kept, machine), kept


def _decide(options: argparse.Namespace, pool: Pool, kept: layouts.Kept, machine: Topology) -> None:
    """Finds a layout for each member that has none of its own. Prints the decision and the reason."""
    purpose = kept.flags.get("optimize") or pool.optimize or layouts.PURPOSES[0]
    known = [] if options.measure else list(kept.decisions.values())
    for name, member in pool.members.items():
        if not layouts.is_open(member):
            continue
        if len(machine.default_nodes) < 2:
            print(f"{name}: one wide group: nothing to measure, this machine has one NUMA node with CPUs and memory")
            continue
        wanted, before = layouts.subject(member, machine, purpose), kept.decisions.get(name)
        same = next((decision for decision in known if decision.subject == wanted), None)
        if same:
            kept.decisions[name] = before = same
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
        kept.decisions[name] = _measured(name, member, machine, purpose, wanted)
        known.append(kept.decisions[name])


def _measured(name: str, member: GroupOptions, machine: Topology, purpose: str, wanted: dict) -> layouts.Decision:
    from ..bench import layouts as bench
    measured = bench.measure(layouts.candidates(member, machine), purpose,
                             lambda text: print(f"{name}: {text}", flush=True))
    print(bench.table(measured))
    layout, why = bench.choose(measured, purpose)
    print(f"{name}: layout {layout}, for {purpose}: {why}")
    return layouts.Decision(layout, why, wanted, time.strftime("%Y-%m-%d %H:%M"), [m.to_dict() for m in measured])


def installed_members(options: argparse.Namespace, pool: Pool) -> list[str]:
    """The names of the members that are installed."""
    return [path.stem for path in sorted(Path(options.config_dir, pool.name).glob("*.json"))]
