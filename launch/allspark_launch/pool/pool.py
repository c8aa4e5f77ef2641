"""A pool file: the groups of a pool and their options."""
from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from allspark_server import access

from ..group.http_server import HttpOptions
from ..machine.topology import Topology
from ..options import UNIT_KEY, GroupOptions
from ..tables import Location, Table
from . import http, layout as layouts
from .units import COLLECTOR, is_url, running_part, socket_address, unit_files

#: whom the groups run as if the file does not say
USER = "allspark"
#: drain_limit of members that do not set it, in seconds
DRAIN_SECONDS = 60.0


@dataclass
class Pool:
    """The content of a pool file. `user`: whom the groups run as. `members`: the options of each group, by name.
    `layout`, `optimize`, `collector`: "" where the file has none. `environments`: the environment variables of each
    group. `places`: the members' places in the file. `http`: of the HTTP server in front of them, if it has one.
    """

    name: str
    user: str
    members: dict[str, GroupOptions]
    layout: str = ""
    optimize: str = ""
    collector: str = ""
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    places: dict[str, Location] = field(default_factory=dict)
    http: HttpOptions | None = None

    @classmethod
    def from_file(cls, path: str) -> Pool:
        """Reads a pool file. ValueError names file, line and key of an error."""
        table = Table.read(path)
        values, where = table.values, table.location()
        for key in values:
            if key not in _KEYS:
                raise ValueError(f"{where.at(key)}: unknown key {key!r}; known: {', '.join(_KEYS)}")
        # Both are copied into units, where other characters (a line break, for example) could become a setting.
        for key in ("name", "user"):
            if not _is_word(values.get(key, "default")):
                raise ValueError(f"{where.at(key)}: {key} {values[key]!r} must be of letters, digits, '.', '_' and '-'")
        for key, known in CHOICES.items():
            if values.get(key, known[0]) not in known:
                raise ValueError(f"{where.at(key)}: {key} is {values[key]!r}; allowed: {', '.join(known)}")
        defaults = values.get("defaults", {})
        if not isinstance(defaults, dict):
            raise ValueError(f"{where.at('defaults')}: defaults is {defaults!r}; it must be a table, [defaults]")
        place = where.inside("defaults", name="defaults")
        GroupOptions.from_table(_without_own(defaults), place)
        environment = _environment(defaults, place)
        collector = values.get("collector", "")
        if collector and not is_url(collector):
            raise ValueError(f"{where.at('collector')}: collector is {collector!r}; it must be a URL such as "
                             "http://collector:4318")
        entries = values.get("member", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{where.at('member')}: member is {entries!r}; it must be a list of tables, [[member]] in "
                             "TOML")
        members: dict[str, GroupOptions] = {}
        pool = cls(values.get("name", "default"), values.get("user", USER), members, values.get("layout", ""),
                   values.get("optimize", ""), collector)
        for i, entry in enumerate(entries):
            name = entry.get("name", str(i))
            place = where.inside("member", i)
            if not _is_word(name) or name in members:
                raise ValueError(f"{place.at('name')}: member name {name!r} must be unique, of letters, digits, '.', "
                                 "'_' and '-'")
            place = where.inside("member", i, name=f"member {name!r}")
            given = {"drain_limit": DRAIN_SECONDS, **_without_own(defaults), **_without_own(entry)}
            members[name] = GroupOptions.from_table(given, place)
            pool.environments[name] = environment | _environment(entry, place)
            pool.places[name] = place
        if not members:
            raise ValueError(f"{path} has no [[member]]")
        if "http" in values:
            pool.http = http.read(values["http"], where.inside("http", name="http"))
        pool._check_addresses()
        for name, member in members.items():
            try:
                member.addresses()
            except ValueError as error:
                raise ValueError(f"{pool.places[name].at('address')}: {error}") from None
        return pool

    def _check_addresses(self) -> None:
        taken: dict[str, str] = {self.http.address: "http"} if self.http is not None else {}
        for name in self.members:
            for address in self.addresses(name):
                if address in taken:
                    raise ValueError(f"{self.places[name].at('address')}: members {taken[address]!r} and {name!r} both "
                                     f"have address {address}")
                taken[address] = name

    def with_layout(self, saved: layouts.SavedLayout, machine: Topology) -> Pool:
        """The pool in which members with the layout "nodes" are replaced by one member per NUMA node. Raises ValueError
        with the name of a member for which that is not possible.
        """
        result = replace(self, members={}, places={}, environments={})
        layout = saved.flags.get("layout") or self.layout or layouts.LAYOUTS[0]
        for name, member in self.members.items():
            parts = {name: member}
            if layouts.uses_layout(member) and layout != "wide":
                try:
                    layouts.check(member)
                    if saved.layout_of(name, layout) == "nodes" and len(machine.default_nodes) > 1:
                        parts = layouts.expand(name, member, machine)
                except ValueError as error:
                    raise ValueError(f"{self.places[name].at()}: layout is {layout}: {error}") from None
            for part, options in parts.items():
                if part in result.members or (part != name and part in self.members):
                    raise ValueError(f"{self.places[name].at('name')}: layout is {layout}: {part!r} is the name of "
                                     "another member")
                result.members[part], result.places[part] = options, self.places[name]
                result.environments[part] = self.environments.get(name, {})
        result._check_addresses()
        return result

    def check_cpus(self, machine: Topology) -> None:
        """Raises ValueError if members need the same CPUs of a node. It names both."""
        cores = {node.id: len(node.cores) for node in machine.nodes}
        users: dict[int, list[str]] = {}
        wanted: dict[int, int] = {}
        for name, member in self.members.items():
            if member.share_cpus or member.gpus:
                continue
            nodes = machine.default_nodes if member.numa_nodes is None else member.numa_nodes
            for i, node in enumerate(nodes[:member.ranks or None]):
                ranks = len(range(i, max(member.ranks, len(nodes)), len(nodes)))
                users.setdefault(node, []).append(name)
                wanted[node] = wanted.get(node, 0) + (ranks * member.cpus_per_rank or cores.get(node, 0) or 1)
                if len(users[node]) > 1 and wanted[node] > cores.get(node, 0):
                    threads = f"together they have {wanted[node]} threads for its {cores.get(node, 0)} cores"
                    raise ValueError(
                        f"{self.places[name].at('numa_nodes')}: members {' and '.join(map(repr, users[node]))} use the "
                        f"CPUs of NUMA node {node}: {threads}. Give each its own numa_nodes, set cpus_per_rank so that "
                        "they fit together (without it a group takes all cores), or set share_cpus in all but one")

    def addresses(self, member: str) -> list[str]:
        """The addresses of a member: its own, and always a Unix socket, for the commands of the pool."""
        own = self.members[member].address
        return own if any(map(access.is_unix, own)) else [*own, socket_address(self.name, member)]

    def configs(self) -> dict[str, str]:
        """File name -> content of the members' configuration files."""
        return {f"{name}.json": json.dumps(replace(member, address=self.addresses(name)).changed(), indent=2) + "\n"
                for name, member in self.members.items()}


    def environment(self, member: str) -> dict[str, str]:
        """The environment variables of a member."""
        collector = {COLLECTOR: self.collector} if self.collector else {}
        return collector | self.environments.get(member, {})

    def environment_file(self, member: str) -> str:
        """The same as lines of a systemd EnvironmentFile."""
        quoted = ((name, re.sub(r'([\\"`$])', r"\\\1", value)) for name, value in self.environment(member).items())
        return "".join(f'{name}="{value}"\n' for name, value in quoted)

    def unit_digest(self, member: str, config_dir: Path) -> str:
        """A digest of what a member's unit and its environment say. A member with another one needs a restart."""
        unit = unit_files(self, config_dir)[f"allspark-{self.name}@.service"]
        text = running_part(unit) + self.environment_file(member)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


CHOICES = {"layout": layouts.LAYOUTS, "optimize": layouts.PURPOSES}
_KEYS = ("name", "user", *CHOICES, "collector", "http", "defaults", "member")
#: keys of members that are no options of their groups
_OWN_KEYS = ("name", "environment")


def _without_own(table: dict) -> dict:
    return {key: value for key, value in table.items() if key not in _OWN_KEYS}


def _environment(table: dict, where: Location) -> dict[str, str]:
    """The environment of a table. Raises ValueError for what a unit cannot have."""
    given = table.get("environment", {})
    if not isinstance(given, dict):
        raise ValueError(f"{where.at('environment')}: environment is {given!r}; it must be a table of text, such as "
                         '{ HTTPS_PROXY = "http://proxy:3128" }')
    for name, value in given.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name == UNIT_KEY:
            raise ValueError(f"{where.at('environment', name)}: environment: {name!r} is not the name of a variable")
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"{where.at('environment', name)}: environment: {name} is {value!r}; it must be text of "
                             "one line")
    return given


def _is_word(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
