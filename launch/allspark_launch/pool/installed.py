"""What of a pool is installed, and what its members run with. Commands compare that with the pool file, and not what
they last wrote with what they would write: a command that was killed, or that failed half-way, is completed by the
next.
"""
from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..machine.topology import read_topology
from ..options import RELOADABLE, UNIT_KEY
from . import layout as layouts
from .pool import Pool
from .units import report_file


def installed_pool(options: argparse.Namespace) -> Pool:
    """Reads the pool file and applies the layout that was saved when the pool was installed."""
    pool = Pool.from_file(options.config)
    return pool.with_layout(layouts.SavedLayout.read(pool.name, options.config_dir), read_topology())


def installed_members(options: argparse.Namespace, pool: Pool) -> list[str]:
    """The names of the members that are installed."""
    return [path.stem for path in sorted(Path(options.config_dir, pool.name).glob("*.json"))]


@contextlib.contextmanager
def locked(options: argparse.Namespace) -> Iterator[None]:
    """A context in which no other command changes the pools of this configuration directory. RuntimeError if one
    does.
    """
    os.makedirs(options.config_dir, exist_ok=True)
    directory = os.open(options.config_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another allspark pool command changes the pools of {options.config_dir}; wait until "
                               "it has ended, or end it") from None
        yield
    finally:
        os.close(directory)


def needed(pool: Pool, member: str, wanted: dict[str, Any], unit: str) -> str:
    """What a running member needs to have these options and this unit: "nothing", "reload" or "restart"."""
    try:
        report = json.loads(report_file(pool.name, member).read_text(encoding="utf-8"))
        running, of_unit = dict(report["options"]), report[UNIT_KEY]
    except (OSError, ValueError, KeyError, TypeError):     # it was started by a version that reports nothing
        return "restart"
    wanted = _without(wanted, ("state_file",))      # the unit names it
    if of_unit != unit or _without(wanted, RELOADABLE) != _without(running, RELOADABLE):
        return "restart"
    return "nothing" if wanted == running else "reload"


def _without(table: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}
