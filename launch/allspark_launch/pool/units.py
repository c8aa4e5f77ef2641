"""The systemd units of a pool, and calls of systemctl."""
from __future__ import annotations

import logging
import math
import os
import re
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from allspark_server import access
from allspark_server.options import options_of

from .. import resource_folder
from ..options import GroupOptions

if TYPE_CHECKING:
    from .pool import Pool

logger = logging.getLogger(__name__)

TEMPLATES = resource_folder("systemd")
UNIT_DIR, CONFIG_DIR, RUN_DIR = "/etc/systemd/system", "/etc/allspark", "/run/allspark"
#: environment variables that name the collector of traces
COLLECTOR, _TRACES_COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
#: seconds that a group needs to stop, in addition to its drain limit: see group.incarnation.Limits
STOP_SECONDS = 45
_NO_DEVICES = "PrivateDevices=yes\nMemoryDenyWriteExecute=yes"
#: The driver compiles kernels for chips without machine code, which takes minutes. It keeps them in this directory, as
#: the unit cannot write to home directories.
_GPU_DEVICES = ("PrivateDevices=no\nDeviceAllow=char-nvidia* rw\n"
                "Environment=CUDA_CACHE_PATH=/var/cache/allspark/cuda")
#: where this Python is; that of a virtual environment is a link to another one, which may be in somebody's home
PYTHON = (sys.prefix, sys.base_prefix, sys.executable, os.path.realpath(sys.executable))
#: stands for a member's name in paths
_MEMBER = "@MEMBER@"
#: time limits of systemctl: for a question, and for units to start or stop; a start loads models, a stop drains
CALL_SECONDS, JOB_SECONDS = 60.0, 3600.0
_HOMES = ("/home", "/root", "/run/user")


def unit_name(pool: str, member: str) -> str:
    """The unit of a member."""
    return f"allspark-{pool}@{member}.service"


def target_name(pool: str) -> str:
    """The unit that contains all members."""
    return f"allspark-{pool}.target"


def socket_address(pool: str, member: str) -> str:
    """The Unix socket of a member."""
    return f"unix:{RUN_DIR}/{pool}/{member}/socket"


def report_file(pool: str, member: str) -> Path:
    """The file in which a member reports what it runs with. systemd removes it when the member ends."""
    return Path(RUN_DIR, pool, member, "running.json")


def unit_files(pool: Pool, config_dir: Path) -> dict[str, str]:
    """File name -> content of the pool's units: the template of its members, the target, and the HTTP server."""
    from . import http
    members = list(pool.members.values())
    command = [sys.executable, "-m", "allspark_launch", "serve", "--config", f"{config_dir}/{pool.name}/{_MEMBER}.json",
               "--state-file", f"/var/lib/allspark/{pool.name}/{_MEMBER}.json",
               "--report-file", str(report_file(pool.name, _MEMBER))]
    # In ExecStart, % begins a specifier and $ a variable. %i is the member's name.
    line = shlex.join(command).replace("%", "%%").replace("$", "$$").replace(_MEMBER, "%i")
    longest = max(member.drain_limit for member in members)
    groups = sorted({member.socket_group for member in members if member.socket_group})
    values = {
        "pool": pool.name, "user": pool.user, "command": line,
        "stop_seconds": "infinity" if longest == math.inf else str(math.ceil(longest) + STOP_SECONDS),
        "groups": f"SupplementaryGroups={' '.join(groups)}" if groups else "",
        "filter": "SystemCallFilter=@chown" if groups else "",    # sockets get their group by chown
        "protect_home": "read-only" if any(map(_needs_homes, members)) else "yes",
        "devices": _GPU_DEVICES if any(map(_needs_gpus, members)) else _NO_DEVICES,
        "writable": writable({path for m in members for path in _written(m)}),
        "environment": str(config_dir / pool.name / _MEMBER).replace("%", "%%").replace(_MEMBER, "%i") + ".env",
        "network": "" if any(_needs_network(member, pool.environment(name)) for name, member in pool.members.items())
        else "IPAddressDeny=any\nIPAddressAllow=localhost",
        "members": " ".join([*(unit_name(pool.name, member) for member in pool.members),
                             *([http.unit_name(pool.name)] if pool.http is not None else [])]),
    }
    files = {}
    names = ["allspark-pool@.service", "allspark-pool.target"]
    if pool.http is not None:
        values |= http.unit_values(pool, config_dir)
        names.append("allspark-pool-http.service")
    for name in names:
        text = (TEMPLATES / name).read_text()
        for key, value in values.items():
            text = text.replace(f"{{{key}}}", value)
        files[name.replace("-pool", f"-{pool.name}", 1)] = re.sub(r"\n\n\n+", "\n\n", text)
    if pool.http is not None:
        files[http.unit_name(pool.name)] = http.with_digest(files[http.unit_name(pool.name)])
    return files


def running_part(unit: str) -> str:
    """What of a unit counts for a process that runs, and so needs a restart where it changes."""
    return "\n".join(line for line in unit.splitlines() if line and not line.startswith(("#", "TimeoutStopSec=")))


def writable(paths: set[str]) -> str:
    """The setting of a unit that lets it write to these directories, quoted for systemd; "" for none."""
    quoted = ['"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"' for path in sorted(paths)]
    return f"ReadWritePaths={' '.join(quoted)}" if paths else ""


def _models(member: GroupOptions) -> Iterator[dict]:
    for model in member.models:
        yield model if isinstance(model, dict) else {"model_path": model}


def _paths(member: GroupOptions) -> Iterator[str]:
    """Paths that a member reads."""
    yield from (*PYTHON, *member.model_root)
    yield from (getattr(member, declared.name) for declared in options_of(GroupOptions) if declared.reads_file)
    for model in _models(member):
        yield from (str(model.get(key, "")) for key in ("model_path", "weights_path", "draft_model", "chat_template"))


def _written(member: GroupOptions) -> Iterator[str]:
    """Directories that a member writes to, in addition to those that systemd creates for it."""
    yield from (str(model["host_cache_dir"]) for model in _models(member) if model.get("host_cache_dir"))


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def any_in_homes(paths: Iterable[str]) -> bool:
    """Whether one of these paths is in a home directory."""
    return any(_below(path, _HOMES) for path in paths)


def _needs_homes(member: GroupOptions) -> bool:
    """Whether it reads from home directories: models or tokens, or the keys of ssh."""
    return bool(member.hosts) or any_in_homes(_paths(member))


def _needs_gpus(member: GroupOptions) -> bool:
    """Whether it, or one of its models, computes on GPUs."""
    return bool(member.gpus) or any(str(model.get("compute_unit", "")).startswith("CUDA") for model in _models(member))


def _needs_network(member: GroupOptions, environment: dict[str, str]) -> bool:
    """Whether it serves other hosts, runs on other hosts, loads a model from the Hub, sends traces to a host, or has
    prompts computed there.
    """
    from allspark_server.weights.hub import is_hub_id
    if member.hosts or any(is_hub_id(str(model.get("model_path", ""))) for model in _models(member)):
        return True
    if any(_is_remote(environment[key]) for key in (COLLECTOR, _TRACES_COLLECTOR) if environment.get(key)):
        return True
    addresses = [*member.address, member.http, *member.prefill_from]
    return any(not access.is_unix(a) and not access.is_loopback(a) for a in addresses if a)


def is_url(text: object) -> bool:
    """Whether a value is the URL of an HTTP or gRPC server."""
    return isinstance(text, str) and text.isprintable() and bool(re.fullmatch(r"(https?|grpc)://[^/\s]+\S*", text))


def _is_remote(url: str) -> bool:
    """Whether a URL, or a host with a port, leads to another host."""
    place = urllib.parse.urlsplit(url if "://" in url else f"//{url}")
    return not access.is_loopback(f"{place.hostname or ''}:0")


def systemctl(*words: str, check: bool = True, limit: float = CALL_SECONDS) -> str:
    """The output of `systemctl WORDS`. If it fails: RuntimeError with its message, or "" if `check` is false. After
    `limit` seconds RuntimeError; what systemd was asked to do goes on.
    """
    command = ["systemctl", *words]
    logger.info("%s", shlex.join(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
                              timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{shlex.join(command)} has not ended within {limit:g} s; systemctl list-jobs shows what it "
                           "waits for") from None
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode and check:
        raise RuntimeError(f"{shlex.join(command)} ended with status {done.returncode}: "
                           f"{(done.stderr or done.stdout).strip()}")
    return done.stdout if not done.returncode else ""


def start_unit(pool: str, member: str) -> None:
    """Starts the unit of a member and waits until it is ready. Raises RuntimeError if it fails."""
    unit = unit_name(pool, member)
    if systemctl("is-active", unit, check=False).strip() == "failed":
        systemctl("reset-failed", unit)     # it may have reached its start limit
    systemctl("start", unit, limit=JOB_SECONDS)


def is_active(pool: str, member: str) -> bool:
    """Whether systemd runs the unit of a member."""
    return systemctl("is-active", unit_name(pool, member), check=False).strip() in ("active", "reloading")
