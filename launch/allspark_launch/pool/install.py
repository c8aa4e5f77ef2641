"""Installs, changes and removes the systemd units of a pool."""
from __future__ import annotations

import argparse
import json
import logging
import pwd
import time
from dataclasses import replace
from pathlib import Path

from ..options import UNIT_KEY, GroupOptions
from ..output import write_whole
from . import http, layout as layouts
from .decisions import pool_with_layout
from .installed import installed_members, locked, needed
from .pool import Pool
from .rolling import emptied, restart_in_turn, wait_until_healthy
from .units import JOB_SECONDS, is_active, start_unit, systemctl, target_name, unit_files, unit_name

logger = logging.getLogger(__name__)

#: time limit for a member to take over reloaded options
_RELOAD_SECONDS = 10.0


def install(options: argparse.Namespace) -> int:
    """`allspark pool install`."""
    pool, saved = pool_with_layout(options)
    files = _files(options, pool)
    if options.dry_run:
        print("\n".join(f"# {path}\n{text}" for path, text in files.items()))
        return 0
    _check_user(pool, must_exist=options.now)
    with locked(options):
        saved.write()
        _write(files)
        if options.now:
            systemctl("daemon-reload")
            systemctl("enable", *(unit_name(pool.name, member) for member in pool.members),
                      *([http.unit_name(pool.name)] if pool.http is not None else []), target_name(pool.name))
            systemctl("start", target_name(pool.name), limit=JOB_SECONDS)
            failed = [member for member in pool.members if not is_active(pool.name, member)]
            if failed:      # a target starts although what it wants does not
                raise RuntimeError(f"members {', '.join(failed)} have not started: see journalctl -u "
                                   f"{unit_name(pool.name, failed[0])}")
        else:
            print("start the pool with:\n  systemctl daemon-reload && systemctl enable --now "
                  f"{target_name(pool.name)}")
    return 0


def uninstall(options: argparse.Namespace) -> int:
    """`allspark pool uninstall`."""
    pool = Pool.from_file(options.config)
    with locked(options):
        configs = Path(options.config_dir, pool.name)
        units = [unit_name(pool.name, member) for member in installed_members(options, pool)]
        http_unit = Path(options.unit_dir, http.unit_name(pool.name))
        if http_unit.exists():
            units.append(http_unit.name)
        systemctl("disable", "--now", target_name(pool.name), *units, check=False, limit=JOB_SECONDS)
        for path in [*_files(options, pool), *configs.glob("*.json"), *configs.glob("*.env"),
                     layouts.layout_file(pool.name, options.config_dir), http_unit,
                     http.config_file(pool.name, options.config_dir)]:
            if path.exists():
                path.unlink()
                print(f"removed {path}")
        if configs.is_dir() and not any(configs.iterdir()):
            configs.rmdir()
        systemctl("daemon-reload")
    return 0


def apply(options: argparse.Namespace) -> int:
    """`allspark pool apply`. Every step follows from the pool file, the installed files and what the members report
    that they run with. So after an error, or after it was killed, the command continues where it was.
    """
    pool, saved = pool_with_layout(options)
    files = _files(options, pool)
    _check_user(pool, must_exist=True)
    with locked(options):
        saved.write()
        _write({path: text for path, text in files.items() if not path.exists() or path.read_text() != text})
        systemctl("daemon-reload")
        for member in sorted(set(installed_members(options, pool)) - set(pool.members)):
            _remove(options, pool, member)
        systemctl("enable", *(unit_name(pool.name, member) for member in pool.members), target_name(pool.name))
        for member in pool.members:         # before any is restarted: the others must be able to take its requests
            if not is_active(pool.name, member):
                start_unit(pool.name, member)
                wait_until_healthy(pool, member)
                print(f"{member}: started")
        http.apply(pool, options.unit_dir, options.config_dir)
        configs, restart = pool.configs(), []
        for member in pool.members:
            wanted = json.loads(configs[f"{member}.json"])
            unit = pool.unit_digest(member, Path(options.config_dir))
            need = needed(pool, member, wanted, unit)
            if need == "restart":
                restart.append(member)
            elif need == "reload":
                systemctl("reload", unit_name(pool.name, member))
                deadline = time.monotonic() + _RELOAD_SECONDS
                while needed(pool, member, wanted, unit) != "nothing":
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"member {member!r} has not taken over its configuration: see journalctl -u "
                                           f"{unit_name(pool.name, member)}")
                    time.sleep(0.1)
                print(f"{member}: reloaded")
            else:
                print(f"{member}: unchanged")
        return restart_in_turn(pool, restart, options.limit)


def _remove(options: argparse.Namespace, pool: Pool, member: str) -> None:
    """Stops a member that is no longer in the pool file, once its requests have ended, and removes its files."""
    config = Path(options.config_dir, pool.name, f"{member}.json")
    try:
        before = replace(pool, members={member: GroupOptions.from_file(str(config))})
    except ValueError as error:
        logger.warning("member %r is stopped without waiting for its requests: %s", member, error)
        systemctl("disable", "--now", unit_name(pool.name, member), limit=JOB_SECONDS)
    else:
        with emptied(before, member, options.limit):
            systemctl("disable", "--now", unit_name(pool.name, member), limit=JOB_SECONDS)
    config.with_suffix(".env").unlink(missing_ok=True)
    config.unlink()
    print(f"{member}: stopped and removed")


def _files(options: argparse.Namespace, pool: Pool) -> dict[Path, str]:
    """The files of an installed pool: path -> content."""
    config_dir = Path(options.config_dir)
    configs = config_dir / pool.name
    return ({Path(options.unit_dir, name): text for name, text in unit_files(pool, config_dir).items()}
            | {configs / name: text for name, text in pool.configs().items()}
            | {configs / f"{member}.env": f"{UNIT_KEY}={pool.unit_digest(member, config_dir)}\n"
               + pool.environment_file(member) for member in pool.members}
            | ({http.config_file(pool.name, config_dir): http.config(pool)} if pool.http is not None else {}))


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Configurations have names of files with secrets, but no secrets; an environment may have some.
        write_whole(path, text, 0o600 if path.suffix == ".env" else 0o644)
        print(f"wrote {path}")


def _check_user(pool: Pool, must_exist: bool) -> None:
    try:
        pwd.getpwnam(pool.user)
    except KeyError:
        text = f"there is no user {pool.user!r}, whom the groups would run as: useradd --system {pool.user}"
        if must_exist:
            raise ValueError(f"{text}, or name another one: user = \"...\" in the pool file") from None
        print(text)
