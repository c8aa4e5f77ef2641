"""`allspark pool`: groups as systemd services, from one file."""
from __future__ import annotations

import argparse

from ..pool import layout as layouts
from ..pool.install import apply, install, uninstall
from ..pool.members import add_target_options
from ..pool.rolling import DRAIN_LIMIT_SECONDS, drain, restart
from ..pool.units import CONFIG_DIR, TEMPLATES, UNIT_DIR
from . import AddCommand, Handler
from .top import status

EPILOG = f"""\
  allspark pool install --config pool.toml --now      write the units, enable and start them
  allspark pool apply --config pool.toml              change the running pool to match the edited file
  allspark pool restart --rolling --config pool.toml  restart the members in turn, each once its requests have ended
  allspark pool status --config pool.toml             show health, models and load of the members

apply starts new members and stops removed ones. It reloads members of which only tokens, drain_limit or log_level have
changed, and restarts other changed members one after the other. A restart waits until the requests of the member have
ended: it ends none. If they do not end within --limit, the member takes requests again and the command ends with an
error. apply compares the file with what the members run with, so after an error, or after it was killed, the next one
continues.

layout = "auto" in the file (or --layout auto) measures each member without numa_nodes before the pool starts, with its
model, as one wide group and as a group on each NUMA node (NAME-NODE, with ports counted up), for optimize = "latency"
(one client) or "throughput" (as many clients as are computed at once). The decision is kept in the configuration
directory. It is valid until --measure, or until a stopped pool is applied with another model, purpose or machine.

A commented example of pool.toml: {TEMPLATES / "pool.toml"}"""


def add_command(command: AddCommand) -> None:
    """Adds `pool` and its actions to the parser."""
    p = command("pool", lambda parsed: parsed.act(parsed), "groups as systemd services, from one file", epilog=EPILOG)
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, act: Handler, summary: str) -> argparse.ArgumentParser:
        q = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        q.set_defaults(act=act)
        return q

    def of_units(q: argparse.ArgumentParser) -> None:
        q.add_argument("--config", required=True, metavar="FILE", help="pool.toml")
        q.add_argument("--unit-dir", default=UNIT_DIR, metavar="DIR", help="default %(default)s")
        q.add_argument("--config-dir", default=CONFIG_DIR, metavar="DIR", help="default %(default)s")

    def of_layout(q: argparse.ArgumentParser) -> None:
        q.add_argument("--layout", choices=layouts.LAYOUTS, default="",
                       help="the layout of members without numa_nodes: one wide group with a rank on each NUMA node "
                            "(default), a group on each node, or the one that a measurement shows to be better; kept "
                            "until it is given again")
        q.add_argument("--optimize", "--for", choices=layouts.PURPOSES, default="",
                       help="what auto measures for (default throughput)")
        q.add_argument("--measure", action="store_true", help="measure again, although auto has decided before")

    def of_limit(q: argparse.ArgumentParser) -> None:
        q.add_argument("--limit", type=float, default=DRAIN_LIMIT_SECONDS, metavar="SECONDS",
                       help="how long the requests of a member may take to end (default %(default)g; inf: any time)")

    q = action("install", install, "write the systemd units of a pool")
    of_units(q)
    of_layout(q)
    q.add_argument("--dry-run", action="store_true", help="print the files instead of writing them")
    q.add_argument("--now", action="store_true", help="also enable and start them")
    q = action("apply", apply, "change the running pool to match the edited file")
    of_units(q)
    of_layout(q)
    of_limit(q)
    q.set_defaults(dry_run=False)
    q = action("uninstall", uninstall, "stop a pool and remove its units; the models that clients installed are kept")
    of_units(q)
    q = action("drain", drain, "make members refuse new requests, and wait until their requests have ended")
    add_target_options(q)
    q.add_argument("members", nargs="*", metavar="MEMBER", help="default: all")
    q.add_argument("--undo", action="store_true", help="make them accept requests again")
    of_limit(q)
    q = action("restart", restart, "restart members")
    q.add_argument("--config", required=True, metavar="FILE", help="pool.toml")
    q.add_argument("--config-dir", default=CONFIG_DIR, metavar="DIR", help="default %(default)s")
    q.add_argument("members", nargs="*", metavar="MEMBER", help="default: all")
    q.add_argument("--rolling", action="store_true",
                   help="one after the other, each once its requests have ended")
    of_limit(q)
    q = action("status", status, "health, models and load of the members")
    add_target_options(q)
