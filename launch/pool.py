"""`allspark pool install`, `pool status` and `top`: several groups as systemd units, and a look at them."""
from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from allspark_server import access

from .serving import GroupOptions, read_table

TEMPLATES = Path(__file__).parent / "systemd"
TIMEOUT_SECONDS = 3.0


@dataclass
class Pool:
    """A pool file: its name, the user its groups run as, and the options of each member."""
    name: str
    user: str
    members: dict[str, GroupOptions]

    @classmethod
    def from_file(cls, path: str) -> Pool:
        """Raises ValueError naming what is wrong in the file."""
        table = read_table(path)
        unknown = set(table) - {"name", "user", "member"}
        if unknown:
            raise ValueError(f"{path}: unknown key {sorted(unknown)[0]!r}; known: name, user, member")
        # Both go into units as they are: anything else, a line break above all, could become a setting there.
        for key in ("name", "user"):
            if not _is_word(table.get(key, "default")):
                raise ValueError(f"{path}: {key} {table[key]!r} must be of letters, digits, '.', '_' and '-'")
        entries = table.get("member", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{path}: member is {entries!r}; it must be a list of tables, [[member]] in TOML")
        members: dict[str, GroupOptions] = {}
        for i, entry in enumerate(entries):
            name = entry.pop("name", str(i))
            if not _is_word(name) or name in members:
                raise ValueError(f"{path}: member name {name!r} must be unique, of letters, digits, '.', '_' and '-'")
            member = GroupOptions.from_table(entry, f"{path}: member {name!r}")
            if not entry.get("address"):
                raise ValueError(f"{path}: member {name!r} has no address, such as \"127.0.0.1:50051\"")
            members[name] = member
        if not members:
            raise ValueError(f"{path} has no [[member]]")
        taken: dict[str, str] = {}
        for name, member in members.items():
            for address in member.address:
                if address in taken:
                    raise ValueError(f"{path}: members {taken[address]!r} and {name!r} both have address {address}")
                taken[address] = name
        return cls(table.get("name", "default"), table.get("user", "root"), members)


def _is_word(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None


def add_commands(command) -> None:
    p = command("pool", _pool, "groups as systemd services: install, status", epilog="""\
  allspark pool install --config pool.toml     writes units, prints the systemctl commands that start them
  allspark pool status --config pool.toml      health, models and load of the members

A commented example of pool.toml: """ + str(TEMPLATES / "pool.toml"))
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    q = actions.add_parser("install", help="write the systemd units of a pool")
    q.add_argument("--config", required=True, metavar="FILE", help="pool.toml")
    q.add_argument("--unit-dir", default="/etc/systemd/system", metavar="DIR", help="default %(default)s")
    q.add_argument("--config-dir", default="/etc/allspark", metavar="DIR", help="default %(default)s")
    q.add_argument("--dry-run", action="store_true", help="print what would be written")
    q = actions.add_parser("status", help="health, models and load of the members")
    _target_options(q)
    p = command("top", _top, "live view of a pool's load")
    _target_options(p)
    p.add_argument("--once", action="store_true", help="print one table and stop")
    p.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")


def _target_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--config", metavar="FILE", help="pool.toml")
    p.add_argument("--address", action="append", default=[], help="a group's address; repeatable (instead of --config; "
                                                                  "default $ALLSPARK_ADDRESS, or where a group serves "
                                                                  "that was given none)")
    p.add_argument("--token-file", metavar="FILE", help="present the first token of this file")
    p.add_argument("--tls-ca", metavar="PEM", help="connect with TLS, trusting these certificates")


def units(pool: Pool, config_dir: Path) -> dict[str, str]:
    """File name -> content of the pool's units."""
    names = {member: f"allspark-{pool.name}-{member}.service" for member in pool.members}
    files = {}
    template = (TEMPLATES / "allspark-member.service").read_text()
    for member, unit in names.items():
        config = config_dir / _config_name(pool, member)
        command = [sys.executable, "-m", "allspark_launch", "serve", "--config", str(config), "--state-file",
                   f"/var/lib/allspark/{pool.name}-{member}.json"]
        # In ExecStart a % starts a specifier and a $ a variable.
        line = shlex.join(command).replace("%", "%%").replace("$", "$$")
        files[unit] = (template.replace("{pool}", pool.name).replace("{member}", member)
                       .replace("{user}", pool.user).replace("{command}", line))
    target = (TEMPLATES / "allspark-pool.target").read_text()
    files[f"allspark-{pool.name}.target"] = (target.replace("{pool}", pool.name)
                                             .replace("{members}", " ".join(names.values())))
    return files


def _config_name(pool: Pool, member: str) -> str:
    return f"{pool.name}-{member}.json"


def _pool(options: argparse.Namespace) -> int:
    return _install(options) if options.action == "install" else _status(options)


def _install(options: argparse.Namespace) -> int:
    pool = Pool.from_file(options.config)
    for name, member in pool.members.items():
        try:
            member.addresses()
        except ValueError as error:
            raise ValueError(f"{options.config}: member {name!r}: {error}") from None
    config_dir = Path(options.config_dir)
    files = {Path(options.unit_dir, name): text for name, text in units(pool, config_dir).items()}
    for name, member in pool.members.items():
        changed = {k: v for k, v in asdict(member).items() if v != getattr(GroupOptions(), k)}
        files[config_dir / _config_name(pool, name)] = json.dumps(changed, indent=2) + "\n"
    for path, text in files.items():
        if options.dry_run:
            print(f"# {path}\n{text}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    print(f"start the pool with:\n  systemctl daemon-reload && systemctl enable --now allspark-{pool.name}.target")
    return 0


@dataclass
class Target:
    """Where a group is, and how to reach it."""
    name: str
    address: str
    token: str = ""
    tls_ca: str = ""


def _targets(options: argparse.Namespace) -> list[Target]:
    token = _token(options.token_file)
    if options.config:
        found = []
        for name, member in Pool.from_file(options.config).members.items():
            own = token or _token(member.token_file)
            ca = options.tls_ca or (member.tls_cert if member.tls_cert else "")
            found.append(Target(name, re.sub(r"^(0\.0\.0\.0|\[::\]):", "127.0.0.1:", member.address[0]), own, ca))
        return found
    addresses = options.address or [a for a in os.environ.get("ALLSPARK_ADDRESS", "").split(",") if a]
    return [Target(a, a, token, options.tls_ca or "") for a in addresses or [default_address()]]


def _token(path: str | None) -> str:
    """A token of a file: each has a role that may see what is shown here."""
    return next(iter(access.read_tokens(path))) if path else ""


def default_address() -> str:
    """Where the group is that was given no address."""
    found = access.default_address(guarded=False)
    return found if os.path.exists(found.removeprefix("unix:")) else access.TCP_ADDRESS


class Member:
    """A connection to one group, for its statistics."""

    def __init__(self, target: Target):
        import grpc
        self.target = target
        if target.tls_ca:
            credentials = grpc.ssl_channel_credentials(Path(target.tls_ca).read_bytes())
            self._channel = grpc.secure_channel(target.address, credentials)
        else:
            self._channel = grpc.insecure_channel(target.address)
        self._metadata = [("authorization", f"Bearer {target.token}")] if target.token else []

    def _call(self, method: str, request, response):
        call = self._channel.unary_unary(f"/allspark.Allspark/{method}", type(request).SerializeToString,
                                         response.FromString)
        return call(request, timeout=TIMEOUT_SECONDS, metadata=self._metadata)

    def info(self):
        """The group's ServerInfo message. Raises grpc.RpcError if it does not answer."""
        from allspark_client._proto import allspark_pb2 as pb
        return self._call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo)

    def stat(self, model: str):
        """A model's EngineStat message."""
        from allspark_client._proto import allspark_pb2 as pb
        return self._call("GetStat", pb.ModelRequest(model=model), pb.EngineStat)

    def close(self) -> None:
        self._channel.close()


def _status(options: argparse.Namespace) -> int:
    import grpc
    print(f"{'member':<12} {'address':<28} {'state':<12} {'ranks':>5}  models")
    down = 0
    for target in _targets(options):
        member = Member(target)
        try:
            info = member.info()
            models = [f"{m.name} ({'running' if m.running else 'stopped'}, load {m.load})" for m in info.models]
            print(f"{target.name:<12} {target.address:<28} {'serving':<12} {info.rank_nums:>5}  "
                  + (", ".join(models) or "-"))
        except grpc.RpcError as error:
            down += 1
            refused = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            print(f"{target.name:<12} {target.address:<28} {'refused' if refused else 'down':<12} {'':>5}  "
                  f"{error.code().name}: {error.details()}")
        finally:
            member.close()
    return 1 if down else 0


def _top(options: argparse.Namespace) -> int:
    members = [Member(t) for t in _targets(options)]
    try:
        while True:
            lines = _top_table(members)
            if sys.stdout.isatty() and not options.once:
                print("\033[H\033[2J", end="")
            print("\n".join(lines), flush=True)
            if options.once:
                return 0
            time.sleep(max(0.1, options.interval))
    finally:
        for member in members:
            member.close()


def _top_table(members: list[Member]) -> list[str]:
    import grpc
    lines = [f"{'member':<12} {'model':<24} {'running':>7} {'waiting':>7} {'tokens/s':>9} {'prefill/s':>9} "
             f"{'cache':>6} {'hits':>6}"]
    for member in members:
        try:
            for model in member.info().models:
                s = member.stat(model.name)
                prefill = max(0.0, s.process_token_persec - s.generate_token_persec)
                lines.append(f"{member.target.name:<12} {model.name:<24} {s.running_request:>7} "
                             f"{s.pendding_request:>7} {s.generate_token_persec:>9.1f} {prefill:>9.1f} "
                             f"{s.token_usage_percentage:>5.1f}% {100 * s.prefix_cache_hit_rate:>5.1f}%")
        except grpc.RpcError as error:
            lines.append(f"{member.target.name:<12} {error.code().name}: {error.details()}")
    return lines
