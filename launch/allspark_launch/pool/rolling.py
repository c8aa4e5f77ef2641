"""Drains and restarts the members of a pool that runs."""
from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator

import grpc

from .installed import installed_pool, locked
from .members import Member, Target, pool_targets, targets
from .pool import Pool
from .units import JOB_SECONDS, is_active, systemctl, unit_name

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
#: time limit for the requests of a member to end, if no other is given
DRAIN_LIMIT_SECONDS = 3600.0
#: A member that is restarted is drained for this time, and again at each look. So a command that is killed leaves no
#: member drained for longer.
LEASE_SECONDS = 30.0
#: A member whose unit is active but that nobody can connect to is down after this time. Its clients have given up by
#: then: it is the default of their reconnect_timeout.
_DOWN_SECONDS = 60.0
#: time limit for a member that is ready to report itself healthy
_HEALTHY_SECONDS = 300.0


def _chosen(members: list[Target], names: list[str]) -> list[Target]:
    for name in names:
        if name not in (target.name for target in members):
            raise ValueError(f"there is no member {name!r}; members: {', '.join(target.name for target in members)}")
    return [target for target in members if not names or target.name in names]


def drain(options: argparse.Namespace) -> int:
    """`allspark pool drain`. Returns 1 if requests still run at the limit."""
    pool = installed_pool(options) if options.config else None
    chosen = _chosen(targets(options), options.members)
    for target in chosen:       # drain all before waiting, so that no request moves to a member that is drained next
        with Member(target) as member:
            try:
                member.drain(options.undo)
            except grpc.RpcError as error:
                raise _failed(target, error) from None
    left = 0
    for target in chosen if not options.undo else ():
        with Member(target) as member:
            left += _wait_until_empty(member, pool, options.limit)
    return 1 if left else 0


def _failed(target: Target, error: grpc.RpcError) -> RuntimeError:
    return RuntimeError(f"member {target.name!r} at {target.address}: {error.code().name}: {error.details()}")


def _wait_until_empty(member: Member, pool: Pool | None, limit: float, lease: float = 0.0) -> int:
    """Drains a member until its requests have ended, and reports it. Returns how many have not within `limit` seconds.

    A group that is lost meanwhile and starts again is waited for, because its requests continue then; it is drained
    again. Only a member whose unit has ended, or that nobody can connect to for long, counts as down: it has no
    requests. `pool`: None if the member's unit is not known. Raises RuntimeError for other errors of calls.
    """
    name, began, unreachable = member.target.name, time.monotonic(), 0.0
    first, left = -1, 0
    while True:
        try:
            left = member.drain(lease=lease).requests
            unreachable, first = 0.0, left if first < 0 else first
            if not left:
                break
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                unreachable = unreachable or time.monotonic()
                ended = pool is not None and not is_active(pool.name, name)
                if ended or time.monotonic() - unreachable >= _DOWN_SECONDS:
                    print(f"{name}: down: {error.details()}")
                    return 0
            elif error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:     # it is busy
                raise _failed(member.target, error) from None
        if time.monotonic() - began >= limit:
            break
        time.sleep(_LOOK_SECONDS)
    if first > 0:
        print(f"{name}: {first} requests ran; after {time.monotonic() - began:.0f} s {left} still do")
    elif not left:
        print(f"{name}: no requests run")
    return left


@contextlib.contextmanager
def emptied(pool: Pool, name: str, limit: float) -> Iterator[None]:
    """A context in which a member has no requests and takes no new ones, except resumed ones. Raises RuntimeError if
    its requests do not end within `limit` seconds. After an error the member takes requests again.
    """
    target = next(target for target in pool_targets(pool) if target.name == name)
    with Member(target) as member:
        drained = True
        with contextlib.suppress(grpc.RpcError):
            drained = not member.info().draining    # else somebody else has drained it, who will undo it
        try:
            left = _wait_until_empty(member, pool, limit, LEASE_SECONDS)
            if left:
                raise RuntimeError(f"member {name!r} still has {left} requests after {limit:g} s, and takes new ones "
                                   "again; allow more time with --limit")
            yield
            drained = False
        finally:
            if drained:
                with contextlib.suppress(grpc.RpcError):
                    member.drain(undo=True)


def restart(options: argparse.Namespace) -> int:
    """`allspark pool restart`."""
    pool = installed_pool(options)
    names = [target.name for target in _chosen(pool_targets(pool), options.members)]
    with locked(options):
        if options.rolling:
            return restart_in_turn(pool, names, options.limit)
        systemctl("restart", *(unit_name(pool.name, name) for name in names), limit=JOB_SECONDS)
    return 0


def restart_in_turn(pool: Pool, names: list[str], limit: float) -> int:
    """Restarts members one after the other: each once its requests have ended, the next one when it serves again.
    Raises RuntimeError at the first one whose requests do not end within `limit` seconds, or that does not serve again.
    """
    for name in names:
        try:
            with emptied(pool, name, limit):
                systemctl("restart", unit_name(pool.name, name), limit=JOB_SECONDS)
            wait_until_healthy(pool, name)
        except RuntimeError as error:
            after = names[names.index(name) + 1:]
            rest = f"; not restarted: {', '.join(after)}" if after else ""
            raise RuntimeError(f"{error}{rest}") from None
        print(f"{name}: restarted, and serves")
    return 0


def wait_until_healthy(pool: Pool, name: str) -> None:
    """Waits until a member that systemd has started serves. Raises RuntimeError if it does not."""
    target = next(target for target in pool_targets(pool) if target.name == name)
    deadline = time.monotonic() + _HEALTHY_SECONDS
    with Member(target) as member:
        while not member.serves():
            if time.monotonic() > deadline or not is_active(pool.name, name):
                raise RuntimeError(f"member {name!r} does not serve after its start: see journalctl -u "
                                   f"{unit_name(pool.name, name)}")
            time.sleep(_LOOK_SECONDS)
