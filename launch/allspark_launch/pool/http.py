"""The HTTP server of a pool: the table [http] of a pool file, its unit, and what `install` and `apply` do with it."""
from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark_server import access
from allspark_server.options import options_of

from ..group.http_server import LISTENER, HttpOptions
from ..options import UNIT_KEY, changed, from_table
from ..tables import Location
from . import units

if TYPE_CHECKING:
    from .pool import Pool

#: drain_limit of a server that does not set it, and the seconds that it needs to stop in addition
DRAIN_SECONDS, STOP_SECONDS = 60.0, 30
_LOWEST_FREE_PORT = 1024


def unit_name(pool: str) -> str:
    """The unit of the HTTP server."""
    return f"allspark-{pool}-http.service"


def config_file(pool: str, config_dir: str | Path) -> Path:
    """Its configuration file. It is not in the pool's folder, where every `*.json` is a member's file."""
    return Path(config_dir, f"{pool}.http.json")


def report_file(pool: str) -> Path:
    """The file in which it reports what it runs with. systemd removes it when the server ends."""
    return Path(units.RUN_DIR, f"{pool}.http", "running.json")


def read(values: Any, where: Location) -> HttpOptions:
    """The options of the table [http]. ValueError names file, line and key of an error."""
    if not isinstance(values, dict):
        raise ValueError(f"{where.at()}: http is {values!r}; it must be a table, [http]")
    options = from_table(HttpOptions, {"drain_limit": DRAIN_SECONDS, **values}, where)
    try:
        access.mode_of(options.socket_mode, options.socket_group)
        access.check_listener(options.address, token=bool(options.token_file), tls=bool(options.tls_cert),
                              client_ca=bool(options.tls_ca), insecure=options.insecure)
    except ValueError as error:
        raise ValueError(f"{where.at('address')}: {error}") from None
    return options


def options_for(pool: Pool) -> HttpOptions:
    """The server's options. Unless the file says otherwise, it serves the pool's members at their sockets, with a
    token of the first member's file.
    """
    assert pool.http is not None
    own = [next(filter(access.is_unix, pool.addresses(name))) for name in pool.members]
    token_file = pool.http.pool_token_file or ("" if pool.http.pool else next(iter(pool.members.values())).token_file)
    return replace(pool.http, pool=pool.http.pool or own, pool_token_file=token_file)


def unit_values(pool: Pool, config_dir: Path) -> dict[str, str]:
    """What the unit's template has in braces."""
    options = options_for(pool)
    command = [sys.executable, "-m", "allspark_launch", "http", "--config", str(config_file(pool.name, config_dir)),
               "--report-file", str(report_file(pool.name))]
    files = [getattr(options, declared.name) for declared in options_of(HttpOptions) if declared.reads_file]
    homes = units.any_in_homes([*units.PYTHON, *files, options.pool_token_file, options.pool_tls_ca])
    port = options.address.rpartition(":")[2]
    low = not access.is_unix(options.address) and port.isdigit() and 0 < int(port) < _LOWEST_FREE_PORT
    capability = "CAP_NET_BIND_SERVICE" if low else ""
    in_file = bool(options.store) and "://" not in options.store
    remote = (bool(options.store) and not in_file) or any(
        not access.is_unix(a) and not access.is_loopback(a) for a in [options.address, *options.pool])
    return {
        "http_command": shlex.join(command).replace("%", "%%").replace("$", "$$"),
        "http_stop_seconds": "infinity" if options.drain_limit == math.inf else
        str(math.ceil(options.drain_limit + options.drain_delay) + STOP_SECONDS),
        "http_groups": f"SupplementaryGroups={options.socket_group}" if options.socket_group else "",
        "http_filter": "SystemCallFilter=@chown" if options.socket_group else "",
        "http_capabilities": f"CapabilityBoundingSet={capability}\nAmbientCapabilities={capability}",
        "http_protect_home": "read-only" if homes else "yes",
        # SQLite writes a log beside its file.
        "http_writable": units.writable({str(Path(options.store).absolute().parent)} if in_file else set()),
        "http_network": "" if remote else "IPAddressDeny=any\nIPAddressAllow=localhost",
    }


def with_digest(unit: str) -> str:
    """The unit with a digest of itself in its environment, which the server reports."""
    digest = hashlib.blake2b(units.running_part(unit).encode(), digest_size=8).hexdigest()
    return unit.replace("\n[Install]", f"Environment={UNIT_KEY}={digest}\n\n[Install]")


def config(pool: Pool) -> str:
    """The content of its configuration file."""
    return json.dumps(changed(options_for(pool)) | {"address": options_for(pool).address}, indent=2) + "\n"


def apply(pool: Pool, unit_dir: str | Path, config_dir: str | Path) -> None:
    """Starts, reloads, restarts or removes the server, as the pool file needs it. Its files are written already."""
    name, unit_file = unit_name(pool.name), Path(unit_dir, unit_name(pool.name))
    if pool.http is None:
        if unit_file.exists():
            units.systemctl("disable", "--now", name, limit=units.JOB_SECONDS)
            unit_file.unlink()
            config_file(pool.name, config_dir).unlink(missing_ok=True)
            units.systemctl("daemon-reload")
            print("http: stopped and removed")
        return
    units.systemctl("enable", name)
    need = _needed(pool, unit_file)
    if units.systemctl("is-active", name, check=False).strip() not in ("active", "reloading"):
        need = "start"
    if need != "nothing":
        units.systemctl(need, name, limit=units.JOB_SECONDS)
    print(f"http: {'unchanged' if need == 'nothing' else f'{need}ed'}")


def _needed(pool: Pool, unit_file: Path) -> str:
    """What the running server needs: "nothing", "reload" or "restart"."""
    wanted = options_for(pool)
    try:
        report = json.loads(report_file(pool.name).read_text(encoding="utf-8"))
        running = HttpOptions(**report["options"])
        if f"{UNIT_KEY}={report[UNIT_KEY]}\n" not in unit_file.read_text(encoding="utf-8"):
            return "restart"
    except (OSError, ValueError, KeyError, TypeError):
        return "restart"
    if any(getattr(wanted, key) != getattr(running, key) for key in LISTENER):
        return "restart"
    return "nothing" if wanted == running else "reload"
