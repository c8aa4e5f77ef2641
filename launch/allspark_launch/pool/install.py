"""Installs, changes and removes the systemd units of a pool."""
from __future__ import annotations

import argparse
import json
import pwd
from collections.abc import Iterable
from pathlib import Path

from ..options import RELOADABLE
from ..output import write_whole
from . import layout as layouts
from .decisions import installed_members, pool_with_layout
from .pool import Pool
from .rolling import restart_in_turn
from .units import is_active, systemctl, target_name, unit_files, unit_name


def install(options: argparse.Namespace) -> int:
    """`allspark pool install`."""
    pool, saved = pool_with_layout(options)
    files = _files(options, pool)
    if options.dry_run:
        print("\n".join(f"# {path}\n{text}" for path, text in files.items()))
        return 0
    _check_user(pool)
    saved.write()
    _write(files)
    if options.now:
        systemctl("daemon-reload")
        systemctl("enable", *(unit_name(pool.name, member) for member in pool.members), target_name(pool.name))
        systemctl("start", target_name(pool.name))
    else:
        print(f"start the pool with:\n  systemctl daemon-reload && systemctl enable --now {target_name(pool.name)}")
    return 0


def uninstall(options: argparse.Namespace) -> int:
    """`allspark pool uninstall`."""
    pool = Pool.from_file(options.config)
    configs = Path(options.config_dir, pool.name)
    units = [unit_name(pool.name, member) for member in installed_members(options, pool)]
    systemctl("disable", "--now", target_name(pool.name), *units, check=False)
    for path in [*_files(options, pool), *configs.glob("*.json"), layouts.layout_file(pool.name, options.config_dir)]:
        if path.exists():
            path.unlink()
            print(f"removed {path}")
    if configs.is_dir() and not any(configs.iterdir()):
        configs.rmdir()
    systemctl("daemon-reload")
    return 0


def apply(options: argparse.Namespace) -> int:
    """`allspark pool apply`."""
    pool, saved = pool_with_layout(options)
    files = _files(options, pool)
    configs = Path(options.config_dir, pool.name)
    before = {path.stem: path.read_text() for path in configs.glob("*.json")}
    template = Path(options.unit_dir, f"allspark-{pool.name}@.service")
    same_unit = template.exists() and template.read_text() == files[template]
    gone = sorted(set(before) - set(pool.members))
    _check_user(pool)
    saved.write()
    _write({path: text for path, text in files.items() if not path.exists() or path.read_text() != text})
    systemctl("daemon-reload")
    for member in gone:
        systemctl("disable", "--now", unit_name(pool.name, member))
        (configs / f"{member}.json").unlink()
        print(f"{member}: stopped and removed")
    systemctl("enable", *(unit_name(pool.name, member) for member in pool.members), target_name(pool.name))
    restart = []
    for member in pool.members:
        now, old = json.loads(files[configs / f"{member}.json"]), json.loads(before.get(member, "null"))
        if old is None or not is_active(pool.name, member):
            systemctl("start", unit_name(pool.name, member))
            print(f"{member}: started")
        elif not same_unit or _without(now, RELOADABLE) != _without(old, RELOADABLE):
            restart.append(member)
        else:
            systemctl("reload", unit_name(pool.name, member))
            print(f"{member}: {'unchanged' if now == old else 'reloaded'}")
    return restart_in_turn(pool, restart)


def _without(table: dict, keys: Iterable[str]) -> dict:
    return {key: value for key, value in table.items() if key not in keys}


def _files(options: argparse.Namespace, pool: Pool) -> dict[Path, str]:
    """The files of an installed pool: path -> content."""
    configs = Path(options.config_dir, pool.name)
    return ({Path(options.unit_dir, name): text for name, text in unit_files(pool, Path(options.config_dir)).items()}
            | {configs / name: text for name, text in pool.configs().items()})


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, 0o644)      # it has names of files with secrets, but no secrets
        print(f"wrote {path}")


def _check_user(pool: Pool) -> None:
    try:
        pwd.getpwnam(pool.user)
    except KeyError:
        print(f"there is no user {pool.user!r} yet: useradd --system {pool.user}")
