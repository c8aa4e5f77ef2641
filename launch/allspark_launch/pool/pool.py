"""A pool file: the groups of a pool and their options."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from allspark_server import access

from ..machine.topology import Topology
from ..options import GroupOptions
from ..tables import Location, Table
from . import layout as layouts
from .units import socket_address

#: drain_limit of members that do not set it, in seconds
DRAIN_SECONDS = 60.0


@dataclass
class Pool:
    """The content of a pool file. `user`: whom the groups run as. `members`: the options of each group, by name.
    `layout`, `optimize`: "" where the file has none. `places`: the members' places in the file.
    """

    name: str
    user: str
    members: dict[str, GroupOptions]
    layout: str = ""
    optimize: str = ""
    places: dict[str, Location] = field(default_factory=dict)

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

    def with_layout(self, saved: layouts.SavedLayout, machine: Topology) -> Pool:
        """The pool in which members with the layout "nodes" are replaced by one member per NUMA node. Raises ValueError
        with the name of a member for which that is not possible.
        """
        result = replace(self, members={}, places={})
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
        result._check_addresses()
        return result

    def addresses(self, member: str) -> list[str]:
        """The addresses of a member: its own, and always a Unix socket, for the commands of the pool."""
        own = self.members[member].address
        return own if any(map(access.is_unix, own)) else [*own, socket_address(self.name, member)]

    def configs(self) -> dict[str, str]:
        """File name -> content of the members' configuration files."""
        return {f"{name}.json": json.dumps(replace(member, address=self.addresses(name)).changed(), indent=2) + "\n"
                for name, member in self.members.items()}


CHOICES = {"layout": layouts.LAYOUTS, "optimize": layouts.PURPOSES}
_KEYS = ("name", "user", *CHOICES, "defaults", "member")


def _is_word(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
