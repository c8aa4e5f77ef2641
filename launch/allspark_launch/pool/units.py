"""A pool's systemd units, and the calls of systemctl that manage them."""
from __future__ import annotations

import logging
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
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
UNIT_DIR, CONFIG_DIR = "/etc/systemd/system", "/etc/allspark"
#: s that a group needs to stop beside what its requests may take: see supervisor.Limits
STOP_SECONDS = 45
_NO_DEVICES = "PrivateDevices=yes\nMemoryDenyWriteExecute=yes"
#: and where the driver keeps what it compiles for chips that there is no machine code for: that takes minutes, and homes
#: are not to be written
_GPU_DEVICES = ("PrivateDevices=no\nDeviceAllow=char-nvidia* rw\n"
                "Environment=CUDA_CACHE_PATH=/var/cache/allspark/cuda")
_HOMES = ("/home", "/root", "/run/user")


def unit_name(pool: str, member: str) -> str:
    """The unit of a member."""
    return f"allspark-{pool}@{member}.service"


def target_name(pool: str) -> str:
    """The unit that stands for all members."""
    return f"allspark-{pool}.target"


def socket_address(pool: str, member: str) -> str:
    """Where a member serves that was given no address."""
    return f"unix:/run/allspark/{pool}/{member}/socket"


def unit_files(pool: Pool, config_dir: Path) -> dict[str, str]:
    """File name -> content of the pool's units: a template for its members, and the target."""
    members = list(pool.members.values())
    command = [sys.executable, "-m", "allspark_launch", "serve", "--config", f"{config_dir}/{pool.name}/@.json",
               "--state-file", f"/var/lib/allspark/{pool.name}/@.json"]
    # In ExecStart a % starts a specifier and a $ a variable; %i is the member's name.
    line = shlex.join(command).replace("%", "%%").replace("$", "$$").replace("@.json", "%i.json")
    longest = max(member.drain_limit for member in members)
    groups = sorted({member.socket_group for member in members if member.socket_group})
    values = {
        "pool": pool.name, "user": pool.user, "command": line,
        "stop_seconds": "infinity" if longest == math.inf else str(math.ceil(longest) + STOP_SECONDS),
        "groups": f"SupplementaryGroups={' '.join(groups)}" if groups else "",
        "filter": "SystemCallFilter=@chown" if groups else "",    # to give sockets to their groups
        "protect_home": "read-only" if any(map(_needs_homes, members)) else "yes",
        "devices": _GPU_DEVICES if any(map(_needs_gpus, members)) else _NO_DEVICES,
        "writable": _line("ReadWritePaths", {path for m in members for path in _written(m)}),
        "network": "" if any(map(_needs_network, members)) else "IPAddressDeny=any\nIPAddressAllow=localhost",
        "members": " ".join(unit_name(pool.name, member) for member in pool.members),
    }
    files = {}
    for name in ("allspark-pool@.service", "allspark-pool.target"):
        text = (TEMPLATES / name).read_text()
        for key, value in values.items():
            text = text.replace(f"{{{key}}}", value)
        files[name.replace("-pool", f"-{pool.name}", 1)] = re.sub(r"\n\n\n+", "\n\n", text)
    return files


def _line(key: str, paths: set[str]) -> str:
    """A setting that lists paths, quoted as systemd reads them; nothing without any."""
    quoted = ['"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"' for path in sorted(paths)]
    return f"{key}={' '.join(quoted)}" if paths else ""


def _models(member: GroupOptions) -> Iterator[dict]:
    for model in member.models:
        yield model if isinstance(model, dict) else {"model_path": model}


def _paths(member: GroupOptions) -> Iterator[str]:
    """What a member reads."""
    yield from (sys.prefix, sys.executable, *member.model_root)
    yield from (getattr(member, declared.name) for declared in options_of(GroupOptions) if declared.reads_file)
    for model in _models(member):
        yield from (str(model.get(key, "")) for key in ("model_path", "weights_path", "draft_model"))


def _written(member: GroupOptions) -> Iterator[str]:
    """Folders that a member writes to, beside those that systemd makes for it."""
    yield from (str(model["host_cache_dir"]) for model in _models(member) if model.get("host_cache_dir"))


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _needs_homes(member: GroupOptions) -> bool:
    """Whether it reads something there, or reaches other hosts by ssh, whose keys are there."""
    return bool(member.hosts) or any(_below(path, _HOMES) for path in _paths(member))


def _needs_gpus(member: GroupOptions) -> bool:
    """Whether it computes on GPUs, or one of its models says so by itself."""
    return bool(member.gpus) or any(str(model.get("compute_unit", "")).startswith("CUDA") for model in _models(member))


def _needs_network(member: GroupOptions) -> bool:
    """Whether it serves or has other hosts, or loads a model from the Hub."""
    from allspark_server.weights.hub import is_hub_id
    if member.hosts or any(is_hub_id(str(model.get("model_path", ""))) for model in _models(member)):
        return True
    return any(not access.is_unix(a) and not access.is_loopback(a) for a in [*member.address, member.http] if a)


def systemctl(*words: str, check: bool = True) -> str:
    """What `systemctl WORDS` prints. Raises RuntimeError with what it says if it fails; with `check` False, "" then."""
    command = ["systemctl", *words]
    logger.info("%s", shlex.join(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode and check:
        raise RuntimeError(f"{shlex.join(command)} ended with status {done.returncode}: "
                           f"{(done.stderr or done.stdout).strip()}")
    return done.stdout if not done.returncode else ""


def is_active(pool: str, member: str) -> bool:
    """Whether systemd runs the unit of a member."""
    return systemctl("is-active", unit_name(pool, member), check=False).strip() in ("active", "reloading")
