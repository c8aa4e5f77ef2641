"""Drains and restarts the members of a pool that runs."""
from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from .decisions import installed_pool
from .members import Member, Target, pool_targets, targets
from .pool import Pool
from .units import is_active, systemctl, unit_name

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
#: time limit for a restarted member to load its models
_RESTART_SECONDS = 3600.0


def _chosen(members: list[Target], names: list[str]) -> list[Target]:
    for name in names:
        if name not in (target.name for target in members):
            raise ValueError(f"there is no member {name!r}; members: {', '.join(target.name for target in members)}")
    return [target for target in members if not names or target.name in names]


def drain(options: argparse.Namespace) -> int:
    """`allspark pool drain`. Returns 1 if requests still run at the limit."""
    left = 0
    chosen = _chosen(targets(options), options.members)
    for target in chosen:       # drain all before waiting, so that no request moves to a member that is drained next
        with Member(target) as member:
            _call(member.drain, target, options.undo)
    for target in chosen if not options.undo else ():
        with Member(target) as member:
            left += _wait_until_empty(member, options.limit)
    return 1 if left else 0


def _call(method: Callable[..., Any], target: Target, *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except grpc.RpcError as error:
        raise RuntimeError(f"member {target.name!r} at {target.address}: {error.code().name}: {error.details()}"
                           ) from None


def _wait_until_empty(member: Member, limit: float = float("inf")) -> int:
    """Waits until the requests of a draining member have ended, and reports it. Returns how many have not."""
    began, name = time.monotonic(), member.target.name
    first = info = _call(member.info, member.target)
    if not info.requests:
        print(f"{name}: no requests run")
    while info.requests and time.monotonic() - began < limit:
        time.sleep(_LOOK_SECONDS)
        info = _call(member.info, member.target)
    if first.requests:
        print(f"{name}: {first.requests} requests ran; after {time.monotonic() - began:.0f} s {info.requests} still do")
    return info.requests


def restart(options: argparse.Namespace) -> int:
    """`allspark pool restart`."""
    pool = installed_pool(options)
    names = [target.name for target in _chosen(pool_targets(pool), options.members)]
    if options.rolling:
        return restart_in_turn(pool, names)
    systemctl("restart", *(unit_name(pool.name, name) for name in names))
    return 0


def restart_in_turn(pool: Pool, names: list[str]) -> int:
    """Restarts members one after the other: each once its requests have ended, the next one when it serves again.
    Raises RuntimeError at the first one that does not serve again.
    """
    for name in names:
        target = next(target for target in pool_targets(pool) if target.name == name)
        with Member(target) as member:
            try:
                _call(member.drain, target)
            except RuntimeError as error:       # it is down, so no request runs there
                logger.warning("%s", error)
            else:
                _wait_until_empty(member)
        systemctl("restart", unit_name(pool.name, name))
        target = next(target for target in pool_targets(pool) if target.name == name)
        deadline = time.monotonic() + _RESTART_SECONDS
        with Member(target) as member:
            while not member.serves():
                if time.monotonic() > deadline or not is_active(pool.name, name):
                    raise RuntimeError(f"member {name!r} does not serve after its restart: see journalctl -u "
                                       f"{unit_name(pool.name, name)}; the members after it were not restarted")
                time.sleep(_LOOK_SECONDS)
        print(f"{name}: restarted, and serves")
    return 0
