"""`allspark pool`: groups as systemd services, from one file."""
from __future__ import annotations

import argparse
import json
import logging
import pwd
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from allspark_server import access

from ..group.serving import RELOADABLE
from ..machine.topology import Topology, read_topology
from ..options import GroupOptions
from ..tables import Location, Table
from . import layout as layouts, members as views
from .members import Member, Target, add_target_options, pool_targets
from .units import CONFIG_DIR, TEMPLATES, UNIT_DIR, socket_address, systemctl, target_name, unit_files, unit_name

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0            # drain_limit of members that do not say
_LOOK_SECONDS = 0.5
_BACK_SECONDS = 3600.0          # that a member may take to load its models


@dataclass
class Pool:
    """A pool file: its name, the user its groups run as, and the options of each member. layout, optimize: as the file
    says, "" where it does not. places: where members stand in it.
    """

    name: str
    user: str
    members: dict[str, GroupOptions]
    layout: str = ""
    optimize: str = ""
    places: dict[str, Location] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str) -> Pool:
        """Raises ValueError naming what is wrong in the file, and where."""
        table = Table.read(path)
        values, where = table.values, table.location()
        for key in values:
            if key not in _KEYS:
                raise ValueError(f"{where.at(key)}: unknown key {key!r}; known: {', '.join(_KEYS)}")
        # Both go into units as they are: anything else, a line break above all, could become a setting there.
        for key in ("name", "user"):
            if not _is_word(values.get(key, "default")):
                raise ValueError(f"{where.at(key)}: {key} {values[key]!r} must be of letters, digits, '.', '_' and '-'")
        for key, known in _CHOICES.items():
            if values.get(key, known[0]) not in known:
                raise ValueError(f"{where.at(key)}: {key} is {values[key]!r}; allowed: {', '.join(known)}")
        defaults = values.get("defaults", {})
        if not isinstance(defaults, dict):
            raise ValueError(f"{where.at('defaults')}: defaults is {defaults!r}; it must be a table, [defaults]")
        GroupOptions.from_table(defaults, where.inside("defaults", name="defaults"))
        entries = values.get("member", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{where.at('member')}: member is {entries!r}; it must be a list of tables, [[member]] in "
                             "TOML")
        members: dict[str, GroupOptions] = {}
        pool = cls(values.get("name", "default"), values.get("user", "root"), members, values.get("layout", ""),
                   values.get("optimize", ""))
        for i, entry in enumerate(entries):
            name = entry.get("name", str(i))
            place = where.inside("member", i)
            if not _is_word(name) or name in members:
                raise ValueError(f"{place.at('name')}: member name {name!r} must be unique, of letters, digits, '.', "
                                 "'_' and '-'")
            place = where.inside("member", i, name=f"member {name!r}")
            own = {key: value for key, value in entry.items() if key != "name"}
            members[name] = GroupOptions.from_table({"drain_limit": DRAIN_SECONDS, **defaults, **own}, place)
            pool.places[name] = place
        if not members:
            raise ValueError(f"{path} has no [[member]]")
        pool._check_addresses()
        for name, member in members.items():
            try:
                member.addresses()
            except ValueError as error:
                raise ValueError(f"{pool.places[name].at('address')}: {error}") from None
        return pool

    def _check_addresses(self) -> None:
        taken: dict[str, str] = {}
        for name in self.members:
            for address in self.addresses(name):
                if address in taken:
                    raise ValueError(f"{self.places[name].at('address')}: members {taken[address]!r} and {name!r} both "
                                     f"have address {address}")
                taken[address] = name

    def laid_out(self, kept: layouts.Kept, machine: Topology) -> Pool:
        """The pool with a member for each node where its layout is so. Raises ValueError naming what cannot be."""
        found = replace(self, members={}, places={})
        layout = kept.said.get("layout") or self.layout or layouts.LAYOUTS[0]
        for name, member in self.members.items():
            parts = {name: member}
            if layouts.is_open(member) and layout != "wide":
                try:
                    layouts.check(member)
                    if kept.layout_of(name, layout) == "nodes" and len(machine.default_nodes) > 1:
                        parts = layouts.expand(name, member, machine)
                except ValueError as error:
                    raise ValueError(f"{self.places[name].at()}: layout is {layout}: {error}") from None
            for part, options in parts.items():
                if part in found.members or (part != name and part in self.members):
                    raise ValueError(f"{self.places[name].at('name')}: layout is {layout}: {part!r} is the name of "
                                     "another member")
                found.members[part], found.places[part] = options, self.places[name]
        found._check_addresses()
        return found

    def addresses(self, member: str) -> list[str]:
        """Where a member serves: as it says, and on a Unix socket in any case, for who runs the pool."""
        own = self.members[member].address
        return own if any(map(access.is_unix, own)) else [*own, socket_address(self.name, member)]

    def configs(self) -> dict[str, str]:
        """File name -> content of the members' config files."""
        return {f"{name}.json": json.dumps(replace(member, address=self.addresses(name)).changed(), indent=2) + "\n"
                for name, member in self.members.items()}


_CHOICES = {"layout": layouts.LAYOUTS, "optimize": layouts.PURPOSES}
_KEYS = ("name", "user", *_CHOICES, "defaults", "member")


def installed_pool(options: argparse.Namespace) -> Pool:
    """The file's pool, with the layout that was decided when it was installed."""
    pool = Pool.from_file(options.config)
    return pool.laid_out(layouts.Kept.read(pool.name, options.config_dir), read_topology())


def _is_word(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None


def add_commands(command) -> None:
    """`allspark pool` and `allspark top`, for build_parser."""
    p = command("pool", lambda options: options.act(options), "groups as systemd services, from one file", epilog="""\
  allspark pool install --config pool.toml --now      writes the units, enables and starts them
  allspark pool apply --config pool.toml              makes the running pool what the edited file says
  allspark pool restart --rolling --config pool.toml  one member after the other, each once its requests have ended
  allspark pool status --config pool.toml             health, models and load of the members

What has changed in the file counts: members that are new are started, those that are gone are stopped, those whose
tokens, drain_limit or log_level changed are told, and others are restarted, one after the other. A restart waits until
the requests of the member have ended, as long as that takes: none is ended by it.

layout = "auto" in the file (or --layout auto) measures each member without numa_nodes, with its model, as one wide
group and as a group on each NUMA node (NAME-NODE, ports counted up), for optimize = "latency" (one client) or
"throughput" (as many as are computed at once), before the pool starts. What was decided is kept in the configuration
directory and holds until --measure, or until a pool that does not run is applied with another model, purpose or
machine.

A commented example of pool.toml: """ + str(TEMPLATES / "pool.toml"))
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, act, summary: str) -> argparse.ArgumentParser:
        q = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        q.set_defaults(act=act)
        return q

    def of_units(q: argparse.ArgumentParser) -> None:
        q.add_argument("--config", required=True, metavar="FILE", help="pool.toml")
        q.add_argument("--unit-dir", default=UNIT_DIR, metavar="DIR", help="default %(default)s")
        q.add_argument("--config-dir", default=CONFIG_DIR, metavar="DIR", help="default %(default)s")

    def of_layout(q: argparse.ArgumentParser) -> None:
        q.add_argument("--layout", choices=layouts.LAYOUTS, default="",
                       help="of members without numa_nodes: a wide group with a rank on each NUMA node (default), a "
                            "group on each of them, or what is measured to be better; kept until it is said anew")
        q.add_argument("--optimize", "--for", choices=layouts.PURPOSES, default="",
                       help="what auto measures (default throughput)")
        q.add_argument("--measure", action="store_true", help="measure again what auto has decided before")

    q = action("install", _install, "write the systemd units of a pool")
    of_units(q)
    of_layout(q)
    q.add_argument("--dry-run", action="store_true", help="print what would be written")
    q.add_argument("--now", action="store_true", help="enable and start them, too")
    q = action("apply", _apply, "make the running pool what the edited file says")
    of_units(q)
    of_layout(q)
    q.set_defaults(dry_run=False)
    q = action("uninstall", _uninstall, "stop a pool and remove its units; what clients installed stays known")
    of_units(q)
    q = action("drain", _drain, "have members take no new requests, and wait until theirs have ended")
    add_target_options(q)
    q.add_argument("members", nargs="*", metavar="MEMBER", help="default: all")
    q.add_argument("--undo", action="store_true", help="have them take requests again")
    q.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="wait no longer than this")
    q = action("restart", _restart, "restart members")
    q.add_argument("--config", required=True, metavar="FILE", help="pool.toml")
    q.add_argument("--config-dir", default=CONFIG_DIR, metavar="DIR", help="default %(default)s")
    q.add_argument("members", nargs="*", metavar="MEMBER", help="default: all")
    q.add_argument("--rolling", action="store_true",
                   help="one after the other, each once its requests have ended, as long as that takes")
    q = action("status", views.status, "health, models and load of the members")
    add_target_options(q)
    p = command("top", views.top, "live view of a pool's load")
    add_target_options(p)
    p.add_argument("--once", action="store_true", help="print one table and stop")
    p.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")


# --- files -------------------------------------------------------------------------------------------------------


def _files(options: argparse.Namespace, pool: Pool) -> dict[Path, str]:
    """All that an installed pool consists of."""
    configs = Path(options.config_dir, pool.name)
    return ({Path(options.unit_dir, name): text for name, text in unit_files(pool, Path(options.config_dir)).items()}
            | {configs / name: text for name, text in pool.configs().items()})


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(text)
        new.chmod(0o644)        # names of files with secrets, no secrets
        new.replace(path)
        print(f"wrote {path}")


def _check_user(pool: Pool) -> None:
    try:
        pwd.getpwnam(pool.user)
    except KeyError:
        print(f"there is no user {pool.user!r} yet: useradd --system {pool.user}")


def _laid_out(options: argparse.Namespace) -> tuple[Pool, layouts.Kept]:
    """The file's pool with the layout that is said, or measured now."""
    pool = Pool.from_file(options.config)
    kept = layouts.Kept.read(pool.name, options.config_dir)
    for key in _CHOICES:
        flag, own = getattr(options, key), getattr(pool, key)
        if flag and own not in ("", flag):
            raise ValueError(f"{options.config}: {key} is {own!r}, but --{key} says {flag!r}; leave one of them out")
        if flag:
            kept.said[key] = flag
        elif own:
            kept.said.pop(key, None)
    machine = read_topology()
    pool.laid_out(kept, machine)        # what is wrong is told before anything is measured
    if (kept.said.get("layout") or pool.layout) == "auto":
        _decide(options, pool, kept, machine)
    elif options.measure:
        raise ValueError("--measure is for layout = \"auto\"")
    kept.decisions = {name: decision for name, decision in kept.decisions.items() if name in pool.members}
    return pool.laid_out(kept, machine), kept


def _decide(options: argparse.Namespace, pool: Pool, kept: layouts.Kept, machine: Topology) -> None:
    """Finds a layout for each member whose own is to be chosen; says what and why."""
    purpose = kept.said.get("optimize") or pool.optimize or layouts.PURPOSES[0]
    known = [] if options.measure else list(kept.decisions.values())
    for name, member in pool.members.items():
        if not layouts.is_open(member):
            continue
        if len(machine.default_nodes) < 2:
            print(f"{name}: one wide group: nothing to measure, this machine has one NUMA node with CPUs and memory")
            continue
        wanted, before = layouts.subject(member, machine, purpose), kept.decisions.get(name)
        same = next((decision for decision in known if decision.subject == wanted), None)
        if same:
            kept.decisions[name] = before = same
            print(f"{name}: layout {before.layout}, as measured at {before.time}: {before.why}")
            continue
        running = [unit for unit in _installed(options, pool) if _is_active(pool, unit)]
        if before and running and not options.measure:
            print(f"{name}: layout {before.layout}, as measured at {before.time} for other models, another purpose or "
                  f"machine; to measure again, stop the pool (systemctl stop {target_name(pool.name)}) and apply it")
            continue
        if running:
            raise ValueError(f"member {name!r} cannot be measured while the pool runs ({', '.join(running)}): stop it "
                             f"(systemctl stop {target_name(pool.name)}), or say which layout")
        if options.dry_run and not options.measure:
            raise ValueError(f"nothing was decided for member {name!r} yet, and --dry-run measures with --measure only")
        if not member.models:
            raise ValueError(f"{pool.places[name].at()}: layout auto measures with a member's models; it names none")
        kept.decisions[name] = _measured(name, member, machine, purpose, wanted)
        known.append(kept.decisions[name])


def _measured(name: str, member: GroupOptions, machine: Topology, purpose: str, wanted: dict) -> layouts.Decision:
    from ..bench import layouts as bench
    found = bench.measure(layouts.candidates(member, machine), purpose,
                          lambda text: print(f"{name}: {text}", flush=True))
    print(bench.table(found))
    layout, why = bench.choose(found, purpose)
    print(f"{name}: layout {layout}, for {purpose}: {why}")
    return layouts.Decision(layout, why, wanted, time.strftime("%Y-%m-%d %H:%M"), [m.to_dict() for m in found])


def _installed(options: argparse.Namespace, pool: Pool) -> list[str]:
    return [path.stem for path in sorted(Path(options.config_dir, pool.name).glob("*.json"))]


def _install(options: argparse.Namespace) -> int:
    pool, kept = _laid_out(options)
    files = _files(options, pool)
    if options.dry_run:
        print("\n".join(f"# {path}\n{text}" for path, text in files.items()))
        return 0
    _check_user(pool)
    kept.write()
    _write(files)
    if options.now:
        systemctl("daemon-reload")
        systemctl("enable", *(unit_name(pool.name, member) for member in pool.members), target_name(pool.name))
        systemctl("start", target_name(pool.name))
    else:
        print(f"start the pool with:\n  systemctl daemon-reload && systemctl enable --now {target_name(pool.name)}")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    pool = Pool.from_file(options.config)
    configs = Path(options.config_dir, pool.name)
    units = [unit_name(pool.name, member) for member in _installed(options, pool)]
    systemctl("disable", "--now", target_name(pool.name), *units, check=False)
    for path in [*_files(options, pool), *configs.glob("*.json"), layouts.path_of(pool.name, options.config_dir)]:
        if path.exists():
            path.unlink()
            print(f"removed {path}")
    if configs.is_dir() and not any(configs.iterdir()):
        configs.rmdir()
    systemctl("daemon-reload")
    return 0


def _apply(options: argparse.Namespace) -> int:
    pool, kept = _laid_out(options)
    files = _files(options, pool)
    configs = Path(options.config_dir, pool.name)
    before = {path.stem: path.read_text() for path in configs.glob("*.json")}
    template = Path(options.unit_dir, f"allspark-{pool.name}@.service")
    same_unit = template.exists() and template.read_text() == files[template]
    gone = sorted(set(before) - set(pool.members))
    _check_user(pool)
    kept.write()
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
        if old is None or not _is_active(pool, member):
            systemctl("start", unit_name(pool.name, member))
            print(f"{member}: started")
        elif not same_unit or _without(now, RELOADABLE) != _without(old, RELOADABLE):
            restart.append(member)
        else:
            systemctl("reload", unit_name(pool.name, member))
            print(f"{member}: {'as it was' if now == old else 'told of what changed'}")
    return _roll(pool, restart)


def _without(table: dict, keys: Iterable[str]) -> dict:
    return {key: value for key, value in table.items() if key not in keys}


def _is_active(pool: Pool, member: str) -> bool:
    return systemctl("is-active", unit_name(pool.name, member), check=False).strip() in ("active", "reloading")


# --- members that run --------------------------------------------------------------------------------------------


def _chosen(found: Iterable[Target], names: list[str]) -> list[Target]:
    found = list(found)
    for name in names:
        if name not in (target.name for target in found):
            raise ValueError(f"there is no member {name!r}; members: {', '.join(target.name for target in found)}")
    return [target for target in found if not names or target.name in names]


def _drain(options: argparse.Namespace) -> int:
    left = 0
    chosen = _chosen(views.targets(options), options.members)
    for target in chosen:       # all at once: no new request goes to one that is drained next
        with Member(target) as member:
            _call(member.drain, target, options.undo)
    for target in chosen if not options.undo else ():
        with Member(target) as member:
            left += _wait_until_empty(member, options.limit)
    return 1 if left else 0


def _call(method, target: Target, *arguments):
    import grpc
    try:
        return method(*arguments)
    except grpc.RpcError as error:
        raise RuntimeError(f"member {target.name!r} at {target.address}: {error.code().name}: {error.details()}"
                           ) from None


def _wait_until_empty(member: Member, limit: float = float("inf")) -> int:
    """Waits until the requests of a draining member have ended, and says so; returns how many have not."""
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


def _restart(options: argparse.Namespace) -> int:
    pool = installed_pool(options)
    names = [target.name for target in _chosen(pool_targets(pool), options.members)]
    if options.rolling:
        return _roll(pool, names)
    systemctl("restart", *(unit_name(pool.name, name) for name in names))
    return 0


def _roll(pool: Pool, names: list[str]) -> int:
    """Restarts members one after the other. Each stops once its requests have ended; the next one follows when it
    serves again. Stops at the first that does not come back.
    """
    for name in names:
        target = next(target for target in pool_targets(pool) if target.name == name)
        with Member(target) as member:
            try:
                _call(member.drain, target)
            except RuntimeError as error:       # it is down: nothing runs there
                logger.warning("%s", error)
            else:
                _wait_until_empty(member)
        systemctl("restart", unit_name(pool.name, name))
        target = next(target for target in pool_targets(pool) if target.name == name)
        deadline = time.monotonic() + _BACK_SECONDS
        with Member(target) as member:
            while not member.serves():
                if time.monotonic() > deadline or not _is_active(pool, name):
                    raise RuntimeError(f"member {name!r} does not serve after its restart: see journalctl -u "
                                       f"{unit_name(pool.name, name)}; those after it were left as they are")
                time.sleep(_LOOK_SECONDS)
        print(f"{name}: restarted, and serves")
    return 0
